"""Every recorded metric in one table: it makes the CSV header, the W&B names, the dashboard and docs/metrics.md.

`python -m vidur_ppo_plugin.record.metrics > docs/metrics.md` writes the glossary anew.
"""

from dataclasses import dataclass

from vidur_ppo_plugin.flags import COMPONENT_FLAGS, HYBRID_COMPONENTS, HybridComponent

MAX_REPLICA_COLUMNS = 64  # beyond that one column a replica is unreadable: minimum, maximum and spread instead
STEP = "update"  # the horizontal axis of every plot
_REPLICA = "action_replica_"


@dataclass(frozen=True)
class Group:
    """A section of the dashboard; `prefix` is what stands before the slash in W&B, which makes the section."""

    prefix: str
    title: str


@dataclass(frozen=True)
class Metric:
    """One recorded value; `meaning` says how it is computed and what to look for."""

    name: str
    unit: str
    group: Group
    meaning: str


LEARNING = Group("ppo", "Learning")
REWARD = Group("ppo_reward", "Reward")
LATENCY = Group("ppo_latency", "Latency")
CLUSTER = Group("ppo_cluster", "Throughput and load")
ACTIONS = Group("ppo_actions", "Actions")
EXPLORATION = Group("ppo_exploration", "Exploration and guards")
TIME = Group("ppo_time", "Wall-clock")
EVALUATION = Group("ppo_evaluation", "Evaluation")
GROUPS = (LEARNING, REWARD, LATENCY, CLUSTER, ACTIONS, EXPLORATION, TIME, EVALUATION)


def _table(group: Group, *rows: tuple[str, str, str]) -> tuple[Metric, ...]:
    return tuple(Metric(name, unit, group, meaning) for name, unit, meaning in rows)


def _counted(component: HybridComponent) -> str:
    """How a component enters the total."""
    weight = f"Before `{COMPONENT_FLAGS[component.name]}`."
    return {"score": weight, "bonus": "Added.", "penalty": "Subtracted."}[component.kind]


_PROGRESS = _table(
    LEARNING,
    (STEP, "count", "PPO updates so far, this one included. The horizontal axis of every plot."),
    ("decisions", "count", "Requests placed so far by this learner, over all simulations."),
    ("simulated_time", "s", "The simulator's clock at this update. Starts again with each simulation."),
)

_REWARD = _table(
    REWARD,
    ("total_reward", "reward", "Sum over the rollout of the reward that is learned from: by `reward_mode` the delay "
     "or the weighted sum of the hybrid components, clipped only if the clip flags are set; before normalisation."),
    *((component.name, "reward", f"{component.formula} {_counted(component)} (hybrid)")
      for component in HYBRID_COMPONENTS),
    *((f"credit_{component.name}", "reward", f"`{component.name}` asked of the placement: what it would be had the "
       "request gone to the chosen replica, minus the mean over all replicas. (hybrid, placement)")
      for component in HYBRID_COMPONENTS),
    ("credit_total_reward", "reward", "The weighted sum of those: above 0 the chosen replica was better than the mean. "
     "(hybrid, placement)"),
    ("queue_delay", "s", "-∫ requests in the system dt from this decision to the next. Its sum over a drained run is "
     "minus the total latency (Little's law)."),
    ("marginal_delay", "s", "-[C(s with the request on the chosen replica) - C(s)], C(s) = total remaining time of all "
     "requests in flight if nobody else arrived; with `latency_power` and `backlog_weight`."),
    ("look_ahead", "requests", "-Σ of the weighted costs of everybody in sight, each relative to its mean in that "
     "cluster, after the chosen replica. (training with `look_ahead`)"),
    ("reward_mean", "reward", "Mean of the raw rewards of the rollout."),
    ("reward_std", "reward", "Standard deviation of the raw rewards. Near zero: nothing to learn from."),
    ("reward_min", "reward", "Smallest raw reward of the rollout."),
    ("reward_max", "reward", "Largest raw reward of the rollout."),
)  # fmt: skip

_LEARNING = _table(
    LEARNING,
    ("policy_loss", "loss", "-E[min(rA, clip(r, 1 ± `clip_ratio`)A)], r = π_new / π_old, A = normalised advantage."),
    ("value_loss", "loss", "½·E[(V - return)²] on normalised returns."),
    ("entropy", "nat", "E[-Σ π log π] over the replicas. ln(number of replicas) is a uniform choice, 0 a certain one."),
    ("approx_kl", "nat", "E[(r - 1) - log r], Schulman's estimate of KL(π_old ‖ π_new). Far above `target_kl`: the "
     "updates are too large."),
    ("clipfrac", "fraction", "Share of samples with abs(r - 1) > `clip_ratio`. 0: updates too timid; above 0.3: too "
     "bold."),
    ("explained_variance", "fraction", "1 - Var(return - V) / Var(return). 1: a perfect critic; 0: as good as a "
     "constant; below 0: worse."),
    ("gain_over_prior", "fraction", "Relative gain in reward, in the states of the rollout, of the most likely action "
     "over the prior's choice. Below 0 the prior would have done better. (marginal_delay)"),
    ("gain_over_loaded", "fraction", "The same against the choice of the policy that learning was begun from "
     "(`load_checkpoint pretrained`)."),
    ("guard_change", "fraction", "The latest requests replayed with what was learned (or the part of it that serves "
     "from then on), against the best so far: mean latency, and the slowest 5 % of latencies and of first tokens, "
     "weighed by `tail_preference`. Above 0 is worse. Empty between trials."),
    ("guard_reverts", "count", "How often what was learned was given up for the best so far."),
    ("grad_norm", "norm", "Gradient norm before clipping to `max_grad_norm`, mean over the minibatches."),
    ("kl_coef", "coefficient", "Weight of the KL penalty; adapted so that approx_kl stays near `target_kl`."),
    ("learning_rate", "coefficient", "Step size of the optimiser in this update."),
    ("entropy_coef", "coefficient", "Weight of the entropy bonus in this update."),
    ("kl_reference", "nat", "KL(reference ‖ π); the reference is the cloned policy after a warm start, a loaded one, "
     "else the prior. Its weight `kl_ref_coef` decays to 0."),
    ("bc_loss", "nat", "Cross-entropy against minibatches of the demonstrations; empty once its weight `bc_coef` has "
     "faded to 0."),
)  # fmt: skip

_EXPLORATION = _table(
    EXPLORATION,
    ("temperature", "factor", "Divides the logits before sampling. Above 1 explores, below 1 exploits."),
    ("temp_is_pulsing", "0 or 1", "1 while a temperature pulse (interval, stagnation, or worse than the reference) is "
     "on."),
    ("epsilon", "fraction", "Share of decisions taken uniformly at random."),
    ("collapse_alarm", "0 or 1", "1 if one replica got more than `collapse_share` of the last 200 decisions."),
    ("safety_events", "count", "Violations of the hard latency limit since the last update."),
    ("curriculum_stage", "index", "Stage of the curriculum, from 0."),
)  # fmt: skip

_LATENCY = _table(
    LATENCY,
    *((f"latency_{key}", "s", f"{text} end-to-end latency of the requests completed since the last update.")
      for key, text in (("mean", "Mean"), ("p50", "Median"), ("p90", "90th percentile of the"),
                        ("p99", "99th percentile of the"))),
    *((f"ttft_{key}", "s", f"{text} time to first token of the requests completed since the last update.")
      for key, text in (("p50", "Median"), ("p90", "90th percentile of the"), ("p99", "99th percentile of the"))),
    ("tbt_p99", "s", "99th percentile of the time between tokens: (completion - first token) / (output tokens - 1) of "
     "each request completed since the last update."),
)  # fmt: skip

_CLUSTER = _table(
    CLUSTER,
    ("throughput_requests", "requests/s", "Requests completed per simulated second since the last update."),
    ("throughput_tokens", "tokens/s", "Output tokens of these requests per simulated second."),
    ("batch_size", "requests", "Mean number of requests in a batch since the last update."),
    ("load_spread", "requests", "Standard deviation across replicas of the requests in flight, at the update."),
)

_SHARES = _table(
    ACTIONS,
    ("action_share_min", "fraction", "Smallest share of the decisions that a replica got."),
    ("action_share_max", "fraction", "Largest share of the decisions that a replica got."),
    ("action_share_std", "fraction", "Standard deviation of the shares across replicas."),
)

_ATTENTION = _table(
    ACTIONS,
    ("attention_self", "fraction", "Attention that a replica pays to itself, mean. 1 / replicas: it looks at all alike "
     "(attention_heads > 0)."),
    ("attention_max", "fraction", "Largest attention weight of a replica, mean. (attention_heads > 0)"),
    ("attention_entropy", "nat", "Entropy of a replica's attention weights, mean; ln(replicas): it looks at all alike. "
     "(attention_heads > 0)"),
)  # fmt: skip

_TIME = _table(
    TIME,
    ("time_simulating_share", "fraction", "Share of the wall-clock since the run began that the simulator took."),
    ("time_deciding_share", "fraction", "Share spent observing, scoring and sampling."),
    ("time_learning_share", "fraction", "Share spent in PPO updates."),
)

_EVALUATION = _table(
    EVALUATION,
    ("evaluation_score", "fraction", "Mean over scenarios of evaluation_e2e_mean + `p99_weight` · evaluation_e2e_p99. "
     "Below 0 is better than the best baseline. (vidur-ppo train)"),
    ("evaluation_e2e_mean", "fraction", "Change of mean end-to-end latency against the best baseline of each scenario, "
     "on held-out requests, mean over scenarios. (vidur-ppo train)"),
    ("evaluation_e2e_p99", "fraction", "The same of the 99th percentile. (vidur-ppo train)"),
    ("evaluation_ttft_mean", "fraction", "The same of mean time to first token. (vidur-ppo train)"),
    ("decisions_per_s", "decisions/s", "Decisions learned from per second of wall-clock since the last update. "
     "(vidur-ppo train)"),
)  # fmt: skip

_BEFORE_ACTIONS = (*_PROGRESS, *_REWARD, *_LEARNING, *_EXPLORATION, *_LATENCY, *_CLUSTER)
_BY_NAME = {metric.name: metric for metric in (*_BEFORE_ACTIONS, *_SHARES, *_ATTENTION, *_TIME, *_EVALUATION)}


def metrics(num_replicas: int) -> list[Metric]:
    """The metrics of a run with that many replicas, in the order of the CSV columns."""
    if num_replicas < 1:
        raise ValueError(f"num_replicas must be >= 1, got {num_replicas}")
    shares = [replica_share(index) for index in range(num_replicas)]
    shares = shares if num_replicas <= MAX_REPLICA_COLUMNS else list(_SHARES)
    return [*_BEFORE_ACTIONS, *shares, *_ATTENTION, *_TIME]


def header(num_replicas: int, *, with_evaluation: bool = False) -> list[str]:
    """The names of `metrics`: the CSV header; `with_evaluation`: also what only `vidur-ppo train` records."""
    evaluation = _EVALUATION if with_evaluation else ()
    return [metric.name for metric in (*metrics(num_replicas), *evaluation)]


def replica_share(index: int) -> Metric:
    """The metric `action_replica_<index>`."""
    return Metric(f"{_REPLICA}{index}", "fraction", ACTIONS, f"Share of the decisions that replica {index} got.")


def find(name: str) -> Metric:
    """The metric of that name; ValueError if there is none."""
    index = name.removeprefix(_REPLICA)
    if name.startswith(_REPLICA) and index.isdecimal():
        return replica_share(int(index))
    if name not in _BY_NAME:
        raise ValueError(f"unknown metric {name!r}: vidur_ppo_plugin/record/metrics.py lists the known ones")
    return _BY_NAME[name]


def wandb_name(name: str) -> str:
    """The name in W&B (and TensorBoard): the group's prefix, a slash, the name, such as `ppo_reward/total_reward`."""
    return f"{find(name).group.prefix}/{name}"


def docs() -> str:
    """The glossary as Markdown: docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "<!-- Generated: python -m vidur_ppo_plugin.record.metrics > docs/metrics.md -->",
        "",
        "One row an update in `ppo_metrics.csv`, and the same values in W&B and TensorBoard under the names in the",
        "last column. A value that does not exist in a run (a component of another reward mode, a latency while",
        "nothing has been completed) is empty. π is the policy, r the probability ratio, E the mean over the rollout.",
    ]
    for group in GROUPS:
        rows = [metric for metric in _BY_NAME.values() if metric.group == group]
        lines += ["", f"## {group.title}", "", "| metric | unit | meaning | W&B |", "|---|---|---|---|"]
        if group == ACTIONS:
            lines.append(
                f"| `{_REPLICA}0` … `{_REPLICA}N-1` | fraction | Share of the decisions that each replica got; up to "
                f"{MAX_REPLICA_COLUMNS} replicas, beyond that the three below instead. | `{group.prefix}/{_REPLICA}0` |"
            )
        lines += [f"| `{m.name}` | {m.unit} | {m.meaning} | `{wandb_name(m.name)}` |" for m in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(docs(), end="")
