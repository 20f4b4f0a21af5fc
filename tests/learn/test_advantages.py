"""Advantages, moments and rollouts against closed forms."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidur_ppo_plugin.learn.normalise import Moments, RewardNormaliser
from vidur_ppo_plugin.learn.ppo import all_action_advantages, generalised_advantages, reward_of_best
from vidur_ppo_plugin.learn.rollout import Decision, RolloutBuffer
from vidur_ppo_plugin.routing.features import Observation

FINITE = st.floats(-1e3, 1e3)
VECTORS = st.lists(FINITE, min_size=1, max_size=30).map(np.array)


def test_gae_worked_out_by_hand() -> None:
    rewards, values = np.array([1.0, 2.0, 3.0]), np.array([0.5, 1.0, 1.5])
    last = 3.0 + 0.9 * 2.0 - 1.5
    middle = 2.0 + 0.9 * 1.5 - 1.0 + 0.9 * 0.8 * last
    first = 1.0 + 0.9 * 1.0 - 0.5 + 0.9 * 0.8 * middle
    advantages = generalised_advantages(rewards, values, 2.0, gamma=0.9, gae_lambda=0.8)
    assert advantages.tolist() == pytest.approx([first, middle, last])


@given(VECTORS, FINITE)
def test_gae_with_lambda_one_is_the_discounted_sum_minus_the_value(rewards: np.ndarray, bootstrap: float) -> None:
    values = np.linspace(-1, 1, len(rewards))
    advantages = generalised_advantages(rewards, values, bootstrap, gamma=0.9, gae_lambda=1.0)
    steps = len(rewards)
    total = sum(0.9**k * rewards[k] for k in range(steps)) + 0.9**steps * bootstrap
    assert advantages[0] == pytest.approx(total - values[0], rel=1e-9, abs=1e-6)


@given(VECTORS, FINITE)
def test_gae_without_a_future_is_reward_minus_value(rewards: np.ndarray, bootstrap: float) -> None:
    values = np.linspace(-1, 1, len(rewards))
    advantages = generalised_advantages(rewards, values, bootstrap, gamma=0.0, gae_lambda=0.95)
    assert advantages.tolist() == pytest.approx((rewards - values).tolist())


def test_gae_refuses_a_column_for_a_vector() -> None:
    with pytest.raises(ValueError, match=r"\(3,\) and \(3, 1\)"):
        generalised_advantages(np.zeros(3), np.zeros((3, 1)), 0.0, gamma=0.9, gae_lambda=0.9)


def test_all_action_advantages_compare_with_the_policys_mean() -> None:
    action_rewards = np.array([[-1.0, -3.0], [-2.0, -2.0]])
    probabilities = np.array([[0.75, 0.25], [0.5, 0.5]])
    advantages = all_action_advantages(action_rewards, probabilities)
    assert advantages.tolist() == [[pytest.approx(0.5), pytest.approx(-1.5)], [0.0, 0.0]]
    with pytest.raises(ValueError, match="must agree"):
        all_action_advantages(action_rewards, probabilities[:1])


@given(st.lists(VECTORS, min_size=1, max_size=5))
def test_moments_of_parts_add_up_to_those_of_everything(parts: list[np.ndarray]) -> None:
    moments = Moments()
    for part in parts:
        moments += Moments.of(part)
    everything = np.concatenate(parts)
    assert moments.count == len(everything)
    assert moments.mean == pytest.approx(everything.mean(), abs=1e-9)
    assert moments.variance == pytest.approx(everything.var(), rel=1e-6, abs=1e-6)


@given(VECTORS)
def test_moments_of_one_array_are_those_of_numpy_to_the_last_bit(values: np.ndarray) -> None:
    """With one shard nothing is added up: normalising by its moments is normalising the array."""
    moments = Moments.of(values)
    assert moments.mean == values.mean() and moments.variance == values.var()
    assert moments + Moments() == moments


def test_moments_refuse_nan() -> None:
    with pytest.raises(ValueError, match="not finite: nan"):
        Moments.of(np.array([1.0, np.nan]))


def test_rewards_are_scaled_by_the_deviation_of_their_discounted_sum() -> None:
    rewards = np.random.default_rng(0).normal(-300, 50, 1000)
    normaliser = RewardNormaliser(gamma=0.0)
    normaliser.observe(rewards)
    assert (rewards * normaliser.factor).std() == pytest.approx(1.0)
    # Two streams share the scale; each has a sum of its own, which goes on from rollout to rollout.
    discounted = RewardNormaliser(gamma=0.5)
    for values, stream in (([1.0, 2.0], 0), ([4.0], 7), ([3.0], 0)):
        discounted.observe(np.array(values), stream)
    assert discounted.factor == pytest.approx(1.0 / np.std([1.0, 2.5, 4.0, 4.25]))


def test_the_reward_of_the_best_action_is_shared_among_equals() -> None:
    rewards = np.array([[-1.0, -2.0, -6.0], [-4.0, -8.0, -2.0]])
    assert reward_of_best(rewards, np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])).tolist() == [-2.0, -4.0]
    # Without a preference each action counts alike.
    assert reward_of_best(rewards, np.zeros((2, 3))).tolist() == pytest.approx([-3.0, -14 / 3])
    with pytest.raises(ValueError, match="of one shape"):
        reward_of_best(rewards, np.zeros((1, 3)))


def decision(action: int = 0) -> Decision:
    seen = Observation(np.zeros((2, 3), np.float32), np.zeros(1, np.float32))
    return Decision(observation=seen, prior_logits=np.zeros(2, np.float32), action=action, temperature=1.0)


def test_buffer_waits_for_rewards() -> None:
    buffer = RolloutBuffer(2)
    buffer.add(decision(1))
    assert buffer.awaits_reward and not buffer.is_full
    with pytest.raises(RuntimeError, match="before the reward"):
        buffer.add(decision())
    buffer.settle(-1.0)
    buffer.add(decision(0))
    assert not buffer.is_full
    buffer.settle(-2.0)
    assert buffer.is_full
    with pytest.raises(RuntimeError, match="no decision"):
        buffer.settle(0.0)
    taken = buffer.take(None)
    assert taken.actions.tolist() == [1, 0] and taken.rewards.tolist() == [-1.0, -2.0]
    assert taken.action_rewards is None and len(buffer) == 0


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_buffer_refuses_a_reward_that_is_not_finite(reward: float) -> None:
    buffer = RolloutBuffer(2)
    buffer.add(decision())
    with pytest.raises(ValueError, match="reward of decision 0 is not finite"):
        buffer.settle(reward)
