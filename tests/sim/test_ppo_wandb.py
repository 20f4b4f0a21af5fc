"""Vidur opens a W&B run; ours and Vidur's metrics share it, in a real run in offline mode."""

import os
from pathlib import Path
from typing import Any

from simulation import arguments, vidur_main
from wandb_log import history, records


def logged(tmp_path: Path, scheduler: str) -> list[dict[str, Any]]:
    flags = {
        "global_scheduler_config_type": scheduler,
        "metrics_config_wandb_project": "test",
        "metrics_config_wandb_group": "group",
    }
    if scheduler == "ppo_modular":
        flags["p_p_o_global_scheduler_modular_config_rollout_len"] = 32
    directory = tmp_path / scheduler
    directory.mkdir()
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(directory), "WANDB_SILENT": "true"}
    done = vidur_main(arguments(directory / "output", **flags), env=environment, cwd=directory)
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = directory.glob("wandb/offline-run-*/*.wandb")
    return history(records(file))


def test_both_share_one_run(tmp_path: Path) -> None:
    ours, stock = logged(tmp_path, "ppo_modular"), logged(tmp_path, "round_robin")
    updates = [row["ppo/update"] for row in ours if "ppo/update" in row]
    assert updates == [1, 2, 3]
    entropies = [value for row in ours for key, value in row.items() if key.endswith("/entropy")]
    assert len(entropies) == 3

    def keys_of_vidur(rows: list[dict[str, Any]]) -> set[str]:
        return {key for row in rows for key in row if not key.startswith(("_", "ppo"))}

    assert len(keys_of_vidur(stock)) > 100
    assert keys_of_vidur(ours) == keys_of_vidur(stock)
