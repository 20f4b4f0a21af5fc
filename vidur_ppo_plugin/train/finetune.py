"""`vidur-ppo train CONFIG.yaml --finetune RECORD`: conservative fine-tuning of a checkpoint on real decisions."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from vidur_ppo_plugin import checkpoint
from vidur_ppo_plugin.hardware.reference import CHUNK_SIZE, reference_roofline
from vidur_ppo_plugin.learn.finetune import FinetuneParameters, FinetuneResult, finetune
from vidur_ppo_plugin.learn.off_policy import with_costs
from vidur_ppo_plugin.learn.policy_checkpoint import is_policy_only
from vidur_ppo_plugin.policy.network import ActorCritic, NetworkShape
from vidur_ppo_plugin.record.decision_log import RecordError, read_record
from vidur_ppo_plugin.routing.delay_model import DelayModel
from vidur_ppo_plugin.routing.features import FeatureTable
from vidur_ppo_plugin.routing.prior import Prior

from .config import TrainConfig, load_config
from .schema import ConfigError
from .state import CHECKPOINT_DIRECTORY

#: Exit status where the new policy was not accepted.
NOT_ACCEPTED = 1
REPORT_FILE = "finetune.json"
# Updates of PPO, each with the divergence `target_kl`, that fine-tuning may be worth at most.
_WORTH_UPDATES = 10


def finetune_command(
    path: Path, record: Path, *, out: Path, overrides: dict[str, Any] | None = None, cost: str = "latency_s"
) -> int:
    """Fine-tune the checkpoint that the configuration starts from; the exit status. ValueError says what is wrong."""
    config = load_config(path, overrides)
    if not config.start_from:
        raise ConfigError(f"--finetune needs a policy to begin with: {path} must have start_from: CHECKPOINT")
    if checkpoint.newest(out / CHECKPOINT_DIRECTORY) is not None:
        raise ConfigError(f"--out {out}: has checkpoints of another run; name another directory")
    loaded = checkpoint.load(config.start_from)
    network, features, prior = _policy(loaded, config)
    decisions = read_record(record)
    try:
        logged = with_costs(decisions, cost)
        result = finetune(network, features, prior, logged, _parameters(config))
    except ValueError as error:
        raise RecordError(f"--finetune {record}: {error}") from error
    out.mkdir(parents=True, exist_ok=True)
    (out / REPORT_FILE).write_text(json.dumps(dataclasses.asdict(result), indent=2) + "\n")
    print(_summary(result, out))
    if not result.is_accepted:
        return NOT_ACCEPTED
    _holder(loaded)["network"] = network.state_dict()
    facts = {"finetuned": {"record": record.name, **dataclasses.asdict(result)}}
    checkpoint.save(out / CHECKPOINT_DIRECTORY, checkpoint.LAST, loaded.state, metadata={**loaded.metadata, **facts})
    return 0


def _policy(loaded: checkpoint.Checkpoint, config: TrainConfig) -> tuple[ActorCritic, FeatureTable, Prior]:
    """The checkpoint's network, and what it sees."""
    metadata = loaded.metadata
    try:
        network = ActorCritic(NetworkShape(**metadata["network"]))
        network.load_state_dict(_holder(loaded)["network"])
        features = FeatureTable.of(metadata["features"], config.flags.tail_preference)
        delay_model = DelayModel.from_roofline(reference_roofline(), CHUNK_SIZE)
        prior = Prior(metadata["prior"], weight=metadata["prior_weight"], delay_model=delay_model)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"start_from: {loaded.path} is no checkpoint of a policy: {error!r}") from error
    if features.hash != metadata["feature_hash"]:
        raise ConfigError(f"start_from: {loaded.path} was learned with other features than this version computes")
    return network, features, prior


def _holder(loaded: checkpoint.Checkpoint) -> dict[str, Any]:
    """Where a checkpoint has its network: in the learner of a run, or by itself if it is a policy and nothing else."""
    holder: dict[str, Any] = loaded.state if is_policy_only(loaded) else loaded.state["agent"]["ppo"]
    return holder


def _parameters(config: TrainConfig) -> FinetuneParameters:
    flags = config.flags
    return FinetuneParameters(
        lr=flags.lr,
        epochs=flags.epochs,
        minibatch_size=flags.minibatch_size,
        kl_coef=flags.kl_coef,
        most_kl=_WORTH_UPDATES * flags.target_kl,
        max_grad_norm=flags.max_grad_norm,
        seed=config.seed,
    )


def _summary(result: FinetuneResult, out: Path) -> str:
    share = 100.0 / result.old_cost
    verdict = "accepted" if result.is_accepted else "not accepted, nothing but the report was written"
    lines = [
        f"Learned from {result.num_learned:,} recorded decisions, judged on {result.num_held_out:,} others; {verdict}: "
        f"{result.why}",
        f"Mean cost there: recorded {result.recorded_cost:.4f} s, policy before {result.old_cost:.4f}, after "
        f"{result.new_cost:.4f} ({share * result.difference:+.1f} %, 99 % interval {share * result.low:+.1f} to "
        f"{share * result.high:+.1f})",
        f"Divergence {result.kl:.3f}, {100 * result.agreement:.1f} % of decisions as before",
    ]
    if result.is_accepted:
        lines.append(f"To serve it: vidur-ppo export {out / CHECKPOINT_DIRECTORY} policy.npz")
    return "\n".join(lines)
