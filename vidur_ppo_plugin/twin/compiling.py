"""How the twin's functions are compiled: helpers become part of what calls them, entries are kept on disk.

numba looks at the file of an entry only to decide whether its cache is stale, not at the files of the helpers that
went into it. So the cache has a folder for each state of all the sources.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vidur_ppo_plugin.routing import delay_kernel, feature_kernel, snapshot
from vidur_ppo_plugin.routing.compiled import compiled


def _digest() -> str:
    others = (Path(str(module.__file__)) for module in (delay_kernel, feature_kernel, snapshot))
    sources = [*sorted(Path(__file__).parent.glob("*.py")), *others]
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]


_CACHE_FOLDER = f"twin-{_digest()}"


def helper(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled into the functions that call it."""
    return compiled(function, nogil=True)


def entry(function: Callable[..., Any]) -> Callable[..., Any]:
    """Called from Python: compiled once, kept on disk; other threads run on during a call."""
    return compiled(function, keep=True, nogil=True, cache_folder=_CACHE_FOLDER)
