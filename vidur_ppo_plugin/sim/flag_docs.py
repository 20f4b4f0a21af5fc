"""Every flag of ours as Markdown, from the groups in `flags/` and those of the table of heuristics.

`python -m vidur_ppo_plugin.sim.flag_docs > docs/flags.md` writes the documentation anew.
"""

import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from typing import Any, get_args, get_origin

from vidur_ppo_plugin import _autoload
from vidur_ppo_plugin.flags import flag_name
from vidur_ppo_plugin.routing import heuristics

# Where groups of flags are: in their room, and those of the heuristics with their table.
_PLACES = ("vidur_ppo_plugin.flags.", heuristics.__name__)
# How wide paragraphs are.
_COLUMNS = 120
_INTRODUCTION = """\
# Flags

<!-- Generated: python -m vidur_ppo_plugin.sim.flag_docs > docs/flags.md -->

Every flag that this package adds to `python -m vidur.main`, with its range; a value outside it ends the command with
status 2 before anything is written, naming the flag. In a YAML file for `vidur-ppo run` the key is the flag without its
dashes. A switch is turned off by `--no-` before its name. Vidur's own flags: `python -m vidur.main --help`."""


def config_classes() -> list[Any]:
    """Our config classes as Vidur knows them, ppo_modular first."""
    _autoload.install()
    from vidur_ppo_plugin.sim import config_types

    return [value for value in vars(config_types).values() if isinstance(value, type) and hasattr(value, "get_type")]


def docs() -> str:
    """All flags as Markdown: docs/flags.md."""
    lines = [_INTRODUCTION]
    for config_class in config_classes():
        lines += ["", f"## {config_class.get_type()}"]
        for group in _groups(config_class):
            own = [item for item in fields(config_class) if item.name in inspect.get_annotations(group)]
            about = f"**{_title(group)}.** {(group.__doc__ or '').strip()}"
            lines += ["", *textwrap.wrap(about, _COLUMNS, break_long_words=False, break_on_hyphens=False), ""]
            lines += ["| flag | type | default | range | meaning |", "|---|---|---|---|---|"]
            lines += [_row(config_class, item) for item in own]
    return "\n".join(lines) + "\n"


def _groups(config_class: type) -> Iterator[type]:
    """Our dataclasses that a config class is made of, in the order in which it names them."""
    for base in config_class.__mro__:
        if base.__module__.startswith(_PLACES) and inspect.get_annotations(base):
            yield base


def _title(group: type) -> str:
    """`TieBreakingFlags` is about "Tie breaking"."""
    name = group.__name__.removesuffix("Flags")
    return name[0] + "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name[1:])


def _row(config_class: type, item: "Field[Any]") -> str:
    help_text = item.metadata["help"].replace("|", "\\|")
    cells = (f"`{flag_name(config_class, item.name)}`", _type(item), _default(item), _range(item), help_text)
    return f"| {' | '.join(cells)} |"


def _type(item: "Field[Any]") -> str:
    # Optional[float] and float are the same to a reader: a flag need not be given.
    names = [kind.__name__ for kind in (*get_args(item.type), item.type) if isinstance(kind, type)]
    if get_origin(item.type) is list:
        return f"list of {names[0]}"
    return {"bool": "switch", "str": "text"}.get(names[0], names[0])


def _default(item: "Field[Any]") -> str:
    value = item.default_factory() if item.default_factory is not MISSING else item.default
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or value == "":
        return "not set"
    return " ".join(map(_number, value)) if isinstance(value, list) else _number(value)


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _range(item: "Field[Any]") -> str:
    if item.metadata["choices"] is not None:
        return ", ".join(item.metadata["choices"])
    signs = {"low": "≥", "above": ">", "high": "≤"}
    bounds = [f"{sign} {item.metadata[key]:g}" for key, sign in signs.items() if item.metadata[key] is not None]
    return ", ".join(bounds) or "any"


if __name__ == "__main__":
    print(docs(), end="")
