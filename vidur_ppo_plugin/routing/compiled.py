"""Compiles functions with numba, which comes with Vidur, where numpy's calls cost more than the work in them.

Each compiled function has a twin in numpy that is the reference and the fallback: `load` gives None where numba is
missing, does not fit numpy, or finds no place to keep what it compiled.
"""

import functools
import importlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def compiled(
    function: Callable[..., Any],
    *,
    keep: bool = False,
    fastmath: Any = False,
    nogil: bool = False,
    cache_folder: str = "",
) -> Callable[..., Any]:
    """The function, compiled at its first call; `keep`: in a cache on disk. For modules that `load` imports.

    `nogil`: other Python threads run on during a call. `cache_folder`: a folder of its own in the cache.
    """
    import numba

    config: Any = numba.config
    given = config.CACHE_DIR
    # Beside the source, which is numba's first choice, compiled files would survive an uninstallation.
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vidur_ppo_plugin"
    config.CACHE_DIR = str(Path(given or own) / cache_folder)
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
def load(module: str, name: str) -> Callable[..., Any] | None:
    """A compiled function by its module and name, or None; numba is imported only here."""
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, RuntimeError) as error:
        logger.info("%s runs in numpy, numba cannot be used: %s", name, error)
        return None
    return function
