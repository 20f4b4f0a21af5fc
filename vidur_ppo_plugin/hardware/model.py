"""The shape of a decoder-only transformer: all that the time of its operations depends on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of one transformer, named as in Vidur's model configs.

    Weights, activations and the KV cache are 16-bit, as in Vidur's profiles.
    """

    name: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    embedding_dim: int
    mlp_hidden_dim: int
    use_gated_mlp: bool = True
    post_attn_norm: bool = True

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_q_heads", "num_kv_heads", "embedding_dim", "mlp_hidden_dim"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"ModelShape.{field} must be an integer >= 1, got {value!r}")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"ModelShape.num_kv_heads must divide num_q_heads ({self.num_q_heads}), got {self.num_kv_heads}"
            )
        if self.embedding_dim % self.num_q_heads:
            raise ValueError(
                f"ModelShape.embedding_dim must be a multiple of num_q_heads ({self.num_q_heads}), "
                f"got {self.embedding_dim}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head (queries, keys and values alike)."""
        return self.embedding_dim // self.num_q_heads
