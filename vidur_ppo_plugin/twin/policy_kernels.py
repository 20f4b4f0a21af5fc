"""Many decisions of a policy in one compiled pass: observe, credit, forward pass, choice, placement, again and again.

Clusters do not meet, so each makes all its decisions before the next one begins. The pass can be called again where it
had to stop: `made` counts decisions, and everything that can fail comes before anything that changes.
"""

import math
from typing import Any, NamedTuple

from vidur_ppo_plugin.policy.forward import forward
from vidur_ppo_plugin.policy.policy import MASKED
from vidur_ppo_plugin.routing.prior import prior_logits
from vidur_ppo_plugin.routing.snapshot import CONTEXT_WEIGHT, REQUEST_WEIGHT, ROW, token_load

from .compiled import entry, helper
from .layout import DONE, FREE, NO_SLOT, PREFILL_TOKENS, Float32Array, FloatArray, IntArray
from .vector_kernels import act_in_cluster, increase_in_cluster, observe_cluster
from .visibility import NUM_ROWS, mask_drained

#: Beside the outcomes of `layout`: the policy gave a logit that is no number.
NOT_FINITE = 100
OLDEST, OUTSTANDING = ROW["oldest_wait_s"], ROW["outstanding_requests"]


class Sampling(NamedTuple):
    """How replicas are sampled. Temperature 0: the largest logit. The arrays are [clusters, decisions(, 2)]."""

    temperature: float
    epsilon: float
    #: Two random numbers in [0, 1) for each decision: whether to explore, and which replica.
    uniforms: FloatArray
    #: The replica, whatever the policy says; -1 to let it decide.
    forced: IntArray


class Credit(NamedTuple):
    """How `rewards` are computed: minus the marginal delay; not at all if `is_wanted` is 0."""

    is_wanted: int
    latency_power: float
    backlog_weight: float
    #: What a prompt token costs on each replica.
    token_s: FloatArray


class Trajectories(NamedTuple):
    """What was seen, chosen and worth at each decision: [clusters, decisions, ...]."""

    replicas: Float32Array
    request: Float32Array
    prior_logits: Float32Array
    logits: Float32Array
    #: -1 where a cluster has no request left.
    actions: IntArray
    #: Of every replica.
    rewards: FloatArray
    #: The replicas' `token_load` and requests in flight when the decision is made, the new one left out.
    loads: FloatArray
    queue_lengths: FloatArray
    #: The longest wait of a request in a queue that the router sees.
    oldest_wait_s: FloatArray


@entry
def play_all(
    rules: Any,
    times: Any,
    state: Any,
    workload: Any,
    observed: Any,
    scratch: Any,
    prior: Any,
    weights: Any,
    sampling: Any,
    credit: Any,
    made: Any,
    trajectories: Any,
) -> Any:
    """Fill `trajectories` with decisions of every cluster, while it has requests; then bring it to the next request."""
    steps = trajectories.actions.shape[1]
    for c in range(len(made)):
        while made[c] < steps and workload.position[c] < workload.num_requests[c]:
            outcome = _decide(
                rules,
                times,
                state,
                workload,
                observed,
                scratch,
                prior,
                weights,
                sampling,
                credit,
                c,
                made[c],
                trajectories,
            )
            if outcome != DONE:
                return outcome
            made[c] += 1
        outcome = observe_cluster(rules, times, state, workload, observed, c)
        if outcome != DONE:
            return outcome
    return DONE


@helper
def _decide(
    rules: Any,
    times: Any,
    state: Any,
    workload: Any,
    observed: Any,
    scratch: Any,
    prior: Any,
    weights: Any,
    sampling: Any,
    credit: Any,
    c: int,
    t: int,
    trajectories: Any,
) -> Any:
    """Make decision `t` of cluster `c`."""
    outcome = observe_cluster(rules, times, state, workload, observed, c)
    if outcome != DONE:
        return outcome
    num_replicas = len(observed.speed_factors)
    for row in range(c * num_replicas, (c + 1) * num_replicas):
        if state.cells[row, FREE] < 0:
            return NO_SLOT
    if credit.is_wanted:
        outcome = _credit(rules, times, state, workload, scratch, c, credit, trajectories.rewards[c, t])
        if outcome != DONE:
            return outcome
    shown = observed.shown[c] if observed.visible.delay_s > 0.0 else observed.truth[c]
    k, logits = workload.position[c], trajectories.prior_logits[c, t]
    facts = (workload.prompts[c, k], observed.expected_shown[c], rules.block_size)
    logits[:] = prior_logits(shown[:NUM_ROWS], facts, prior)
    mask_drained(observed.visible, c, workload.arrived_s[c, k], MASKED, logits)
    trajectories.replicas[c, t] = observed.replicas[c]
    trajectories.request[c, t] = observed.requests[c]
    trajectories.oldest_wait_s[c, t] = shown[OLDEST].max()
    trajectories.queue_lengths[c, t] = observed.truth[c, OUTSTANDING]
    trajectories.loads[c, t] = token_load(observed.truth[c], CONTEXT_WEIGHT, REQUEST_WEIGHT)
    logits = forward(observed.replicas[c], observed.requests[c], logits, weights)
    trajectories.logits[c, t] = logits
    action = sampling.forced[c, t]
    if action < 0:
        first, second = sampling.uniforms[c, t, 0], sampling.uniforms[c, t, 1]
        action = choose_replica(logits, sampling.temperature, sampling.epsilon, first, second)
        if action < 0:
            return NOT_FINITE
    trajectories.actions[c, t] = action
    return act_in_cluster(rules, state, workload, observed, c, action)


@helper
def _credit(rules: Any, times: Any, state: Any, workload: Any, scratch: Any, c: int, credit: Any, rewards: Any) -> Any:
    """The reward of every replica: minus what the request adds to everybody's latency there."""
    outcome = increase_in_cluster(rules, times, state, workload, scratch, c, credit.latency_power, math.inf, rewards)
    if outcome != DONE:
        return outcome
    num_replicas, prompt = len(rewards), workload.prompts[c, workload.position[c]]
    for replica in range(num_replicas):
        token_s = credit.token_s[replica]
        added_s = prompt * token_s
        backlog_s = state.cells[c * num_replicas + replica, PREFILL_TOKENS] * token_s
        growth = added_s * (2.0 * backlog_s + added_s)
        rewards[replica] = -(rewards[replica] + credit.backlog_weight * growth)
    return DONE


@helper
def choose_replica(logits: Any, temperature: float, epsilon: float, first: float, second: float) -> Any:
    """A replica drawn by two uniform numbers: from softmax(logits / temperature), or uniformly with chance epsilon.

    With temperature 0 the largest logit, of several equal ones each with the same chance. -1 if a logit is no number.
    """
    size, highest = len(logits), logits[0]
    for replica in range(size):
        if not math.isfinite(logits[replica]):
            return -1
        highest = max(highest, logits[replica])
    if epsilon > 0.0 and first < epsilon:
        return int(second * size)
    if temperature == 0.0:
        number = 0
        for replica in range(size):
            number += logits[replica] == highest
        number = min(int(second * number), number - 1)
        for replica in range(size):
            if logits[replica] == highest:
                if number == 0:
                    return replica
                number -= 1
    total = 0.0
    for replica in range(size):
        total += math.exp((float(logits[replica]) - float(highest)) / temperature)
    threshold, total = second * total, 0.0
    for replica in range(size):
        total += math.exp((float(logits[replica]) - float(highest)) / temperature)
        if total > threshold:
            return replica
    return size - 1
