"""Records for the tests: of a cluster of the twin, decided as `serve` decides, with exploration and true outcomes."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vidur_ppo_plugin.hardware.reference import BATCH_SIZE_CAP, BLOCK_SIZE, CHUNK_SIZE, reference_roofline
from vidur_ppo_plugin.record.decision_log import LoggedDecision, Outcome, decision_line, header_line
from vidur_ppo_plugin.routing.routers import Router, scored
from vidur_ppo_plugin.twin.config import TwinConfig
from vidur_ppo_plugin.twin.source import TwinReplicaSource
from vidur_ppo_plugin.twin.twin import Twin, in_order
from vidur_ppo_plugin.workload.requests import Requests


def cluster(speeds: Sequence[float]) -> TwinConfig:
    return TwinConfig(
        roofline=reference_roofline(),
        replica_scheduler="sarathi",
        speed_factors=list(speeds),
        block_size=BLOCK_SIZE,
        num_blocks=30_208,
        watermark_blocks=302,
        batch_size_cap=BATCH_SIZE_CAP,
        max_batch_tokens=CHUNK_SIZE,
        max_request_tokens=8192,
        max_full_requests=59,
    )


def requests(seed: int, size: int, qps: float) -> Requests:
    rng = np.random.default_rng(seed)
    return Requests(
        np.cumsum(rng.exponential(1.0 / qps, size)), rng.integers(200, 2000, size), rng.integers(50, 200, size)
    )


def play(
    config: TwinConfig, given: Requests, router: Router, *, explore: float = 0.0, seed: int = 0
) -> list[LoggedDecision]:
    """Serve the requests; every decision with its probability and what came of it."""
    twin = Twin(config)
    source, rng = TwinReplicaSource(twin, num_waiting_slots=4), random.Random(seed)
    size, decided = config.num_replicas, []
    for index in range(len(given)):
        now_s, prompt = float(given.arrived_at_s[index]), int(given.prompt_tokens[index])
        info = source.request_info(prompt, now_s)
        snapshot = source.snapshot(now_s)
        choice = scored(router, snapshot, info)
        is_explored = rng.random() < explore
        action = rng.randrange(size) if is_explored else choice.replica
        share = 1.0 if action == choice.replica else 0.0
        if choice.scores is not None:
            ties = choice.scores == choice.scores[choice.replica]
            share = 1.0 / int(ties.sum()) if ties[action] else 0.0
        decided.append((snapshot, info, action, (1 - explore) * share + explore / size, is_explored))
        twin.submit(action, now_s, prompt, int(given.decode_tokens[index]))
    twin.drain()
    done = in_order(twin.completions())
    return [
        LoggedDecision(
            number=index + 1,
            snapshot=snapshot,
            request=info,
            action=action,
            probability=probability,
            is_explored=is_explored,
            is_fallback=False,
            backends=tuple(f"replica{k}" for k in range(size)),
            outcome=Outcome(
                status="ok",
                latency_s=float(done.completed_at_s[index] - done.arrived_at_s[index]),
                ttft_s=float(done.first_token_at_s[index] - done.arrived_at_s[index]),
                prompt_tokens=int(given.prompt_tokens[index]),
                output_tokens=int(given.decode_tokens[index]),
            ),
        )
        for index, (snapshot, info, action, probability, is_explored) in enumerate(decided)
    ]


def write(path: Path, decisions: Sequence[LoggedDecision]) -> Path:
    path.write_text(header_line(policy="least_tokens", explore=0.1) + "".join(map(decision_line, decisions)))
    return path


def mean_latency(decisions: Sequence[LoggedDecision]) -> float:
    return float(np.mean([decision.outcome.latency_s for decision in decisions]))
