"""What each placement leads to, those who come later included: every choice is tried out with the same future.

For the next request of each cluster, copies of the cluster place it on one replica each; then the policy goes on with
the requests that come next, the same ones in every copy, and in the end everybody is served to the last token. What the
copies differ in is what the placement did: to the request itself, to those in flight, and to those who came later,
under the policy as it is. (Schulman et al. 2015, "Trust Region Policy Optimization", section 5.2, call this the vine.)
"""

from dataclasses import dataclass

import numpy as np

from vidur_ppo_plugin.policy.actor import Actor

from .layout import FloatArray
from .policy_twin import PolicyTwin

#: What is summed up over requests, in this order.
COSTS = ("latency", "latency squared", "time to first token", "time to first token squared")


@dataclass(frozen=True)
class Prospects:
    """Sums of COSTS over everybody in sight: [clusters, replicas, costs]; and how many they are, of each cluster."""

    sums: FloatArray
    num_requests: FloatArray

    @property
    def means(self) -> FloatArray:
        """Of each cost over requests and replicas: [clusters, costs]."""
        means: FloatArray = self.sums.mean(axis=1) / self.num_requests[:, None]
        return means


def look_ahead(twin: PolicyTwin, actor: Actor, num_later: int, rng: np.random.Generator) -> Prospects:
    """The prospects of the next request of every cluster, on every replica, with the `num_later` that follow it.

    Every cluster must have a next request. The generator breaks ties of the policy, alike in all copies of a cluster.
    """
    if twin.is_done.any():
        raise ValueError(f"clusters {np.flatnonzero(twin.is_done).tolist()} have no next request to place")
    size, num_replicas, steps = twin.num_clusters, twin.num_replicas, num_later + 1
    forced = np.full((size * num_replicas, steps), -1)
    forced[:, 0] = np.tile(np.arange(num_replicas), size)
    future = twin.fork(np.repeat(np.arange(size), num_replicas))
    future.play(actor, steps, uniforms=np.repeat(rng.random((size, steps, 2)), num_replicas, axis=0), forced=forced)
    future.drain()
    copies, served = future.completions()
    latency_s = served.completed_at_s - served.arrived_at_s
    first_token_s = served.first_token_at_s - served.arrived_at_s
    columns = (latency_s, latency_s**2, first_token_s, first_token_s**2)
    num_copies = size * num_replicas
    sums: FloatArray = np.stack([np.bincount(copies, column, num_copies) for column in columns], axis=-1)
    counts = np.bincount(copies, minlength=num_copies).reshape(size, num_replicas)
    return Prospects(sums.reshape(size, num_replicas, len(COSTS)), counts[:, 0].astype(np.float64))
