"""The hybrid reward, asked of the placement: what each component would be had the request gone to each replica.

What the window shows is mostly what no placement changes: the arrival rate, and the backlog that is there already. So
its figures are taken as they are, and moved by what the placement changes:

- Latency: the mean over everybody in flight. The request and the harm that it does come to those who have the window's
  latency: (n latency + what the placement adds to everybody) / (n + 1).
- Throughput: by Little's law, as many in flight leave the faster the less time they spend.
- Loads and queue lengths: as they are once the request is there.

What a placement adds to everybody is marginal delay (`exact.py`, `analytic.py`), of every replica at once. The formulas
of the components, their weights and their sum are those of `hybrid.py`.
"""

from dataclasses import replace

import numpy as np

from vidur_ppo_plugin.flags import RewardFlags
from vidur_ppo_plugin.routing.snapshot import REQUEST_WEIGHT, FloatArray

from .hybrid import OF_COMPLETIONS, OF_REPLICAS, Figures, normalised, weighed


def placement_rewards(
    figures: Figures | None,
    increases_s: FloatArray,
    loads: FloatArray,
    queue_lengths: FloatArray,
    prompt_tokens: float,
    flags: RewardFlags,
    *,
    penalty_scale: float = 1.0,
) -> dict[str, FloatArray]:
    """Every component by its name, and `total_reward`, of each replica.

    `figures`: of the window, None before the first completion. `increases_s`: what the placement adds to the latency of
    everybody on each replica. `loads` in tokens and `queue_lengths` before the placement.
    """
    num_in_flight = float(queue_lengths.sum())
    if figures is None:
        # Nobody has completed: the request's own time, on the replica where it does least harm, stands for latency.
        latency_s = float(increases_s.min())
        rate = (num_in_flight + 1.0) / latency_s
        figures = Figures(
            throughput=rate,
            latency_s=latency_s,
            target=flags.throughput_target or rate,
            mean_throughput=rate,
            mean_latency_s=latency_s,
            reference_latency_s=latency_s,
        )
    rows = []
    for replica, increase_s in enumerate(increases_s.tolist()):
        latency_s = (num_in_flight * figures.latency_s + increase_s) / (num_in_flight + 1.0)
        moved = replace(figures, latency_s=latency_s, throughput=figures.throughput * figures.latency_s / latency_s)
        after, queues = loads.copy(), queue_lengths.copy()
        after[replica] += prompt_tokens + REQUEST_WEIGHT
        queues[replica] += 1.0
        after = normalised(after)
        parts = {name: formula(moved, flags) for name, formula in OF_COMPLETIONS.items()}
        parts |= {name: formula(after, queues, flags) for name, formula in OF_REPLICAS.items()}
        rows.append(weighed(parts, flags, penalty_scale))
    return {name: np.array([row[name] for row in rows]) for name in rows[0] if name != "raw_reward"}
