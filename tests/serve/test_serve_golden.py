"""The same snapshot gives the same placement in Vidur, in the twin and in the router in front of real replicas.

A scheduler runs in Vidur and its router in the twin, on the same requests; every snapshot that a decision was made by
is kept. The router of `serve` is then shown those very snapshots, through all that stands between it and a decision.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulation import simulate

from vidur_ppo_plugin import checkpoint
from vidur_ppo_plugin.compare.engines import run_cell
from vidur_ppo_plugin.compare.schedulers import SchedulerSpec, parse_schedulers
from vidur_ppo_plugin.learn.export import export_policy
from vidur_ppo_plugin.routing.snapshot import ClusterSnapshot, RequestInfo
from vidur_ppo_plugin.routing.visibility import Visibility
from vidur_ppo_plugin.scenario import Capacity, Scenario, load_scenario
from vidur_ppo_plugin.serve.decider import Decider, NamedPolicy
from vidur_ppo_plugin.serve.fleet import Fleet
from vidur_ppo_plugin.serve.instruments import Instruments
from vidur_ppo_plugin.serve.source import VllmReplicaSource
from vidur_ppo_plugin.sim.replica_source import VidurReplicaSource
from vidur_ppo_plugin.twin.source import TwinReplicaSource

SEED = 1000
PREFIX = "p_p_o_global_scheduler_modular_config_"


def short(name: str, qps: float) -> Scenario:
    capacity = Capacity(qps=qps, scheduler="least_tokens", num_requests=1, num_seeds=1)
    return load_scenario(name).at(capacity=capacity, load=1.0, num_requests=120)


# In the second, replicas are drained for a while: some may not be chosen.
SCENARIOS = {"mixed_long": short("mixed_long", 25.0), "drain": short("drain", 45.0)}
POLICIES = {
    "least_outstanding": {},
    "power_of_two": {},
    "least_kv": {},
    "least_tokens": {},
    "least_work": {},
    "shortest_delay": {},
    "size_split": {"threshold_tokens": 1500, "num_long_replicas": 1},
}
Seen = list[tuple[ClusterSnapshot, RequestInfo]]


class Watch:
    """Keeps what decisions are made by."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._snapshots: list[ClusterSnapshot] = []
        self._requests: list[RequestInfo] = []
        self._keep(monkeypatch, Visibility, "view", self._snapshots)
        for source in (VidurReplicaSource, TwinReplicaSource):
            self._keep(monkeypatch, source, "request_info", self._requests)

    def _keep(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, into: list[Any]) -> None:
        original = getattr(owner, name)

        def kept(*arguments: Any) -> Any:
            into.append(original(*arguments))
            return into[-1]

        monkeypatch.setattr(owner, name, kept)

    def take(self) -> Seen:
        pairs = list(zip(self._snapshots, self._requests, strict=True))
        self._snapshots.clear()
        self._requests.clear()
        return pairs


def placements_of_the_router(policy: str, seen: Seen, rng_state: Any = None) -> list[int]:
    """What `serve` does with the same snapshots."""
    fleet = Fleet(VllmReplicaSource(num_waiting_slots=4), max_in_flight=1000, breaker_failures=3)
    for index in range(seen[0][0].num_replicas):
        fleet.set_up(fleet.add(f"http://replica{index}:8000"))
    decider = Decider(
        fleet,
        Instruments(),
        policy=NamedPolicy("policy", policy, seed=SEED),
        fallback=NamedPolicy("fallback", "round_robin", seed=0),
        shadow=None,
        explore=0.0,
        rng=random.Random(0),
    )
    if rng_state is not None:
        decider.policy.router.rng.setstate(rng_state)  # type: ignore[attr-defined]
    placements = []
    for snapshot, request in seen:
        fleet.source.snapshot = lambda now_s, replicas, given=snapshot: given  # type: ignore[method-assign]
        for backend, is_open in zip(fleet.backends, _open(snapshot), strict=True):
            backend.is_draining = not is_open
        decision = decider.decide(request, snapshot.now_s)
        assert not decision.is_fallback
        placements.append(decision.action)
    return placements


def _open(snapshot: ClusterSnapshot) -> list[bool]:
    return [True] * snapshot.num_replicas if snapshot.available is None else snapshot.available.tolist()


def check(scenario: Scenario, spec: SchedulerSpec, policy: str, watch: Watch, rng_state: Any = None) -> None:
    vidur = run_cell(scenario, spec, SEED, engine="vidur").requests["replica"].tolist()
    seen_in_vidur = watch.take()
    twin = run_cell(scenario, spec, SEED, engine="twin").requests["replica"].tolist()
    seen_in_twin = watch.take()
    assert len(seen_in_vidur) == len(vidur) == 120
    assert len(set(vidur)) == scenario.num_replicas  # a policy that always took the same would prove little
    for ours, theirs in zip(seen_in_vidur, seen_in_twin, strict=True):
        np.testing.assert_allclose(ours[0].values, theirs[0].values, rtol=1e-9, atol=1e-9)
    assert vidur == twin
    assert placements_of_the_router(policy, seen_in_vidur, rng_state) == vidur
    assert placements_of_the_router(policy, seen_in_twin, rng_state) == vidur


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("name", POLICIES)
def test_a_heuristic_places_the_same_everywhere(scenario: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = POLICIES[name]
    policy = ":".join(filter(None, [name, ",".join(f"{key}={value}" for key, value in options.items())]))
    check(SCENARIOS[scenario], SchedulerSpec(name, name).with_options(**options), policy, Watch(monkeypatch))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_learned_policy_places_the_same_everywhere(
    scenario: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(
        tmp_path,
        global_scheduler_config_type="ppo_modular",
        synthetic_request_generator_config_num_requests=60,
        **{f"{PREFIX}save_checkpoint": str(tmp_path / "policy"), f"{PREFIX}rollout_len": 20, f"{PREFIX}lr": 0.01},
    )
    export_policy(tmp_path / "policy", tmp_path / "policy.npz")
    spec = parse_schedulers([f"ppo_modular:{tmp_path / 'policy'}"])[0]
    version, internal, gauss = checkpoint.load(Path(spec.checkpoint)).state["agent"]["rng"]
    rng_state = (version, tuple(internal), gauss)
    check(SCENARIOS[scenario], spec, str(tmp_path / "policy.npz"), Watch(monkeypatch), rng_state)
