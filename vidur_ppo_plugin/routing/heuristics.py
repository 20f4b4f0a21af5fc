"""The heuristics: one table, from which schedulers, routers, priors, teachers, flags and documentation follow.

`python -m vidur_ppo_plugin.routing.heuristics` prints their rows of the README's table.

A heuristic is a cost for each replica; the lowest wins. To add one, write its cost and its entry here. The cost is a
function of numbers and arrays, of which the same code is called by routers and compiled into the twin's passes:

    cost(values, facts, constants)
        values     the matrix of a `ClusterSnapshot`: a row for each of `ROWS`, a column for each replica. Where the
                   cost of a replica depends on nothing but its own figures, also one column of it; where it is not
                   compiled, a tuple of its rows
        facts      prompt tokens of the request, expected output tokens, tokens that fit into a block of the KV cache
        constants  what `Heuristic.constants` gives

They use only what a router can know. `choose` breaks ties fairly: at light load many replicas are equal, and taking the
first of them would send everything to replica 0.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import Any

import numpy as np

from vidur_ppo_plugin.flags import TieBreakingFlags, flag

from .compiled import compilable, compiled
from .delay_model import DelayModel
from .slowness import weigh_by_slowness
from .snapshot import CONTEXT_WEIGHT, REQUEST_WEIGHT, ROW, ClusterSnapshot, FloatArray, RequestInfo, token_load

_OUTSTANDING, _PREFILL, _CONTEXT = ROW["outstanding_requests"], ROW["prefill_tokens"], ROW["context_tokens"]
_KV_USED, _KV_TOTAL = ROW["kv_blocks_used"], ROW["kv_blocks_total"]
_SPEED, _CACHED = ROW["speed_factor"], ROW["cached_prompt_tokens"]
_TOKEN_TIME, _RATE = ROW["token_time_s"], ROW["completion_rate_per_s"]

Cost = Callable[[ClusterSnapshot, RequestInfo], FloatArray]
# Compiled code wants constants of one type: all have so many numbers, the last ones 0 where there are fewer.
_NUM_CONSTANTS = 4
# Up to so many replicas Python finds the lowest cost faster than numpy, whose calls cost the same for any number.
_MOST_IN_PYTHON = 16


# --- Costs ---


@compilable
def least_outstanding(values: Any, facts: Any, constants: Any) -> Any:
    """Requests in flight."""
    return values[_OUTSTANDING]


@compilable
def least_kv(values: Any, facts: Any, constants: Any) -> Any:
    """Share of the KV cache in use, counting the prompts still to prefill as if they were in it already.

    Waiting requests hold no blocks yet: without them a replica with a long queue would look empty.
    """
    return (values[_KV_USED] + values[_PREFILL] / facts[2]) / values[_KV_TOTAL]


@compilable
def least_tokens(values: Any, facts: Any, constants: Any) -> Any:
    """Prompt tokens still to prefill, and context tokens and requests in flight with their weights."""
    return token_load(values, constants[0], constants[1])


@compilable
def least_work(values: Any, facts: Any, constants: Any) -> Any:
    """`token_load` at its usual weights, times how slow a replica has been lately by the time between its tokens."""
    costs = np.empty(values.shape[1])
    for i in range(len(costs)):
        costs[i] = token_load(values[:, i], CONTEXT_WEIGHT, REQUEST_WEIGHT)
    weigh_by_slowness(values[_TOKEN_TIME], values[_RATE], costs)
    return costs


@compilable
def shortest_delay(values: Any, facts: Any, constants: Any) -> Any:
    """Expected delay of the request: the time to work off what is ahead of it, and itself.

    Prefill first: every prompt token ahead of it and its own. Then its output, one iteration a token, each longer
    by what the requests there and their context add to an iteration. The constants are those of `DelayModel`.
    """
    tokens = values[_PREFILL] + (facts[0] - values[_CACHED])
    iteration_s = (values[_OUTSTANDING] + 1.0) * constants[1] + (values[_CONTEXT] + tokens) * constants[2]
    return (tokens * constants[0] + facts[1] * iteration_s) / values[_SPEED]


@compilable
def size_split(values: Any, facts: Any, constants: Any) -> Any:
    """`least_tokens` among the last replicas for prompts above the threshold, among the others for the rest.

    Size-interval task assignment (Harchol-Balter et al. 1999): short requests never wait behind long ones.
    """
    threshold_tokens, num_long_replicas = constants[0], int(constants[1])
    costs = token_load(values, constants[2], constants[3])
    first_long = len(costs) - num_long_replicas
    if facts[0] > threshold_tokens:
        costs[:first_long] = np.inf
    else:
        costs[first_long:] = np.inf
    return costs


# --- The table ---


@dataclass(frozen=True)
class Option:
    """A number that a heuristic goes by, and the flag that sets it; at least `low`."""

    name: str
    default: float
    help: str
    low: float


@dataclass(frozen=True, kw_only=True)
class Heuristic:
    """One entry of the table."""

    name: str
    #: Of Vidur's scheduler type; never changes, and stays far away from Vidur's own 1 to 3.
    type_id: int
    #: Completes "sends a request to the replica with the least ...".
    description: str
    cost: Callable[[Any, Any, Any], Any]
    options: tuple[Option, ...] = ()
    #: What the options are about, for the documentation of the flags.
    options_are: str = ""
    #: Whether the constants of the cost are those of the delay model; otherwise they are the options, in their order.
    has_delay_model: bool = False
    #: How many replicas, drawn at random, are compared; 0: all.
    num_drawn: int = 0
    #: Whether routers call it compiled: where it has loops.
    is_compiled: bool = False
    #: The prior of this name: what makes a difference between two replicas, in the unit of the cost. The better of two
    #: that differ by so much is preferred with odds of e to 1. None: there is no such prior.
    prior_unit: float | None = None
    #: The same for the prior that grows with the logarithm of the cost, called `log_` and the name.
    log_prior_unit: float | None = None
    is_teacher: bool = True
    _compiled: compiled = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Prepare to compile the cost."""
        object.__setattr__(self, "_compiled", compiled(self.cost))

    @property
    def class_name(self) -> str:
        """`LeastTokens` for `least_tokens`: Vidur makes the names of flags out of the names of classes."""
        return "".join(word.capitalize() for word in self.name.split("_"))

    @property
    def flags(self) -> type:
        """The flags of its scheduler, a class as those of `flags/`."""
        if not self.options:
            return TieBreakingFlags
        fields = [
            (option.name, type(option.default), flag(option.default, option.help, low=option.low))
            for option in self.options
        ]
        namespace = {"__doc__": self.options_are, "__module__": __name__}
        return make_dataclass(f"{self.class_name}Flags", fields, bases=(TieBreakingFlags,), namespace=namespace)

    @property
    def constant_options(self) -> tuple[Option, ...]:
        """The options that the cost depends on."""
        return () if self.has_delay_model else self.options

    def constants(
        self, delay_model: DelayModel | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[float, ...]:
        """The constants that the cost takes; options that are not given have their defaults."""
        given = dict(options or {})
        if self.has_delay_model:
            if delay_model is None:
                raise ValueError(f"{self.name} needs a delay model")
            numbers: tuple[float, ...] = delay_model.constants
        else:
            numbers = tuple(float(given.pop(option.name, option.default)) for option in self.options)
            if given:
                raise ValueError(f"{self.name} has no option {', '.join(given)}")
        return (*numbers, *(0.0,) * (_NUM_CONSTANTS - len(numbers)))

    def bind(self, delay_model: DelayModel | None = None, options: Mapping[str, Any] | None = None) -> Cost:
        """The cost as a function of snapshot and request, with these options."""
        constants = self.constants(delay_model, options)
        cost, is_compiled = self._compiled if self.is_compiled else self.cost, self.is_compiled

        def costs(snapshot: ClusterSnapshot, request: RequestInfo) -> FloatArray:
            facts = request.prompt_tokens, snapshot.expected_decode_tokens, snapshot.kv_block_size
            found: FloatArray = cost(snapshot.values if is_compiled else snapshot.rows, facts, constants)
            return found

        return costs


_CONTEXT_OPTION = Option(
    "context_weight",
    CONTEXT_WEIGHT,
    "Score of a token in context (KV cache), in prompt tokens. Raise it if long contexts slow decoding down "
    "more than prompts do, lower it if prefill dominates.",
    low=0,
)
_REQUEST_OPTION = Option(
    "request_weight",
    REQUEST_WEIGHT,
    "Score of a request in flight, in prompt tokens. Raise it to spread requests more evenly, lower it to "
    "let the token counts decide.",
    low=0,
)
_CHUNK_TOKENS = 512.0  # of prefill

_TABLE = (
    Heuristic(
        name="least_outstanding",
        type_id=1002,
        description="requests in flight, waiting and running (what Vidur's `lor` should be: it counts waiting ones "
        "only)",
        cost=least_outstanding,
        prior_unit=1.0,  # a request
    ),
    Heuristic(
        name="power_of_two",
        type_id=1003,
        # Mitzenmacher 2001, "The Power of Two Choices in Randomized Load Balancing".
        description="requests in flight, of two replicas drawn at random",
        cost=least_outstanding,
        num_drawn=2,
    ),
    Heuristic(
        name="least_kv",
        type_id=1004,
        description="KV cache in use, counting the prompts still to prefill",
        cost=least_kv,
        prior_unit=0.02,  # a fiftieth of the cache
    ),
    Heuristic(
        name="least_tokens",
        type_id=1005,
        description="prompt tokens to prefill + 0.05 x tokens in context + 20 x requests in flight",
        cost=least_tokens,
        options=(_CONTEXT_OPTION, _REQUEST_OPTION),
        options_are="Weights of the `least_tokens` score.",
        prior_unit=_CHUNK_TOKENS,
        log_prior_unit=_CHUNK_TOKENS,
    ),
    Heuristic(
        name="least_work",
        type_id=1008,
        description="the same, times how slow a replica has been lately, by the time between its tokens: for speeds "
        "that nobody told",
        cost=least_work,
        is_compiled=True,
        log_prior_unit=_CHUNK_TOKENS,
    ),
    Heuristic(
        name="shortest_delay",
        type_id=1006,
        description="expected delay of this request, by the roofline and the replicas' speeds",
        cost=shortest_delay,
        options=(
            Option(
                "initial_decode_tokens",
                128.0,
                "Expected output length until the first requests have finished; then their running mean takes over. "
                "Raise it for long outputs, lower it for short ones.",
                low=1,
            ),
        ),
        options_are="What `shortest_delay` assumes before it has seen requests finish.",
        has_delay_model=True,
        prior_unit=0.05,  # seconds: what a chunk of prefill takes
    ),
    Heuristic(
        name="size_split",
        type_id=1007,
        description="the same as `least_tokens`, but prompts above a threshold have replicas of their own",
        cost=size_split,
        options=(
            Option(
                "threshold_tokens",
                4096,
                "Prompts longer than this go to the replicas set aside for long prompts. Raise it if those replicas "
                "are overloaded, lower it if short prompts still wait behind long ones.",
                low=1,
            ),
            Option(
                "num_long_replicas",
                1,
                "How many replicas (the last ones) are set aside for long prompts: at least 1 and fewer than there are "
                "replicas. Raise it if long prompts wait too long, lower it if short ones do.",
                low=1,
            ),
            _CONTEXT_OPTION,
            _REQUEST_OPTION,
        ),
        options_are="Where `size_split` draws the line, how many replicas serve the long side, and the weights of the "
        "`least_tokens` score.",
        is_teacher=False,
    ),
)
#: By name.
HEURISTICS = {heuristic.name: heuristic for heuristic in _TABLE}
#: What `costs_of` tells heuristics apart by.
KIND = {heuristic.name: number for number, heuristic in enumerate(_TABLE)}
_LEAST_OUTSTANDING, _LEAST_KV, _LEAST_TOKENS = KIND["least_outstanding"], KIND["least_kv"], KIND["least_tokens"]
_LEAST_WORK, _SHORTEST_DELAY = KIND["least_work"], KIND["shortest_delay"]
#: Vidur's own schedulers.
STOCK = ("random", "round_robin", "lor")
#: Who may demonstrate.
TEACHERS = (*STOCK, *(heuristic.name for heuristic in _TABLE if heuristic.is_teacher))


@compilable
def costs_of(kind: int, values: Any, facts: Any, constants: Any) -> Any:
    """Costs of a heuristic that can be a prior, by its kind, for compiled code; zeros for any other kind."""
    if kind == _LEAST_WORK:
        return least_work(values, facts, constants)
    costs = np.zeros(values.shape[1])
    for i in range(len(costs)):
        replica = values[:, i]
        if kind == _LEAST_OUTSTANDING:
            costs[i] = least_outstanding(replica, facts, constants)
        elif kind == _LEAST_KV:
            costs[i] = least_kv(replica, facts, constants)
        elif kind == _LEAST_TOKENS:
            costs[i] = least_tokens(replica, facts, constants)
        elif kind == _SHORTEST_DELAY:
            costs[i] = shortest_delay(replica, facts, constants)
    return costs


# --- From costs to a replica ---


def drawn_cost(cost: FloatArray, snapshot: ClusterSnapshot, num_drawn: int, rng: random.Random) -> FloatArray:
    """The cost with all replicas out of the question but so many, drawn at random among those that take requests."""
    candidates: Sequence[int] = range(len(cost))
    if snapshot.available is not None:
        candidates = snapshot.available.nonzero()[0].tolist()
    if len(candidates) <= num_drawn:
        return cost
    drawn = rng.sample(candidates, num_drawn)
    result = np.full(len(cost), np.inf)
    result[drawn] = cost[drawn]
    return result


def available_cost(cost: FloatArray, snapshot: ClusterSnapshot) -> FloatArray:
    """The cost with replicas that take no new requests out of the question.

    Where a heuristic rules all others out (its long replicas are drained), the fewest requests in flight decide.
    """
    if snapshot.available is None:
        return cost
    masked: FloatArray = np.where(snapshot.available, cost, np.inf)
    if np.isinf(masked).all():
        masked = np.where(snapshot.available, snapshot.outstanding_requests, np.inf)
    return masked


def choose(cost: FloatArray, rng: random.Random) -> int:
    """Index of the lowest cost; of several equal ones each is equally likely, by the given generator."""
    if len(cost) <= _MOST_IN_PYTHON:
        costs = cost.tolist()
        lowest = min(costs)
        best = [index for index, each in enumerate(costs) if each == lowest]
    else:
        best = (cost == np.minimum.reduce(cost)).nonzero()[0].tolist()
    return best[0] if len(best) == 1 else best[rng.randrange(len(best))]


def docs() -> str:
    """The rows of the README's table."""
    return "".join(f"| `{heuristic.name}` | {heuristic.description} |\n" for heuristic in _TABLE)


if __name__ == "__main__":
    print(docs(), end="")
