"""The flags: plain dataclasses, one per scheduler or predictor, each field with its help text and its range.

`sim/config_types.py` binds them to Vidur, which turns a field `seed` of `LeastTokensGlobalSchedulerConfig`
into `--least_tokens_global_scheduler_config_seed`. Vidur's flag parser knows few types: bool, int, float, str,
Optional of those, List[int], List[float], Dict[str, float]. `X | None`, Literal, Tuple, a field without a
default, a percent sign in a help text, or `from __future__ import annotations` here would break the command
line of every Vidur run, ours or not (a test checks every field).

Vidur instantiates every config class of every run, so nothing here validates by itself: `validate` is called
when the scheduler or predictor is built.
"""

import math
from dataclasses import dataclass, field, fields
from typing import Any, List, Optional


def flag(
    default: Any,
    help_text: str,
    *,
    low: Optional[float] = None,
    high: Optional[float] = None,
    above: Optional[float] = None,
    choices: Optional[List[str]] = None,
) -> Any:
    """A dataclass field with a help text and a range: `low` and `high` are included, `above` is not."""
    metadata = {"help": help_text, "low": low, "high": high, "above": above, "choices": choices}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def flag_name(config_class: type, field_name: str) -> str:
    """The command-line flag that Vidur makes of a field of a config class."""
    snake_case = "".join(f"_{c.lower()}" if c.isupper() else c for c in config_class.__name__).lstrip("_")
    return f"--{snake_case}_{field_name}"


def validate(config: Any) -> None:
    """Raise ValueError naming the flag, its value and its range if a value is out of its range."""
    for item in fields(config):
        if "low" not in item.metadata:
            continue  # a field of Vidur's own base class
        value = getattr(config, item.name)
        if value is None:
            continue  # an optional flag that is not set
        for single in value if isinstance(value, list) else [value]:
            problem = _range_problem(single, item.metadata)
            if problem:
                raise ValueError(f"{flag_name(type(config), item.name)} must be {problem}, got {single!r}")


def _range_problem(value: Any, metadata: Any) -> Optional[str]:
    """What the value should have been, or None if it is in range."""
    low, high, above, choices = (metadata[key] for key in ("low", "high", "above", "choices"))
    if choices is not None:
        return None if value in choices else f"one of {', '.join(choices)}"
    if low is None and high is None and above is None:
        return None
    parts = []
    if low is not None:
        parts.append(f">= {low:g}")
    if above is not None:
        parts.append(f"> {above:g}")
    if high is not None:
        parts.append(f"<= {high:g}")
    in_range = (
        isinstance(value, (int, float))
        and math.isfinite(value)
        and (low is None or value >= low)
        and (above is None or value > above)
        and (high is None or value <= high)
    )
    return None if in_range else " and ".join(parts)


SEED_HELP = "Seed of the random choice among equally good replicas."


@dataclass
class TieBreakingFlags:
    """What every heuristic scheduler has: a seed for fair, reproducible tie-breaking."""

    seed: int = flag(42, SEED_HELP, low=0)


@dataclass
class LeastTokensFlags(TieBreakingFlags):
    """Weights of the `least_tokens` score."""

    context_weight: float = flag(
        0.05,
        "Score of a token in context (KV cache), in prompt tokens. Raise it if long contexts slow decoding down "
        "more than prompts do, lower it if prefill dominates.",
        low=0,
    )
    request_weight: float = flag(
        20.0,
        "Score of a request in flight, in prompt tokens. Raise it to spread requests more evenly, lower it to "
        "let the token counts decide.",
        low=0,
    )


@dataclass
class ShortestDelayFlags(TieBreakingFlags):
    """What `shortest_delay` assumes before it has seen requests finish."""

    initial_decode_tokens: float = flag(
        128.0,
        "Expected output length until the first requests have finished; then their running mean takes over. "
        "Raise it for long outputs.",
        low=1,
    )


@dataclass
class SizeSplitFlags(LeastTokensFlags):
    """Where `size_split` draws the line, and how many replicas serve the long side."""

    threshold_tokens: int = flag(
        4096,
        "Prompts longer than this go to the replicas set aside for long prompts. Raise it if those replicas are "
        "overloaded, lower it if short prompts still wait behind long ones.",
        low=1,
    )
    num_long_replicas: int = flag(
        1,
        "How many replicas (the last ones) are set aside for long prompts: at least 1 and fewer than there are "
        "replicas. Raise it if long prompts wait too long, lower it if short ones do.",
        low=1,
    )


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
        1.0, "Latencies count to this power: 1 favours the mean. Raise it towards 2 to protect the tail.", low=1, high=4
    )
    backlog_weight: float = flag(
        3.0,
        "marginal_delay: weight of the growth of (seconds of prefill)^2, the harm to requests that come later. "
        "Raise it near saturation, lower it for light load.",
        low=0,
    )
    throughput_target: float = flag(
        0.0,
        "hybrid: requests per second that score 1; 0 adapts to what was reached. Lower it if scores stay below 0.",
        low=0,
    )
    absolute_weight: float = flag(0.8, "hybrid: weight of the absolute score. Raise it to reward levels.", low=0)
    delta_weight: float = flag(0.2, "hybrid: weight of the change score. Raise it to reward improvement.", low=0)
    alpha: float = flag(0.1, "hybrid: weight of latency in the absolute score. Raise it if latency is ignored.", low=0)
    kappa: float = flag(0.05, "hybrid: weight of the logistic latency penalty. Raise it to avoid late requests.", low=0)
    sigma: float = flag(
        2.0, "hybrid: seconds over which the logistic penalty rises. Raise it for a softer edge.", above=0
    )
    latency_threshold: float = flag(
        6.0, "hybrid: seconds of latency from which penalties set in. Set it to the latency you can live with.", above=0
    )
    latency_penalty_scale: float = flag(
        0.5, "hybrid: weight of latency above the threshold. Raise it for a hard limit.", low=0
    )
    load_balance_penalty: float = flag(
        0.15, "hybrid: weight of the variation of loads. Lower it if the policy becomes round-robin.", low=0
    )
    balance_penalty_weight: float = flag(
        0.02, "hybrid: weight of the deviation of queue lengths. Lower it likewise.", low=0
    )
    latency_bonus_weight: float = flag(
        0.1, "hybrid: bonus for latency under the threshold. Raise it to go beyond it.", low=0
    )
    reference_weight: float = flag(
        0.1, "hybrid: weight of the gain over the own past. Raise it to keep improving.", low=0
    )
    reward_clip_low: Optional[float] = flag(
        None, "hybrid: lower limit of a reward. Off unless set; hides bad from terrible."
    )
    reward_clip_high: Optional[float] = flag(
        None, "hybrid: upper limit of a reward. Off unless set; hides good from great."
    )
    reward_window_s: float = flag(
        30.0, "hybrid: seconds of completions that count. Raise it for calm, lower it for speed.", above=0
    )
    normalize_rewards: bool = flag(True, "Divide rewards by their running deviation, so that lr suits any load.")


@dataclass
class LearningFlags:
    """Proximal policy optimisation and its guards."""

    lr: float = flag(1e-3, "Learning rate. Lower it if approx_kl jumps, raise it if nothing moves.", above=0, high=1)
    lr_end: Optional[float] = flag(
        None, "Learning rate at the end of schedule_steps; constant unless set. Lower it to settle.", above=0, high=1
    )
    gamma: float = flag(
        0.0,
        "Discount of later rewards. 0 is right for marginal_delay; raise it to 0.99 for queue_delay and hybrid.",
        low=0,
        high=1,
    )
    gae_lambda: float = flag(
        0.95, "Advantage estimation: lower it to trust the critic more than the rewards.", low=0, high=1
    )
    clip_ratio: float = flag(0.2, "How far a probability may move in an update. Lower it for safety.", above=0, high=1)
    value_clip: float = flag(0.2, "How far a value may move in an update, in deviations; 0 is unlimited.", low=0)
    entropy_coef: float = flag(0.0, "Weight of entropy. Raise it if the policy commits too early.", low=0)
    entropy_coef_end: Optional[float] = flag(
        None, "Weight of entropy at the end of schedule_steps; constant unless set. Lower it to exploit.", low=0
    )
    value_coef: float = flag(0.5, "Weight of the critic's loss. Raise it if explained_variance stays low.", low=0)
    epochs: int = flag(4, "Passes over a rollout. Raise it to learn more from less, lower it if clipfrac grows.", low=1)
    rollout_len: int = flag(128, "Decisions between updates. Raise it for calm, lower it for more updates.", low=2)
    minibatch_size: int = flag(64, "Decisions a gradient step. Raise it for less noise.", low=1)
    max_grad_norm: float = flag(1.0, "Gradients are shortened to this length. Lower it if losses jump.", above=0)
    normalize_advantages: bool = flag(True, "Scale advantages of a rollout to mean 0 and deviation 1.")
    all_action_baseline: bool = flag(
        True, "marginal_delay with gamma 0: compare with the policy's mean over all replicas, not with the critic."
    )
    schedule_steps: int = flag(20000, "Decisions over which lr, entropy and temperature reach their end values.", low=1)
    target_kl: float = flag(0.01, "Divergence of an update that guards aim at. Raise it for larger steps.", above=0)
    kl_coef: float = flag(
        0.2, "Weight of the divergence from the policy before the update. Raise it for safety.", low=0
    )
    enable_adaptive_kl: bool = flag(True, "Adapt kl_coef so that updates diverge by about target_kl.")
    enable_adaptive_lr: bool = flag(False, "Adapt the learning rate likewise.")
    early_stop_kl_factor: float = flag(
        0.0, "Stop an update once it diverges by this multiple of target_kl; 0 never stops. Lower it for safety.", low=0
    )
    entropy_min: float = flag(
        0.0, "Floor of the entropy. Raise it if the policy collapses; at most log of the replicas.", low=0
    )
    entropy_floor_coef: float = flag(1.0, "How hard the floor pushes back.", low=0)
    kl_ref_coef: float = flag(0.0, "Pull towards the prior at the start. Raise it if learning undoes the prior.", low=0)
    kl_ref_steps: int = flag(5000, "Decisions after which that pull is gone.", low=1)


@dataclass
class ExplorationFlags:
    """Sampling instead of always taking the best."""

    enable_dynamic_temperature: bool = flag(False, "Let load, latency, entropy and stagnation move the temperature.")
    base_temperature: float = flag(1.0, "Temperature of sampling. Raise it to explore, lower it to exploit.", above=0)
    min_temperature: float = flag(0.5, "Lower limit of the temperature.", above=0)
    max_temperature: float = flag(5.0, "Upper limit of the temperature, pulses included.", above=0)
    pulse_interval: int = flag(0, "Updates between pulses of temperature; 0 for none at intervals.", low=0)
    pulse_magnitude: float = flag(2.0, "Factor of a pulse. Raise it to shake the policy harder.", low=1)
    pulse_length: int = flag(2, "Updates that a pulse lasts.", low=1)
    stagnation_threshold: float = flag(0.005, "Relative change of latency below which learning counts as stuck.", low=0)
    stagnation_memory: int = flag(5, "Updates over which that change is taken.", low=2)
    target_entropy: float = flag(0.0, "The temperature rises when entropy falls below this; 0 for never.", low=0)
    epsilon: float = flag(
        0.0, "Share of decisions made at random. Raise it if some replicas are never tried.", low=0, high=1
    )
    epsilon_steps: int = flag(5000, "Decisions after which that share is 0.", low=1)


@dataclass
class CurriculumFlags:
    """From easy to real."""

    curriculum: str = flag(
        "",
        "Stages of load (of the workload's rate, at most 1) and of hybrid penalties, and what ends each: for example "
        "load=0.5,decisions=2000;load=0.8,penalty=0.5,latency_mean_below=6.0;load=1.0. Empty for full load at once.",
    )


@dataclass
class NetworkFlags:
    """The policy's shape, and what it starts from."""

    enable_decoupled_ac: bool = flag(True, "Separate branches for actor and critic; otherwise one shared trunk.")
    enable_flat_network: bool = flag(
        False, "Concatenate replicas in order (the plan's network) instead of a set encoder."
    )
    feature_projection_dim: int = flag(64, "Width of the feature projection.", low=1, high=4096)
    hidden_size: int = flag(
        64, "Width of the branches. Raise it for richer policies, lower it for faster decisions.", low=1, high=4096
    )
    critic_gru_layers: int = flag(1, "Layers of the critic's memory; 0 for none.", low=0, high=8)
    attention_heads: int = flag(
        0, "Attention across replicas; 0 pools mean and maximum, which is faster.", low=0, high=64
    )
    prior: str = flag(
        "least_tokens",
        "The heuristic that the policy is a residual of: untrained, it is exactly this heuristic.",
        choices=["none", "least_tokens", "least_outstanding", "least_kv", "shortest_delay"],
    )
    prior_weight: float = flag(3.0, "Weight of the prior's logits. Lower it to learn away from it sooner.", low=0)
    max_candidates: int = flag(0, "Score only this many replicas, the prior's choice among them; 0 for all.", low=0)
    max_queue_requests_per_replica: int = flag(4, "Waiting requests of each replica that are features.", low=0, high=64)
    trend_window: int = flag(32, "Decisions that a trend's moving average remembers.", low=1)
    request_scale: float = flag(8.0, "Requests at which a count's feature bends.", above=0)
    token_scale: float = flag(4096.0, "Tokens at which a token count's feature bends.", above=0)
    time_scale_s: float = flag(2.0, "Seconds at which a time's feature bends.", above=0)


@dataclass
class RunningFlags:
    """Checkpoints, records and limits."""

    inference_only: bool = flag(False, "Act greedily, learn nothing, change nothing.")
    load_checkpoint: str = flag("", "Checkpoint file or directory to start from.")
    save_checkpoint: str = flag("", "Directory for checkpoints; empty for the run's output directory.")
    checkpoint_interval: int = flag(10, "Updates between checkpoints; 0 writes one at the end only.", low=0)
    metrics_dir: str = flag("", "Directory of ppo_metrics.csv; empty for the run's output directory.")
    enable_tensorboard: bool = flag(False, "Also write TensorBoard event files beside ppo_metrics.csv.")
    collapse_share: float = flag(
        0.9, "One replica's share of recent decisions that raises the collapse alarm.", above=0, high=0.999
    )
    latency_limit_s: float = flag(
        0.0, "Hard latency limit: completions above it are counted and logged; 0 for none.", low=0
    )
    mask_over_limit: bool = flag(False, "Also avoid replicas whose oldest waiting request is older than the limit.")


@dataclass
class PPOModularFlags(
    RewardFlags, LearningFlags, ExplorationFlags, CurriculumFlags, NetworkFlags, RunningFlags, TieBreakingFlags
):
    """All flags of `ppo_modular`."""


@dataclass
class RooflineFlags:
    """Flags of the roofline predictor beyond those of Vidur's base class."""

    replica_speed_factors: List[float] = flag(
        [1.0],
        "Speed of each replica relative to its device: 0.5 takes twice as long. One value per replica, or a "
        "pattern whose length divides the number of replicas and is repeated.",
        above=0,
    )


def check_scheduler(flags: Any, num_replicas: int) -> None:
    """ValueError naming the flag if a scheduler's flags are out of range or do not fit each other or the cluster."""
    validate(flags)
    if isinstance(flags, PPOModularFlags):
        _check_ppo(flags, num_replicas)
    num_long = getattr(flags, "num_long_replicas", None)
    if num_long is not None and num_long >= num_replicas:
        raise ValueError(
            f"{flag_name(type(flags), 'num_long_replicas')} must be smaller than the number of replicas "
            f"({num_replicas}), got {num_long}"
        )


def _check_ppo(flags: PPOModularFlags, num_replicas: int) -> None:
    """Combinations of flags that cannot be meant; each sentence names the flags."""

    def require(is_right: bool, name: str, right: str) -> None:
        if not is_right:
            raise ValueError(f"{flag_name(type(flags), name)} must be {right}, got {getattr(flags, name)!r}")

    most_entropy = math.log(num_replicas)
    require(flags.min_temperature <= flags.max_temperature, "min_temperature", "at most max_temperature")
    low, high = flags.min_temperature, flags.max_temperature
    require(low <= flags.base_temperature <= high, "base_temperature", f"between {low} and {high} (min and max)")
    require(flags.entropy_min <= most_entropy, "entropy_min", f"at most log(replicas) = {most_entropy:.3f}")
    require(flags.target_entropy <= most_entropy, "target_entropy", f"at most log(replicas) = {most_entropy:.3f}")
    require(not (flags.attention_heads and flags.enable_flat_network), "attention_heads", "0 with the flat network")
    heads = flags.attention_heads
    require(
        not heads or flags.hidden_size % heads == 0,
        "attention_heads",
        f"a divisor of hidden_size ({flags.hidden_size})",
    )
    require(not (flags.max_candidates and flags.enable_flat_network), "max_candidates", "0 with the flat network")
    require(flags.max_candidates != 1, "max_candidates", "0 (all) or at least 2")
    low_clip, high_clip = flags.reward_clip_low, flags.reward_clip_high
    both = low_clip is not None and high_clip is not None
    require(not both or low_clip < high_clip, "reward_clip_low", "below reward_clip_high")  # type: ignore[operator]
    require(not flags.mask_over_limit or flags.latency_limit_s > 0, "mask_over_limit", "off without latency_limit_s")
    require(flags.collapse_share > 1 / num_replicas or num_replicas == 1, "collapse_share", f"above 1 / {num_replicas}")


def speed_factors(flags: Any, num_replicas: int) -> List[float]:
    """The speed of each replica; 1.0 for predictors that know no speeds. ValueError if they do not fit."""
    pattern = getattr(flags, "replica_speed_factors", None)
    if pattern is None:
        return [1.0] * num_replicas
    validate(flags)
    if not pattern or num_replicas % len(pattern):
        raise ValueError(
            f"{flag_name(type(flags), 'replica_speed_factors')} must have one value per replica "
            f"({num_replicas}) or a pattern whose length divides that, got {len(pattern)} values: {pattern}"
        )
    return list(pattern) * (num_replicas // len(pattern))
