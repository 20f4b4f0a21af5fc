"""Tables of batch times, made with `hardware.Roofline` when an entry is first needed."""

from collections.abc import Sequence

import numpy as np

from vidur_ppo_plugin.hardware import Roofline

from .layout import FloatArray, Times
from .timing import NUM_LAYER_FIELDS

# Entries that a table begins with; it doubles when a larger one is needed.
_INITIAL_SIZE = 1024


class BatchTimes:
    """The tables of one model and device for replicas of several speeds; several twins may share them."""

    def __init__(self, roofline: Roofline, speed_factors: Sequence[float]) -> None:
        """`speed_factors`: one for each row of the state that the tables are for."""
        self.roofline = roofline
        # As the predictor does: a multiplication by the inverse, not a division.
        slowness = [1.0 / factor for factor in speed_factors]
        distinct = sorted(set(slowness))
        self._layers = _unknown(len(distinct), _INITIAL_SIZE, NUM_LAYER_FIELDS)
        self._decode_slopes = _unknown(_INITIAL_SIZE)
        self._decode_slopes[0] = 0.0  # no decodes: not used
        self._prefill_lines = _unknown(_INITIAL_SIZE, 5)
        self._slowness = np.array(distinct)
        self._speed_index = np.array([distinct.index(value) for value in slowness], np.int64)

    @property
    def arrays(self) -> Times:
        """The tables as they are now; `add` may replace them."""
        return Times(self._layers, self._decode_slopes, self._prefill_lines, self._slowness, self._speed_index)

    def add(self, num_tokens: int, chunk_tokens: int, num_decodes: int) -> None:
        """Fill in what a batch with so many tokens, such a chunk (1: none) and so many decodes needs."""
        self._add_layers(num_tokens)
        if chunk_tokens > 1:
            self._prefill_lines = _with_room(self._prefill_lines, chunk_tokens, axis=0)
            self._prefill_lines[chunk_tokens] = self.roofline.prefill_line(chunk_tokens)
        if num_decodes > 0:
            self._decode_slopes = _with_room(self._decode_slopes, num_decodes, axis=0)
            self._decode_slopes[num_decodes] = self.roofline.decode_ms_per_token(num_decodes)

    def fill(self, num_tokens: int) -> None:
        """Fill in everything that batches of up to so many tokens can need."""
        for count in range(1, num_tokens + 1):
            self.add(count, count, count)

    def _add_layers(self, num_tokens: int) -> None:
        self._layers = _with_room(self._layers, num_tokens, axis=1)
        roofline = self.roofline
        operations = roofline.layer_times(num_tokens)
        all_reduce_ms, send_ms = roofline.all_reduce_ms(num_tokens), 0.0
        if roofline.num_pipeline_stages > 1:
            send_ms = roofline.send_recv_ms(num_tokens)
        for index, slowness in enumerate(self._slowness.tolist()):
            norm, pre, rope, _, post, mlp_norm, up, act, down, add = (value * slowness for value in operations)
            reduce_ms = all_reduce_ms * slowness
            # Sums from left to right, as ExecutionTime makes them (the KV-cache save is left out there).
            self._layers[index, num_tokens] = (
                pre + post + rope,
                reduce_ms,
                norm,
                up + down + act + reduce_ms + mlp_norm,
                add,
                send_ms * slowness,
            )


def _unknown(*shape: int) -> FloatArray:
    return np.full(shape, np.nan)


def _with_room(table: FloatArray, index: int, *, axis: int) -> FloatArray:
    """The table, or one large enough for the index along the axis."""
    size = table.shape[axis]
    if index < size:
        return table
    shape = list(table.shape)
    shape[axis] = max(2 * size, index + 1)
    larger = _unknown(*shape)
    larger[tuple(slice(0, length) for length in table.shape)] = table
    return larger
