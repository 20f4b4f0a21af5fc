"""Scenarios: a cluster, a workload, a load relative to the cluster's capacity, and what counts as good service.

They are YAML files, `configs/scenarios/*.yaml` in a checkout and `vidur_ppo_plugin/scenarios/*.yaml` in an installed
package. `docs/scenarios.md` explains every key.
"""

import dataclasses
import math
import typing
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

_NUM_REPLICAS = "cluster_config_num_replicas"
#: What all scenarios share; a scenario's `flags` come on top.
BASE_FLAGS: dict[str, Any] = {
    "execution_time_predictor_config_type": "roofline",
    _NUM_REPLICAS: 4,
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
    """One scenario; `qps` and the requests of a seed follow from its values."""

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
        return int({**BASE_FLAGS, **self.flags}[_NUM_REPLICAS])

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
        """A copy of the scenario with other values."""
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


def find_scenario(scenario: str | Path | Scenario) -> Scenario:
    """A scenario by its name, from a YAML file of the user (a path that ends in .yaml or .yml), or as it is."""
    if isinstance(scenario, Scenario):
        return scenario
    return _read(Path(scenario)) if is_scenario_file(scenario) else load_scenario(str(scenario))


def is_scenario_file(scenario: str | Path) -> bool:
    """Whether a text means a file, and not the name of a built-in scenario."""
    return Path(scenario).suffix in (".yaml", ".yml")


def load_scenario(name: str) -> Scenario:
    """A scenario by its name; ScenarioError suggests the nearest if there is none of that name."""
    names = scenario_names()
    if name not in names:
        raise ScenarioError(
            f"unknown scenario {name!r}{suggestion(name, names)}; there are {', '.join(names)}, or give a FILE.yaml"
        )
    return _read(scenario_directory() / f"{name}.yaml")


def _read(path: Path) -> Scenario:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path}: cannot be read: {error}") from error
    try:
        return parse_scenario(path.stem, yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ScenarioError(f"{path}: is not YAML: {error}") from error
    except (OSError, ValueError) as error:  # OSError: the file that `lengths` draws from
        raise ScenarioError(f"{path}: {error}") from error


def parse_scenario(name: str, data: Any) -> Scenario:
    """A scenario from the content of its file; ValueError names the key that is wrong."""
    values = _checked(Scenario, data, "", without=("name", "trace"))
    parts: dict[str, Any] = {"slo": SLO, "capacity": Capacity}
    for key, kind in parts.items():
        if key in values:
            values[key] = kind(**_checked(kind, values[key], key))
    drained = values.get("drained", [])
    if not isinstance(drained, list):
        raise ValueError(f"drained must be a list, got {drained!r}")
    values["drained"] = tuple(
        Drained(**_checked(Drained, item, f"drained[{index}]")) for index, item in enumerate(drained)
    )
    scenario = Scenario(name=name, **values)
    _check(scenario)
    return scenario


_KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    str: ((str,), "a text"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
}


def _checked(kind: type, data: Any, where: str, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """The values of a mapping that the dataclass `kind` has; ValueError names the key that it cannot have or lacks."""
    if not isinstance(data, dict):
        raise ValueError(f"{where or 'a scenario'} must be a mapping, got {data!r}")
    prefix, hints = f"{where}." if where else "", typing.get_type_hints(kind)
    known = {item.name: item for item in dataclasses.fields(kind) if item.name not in without}
    for key, value in data.items():
        if key not in known:
            name = f"{prefix}{key}"
            raise ValueError(f"unknown key {name!r}{suggestion(str(key), known)}; there are {', '.join(known)}")
        types, right = _KINDS.get(hints[key], ((), ""))
        if types and type(value) not in types:
            raise ValueError(f"{prefix}{key} must be {right}, got {value!r}")
    for key, item in known.items():
        has_default = item.default is not dataclasses.MISSING or item.default_factory is not dataclasses.MISSING
        if key not in data and not has_default:
            raise ValueError(f"{prefix}{key} must be given")
    return dict(data)


def _check(scenario: Scenario) -> None:
    size = scenario.flags.get(_NUM_REPLICAS, 1) if isinstance(scenario.flags, dict) else 1
    rules = {
        "why": (scenario.why.strip().endswith("."), "a sentence"),
        "load": (0 < scenario.load < 2, "between 0 and 2 (1 is the capacity)"),
        "cv": (0 < scenario.cv < math.inf, "finite and above 0"),
        "num_requests": (scenario.num_requests >= 10, "at least 10"),
        "max_tokens": (scenario.max_tokens >= 2, "at least 2 (a prompt and an output token)"),
        "warm_up_fraction": (0 <= scenario.warm_up_fraction < 1, "at least 0 and below 1"),
        "class_boundary_tokens": (scenario.class_boundary_tokens >= 1, "at least 1"),
        "report_delay_s": (0 <= scenario.report_delay_s < math.inf, "finite and at least 0"),
        "lengths": (
            bool(scenario.lengths) or scenario.name == REPLAY,
            f"given (only {REPLAY!r} has none)",
        ),
        "slo": (all(0 <= value < math.inf for value in vars(scenario.slo).values()), "of values of at least 0"),
        "flags": (isinstance(scenario.flags, dict), "a mapping of flags of `python -m vidur.main` to values"),
        f"flags.{_NUM_REPLICAS}": (type(size) is int and size >= 1, "a whole number of at least 1"),
    }
    for key, (is_right, right) in rules.items():
        if not is_right:
            value = size if key.startswith("flags.") else getattr(scenario, key)
            raise ValueError(f"{key} must be {right}, got {value!r}")
    if scenario.capacity is not None and not 0 < scenario.capacity.qps < math.inf:
        raise ValueError(f"capacity.qps must be finite and above 0 requests/s, got {scenario.capacity.qps!r}")
    if scenario.lengths:
        try:
            parse_lengths(scenario.lengths, max_tokens=scenario.max_tokens)
        except ValueError as error:
            raise ValueError(f"lengths: {error}") from error
    for item in scenario.drained:
        if not (0 <= item.replica < scenario.num_replicas and 0 <= item.from_fraction < item.to_fraction <= 1):
            raise ValueError(f"drained must name a replica below {scenario.num_replicas} and fractions, got {item}")
