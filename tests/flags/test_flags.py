"""Every flag of ours: a type that Vidur's parser knows, a help text that it can print, and a range that holds."""

import dataclasses
import math
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidur_ppo_plugin import _autoload
from vidur_ppo_plugin.flags import RooflineFlags, check_scheduler, flag_name, speed_factors, validate

_autoload.install()

from vidur_ppo_plugin.sim import config_types  # noqa: E402

CONFIG_CLASSES = [
    value
    for name, value in vars(config_types).items()
    if name.endswith("Config") and isinstance(value, type) and hasattr(value, "get_type")
]
OWN_FIELDS = [
    (config_class, field)
    for config_class in CONFIG_CLASSES
    for field in dataclasses.fields(config_class)
    if "low" in field.metadata
]
SAFE_TYPES: list[Any] = [bool, int, float, str, list[int], list[float], dict[str, float]]
SAFE_TYPES += [typing.Optional[kind] for kind in (bool, int, float, str)]  # noqa: UP045
SAFE_TYPES += [typing.List[int], typing.List[float], typing.Dict[str, float]]  # noqa: UP006


def ids(case: Any) -> str:
    return getattr(case, "__name__", getattr(case, "name", str(case)))


def test_there_are_config_classes_for_every_type() -> None:
    types = {str(config_class.get_type()) for config_class in CONFIG_CLASSES}
    assert types == set(_autoload.OWN_TYPES)
    assert len(OWN_FIELDS) >= 15


@pytest.mark.parametrize(("config_class", "field"), OWN_FIELDS, ids=ids)
def test_field_is_safe_for_vidurs_parser(config_class: type, field: "dataclasses.Field[Any]") -> None:
    assert not isinstance(field.type, str), "annotations must be real types, not strings"
    assert field.type in SAFE_TYPES
    assert field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    assert field.metadata["help"].endswith(".")
    assert "%" not in field.metadata["help"]


@pytest.mark.parametrize("config_class", CONFIG_CLASSES, ids=ids)
def test_config_class_derives_directly_from_vidurs_base(config_class: type) -> None:
    """Vidur looks at direct bases only."""
    assert any(base.__module__ == "vidur.config.config" for base in config_class.__bases__)
    assert not hasattr(config_class, "__post_init__")  # it would run in everybody's simulations
    assert "__slots__" not in vars(config_class)


def test_type_values_stay_clear_of_vidurs() -> None:
    import vidur.types

    enums = [value for name, value in vars(config_types).items() if name.startswith("Plugin")]
    for enum in enums:
        theirs = getattr(vidur.types, enum.__name__.removeprefix("Plugin"))
        assert not {int(kind) for kind in enum} & {int(kind) for kind in theirs}
        assert len({int(kind) for kind in enum}) == len(enum.__members__)  # an alias would be a type given twice


def test_flag_names_are_the_ones_vidur_makes() -> None:
    from vidur_ppo_plugin.sim.flags import known_flags

    known = known_flags()
    for config_class, field in OWN_FIELDS:
        assert flag_name(config_class, field.name).removeprefix("--") in known
    assert "p_p_o_global_scheduler_modular_config_seed" in known


@pytest.mark.parametrize("config_class", CONFIG_CLASSES, ids=ids)
def test_defaults_are_in_range(config_class: type) -> None:
    validate(config_class())


NUMERIC = [(c, f) for c, f in OWN_FIELDS if f.type in (int, float) or f.type == typing.List[float]]  # noqa: UP006


@given(st.sampled_from(NUMERIC), st.one_of(st.floats(), st.integers(-100, 10**6)))
def test_a_value_out_of_range_is_refused_by_name(case: Any, value: float) -> None:
    config_class, field = case
    low, high, above = (field.metadata[key] for key in ("low", "high", "above"))
    in_range = (
        math.isfinite(value)
        and (low is None or value >= low)
        and (high is None or value <= high)
        and (above is None or value > above)
    )
    flags = config_class(**{field.name: [value] if field.type == typing.List[float] else value})  # noqa: UP006
    if in_range:
        validate(flags)
        return
    with pytest.raises(ValueError) as raised:
        validate(flags)
    assert flag_name(config_class, field.name) in str(raised.value)
    assert repr(value) in str(raised.value)


def test_every_numeric_flag_has_a_range() -> None:
    for config_class, field in NUMERIC:
        bounds = [field.metadata[key] for key in ("low", "high", "above")]
        assert any(bound is not None for bound in bounds), flag_name(config_class, field.name)


def test_a_choice_out_of_the_list_is_refused_by_name() -> None:
    flags = config_types.PPOGlobalSchedulerModularConfig(prior="least_token")
    with pytest.raises(
        ValueError, match=r"--p_p_o_global_scheduler_modular_config_prior must be one of none, least_outstanding"
    ):
        validate(flags)


def test_speed_factors_repeat_a_pattern_that_fits() -> None:
    flags = RooflineFlags(replica_speed_factors=[1.0, 0.5])
    assert speed_factors(flags, 4) == [1.0, 0.5, 1.0, 0.5]
    assert speed_factors(RooflineFlags(), 3) == [1.0, 1.0, 1.0]
    assert speed_factors(object(), 2) == [1.0, 1.0]  # Vidur's own predictors know no speeds


@pytest.mark.parametrize("pattern", [[1.0, 0.5, 1.0], [1.0] * 8, []])
def test_speed_factors_of_a_wrong_length_are_refused(pattern: list[float]) -> None:
    flags = config_types.RooflineExecutionTimePredictorConfig(replica_speed_factors=pattern)
    with pytest.raises(ValueError, match=r"replica_speed_factors must have one value per replica \(4\)"):
        speed_factors(flags, 4)


def test_size_split_needs_replicas_on_both_sides() -> None:
    flags = config_types.SizeSplitGlobalSchedulerConfig(num_long_replicas=4)
    check_scheduler(flags, 5)
    with pytest.raises(ValueError, match=r"num_long_replicas must be smaller than the number of replicas \(4\), got 4"):
        check_scheduler(flags, 4)
