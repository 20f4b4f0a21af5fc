"""The flags of `ppo_modular`, in groups; `config.py` puts them together and says what Vidur's parser can read."""

from dataclasses import dataclass
from typing import Optional

from vidur_ppo_plugin.flag import flag
from vidur_ppo_plugin.routing.preference import BALANCED
from vidur_ppo_plugin.routing.prior import NAMES as PRIORS


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
    throughput_target: float = flag(
        0.0,
        "hybrid: requests per second that score 1; 0 adapts to what was reached. Lower it if scores stay below 0, "
        "raise it if they are far above 1.",
        low=0,
    )
    absolute_weight: float = flag(
        0.8, "hybrid: weight of the absolute score. Raise it to reward levels, lower it if load moves them.", low=0
    )
    delta_weight: float = flag(
        0.2, "hybrid: weight of the change score. Raise it to reward improvement, lower it if it is noise.", low=0
    )
    alpha: float = flag(
        0.1, "hybrid: latency in the absolute score. Raise it if latency is ignored, lower it if throughput is.", low=0
    )
    kappa: float = flag(
        0.05, "hybrid: weight of the logistic penalty. Raise it to avoid lateness, lower it if it dominates.", low=0
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
        0.5, "hybrid: weight of latency above the threshold. Raise it for a hard limit, lower it in overload.", low=0
    )
    load_balance_penalty: float = flag(
        0.15, "hybrid: weight of uneven loads. Lower it if it turns into round-robin, raise it if one overloads.", low=0
    )
    balance_penalty_weight: float = flag(
        0.02, "hybrid: weight of the deviation of queue lengths. Lower it or raise it for the same reasons.", low=0
    )
    latency_bonus_weight: float = flag(
        0.1, "hybrid: bonus for latency under the threshold. Raise it to go beyond, lower it if that is enough.", low=0
    )
    reference_weight: float = flag(
        0.1, "hybrid: weight of the gain over the own past. Raise it to keep improving, lower it if load varies.", low=0
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
        "Discount of later rewards. 0 is right for marginal_delay; raise it to 0.99 for queue_delay and hybrid, "
        "lower it if advantages are noisy.",
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
        True, "marginal_delay with gamma 0: compare with the policy's mean over all replicas, not with the critic."
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
    feature_projection_dim: int = flag(
        64, "Width of the feature projection. Raise it for richer features, lower it for speed.", low=1, high=4096
    )
    hidden_size: int = flag(
        64, "Width of the branches. Raise it for richer policies, lower it for faster decisions.", low=1, high=4096
    )
    critic_gru_layers: int = flag(
        1, "Layers of the critic's memory. Raise it if explained_variance is low, lower it for speed.", low=0, high=8
    )
    attention_heads: int = flag(
        0,
        "Attention across replicas; 0 pools mean and maximum. Raise it if replicas must be told apart in detail, "
        "lower it for faster decisions (attention acts in torch, not in numpy).",
        low=0,
        high=64,
    )
    prior: str = flag(
        "least_tokens",
        "The heuristic that the policy is a residual of: untrained, it is exactly this heuristic.",
        choices=list(PRIORS),
    )
    prior_weight: float = flag(
        3.0, "Weight of the prior's logits. Lower it to learn away from it sooner, raise it to stay with it.", low=0
    )
    max_candidates: int = flag(
        0,
        "Score only this many replicas, the prior's choice among them; 0 for all. Lower it if deciding is too slow "
        "in a large fleet, raise it to look further.",
        low=0,
    )
    max_queue_requests_per_replica: int = flag(
        4,
        "Waiting requests of each replica that are features. Raise it if long queues differ in what waits, lower it "
        "for faster decisions.",
        low=0,
        high=64,
    )
    trend_window: int = flag(
        32, "Decisions that a trend's moving average remembers. Raise it for slow trends, lower it for bursts.", low=1
    )
    request_scale: float = flag(
        8.0, "Requests at which a count's feature bends. Raise it for long queues, lower it for short ones.", above=0
    )
    token_scale: float = flag(
        4096.0, "Tokens at which a token feature bends. Raise it for long prompts, lower it for short ones.", above=0
    )
    time_scale_s: float = flag(
        2.0, "Seconds at which a time's feature bends. Raise it for slow clusters, lower it for fast ones.", above=0
    )


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
