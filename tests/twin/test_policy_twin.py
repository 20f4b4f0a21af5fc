"""Decisions in one compiled pass against the same decisions made one by one in Python, to the last bit."""

import math
from bisect import bisect
from itertools import accumulate

import numpy as np
import pytest
from small_twins import actor_of, config_of, of_cluster, prior_of, requests_of

from vidur_ppo_plugin.routing.features import FeatureTable
from vidur_ppo_plugin.routing.prior import NAMES, Prior
from vidur_ppo_plugin.routing.visibility import Drain, Visibility
from vidur_ppo_plugin.twin.config import TwinConfig
from vidur_ppo_plugin.twin.layout import SCHEDULERS
from vidur_ppo_plugin.twin.policy_kernels import MASKED
from vidur_ppo_plugin.twin.policy_twin import PolicyTwin
from vidur_ppo_plugin.twin.source import TwinReplicaSource
from vidur_ppo_plugin.twin.twin import Twin, in_order
from vidur_ppo_plugin.workload.requests import Requests

SPEEDS = [1.0, 0.5, 1.0]


def expected_actions(
    config: TwinConfig,
    requests: Requests,
    prior: Prior,
    visibility: Visibility,
    uniforms: np.ndarray,
    temperature: float,
    epsilon: float,
) -> tuple[Twin, list[dict[str, np.ndarray]]]:
    """The twin after all decisions, and each decision, made in Python."""
    actor, table, twin = actor_of(), FeatureTable(), Twin(config)
    source = TwinReplicaSource(twin, num_waiting_slots=table.num_waiting_slots)
    rows = []
    columns = (requests.arrived_at_s, requests.prompt_tokens, requests.decode_tokens)
    for (now_s, prompt, output), (first, second) in zip(
        zip(*(column.tolist() for column in columns), strict=True), uniforms.tolist(), strict=False
    ):
        info = source.request_info(prompt, now_s)
        seen = visibility.view(source.snapshot(now_s))
        logits = prior.logits(prior.cost(seen, info))
        if seen.available is not None:
            logits = np.where(seen.available, logits, MASKED)
        observation = table.observe(seen, info)
        credit = -twin.marginal_delay(now_s, prompt, output, latency_power=1.5, backlog_weight=2.0)
        scores = actor.logits(observation.replicas, observation.request, logits).tolist()
        cumulative = list(accumulate([math.exp((score - max(scores)) / temperature) for score in scores]))
        action = min(bisect(cumulative, second * cumulative[-1]), len(scores) - 1)
        if first < epsilon:
            action = int(second * len(scores))
        rows.append(
            {
                "replicas": observation.replicas,
                "request": observation.request,
                "prior_logits": logits,
                "actions": action,
                "rewards": credit,
                "oldest_wait_s": seen.oldest_wait_s.max(),
            }
        )
        twin.submit(action, now_s, prompt, output)
        visibility.on_dispatch(action, prompt)
    return twin, rows


CASES = [
    *((scheduler, "least_tokens", 0.0, False) for scheduler in SCHEDULERS),
    *(("sarathi", name, 0.0, False) for name in NAMES if name != "least_tokens"),
    ("sarathi", "shortest_delay", 0.7, True),
    ("vllm", "least_kv", 0.0, True),
]


@pytest.mark.parametrize(("scheduler", "prior_name", "delay_s", "is_drained"), CASES)
def test_the_pass_decides_as_python_does(scheduler: str, prior_name: str, delay_s: float, is_drained: bool) -> None:
    config = config_of(replica_scheduler=scheduler, max_batch_tokens=600, speed_factors=SPEEDS)
    workloads = [requests_of(count, seed) for seed, count in enumerate((150, 40, 150))]
    last_s = float(workloads[0].arrived_at_s[-1])
    drains = [
        (Drain(cluster, 0.2 * last_s, 0.6 * last_s),) if is_drained and cluster < 2 else () for cluster in range(3)
    ]
    uniforms = np.random.default_rng(3).random((3, 150, 2))
    prior = prior_of(config, prior_name)
    twin = PolicyTwin(config, workloads, prior=prior, report_delay_s=delay_s, drains=drains)
    options = {"temperature": 0.7, "epsilon": 0.1, "with_credit": True, "latency_power": 1.5, "backlog_weight": 2.0}
    parts = [twin.play(actor_of(), steps, uniforms=uniforms[:, first : first + steps], **options)
             for first, steps in ((0, 100), (100, 50))]  # fmt: skip
    twin.drain()
    completions = twin.completions()
    for cluster, requests in enumerate(workloads):
        visibility = Visibility(report_delay_s=delay_s, drains=drains[cluster])
        reference, rows = expected_actions(config, requests, prior, visibility, uniforms[cluster], 0.7, 0.1)
        for name in rows[0]:
            got = np.concatenate([getattr(part, name)[cluster] for part in parts])[: len(requests)]
            np.testing.assert_array_equal(got, np.array([row[name] for row in rows]), err_msg=name)
        reference.drain()
        expected, found = in_order(reference.completions()), of_cluster(completions, cluster)
        np.testing.assert_array_equal(found.completed_at_s, expected.completed_at_s)
        np.testing.assert_array_equal(found.first_token_at_s, expected.first_token_at_s)
    np.testing.assert_array_equal(parts[1].actions[1], -1)  # it had 40 requests
    is_masked = np.concatenate([part.prior_logits for part in parts], axis=1) == MASKED
    assert is_masked.any() == is_drained


def test_a_fork_tells_what_every_replica_leads_to() -> None:
    """Forced first decisions, then the same policy: as if the whole run had been repeated with that decision."""
    config = config_of(speed_factors=SPEEDS)
    workloads = [requests_of(90, seed) for seed in range(2)]
    actor, prior = actor_of(), prior_of(config)
    uniforms = np.random.default_rng(4).random((2, 90, 2))
    twin = PolicyTwin(config, workloads, prior=prior, report_delay_s=0.3)
    before = twin.play(actor, 40, temperature=1.0, uniforms=uniforms[:, :40])
    already_done = len(twin.completions()[1])
    assert already_done > 0
    branches = twin.fork(np.repeat(np.arange(2), 3))
    forced = np.full((6, 21), -1)
    forced[:, 0] = np.tile(np.arange(3), 2)
    later = branches.play(actor, 21, forced=forced)
    branches.drain()
    ended = branches.completions()
    for branch in range(6):
        cluster, action = divmod(branch, 3)
        anew = PolicyTwin(config, [workloads[cluster]], prior=prior, report_delay_s=0.3)
        actions = np.full((1, 61), -1)
        actions[0, :40], actions[0, 40] = before.actions[cluster], action
        whole = anew.play(actor, 61, forced=actions)
        np.testing.assert_array_equal(whole.actions[0, 40:], later.actions[branch])
        np.testing.assert_array_equal(whole.replicas[0, 40:], later.replicas[branch])
        anew.drain()
        expected, found = of_cluster(anew.completions(), 0), of_cluster(ended, branch)
        is_later = np.isin(expected.index, found.index)
        assert is_later[40:].all() and not is_later.all()  # those completed before the fork are not told again
        np.testing.assert_array_equal(found.completed_at_s, expected.completed_at_s[is_later])
        np.testing.assert_array_equal(found.first_token_at_s, expected.first_token_at_s[is_later])
    # The one that was forked has not moved.
    went_on = twin.play(actor, 21)
    np.testing.assert_array_equal(went_on.replicas[0, 0], later.replicas[0, 0])


def test_a_fork_can_have_other_requests_to_come() -> None:
    config = config_of()
    (requests,) = workloads = [requests_of(60, 0)]
    actor, prior = actor_of(), prior_of(config)
    twin = PolicyTwin(config, workloads, prior=prior)
    twin.play(actor, 20)
    same = requests_of(60, 0)
    later = Requests(same.arrived_at_s[21:41], same.prompt_tokens[21:41], same.decode_tokens[21:41])
    other = Requests(later.arrived_at_s, later.prompt_tokens + 700, later.decode_tokens)
    branches = twin.fork(np.zeros(3, int), [later, other, Requests(*(column[:0] for column in vars(later).values()))])
    played, expected = branches.play(actor, 30), twin.play(actor, 21)
    np.testing.assert_array_equal(played.actions[0, :21], expected.actions[0])
    np.testing.assert_array_equal(played.actions[:, 21:], -1)
    assert not np.array_equal(played.request[1, 1], expected.request[0, 1])
    np.testing.assert_array_equal(played.actions[2, 1:], -1)
    with pytest.raises(ValueError, match="later of cluster 0 must arrive after its next request"):
        twin.fork(np.zeros(1, int), [requests])


def test_greedy_decisions_break_ties_by_their_random_number() -> None:
    config = config_of(speed_factors=[1.0] * 4)
    requests = Requests(np.zeros(1), np.array([100]), np.array([10]))
    for number in range(4):
        twin = PolicyTwin(config, [requests], prior=prior_of(config))
        played = twin.play(actor_of(), 1, uniforms=np.full((1, 1, 2), 0.25 * number + 0.1))
        assert len(set(played.logits[0, 0].tolist())) == 1  # all replicas are empty
        assert played.actions[0, 0] == number


def test_what_it_refuses() -> None:
    config = config_of()
    twin = PolicyTwin(config, [requests_of(5, 0)], prior=prior_of(config))
    with pytest.raises(ValueError, match=r"uniforms must be given with temperature 1.0"):
        twin.play(actor_of(), 2, temperature=1.0)
    with pytest.raises(ValueError, match=r"uniforms and forced must have shapes \(1, 2, 2\) and \(1, 2\)"):
        twin.play(actor_of(), 2, forced=np.zeros((2, 2), int))
    with pytest.raises(ValueError, match="forced must be < 2, got 2"):
        twin.play(actor_of(), 1, forced=np.full((1, 1), 2))
    broken = actor_of()
    broken.kernel_weights[-1][:] = np.nan
    with pytest.raises(FloatingPointError, match="logits are not finite"):
        twin.play(broken, 1)
