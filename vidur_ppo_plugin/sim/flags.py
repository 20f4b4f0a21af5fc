"""Vidur's flags as data: which there are, and how a mapping of flags becomes a command line."""

import datetime
import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from vidur_ppo_plugin._autoload import suggestion

# YAML 1.1 reads 1e-4 as text: it wants 1.0e-4.
_EXPONENT = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+")


class FlagError(ValueError):
    """A flag that does not exist or a value that does not fit it; the message names both."""


def known_flags() -> dict[str, Any]:
    """Every flag of `vidur.main`, without the dashes, and its type, our own included."""
    from dataclasses import fields

    from vidur.config import SimulationConfig
    from vidur.config.flat_dataclass import create_flat_dataclass

    return {field.name: field.type for field in fields(create_flat_dataclass(SimulationConfig))}


def to_arguments(flags: Mapping[Any, Any], known: Mapping[str, Any]) -> list[str]:
    """The command line that sets these flags: `{"seed": 1}` becomes `["--seed", "1"]`."""
    arguments: list[str] = []
    for name, value in flags.items():
        if name not in known:
            raise FlagError(f"unknown flag {name!r}{suggestion(str(name), known)}")
        if value is None:
            raise FlagError(f"flag {name!r} has no value; leave the line out to keep Vidur's default")
        arguments += _one_flag(name, value, known[name])
    return arguments


def check_names(arguments: list[str], known: Mapping[str, Any]) -> None:
    """FlagError for the first argument that looks like a flag and is none (argparse suggests nothing)."""
    if arguments and not arguments[0].startswith("-"):
        raise FlagError(f"unexpected argument {arguments[0]!r}: expected a flag")
    for argument in arguments:
        if not argument.startswith("--"):
            continue
        name = argument[2:].partition("=")[0]
        if name not in known and known.get(name.removeprefix("no-")) is not bool:
            flags = [f"--{flag}" for flag in known]
            raise FlagError(f"unknown flag '--{name}'{suggestion(f'--{name}', flags)}")


def _one_flag(name: str, value: Any, flag_type: Any) -> list[str]:
    if flag_type is bool:
        if not isinstance(value, bool):
            raise FlagError(f"flag {name!r} must be true or false, got {value!r}")
        return [f"--{name}" if value else f"--no-{name}"]
    origin = getattr(flag_type, "__origin__", None)
    if origin is list:
        if not isinstance(value, list) or not value:
            raise FlagError(f"flag {name!r} must be a list with at least one value, got {value!r}")
        return [f"--{name}", *(_text(name, item, flag_type.__args__[0]) for item in value)]
    if origin is dict:
        if not isinstance(value, dict):
            raise FlagError(f"flag {name!r} must be a mapping, got {value!r}")
        return [f"--{name}", json.dumps(value)]
    text = _text(name, value, flag_type)
    # argparse takes a value that starts with a dash for a flag, also some numbers (-1e-05).
    return [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]


def _text(name: str, value: Any, value_type: type) -> str:
    """The value as one argument, if it is of the flag's type."""
    if value_type is str and isinstance(value, datetime.date):
        return value.isoformat()  # YAML reads 2023-11-16 as a date
    if value_type is float and isinstance(value, str) and _EXPONENT.fullmatch(value):
        value = float(value)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = {
        int: is_number and (isinstance(value, int) or value.is_integer()),
        float: is_number,
        str: isinstance(value, str) or is_number,
        bool: isinstance(value, bool),
    }[value_type]
    if not fits:
        raise FlagError(f"flag {name!r} must be of type {value_type.__name__}, got {value!r}")
    if value_type is int:
        return str(int(value))
    if value_type is bool:
        return "True" if value else ""  # in lists: argparse calls bool(text), and bool("False") is True
    if value_type is float and math.isfinite(value):
        return format(Decimal(str(value)), "f")  # without an exponent: see _one_flag, lists have no `=`
    return str(value)
