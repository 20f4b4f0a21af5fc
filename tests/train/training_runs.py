"""Small training runs for the tests: what they share, and how their results are compared."""

from pathlib import Path
from typing import Any

from vidur_ppo_plugin import checkpoint
from vidur_ppo_plugin.train.clusters import Cluster, build_clusters
from vidur_ppo_plugin.train.config import TrainConfig, parse_config
from vidur_ppo_plugin.train.engines import Engine, InProcessEngine
from vidur_ppo_plugin.train.trainer import Trainer, TrainingResult

#: Two kinds of clusters, of different sizes and speeds; old reports and drained replicas among them.
SMALL: dict[str, Any] = {
    "seed": 3,
    "decisions": 512,
    "environments": 4,
    "clusters_in_step": 2,
    "episode_rollouts": 2,
    "mixture": [
        {"scenario": "mixed_long", "load": [0.6, 1.0]},
        {
            "scenario": "heterogeneous",
            "num_replicas": [2, 4],
            "speeds": [[1.0, 0.5], [1.0, 1.0]],
            "report_delay_s": [0.0, 1.0],
            "drained_share": 0.5,
        },
    ],
    "policy": {"rollout_len": 32, "minibatch_size": 64},
    "evaluation": {"every_decisions": 0, "scenarios": ["mixed_long"], "seeds": 1, "num_requests": 60},
}


def small(**changes: Any) -> TrainConfig:
    """The configuration with other values."""
    return parse_config({**SMALL, **changes})


def clusters_of(config: TrainConfig) -> dict[str, Cluster]:
    """What workers need to know of its scenarios."""
    return build_clusters(config.scenarios, backend=config.backend)


def train(
    config: TrainConfig, out: Path, *, engine: Engine | None = None, num_jobs: int = 1, resume: bool = False
) -> TrainingResult:
    """A training run; in this process unless an engine is given."""
    clusters = clusters_of(config)
    trainer = Trainer(config, clusters, engine or InProcessEngine(config, clusters), out, num_jobs=num_jobs)
    if resume:
        trainer.state.resume(out)
    return trainer.train()


def learned(out: Path) -> dict[str, Any]:
    """All that was learned, to be compared: network, optimiser, statistics and random states."""
    state = checkpoint.load(out / "checkpoints").state
    return {"agent": _plain(state["agent"]), "slots": _plain(state["train"]["slots"])}


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
