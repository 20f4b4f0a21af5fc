"""The twin's state: a block of memory for each replica, so that a replica is copied in one go.

Replicas meet only in the router, so each row of `State.cells` is a machine of its own: it has its own requests, clock
and events. Several clusters are simply more rows. A cell is 8 bytes, a whole number or a float depending on what it
stands for; kernels get a row twice, as `i` (whole numbers) and as `f` (floats). A row has, in this order:

- counters and clocks, at the places named below;
- for each pipeline stage: STAGE_CELLS;
- a ring of immediate events: code, order;
- the idle requests: admitted and in no batch, in the order of the replica scheduler's list;
- for each batch in flight: BATCH_HEADER cells, then request and new tokens in turn;
- the requests, REQUEST_CELLS each, at the end, so that there can be more of them.

A request is known by the place of its cells. (numba counts references to every array that it is handed, which is why
there is one block and not a dozen of arrays: it made the twin ten times as slow.)
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Float32Array = NDArray[np.float32]

# Replica schedulers, by the names that Vidur gives them.
SCHEDULERS = ("sarathi", "vllm", "orca", "mnemosyne_fcfs_fixed_chunk")
SARATHI, VLLM, ORCA, FIXED_CHUNK = range(4)

# What a call of the event machine ended with. It can be called again after each of the last three was dealt with.
DONE, TIME_UNKNOWN, LOG_FULL, NO_SLOT = range(4)

# Kinds of immediate events; the stage, where there is one, is added: code = kind * MAX_STAGES + stage.
MAX_STAGES = 64
STAGE_ARRIVAL, STAGE_SCHEDULE, BATCH_END, REPLICA_SCHEDULE = range(4)

# Counters. Lists have a head and, next to it, a tail (-1: empty): the waiting queue, and the prompts that fixed_chunk
# has begun. FREE is the first unused request.
QUEUE, QUEUE_TAIL, PARTIAL, PARTIAL_TAIL, FREE, NUM_IDLE = range(6)
KV_USED, ADMITTED, RUNNING_BATCHES, RUNNING_STAGES, NEWEST_BATCH, OLDEST_BATCH = range(6, 12)
FIRST_EVENT, NUM_EVENTS, SEQUENCE, MARKER = range(12, 16)
OUTSTANDING, PREFILL_TOKENS, CONTEXT_TOKENS, DECODED_TOKENS, FINISHED, FINISHED_DECODE_TOKENS = range(16, 22)
NUM_BATCHES, NUM_BATCHED_REQUESTS = range(22, 24)
# Clocks: time of the last event, how far the row was asked to go, the last submission; and what a snapshot averages.
NOW, TARGET, SUBMITTED, RECENT_LATENCY, COMPLETION_RATE, RATE_UPDATED, TOKEN_TIME, TYPICAL_PROMPT = range(24, 32)
FIRST_STAGE = 32
# A stage: order of its end event, batch that comes next, batches that wait for it; when it ends (infinity: idle).
END_ORDER, NEXT_BATCH, NUM_WAITING, END_S = range(4)
STAGE_CELLS = 4
# A batch: number of requests; seconds on a middle stage, on the last one.
SIZE, MIDDLE_S, LAST_S = range(3)
BATCH_HEADER = 3
# A request. A preemption turns what was generated into prompt (PREFILL grows); TOTAL and PROMPT keep their values.
# BLOCKS is 0 without admission. NEXT links queues and the list of free requests. Then moments, in seconds; SCHEDULED
# and FIRST_TOKEN are NaN until they have happened.
PREFILL, TOTAL, PROCESSED, BLOCKS, RESTARTS, NEXT, ID, PROMPT, IS_DECODING = range(9)
ARRIVED, SCHEDULED, FIRST_TOKEN = range(9, 12)
REQUEST_CELLS = 12

# Columns of the log of completed requests.
LOG_ID, LOG_ROW, LOG_ARRIVED, LOG_SCHEDULED, LOG_FIRST_TOKEN, LOG_COMPLETED, LOG_RESTARTS = range(7)
NUM_LOG_COLUMNS = 7
# Signals: entries of the log; and the table entries that TIME_UNKNOWN is about.
LOG_SIZE, MISSING_TOKENS, MISSING_CHUNK, MISSING_DECODES = range(4)


class Rules(NamedTuple):
    """What the replica schedulers go by, and where things are in a row; plain numbers, as the kernels want them."""

    scheduler: int
    num_stages: int
    block_size: int
    num_blocks: int
    watermark_blocks: int
    #: Requests that may hold blocks, and that may be in one batch.
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
    #: First cells of the parts of a row, and the length of two of them.
    events: int = 0
    num_event_cells: int = 0
    idle: int = 0
    batches: int = 0
    batch_cells: int = 0
    requests: int = 0


class Times(NamedTuple):
    """Tables of batch times; NaN where a value was not needed yet. First axis of `layers`: the speed."""

    layers: FloatArray
    decode_slopes: FloatArray
    prefill_lines: FloatArray
    slowness: FloatArray
    #: For each row the index of its speed.
    speed_index: IntArray


class State(NamedTuple):
    """All mutable memory of a twin; `floats` is a view of `cells` as floats."""

    cells: IntArray
    floats: FloatArray
    log: FloatArray
    signals: IntArray


def placed(rules: Rules) -> Rules:
    """The rules with the places of the parts of a row."""
    # A stage that ends makes three events, and each of those at most one.
    num_event_cells = 2 * (8 * rules.num_stages + 8)
    events = FIRST_STAGE + STAGE_CELLS * rules.num_stages
    idle = events + num_event_cells
    batches = idle + max_running(rules)
    batch_cells = BATCH_HEADER + 2 * max_running(rules)
    return rules._replace(
        events=events,
        num_event_cells=num_event_cells,
        idle=idle,
        batches=batches,
        batch_cells=batch_cells,
        requests=batches + batch_cells * rules.num_stages,
    )


def max_running(rules: Rules) -> int:
    """Most requests that can be admitted at once: orca fills a batch for each stage."""
    return rules.num_stages * rules.max_batch_size if rules.scheduler == ORCA else rules.max_admitted


def new_state(rules: Rules, num_rows: int, *, num_requests: int, log_size: int) -> State:
    """Empty replicas, each with room for `num_requests` requests."""
    cells = np.zeros((num_rows, rules.requests + REQUEST_CELLS * num_requests), np.int64)
    state = _with_cells(cells, np.zeros((log_size, NUM_LOG_COLUMNS)), np.zeros(4, np.int64))
    clear(rules, state)
    return state


def clear(rules: Rules, state: State) -> None:
    """Forget all requests, past and present."""
    state.cells[:] = 0
    state.signals[:] = 0
    state.cells[:, [QUEUE, QUEUE_TAIL, PARTIAL, PARTIAL_TAIL, FREE]] = -1
    state.floats[:, [TARGET, SUBMITTED]] = -np.inf
    for stage in range(rules.num_stages):
        state.floats[:, FIRST_STAGE + STAGE_CELLS * stage + END_S] = np.inf
    _link_free(state.cells, rules.requests)


def grown(rules: Rules, state: State) -> State:
    """A copy of a state with room for twice as many requests."""
    num_rows, width = state.cells.shape
    cells = np.zeros((num_rows, 2 * width - rules.requests), np.int64)
    cells[:, :width] = state.cells
    _link_free(cells, width)
    return _with_cells(cells, state.log, state.signals)


def scratch_for(rules: Rules, state: State) -> State:
    """A row to copy one of the state's into and roll forward; its log has room for all that may complete."""
    num_requests = (state.cells.shape[1] - rules.requests) // REQUEST_CELLS
    return new_state(rules, 1, num_requests=num_requests, log_size=num_requests + max_running(rules))


def _link_free(cells: IntArray, first: int) -> None:
    """Add the requests from a place on to the list of free ones."""
    width = cells.shape[1]
    cells[:, first + NEXT :: REQUEST_CELLS] = np.arange(first, width, REQUEST_CELLS) + REQUEST_CELLS
    cells[:, width - REQUEST_CELLS + NEXT] = cells[:, FREE]
    cells[:, FREE] = first


def _with_cells(cells: IntArray, log: FloatArray, signals: IntArray) -> State:
    return State(cells, cells.view(np.float64), log, signals)


def copied(state: State) -> State:
    """An independent copy of a state."""
    return _with_cells(state.cells.copy(), state.log.copy(), state.signals.copy())


def copy_into(target: State, source: State) -> None:
    """Overwrite a state with another of the same shape."""
    for into, array in zip(target, source, strict=True):
        into[...] = array
