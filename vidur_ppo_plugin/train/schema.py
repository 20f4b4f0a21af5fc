"""Reads the mappings of a YAML file into dataclasses made of `flag` fields; every error names the key."""

import dataclasses
import re
import types
import typing
from collections.abc import Iterable
from typing import Any, TypeVar

from vidur_ppo_plugin._autoload import suggestion
from vidur_ppo_plugin.flags import range_problem

T = TypeVar("T")
_EXPONENT = re.compile(r"[-+]?\d+[eE][-+]?\d+")


class ConfigError(ValueError):
    """A training configuration that is not right; the message names the key, its value, and what would be right."""


def read(kind: type[T], data: Any, where: str, *, only: Iterable[str] | None = None) -> T:
    """A dataclass from a mapping at the place `where`; `only`: the names that may be given."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where or 'the file'} must be a mapping, got {data!r}")
    fields = {item.name: item for item in dataclasses.fields(kind) if item.init}  # type: ignore[arg-type]
    hints, known = typing.get_type_hints(kind), list(fields if only is None else only)
    values = {}
    for key, value in data.items():
        if key not in known:
            names = ", ".join(known)
            raise ConfigError(f"unknown key {path(where, key)!r}{suggestion(str(key), known)}; there are {names}")
        values[key] = _checked(value, hints[key], fields[key].metadata, path(where, key))
    missing = [
        name
        for name, item in fields.items()
        if name not in values and item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{path(where, missing[0])} must be given")
    return kind(**values)


def path(where: str, key: object) -> str:
    """The dotted name of a key inside others."""
    return f"{where}.{key}" if where else str(key)


def require(is_right: bool, where: str, right: str, value: object) -> None:
    """Raise ConfigError naming the key unless its value is right."""
    if not is_right:
        raise ConfigError(f"{where} must be {right}, got {value!r}")


def _checked(value: Any, hint: Any, metadata: Any, where: str) -> Any:
    """The value in the type of its field, in its range; nested dataclasses and lists of them are read in turn."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if value is None:
            return None
        (hint,) = (kind for kind in arguments if kind is not type(None))
        return _checked(value, hint, metadata, where)
    if dataclasses.is_dataclass(hint):
        return read(hint, value, where)  # type: ignore[arg-type]
    if typing.get_origin(hint) in (tuple, list):
        require(isinstance(value, list), where, "a list", value)
        return typing.get_origin(hint)(
            _checked(item, arguments[0], metadata, f"{where}[{index}]") for index, item in enumerate(value)
        )
    if typing.get_origin(hint) is dict:
        require(isinstance(value, dict), where, "a mapping", value)
        return dict(value)
    return _scalar(value, hint, metadata, where)


def _scalar(value: Any, hint: Any, metadata: Any, where: str) -> Any:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    if hint is float and type(value) is int:
        value = float(value)
    if hint is float and type(value) is str and _EXPONENT.fullmatch(value):
        value = float(value)  # YAML takes 1e-3, which has no point, for a text
    require(type(value) is hint, where, names[hint], value)
    problem = range_problem(value, metadata) if metadata else None
    require(problem is None, where, str(problem), value)
    return value
