"""`PolicyTwin`: many clusters in which a policy places the requests, without coming back to Python in between.

It can be forked: copies of clusters whose next decision is forced, and which then go on under a policy with the same
requests and random numbers, tell what each replica would have led to.
"""

import copy
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vidur_ppo_plugin.policy.actor import Actor
from vidur_ppo_plugin.routing.features import FeatureTable
from vidur_ppo_plugin.routing.prior import Prior
from vidur_ppo_plugin.routing.visibility import Drain
from vidur_ppo_plugin.workload.requests import Requests

from . import layout, policy_kernels
from .config import TwinConfig
from .layout import FloatArray, IntArray
from .policy_kernels import Credit, Sampling, Trajectories
from .vector import VectorTwin
from .vector_kernels import Workload

_PER_CLUSTER = (
    "tail_preferences",
    "is_current",
    "average",
    "last",
    "truth",
    "shown",
    "arrivals",
    "expected",
    "expected_shown",
    "replicas",
    "requests",
)


class PolicyTwin(VectorTwin):
    """Equal clusters, each with its own requests; `play` makes many decisions in each of them."""

    def __init__(
        self,
        config: TwinConfig,
        requests: Sequence[Requests],
        *,
        prior: Prior,
        features: FeatureTable | None = None,
        tail_preferences: Sequence[float] | None = None,
        report_delay_s: float = 0.0,
        drains: Sequence[Sequence[Drain]] | None = None,
    ) -> None:
        """The arguments are those of `VectorTwin`; the policy sees old reports, drained replicas are not chosen."""
        super().__init__(
            config,
            requests,
            features=features,
            tail_preferences=tail_preferences,
            report_delay_s=report_delay_s,
            drains=drains,
        )
        self._prior = prior.rules
        self._token_s = config.prefill_s_per_token / self._speed_factors

    def play(
        self,
        actor: Actor,
        steps: int,
        *,
        temperature: float = 0.0,
        epsilon: float = 0.0,
        uniforms: FloatArray | None = None,
        forced: NDArray[np.integer] | None = None,
        with_credit: bool = False,
        latency_power: float = 1.0,
        backlog_weight: float = 0.0,
    ) -> Trajectories:
        """Make `steps` decisions in every cluster, or as many as it has requests; all are then at their next request.

        Temperature 0 is greedy. `uniforms`: [clusters, steps, 2], random numbers of each decision; needed unless greedy
        (then they break ties, the first wins without). `forced`: [clusters, steps], the replica whatever the policy
        says, -1 where it decides. `with_credit`: also what every replica would have been worth.
        """
        shape = (self.num_clusters, steps)
        if uniforms is None and (temperature or epsilon):
            raise ValueError(f"uniforms must be given with temperature {temperature} and epsilon {epsilon}")
        sampling = Sampling(
            float(temperature),
            float(epsilon),
            np.zeros((*shape, 2)) if uniforms is None else np.ascontiguousarray(uniforms, np.float64),
            np.full(shape, -1) if forced is None else np.ascontiguousarray(forced, np.int64),
        )
        if sampling.uniforms.shape != (*shape, 2) or sampling.forced.shape != shape:
            raise ValueError(
                f"uniforms and forced must have shapes {(*shape, 2)} and {shape}, "
                f"got {sampling.uniforms.shape} and {sampling.forced.shape}"
            )
        if sampling.forced.size and sampling.forced.max() >= self.num_replicas:
            raise ValueError(f"forced must be < {self.num_replicas}, got {sampling.forced.max()}")
        credit = Credit(int(with_credit), float(latency_power), float(backlog_weight), self._token_s)
        return self._play(actor, sampling, credit)

    def _play(self, actor: Actor, sampling: Sampling, credit: Credit) -> Trajectories:
        shape, observed = sampling.forced.shape, self._observed
        size, num_request_features = self.num_replicas, observed.requests.shape[1]
        trajectories = Trajectories(
            replicas=np.zeros((*shape, *observed.replicas.shape[1:]), np.float32),
            request=np.zeros((*shape, num_request_features), np.float32),
            prior_logits=np.zeros((*shape, size), np.float32),
            logits=np.zeros((*shape, size), np.float32),
            actions=np.full(shape, -1),
            rewards=np.zeros((*shape, size)),
            loads=np.zeros((*shape, size)),
            queue_lengths=np.zeros((*shape, size)),
            oldest_wait_s=np.zeros(shape),
        )
        made = np.zeros(self.num_clusters, np.int64)
        while True:
            self._prepare_forks()
            outcome = policy_kernels.play_all(
                self.rules,
                self._times(),
                self.state,
                self._workload,
                observed,
                self._scratch,
                self._prior,
                actor.kernel_weights,
                sampling,
                credit,
                made,
                trajectories,
            )
            if outcome == layout.DONE:
                return trajectories
            if outcome == policy_kernels.NOT_FINITE:
                cluster = int(np.flatnonzero(made < shape[1])[0])
                logits = trajectories.logits[cluster, made[cluster]].tolist()
                raise FloatingPointError(f"the policy's logits are not finite: {logits}")
            self._provide(outcome)

    @property
    def oldest_wait_s(self) -> FloatArray:
        """Longest wait of a queued request that the router sees, in seconds, at the next request of each cluster."""
        self.observe()
        figures = self._observed.shown if self._report_delay_s else self._observed.truth
        longest: FloatArray = figures[:, policy_kernels.OLDEST].max(axis=1)
        return longest

    @property
    def in_flight(self) -> FloatArray:
        """Requests in flight at the next request: [clusters, replicas]."""
        self.observe()
        return self._observed.truth[:, policy_kernels.OUTSTANDING].copy()

    def fork(self, clusters: NDArray[np.integer], later: Sequence[Requests] | None = None) -> "PolicyTwin":
        """A twin whose clusters are copies of these `clusters` as they are now; one may be copied several times.

        Nothing of what was completed here is in its `completions`. `later`: other requests after the next one of each
        copy; otherwise those that come here.
        """
        at = np.asarray(clusters, np.int64)
        twin = copy.copy(self)
        twin._num_clusters, twin._log = len(at), []
        rows = (at[:, None] * self.num_replicas + np.arange(self.num_replicas)).reshape(-1)
        cells = self.state.cells[rows]
        twin.state = layout.State(
            cells, cells.view(np.float64), np.zeros_like(self.state.log), np.zeros_like(self.state.signals)
        )
        twin._scratch = layout.scratch_for(self.rules, twin.state)
        visible = self._observed.visible
        twin._observed = self._observed._replace(
            visible=visible._replace(**{name: getattr(visible, name)[at] for name in visible._fields[1:]}),
            **{name: getattr(self._observed, name)[at] for name in _PER_CLUSTER},
        )
        twin._tail_preferences = self._tail_preferences[at]
        twin._drains = None if self._drains is None else [self._drains[cluster] for cluster in at.tolist()]
        twin._workload = self._workload._replace(**{name: part[at] for name, part in self._workload._asdict().items()})
        if later is not None:
            if self._report_delay_s:
                raise ValueError(f"later must be None with report_delay_s {self._report_delay_s}")
            twin._workload = _continued(twin._workload, later)
        return twin


def _continued(workload: Workload, later: Sequence[Requests]) -> Workload:
    """The workload with other requests after the next one of each cluster."""
    if len(later) != len(workload.position):
        raise ValueError(f"later must be given for each of {len(workload.position)} clusters, got {len(later)}")
    kept = workload.position + 1
    counts: IntArray = kept + np.array([len(part) for part in later])
    shape = (len(later), int(counts.max()))
    arrays = {name: np.ones(shape, getattr(workload, name).dtype) for name in workload._fields[:4]}
    for cluster, (part, first) in enumerate(zip(later, kept.tolist(), strict=True)):
        columns = part.arrived_at_s, part.prompt_tokens, part.decode_tokens, np.zeros(len(part))
        if len(part) and part.arrived_at_s[0] < workload.arrived_s[cluster, first - 1]:
            raise ValueError(f"later of cluster {cluster} must arrive after its next request")
        for (name, into), new in zip(arrays.items(), columns, strict=True):
            into[cluster, :first] = getattr(workload, name)[cluster, :first]
            into[cluster, first : counts[cluster]] = new
    return workload._replace(**arrays, num_requests=counts)
