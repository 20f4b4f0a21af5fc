"""Compiles functions with numba, which comes with Vidur, where numpy's calls cost more than the work in them.

Each compiled function has a twin in numpy that is the reference and the fallback: `load` gives None where numba is
missing, does not fit numpy, or finds no place to keep what it compiled.

numba itself looks only at the file of a kept function to tell whether what it kept is stale, not at the files whose
functions and constants went into it. So what is kept has a folder for each state of all those sources.
"""

import ast
import functools
import hashlib
import importlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_PACKAGE = __name__.split(".")[0]
_PACKAGE_DIRECTORY = Path(__file__).resolve().parent.parent


def compiled(
    function: Callable[..., Any],
    *,
    keep: bool = False,
    fastmath: Any = False,
    nogil: bool = False,
) -> Callable[..., Any]:
    """The function, compiled at its first call; `keep`: in a cache on disk. For modules that `load` imports.

    `nogil`: other Python threads run on during a call.
    """
    import numba

    config: Any = numba.config
    given = config.CACHE_DIR
    # Beside the source, which is numba's first choice, compiled files would survive an uninstallation.
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vidur_ppo_plugin"
    if keep:
        config.CACHE_DIR = str(Path(given or own) / sources_digest(function.__module__))
    try:
        compile_it = numba.njit(cache=keep, fastmath=fastmath, nogil=nogil, error_model="numpy")
        result: Callable[..., Any] = compile_it(function)
    finally:
        config.CACHE_DIR = given
    return result


def compiled_if_possible(function: Callable[..., Any], *, fastmath: Any = False) -> Callable[..., Any]:
    """The function compiled and kept, or as it is: for code that is fast enough without."""
    try:
        return compiled(function, keep=True, fastmath=fastmath)
    except (ImportError, RuntimeError) as error:
        logger.info("%s is not compiled, numba cannot be used: %s", function.__qualname__, error)
        return function


@functools.cache
def sources_digest(module: str) -> str:
    """Of the source of a module and of all that it imports from this package, and so on: what may be compiled in."""
    found: dict[str, bytes] = {}
    _add_sources(module, found)
    digest = hashlib.sha256()
    for name in sorted(found):
        digest.update(name.encode() + b"\0" + found[name])
    return digest.hexdigest()[:12]


def _add_sources(module: str, found: dict[str, bytes]) -> None:
    path = _PACKAGE_DIRECTORY.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if module in found or module.split(".")[0] != _PACKAGE or not file.is_file():
        return
    found[module] = file.read_bytes()
    parents = module.split(".") if path.is_dir() else module.split(".")[:-1]
    for node in ast.walk(ast.parse(found[module])):
        if isinstance(node, ast.ImportFrom):
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            source = ".".join(filter(None, (base, node.module)))
            # A name may be a module of its own.
            for name in (source, *(f"{source}.{alias.name}" for alias in node.names)):
                _add_sources(name, found)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                _add_sources(alias.name, found)


@functools.cache
def load(module: str, name: str) -> Callable[..., Any] | None:
    """A compiled function by its module and name, or None; numba is imported only here."""
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, RuntimeError) as error:
        logger.info("%s runs in numpy, numba cannot be used: %s", name, error)
        return None
    return function
