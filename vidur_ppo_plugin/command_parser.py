"""The parser of `vidur-ppo`: options `--like-this`, a line for each command, and help that a person can read."""

import argparse
import dataclasses
import inspect
import textwrap
from typing import Any

from simple_parsing import ArgumentParser, DashVariant
from simple_parsing.help_formatter import SimpleHelpFormatter
from simple_parsing.helpers.custom_actions import BooleanOptionalAction

#: What stands behind an option for a value of a type that has no name of its own.
_VALUES = {"str": "TEXT", "int": "N", "float": "NUMBER", "list": "VALUE ...", "bool": "[true|false]"}


class CommandParser(ArgumentParser):
    """Reads a command line into the dataclass of a command; the parsers of commands are of this class too."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        ours = {"add_option_string_dash_variants": DashVariant.DASH, "formatter_class": _HelpFormatter}
        super().__init__(*arguments, **{**options, **ours})
        self._command: Any = None

    def add_arguments(self, dataclass: Any, *arguments: Any, **options: Any) -> Any:
        """Take the options of a dataclass."""
        self._command = dataclass
        return super().add_arguments(dataclass, *arguments, **options)

    def add_argument_group(self, title: str | None = None, *arguments: Any, **options: Any) -> Any:
        """A group of options; those of the command itself stand under no heading of their own."""
        if title is not None and title.endswith("']"):  # the class and where it is stored: "Run ['options.command']"
            self.description = inspect.getdoc(self._command)  # the one given has lost the indents of examples
            return self
        return super().add_argument_group(title, *arguments, **options)

    def add_subparsers(self, **options: Any) -> Any:
        """Take commands, each with a line that says what it does."""
        own = {"title": "commands", "description": None, "metavar": "COMMAND", "action": _Commands}
        action: Any = super().add_subparsers(**{**options, **own})
        for item in dataclasses.fields(self._command):
            action.classes |= item.metadata.get("subparsers", {})
        return action


class _Commands(argparse._SubParsersAction):  # type: ignore[type-arg]
    """The commands, whose lines are the first ones of their docstrings."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.classes: dict[str, type] = {}

    def add_parser(self, name: str, **options: Any) -> Any:
        """Add a command."""
        return super().add_parser(name, help=(self.classes[name].__doc__ or "").splitlines()[0], **options)


class _HelpFormatter(SimpleHelpFormatter):
    """Shows a default only where there is one, words whole, and paragraphs as wide as the terminal."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default is None or default is False or default in ("", []):
            return action.help
        return super()._get_help_string(action)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        text = super()._format_args(action, default_metavar)
        text = _VALUES.get(text, text)
        return f"[{text}]" if not action.option_strings and action.nargs == argparse.OPTIONAL else text

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, BooleanOptionalAction):
            return action.option_strings[0]  # not its opposite, which nobody needs
        return super()._format_action_invocation(action)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.split("\n\n")
        return "\n\n".join(
            paragraph if paragraph.startswith(" ") else textwrap.fill(paragraph, width, break_on_hyphens=False)
            for paragraph in paragraphs
        )
