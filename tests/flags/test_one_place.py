"""A flag's default is stated in its group and nowhere else; the groups are what the code takes."""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from packaging_tools import PACKAGE, ROOT

from vidur_ppo_plugin.flags import PPOModularFlags
from vidur_ppo_plugin.routing.prior import NAMES

FLAGS = {item.name for item in dataclasses.fields(PPOModularFlags)}
# What no group decides: nothing, off, or as it is. Everything that can be left out has such a default.
NEUTRAL = (None, "", 0, 1)


def restated(path: Path) -> Iterator[str]:
    """Flags that a file gives a default of its own: fields of classes, and arguments of functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
            pairs = [(ast.unparse(item.target), item.value) for item in fields]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            last = [*node.args.posonlyargs, *node.args.args][::-1]
            given = list(zip(last, node.args.defaults[::-1], strict=False))
            given += zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            pairs = [(argument.arg, value) for argument, value in given]
        else:
            continue
        for name, value in pairs:
            if name in FLAGS and isinstance(value, ast.Constant) and value.value not in NEUTRAL:
                yield name


def test_no_default_is_stated_twice() -> None:
    files = [path for path in sorted((ROOT / PACKAGE).rglob("*.py")) if path.parent.name != "flags"]
    found = [f"{path.relative_to(ROOT / PACKAGE)}: {name}" for path in files for name in restated(path)]
    # Every command has a seed of its own.
    assert [place for place in found if not place.endswith(": seed")] == []


def test_a_default_that_is_stated_again_is_found(tmp_path: Path) -> None:
    path = tmp_path / "parameters.py"
    path.write_text("class A:\n    lr: float = 3e-4\n    gamma: float = 0.0\ndef f(*, epochs=4, lr=B.lr, other=7): ...")
    assert list(restated(path)) == ["lr", "epochs"]


def test_the_choices_of_priors_are_those_of_the_table() -> None:
    """The flags are the lowest room and cannot read the table of heuristics, which is above them."""
    (prior,) = [item for item in dataclasses.fields(PPOModularFlags) if item.name == "prior"]
    assert prior.metadata["choices"] == list(NAMES)
