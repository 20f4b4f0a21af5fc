"""What an update does, and what changes from update to update."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PPOParameters:
    """What an update does; `ppo_flags.py` has the same defaults, and says when to raise and when to lower each."""

    lr: float = 1e-3
    gamma: float = 0.0
    gae_lambda: float = 0.95
    clip_ratio: float = 0.2
    value_clip: float = 0.2
    value_coef: float = 0.5
    entropy_min: float = 0.0
    entropy_floor_coef: float = 1.0
    epochs: int = 4
    minibatch_size: int = 64
    max_grad_norm: float = 1.0
    normalize_advantages: bool = True
    normalize_rewards: bool = True
    all_action_baseline: bool = True
    # Take the expectation over all actions instead of the sampled one: no noise from sampling. Needs the baseline.
    expected_gradient: bool = True
    # Without it nothing is bootstrapped: advantages come from comparing all actions.
    enable_critic: bool = True
    # Stop an update once the approximate KL exceeds this multiple of target_kl; 0 never stops.
    early_stop_kl_factor: float = 0.0
    target_kl: float = 0.01

    def __post_init__(self) -> None:
        """Refuse what has no advantages."""
        for name, value in (("expected_gradient", self.expected_gradient), ("enable_critic", not self.enable_critic)):
            if value and not self.all_action_baseline:
                raise ValueError(f"{name}={getattr(self, name)} needs all_action_baseline, and gamma 0")


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """What schedules and controllers change from update to update."""

    learning_rate: float
    entropy_coef: float
    kl_coef: float = 0.0
    kl_ref_coef: float = 0.0
    # Above 0 only with demonstrations.
    bc_coef: float = 0.0
