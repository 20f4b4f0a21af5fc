"""Episodes: which clusters a slot runs for a while, and with which requests; drawn by seed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vidur_ppo_plugin.envs.settings import changed, speeds_of
from vidur_ppo_plugin.routing.visibility import Drain
from vidur_ppo_plugin.scenario import Scenario
from vidur_ppo_plugin.workload.requests import Requests

from .config import MixturePart, TrainConfig, part_scenarios, scenario_of

#: Requests of training are drawn with seeds from here on: comparison, tuning and capacity have lower ones.
FIRST_TRAINING_SEED = 1_000_000
#: The flags of Vidur's generators take no larger ones.
LAST_TRAINING_SEED = 1_000_000_000
#: Seeds of the evaluations during training; nothing else uses them.
FIRST_EVALUATION_SEED = 500
# Multiples of it, without their whole parts, fill an interval evenly however many there are.
_GOLDEN_RATIO = 0.5 * (5.0**0.5 - 1.0)
# A drained replica is back after this share of an episode, at most.
_LONGEST_DRAIN = 0.4


@dataclass(frozen=True, kw_only=True)
class Episode:
    """All that it takes to run an episode, in any process."""

    #: The slot that it belongs to, and its number among the slot's episodes, from 0.
    slot: int
    number: int
    #: The number of its part of the mixture.
    part: int
    scenario: str
    #: Of each cluster: the seed of its requests, its load, and what its operator asks for.
    seeds: tuple[int, ...]
    loads: tuple[float, ...]
    tail_preferences: tuple[float, ...]
    num_requests: int
    #: Requests at the end that are only there to look ahead to, and one to bootstrap from.
    num_after: int
    speed_factors: tuple[float, ...]
    report_delay_s: float
    #: Replica, and from when to when as fractions of the episode.
    drained: tuple[tuple[int, float, float], ...]

    @property
    def num_clusters(self) -> int:
        """How many clusters run in step."""
        return len(self.seeds)

    @property
    def num_decisions(self) -> int:
        """Decisions of each cluster."""
        return self.num_requests - self.num_after

    @property
    def is_clear(self) -> bool:
        """Whether the router sees everything at once and may send anywhere."""
        return not self.report_delay_s and not self.drained

    def at_scale(self, cluster: int) -> Scenario:
        """The scenario with the replicas and the load of a cluster of the episode."""
        own, size = scenario_of(self.scenario), len(self.speed_factors)
        return changed(
            own.at(drained=()), load=self.loads[cluster], num_replicas=size, replica_speeds=self.speed_factors
        )

    def requests(self) -> list[Requests]:
        """The requests of each cluster, in order of arrival."""
        return [self.at_scale(cluster).requests(seed, self.num_requests) for cluster, seed in enumerate(self.seeds)]

    def drains(self, requests: Requests) -> tuple[Drain, ...]:
        """When which replicas take no new requests."""
        last_s = float(requests.arrived_at_s[-1])
        return tuple(Drain(replica, low * last_s, high * last_s) for replica, low, high in self.drained)


def draw_episode(config: TrainConfig, slot: int, number: int, *, load_factor: float = 1.0) -> Episode:
    """The episode of a slot; the same for the same configuration and numbers, in any order.

    The first episodes of the slots have different lengths, so that slots do not start anew all at once.
    """
    rng = np.random.default_rng([config.seed, slot, number])
    index = _part_of(config, slot, number)
    part = config.mixture[index]
    kinds = part_scenarios(part)
    scenario = kinds[int(rng.integers(len(kinds)))]
    num_rollouts = config.episode_rollouts
    if number == 0:
        num_rollouts = 1 + slot % config.episode_rollouts
    num_after = 1 + config.look_ahead.requests_per_replica * scenario.num_replicas
    clusters, preference = range(config.slot_sizes[slot]), config.flags.tail_preference
    return Episode(
        slot=slot,
        number=number,
        part=index,
        scenario=part.scenario,
        seeds=tuple(int(rng.integers(FIRST_TRAINING_SEED, LAST_TRAINING_SEED)) for _ in clusters),
        loads=tuple(_draw(part.load, scenario.load, rng) * load_factor for _ in clusters),
        tail_preferences=_spread(part.tail_preference, preference, len(clusters), rng),
        num_requests=num_rollouts * config.flags.rollout_len + num_after,
        num_after=num_after,
        speed_factors=tuple(speeds_of(scenario)),
        report_delay_s=_draw(part.report_delay_s, scenario.report_delay_s, rng),
        drained=_draw_drained(part, scenario, rng),
    )


def _part_of(config: TrainConfig, slot: int, number: int) -> int:
    """Which part of the mixture a slot runs.

    Drawn one by one, a part with a small weight would be absent for long and then have several slots at once, and what
    is learned would depend on who came last. So the slots of a round divide the parts among them by their weights, at
    evenly spaced points, and the points of the next round lie between those of the rounds before.
    """
    num_slots = len(config.slot_sizes)
    place = np.random.default_rng([config.seed, number]).permutation(num_slots)[slot]
    first = (np.random.default_rng(config.seed).random() + number * _GOLDEN_RATIO) % 1.0
    shares = np.cumsum([part.weight for part in config.mixture])
    point = (place + first) / num_slots * shares[-1]
    return min(int(np.searchsorted(shares, point, side="right")), len(shares) - 1)


def _spread(limits: Sequence[float], otherwise: float, count: int, rng: np.random.Generator) -> tuple[float, ...]:
    """`count` values between the limits, evenly apart, with a random offset."""
    if not limits:
        return (otherwise,) * count
    points = (rng.random() + np.arange(count) / count) % 1.0
    return tuple((limits[0] + points * (limits[1] - limits[0])).tolist())


def _draw(limits: Sequence[float], otherwise: float, rng: np.random.Generator) -> float:
    return float(rng.uniform(limits[0], limits[1])) if limits else otherwise


def _draw_drained(
    part: MixturePart, scenario: Scenario, rng: np.random.Generator
) -> tuple[tuple[int, float, float], ...]:
    own = tuple((item.replica, item.from_fraction, item.to_fraction) for item in scenario.drained)
    replica, begin, length = int(rng.integers(scenario.num_replicas)), float(rng.random()), float(rng.random())
    if scenario.num_replicas == 1 or rng.random() >= part.drained_share:
        return own
    return ((replica, begin, min(1.0, begin + _LONGEST_DRAIN * length)),)
