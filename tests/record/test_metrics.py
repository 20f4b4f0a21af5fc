"""The table of metrics, and the documentation made from it."""

from pathlib import Path

import pytest

from vidur_ppo_plugin.record import metrics

ROOT = Path(__file__).parents[2]

REQUIRED = str.split("""
    total_reward absolute_score delta_score logistic_penalty latency_penalty balance_penalty queue_penalty latency_bonus
    reference_gain queue_delay marginal_delay reward_mean reward_std reward_min reward_max entropy approx_kl clipfrac
    explained_variance policy_loss value_loss grad_norm kl_coef learning_rate entropy_coef epsilon temperature
    temp_is_pulsing kl_reference bc_loss latency_mean latency_p50 latency_p90 latency_p99 ttft_p50 ttft_p90 ttft_p99
    tbt_p99 throughput_requests throughput_tokens batch_size load_spread safety_events collapse_alarm curriculum_stage
    update decisions simulated_time time_simulating_share time_deciding_share time_learning_share
    look_ahead gain_over_prior gain_over_loaded guard_change guard_reverts
    attention_self attention_max attention_entropy
    credit_absolute_score credit_delta_score credit_logistic_penalty credit_latency_penalty credit_balance_penalty
    credit_queue_penalty credit_latency_bonus credit_reference_gain credit_total_reward
""")


def test_the_header_has_every_metric_once() -> None:
    names = metrics.header(4)
    assert sorted(names) == sorted([*REQUIRED, *(f"action_replica_{index}" for index in range(4))])
    assert names[:3] == ["update", "decisions", "simulated_time"]
    assert len(set(names)) == len(names)


def test_many_replicas_are_summarised() -> None:
    assert "action_replica_63" in metrics.header(64)
    names = metrics.header(65)
    assert sorted(set(names) - set(REQUIRED)) == ["action_share_max", "action_share_min", "action_share_std"]
    assert metrics.header(1024) == names
    with pytest.raises(ValueError, match="num_replicas must be >= 1, got 0"):
        metrics.header(0)


def test_wandb_names_are_stable_and_distinct() -> None:
    assert metrics.wandb_name("entropy") == "ppo/entropy"
    assert metrics.wandb_name("update") == "ppo/update"
    assert metrics.wandb_name("total_reward") == "ppo_reward/total_reward"
    assert metrics.wandb_name("ttft_p90") == "ppo_latency/ttft_p90"
    assert metrics.wandb_name("action_replica_17") == "ppo_actions/action_replica_17"
    assert metrics.wandb_name("action_share_std") == "ppo_actions/action_share_std"
    names = [metrics.wandb_name(name) for name in metrics.header(64, with_evaluation=True)]
    assert len(set(names)) == len(names)
    assert {name.split("/")[0] for name in names} == {group.prefix for group in metrics.GROUPS}


@pytest.mark.parametrize("name", ["entropie", "action_replica_", "action_replica_x", ""])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="unknown metric"):
        metrics.wandb_name(name)


def test_the_documentation_is_up_to_date() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert text == metrics.docs(), "run: python -m vidur_ppo_plugin.record.metrics > docs/metrics.md"


def test_the_documentation_explains_every_metric() -> None:
    text = metrics.docs()
    for metric in (*metrics.metrics(1), *metrics.metrics(65)):
        assert f"`{metric.name}`" in text
        assert metric.unit and metric.meaning.endswith((".", ")"))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(row.count("|") == 5 for row in rows)  # a bar inside a formula would break its row
