"""What `--help` says: of every command and every option a sentence, and nothing that was meant for tools."""

import argparse
import dataclasses
from collections.abc import Iterator

import pytest

from vidur_ppo_plugin import cli


def command_paths(kind: type = cli.Commands, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command, that of no command first."""
    yield path
    for item in dataclasses.fields(kind):
        for name, command in item.metadata.get("subparsers", {}).items():
            yield from command_paths(command, (*path, name))


PATHS = list(command_paths())


def help_of(path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> tuple[argparse.ArgumentParser, str]:
    """The parser that answers `vidur-ppo ... --help`, and its answer."""
    shown = []
    format_help = argparse.ArgumentParser.format_help

    def watched(parser: argparse.ArgumentParser) -> str:
        shown.append((parser, format_help(parser)))
        return shown[-1][1]

    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(argparse.ArgumentParser, "format_help", watched)
    with pytest.raises(SystemExit) as stopped:
        cli.main([*path, "--help"])
    assert stopped.value.code == 0
    return shown[-1]


def test_the_commands_are_found() -> None:
    assert {("run",), ("train",), ("pretrained", "make")} <= set(PATHS) and len(PATHS) >= 15


@pytest.mark.parametrize("path", PATHS, ids=lambda path: " ".join(path) or "vidur-ppo")
def test_every_command_and_option_is_explained(path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    parser, text = help_of(path, monkeypatch)
    for leaked in ("noqa", "type: ignore", "TEMP__", "['options", "default: None", "default: )"):
        assert leaked not in text
    assert parser.description is not None and len(parser.description.split()) >= 4
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            lines = {line.dest: line.help for line in action._get_subactions()}
            assert set(lines) == set(action.choices)
        else:
            lines = {action.dest: action.help}
        for name, line in lines.items():
            assert line and len(line.split()) >= 3, f"{name}: {line!r}"


def test_every_command_has_a_line_in_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    _, text = help_of((), monkeypatch)
    assert "    train       Train a policy on many simulated clusters at once.\n" in text
    _, text = help_of(("pretrained",), monkeypatch)
    assert "Print which policies come with the package" in text and "Train a policy and write the files" in text


def test_the_seed_of_a_training_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (("train",), ("pretrained", "make")):
        _, text = help_of(path, monkeypatch)
        assert "Seed of everything that is drawn, instead of `seed` in the file." in " ".join(text.split())


def test_what_may_be_left_out_is_shown_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "[CONFIG.yaml]" in help_of(("run",), monkeypatch)[1].splitlines()[0]
    assert help_of(("export",), monkeypatch)[1].startswith("usage: vidur-ppo export [-h] CHECKPOINT OUT.npz\n")


def test_an_option_without_its_value_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """It used to mean the same as no option at all."""
    for option in ("--seed", "--decisions"):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["train", "config.yaml", option])
        assert stopped.value.code == 2
        assert f"argument {option}: expected one argument" in capsys.readouterr().err


def test_a_command_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["trian"])
    assert stopped.value.code == 2
    assert "argument COMMAND: invalid choice: 'trian' (choose from" in capsys.readouterr().err
