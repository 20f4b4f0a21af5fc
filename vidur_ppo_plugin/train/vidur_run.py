"""A run in Vidur itself, some hundred times as slow as in the twin; for what the twin does not cover."""

import numpy as np

from vidur_ppo_plugin.config import PPOModularFlags
from vidur_ppo_plugin.routing.snapshot import ClusterSnapshot, FloatArray, RequestInfo
from vidur_ppo_plugin.sim.stepping import SteppedVidur
from vidur_ppo_plugin.workload.requests import Requests

from .episodes import Episode
from .runs import Served, served


class VidurRun:
    """As `TwinRun`."""

    def __init__(self, episode: Episode, cluster: int, flags: PPOModularFlags, requests: Requests) -> None:
        vidur_flags = episode.at_scale(cluster).vidur_flags(episode.seeds[cluster], episode.num_requests)
        self._cluster = SteppedVidur(vidur_flags, flags)
        self._decode_tokens = requests.decode_tokens
        self._window_began_s = 0.0

    def next_request(self) -> RequestInfo:
        """Go on until a request has to be placed."""
        if self._cluster.next_request() is None:
            raise RuntimeError("the simulation is over: there is no request left to place")
        return self._cluster.request_info()

    def snapshot(self) -> ClusterSnapshot:
        """The replicas at this moment, as they are."""
        return self._cluster.snapshot()

    def credit(self) -> FloatArray:
        """The reward of placing the request on each replica."""
        return self._cluster.placement_rewards()

    def place(self, replica: int) -> None:
        """Send the request to a replica."""
        self._cluster.place(replica)

    def take_served(self) -> Served:
        """What was completed since the last call."""
        done, now_s = self._cluster.take_completions(), self._cluster.now_s
        began_s, self._window_began_s = self._window_began_s, now_s
        return served(
            arrived_at_s=np.array([item.arrived_at_s for item in done]),
            first_token_at_s=np.array([item.first_token_at_s for item in done]),
            completed_at_s=np.array([item.completed_at_s for item in done]),
            decode_tokens=self._decode_tokens[[item.request for item in done]].astype(np.float64),
            duration_s=now_s - began_s,
            load_spread=float(self._cluster.snapshot().outstanding_requests.std()),
        )
