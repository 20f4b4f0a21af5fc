"""What a backend reports of itself: the few figures of its Prometheus page that a decision needs.

Names differ between versions of vLLM and between servers; `ALIASES` has them all, the newest first. A page has some
thousand lines, so only those that start with one of our names are looked at.
"""

import math
import re
from dataclasses import dataclass

#: Our name of a figure -> the names that servers give it, the newest first.
ALIASES: dict[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    # vLLM renamed it with the V1 engine; the old name was there until 0.11.
    "kv_used_fraction": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
    "ttft_s_sum": ("vllm:time_to_first_token_seconds_sum", "sglang:time_to_first_token_seconds_sum"),
    "ttft_s_count": ("vllm:time_to_first_token_seconds_count", "sglang:time_to_first_token_seconds_count"),
    "tbt_s_sum": (
        "vllm:inter_token_latency_seconds_sum",
        "vllm:time_per_output_token_seconds_sum",
        "sglang:inter_token_latency_seconds_sum",
    ),
    "tbt_s_count": (
        "vllm:inter_token_latency_seconds_count",
        "vllm:time_per_output_token_seconds_count",
        "sglang:inter_token_latency_seconds_count",
    ),
}
#: A gauge whose labels say how large the KV cache is.
CACHE_CONFIG = "vllm:cache_config_info"
#: Figures that are fractions: several engines behind one address have the mean of theirs, not the sum.
_AVERAGED = {"kv_used_fraction"}
_REQUIRED = ("running", "waiting")

_FIGURE_OF = {name: (figure, rank) for figure, names in ALIASES.items() for rank, name in enumerate(names)}
_LINE = re.compile(
    r"^(" + "|".join(re.escape(name) for name in (*_FIGURE_OF, CACHE_CONFIG)) + r")(?:\{(.*)\})? ([^ \n]+)", re.M
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Report:
    """What a backend said of itself at one moment; None where it does not say."""

    running: float
    waiting: float
    kv_used_fraction: float | None = None
    kv_blocks_total: float | None = None
    kv_block_size: int | None = None
    #: Counters since the server started: sums of seconds and how many they are of.
    ttft_s: tuple[float, float] | None = None
    tbt_s: tuple[float, float] | None = None


def parse_report(text: str) -> Report:
    """The figures of a Prometheus page; ValueError naming the figure if one that is needed is not there."""
    best_rank: dict[str, int] = {}
    values: dict[str, list[float]] = {}
    cache: dict[str, str] = {}
    for name, labels, number in _LINE.findall(text):
        if name == CACHE_CONFIG:
            cache = cache or dict(_LABEL.findall(labels))
            continue
        figure, rank = _FIGURE_OF[name]
        value = float(number)
        if not math.isfinite(value):
            continue
        if rank < best_rank.get(figure, len(_FIGURE_OF)):
            best_rank[figure], values[figure] = rank, []
        if rank == best_rank[figure]:
            values[figure].append(value)
    missing = [figure for figure in _REQUIRED if figure not in values]
    if missing:
        names = ", ".join(name for figure in missing for name in ALIASES[figure])
        raise ValueError(f"the metrics page has none of {names}")
    totals = {figure: sum(found) / (len(found) if figure in _AVERAGED else 1) for figure, found in values.items()}
    return Report(
        running=totals["running"],
        waiting=totals["waiting"],
        kv_used_fraction=totals.get("kv_used_fraction"),
        kv_blocks_total=_whole(cache.get("num_gpu_blocks")),
        kv_block_size=_whole(cache.get("block_size")),
        ttft_s=_pair(totals, "ttft_s"),
        tbt_s=_pair(totals, "tbt_s"),
    )


def _pair(totals: dict[str, float], name: str) -> tuple[float, float] | None:
    total, count = totals.get(f"{name}_sum"), totals.get(f"{name}_count")
    return None if total is None or count is None else (total, count)


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() and int(text) > 0 else None
