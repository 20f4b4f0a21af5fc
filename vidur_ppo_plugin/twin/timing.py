"""Time of a batch, with the operations of `hardware.Roofline` and Vidur's `ExecutionTime` in their order.

Compiled helper; `tables.BatchTimes` fills the tables. That the order is the same is what makes times equal to the
last bit.
"""

from typing import Any

import numpy as np

from .compiling import helper
from .layout import PROCESSED

# `Times.layers[speed, tokens]`: sums and single operations of a layer, in milliseconds, at the row's speed.
PROJECTIONS, ALL_REDUCE, ATTENTION_NORM, MLP, ADD, SEND = range(6)
NUM_LAYER_FIELDS = 6
_MS = 1e-3


@helper
def time_batch(rules: Any, times: Any, state: Any, row: int, batch: int) -> bool:
    """Work out what a batch takes on a middle and on the last stage; False if a table lacks an entry (`missing`)."""
    num_tokens, num_decodes, context_tokens, prefill_ms = 0, 0, 0, 0.0
    lines = times.prefill_lines
    for i in range(state.batch_sizes[row, batch]):
        tokens = state.batch_tokens[row, batch, i]
        cached = state.requests[row, state.batch_slots[row, batch, i], PROCESSED]
        num_tokens += tokens
        if tokens == 1:  # a decode, or a chunk that Vidur takes for one
            num_decodes += 1
            context_tokens += cached
        elif tokens >= len(lines) or np.isnan(lines[tokens, 0]):
            state.missing[:] = (1, tokens, 1)
            return False
        elif cached < lines[tokens, 0]:
            prefill_ms += lines[tokens, 1] + lines[tokens, 2] * cached
        else:
            prefill_ms += lines[tokens, 3] + lines[tokens, 4] * cached
    if num_tokens >= times.layers.shape[1] or num_decodes >= len(times.decode_slopes):
        state.missing[:] = (num_tokens, 1, num_decodes)
        return False
    speed = times.speed_index[row]
    layer = times.layers[speed, num_tokens]
    slope_ms = times.decode_slopes[num_decodes]
    if np.isnan(layer[PROJECTIONS]) or np.isnan(slope_ms):
        state.missing[:] = (num_tokens, 1, num_decodes)
        return False
    decode_ms = rules.decode_launch_ms + context_tokens * slope_ms if num_decodes > 0 else 0.0
    slowness = times.slowness[speed]
    if slowness != 1.0:
        decode_ms *= slowness
        prefill_ms *= slowness
    attention_ms = layer[PROJECTIONS] + decode_ms + prefill_ms + layer[ALL_REDUCE] + layer[ATTENTION_NORM]
    stage_ms = (attention_ms + layer[MLP] + layer[ADD]) * rules.layers_per_stage
    state.batch_s[row, batch, 0] = (stage_ms + layer[SEND]) * _MS
    state.batch_s[row, batch, 1] = stage_ms * _MS
    return True
