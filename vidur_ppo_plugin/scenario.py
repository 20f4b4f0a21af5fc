"""Scenarios: a cluster, a workload, a load relative to the cluster's capacity, and what counts as good service.

They are YAML files, `configs/scenarios/*.yaml` in a checkout and `vidur_ppo_plugin/scenarios/*.yaml` in an installed
package. `docs/scenarios.md` explains every key.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vidur_ppo_plugin._autoload import suggestion
from vidur_ppo_plugin.routing.visibility import Drain
from vidur_ppo_plugin.workload.lengths import parse_lengths
from vidur_ppo_plugin.workload.requests import Requests
from vidur_ppo_plugin.workload.slo import SLO
from vidur_ppo_plugin.workload.synthetic import draw_requests
from vidur_ppo_plugin.workload.trace import read_trace

#: What all scenarios share; a scenario's `flags` come on top.
BASE_FLAGS: dict[str, Any] = {
    "execution_time_predictor_config_type": "roofline",
    "cluster_config_num_replicas": 4,
    "replica_config_model_name": "meta-llama/Llama-3-8B",
    "replica_config_device": "a100",
    "replica_config_network_device": "a100_dgx",
    "replica_config_tensor_parallel_size": 1,
    "replica_config_num_pipeline_stages": 1,
    "replica_scheduler_config_type": "sarathi",
    "sarathi_scheduler_config_chunk_size": 512,
}
#: A scenario that needs a trace file.
REPLAY = "replay"


class ScenarioError(ValueError):
    """A scenario that does not exist or is not right; the message names the file and the key."""


@dataclass(frozen=True)
class Drained:
    """A replica that takes no new requests for a while, as fractions of the time between first and last arrival."""

    replica: int
    from_fraction: float
    to_fraction: float


@dataclass(frozen=True)
class Capacity:
    """The highest stable arrival rate, and how it was found (`compare/capacity.py` has the definition)."""

    qps: float
    scheduler: str
    num_requests: int
    num_seeds: int


@dataclass(frozen=True)
class TraceWindows:
    """A trace cut into windows, one for each seed of each purpose."""

    path: Path
    window_requests: int
    #: seed -> its window, counted from 0.
    windows: Mapping[int, int]
    #: Mean arrival rate of the trace as it is.
    rate_qps: float


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """All of a scenario; `qps` and the requests of a seed follow from it."""

    name: str
    why: str
    load: float
    class_boundary_tokens: int
    num_requests: int
    warm_up_fraction: float = 0.1
    max_tokens: int = 32768
    lengths: str = ""
    cv: float = 1.0
    capacity: Capacity | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    slo: SLO = field(default_factory=SLO)
    report_delay_s: float = 0.0
    drained: tuple[Drained, ...] = ()
    trace: TraceWindows | None = None

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return int({**BASE_FLAGS, **self.flags}["cluster_config_num_replicas"])

    @property
    def qps(self) -> float:
        """Arrival rate: the load times the capacity."""
        if self.capacity is None:
            raise ScenarioError(f"scenario {self.name!r} has no capacity yet: find it with `vidur-ppo capacity`")
        return self.load * self.capacity.qps

    def requests(self, seed: int, num_requests: int | None = None) -> Requests:
        """The requests that every scheduler gets for a seed."""
        size = self.num_requests if num_requests is None else num_requests
        if self.trace is not None:
            first = self.trace.windows[seed] * self.trace.window_requests
            trace = read_trace(self.trace.path)
            return trace.window(first, size, time_scale=self.trace.rate_qps / self.qps, max_tokens=self.max_tokens)
        return draw_requests(
            parse_lengths(self.lengths, max_tokens=self.max_tokens), seed, size, qps=self.qps, cv=self.cv
        )

    def vidur_flags(self, seed: int, num_requests: int | None = None) -> dict[str, Any]:
        """The flags with which `python -m vidur.main` simulates the same cluster and the same requests."""
        size = self.num_requests if num_requests is None else num_requests
        return {**BASE_FLAGS, **self.flags, "seed": seed, **self._workload_flags(seed, size)}

    def _workload_flags(self, seed: int, num_requests: int) -> dict[str, Any]:
        if self.trace is not None:
            prefix = "replay_request_generator_config"
            return {
                "request_generator_config_type": "replay",
                f"{prefix}_trace_file": str(self.trace.path),
                f"{prefix}_first_request": self.trace.windows[seed] * self.trace.window_requests,
                f"{prefix}_num_requests": num_requests,
                f"{prefix}_time_scale_factor": self.trace.rate_qps / self.qps,
                f"{prefix}_max_tokens": self.max_tokens,
            }
        return {
            "synthetic_request_generator_config_seed": seed,
            "synthetic_request_generator_config_num_requests": num_requests,
            "length_generator_config_type": "mixture",
            "mixture_request_length_generator_config_components": self.lengths,
            "mixture_request_length_generator_config_max_tokens": self.max_tokens,
            "mixture_request_length_generator_config_seed": seed,
            "interval_generator_config_type": "renewal",
            "renewal_request_interval_generator_config_qps": self.qps,
            "renewal_request_interval_generator_config_cv": self.cv,
            "renewal_request_interval_generator_config_seed": seed,
        }

    def drains(self, requests: Requests) -> tuple[Drain, ...]:
        """When which replicas take no new requests, in seconds of a run with these requests."""
        last_s = float(requests.arrived_at_s[-1])
        return tuple(
            Drain(item.replica, item.from_fraction * last_s, item.to_fraction * last_s) for item in self.drained
        )

    def at(self, **changes: Any) -> "Scenario":
        """The same with other values."""
        return dataclasses.replace(self, **changes)


def scenario_directory() -> Path:
    """Where the scenario files are: in the installed package, else in the checkout around it."""
    package = Path(__file__).resolve().parent
    installed = package / "scenarios"
    return installed if installed.is_dir() else package.parent / "configs" / "scenarios"


def scenario_names() -> list[str]:
    """All scenarios, in the order of their names."""
    directory = scenario_directory()
    names = sorted(path.stem for path in directory.glob("*.yaml"))
    if not names:
        raise ScenarioError(f"{directory}: no scenario files")
    return names


def load_scenario(name: str) -> Scenario:
    """A scenario by its name; ScenarioError suggests the nearest if there is none of that name."""
    names = scenario_names()
    if name not in names:
        raise ScenarioError(f"unknown scenario {name!r}{suggestion(name, names)}; there are {', '.join(names)}")
    path = scenario_directory() / f"{name}.yaml"
    try:
        return parse_scenario(name, yaml.safe_load(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise ScenarioError(f"{path}: {error}") from error


def parse_scenario(name: str, data: Any) -> Scenario:
    """A scenario from the content of its file; ValueError names the key that is wrong."""
    if not isinstance(data, dict):
        raise ValueError(f"must be a mapping, got {type(data).__name__}")
    known = [item.name for item in dataclasses.fields(Scenario) if item.name not in ("name", "trace")]
    for key in data:
        if key not in known:
            raise ValueError(f"unknown key {key!r}{suggestion(str(key), known)}; there are {', '.join(known)}")
    values = dict(data)
    parts: dict[str, Any] = {"slo": SLO, "capacity": Capacity}
    for key, kind in parts.items():
        if key in values:
            values[key] = kind(**values[key])
    values["drained"] = tuple(Drained(**item) for item in values.get("drained", ()))
    try:
        scenario = Scenario(name=name, **values)
    except TypeError as error:
        raise ValueError(str(error).replace("Scenario.__init__() ", "")) from error
    _check(scenario)
    return scenario


def _check(scenario: Scenario) -> None:
    rules = {
        "why": (isinstance(scenario.why, str) and scenario.why.strip().endswith("."), "a sentence"),
        "load": (0 < scenario.load < 2, "between 0 and 2 (1 is the capacity)"),
        "num_requests": (scenario.num_requests >= 10, "at least 10"),
        "warm_up_fraction": (0 <= scenario.warm_up_fraction < 1, "at least 0 and below 1"),
        "class_boundary_tokens": (scenario.class_boundary_tokens >= 1, "at least 1"),
        "report_delay_s": (scenario.report_delay_s >= 0, "at least 0"),
        "lengths": (bool(scenario.lengths) or scenario.name == REPLAY, "given"),
    }
    for key, (is_right, right) in rules.items():
        if not is_right:
            raise ValueError(f"{key} must be {right}, got {getattr(scenario, key)!r}")
    if scenario.lengths:
        parse_lengths(scenario.lengths, max_tokens=scenario.max_tokens)
    for item in scenario.drained:
        if not (0 <= item.replica < scenario.num_replicas and 0 <= item.from_fraction < item.to_fraction <= 1):
            raise ValueError(f"drained must name a replica below {scenario.num_replicas} and fractions, got {item}")
