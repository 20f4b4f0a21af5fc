"""How the twin's functions are compiled: helpers become part of what calls them, entries are kept on disk."""

from collections.abc import Callable
from typing import Any

from vidur_ppo_plugin.routing.compiled import dispatcher


def helper(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function into those that call it."""
    return dispatcher(function, nogil=True)


def entry(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that Python calls: once, kept on disk; other threads run on during a call."""
    return dispatcher(function, keep=True, nogil=True)
