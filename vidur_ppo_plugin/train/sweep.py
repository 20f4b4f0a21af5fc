"""Sweeps over seeds and hyper-parameters: each combination is a training run of its own, as a trial of Ray Tune.

    sweep:
      seed: [1, 2, 3]
      policy.lr: [0.0003, 0.001]

means six trials. Each trains in one process, without further workers: a sweep is parallel over its trials.
"""

import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .config import TrainConfig, parse_config
from .schema import ConfigError, require

RESULTS_FILE = "sweep.json"


def combinations(config: TrainConfig) -> dict[str, TrainConfig]:
    """Every trial by its name; ConfigError if a value is not right, before anything starts."""
    for key, values in config.sweep.items():
        require(isinstance(values, list) and len(values) > 0, f"sweep.{key}", "a list of values", values)
    trials = {}
    for values in itertools.product(*config.sweep.values()):
        chosen = dict(zip(config.sweep, values, strict=True))
        name = ",".join(f"{key}={value}" for key, value in chosen.items())
        try:
            trials[name] = _changed(config, chosen)
        except ValueError as error:
            raise ConfigError(f"sweep ({name}): {error}") from None
    return trials


def _changed(config: TrainConfig, chosen: Mapping[str, Any]) -> TrainConfig:
    """The configuration with other values; a key may reach into a section: `policy.lr`."""
    data = {key: _lists(value) for key, value in asdict(config).items() if key != "sweep"}
    for key, value in chosen.items():
        section, dot, name = key.partition(".")
        if dot:
            if not isinstance(data.get(section), dict):
                raise ConfigError(f"unknown key {key!r}: {section} is no section of the configuration")
            data[section] = {**data[section], name: value}
        else:
            data[key] = value
    return parse_config(data)


def _lists(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_lists(item) for item in value]
    return {key: _lists(item) for key, item in value.items()} if isinstance(value, dict) else value


def run_sweep(config: TrainConfig, out: Path, *, address: str) -> int:
    """Train every combination on a Ray cluster; the exit status: 1 if a trial failed."""
    import ray
    from ray import tune

    from .ray_engine import connect

    trials = combinations(config)
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if not ray.is_initialized():
        connect(address)
    tuner = tune.Tuner(
        tune.with_resources(_train_trial, {"cpu": 1}),
        param_space={"name": tune.grid_search(list(trials)), "config": config, "out": str(out)},
        tune_config=tune.TuneConfig(metric="score", mode="min", trial_dirname_creator=lambda trial: trial.trial_id),
        # A trial whose machine is lost goes on from its checkpoint on another, if they share the directory.
        run_config=tune.RunConfig(
            name="tune", storage_path=str(out), failure_config=tune.FailureConfig(max_failures=2), verbose=1
        ),
    )
    results = list(tuner.fit())  # type: ignore[call-overload]
    rows = [result.metrics for result in results if result.error is None and result.metrics is not None]
    found = sorted(
        ({"name": row["config"]["name"], "score": row["score"], "decisions": row["decisions"]} for row in rows),
        key=lambda row: float(row["score"]),
    )
    (out / RESULTS_FILE).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for row in found:
        print(f"{row['score']:+.4f}  {row['name']}")
    for result in results:
        if result.error is not None:
            print(f"failed: {result.error}")
    return 1 if len(found) < len(trials) else 0


def _train_trial(parameters: dict[str, Any]) -> dict[str, Any]:
    """One trial, in a process of Ray Tune."""
    from vidur_ppo_plugin import checkpoint

    from .clusters import build_clusters
    from .engines import InProcessEngine
    from .state import CHECKPOINT_DIRECTORY
    from .trainer import Trainer

    config = combinations(parameters["config"])[parameters["name"]]
    out = Path(parameters["out"]) / parameters["name"]
    clusters = build_clusters(config.scenarios, backend=config.backend)
    trainer = Trainer(config, clusters, InProcessEngine(config, clusters), out, num_jobs=1)
    if checkpoint.newest(out / CHECKPOINT_DIRECTORY) is not None:
        trainer.state.resume(out)
    outcome = trainer.train()
    assert outcome.best is not None
    return {"score": outcome.best.score, "decisions": outcome.decisions}
