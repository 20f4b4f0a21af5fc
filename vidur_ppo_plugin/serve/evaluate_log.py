"""`vidur-ppo evaluate-log`: what other policies would have reached on a record of real decisions."""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simple_parsing import field

if TYPE_CHECKING:
    from vidur_ppo_plugin.learn.off_policy import Estimate

#: What is printed below the figures.
SCOPE = (
    "Estimated is one decision at a time in the states that the recorded policy made: not what running the other "
    "policy\nwould do to queues, caches and later turns of a session, which can be far more, far less or the opposite. "
    "Replay the\nrecord in simulation before you change the policy: vidur-ppo compare --scenarios replay --trace RECORD"
)
# Figures that are not told where the record cannot tell.
_TOLD_OF_POLICY = ("self_normalised", "doubly_robust", "difference", "low", "high")


@dataclass
class EvaluateLog:
    """Estimate what single decisions of other policies would have cost, from a record of real ones.

        vidur-ppo evaluate-log RECORD.jsonl --policy least_tokens --policy pretrained

    The record is one of `vidur-ppo serve --record FILE --explore 0.05`. Estimated is one decision at a time, in the
    states that the recorded policy made; not what running the other policy would do to queues, caches and later turns
    of a session, which can be far more, far less or the opposite: replay the record in simulation for that
    (`vidur-ppo compare --scenarios replay --trace RECORD`). docs/serving.md explains the figures.
    """

    # The record, a file that `vidur-ppo serve --record` wrote.
    record: str = field(positional=True, metavar="RECORD.jsonl")
    # A policy to estimate, named as for `vidur-ppo serve`; once for each. Unless given, least_tokens.
    policy: list[str] = field(default_factory=list, action="append", type=str, metavar="NAME")
    # What is estimated.
    cost: str = field(default="latency_s", choices=["latency_s", "ttft_s"])
    # Seed of ties.
    seed: int = 0
    # Print one JSON object instead of a table.
    json: bool = field(default=False, action="store_true")

    def execute(self, overrides: list[str]) -> int:
        """Read, estimate, print."""
        given: list[Any] = list(self.policy)
        names = [name for item in given for name in (item if isinstance(item, list) else [item])]
        try:
            results = evaluate(Path(self.record), names or ["least_tokens"], cost=self.cost, seed=self.seed)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        print(json.dumps(results) if self.json else _table(results, self.cost))
        return 0


def evaluate(path: Path, names: list[str], *, cost: str, seed: int) -> dict[str, dict[str, Any]]:
    """The estimate of each policy, by its name; where the record cannot tell, None for figures, and a `reason`."""
    from vidur_ppo_plugin.learn.off_policy import estimate, probabilities_of, with_costs
    from vidur_ppo_plugin.record.decision_log import RecordError, read_record

    from .policies import build_policy

    routers = {name: build_policy(name, seed=seed) for name in names}
    decisions = read_record(path)
    try:
        logged = with_costs(decisions, cost)
        return {name: _told(estimate(logged, probabilities_of(router, logged))) for name, router in routers.items()}
    except ValueError as error:
        raise RecordError(f"{path}: {error}") from error


def _told(found: "Estimate") -> dict[str, Any]:
    result: dict[str, Any] = dataclasses.asdict(found)
    reason = found.why_unknown
    if reason is not None:
        result |= dict.fromkeys(_TOLD_OF_POLICY)
    return {**result, "reason": reason}


def _table(results: dict[str, dict[str, Any]], cost: str) -> str:
    first = next(iter(results.values()))
    width = max(6, *(len(name) for name in results))
    lines = [
        f"{first['num_decisions']:,} recorded decisions, mean {cost} {first['recorded']:.4f} s",
        f"{'policy':{width}}  {'same':>6}  {'worth':>8}  {'weighted':>9}  {'robust':>9}  one decision otherwise (95 %)",
    ]
    for name, result in results.items():
        known = f"{name:{width}}  {100 * result['agreement']:5.1f}%  {result['effective_size']:8.0f}  "
        if result["reason"] is not None:
            lines.append(f"{known}cannot tell: {result['reason']}")
            continue
        share = 100.0 / result["recorded"]
        lines.append(
            f"{known}{result['self_normalised']:9.4f}  {result['doubly_robust']:9.4f}  "
            f"{share * result['difference']:+6.1f} %  [{share * result['low']:+.1f}, {share * result['high']:+.1f}]"
        )
    return "\n".join([*lines, SCOPE])
