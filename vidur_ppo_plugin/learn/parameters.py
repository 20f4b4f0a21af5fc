"""What an update does, and what changes from update to update."""

from dataclasses import dataclass, fields

from vidur_ppo_plugin.flags import LearningFlags, PPOModularFlags, RewardFlags


@dataclass(kw_only=True)
class PPOParameters(LearningFlags):
    """Parameters of a PPO update: the flags of learning and a few that have no flag.

    `all_action_baseline` and `expected_gradient` are off where they mean nothing: see `compares_actions`.
    """

    # A flag of rewards, but they are scaled where they are learned from.
    normalize_rewards: bool = RewardFlags.normalize_rewards
    # Without it nothing is bootstrapped: advantages come from comparing all actions.
    enable_critic: bool = True

    def __post_init__(self) -> None:
        """Refuse parameters that define no advantages."""
        self.all_action_baseline, self.expected_gradient = self.compares_actions, self.learns_from_every_action
        if not (self.enable_critic or self.all_action_baseline):
            raise ValueError(f"enable_critic={self.enable_critic} needs all_action_baseline, and gamma 0")


def ppo_parameters(flags: PPOModularFlags) -> PPOParameters:
    """The parameters of an update that the flags describe."""
    names = {item.name for item in fields(PPOParameters)} & {item.name for item in fields(flags)}
    return PPOParameters(**{name: getattr(flags, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """The coefficients that schedules and controllers change from update to update."""

    learning_rate: float
    entropy_coef: float
    kl_coef: float = 0.0
    kl_ref_coef: float = 0.0
    # Above 0 only with demonstrations.
    bc_coef: float = 0.0
