"""Our network as a policy of Stable-Baselines3's PPO, for `training_throughput.py`.

Same encoder, prior and initialisation; the critic without its GRU, since Stable-Baselines3's PPO is not recurrent.
"""

import time
from typing import Any

import gymnasium
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.distributions import CategoricalDistribution
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import DummyVecEnv
from torch import Tensor

from vidur_ppo_plugin.learn.features import build_features
from vidur_ppo_plugin.policy.network import ActorCritic, NetworkShape
from vidur_ppo_plugin.train.config import TrainConfig


class SetPolicy(ActorCriticPolicy):
    """Takes the flat observation apart: features of replicas and of the request, the prior's logits."""

    def __init__(self, *args: Any, shape: NetworkShape, **options: Any) -> None:
        self._network_shape = shape
        super().__init__(*args, **options)

    def _build(self, lr_schedule: Any) -> None:
        self.network = ActorCritic(self._network_shape, seed=0)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=lr_schedule(1), eps=1e-5)

    def _parts(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Encoded states, and the prior's logits."""
        size, shape = int(self.action_space.n), self._network_shape  # type: ignore[attr-defined]
        widths = [size * shape.num_replica_features, shape.num_request_features, size, size]
        replicas, request, prior, _ = torch.split(obs, widths, dim=1)
        return self.network.encode(replicas.reshape(len(obs), size, -1), request), prior

    def get_distribution(self, obs: Tensor) -> CategoricalDistribution:
        """Of the actions."""
        encoded, prior = self._parts(obs)
        logits = self.network.logits(encoded, prior)
        return CategoricalDistribution(logits.shape[1]).proba_distribution(logits)

    def predict_values(self, obs: Tensor) -> Tensor:
        """Of states."""
        return self.network.values(self._parts(obs)[0])[0][:, None]

    def forward(self, obs: Tensor, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Actions, values and log-probabilities."""
        encoded, prior = self._parts(obs)
        logits = self.network.logits(encoded, prior)
        distribution = CategoricalDistribution(logits.shape[1]).proba_distribution(logits)
        actions = distribution.get_actions(deterministic=deterministic)
        return actions, self.network.values(encoded)[0][:, None], distribution.log_prob(actions)

    def evaluate_actions(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Values, log-probabilities and entropies."""
        encoded, prior = self._parts(obs)
        logits = self.network.logits(encoded, prior)
        distribution = CategoricalDistribution(logits.shape[1]).proba_distribution(logits)
        return self.network.values(encoded)[0][:, None], distribution.log_prob(actions), distribution.entropy()


class RolloutTimes(BaseCallback):
    """Seconds of each rollout."""

    def __init__(self) -> None:
        super().__init__()
        self.rollout_s: list[float] = []

    def _on_rollout_start(self) -> None:
        self._began_s = time.perf_counter()

    def _on_rollout_end(self) -> None:
        self.rollout_s.append(time.perf_counter() - self._began_s)

    def _on_step(self) -> bool:
        return True


def build_model(config: TrainConfig) -> PPO:
    """PPO with the network, environments, batch and learning parameters of a training configuration."""
    torch.set_num_threads(1)
    flags, features = config.flags, build_features(config.flags)
    shape = NetworkShape(
        num_replica_features=features.num_replica_features,
        num_request_features=features.num_request_features,
        feature_projection_dim=flags.feature_projection_dim,
        hidden_size=flags.hidden_size,
        critic_gru_layers=0,
    )
    low, high = config.mixture[0].load
    loads = [low + (high - low) * index / max(1, config.environments - 1) for index in range(config.environments)]
    episode = config.episode_rollouts * flags.rollout_len

    def make(load: float) -> Any:
        return lambda: gymnasium.make(
            "vidur_ppo/Routing-v0",
            scenario=config.mixture[0].scenario,
            num_requests=episode,
            load=load,
            flatten=True,
            backlog_weight=flags.backlog_weight,
            latency_power=flags.latency_power,
            prior=flags.prior,
            prior_weight=flags.prior_weight,
        )

    return PPO(
        SetPolicy,
        DummyVecEnv([make(load) for load in loads]),
        learning_rate=flags.lr,
        n_steps=flags.rollout_len,
        batch_size=flags.minibatch_size,
        n_epochs=flags.epochs,
        gamma=flags.gamma,
        clip_range=flags.clip_ratio,
        max_grad_norm=flags.max_grad_norm,
        seed=config.seed,
        policy_kwargs={"shape": shape},
    )
