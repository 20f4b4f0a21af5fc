"""The agent: observe, decide, learn. Knows neither Vidur nor vLLM; whoever runs it brings snapshots and rewards."""

import copy
import math
import random
from bisect import bisect
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vidur_ppo_plugin.flags import PPOModularFlags
from vidur_ppo_plugin.policy import greedy
from vidur_ppo_plugin.policy.compiled_actor import fast_actor
from vidur_ppo_plugin.policy.network import ActorCritic
from vidur_ppo_plugin.policy.numpy_actor import NumpyActor
from vidur_ppo_plugin.policy.temperature import TemperatureController
from vidur_ppo_plugin.routing.features import FeatureTable, Float32Array, Observation
from vidur_ppo_plugin.routing.heuristics import choose
from vidur_ppo_plugin.routing.prior import Prior
from vidur_ppo_plugin.routing.snapshot import ClusterSnapshot, RequestInfo

from .batch import Shards
from .ppo import PPO, Coefficients
from .rollout import Decision, RolloutBuffer
from .schedules import KlAdaptiveLearningRate, KlController, Schedule
from .shard import LocalShards


@dataclass(frozen=True, kw_only=True)
class Controllers:
    """What changes from update to update."""

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
        features: FeatureTable,
        prior: Prior,
        ppo: PPO,
        controllers: Controllers,
        flags: PPOModularFlags,
    ) -> None:
        self.features = features
        self.ppo = ppo
        self.controllers = controllers
        self.flags = flags
        self._prior = prior
        self._rng = random.Random(flags.seed)
        self._buffer = RolloutBuffer(flags.rollout_len)
        self._actor = self._make_actor()
        #: Whether `serve` has set who decides: then the network only learns.
        self.serves = False
        self.num_decisions = 0
        self._actions: Counter[int] = Counter()
        self._epsilon = 0.0
        self.update_schedules()

    def _make_actor(self) -> NumpyActor | None:
        """The fast twin; None where the network has attention, which acts in torch."""
        return None if self.ppo.network.shape.attention_heads else fast_actor(self.ppo.network)

    @property
    def actor(self) -> NumpyActor | None:
        """What decides; None where the network has attention."""
        return self._actor

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
    ) -> tuple[Observation, Float32Array, NDArray[np.intp] | None]:
        """What the policy sees: features, prior logits, and which replicas they are of (None: all of them)."""
        cost = self._prior.cost(snapshot, request)
        logits = self._prior.logits(cost)
        if snapshot.available is not None:
            allowed = snapshot.available if allowed is None else _both(allowed, snapshot.available)
        logits = greedy.masked(logits, allowed)
        chosen = self._candidates(cost, snapshot.num_replicas)
        observation = self.features.observe(snapshot, request, chosen)
        return observation, logits if chosen is None else logits[chosen], chosen

    def _candidates(self, cost: NDArray[np.float64], num_replicas: int) -> NDArray[np.intp] | None:
        """A seeded sample of replicas, the heuristic's choice always among them; None for all."""
        size = self.flags.max_candidates
        if size == 0 or num_replicas <= size:
            return None
        best = choose(cost, self._rng)
        sample = self._rng.sample(range(num_replicas), size)
        if best not in sample:
            sample[0] = best
        return np.array(sample, dtype=np.intp)

    def decide(
        self, observation: Observation, prior_logits: Float32Array, chosen: NDArray[np.intp] | None = None
    ) -> int:
        """The replica for the observed request: sampled while learning, greedy in inference and with `serve`."""
        logits = self._logits(observation, prior_logits)
        is_greedy = self.flags.inference_only or self.serves
        action = greedy.best(logits, self._rng) if is_greedy else self._sample(logits)
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
        replica = action if chosen is None else int(chosen[action])
        self.count(replica)
        return replica

    def count(self, replica: int) -> None:
        """A decision that somebody else made: a teacher, while demonstrating."""
        self.num_decisions += 1
        self._actions[replica] += 1

    def _logits(self, observation: Observation, prior_logits: Float32Array) -> list[float]:
        """As a list: from here on Python is faster than numpy for a few dozen replicas."""
        if self._actor is not None:
            logits = self._actor.logits(observation.replicas, observation.request, prior_logits).tolist()
        else:
            logits = _torch_logits(self.ppo.network, observation, prior_logits).tolist()
        if not math.isfinite(sum(logits)):
            names = _non_finite_features(self.features, observation)
            raise FloatingPointError(f"the policy's logits are not finite: {logits}; features: {names or 'finite'}")
        return logits  # type: ignore[no-any-return]

    def _sample(self, logits: list[float]) -> int:
        """Draw from softmax(logits / temperature), or uniformly with probability epsilon."""
        if self._epsilon and self._rng.random() < self._epsilon:
            return self._rng.randrange(len(logits))
        highest, temperature, exp = max(logits), self.temperature, math.exp
        cumulative = list(accumulate([exp((logit - highest) / temperature) for logit in logits]))
        return min(bisect(cumulative, self._rng.random() * cumulative[-1]), len(logits) - 1)

    def settle(self, reward: float, action_rewards: NDArray[np.float64] | None = None) -> None:
        """The reward of the newest decision (and of what it could have been)."""
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
            self._actor = self._make_actor()
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

    def take_action_counts(self) -> Counter[int]:
        """How often each replica was chosen since the last call."""
        counts, self._actions = self._actions, Counter()
        return counts

    @property
    def num_settled(self) -> int:
        """Decisions of the present rollout that have their reward."""
        return len(self._buffer) - int(self._buffer.awaits_reward)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next run depends on; an open rollout is not part of it."""
        controllers = self.controllers
        return {
            "ppo": self.ppo.state_dict(),
            "rng": list(self._rng.getstate()),
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
        self._rng.setstate((version, tuple(internal), gauss))
        self.num_decisions = state["num_decisions"]
        controllers.temperature.load_state_dict(state["temperature"])
        for name in ("kl", "adaptive_lr"):
            controller = getattr(controllers, name)
            if controller is not None and state[name] is not None:
                controller.load_state_dict(state[name])
        self._actor = self._make_actor()
        self.start_run()

    def load_policy(self, network: dict[str, Any]) -> None:
        """Act with the weights of a network, which become the reference; learning and schedules begin anew."""
        self.ppo.network.load_state_dict(network)
        if not self.flags.inference_only:
            self.ppo.keep_reference()
        self._actor = self._make_actor()
        self.start_run()

    def serve(self, network: dict[str, Any]) -> None:
        """Decide greedily with these weights from now on, whatever the network learns beside it.

        Learning needs what every action is worth then (`expected_gradient`): the policy that learns does not act.
        """
        if self._actor is None:
            raise ValueError("a network with attention cannot serve and learn at once")
        serving = copy.deepcopy(self.ppo.network)
        serving.load_state_dict(network)
        self._actor = fast_actor(serving)
        self.serves = True

    def restore_policy(self, network: dict[str, Any]) -> None:
        """Go back to earlier weights between two rollouts; the optimiser forgets where it was going."""
        self.ppo.network.load_state_dict(network)
        self.ppo.reset_optimizer()
        if not self.serves:
            self._actor = self._make_actor()

    def start_run(self) -> None:
        """A new simulation begins: trends start anew, decisions without a reward are dropped."""
        self.features.reset()
        self._buffer = RolloutBuffer(self.flags.rollout_len)
        self._actions = Counter()
        self.update_schedules()


def _both(allowed: NDArray[np.bool_], available: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """A limit of ours yields to what replicas take: if nothing satisfies both, whatever is available."""
    both = allowed & available
    return both if both.any() else available


def _torch_logits(network: ActorCritic, observation: Observation, prior_logits: Float32Array) -> Float32Array:
    import torch

    with torch.no_grad():
        encoded = network.encode(
            torch.from_numpy(observation.replicas)[None], torch.from_numpy(observation.request)[None]
        )
        logits: Float32Array = network.logits(encoded, torch.from_numpy(prior_logits)[None])[0].numpy()
    return logits


def _non_finite_features(features: FeatureTable, observation: Observation) -> list[str]:
    replica = [
        f"{features.replica_features[column].name} of replica {row}"
        for row, column in np.argwhere(~np.isfinite(observation.replicas))
    ]
    request = [features.request_features[index].name for (index,) in np.argwhere(~np.isfinite(observation.request))]
    return replica + request
