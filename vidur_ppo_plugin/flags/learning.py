"""How the policy learns, and how it explores while it does."""

import math
from dataclasses import dataclass
from typing import Optional

from .flag import flag, require


@dataclass
class LearningFlags:
    """Proximal policy optimisation and its guards."""

    lr: float = flag(1e-3, "Learning rate. Lower it if approx_kl jumps, raise it if nothing moves.", above=0, high=1)
    lr_end: Optional[float] = flag(
        None,
        "Learning rate at the end of schedule_steps; constant unless set. Lower it to settle, raise it to keep "
        "adapting.",
        above=0,
        high=1,
    )
    gamma: float = flag(
        0.0,
        "Discount of later rewards. 0 is right for marginal_delay, and for hybrid asked of the placement; raise it to "
        "0.99 for queue_delay and for hybrid of the window, lower it if advantages are noisy.",
        low=0,
        high=1,
    )
    gae_lambda: float = flag(
        0.95, "Of GAE: lower it to trust the critic more, raise it if the critic is poor.", low=0, high=1
    )
    clip_ratio: float = flag(
        0.2, "How far a probability may move. Lower it for safety, raise it if clipfrac is high.", above=0, high=1
    )
    value_clip: float = flag(
        0.2,
        "How far a value may move in an update, in deviations; 0 is unlimited. Raise it if explained_variance grows "
        "slowly, lower it if it jumps.",
        low=0,
    )
    entropy_coef: float = flag(
        0.0, "Weight of entropy. Raise it if the policy commits too early, lower it if it stays undecided.", low=0
    )
    entropy_coef_end: Optional[float] = flag(
        None,
        "Weight of entropy at the end of schedule_steps; constant unless set. Lower it to exploit, raise it to keep "
        "exploring.",
        low=0,
    )
    value_coef: float = flag(
        0.5,
        "Weight of the critic's loss. Raise it if explained_variance stays low, lower it if the critic drowns the "
        "actor in the shared projection.",
        low=0,
    )
    epochs: int = flag(4, "Passes over a rollout. Raise it to learn more from less, lower it if clipfrac grows.", low=1)
    rollout_len: int = flag(128, "Decisions between updates. Raise it for calm, lower it for more updates.", low=2)
    minibatch_size: int = flag(
        64, "Decisions a gradient step. Raise it for less noise, lower it for more steps.", low=1
    )
    max_grad_norm: float = flag(
        1.0,
        "Gradients are cut to this length. Lower it if losses jump, raise it if grad_norm is always above.",
        above=0,
    )
    normalize_advantages: bool = flag(True, "Scale advantages of a rollout to mean 0 and deviation 1.")
    all_action_baseline: bool = flag(
        True,
        "Rewards that are known for every replica, with gamma 0: compare with the policy's mean over all replicas, not "
        "with the critic.",
    )
    expected_gradient: bool = flag(
        True, "With that baseline: learn from what every replica would have earned, not only from the one chosen."
    )
    schedule_steps: int = flag(
        20000,
        "Decisions until lr, entropy and temperature reach their ends. Raise it for long runs, else lower it.",
        low=1,
    )
    target_kl: float = flag(
        0.01, "Divergence of an update that guards aim at. Raise it for larger steps, lower it for safety.", above=0
    )
    kl_coef: float = flag(
        0.2, "Weight of the divergence of an update. Raise it for safety, lower it if nothing moves.", low=0
    )
    enable_adaptive_kl: bool = flag(True, "Adapt kl_coef so that updates diverge by about target_kl.")
    enable_adaptive_lr: bool = flag(False, "Adapt the learning rate likewise.")
    early_stop_kl_factor: float = flag(
        0.0,
        "Stop an update once it diverges by this multiple of target_kl; 0 never stops. Lower it for safety, raise it "
        "to learn more from a rollout.",
        low=0,
    )
    entropy_min: float = flag(
        0.0, "Floor of the entropy, at most log(replicas). Raise it if the policy collapses, else lower it.", low=0
    )
    entropy_floor_coef: float = flag(
        1.0, "How hard the floor pushes back. Raise it if entropy stays below, lower it if it drowns rewards.", low=0
    )
    kl_ref_coef: float = flag(
        0.0,
        "Pull at the start towards the prior or, after a warm start, the cloned policy, or the policy that was loaded. "
        "Raise it if learning forgets, lower it if it is held back.",
        low=0,
    )
    kl_ref_steps: int = flag(
        5000,
        "Decisions after which that pull is gone; 0 if it stays. Raise it to be held longer, lower it to leave sooner.",
        low=0,
    )

    @property
    def compares_actions(self) -> bool:
        """Whether a decision is compared with all others: exact only where the future does not count."""
        return self.all_action_baseline and self.gamma == 0.0

    @property
    def learns_from_every_action(self) -> bool:
        """Whether the expectation over all actions is learned from, not only the one that was chosen."""
        return self.expected_gradient and self.compares_actions

    @property
    def schedule_updates(self) -> int:
        """Updates until the temperature reaches its end."""
        return max(1, self.schedule_steps // self.rollout_len)


def check_learning(flags: LearningFlags, num_replicas: int) -> None:
    """ValueError naming the flag if no policy over so many replicas can be as asked."""
    most = math.log(num_replicas)
    require(flags, flags.entropy_min <= most, "entropy_min", f"at most log(replicas) = {most:.3f}")


@dataclass
class ExplorationFlags:
    """Sampling instead of always taking the best."""

    enable_dynamic_temperature: bool = flag(False, "Let load, latency, entropy and stagnation move the temperature.")
    base_temperature: float = flag(1.0, "Temperature of sampling. Raise it to explore, lower it to exploit.", above=0)
    min_temperature: float = flag(
        0.5, "Lower limit of the temperature. Raise it to keep exploring, lower it to let it get certain.", above=0
    )
    max_temperature: float = flag(
        5.0, "Upper limit, pulses included. Raise it for bolder pulses, lower it if they hurt.", above=0
    )
    pulse_interval: int = flag(
        0, "Updates between pulses; 0 for none at intervals. Lower it to shake more often, raise it to settle.", low=0
    )
    pulse_magnitude: float = flag(
        2.0, "Factor of a pulse. Raise it to shake the policy harder, lower it if pulses hurt.", low=1
    )
    pulse_length: int = flag(
        2, "Updates that a pulse lasts. Raise it to learn more from it, lower it if pulses hurt.", low=1
    )
    stagnation_threshold: float = flag(
        0.005,
        "Relative change of latency below which learning counts as stuck and a pulse starts; 0 for never. Raise it "
        "for more pulses, lower it for fewer.",
        low=0,
    )
    stagnation_memory: int = flag(
        5, "Updates over which that change is taken. Raise it if latency is noisy, lower it to react sooner.", low=2
    )
    reference_patience: int = flag(
        3,
        "Updates in a row with a gain_over_prior below 0 (the prior would have done better) that start a pulse; 0 for "
        "never. Lower it to react sooner, raise it to bear more (marginal_delay).",
        low=0,
    )
    target_entropy: float = flag(
        0.0, "The temperature rises below this entropy; 0 for never. Raise it to explore, lower it to commit.", low=0
    )
    epsilon: float = flag(
        0.0, "Share of random decisions. Raise it if replicas are never tried, lower it if it costs.", low=0, high=1
    )
    epsilon_steps: int = flag(
        5000, "Decisions after which that share is 0. Raise it to explore longer, lower it to exploit sooner.", low=1
    )


def check_exploration(flags: ExplorationFlags) -> None:
    """ValueError naming the flag if temperatures are not in order."""
    low, high = flags.min_temperature, flags.max_temperature
    require(flags, low <= high, "min_temperature", "at most max_temperature")
    is_right = low <= flags.base_temperature <= high
    require(flags, is_right, "base_temperature", f"between {low} and {high} (min and max)")


@dataclass
class WarmStartFlags:
    """Demonstrations: recording them, and starting from them."""

    demonstrate_with: str = flag(
        "",
        "Let these schedulers decide, learn nothing, and record what they do: names with optional weights, such as "
        "least_tokens:0.7,round_robin:0.3. Add a second one for states that the best never gets into. Empty is off.",
    )
    demonstrations_file: str = flag(
        "", "Where demonstrate_with writes; empty for demonstrations.npz in the run's output directory."
    )
    warm_start_file: str = flag(
        "",
        "Demonstrations from which the actor is cloned before the run (with load_checkpoint nothing is cloned: they "
        "only serve bc_coef). Empty is off.",
    )
    bc_epochs: int = flag(
        20,
        "Passes over the demonstrations when cloning. Raise it while validation accuracy still grows, lower it once "
        "it falls.",
        low=1,
    )
    bc_lr: float = flag(1e-3, "Learning rate of cloning. Lower it if loss jumps, raise it if idle.", above=0, high=1)
    bc_coef: float = flag(
        0.1,
        "After a warm start: weight of the demonstrations in the first updates. Raise it if learning forgets the "
        "teacher, lower it if the teacher is poor.",
        low=0,
    )
    bc_fade_steps: int = flag(
        5000,
        "Decisions after which that weight is 0. Lower it to leave the teacher behind sooner, raise it to stay near "
        "it longer.",
        low=1,
    )


@dataclass
class CurriculumFlags:
    """Stages of load and of penalties, from easy to real."""

    curriculum: str = flag(
        "",
        "Stages of load (of the workload's rate, at most 1) and of hybrid penalties, and what ends each: for example "
        "load=0.5,decisions=2000;load=0.8,penalty=0.5,latency_mean_below=6.0;load=1.0. Empty for full load at once.",
    )
