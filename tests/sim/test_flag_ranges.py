"""Bad values of `ppo_modular`'s flags on the real command line: Vidur's parser, then our checks, end with status 2.

`tests/flags/test_flags.py` has the ranges themselves; here, nothing between the command line and them loses one.
"""

import contextlib
import dataclasses
import functools
import io
import math
import sys
from pathlib import Path
from typing import Any, Optional

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from simulation import arguments

from vidur_ppo_plugin.flags import PPOModularFlags

PREFIX = "p_p_o_global_scheduler_modular_config_"
NUMERIC = {
    item.name: item
    for item in dataclasses.fields(PPOModularFlags)
    if item.type in (int, float, Optional[int], Optional[float])  # noqa: UP045
}


@functools.cache
def flat_config_class() -> Any:
    """Vidur's parser, built once: building it takes longer than parsing."""
    from vidur.config import SimulationConfig
    from vidur.config.flat_dataclass import create_flat_dataclass

    return create_flat_dataclass(SimulationConfig)


@functools.cache
def harmless() -> list[str]:
    """The command line of a simulation that would run; parsing it writes nothing."""
    return arguments(Path("never-written"), global_scheduler_config_type="ppo_modular")


def parse(*more: str) -> tuple[int, str]:
    """The exit status (0: accepted) and what is printed on standard error."""
    saved, sys.argv = sys.argv, ["vidur.main", *harmless(), *more]
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            flat_config_class().create_from_cli_args()
    except SystemExit as stop:
        return int(stop.code or 0), stderr.getvalue()
    finally:
        sys.argv = saved
    return 0, stderr.getvalue()


def is_int(item: "dataclasses.Field[Any]") -> bool:
    return item.type in (int, Optional[int])  # noqa: UP045


def in_range(item: "dataclasses.Field[Any]", value: float) -> bool:
    low, high, above = (item.metadata[key] for key in ("low", "high", "above"))
    fits = (low is None or value >= low) and (high is None or value <= high) and (above is None or value > above)
    return math.isfinite(value) and fits


def assert_refused(name: str, value: float) -> None:
    status, error = parse(f"--{PREFIX}{name}={value!r}")
    assert status == 2, f"{name}={value!r} is accepted"
    assert f"--{PREFIX}{name} must be " in error, error
    assert error.endswith(f", got {value!r}\n"), error


def test_the_command_line_itself_is_accepted() -> None:
    assert parse() == (0, "")
    assert len(NUMERIC) > 60
    assert not Path("never-written").exists()


@pytest.mark.parametrize("name", NUMERIC)
def test_the_nearest_bad_values_are_refused(name: str) -> None:
    item = NUMERIC[name]
    low, high, above = (item.metadata[key] for key in ("low", "high", "above"))
    bad: list[float] = [] if is_int(item) else [math.nan, math.inf, -math.inf]
    bad += [] if low is None else [int(low) - 1 if is_int(item) else math.nextafter(low, -math.inf)]
    bad += [] if high is None else [int(high) + 1 if is_int(item) else math.nextafter(high, math.inf)]
    bad += [] if above is None else [float(above)]
    assert bad
    for value in bad:
        assert_refused(name, value)


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(sorted(NUMERIC)), value=st.one_of(st.floats(), st.integers(-(10**9), 10**9)))
def test_any_value_out_of_range_is_refused(name: str, value: float) -> None:
    item = NUMERIC[name]
    if is_int(item):
        assume(math.isfinite(value))
        value = int(value)
    elif isinstance(value, int):
        value = float(value)
    assume(not in_range(item, value))
    assert_refused(name, value)


@pytest.mark.parametrize("name", NUMERIC)
def test_what_is_no_number_is_refused(name: str) -> None:
    for text in ("many", "", *(["1.5"] if is_int(NUMERIC[name]) else [])):
        status, error = parse(f"--{PREFIX}{name}={text}")
        assert status == 2
        assert f"--{PREFIX}{name}: invalid {'int' if is_int(NUMERIC[name]) else 'float'} value: {text!r}" in error


# Each single value is in its range; together they cannot be meant. The first flag is the one that is named.
COMBINATIONS: dict[str, dict[str, Any]] = {
    "min_temperature": {"max_temperature": 0.4, "min_temperature": 0.6},
    "base_temperature": {"base_temperature": 9.0},
    "entropy_min": {"entropy_min": 1.4},  # log(4) = 1.386
    "target_entropy": {"target_entropy": 1.4},
    "attention_heads": {"attention_heads": 3},
    "max_candidates": {"max_candidates": 1},
    "reward_clip_low": {"reward_clip_low": 1.0, "reward_clip_high": -1.0},
    "collapse_share": {"collapse_share": 0.2},
    "prior": {"prior": "least_token"},
    "reward_mode": {"reward_mode": "throughput"},
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_combinations_that_cannot_be_meant_are_refused(name: str) -> None:
    flags = COMBINATIONS[name]
    status, error = parse(*(f"--{PREFIX}{flag}={value}" for flag, value in flags.items()))
    assert status == 2
    assert f"--{PREFIX}{name} must be " in error
    assert error.endswith(f", got {flags[name]!r}\n")
