"""`vidur-ppo pretrained`: lists the policies that come with the package, and makes one from a training run."""

import dataclasses
import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vidur_ppo_plugin import checkpoint, pretrained
from vidur_ppo_plugin.pretrained import MOST_BYTES, Pretrained

if TYPE_CHECKING:
    from vidur_ppo_plugin.train.config import TrainConfig

_MEASURED = ("e2e_mean", "e2e_p99", "ttft_mean", "ttft_p99")


class ShippingError(ValueError):
    """A policy that cannot be made; the message says why."""


def list_command() -> int:
    """Print every policy of the package; 1 if there is none."""
    names = pretrained.names()
    if not names:
        print(f"no policies in {pretrained.DIRECTORY}; make one with: vidur-ppo pretrained make CONFIG --into-package")
        return 1
    for name in names:
        print(describe(Pretrained(name, pretrained.DIRECTORY)))
    return 0


def describe(policy: Pretrained) -> str:
    """What is known of a policy, for people; its files are verified on the way."""
    metadata = policy.verify()
    trained = metadata["trained"]
    minutes = f"{trained['wall_s'] / 60:.1f} minutes"
    lines = [
        f"{policy.name}: {policy.checkpoint.stat().st_size / 1e3:.0f} kB, and {policy.policy.stat().st_size / 1e3:.0f} "
        f"kB without torch; sha256 {metadata['checkpoint_sha256'][:16]}, features {metadata['feature_hash']}",
        f"  trained on {', '.join(trained['scenarios'])}: {trained['decisions']:,} decisions, seed {trained['seed']}, "
        f"{minutes}",
        f"  by {trained['command']} (configuration {trained['config_sha256'][:16]}; "
        + ", ".join(f"{package} {version}" for package, version in metadata["versions"].items())
        + ")",
    ]
    for title, table in (("evaluated while training", metadata["evaluated"]), ("measured", metadata["measured"])):
        if table:
            lines += [f"  {title}, {table['what']}:", *_table(table["changes"])]
    return "\n".join(lines)


def _table(changes: dict[str, dict[str, float]]) -> list[str]:
    names = [name for name in _MEASURED if all(name in row for row in changes.values())]
    width = max(len(case) for case in changes)
    head = "    " + " " * width + "".join(f"{name:>11}" for name in names)
    rows = [f"    {case:<{width}}" + "".join(f"{row[name]:>+11.1%}" for name in names) for case, row in changes.items()]
    return [head, *rows]


@dataclass(frozen=True, kw_only=True)
class MakeOptions:
    """The command line of `vidur-ppo pretrained make`."""

    config: Path
    run: Path
    directory: Path
    name: str = pretrained.DEFAULT
    which: str = checkpoint.BEST
    workers: int = 0
    seed: int | None = None
    measured: Path | None = None


def make_command(options: MakeOptions) -> int:
    """Train, or take the training that is finished, and write the files of a policy; the exit status."""
    from vidur_ppo_plugin.train.command import read_outcome, train_command
    from vidur_ppo_plugin.train.config import load_config
    from vidur_ppo_plugin.train.state import CHECKPOINT_DIRECTORY

    overrides = {} if options.seed is None else {"seed": options.seed}
    config = load_config(options.config, overrides)
    checkpoints = options.run / CHECKPOINT_DIRECTORY
    outcome = read_outcome(options.run)
    if outcome is None or outcome["reason"] == "interrupted":
        has_begun = checkpoint.newest(checkpoints) is not None
        status = train_command(
            options.config, out=options.run, workers=options.workers, resume=has_begun, overrides=overrides
        )
        outcome = read_outcome(options.run)
        if status or outcome is None:
            return status
    made = make(config, checkpoints / options.which, options, outcome)
    print(describe(made))
    return 0


def make(config: "TrainConfig", source: Path, options: MakeOptions, outcome: dict[str, Any]) -> Pretrained:
    """Write checkpoint, numpy file and metadata; nothing is left that does not belong together."""
    from vidur_ppo_plugin.learn.export import export_policy
    from vidur_ppo_plugin.learn.policy_checkpoint import save_policy

    loaded = checkpoint.load(source)
    _check_same(config, loaded)
    final = Pretrained(options.name, options.directory)
    draft = Pretrained(f".{options.name}-{os.getpid()}", options.directory)
    options.directory.mkdir(parents=True, exist_ok=True)
    try:
        facts = _facts(config, loaded, options, outcome)
        # The moment of training, not of packing: packing twice gives the same bytes.
        kept = {"saved_at": loaded.metadata["saved_at"], "config": None, "evaluation": None}
        save_policy(loaded, draft.checkpoint, metadata=kept)
        export_policy(draft.checkpoint, draft.policy)
        if draft.num_bytes > MOST_BYTES:
            raise ShippingError(f"{options.name} has {draft.num_bytes:,} bytes, at most {MOST_BYTES:,} are shipped")
        facts["checkpoint_sha256"] = pretrained.sha256(draft.checkpoint)
        facts["policy_sha256"] = pretrained.sha256(draft.policy)
        if options.measured is not None:
            facts["measured"] = measured(options.measured, facts["checkpoint_sha256"])
        draft.metadata_file.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        # Metadata first: until both files are there, their hashes do not fit, and nobody uses a mixture.
        for file in ("metadata_file", "checkpoint", "policy"):
            os.replace(getattr(draft, file), getattr(final, file))
    finally:
        for path in (draft.checkpoint, draft.policy, draft.metadata_file):
            path.unlink(missing_ok=True)
    return final


def _check_same(config: "TrainConfig", loaded: checkpoint.Checkpoint) -> None:
    from vidur_ppo_plugin.train.state import fixed_values

    found, wanted = loaded.metadata.get("config"), fixed_values(config)
    if found is None:
        raise ShippingError(f"{loaded.path} is not of a training run (`vidur-ppo train`)")
    different = [key for key in wanted if found.get(key) != wanted[key]]
    if different:
        raise ShippingError(
            f"{loaded.path} was trained with another configuration (different: {', '.join(different)}); "
            f"give another --run"
        )


def _facts(
    config: "TrainConfig", loaded: checkpoint.Checkpoint, options: MakeOptions, outcome: dict[str, Any]
) -> dict[str, Any]:
    metadata = loaded.metadata
    values = json.dumps(dataclasses.asdict(config), sort_keys=True)
    seed = "" if options.seed is None else f" --seed {options.seed}"
    which = "" if options.which == checkpoint.BEST else f" --checkpoint {options.which}"
    evaluated = metadata.get("evaluation")
    return {
        "name": options.name,
        "feature_hash": metadata["feature_hash"],
        "network": metadata["network"],
        "prior": metadata["prior"],
        "prior_weight": metadata["prior_weight"],
        "versions": metadata["versions"],
        "trained": {
            "command": f"vidur-ppo pretrained make {_in_checkout(options.config)}{seed}{which} --into-package",
            "config_sha256": hashlib.sha256(values.encode()).hexdigest(),
            "seed": config.seed,
            "decisions": metadata["num_decisions"],
            "updates": metadata["num_updates"],
            "wall_s": outcome["wall_s"],
            "scenarios": list(dict.fromkeys(part.scenario for part in config.mixture)),
            "saved_at": metadata["saved_at"],
        },
        "evaluated": {}
        if not evaluated
        else {
            "what": f"against the best of {', '.join(config.evaluation.baselines)}, {config.evaluation.seeds} seeds",
            "changes": evaluated["changes"],
        },
        "measured": {},
    }


def _in_checkout(config: Path) -> str:
    """The path as a reader of the repository would write it; a name where it lies elsewhere."""
    root = Path(__file__).resolve().parents[1]
    resolved = config.resolve()
    return str(resolved.relative_to(root)) if resolved.is_relative_to(root) else config.name


def measured(results: Path, checkpoint_sha256: str) -> dict[str, Any]:
    """Changes by `vidur-ppo compare`, of the schedulers that are this very policy, in each scenario."""
    from vidur_ppo_plugin.compare.results import Results
    from vidur_ppo_plugin.compare.statistics import compare_cells

    found = Results(results)
    schedulers = found.metadata["schedulers"]
    ours = [name for name, facts in schedulers.items() if checkpoint_sha256.startswith(facts.get("digest") or "-")]
    if not ours:
        raise ShippingError(
            f"--measured {results}: none of its schedulers is this policy ({checkpoint_sha256[:16]}): "
            f"{', '.join(schedulers)}"
        )
    reference = found.metadata["reference"]
    changes: dict[str, dict[str, float]] = {}
    for row in compare_cells(found.cells, reference).itertuples():
        if row.scheduler in ours and row.metric in _MEASURED and not math.isnan(row.change):
            preference = schedulers[row.scheduler]["options"].get("tail_preference")
            case = row.scenario if preference is None else f"{row.scenario}@{preference:g}"
            changes.setdefault(case, {})[row.metric] = float(row.change)
    seeds = found.metadata["seeds"]
    return {
        "what": f"against {reference} on {len(seeds)} held-out seeds ({seeds[0]} to {seeds[-1]})",
        "changes": changes,
    }
