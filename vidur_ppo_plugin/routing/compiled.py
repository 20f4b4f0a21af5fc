"""One function for each formula: compiled with numba where that pays, called as it is where it does not.

`compilable` marks a function that is plain Python when Python calls it, and part of every compiled function that calls
it. `compiled` makes a function that is compiled at its first call and kept on disk. numba, which takes a third of a
second to import, is imported at the first such call and not before.

numba itself looks only at the file of a kept function to tell whether what it kept is stale, not at the files whose
functions and constants went into it. So what is kept has a folder for each state of all those sources.
"""

import ast
import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

_PACKAGE = __name__.split(".")[0]
_PACKAGE_DIRECTORY = Path(__file__).resolve().parent.parent
# Divisions by zero give what numpy gives: infinity or NaN.
_ERROR_MODEL: Final = "numpy"

_Function = TypeVar("_Function", bound=Callable[..., Any])
# Functions that numba has not been told of yet, each with its options.
_to_register: list[tuple[Callable[..., Any], dict[str, Any]]] = []


def compilable(function: _Function, *, fastmath: Any = False) -> _Function:
    """The function itself, which compiled functions may call."""
    _to_register.append((function, {"error_model": _ERROR_MODEL, "fastmath": fastmath}))
    return function


def dispatcher(
    function: Callable[..., Any], *, keep: bool = False, fastmath: Any = False, nogil: bool = False
) -> Callable[..., Any]:
    """What numba makes of a function; compiled at its first call, `keep`: in a cache on disk.

    `nogil`: other Python threads run on during a call.
    """
    import numba
    from numba.extending import register_jitable

    while _to_register:
        formula, options = _to_register.pop()
        register_jitable(**options)(formula)
    config: Any = numba.config
    given = config.CACHE_DIR
    # Beside the source, which is numba's first choice, compiled files would survive an uninstallation.
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vidur_ppo_plugin"
    if keep:
        config.CACHE_DIR = str(Path(given or own) / sources_digest(function.__module__))
    try:
        compile_it = numba.njit(cache=keep, fastmath=fastmath, nogil=nogil, error_model=_ERROR_MODEL)
        result: Callable[..., Any] = compile_it(function)
    finally:
        config.CACHE_DIR = given
    return result


class compiled:
    """A function that numba compiles at its first call and keeps on disk; `py_func` is the function as it was."""

    def __init__(self, function: Callable[..., Any], *, fastmath: Any = False) -> None:
        self.py_func = function
        self._fastmath = fastmath

    @functools.cached_property
    def dispatcher(self) -> Any:
        """numba's object, which knows what has been compiled and what was found on disk."""
        return dispatcher(self.py_func, keep=True, fastmath=self._fastmath)

    def __call__(self, *args: Any) -> Any:
        return self.dispatcher(*args)


@functools.cache
def sources_digest(module: str) -> str:
    """A digest of what may be compiled in: a module, all that it imports from this package, and so on."""
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
