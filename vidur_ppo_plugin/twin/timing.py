"""Time of a batch, with the operations of `hardware.Roofline` and Vidur's `ExecutionTime` in their order.

Compiled helper; `tables.BatchTimes` fills the tables. That the order is the same is what makes times equal to the
last bit.
"""

from typing import Any

import numpy as np

from .compiled import helper
from .layout import (
    BATCH_HEADER,
    LAST_S,
    MIDDLE_S,
    MISSING_CHUNK,
    MISSING_DECODES,
    MISSING_TOKENS,
    PROCESSED,
    SIZE,
)

# `layers[tokens]`: sums and single operations of a layer, in milliseconds, at the row's speed.
PROJECTIONS, ALL_REDUCE, ATTENTION_NORM, MLP, ADD, SEND = range(6)
NUM_LAYER_FIELDS = 6
MS = 1e-3


@helper
def time_batch(
    rules: Any, layers: Any, slopes: Any, lines: Any, slowness: float, i: Any, f: Any, signals: Any, batch: int
) -> Any:
    """Work out what a batch takes on a middle and on the last stage; False if a table lacks an entry (see `signals`).

    `layers`: the table at the row's speed.
    """
    num_tokens, num_decodes, context_tokens, prefill_ms = 0, 0, 0, 0.0
    first = batch + BATCH_HEADER
    for k in range(first, first + 2 * i[batch + SIZE], 2):
        tokens = i[k + 1]
        cached = i[i[k] + PROCESSED]
        num_tokens += tokens
        if tokens == 1:  # a decode, or a chunk that Vidur takes for one
            num_decodes += 1
            context_tokens += cached
        elif tokens >= len(lines) or np.isnan(lines[tokens, 0]):
            return _miss(signals, 1, tokens, 0)
        elif cached < lines[tokens, 0]:
            prefill_ms += lines[tokens, 1] + lines[tokens, 2] * cached
        else:
            prefill_ms += lines[tokens, 3] + lines[tokens, 4] * cached
    if num_tokens >= len(layers) or np.isnan(layers[num_tokens, PROJECTIONS]):
        return _miss(signals, num_tokens, 1, 0)
    if num_decodes >= len(slopes) or np.isnan(slopes[num_decodes]):
        return _miss(signals, 1, 1, num_decodes)
    decode_ms = rules.decode_launch_ms + context_tokens * slopes[num_decodes] if num_decodes > 0 else 0.0
    stage_ms = layers_ms(rules, layers, num_tokens, decode_ms * slowness, prefill_ms * slowness)
    f[batch + MIDDLE_S] = (stage_ms + layers[num_tokens, SEND]) * MS
    f[batch + LAST_S] = stage_ms * MS
    return True


@helper
def layers_ms(rules: Any, layers: Any, num_tokens: int, decode_ms: float, prefill_ms: float) -> Any:
    """Time of a stage's layers, given their attention at the row's speed."""
    attention_ms = layers[num_tokens, PROJECTIONS] + decode_ms + prefill_ms
    attention_ms = attention_ms + layers[num_tokens, ALL_REDUCE] + layers[num_tokens, ATTENTION_NORM]
    return (attention_ms + layers[num_tokens, MLP] + layers[num_tokens, ADD]) * rules.layers_per_stage


@helper
def _miss(signals: Any, num_tokens: int, chunk_tokens: int, num_decodes: int) -> bool:
    signals[MISSING_TOKENS] = num_tokens
    signals[MISSING_CHUNK] = chunk_tokens
    signals[MISSING_DECODES] = num_decodes
    return False
