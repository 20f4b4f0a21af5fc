"""What a decision is worth."""

from dataclasses import dataclass, fields
from typing import Any, Dict, List, Optional

from .flag import flag, require

#: What a policy is asked for if nobody says: its `tail_preference`, from 0 (the mean) to 1 (the tail). Where the policy
#: of the package is best balanced, by docs/experiments.md: below it the slowest first tokens come later than with
#: least_tokens, above it less mean latency is won.
BALANCED = 0.8


@dataclass(frozen=True)
class HybridComponent:
    """A part of the hybrid reward; it stands with the flag that weighs it, its formula in `learn/credit/hybrid.py`."""

    name: str
    #: score: times its flag, added. bonus: added. penalty: subtracted, times the curriculum's penalty.
    kind: str
    #: For the documentation of the metric of that name.
    formula: str


@dataclass
class RewardFlags:
    """What a decision is worth."""

    reward_mode: str = flag(
        "marginal_delay",
        "marginal_delay: minus the time that a placement adds to everybody's remaining time, of every replica. "
        "queue_delay: minus the time-integral of requests in the system. hybrid: throughput, latency, balance.",
        choices=["marginal_delay", "queue_delay", "hybrid"],
    )
    latency_power: float = flag(
        1.0, "Power of latencies: lower it to 1 for the mean, raise it towards 2 to protect the tail.", low=1, high=4
    )
    tail_preference: float = flag(
        BALANCED,
        "What a policy that was trained for it aims at; one of its inputs. Raise it towards 1 to protect the slowest "
        "requests, lower it towards 0 for the lowest mean.",
        low=0,
        high=1,
    )
    backlog_weight: float = flag(
        3.0,
        "marginal_delay: weight of the growth of (seconds of prefill)^2, the harm to requests that come later. "
        "Raise it near saturation, lower it for light load.",
        low=0,
    )
    credit: str = flag(
        "auto",
        "marginal_delay: exact looks ahead in a twin of the simulation, analytic in a linear model of it; auto is "
        "exact where the twin covers the cluster and all replicas are scored.",
        choices=["auto", "exact", "analytic"],
    )
    hybrid_credit: str = flag(
        "placement",
        "hybrid: placement pays what each component would be had the request gone to each replica, at once (gamma 0). "
        "window pays what a sliding window shows at the next decision, most of which no placement changes (gamma about "
        "0.99).",
        choices=["placement", "window"],
    )
    throughput_target: float = flag(
        0.0,
        "hybrid: requests per second that score 1; 0 adapts to what was reached. Lower it if scores stay below 0, "
        "raise it if they are far above 1.",
        low=0,
    )
    absolute_weight: float = flag(
        0.8,
        "hybrid: weight of the absolute score. Raise it to reward levels, lower it if load moves them.",
        low=0,
        component=HybridComponent(
            "absolute_score",
            "score",
            "throughput / `throughput_target` - `alpha` · latency / `latency_threshold`, over the sliding window.",
        ),
    )
    delta_weight: float = flag(
        0.2,
        "hybrid: weight of the change score. Raise it to reward improvement, lower it if it is noise.",
        low=0,
        component=HybridComponent(
            "delta_score",
            "score",
            "Relative change of throughput minus relative change of latency, each against its moving average.",
        ),
    )
    alpha: float = flag(
        0.1, "hybrid: latency in the absolute score. Raise it if latency is ignored, lower it if throughput is.", low=0
    )
    kappa: float = flag(
        0.05,
        "hybrid: weight of the logistic penalty. Raise it to avoid lateness, lower it if it dominates.",
        low=0,
        component=HybridComponent(
            "logistic_penalty",
            "penalty",
            "`kappa` · (sigmoid(x) + max(0, x)), x = (latency - `latency_threshold`) / `sigma`.",
        ),
    )
    sigma: float = flag(
        2.0,
        "hybrid: seconds over which that penalty rises. Raise it for a soft edge, lower it for a sharp one.",
        above=0,
    )
    latency_threshold: float = flag(
        6.0,
        "hybrid: seconds of latency from which penalties set in; also full pressure on the temperature at twice "
        "this. Lower it if bonuses always flow, raise it if penalties do.",
        above=0,
    )
    latency_penalty_scale: float = flag(
        0.5,
        "hybrid: weight of latency above the threshold. Raise it for a hard limit, lower it in overload.",
        low=0,
        component=HybridComponent(
            "latency_penalty", "penalty", "`latency_penalty_scale` · max(0, latency / `latency_threshold` - 1)."
        ),
    )
    load_balance_penalty: float = flag(
        0.15,
        "hybrid: weight of uneven loads. Lower it if it turns into round-robin, raise it if one overloads.",
        low=0,
        component=HybridComponent(
            "balance_penalty", "penalty", "`load_balance_penalty` · coefficient of variation of the normalised loads."
        ),
    )
    balance_penalty_weight: float = flag(
        0.02,
        "hybrid: weight of the deviation of queue lengths. Lower it or raise it for the same reasons.",
        low=0,
        component=HybridComponent(
            "queue_penalty",
            "penalty",
            "`balance_penalty_weight` · standard deviation of the queue lengths across replicas.",
        ),
    )
    latency_bonus_weight: float = flag(
        0.1,
        "hybrid: bonus for latency under the threshold. Raise it to go beyond, lower it if that is enough.",
        low=0,
        component=HybridComponent(
            "latency_bonus", "bonus", "`latency_bonus_weight` · max(0, 1 - latency / `latency_threshold`)."
        ),
    )
    reference_weight: float = flag(
        0.1,
        "hybrid: weight of the gain over the own past. Raise it to keep improving, lower it if load varies.",
        low=0,
        component=HybridComponent(
            "reference_gain",
            "bonus",
            "`reference_weight` · relative gain in latency over the moving average of the reference. Positive when "
            "better than the reference.",
        ),
    )
    reward_clip_low: Optional[float] = flag(
        None,
        "hybrid: lower limit of a reward. Off unless set; hides bad from terrible. Raise it if single rewards upset "
        "learning, lower it if too many are clipped.",
        low=-1e9,
        high=1e9,
    )
    reward_clip_high: Optional[float] = flag(
        None,
        "hybrid: upper limit of a reward. Off unless set; hides good from great. Lower it if single rewards upset "
        "learning, raise it if too many are clipped.",
        low=-1e9,
        high=1e9,
    )
    reward_window_s: float = flag(
        30.0, "hybrid: seconds of completions that count. Raise it for calm, lower it for speed.", above=0
    )
    normalize_rewards: bool = flag(True, "Divide rewards by their running deviation, so that lr suits any load.")

    @property
    def pays_at_once(self) -> bool:
        """Whether the reward of a decision is known when it is made, and for every replica."""
        return self.reward_mode == "marginal_delay" or (
            self.reward_mode == "hybrid" and self.hybrid_credit == "placement"
        )

    @property
    def credit_weights(self) -> Dict[str, Any]:
        """How much a placement's harm counts, and to whom: the options of marginal delay, and of what is made of it.

        They do not depend on `tail_preference`: only training that looks ahead (`learn/credit/look_ahead.py`) pays for
        what it asks.
        """
        return {"latency_power": self.latency_power, "backlog_weight": self.backlog_weight}


#: The components of the hybrid reward, in the order of their flags; and the flag that weighs each.
HYBRID_COMPONENTS: List[HybridComponent] = [
    item.metadata["component"] for item in fields(RewardFlags) if "component" in item.metadata
]
COMPONENT_FLAGS: Dict[str, str] = {
    item.metadata["component"].name: item.name for item in fields(RewardFlags) if "component" in item.metadata
}


def check_reward(flags: RewardFlags) -> None:
    """ValueError naming the flag if limits contradict each other."""
    low, high = flags.reward_clip_low, flags.reward_clip_high
    is_right = low is None or high is None or low < high
    require(flags, is_right, "reward_clip_low", "below reward_clip_high")
