"""The agent: observe, decide, learn. Knows neither Vidur nor vLLM; whoever runs it brings snapshots and rewards."""

import copy
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vidur_ppo_plugin.flags import PPOModularFlags
from vidur_ppo_plugin.policy.network import actor_of
from vidur_ppo_plugin.policy.policy import Observed, Observer, Policy
from vidur_ppo_plugin.policy.temperature import TemperatureController
from vidur_ppo_plugin.routing.features import FeatureTable, Float32Array, Observation
from vidur_ppo_plugin.routing.snapshot import ClusterSnapshot, RequestInfo

from .batch import Shards
from .ppo import PPO, Coefficients
from .rollout import Decision, RolloutBuffer
from .schedules import KlAdaptiveLearningRate, KlController, Schedule
from .shard import LocalShards


@dataclass(frozen=True, kw_only=True)
class Controllers:
    """Schedules and controllers: the coefficients that change from update to update."""

    temperature: TemperatureController
    entropy_coef: Schedule
    learning_rate: Schedule
    epsilon: Schedule
    kl: KlController | None = None
    adaptive_lr: KlAdaptiveLearningRate | None = None
    kl_ref_coef: Schedule | None = None
    bc_coef: Schedule | None = None


class Agent:
    """A policy that decides placements one by one and learns from their rewards."""

    def __init__(
        self,
        *,
        observer: Observer,
        ppo: PPO,
        controllers: Controllers,
        flags: PPOModularFlags,
    ) -> None:
        self.ppo = ppo
        self.controllers = controllers
        self.flags = flags
        self._buffer = RolloutBuffer(flags.rollout_len)
        #: What decides.
        self.policy = Policy(
            actor_of(ppo.network),
            observer.features,
            observer.prior,
            random.Random(flags.seed),
            max_candidates=flags.max_candidates,
        )
        #: Whether `serve` has set who decides: then the network only learns.
        self.serves = False
        self.num_decisions = 0
        self._epsilon = 0.0
        self.update_schedules()

    @property
    def features(self) -> FeatureTable:
        """The feature table of the policy."""
        return self.policy.features

    @property
    def awaits_reward(self) -> bool:
        """Whether the newest decision has no reward yet."""
        return self._buffer.awaits_reward

    @property
    def temperature(self) -> float:
        """Temperature of the sampled policy."""
        return self.controllers.temperature.temperature

    def observe(
        self, snapshot: ClusterSnapshot, request: RequestInfo, allowed: NDArray[np.bool_] | None = None
    ) -> Observed:
        """The policy's observation of a request; `allowed`: which replicas may be chosen, None for all."""
        return self.policy.observe(snapshot, request, allowed)

    def decide(
        self, observation: Observation, prior_logits: Float32Array, chosen: NDArray[np.intp] | None = None
    ) -> int:
        """The replica for the observed request: sampled while learning, greedy in inference and with `serve`."""
        policy = self.policy
        # As a list: from here on Python is faster than numpy for a few dozen replicas.
        logits: list[float] = policy.logits(observation, prior_logits).tolist()
        is_greedy = self.flags.inference_only or self.serves
        action = policy.best(logits) if is_greedy else policy.sample(logits, self.temperature, self._epsilon)
        if not self.flags.inference_only:
            self._buffer.add(
                Decision(
                    observation=observation,
                    prior_logits=prior_logits,
                    action=action,
                    temperature=self.temperature,
                    epsilon=self._epsilon,
                )
            )
        self.num_decisions += 1
        return action if chosen is None else int(chosen[action])

    def settle(self, reward: float, action_rewards: NDArray[np.float64] | None = None) -> None:
        """Give the newest decision its reward, and the rewards of the other actions where they are known."""
        self._buffer.settle(reward, action_rewards)

    @property
    def is_ready_to_learn(self) -> bool:
        """Whether a whole rollout has been made and settled."""
        return self._buffer.is_full

    def learn(
        self, next_observation: Observation | None, *, metric: float | None, pressure: tuple[float, float]
    ) -> dict[str, float]:
        """Update on the rollout; `metric` (latency) and `pressure` (load, latency) steer the temperature."""
        shards = LocalShards(self.ppo, [self._buffer.take(next_observation)])
        return self.learn_from(shards, metric=metric, pressure=pressure)

    def learn_from(self, shards: Shards, *, metric: float | None, pressure: tuple[float, float]) -> dict[str, float]:
        """Update on decisions that this policy has made, wherever they are."""
        rewards = np.concatenate([rewards for contents in shards.contents for _, rewards in contents.rewards])
        coefficients = self._coefficients()
        metrics = self.ppo.update(shards, coefficients)
        if not self.serves:
            self._take_weights()
        metrics |= {
            "reward_mean": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "reward_min": float(rewards.min()),
            "reward_max": float(rewards.max()),
            "total_reward": float(rewards.sum()),
            "learning_rate": coefficients.learning_rate,
            "entropy_coef": coefficients.entropy_coef,
            "kl_coef": coefficients.kl_coef,
            "epsilon": self._epsilon,
            "temperature": self.temperature,
            "temp_is_pulsing": float(self.controllers.temperature.is_pulsing),
        }
        self._adapt(metrics, metric, pressure)
        return metrics

    def _coefficients(self) -> Coefficients:
        controllers, step = self.controllers, self.num_decisions
        rate = controllers.learning_rate.value(step)
        if controllers.adaptive_lr is not None:
            rate = controllers.adaptive_lr.lr
        return Coefficients(
            learning_rate=rate,
            entropy_coef=controllers.entropy_coef.value(step),
            kl_coef=self.flags.kl_coef if controllers.kl is None else controllers.kl.kl_coef,
            kl_ref_coef=0.0 if controllers.kl_ref_coef is None else controllers.kl_ref_coef.value(step),
            bc_coef=0.0 if controllers.bc_coef is None else controllers.bc_coef.value(step),
        )

    def _adapt(self, metrics: dict[str, float], metric: float | None, pressure: tuple[float, float]) -> None:
        controllers = self.controllers
        if controllers.kl is not None:
            controllers.kl.update(metrics["approx_kl"])
        if controllers.adaptive_lr is not None:
            controllers.adaptive_lr.update(metrics["approx_kl"])
        controllers.temperature.update(
            metric=metric,
            entropy=metrics["entropy"],
            load_pressure=pressure[0],
            latency_pressure=pressure[1],
            gain_over_reference=metrics.get("gain_over_prior"),
        )
        self.update_schedules()

    def update_schedules(self) -> None:
        """Take over what depends on the number of decisions."""
        self._epsilon = 0.0 if self.flags.inference_only else self.controllers.epsilon.value(self.num_decisions)

    @property
    def epsilon(self) -> float:
        """Share of decisions made at random."""
        return self._epsilon

    @property
    def num_settled(self) -> int:
        """Decisions of the present rollout that have their reward."""
        return len(self._buffer) - int(self._buffer.awaits_reward)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next run depends on; an open rollout is not part of it."""
        controllers = self.controllers
        return {
            "ppo": self.ppo.state_dict(),
            "rng": list(self.policy.rng.getstate()),
            "num_decisions": self.num_decisions,
            "temperature": controllers.temperature.state_dict(),
            "kl": None if controllers.kl is None else controllers.kl.state_dict(),
            "adaptive_lr": None if controllers.adaptive_lr is None else controllers.adaptive_lr.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken, at the start of a run."""
        controllers = self.controllers
        self.ppo.load_state_dict(state["ppo"])
        version, internal, gauss = state["rng"]
        self.policy.rng.setstate((version, tuple(internal), gauss))
        self.num_decisions = state["num_decisions"]
        controllers.temperature.load_state_dict(state["temperature"])
        for name in ("kl", "adaptive_lr"):
            controller = getattr(controllers, name)
            if controller is not None and state[name] is not None:
                controller.load_state_dict(state[name])
        self._take_weights()
        self.start_run()

    def load_policy(self, network: dict[str, Any]) -> None:
        """Act with the weights of a network, which become the reference; learning and schedules begin anew."""
        self.ppo.network.load_state_dict(network)
        if not self.flags.inference_only:
            self.ppo.keep_reference()
        self._take_weights()
        self.start_run()

    def serve(self, network: dict[str, Any]) -> None:
        """Decide greedily with these weights from now on, whatever the network learns beside it.

        Learning needs what every action is worth then (`expected_gradient`): the policy that learns does not act.
        """
        if self.ppo.network.shape.attention_heads:
            raise ValueError("a network with attention cannot serve and learn at once")
        serving = copy.deepcopy(self.ppo.network)
        serving.load_state_dict(network)
        self.policy.actor = actor_of(serving)
        self.serves = True

    def restore_policy(self, network: dict[str, Any]) -> None:
        """Go back to earlier weights between two rollouts; the optimiser forgets where it was going."""
        self.ppo.network.load_state_dict(network)
        self.ppo.reset_optimizer()
        if not self.serves:
            self._take_weights()

    def _take_weights(self) -> None:
        """Decide with the network's present weights."""
        self.policy.actor = actor_of(self.ppo.network)

    def start_run(self) -> None:
        """A new simulation begins: trends start anew, decisions without a reward are dropped."""
        self.policy.reset()
        self._buffer = RolloutBuffer(self.flags.rollout_len)
        self.update_schedules()
