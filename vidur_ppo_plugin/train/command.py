"""`vidur-ppo train`: checks everything, then trains; what it writes is in one directory."""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from vidur_ppo_plugin import checkpoint

from .clusters import Cluster, build_clusters
from .config import TrainConfig, load_config
from .engines import Engine, LocalEngine
from .schema import ConfigError
from .state import CHECKPOINT_DIRECTORY
from .sweep import combinations, run_sweep
from .trainer import Trainer, TrainingResult

#: Exit status of a run that Ctrl-C ended, as shells have it.
INTERRUPTED = 130
ENGINES = ("local", "ray")
LOG_FILE = "train.log"
OUTCOME_FILE = "outcome.json"

logger = logging.getLogger("vidur_ppo_plugin")


def train_command(
    path: Path,
    *,
    out: Path,
    workers: int = 0,
    engine: str = "local",
    address: str = "",
    resume: bool = False,
    overrides: dict[str, Any] | None = None,
) -> int:
    """Train as a configuration file says; the exit status. ValueError says what is wrong, before anything starts."""
    config = load_config(path, overrides)
    workers = workers or max(1, os.cpu_count() or 1)
    _check_options(config, out, workers=workers, engine=engine, address=address, resume=resume)
    if config.sweep:
        return run_sweep(config, out, address=address)
    _log_to(out)
    clusters = build_clusters(config.scenarios, backend=config.backend)
    started = open_engine(config, clusters, workers=workers, engine=engine, address=address)
    try:
        trainer = Trainer(config, clusters, started, out, num_jobs=workers)
        if resume:
            trainer.state.resume(out)
        elif config.start_from:
            trainer.state.start_from(config.start_from)
        outcome = trainer.train()
    finally:
        started.close()
    write_outcome(outcome, out)
    print(summary(outcome, out))
    return INTERRUPTED if outcome.reason == "interrupted" else 0


def open_engine(
    config: TrainConfig, clusters: dict[str, Cluster], *, workers: int, engine: str = "local", address: str = ""
) -> Engine:
    """Start the workers."""
    if engine == "local":
        return LocalEngine(config, clusters, workers=workers)
    from .ray_engine import RayEngine  # imports Ray

    return RayEngine(config, clusters, workers=workers, address=address)


def write_outcome(outcome: TrainingResult, out: Path) -> None:
    """Write how the run ended, and its wall-clock seconds with the earlier parts, for whoever uses the run later."""
    before = read_outcome(out)
    values = {
        "reason": outcome.reason,
        "decisions": outcome.decisions,
        "updates": outcome.updates,
        "wall_s": outcome.wall_s + (0.0 if before is None else before["wall_s"]),
    }
    (out / OUTCOME_FILE).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def read_outcome(out: Path) -> dict[str, Any] | None:
    """What `write_outcome` wrote; None for a run that has not ended yet."""
    path = out / OUTCOME_FILE
    if not path.is_file():
        return None
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON: {error}") from error
    return values


def summary(outcome: TrainingResult, out: Path) -> str:
    """The result of a run in words."""
    speed = outcome.decisions / max(outcome.wall_s, 1e-9)
    lines = [
        f"Trained on {outcome.decisions:,} decisions in {outcome.updates} updates; ended by: {outcome.reason} "
        f"({outcome.wall_s:.0f} s, {speed:,.0f} decisions/s)",
    ]
    if outcome.best is not None:
        lines.append(f"Best {outcome.best}")
    lines += [
        f"Metrics and checkpoints: {out}",
        "To use it: vidur-ppo run --global_scheduler_config_type ppo_modular "
        "--p_p_o_global_scheduler_modular_config_inference_only "
        f"--p_p_o_global_scheduler_modular_config_load_checkpoint {out / CHECKPOINT_DIRECTORY / _name(outcome)}",
    ]
    return "\n".join(lines)


def _name(outcome: TrainingResult) -> str:
    return checkpoint.LAST if outcome.best is None else checkpoint.BEST


def _check_options(config: TrainConfig, out: Path, *, workers: int, engine: str, address: str, resume: bool) -> None:
    if workers < 1:
        raise ConfigError(f"--workers must be >= 1, or 0 for one a core, got {workers}")
    if engine not in ENGINES:
        raise ConfigError(f"--engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    if address and engine != "ray":
        raise ConfigError(f"--address needs --engine ray, got {address!r} with --engine {engine}")
    if config.sweep and engine != "ray":
        raise ConfigError(f"sweep needs --engine ray, got --engine {engine}")
    if config.sweep:
        combinations(config)
    if engine == "ray":
        _require_ray()
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out must be a directory, got the file {out}")
    found = checkpoint.newest(out / CHECKPOINT_DIRECTORY)
    if resume and found is None:
        raise ConfigError(f"--resume: there is no checkpoint in {out / CHECKPOINT_DIRECTORY}; leave the flag out")
    if found is not None and not resume:
        raise ConfigError(f"--out {out}: has checkpoints of another run; give --resume, or another directory")
    if config.start_from:
        try:
            checkpoint.verify(config.start_from)
        except checkpoint.CheckpointError as error:
            raise ConfigError(f"start_from: {error}") from None
    warm_start_file = config.flags.warm_start_file
    if warm_start_file and not Path(warm_start_file).is_file():
        raise ConfigError(f"policy.warm_start_file must be a file, got {warm_start_file!r}")


def _require_ray() -> None:
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"--engine ray needs Ray: pip install 'vidur-ppo-plugin[ray]' ({error})") from error


def _log_to(out: Path) -> None:
    """Send the log to standard error and into the run's directory."""
    out.mkdir(parents=True, exist_ok=True)
    form = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr), logging.FileHandler(out / LOG_FILE)]
    for handler in handlers:
        handler.setFormatter(form)
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
