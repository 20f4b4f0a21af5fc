"""`vidur-ppo standin`: a server that behaves like vLLM, for trying a router without a GPU."""

import sys
from dataclasses import dataclass


@dataclass
class StandInCommand:
    """Serve like vLLM without a GPU, to try `vidur-ppo serve`: the simulator's timing in real time, made-up answers.

        vidur-ppo standin --port 8001

    It speaks vLLM's API and metrics, and takes as long as Llama-3-8B on an A100.
    """

    # Address to listen on.
    host: str = "127.0.0.1"
    # Port to listen on.
    port: int = 8001
    # Speed relative to the device; 0.33 is a replica three times as slow.
    speed: float = 1.0
    # How many times as fast as real time everything happens.
    time_scale: float = 1.0
    # Name of the model that it claims to serve.
    model: str = "stand-in"
    # KV blocks of 16 tokens.
    kv_blocks: int = 30_208
    # Longest request, prompt and output.
    max_model_len: int = 32_768
    # Most requests that run at once.
    max_num_seqs: int = 128
    # Name the metrics as vLLM did before 0.11.
    old_metrics: bool = False

    def execute(self, overrides: list[str]) -> int:
        """Serve until told to stop."""
        for name in ("speed", "time_scale", "kv_blocks", "max_model_len", "max_num_seqs"):
            if not getattr(self, name) > 0:
                print(f"error: --{name.replace('_', '-')} must be > 0, got {getattr(self, name)}", file=sys.stderr)
                return 2
        try:
            from ..event_loop import run_in_loop
            from .engine import Engine
            from .server import StandIn, serve
        except ImportError as error:
            print(f"error: serving needs more: pip install 'vidur-ppo-plugin[serve]' ({error})", file=sys.stderr)
            return 2

        async def run() -> None:
            engine = Engine(
                speed=self.speed,
                time_scale=self.time_scale,
                kv_blocks=self.kv_blocks,
                max_model_len=self.max_model_len,
                max_num_seqs=self.max_num_seqs,
            )
            print(f"Stand-in of vLLM on http://{self.host}:{self.port}", flush=True)
            await serve(StandIn(engine, model=self.model, with_old_names=self.old_metrics), self.host, self.port)

        run_in_loop(run())
        return 0
