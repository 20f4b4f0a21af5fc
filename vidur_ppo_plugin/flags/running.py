"""What a run reads, writes and watches."""

from dataclasses import dataclass

from .flag import flag, require


@dataclass
class RunningFlags:
    """Checkpoints, records and limits."""

    inference_only: bool = flag(False, "Act greedily, learn nothing, change nothing.")
    load_checkpoint: str = flag(
        "",
        "What to start from: pretrained (the policy that comes with the package), a checkpoint file, or a directory of "
        "them. Flags of features, network and prior are those of the checkpoint.",
    )
    guard_interval: int = flag(
        8,
        "Learning on from a loaded policy (not resuming a run): updates between trials against the best weights so "
        "far, which take over again if they are better; 0 for none. Lower it for safety, raise it for speed.",
        low=0,
    )
    guard_requests: int = flag(
        4096,
        "Latest requests that a trial replays, in eight orders. Raise it for surer verdicts, lower it for speed.",
        low=64,
        high=1_000_000,
    )
    guard_tolerance: float = flag(
        0.0,
        "Relative loss in a trial that is borne in one figure, also against the loaded policy: mean and slowest 5 per "
        "cent, of latency and of time to first token. Lower it for safety, raise it to learn more boldly.",
        low=0,
    )
    guard_serves_best: bool = flag(
        True,
        "Learning on from a loaded policy: requests are placed, greedily, by the best weights so far, and what is "
        "learned serves once a trial has proved it. Where trials replay requests and marginal_delay has the credit of "
        "every replica; elsewhere, and if off, the policy that learns is sampled.",
    )
    save_checkpoint: str = flag("", "Directory for checkpoints; empty for the run's output directory.")
    checkpoint_interval: int = flag(
        10,
        "Updates between checkpoints; 0 writes one at the end only. Lower it if runs get killed, raise it if writing "
        "shows in the run time.",
        low=0,
    )
    metrics_dir: str = flag("", "Directory of ppo_metrics.csv; empty for the run's output directory.")
    enable_tensorboard: bool = flag(False, "Also write TensorBoard event files beside ppo_metrics.csv.")
    collapse_share: float = flag(
        0.9,
        "One replica's share of the last 200 decisions that raises the collapse alarm. Raise it if replicas differ "
        "in speed, lower it for an early warning.",
        above=0,
        high=0.999,
    )
    latency_limit_s: float = flag(
        0.0,
        "Hard latency limit: completions above it are counted and logged; 0 for none. Raise it if every request is "
        "above it, lower it to what was promised.",
        low=0,
    )
    mask_over_limit: bool = flag(False, "Also avoid replicas whose oldest waiting request is older than the limit.")


def check_running(flags: RunningFlags, num_replicas: int) -> None:
    """ValueError naming the flag if a limit means nothing in this cluster."""
    is_right = not flags.mask_over_limit or flags.latency_limit_s > 0
    require(flags, is_right, "mask_over_limit", "off without latency_limit_s")
    is_right = flags.collapse_share > 1 / num_replicas or num_replicas == 1
    require(flags, is_right, "collapse_share", f"above 1 / {num_replicas}")
