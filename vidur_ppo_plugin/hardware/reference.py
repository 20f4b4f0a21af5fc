"""The replica that our scenarios simulate, where no configuration of Vidur's says otherwise."""

from .devices import DEVICES
from .model import ModelShape
from .networks import NETWORKS
from .roofline import Roofline

#: Vidur's figures of meta-llama/Llama-3-8B.
LLAMA_3_8B = ModelShape(
    name="meta-llama/Llama-3-8B",
    num_layers=32,
    num_q_heads=32,
    num_kv_heads=8,
    embedding_dim=4096,
    mlp_hidden_dim=14336,
)
#: Chunk of prefill, KV blocks and their size, and the requests of a batch, of that replica: those of the scenarios.
CHUNK_SIZE = 512
BLOCK_SIZE = 16
BATCH_SIZE_CAP = 128


def reference_roofline(device: str = "a100") -> Roofline:
    """Llama-3-8B on one device; ValueError if there is no such device."""
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
    return Roofline(LLAMA_3_8B, DEVICES[device], NETWORKS["a100_dgx"])
