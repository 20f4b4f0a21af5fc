"""`vidur-ppo serve`: the options, the event loop, the log."""

import logging
import sys
from dataclasses import dataclass

from .settings import ServeSettings


@dataclass
class Serve(ServeSettings):
    """Route requests to real servers that speak vLLM's API, as an OpenAI-compatible proxy.

        vidur-ppo serve --backend http://HOST:8001 --backend http://HOST:8002 --policy pretrained

    Each request is placed as in the simulator. docs/serving.md explains everything.
    """

    def execute(self, overrides: list[str]) -> int:
        """Serve until told to stop."""
        try:
            from .event_loop import run_in_loop
            from .router import run
        except ImportError as error:
            print(f"error: serving needs more: pip install 'vidur-ppo-plugin[serve]' ({error})", file=sys.stderr)
            return 2
        logging.basicConfig(
            level=self.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
        )
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        try:
            run_in_loop(run(self, lambda line: print(line, flush=True)))
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return 0
