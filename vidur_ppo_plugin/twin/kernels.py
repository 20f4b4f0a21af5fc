"""The compiled functions that `Twin` calls."""

from typing import Any

from .compiled import entry
from .events import advance_row, submit_to_cells
from .layout import DONE, FINISHED, FINISHED_DECODE_TOKENS, OUTSTANDING
from .snapshot_column import write_column


@entry
def advance(rules: Any, times: Any, state: Any, until_s: float) -> Any:
    """Bring all replicas to a moment; DONE, or why it has to stop before."""
    for row in range(len(state.cells)):
        outcome = advance_row(rules, times, state, row, until_s)
        if outcome != DONE:
            return outcome
    return DONE


@entry
def submit(
    rules: Any,
    times: Any,
    state: Any,
    row: int,
    number: int,
    arrived_s: float,
    prompt_tokens: int,
    decode_tokens: int,
) -> Any:
    """Bring one replica to a request's arrival and hand the request over."""
    outcome = advance_row(rules, times, state, row, arrived_s)
    if outcome != DONE:
        return outcome
    i, f = state.cells[row], state.floats[row]
    return submit_to_cells(rules, i, f, number, arrived_s, prompt_tokens, decode_tokens)


@entry
def submit_all(
    rules: Any,
    times: Any,
    state: Any,
    position: Any,
    rows: Any,
    first_number: int,
    arrived_s: Any,
    prompt_tokens: Any,
    decode_tokens: Any,
) -> Any:
    """`submit` for each of many requests, from `position[0]` on, which counts those that were handed over."""
    while position[0] < len(rows):
        k = position[0]
        row = rows[k]
        outcome = advance_row(rules, times, state, row, arrived_s[k])
        if outcome == DONE:
            i, f = state.cells[row], state.floats[row]
            outcome = submit_to_cells(rules, i, f, first_number + k, arrived_s[k], prompt_tokens[k], decode_tokens[k])
        if outcome != DONE:
            return outcome
        position[0] += 1
    return DONE


@entry
def num_outstanding(state: Any) -> int:
    """Requests in flight on all replicas."""
    total = 0
    for row in range(len(state.cells)):
        total += state.cells[row, OUTSTANDING]
    return total


@entry
def observe(
    rules: Any, times: Any, state: Any, now_s: float, speed_factors: Any, values: Any, waiting: Any, finished: Any
) -> Any:
    """Bring all replicas to a decision and write what the router sees; `finished`: requests, and their outputs."""
    num_finished, num_tokens = 0, 0
    for row in range(len(state.cells)):
        outcome = advance_row(rules, times, state, row, now_s)
        if outcome != DONE:
            return outcome
        i = state.cells[row]
        write_column(rules, i, state.floats[row], now_s, speed_factors[row], values, waiting, row)
        num_finished += i[FINISHED]
        num_tokens += i[FINISHED_DECODE_TOKENS]
    finished[0], finished[1] = num_finished, num_tokens
    return DONE
