"""The import rules of the package, read from its source: which room may know which."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging_tools import PACKAGE, ROOT

# --- The rules ---

# From the bottom to the top: a room imports itself and rooms below it. Rooms need not exist yet.
LEVELS = [
    ["flags"],
    ["workload", "hardware"],
    ["routing"],
    ["scenario"],
    ["policy"],
    ["clusters"],
    ["twin"],
    ["record"],  # record and checkpoint: used from `learn` upward
    ["pretrained"],
    ["checkpoint"],
    ["learn"],
    ["sim"],
    ["envs"],
    ["train", "compare", "serve"],
    ["plugin", "cli"],
]
SAME_ROOM = {
    "doctor": "cli",
    "shipping": "cli",
    "__main__": "cli",
    "command_parser": "cli",
}
# The version, the hook and the table of old paths: they know nothing, anyone may know them.
FREE_TO_USE = {"__init__", "_autoload", "_old_imports"}

VIDUR_ANYWHERE = {"sim"}
VIDUR_INSIDE_FUNCTIONS = {"_autoload", "plugin"}
TORCH_AT_MODULE_LEVEL = {"policy", "learn", "train"}
WITHOUT_TORCH_AND_VIDUR = {"serve"}  # nor may anything be that it imports
AT_EVERY_START = {"__init__": sys.stdlib_module_names, "_autoload": {"__future__", "sys"}}
WITHOUT_FUTURE_ANNOTATIONS = {"flags"}  # Vidur's flag parser reads the types


# --- Reading imports ---


@dataclass(frozen=True)
class Import:
    """One imported module: its full name, and whether importing the file runs it."""

    name: str
    line: int
    at_module_level: bool

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]


def imports_of(path: Path, package_root: Path) -> list[Import]:
    """Every import of a file, relative ones made absolute; `import_module("name")` counts as well."""
    parents = path.relative_to(package_root.parent).parent.parts
    found = []
    for node, at_module_level in _walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            # `from package import name`: the name may be a module.
            names = [f"{module}.{alias.name}" for alias in node.names] if module.startswith(PACKAGE) else [module]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if function in ("import_module", "__import__"):
                names = [str(node.args[0].value)]
        found += [Import(name, node.lineno, at_module_level) for name in names]
    return found


def _walk(node: ast.AST, at_module_level: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        is_typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        yield child, at_module_level
        yield from _walk(child, at_module_level and not is_function and not is_typing)


def room_of(module_name: str) -> str:
    """`vidur_ppo_plugin.sim.flags` is in `sim`; what the package itself offers is in `__init__`."""
    parts = module_name.split(".")
    room = SAME_ROOM.get(parts[1], parts[1]) if len(parts) > 1 else "__init__"
    return room if room in LEVEL or room in FREE_TO_USE else "__init__"


LEVEL = {room: height for height, rooms in enumerate(LEVELS) for room in rooms}


# --- Checking them ---


def problems_of(package_root: Path) -> list[str]:
    """Every breach of the rules in a package, a sentence each."""
    problems = []
    for path in sorted(package_root.rglob("*.py")):
        relative = path.relative_to(package_root)
        name = relative.parts[0].removesuffix(".py")
        room = SAME_ROOM.get(name, name)
        if room not in LEVEL and room not in FREE_TO_USE:
            problems.append(f"{relative}: {room!r} is in no level of tests/test_rooms.py")
            continue
        for item in imports_of(path, package_root):
            problems += [f"{relative}:{item.line}: {problem}" for problem in _breaches(room, item)]
    for room in WITHOUT_TORCH_AND_VIDUR:
        problems += _reached(package_root, room, forbidden={"torch", "vidur"})
    return problems


def _breaches(room: str, item: Import) -> Iterator[str]:
    if item.top == PACKAGE:
        target = room_of(item.name)
        if target not in FREE_TO_USE and target != room and LEVEL.get(room, -1) <= LEVEL[target]:
            yield f"{room} must not import {target}"
    if item.top == "vidur" and room not in VIDUR_ANYWHERE:
        if room not in VIDUR_INSIDE_FUNCTIONS:
            yield f"{room} must not import vidur"
        elif item.at_module_level:
            yield f"{room} must import vidur inside functions only"
    if item.top == "torch" and item.at_module_level and room not in TORCH_AT_MODULE_LEVEL:
        yield f"{room} must not import torch at module level"
    if room in AT_EVERY_START and item.at_module_level and item.top not in AT_EVERY_START[room]:
        yield f"{room} runs in every interpreter and must not import {item.name}"
    if room in WITHOUT_TORCH_AND_VIDUR and item.top in ("torch", "vidur"):
        yield f"{room} must not import {item.top}, not even inside functions"
    if room in WITHOUT_FUTURE_ANNOTATIONS and item.top == "__future__":
        yield f"{room} must not use `from __future__ import annotations`"


def _reached(package_root: Path, room: str, forbidden: set[str]) -> Iterator[str]:
    """Follow the module-level imports from a room through the package to forbidden ones."""
    first = package_root / room
    todo = [(path, [path]) for path in sorted(first.rglob("*.py"))]
    seen = {path for path, _ in todo}
    while todo:
        path, way = todo.pop()
        for item in imports_of(path, package_root):
            if not item.at_module_level:
                continue
            if item.top in forbidden and len(way) > 1:
                steps = " -> ".join(str(step.relative_to(package_root)) for step in way)
                yield f"{steps}:{item.line}: {room} must not reach {item.top}"
            for file in _files(item.name, package_root) if item.top == PACKAGE else []:
                if file not in seen:
                    seen.add(file)
                    todo.append((file, [*way, file]))


def _files(module_name: str, package_root: Path) -> list[Path]:
    """The files that importing a module of the package executes: its own and those of its parents."""
    parts = module_name.split(".")[1:]
    folders = [package_root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
    candidates = [path for folder in folders for path in (folder / "__init__.py", folder.with_suffix(".py"))]
    return [path for path in candidates if path.is_file()]


# --- The tests ---


def test_the_package_keeps_its_rules() -> None:
    assert problems_of(ROOT / PACKAGE) == []


def test_the_checker_reads_the_imports_of_the_package() -> None:
    """An import that is really there is seen, so silence above means something."""
    names = {item.name for item in imports_of(ROOT / PACKAGE / "sim" / "checks.py", ROOT / PACKAGE)}
    assert f"{PACKAGE}.sim.config_types" in names  # from . import config_types
    assert f"{PACKAGE}.flags.check_scheduler" in names
    assert any(name.startswith("vidur.scheduler") for name in names)  # inside a function


FORBIDDEN = {
    "upward": ("routing/a.py", "from vidur_ppo_plugin.sim.flags import known_flags", "routing must not import sim"),
    "upward, relative": ("routing/a.py", "from ..policy import net", "routing must not import policy"),
    "upward, of a module": (
        "flags/a.py",
        "from vidur_ppo_plugin import checkpoint",
        "flags must not import checkpoint",
    ),
    "upward, plain": ("hardware/a.py", "import vidur_ppo_plugin.routing", "hardware must not import routing"),
    "upward, inside a function": (
        "learn/a.py",
        "def f():\n    from vidur_ppo_plugin.train import x",
        "learn must not import train",
    ),
    "upward, for types": (
        "routing/a.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from vidur_ppo_plugin.sim import x",
        "routing must not import sim",
    ),
    "sideways": ("train/a.py", "from vidur_ppo_plugin.serve import x", "train must not import serve"),
    "from below learn": ("policy/a.py", "from vidur_ppo_plugin.record import x", "policy must not import record"),
    "of the lowest room": ("flags/a.py", "from vidur_ppo_plugin.routing import x", "flags must not import routing"),
    "of the twin": ("twin/a.py", "from vidur_ppo_plugin.learn import x", "twin must not import learn"),
    "of the doctor": ("sim/a.py", "from vidur_ppo_plugin.doctor import report", "sim must not import cli"),
    "vidur": ("cli.py", "def f():\n    import vidur.config", "cli must not import vidur"),
    "vidur by name": ("cli.py", "import importlib\nimportlib.import_module('vidur')", "cli must not import vidur"),
    "vidur in plugin": ("plugin.py", "import vidur", "plugin must import vidur inside functions only"),
    "torch": ("sim/a.py", "import torch.nn as nn", "sim must not import torch at module level"),
    "torch in a class body": ("sim/a.py", "class A:\n    import torch", "sim must not import torch at module level"),
    "torch in a try": (
        "checkpoint.py",
        "try:\n    from torch import nn\nexcept ImportError:\n    pass",
        "checkpoint must not import torch at module level",
    ),
    "start-up": ("_autoload.py", "import os", "_autoload runs in every interpreter and must not import os"),
    "start-up, others": ("__init__.py", "import numpy", "__init__ runs in every interpreter and must not import numpy"),
    "start-up, own": (
        "__init__.py",
        "from vidur_ppo_plugin import flags",
        "__init__ runs in every interpreter and must not import vidur_ppo_plugin.flags",
    ),
    "serve": ("serve/a.py", "def f():\n    import torch", "serve must not import torch, not even inside functions"),
    "future": ("flags/a.py", "from __future__ import annotations", "flags must not use `from __future__"),
    "an unknown room": ("helpers.py", "", "'helpers' is in no level"),
}


@pytest.mark.parametrize(("file", "text", "expected"), FORBIDDEN.values(), ids=FORBIDDEN.keys())
def test_the_checker_finds_forbidden_imports(file: str, text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / PACKAGE / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    problems = problems_of(tmp_path / PACKAGE)
    assert [problem for problem in problems if problem.startswith(file) and expected in problem], problems


def test_the_checker_follows_what_serve_imports(tmp_path: Path) -> None:
    package = tmp_path / PACKAGE
    for folder in ("serve", "policy"):
        (package / folder).mkdir(parents=True)
        (package / folder / "__init__.py").write_text("")
    (package / "policy" / "net.py").write_text("import torch")
    (package / "policy" / "twin.py").write_text("import numpy")
    (package / "serve" / "router.py").write_text("from vidur_ppo_plugin.policy import twin")
    assert problems_of(package) == []

    (package / "policy" / "__init__.py").write_text("from .net import Net")

    assert problems_of(package) == [
        "serve/router.py -> policy/__init__.py -> policy/net.py:1: serve must not reach torch"
    ]


def test_the_checker_allows_what_is_allowed(tmp_path: Path) -> None:
    allowed = {
        "__init__.py": "import sys",
        "_autoload.py": "from __future__ import annotations\nimport sys\ndef f():\n    import os, vidur.config",
        "plugin.py": "from vidur_ppo_plugin import _autoload\ndef f():\n    import vidur_ppo_plugin.sim.flags",
        "flags/reward.py": "from typing import List",
        "checkpoint.py": "from vidur_ppo_plugin import __version__, flags\ndef save():\n    import torch",
        "policy/net.py": "import torch\nfrom vidur_ppo_plugin.routing.snapshot import ROWS",
        "learn/ppo.py": "import torch\nfrom ..record import csv\nfrom ..twin import twin",
        "sim/flags.py": "import vidur.config\nfrom . import other\nfrom vidur_ppo_plugin.record import outcome",
        "cli.py": "from vidur_ppo_plugin.doctor import report\nfrom vidur_ppo_plugin.train import loop",
        "doctor.py": "from vidur_ppo_plugin._autoload import SWITCH",
    }
    for file, text in allowed.items():
        path = tmp_path / PACKAGE / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert problems_of(tmp_path / PACKAGE) == []
