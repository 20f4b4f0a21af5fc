"""An event loop for servers: uvloop, where there is one."""

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any


def run_in_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end in a new event loop."""
    try:
        import uvloop
    except ImportError:  # not on Windows
        asyncio.run(main)
        return
    if sys.version_info >= (3, 11):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main)
    else:
        uvloop.install()
        asyncio.run(main)
