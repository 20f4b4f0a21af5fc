"""ModelShape: derived sizes and validation."""

import pytest

from vidur_ppo_plugin.hardware import ModelShape

GOOD = {
    "name": "m",
    "num_layers": 4,
    "num_q_heads": 32,
    "num_kv_heads": 8,
    "embedding_dim": 4096,
    "mlp_hidden_dim": 14336,
}


def test_head_dim() -> None:
    assert ModelShape(**GOOD).head_dim == 128


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("num_layers", 0, ">= 1"),
        ("mlp_hidden_dim", -5, ">= 1"),
        ("embedding_dim", 4096.0, "integer"),
        ("num_q_heads", True, "integer"),
        ("num_kv_heads", 5, r"divide num_q_heads \(32\)"),
        ("embedding_dim", 4100, r"multiple of num_q_heads \(32\)"),
    ],
)
def test_bad_field_is_named_with_its_value(field: str, value: object, wanted: str) -> None:
    with pytest.raises(ValueError, match=rf"ModelShape\.{field} .*{wanted}.*got {value}"):
        ModelShape(**{**GOOD, field: value})
