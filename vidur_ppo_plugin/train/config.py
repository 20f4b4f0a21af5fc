"""The configuration of `vidur-ppo train`: a YAML file, checked as a whole before anything starts."""

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vidur_ppo_plugin.envs.settings import changed, speeds_of
from vidur_ppo_plugin.flags import (
    BALANCED,
    ExplorationFlags,
    LearningFlags,
    NetworkFlags,
    PPOModularFlags,
    RewardFlags,
    WarmStartFlags,
    check_scheduler,
    flag,
    flag_name,
)
from vidur_ppo_plugin.learn.credit.look_ahead import LookAhead
from vidur_ppo_plugin.learn.curriculum import Curriculum
from vidur_ppo_plugin.record.metrics import header
from vidur_ppo_plugin.routing.routers import HEURISTICS, STOCK
from vidur_ppo_plugin.scenario import REPLAY, Scenario, ScenarioError, find_scenario

from .schema import ConfigError, read, require

#: Routers that need options of their own cannot be named as baselines.
BASELINES = tuple(name for name in (*STOCK, *HEURISTICS) if name != "size_split")
# The credit is exact or that of Vidur's clusters; each part of the mixture has its own preferences.
_WITHOUT_MEANING = ("max_candidates", "demonstrate_with", "demonstrations_file", "credit", "tail_preference")
#: The flags of `ppo_modular` that training knows, by the same names; the others are about a run inside Vidur.
POLICY_FLAGS = (
    *(
        item.name
        for group in (RewardFlags, LearningFlags, ExplorationFlags, WarmStartFlags, NetworkFlags)
        for item in dataclasses.fields(group)
        if item.name not in _WITHOUT_MEANING
    ),
)


@dataclass(frozen=True, kw_only=True)
class MixturePart:
    """Clusters of one kind: a scenario, and what is drawn anew for each episode of it."""

    scenario: str
    weight: float = flag(1.0, "Share of the episodes, relative to the other parts.", above=0)
    load: tuple[float, ...] = flag([], "Lowest and highest load; the scenario's own if empty.", above=0, high=2)
    num_replicas: tuple[int, ...] = flag([], "Numbers to choose from; the scenario's own if empty.", low=1, high=1024)
    speeds: tuple[tuple[float, ...], ...] = flag(
        [], "Patterns of speeds to choose from, each repeated over the replicas; the scenario's own if empty.", above=0
    )
    report_delay_s: tuple[float, ...] = flag(
        [], "Least and largest age of what replicas report; the scenario's own if empty.", low=0, high=3600
    )
    tail_preference: tuple[float, ...] = flag(
        [], f"Least and largest tail_preference that the policy is trained for; {BALANCED} if empty.", low=0, high=1
    )
    drained_share: float = flag(
        0.0, "Share of the episodes in which one replica takes no new requests for a while.", low=0, high=1
    )
    look_ahead: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is measured on requests that are not trained on, and when training ends because of it."""

    every_decisions: int = flag(50_000, "Decisions between evaluations; 0 for one at the end only.", low=0)
    scenarios: tuple[str, ...] = flag([], "Scenarios to evaluate in; those of the mixture if empty.")
    seeds: int = flag(3, "Seeds of each scenario. Raise it if scores are noisy.", low=1, high=100)
    num_requests: int = flag(2000, "Requests of each run. Raise it for tails, lower it for speed.", low=20)
    tail_preferences: tuple[float, ...] = flag(
        [BALANCED],
        "Values of tail_preference at which the policy is evaluated; the score is their mean.",
        low=0,
        high=1,
    )
    baselines: tuple[str, ...] = flag(
        ["least_tokens", "least_outstanding", "shortest_delay"],
        "The best of these is what counts.",
        choices=list(BASELINES),
    )
    p99_weight: float = flag(
        0.0, "Weight of the change of P99 in the score beside that of the mean. Raise it to protect the tail.", low=0
    )
    patience: int = flag(0, "Evaluations without a better score after which training ends; 0 for never.", low=0)


@dataclass(frozen=True, kw_only=True)
class Record:
    """Where metrics go beside ppo_metrics.csv."""

    tensorboard: bool = flag(False, "Also write TensorBoard event files.")
    wandb_project: str = flag("", "Also log to this W&B project; empty for none.")
    wandb_group: str = flag("", "The group of the run there.")
    wandb_run_name: str = flag("", "The name of the run there.")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run."""

    mixture: tuple[MixturePart, ...]
    seed: int = flag(1, "Seed of everything that is drawn.", low=0, high=1_000_000_000)
    decisions: int = flag(500_000, "Decisions to learn from, in total.", low=1)
    environments: int = flag(32, "Clusters simulated at once. Raise it for variety in an update.", low=1, high=4096)
    clusters_in_step: int = flag(
        8,
        "Clusters of one kind that run in step, each with its own requests. Raise it for speed, lower it for variety.",
        low=1,
        high=1024,
    )
    episode_rollouts: int = flag(
        16, "Rollouts of an episode; then the cluster starts anew, perhaps as another. Raise it near saturation.", low=1
    )
    backend: str = flag("twin", "The simulator: Vidur's compiled twin, or Vidur itself.", choices=["twin", "vidur"])
    enable_critic: bool = flag(False, "Train the critic too. Needed for gamma above 0, and to go on inside Vidur.")
    curriculum: str = flag("", "Stages of load, as the flag of that name of ppo_modular.")
    latency_limit_s: float = flag(0.0, "End an episode once a request has waited this long; 0 for never.", low=0)
    limit_penalty: float = flag(0.0, "Seconds that such an end costs the last decision.", low=0)
    start_from: str = flag("", "Checkpoint whose policy training starts from; empty for an untrained one.")
    checkpoint_interval: int = flag(20, "Updates between checkpoints.", low=1)
    policy: dict[str, Any] = dataclasses.field(default_factory=dict)
    look_ahead: LookAhead = dataclasses.field(default_factory=LookAhead)
    evaluation: Evaluation = dataclasses.field(default_factory=Evaluation)
    record: Record = dataclasses.field(default_factory=Record)
    sweep: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def flags(self) -> PPOModularFlags:
        """The flags of `ppo_modular` that the policy has."""
        return read(PPOModularFlags, {**self.policy, "seed": self.seed}, "policy")

    @property
    def decisions_per_update(self) -> int:
        """Decisions that all environments together make for one update."""
        return self.environments * self.flags.rollout_len

    @property
    def slot_sizes(self) -> list[int]:
        """Clusters of each slot: a slot's clusters are of one kind and run in step."""
        full, rest = divmod(self.environments, self.clusters_in_step)
        return [self.clusters_in_step] * full + [rest] * (rest > 0)

    @property
    def scenarios(self) -> list[str]:
        """Names of all scenarios that training and evaluation use, each once."""
        return list(dict.fromkeys([*(part.scenario for part in self.mixture), *self.evaluated_scenarios]))

    @property
    def evaluated_scenarios(self) -> list[str]:
        """Names of the scenarios that evaluations use, each once."""
        return list(dict.fromkeys(self.evaluation.scenarios or [part.scenario for part in self.mixture]))


def load_config(path: Path, overrides: dict[str, Any] | None = None) -> TrainConfig:
    """A configuration from its file, with values of the command line on top; ConfigError says what is wrong."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must be a mapping of keys to values, got {type(data).__name__}")
    try:
        return parse_config({**data, **(overrides or {})})
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_config(data: dict[str, Any]) -> TrainConfig:
    """A configuration from plain values."""
    config = read(TrainConfig, data, "")
    require(len(config.mixture) > 0, "mixture", "a list of at least one part with a scenario", list(config.mixture))
    for index, part in enumerate(config.mixture):
        _check_part(part, f"mixture[{index}]")
    preferences = config.evaluation.tail_preferences
    is_list = len(preferences) > 0 and len(set(preferences)) == len(preferences)
    require(is_list, "evaluation.tail_preferences", "at least one value, each once", list(preferences))
    for name in config.evaluated_scenarios:
        _scenario(name, "evaluation.scenarios")
    _check_policy(config)
    _check_combinations(config)
    return config


@functools.cache
def scenario_of(name: str) -> Scenario:
    """A scenario by its name or file, read once: a run has hundreds of episodes of each."""
    return find_scenario(name)


def part_scenarios(part: MixturePart) -> list[Scenario]:
    """Every cluster that a part may draw, at the load of its scenario."""
    own = scenario_of(part.scenario)
    sizes, patterns = part.num_replicas or (own.num_replicas,), part.speeds or (tuple(speeds_of(own)),)
    if part.num_replicas and not part.speeds and len(set(speeds_of(own))) == 1:
        patterns = (tuple(speeds_of(own)[:1]),)
    return [changed(own, num_replicas=size, replica_speeds=pattern) for size in sizes for pattern in patterns]


def look_ahead_of(config: TrainConfig, part: MixturePart, where: str = "look_ahead") -> LookAhead:
    """How the decisions of a part are followed: as the configuration says, but for what the part says itself."""
    own = read(LookAhead, part.look_ahead, where, only=config.look_ahead.weighed)
    return dataclasses.replace(config.look_ahead, **{name: getattr(own, name) for name in part.look_ahead})


def replica_counts(config: TrainConfig) -> list[int]:
    """The numbers of replicas that occur in training and evaluation, in ascending order."""
    trained = {scenario.num_replicas for part in config.mixture for scenario in part_scenarios(part)}
    return sorted(trained | {scenario_of(name).num_replicas for name in config.evaluated_scenarios})


def _scenario(name: str, where: str) -> Scenario:
    try:
        scenario = scenario_of(name)
        if not scenario.lengths:
            raise ScenarioError(
                f"{name!r} replays a trace, which training cannot do yet: to train on the lengths of a trace, copy "
                f"another scenario's file, give it `lengths: trace(FILE.csv)` and the capacity that `vidur-ppo "
                f"capacity COPY.yaml` prints, and name COPY.yaml here; `vidur-ppo compare --scenarios {REPLAY} --trace "
                f"FILE.csv` then shows what the policy makes of the trace itself"
            )
        return changed(scenario)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_part(part: MixturePart, where: str) -> None:
    _scenario(part.scenario, f"{where}.scenario")
    for name in ("load", "report_delay_s", "tail_preference"):
        limits = getattr(part, name)
        is_range = not limits or (len(limits) == 2 and limits[0] <= limits[1])
        require(is_range, f"{where}.{name}", "the lowest and the highest value, [LOW, HIGH]", list(limits))
    try:
        part_scenarios(part)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_policy(config: TrainConfig) -> None:
    read(PPOModularFlags, config.policy, "policy", only=POLICY_FLAGS)
    counts = replica_counts(config)
    flags = config.flags
    for size in counts:
        try:
            check_scheduler(flags, size)
        except ValueError as error:
            raise ConfigError(str(error).replace(flag_name(PPOModularFlags, ""), "policy.")) from None
    is_flat, heads = flags.enable_flat_network, flags.attention_heads
    require(not is_flat, "policy.enable_flat_network", "false: workers decide by a compiled set encoder", is_flat)
    require(heads == 0, "policy.attention_heads", "0: workers decide without torch, which attention needs", heads)


def _check_combinations(config: TrainConfig) -> None:
    flags = config.flags
    is_delayed = not flags.pays_at_once
    if is_delayed:
        right = "> 0 with a reward that is paid after the decision: what a placement costs comes after it"
        require(flags.gamma > 0.0, "policy.gamma", right, flags.gamma)
    if is_delayed or not flags.compares_actions:
        right = (
            "true unless policy.gamma is 0, policy.all_action_baseline is on and rewards are known for every replica"
        )
        require(config.enable_critic, "enable_critic", right, config.enable_critic)
    _check_look_ahead(config)
    limit = config.latency_limit_s
    require(limit > 0 or not config.limit_penalty, "limit_penalty", "0 without latency_limit_s", config.limit_penalty)
    if config.curriculum:
        try:
            curriculum = Curriculum.parse(config.curriculum)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        known = header(replica_counts(config)[-1])
        unknown = [name for name in curriculum.metric_names if name not in known]
        require(not unknown, "curriculum", "about recorded metrics (docs/metrics.md)", unknown)
        require(curriculum.max_load <= 1.0, "curriculum", "of loads of at most 1", config.curriculum)


def _check_weights(ahead: LookAhead, where: str) -> None:
    for name, values in ahead.weighed.items():
        require(len(values) == 2, f"{where}.{name}", "two values, at tail preference 0 and at 1", list(values))
    costs = [values for name, values in ahead.weighed.items() if name != "boldness"]
    ends = list(zip(*costs, strict=True))
    require(all(sum(end) > 0 for end in ends), where, "weights of which at least one is above 0 at each end", ends)


def _check_look_ahead(config: TrainConfig) -> None:
    ahead, flags = config.look_ahead, config.flags
    _check_weights(ahead, "look_ahead")
    for index, part in enumerate(config.mixture):
        where = f"mixture[{index}].look_ahead"
        right = "left out unless look_ahead.requests_per_replica is above 0"
        require(ahead.is_on or not part.look_ahead, where, right, part.look_ahead)
        _check_weights(look_ahead_of(config, part, where), where)
    if not ahead.is_on:
        return
    require(config.backend == "twin", "backend", "twin with look_ahead: Vidur cannot be copied", config.backend)
    mode = flags.reward_mode
    require(mode == "marginal_delay", "policy.reward_mode", "marginal_delay with look_ahead, which replaces it", mode)
    require(flags.gamma == 0.0, "policy.gamma", "0 with look_ahead, which sees what comes later itself", flags.gamma)
    require(
        flags.expected_gradient, "policy.expected_gradient", "true with look_ahead, which knows every action", False
    )
    penalty = config.limit_penalty
    require(not penalty, "limit_penalty", "0 with look_ahead, in which waiting has its price already", penalty)
    fits = flags.rollout_len % ahead.every == 0
    require(fits, "look_ahead.every", f"a divisor of policy.rollout_len ({flags.rollout_len})", ahead.every)
