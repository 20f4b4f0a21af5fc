"""Is this run learning, and if not, what to turn? A list of checks of the metrics that it has recorded.

`python -m vidur_ppo_plugin.record.health > docs/health.md` writes their documentation anew. The thresholds stand here
and nowhere else, each with its reason.
"""

import csv
import json
import math
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vidur_ppo_plugin.flags import PPOModularFlags

from .metrics import find

#: Verdicts, from best to worst. `look` is not wrong in every run; `unknown` says what is missing.
OK, UNKNOWN, LOOK, BAD = "ok", "unknown", "look", "bad"
#: The flags of a run, beside its metrics.
FLAGS_FILE = "ppo_flags.json"

# Fewer updates say nothing: one full rollout after another is still filling up.
_LEAST_UPDATES = 4
# What a run has come to is judged by its last third: before, it was learning.
_LAST_SHARE = 1.0 / 3.0
# Rewards whose deviation is below this part of their size differ by rounding only.
_ROUNDING = 1e-9
# More than half of all updates at one and the same extreme: a limit, not chance.
_MOST_AT_LIMIT = 0.5
# Rank correlation of rewards with latency: beyond this, and beyond 2.6 standard errors (1 % by chance) of none at all.
_MOST_CORRELATION, _STANDARD_ERRORS = 0.3, 2.6
# Share of the entropy of a uniform choice: above it every replica is as good as any other to the policy.
_UNIFORM = 0.98
# The plan of 2025-09-18 asks for no replica above half of the requests; of two, nine tenths.
_MOST_SHARE, _MOST_SHARE_OF_TWO = 0.5, 0.9
# A divergence below this is rounding: no weight has moved. Above so many times the target, updates are too large.
_LEAST_KL, _MOST_KL_FACTOR = 1e-8, 3.0
# The plan's limit.
_MOST_CLIPPED = 0.3
# Below 0 a critic is worse than the mean of the returns; rounding and noise of few updates are borne.
_LEAST_EXPLAINED = -0.05
# Reward that may be lost against the prior's choices, relative: what sampling costs.
_MOST_LOST = 0.02
# Mean latency that may be lost against the prior on the same requests: what exploring costs, and what is broken.
_LOOK_LOST, _BAD_LOST = 0.01, 0.05


class HealthError(ValueError):
    """Metrics that cannot be judged."""


@dataclass(frozen=True)
class Finding:
    """What a check has found."""

    check: str
    verdict: str
    figure: str
    #: What to turn; empty if nothing is wrong.
    advice: str = ""


class History:
    """The metrics of a run, a column each, and the flags of the run."""

    def __init__(self, flags: PPOModularFlags, *, memory: int | None = None) -> None:
        """`memory`: only so many of the latest rows are kept; None: all."""
        self.flags = flags
        self._memory = memory
        self._num_rows = 0
        # Plain doubles, NaN for what is missing: a run may have many updates.
        self._columns: dict[str, array[float]] = {}

    def add(self, row: Mapping[str, float | None]) -> None:
        """One more update."""
        for name in row.keys() - self._columns.keys():
            self._columns[name] = array("d", [math.nan] * self._num_rows)
        for name, column in self._columns.items():
            value = row.get(name)
            column.append(math.nan if value is None else value)
        self._num_rows += 1
        if self._memory is not None and self._num_rows > self._memory:
            self._num_rows -= 1
            for column in self._columns.values():
                del column[0]

    def __len__(self) -> int:
        return self._num_rows

    def column(self, name: str) -> NDArray[np.float64]:
        """The values that were recorded, in order; without those that are missing."""
        values = np.array(self._columns.get(name, ()), dtype=np.float64)
        return values[~np.isnan(values)]

    def last(self, name: str) -> float:
        """The mean over the last third of the run; NaN if nothing was recorded."""
        values = self.column(name)
        return float(values[-max(1, math.ceil(_LAST_SHARE * len(values))) :].mean()) if len(values) else math.nan

    @property
    def shares(self) -> dict[int, float]:
        """Each replica's share in the last third, by its index; empty in fleets that have no column for each."""
        names = [name for name in self._columns if name.startswith("action_replica_")]
        found = {int(name.rpartition("_")[2]): self.last(name) for name in names}
        return {index: share for index, share in found.items() if not math.isnan(share)}


Examine = Callable[[History], tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One question to a run."""

    name: str
    #: What is wrong if it is bad, and from where on, with the reason.
    meaning: str
    #: Flags of `ppo_modular` to turn.
    turn: str
    #: The verdict, and the figure that it is about.
    examine: Examine

    def run(self, history: History) -> Finding:
        """Ask it."""
        if len(history) < _LEAST_UPDATES:
            return Finding(self.name, UNKNOWN, f"{len(history)} updates, {_LEAST_UPDATES} are needed")
        verdict, figure = self.examine(history)
        return Finding(self.name, verdict, figure, self.turn if verdict in (LOOK, BAD) else "")


def _reward_is_dead(history: History) -> tuple[str, str]:
    deviation, mean = history.last("reward_std"), history.last("reward_mean")
    if math.isnan(deviation):
        return UNKNOWN, "no rewards recorded"
    return _bad_if(deviation <= _ROUNDING * abs(mean)), f"deviation {deviation:.3g}, mean {mean:.3g}"


def _reward_is_saturated(history: History) -> tuple[str, str]:
    found = []
    for name, extreme in (("reward_max", np.max), ("reward_min", np.min)):
        values = history.column(name)
        if len(values):
            found.append((float(np.mean(values == extreme(values))), name, float(extreme(values))))
    if not found:
        return UNKNOWN, "no rewards recorded"
    share, name, value = max(found)
    return _bad_if(share > _MOST_AT_LIMIT), f"{name} is {value:.3g} in {share:.0%} of the updates"


def _rises_with_latency(history: History) -> tuple[str, str]:
    if len(history.column("credit_total_reward")):
        return OK, "asked of the placement: what moves latency alone is not in it"
    rewards, latencies = history.column("reward_mean"), history.column("latency_mean")
    if len(rewards) != len(latencies) or len(rewards) < 2 * _LEAST_UPDATES:
        return UNKNOWN, f"{min(len(rewards), len(latencies))} updates with rewards and latencies"
    correlation = _rank_correlation(rewards, latencies)
    limit = max(_MOST_CORRELATION, _STANDARD_ERRORS / math.sqrt(len(rewards) - 1))
    return _bad_if(correlation > limit), f"rank correlation {correlation:+.2f}, limit {limit:+.2f}"


def _is_uniform(history: History) -> tuple[str, str]:
    num_replicas = len(history.shares)
    entropy = history.last("entropy")
    if num_replicas < 2 or math.isnan(entropy):
        return UNKNOWN, "no entropy, or no share of each replica, recorded"
    share = entropy / math.log(num_replicas)
    return _bad_if(share > _UNIFORM), f"entropy {entropy:.3f}, {share:.0%} of a uniform choice"


def _is_below_floor(history: History) -> tuple[str, str]:
    floor, entropy = history.flags.entropy_min, history.last("entropy")
    if math.isnan(entropy):
        return UNKNOWN, "no entropy recorded"
    return LOOK if entropy < floor else OK, f"entropy {entropy:.3f}, floor {floor:g}"


def _has_collapsed(history: History) -> tuple[str, str]:
    shares = history.shares
    if len(shares) < 2:
        share = history.last("action_share_max")
        if math.isnan(share):
            return UNKNOWN, "no shares recorded"
        return _bad_if(share > _MOST_SHARE), f"largest share {share:.1%}"
    replica = max(shares, key=lambda index: shares[index])
    limit = _MOST_SHARE_OF_TWO if len(shares) == 2 else _MOST_SHARE
    return _bad_if(shares[replica] > limit), f"replica {replica} gets {shares[replica]:.1%}, limit {limit:.0%}"


def _never_moves(history: History) -> tuple[str, str]:
    values = history.column("approx_kl")
    if not len(values):
        return UNKNOWN, "no divergence recorded"
    return _bad_if(float(values.max()) < _LEAST_KL), f"largest approx_kl {values.max():.3g}"


def _moves_too_far(history: History) -> tuple[str, str]:
    values, limit = history.column("approx_kl"), _MOST_KL_FACTOR * history.flags.target_kl
    if not len(values):
        return UNKNOWN, "no divergence recorded"
    share = float(np.mean(values > limit))
    return _bad_if(share > _MOST_AT_LIMIT), f"approx_kl above {limit:.3g} in {share:.0%} of the updates"


def _is_clipped(history: History) -> tuple[str, str]:
    share = history.last("clipfrac")
    if math.isnan(share):
        return UNKNOWN, "no clipfrac recorded"
    return _bad_if(share > _MOST_CLIPPED), f"clipfrac {share:.2f}, limit {_MOST_CLIPPED:g}"


def _explains_nothing(history: History) -> tuple[str, str]:
    explained = history.last("explained_variance")
    if math.isnan(explained):
        return UNKNOWN, "no explained_variance recorded"
    figure = f"explained_variance {explained:.2f}"
    if history.flags.pays_at_once and history.flags.compares_actions:
        return OK, f"{figure}; not used: actions are compared with each other"
    return _bad_if(explained < _LEAST_EXPLAINED), figure


def _never_pulses(history: History) -> tuple[str, str]:
    flags, values = history.flags, history.column("temp_is_pulsing")
    if not flags.enable_dynamic_temperature or not flags.pulse_interval:
        return OK, "none asked for"
    due = len(history) // flags.pulse_interval
    if not due or not len(values):
        return UNKNOWN, f"the first is due after {flags.pulse_interval} updates"
    onsets = int(np.sum(np.diff(np.concatenate([[0.0], values])) > 0))
    # The pulse that is due with the last update has not been in use yet.
    return _bad_if(onsets < due - 1 or (due > 1 and not onsets)), f"{onsets} pulses in {len(values)} updates"


def _is_worse_than_prior(history: History) -> tuple[str, str]:
    gain = history.last("gain_over_prior")
    if math.isnan(gain):
        return UNKNOWN, "not recorded: rewards are not known for every replica"
    return _bad_if(gain < -_MOST_LOST), f"gain_over_prior {gain:+.2%}"


def _delta_is_flat(history: History) -> tuple[str, str]:
    values = history.column("delta_score")
    if not len(values):
        return OK, "not a hybrid reward"
    return _bad_if(float(np.ptp(values)) == 0.0), f"delta_score from {values.min():+.3f} to {values.max():+.3f}"


def _score_is_low(history: History) -> tuple[str, str]:
    if not len(history.column("absolute_score")):
        return OK, "not a hybrid reward"
    score, total = history.last("absolute_score"), history.last("total_reward")
    return LOOK if score <= 1.0 or total <= 0.0 else OK, f"absolute_score {score:.3g}, total_reward {total:.3g}"


def _bad_if(is_bad: bool) -> str:
    return BAD if is_bad else OK


def _rank_correlation(left: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    first, second = (np.argsort(np.argsort(values)).astype(np.float64) for values in (left, right))
    return float(np.corrcoef(first, second)[0, 1])


CHECKS = (
    Check(
        name="reward is dead",
        meaning="Rewards of a rollout differ by less than 1e-9 of their size: nothing tells a good action from a bad "
        "one.",
        turn="the weights of the reward, `reward_clip_low`, `reward_clip_high`",
        examine=_reward_is_dead,
    ),
    Check(
        name="reward is saturated",
        meaning="The largest or the smallest reward is one and the same number in more than half of the updates: a "
        "limit cuts off what lies beyond it.",
        turn="`reward_clip_high`, `reward_clip_low`",
        examine=_reward_is_saturated,
    ),
    Check(
        name="reward rises with latency",
        meaning="Updates with a higher latency have higher rewards: rank correlation above 0.3 and above what chance "
        "gives in one run of a hundred. With `hybrid` of the window this is the arrival rate: more requests, more "
        "throughput, more latency.",
        turn="`hybrid_credit` placement, `alpha`, `throughput_target`",
        examine=_rises_with_latency,
    ),
    Check(
        name="policy is uniform",
        meaning="In the last third the entropy is above 98 % of that of a uniform choice: the policy is random.",
        turn="lower `entropy_coef`, raise `lr`; `prior`",
        examine=_is_uniform,
    ),
    Check(
        name="entropy is below its floor",
        meaning="In the last third the entropy is below `entropy_min`, which was asked for.",
        turn="raise `entropy_floor_coef` or `entropy_coef`",
        examine=_is_below_floor,
    ),
    Check(
        name="policy has collapsed",
        meaning="In the last third one replica gets more than half of the requests (of two replicas: nine tenths). The "
        "limit is that of the plan of 2025-09-18; where one replica is much faster than the others it may be right.",
        turn="raise `entropy_min`, `kl_ref_coef`; `prior`",
        examine=_has_collapsed,
    ),
    Check(
        name="policy never moves",
        meaning="The divergence of no update is above rounding: nothing is learned.",
        turn="raise `lr`, `epochs`; lower `kl_coef`",
        examine=_never_moves,
    ),
    Check(
        name="updates are too large",
        meaning="More than half of the updates diverge by more than three times `target_kl`.",
        turn="lower `lr`, `epochs`; `enable_adaptive_kl`, `early_stop_kl_factor`",
        examine=_moves_too_far,
    ),
    Check(
        name="gradients are cut off",
        meaning="In the last third more than 30 % of the ratios are outside the clip, the plan's limit: most of what "
        "the later epochs would change is thrown away.",
        turn="lower `lr`, `epochs`; raise `minibatch_size`",
        examine=_is_clipped,
    ),
    Check(
        name="critic is no better than a constant",
        meaning="In the last third the critic explains less than nothing of the returns. It does not matter where "
        "actions are compared with each other.",
        turn="raise `rollout_len`, `value_coef`; lower `gamma`; a reward that is known at once",
        examine=_explains_nothing,
    ),
    Check(
        name="pulses never fire",
        meaning="Temperature pulses were asked for at an interval, and there are fewer of them.",
        turn="`enable_dynamic_temperature`, `pulse_interval`, `max_temperature`",
        examine=_never_pulses,
    ),
    Check(
        name="worse than its prior",
        meaning="In the states of the last third, the most likely action earns over 2 % less than the prior's choice.",
        turn="raise `kl_ref_coef`, lower `lr`; `backlog_weight`",
        examine=_is_worse_than_prior,
    ),
    Check(
        name="delta_score is constant",
        meaning="A hybrid reward whose change never changes: its window is empty or never moves. The plan asks for it.",
        turn="`reward_window_s`",
        examine=_delta_is_flat,
    ),
    Check(
        name="scores are negative",
        meaning="The plan asks for an absolute_score above 1 and a positive total_reward. That says little: the score "
        "is the arrival rate over `throughput_target`, which no placement changes, and what is learned from is the "
        "difference between replicas.",
        turn="lower `throughput_target`, or leave it as it is",
        examine=_score_is_low,
    ),
)


def examine(history: History) -> list[Finding]:
    """The finding of every check."""
    return [check.run(history) for check in CHECKS]


def compare_with(ours_s: float, others_s: Mapping[str, float], prior: str) -> list[Finding]:
    """Mean latency of the run against that of others on the same requests; `prior` may be one of them."""
    findings = []
    for name, latency_s in others_s.items():
        change = ours_s / latency_s - 1.0
        look, bad = (_LOOK_LOST, _BAD_LOST) if name == prior else (0.0, 0.0)
        verdict = BAD if change > bad else LOOK if change > look else OK
        advice = "raise `kl_ref_coef` or `rollout_len`, lower `entropy_coef`" if verdict != OK else ""
        findings.append(
            Finding(f"worse than {name}", verdict, f"mean latency {change:+.1%} on the same requests", advice)
        )
    return findings


def format_findings(findings: Sequence[Finding]) -> str:
    """The list for people."""
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        advice = f"; turn: {finding.advice}" if finding.advice else ""
        lines.append(f"{finding.verdict:<8}{finding.check:<{width}}  {finding.figure}{advice}")
    worst = max(findings, key=lambda finding: (OK, UNKNOWN, LOOK, BAD).index(finding.verdict)).verdict
    counts = ", ".join(
        f"{sum(finding.verdict == verdict for finding in findings)} {verdict}" for verdict in (OK, LOOK, BAD, UNKNOWN)
    )
    return "\n".join([*lines, f"{'healthy' if worst != BAD else 'something is bad'}: {counts}"])


def is_bad(findings: Sequence[Finding]) -> bool:
    """Whether any check is bad."""
    return any(finding.verdict == BAD for finding in findings)


# --- Files ---


def save_flags(flags: PPOModularFlags, directory: Path) -> None:
    """Write the flags of a run beside its metrics, where `read` finds them."""
    values = {item.name: getattr(flags, item.name) for item in fields(PPOModularFlags)}
    beside = directory / f"{FLAGS_FILE}.new"
    beside.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, directory / FLAGS_FILE)  # there whole, or as it was


def read(path: Path) -> History:
    """The history of a run from its ppo_metrics.csv, and the flags that lie beside it; HealthError names the file."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            names = list(reader.fieldnames or [])
            rows = [_numbers(path, line, row) for line, row in enumerate(reader, start=2)]
    except (OSError, UnicodeDecodeError) as error:
        raise HealthError(f"{path}: cannot be read: {error}") from error
    unknown = [name for name in names if not _is_metric(name)]
    if not names or unknown:
        what = f"has a column {unknown[0]!r}" if unknown else "is empty"
        raise HealthError(f"{path}: is no ppo_metrics.csv: it {what}")
    history = History(_flags_beside(path))
    for row in rows:
        history.add(row)
    return history


def _numbers(path: Path, line: int, row: Mapping[str, Any]) -> dict[str, float | None]:
    try:
        return {name: float(text) if text else None for name, text in row.items()}
    except (TypeError, ValueError):
        raise HealthError(f"{path}: line {line}: a value is no number, or there are too many") from None


def _is_metric(name: str) -> bool:
    try:
        find(name)
    except ValueError:
        return False
    return True


def _flags_beside(path: Path) -> PPOModularFlags:
    place = path.parent / FLAGS_FILE
    if not place.exists():
        return PPOModularFlags()
    try:
        known = asdict(PPOModularFlags())
        values = json.loads(place.read_text(encoding="utf-8"))
        return PPOModularFlags(**{name: value for name, value in values.items() if name in known})
    except (OSError, ValueError, AttributeError) as error:
        raise HealthError(f"{place}: are no flags: {error}") from error


def docs() -> str:
    """The checks as Markdown: docs/health.md."""
    lines = [
        "# Is a run healthy?",
        "",
        "<!-- Generated: python -m vidur_ppo_plugin.record.health > docs/health.md -->",
        "",
        "    vidur-ppo health runs/one/ppo_metrics.csv",
        "",
        "asks the metrics of a run what the diagnosis of earlier attempts asked, and what the plan of 2025-09-18",
        "checks. A run of `ppo_modular` that learned logs the same list at its end, and `vidur-ppo run` adds how it",
        "did against `random`, `round_robin` and its prior on the requests of its second half. The exit status is 0,",
        "or 1 if something is bad. While a run learns, a check that turns bad is a warning in the log, and an alert in",
        "W&B.",
        "",
        "`bad` is broken. `look` is wrong in most runs. `unknown` says what is missing. `ppo_flags.json`, which a run",
        "leaves beside its metrics, tells which checks apply; without it the defaults are assumed.",
        "",
        "| check | what it means, and from where on | what to turn |",
        "|---|---|---|",
        *(f"| {check.name} | {check.meaning} | {check.turn} |" for check in CHECKS),
        "| worse than random, round_robin | Mean latency above theirs on the same requests, in the second half of a "
        "run. | raise `kl_ref_coef` or `rollout_len`, lower `entropy_coef` |",
        "| worse than its prior, on the same requests | `look` from 1 % on, which exploring may cost; `bad` from 5 %. "
        "| the same |",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(docs(), end="")
