"""The documented example: Stable-Baselines3 learns on the environment in a few lines."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

DOCUMENT = Path(__file__).parents[2] / "docs" / "environment.md"


def example() -> str:
    match = re.search(r"<!-- test: sb3 -->\n```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert match is not None
    return match[1]


def mean_latency_s(env: Any, choose: Any) -> float:
    means = []
    for seed in (2000, 2001, 2002):
        observation, _ = env.reset(seed=seed)
        is_over = False
        while not is_over:
            observation, _, is_over, _, info = env.step(choose(observation))
        means.append(info["summary"]["e2e_mean"])
    return float(np.mean(means))


def test_stable_baselines3_learns_to_route(capsys: Any) -> None:
    torch.set_num_threads(1)
    names: dict[str, Any] = {}
    exec(compile(example(), str(DOCUMENT), "exec"), names)
    assert "e2e_p99" in capsys.readouterr().out
    assert names["info"]["summary"]["num_completed"] == 500
    env, model, rng = names["env"], names["model"], np.random.default_rng(1)
    learned_s = mean_latency_s(env, lambda seen: model.predict(seen, deterministic=True)[0])
    random_s = mean_latency_s(env, lambda seen: int(rng.integers(env.action_space.n)))
    assert learned_s < 0.97 * random_s
