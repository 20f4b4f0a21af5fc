"""The twin's state: a handful of arrays whose first axis is the replica, so that a replica is copied row by row.

Replicas meet only in the router, so each row is a machine of its own: it has its own request slots, clock and events.
Several clusters are simply more rows.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

# Replica schedulers, by the names that Vidur gives them.
SCHEDULERS = ("sarathi", "vllm", "orca", "mnemosyne_fcfs_fixed_chunk")
SARATHI, VLLM, ORCA, FIXED_CHUNK = range(4)

# What a call of the event machine ended with. It can be called again after each of the last three was dealt with.
DONE, TIME_UNKNOWN, LOG_FULL, NO_SLOT = range(4)

# Kinds of immediate events; the stage, where there is one, is added: code = kind * MAX_STAGES + stage.
MAX_STAGES = 64
STAGE_ARRIVAL, STAGE_SCHEDULE, BATCH_END, REPLICA_SCHEDULE = range(4)

# `requests[row, slot]`: whole numbers of a request. A preemption turns what was generated into prompt (PREFILL grows);
# TOTAL and PROMPT keep their values. BLOCKS is 0 without admission. NEXT links queues and the list of free slots.
PREFILL, TOTAL, PROCESSED, BLOCKS, RESTARTS, NEXT, ID, PROMPT, IS_DECODING = range(9)
NUM_REQUEST_FIELDS = 9
# `moments[row, slot]`: seconds; SCHEDULED and FIRST_TOKEN are NaN until they have happened.
ARRIVED, SCHEDULED, FIRST_TOKEN = range(3)
NUM_MOMENTS = 3

# `counters[row]`. Lists have a head and, next to it, a tail (-1: empty): the waiting queue, and the prompts that the
# fixed-chunk scheduler has begun. ROOM is where running requests that are in no batch are counted.
QUEUE, QUEUE_TAIL, PARTIAL, PARTIAL_TAIL, FREE, NUM_IDLE = range(6)
KV_USED, ADMITTED, RUNNING_BATCHES, RUNNING_STAGES, NEWEST_BATCH, OLDEST_BATCH = range(6, 12)
FIRST_EVENT, NUM_EVENTS, SEQUENCE, MARKER = range(12, 16)
OUTSTANDING, PREFILL_TOKENS, CONTEXT_TOKENS, DECODED_TOKENS, FINISHED, FINISHED_DECODE_TOKENS = range(16, 22)
NUM_BATCHES, NUM_BATCHED_REQUESTS = range(22, 24)
NUM_COUNTERS = 24
# `clocks[row]`: the time of the last event, how far the row was asked to go, the last submission; and two averages.
NOW, TARGET, SUBMITTED, RECENT_LATENCY, COMPLETION_RATE, RATE_UPDATED = range(6)
NUM_CLOCKS = 6
# `stages[row, stage]`: order of the end event, batch that comes next, batches that wait for the stage.
END_SEQUENCE, NEXT_BATCH, NUM_WAITING = range(3)
NUM_STAGE_FIELDS = 3
# `log[i]`: a completed request.
LOG_ID, LOG_ROW, LOG_ARRIVED, LOG_SCHEDULED, LOG_FIRST_TOKEN, LOG_COMPLETED, LOG_RESTARTS = range(7)
NUM_LOG_FIELDS = 7


class Rules(NamedTuple):
    """What the replica schedulers go by; plain numbers, as the kernels want them."""

    scheduler: int
    num_stages: int
    block_size: int
    num_blocks: int
    watermark_blocks: int
    #: Requests that may hold blocks; of one batch; orca's batches have a limit of their own.
    max_admitted: int
    max_batch_size: int
    #: Tokens of a batch: the chunk of sarathi and fixed_chunk, vllm's largest batch.
    max_batch_tokens: int
    #: Blocks that orca reserves for every request.
    reserved_blocks: int
    #: Longest prompt that fixed_chunk admits.
    max_prompt_tokens: int
    layers_per_stage: int
    decode_launch_ms: float


class Times(NamedTuple):
    """Tables of batch times; NaN where a value was not needed yet. First axis of `layers`: the speed."""

    layers: FloatArray
    decode_slopes: FloatArray
    prefill_lines: FloatArray
    slowness: FloatArray
    #: For each row the index of its speed.
    speed_index: IntArray


class State(NamedTuple):
    """Everything that changes. `missing` names the table entries that TIME_UNKNOWN is about: tokens, chunk, decodes."""

    requests: IntArray
    moments: FloatArray
    counters: IntArray
    clocks: FloatArray
    stages: IntArray
    stage_ends: FloatArray
    #: Admitted requests in no batch, in the order of the replica scheduler's list.
    idle: IntArray
    #: Of each batch in flight: its size, its requests, their new tokens; its time on a middle and on the last stage.
    batch_sizes: IntArray
    batch_slots: IntArray
    batch_tokens: IntArray
    batch_s: FloatArray
    #: Immediate events: a ring of (code, order).
    events: IntArray
    log: FloatArray
    log_size: IntArray
    missing: IntArray


# Arrays of a State with a row for each replica; of those, the ones whose second axis is the request slot.
_ROW_FIELDS = State._fields[: State._fields.index("log")]
_SLOT_FIELDS = ("requests", "moments")


def new_state(rules: Rules, num_rows: int, *, num_slots: int, log_size: int) -> State:
    """An empty cluster."""
    stages, size = rules.num_stages, max_running(rules)
    state = State(
        requests=np.zeros((num_rows, num_slots, NUM_REQUEST_FIELDS), np.int64),
        moments=np.full((num_rows, num_slots, NUM_MOMENTS), np.nan),
        counters=np.zeros((num_rows, NUM_COUNTERS), np.int64),
        clocks=np.zeros((num_rows, NUM_CLOCKS)),
        stages=np.zeros((num_rows, stages, NUM_STAGE_FIELDS), np.int64),
        stage_ends=np.full((num_rows, stages), np.inf),
        idle=np.zeros((num_rows, size), np.int64),
        batch_sizes=np.zeros((num_rows, stages), np.int64),
        batch_slots=np.zeros((num_rows, stages, size), np.int64),
        batch_tokens=np.zeros((num_rows, stages, size), np.int64),
        batch_s=np.zeros((num_rows, stages, 2)),
        events=np.zeros((num_rows, 8 * stages + 8, 2), np.int64),
        log=np.zeros((log_size, NUM_LOG_FIELDS)),
        log_size=np.zeros(1, np.int64),
        missing=np.zeros(3, np.int64),
    )
    for column in (QUEUE, QUEUE_TAIL, PARTIAL, PARTIAL_TAIL):
        state.counters[:, column] = -1
    state.clocks[:, TARGET] = state.clocks[:, SUBMITTED] = -np.inf
    _link_free_slots(state.requests, 0)
    return state


def max_running(rules: Rules) -> int:
    """Most requests that can be admitted at once: orca fills a batch for each stage."""
    return rules.num_stages * rules.max_batch_size if rules.scheduler == ORCA else rules.max_admitted


def grown(state: State) -> State:
    """The same state with twice as many request slots."""
    old_slots = state.requests.shape[1]
    larger: dict[str, Any] = {}
    for name in _SLOT_FIELDS:
        old = getattr(state, name)
        new = np.zeros((len(old), 2 * old_slots, *old.shape[2:]), old.dtype)
        new[:, :old_slots] = old
        larger[name] = new
    state = state._replace(**larger)
    for row in range(len(state.counters)):
        first_free = state.counters[row, FREE]
        _link_free_slots(state.requests[row : row + 1], old_slots)
        state.requests[row, -1, NEXT] = first_free
        state.counters[row, FREE] = old_slots
    return state


def _link_free_slots(requests: IntArray, first: int) -> None:
    requests[:, first:, NEXT] = np.arange(first + 1, requests.shape[1] + 1)
    requests[:, -1, NEXT] = -1


def copied(state: State) -> State:
    """A state of its own with the same content."""
    return State(*(array.copy() for array in state))


def copy_into(target: State, source: State) -> None:
    """Overwrite a state of the same shape."""
    for into, array in zip(target, source, strict=True):
        into[...] = array
