"""What `same_speed.py` measures, each in a process of its own: `_speed.py NAME DIRECTORY` prints seconds and work done.

Every measurement has to run in older checkouts too. So it goes by commands, flags and files, which stay, and finds
classes and functions by their names wherever a checkout keeps them.
"""

import asyncio
import importlib
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from vidur_ppo_plugin import _autoload, pretrained

PREFIX = "p_p_o_global_scheduler_modular_config_"
COMMAND = [sys.executable, "-m", "vidur_ppo_plugin.cli"]
POLICY, HEURISTIC = "pretrained", "least_tokens"
TRAINING = {
    "seed": 5,
    "decisions": 24_576,
    "environments": 16,
    "clusters_in_step": 8,
    "mixture": [{"scenario": "mixed_long", "load": [0.6, 1.0]}, {"scenario": "heterogeneous"}],
    "policy": {"rollout_len": 64, "epochs": 2, "minibatch_size": 256, "lr": 0.003},
    "evaluation": {"every_decisions": 0, "seeds": 1, "num_requests": 100},
}
#: Updates of a training that are start-up: processes begin, clusters fill.
START_UP = 4


class Sample(NamedTuple):
    """What one process measured."""

    #: By name; the shorter, the better.
    seconds: dict[str, float]
    #: Counts of what was done in that time: they must be the same in both checkouts.
    work: dict[str, int]


def package_root() -> Path:
    """The directory of the package that is measured."""
    return Path(_autoload.__file__).resolve().parent


def find(*names: str, under: str = "") -> Any:
    """The class or function of the first of these names that the package, or a folder of it, defines at top level."""
    root = package_root()
    for name in names:
        defines = re.compile(rf"^(?:class|def) {name}\b", re.MULTILINE)
        for path in sorted((root / under).rglob("*.py")):
            if defines.search(path.read_text(encoding="utf-8")):
                parts = path.relative_to(root.parent).with_suffix("").parts
                return getattr(importlib.import_module(".".join(parts)), name)
    raise LookupError(f"{root / under} defines none of {', '.join(names)}: benchmarks/_speed.py needs its new name")


def run(command: list[str]) -> float:
    """Seconds of a command that must succeed."""
    started_s = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    elapsed_s = time.perf_counter() - started_s
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} exits with status {done.returncode}:\n{done.stderr[-2000:]}")
    return elapsed_s


def fastest(act: Callable[[], Any], parts: int = 10) -> float:
    """Seconds of the fastest of so many calls, because other work on the machine only ever adds time."""
    elapsed_s = []
    for _ in range(parts):
        started_s = time.perf_counter()
        act()
        elapsed_s.append(time.perf_counter() - started_s)
    return min(elapsed_s)


# --- Decisions ---


def situations(num_replicas: int, count: int = 32) -> list[tuple[Any, Any]]:
    """Snapshots of a loaded cluster, the same in every checkout, and a request for each."""
    import numpy as np

    rows, new_snapshot, new_request = _rows(), find("ClusterSnapshot"), find("RequestInfo")
    rng = np.random.default_rng(7)
    found = []
    for number in range(count):
        running = rng.integers(1, 24, num_replicas).astype(float)
        waiting = rng.integers(0, 6, num_replicas).astype(float)
        figures = {
            "outstanding_requests": running + waiting,
            "running_requests": running,
            "prefill_tokens": rng.integers(0, 20_000, num_replicas).astype(float),
            "context_tokens": 900.0 * running,
            "kv_blocks_used": 60.0 * running,
            "kv_blocks_total": np.full(num_replicas, 4000.0),
            "oldest_wait_s": rng.random(num_replicas) * (waiting > 0),
            "decoded_tokens": 40.0 * running,
            "recent_latency_s": 2.0 + rng.random(num_replicas),
            "completion_rate_per_s": 1.0 + rng.random(num_replicas),
            "token_time_s": 0.02 + 0.01 * rng.random(num_replicas),
            "typical_prompt_tokens": rng.integers(500, 8000, num_replicas).astype(float),
            "speed_factor": np.ones(num_replicas),
        }
        values = np.stack([figures.get(name, np.zeros(num_replicas)) for name in rows])
        slots = np.concatenate(
            (rng.integers(100, 4000, (4, num_replicas)), rng.random((4, num_replicas)))
        )  # four waiting requests of each: their tokens, then their ages
        snapshot = new_snapshot(float(number), values, kv_block_size=16, expected_decode_tokens=200.0, waiting=slots)
        request = new_request(int(rng.integers(100, 8000)), float(number), 0.1, 10.0)
        found.append((snapshot, request))
    return found


def _rows() -> list[str]:
    """The names of the rows of a snapshot's matrix, in their order."""
    module = importlib.import_module(find("ClusterSnapshot").__module__)
    return list(module.ROWS)


def decisions(directory: Path) -> Sample:
    """Placing requests on given snapshots, as the web router asks for it."""
    build_policy = find("build_policy", under="serve")
    seconds, work = {}, {}
    for num_replicas, repeats in ((4, 200), (64, 60), (1024, 6)):
        cases = situations(num_replicas)
        for name in (POLICY, HEURISTIC):
            router = build_policy(name, seed=1)
            _place_all(router, cases, 1)
            label = f"decision of {name}, {num_replicas} replicas"
            seconds[label] = fastest(lambda router=router, cases=cases, n=repeats: _place_all(router, cases, n))
            work[label] = repeats * len(cases)
            seconds[label] /= work[label]
    return Sample(seconds, work)


def _place_all(router: Any, cases: list[tuple[Any, Any]], repeats: int) -> None:
    for _ in range(repeats):
        for snapshot, request in cases:
            router(snapshot, request)


# --- Vidur ---


def simulations(directory: Path) -> Sample:
    """Runs in Vidur, without imports and reports: round_robin, the shipped policy, and learning from nothing.

    Each places as it decides, so that learning may lead to somewhat other events where the learner was changed.
    """
    _autoload.install()
    import vidur.main  # noqa: F401  (imports do not count)

    kinds = {
        "round_robin": ["--global_scheduler_config_type", "round_robin"],
        "inference": [f"--{PREFIX}load_checkpoint", POLICY, f"--{PREFIX}inference_only"],
        "learning": [],
    }
    seconds, work = {}, {}
    for kind, flags in kinds.items():
        label = f"simulation, {kind}"
        _simulate(flags, 150, directory / f"warm-up {kind}")
        seconds[label], work[f"{label}: completed"] = _simulate(flags, 1500, directory / kind)
        metrics = directory / kind / "ppo_metrics.csv"
        num_updates = len(metrics.read_text().splitlines()) - 1 if metrics.is_file() else 0
        if (num_updates > 0) != (kind == "learning"):
            raise RuntimeError(f"{kind} made {num_updates} updates")
        work[f"{label}: updates"] = num_updates
    return Sample(seconds, work)


def _simulate(flags: list[str], num_requests: int, directory: Path) -> tuple[float, int]:
    """Seconds of a simulation, and the number of requests that were completed."""
    from vidur.config import SimulationConfig
    from vidur.simulator import Simulator
    from vidur.utils.random import set_seeds

    given = {
        **yaml.safe_load((package_root().parent / "configs" / "learning.yaml").read_text()),
        "synthetic_request_generator_config_num_requests": num_requests,
        "metrics_config_output_dir": str(directory / "vidur"),
        "roofline_execution_time_predictor_config_cache_dir": str(directory.parent / "cache"),
        f"{PREFIX}metrics_dir": str(directory),
    }
    arguments = []
    for name, value in given.items():
        arguments += [f"--{'' if value else 'no-'}{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
    sys.argv = ["vidur.main", *arguments, *flags]
    started_s = time.perf_counter()
    config = SimulationConfig.create_from_cli_args()
    set_seeds(config.seed)
    simulator = Simulator(config)
    requests = [event._request for _, event in simulator._event_queue]
    simulator.run()
    return time.perf_counter() - started_s, sum(request._completed for request in requests)


# --- The twin ---


def twin(directory: Path) -> Sample:
    """Requests through routers in the twin one by one, and decisions of the shipped policy in the compiled pass."""
    import numpy as np

    scenario = find("find_scenario")("mixed_long").at(num_requests=3000)
    cluster = find("build_clusters", under="train")([scenario.name])[scenario.name]
    requests, play, build_policy = scenario.requests(1), find("play", under="twin"), find("build_policy", under="serve")
    seconds, work = {}, {}
    for name in (POLICY, HEURISTIC):

        def serve(count: int, name: str = name) -> None:
            router = build_policy(name, seed=1)
            few = scenario.at(num_requests=count).requests(1) if count < len(requests) else requests
            play(cluster.twin, few, router, num_waiting_slots=4)

        serve(100)
        label = f"twin, {name}"
        seconds[label], work[label] = fastest(lambda serve=serve: serve(len(requests))), len(requests)

    # Where the policy lives in a checkout: as a router from a file, with its prior and its actor.
    load = find("ExportedPolicy", "Policy", under="policy").load
    given = {"rng": random.Random(0), "delay_model": cluster.delay_model, "tail_preference": 0.8}
    policy = load(pretrained.find(POLICY).policy, **given)
    prior, actor = (getattr(policy, name, None) or getattr(policy, f"_{name}") for name in ("prior", "actor"))
    workloads = [scenario.requests(seed) for seed in range(4)]
    uniforms = np.random.default_rng(0).random((len(workloads), scenario.num_requests, 2))

    def act() -> int:
        acting = find("ActingTwin", "PolicyTwin")(cluster.twin, workloads, prior=prior, features=policy.features)
        played = acting.play(actor, scenario.num_requests, temperature=1.0, uniforms=uniforms, with_credit=True)
        return int((played.actions >= 0).sum())

    work["twin, compiled pass"] = act()
    seconds["twin, compiled pass"] = fastest(act, 3)
    return Sample(seconds, work)


def training(directory: Path, workers: int) -> Sample:
    """`vidur-ppo train`: all of the command, and the seconds of its updates once it runs."""
    import pandas as pd

    path, out = directory / "train.yaml", directory / "out"
    path.write_text(yaml.safe_dump(TRAINING))
    wall_s = run([*COMMAND, "train", str(path), "--out", str(out), "--workers", str(workers)])
    rows = pd.read_csv(out / "ppo_metrics.csv")
    rates = rows["decisions_per_s"].iloc[START_UP:].dropna()
    per_decision_s = float((1.0 / rates).median())
    name = f"training, workers {workers}"
    return Sample({f"{name}: a decision": per_decision_s, f"{name}: all": wall_s}, {name: len(rows)})


def comparison(directory: Path) -> Sample:
    """`vidur-ppo compare` in the twin, on one scenario."""
    out = directory / "results"
    schedulers = f"round_robin,{HEURISTIC},ppo_modular:{POLICY}"
    options = ["--quick", "--engine", "twin", "--jobs", "1", "--scenarios", "mixed_long", "--schedulers", schedulers]
    wall_s = run([*COMMAND, "compare", *options, "--reference", "round_robin", "--out", str(out)])
    return Sample({"compare, one scenario": wall_s}, {"tables": len(list(out.rglob("*.parquet")))})


# --- Commands ---


def start_up(directory: Path) -> Sample:
    """Starting the interpreter with our start-up file, and what prints help."""
    commands = {
        "start of Python": ([sys.executable, "-c", "pass"], 40),
        "vidur-ppo --help": ([*COMMAND, "--help"], 8),
        "vidur.main --help": ([sys.executable, "-m", "vidur.main", "--help"], 2),
    }
    seconds = {name: fastest(lambda command=command: run(command), n) for name, (command, n) in commands.items()}
    return Sample(seconds, {})


def python_start(directory: Path) -> Sample:
    """Starting the interpreter with our start-up file, and nothing else."""
    return Sample({"start of Python": fastest(lambda: run([sys.executable, "-c", "pass"]), 5)}, {})


def first_run(directory: Path) -> Sample:
    """`vidur-ppo run` where nothing is compiled yet (`same_speed.py` sees to that), with fewer requests than usual."""
    requests = ["--synthetic_request_generator_config_num_requests", "200"]
    output = ["--metrics_config_output_dir", str(directory / "vidur")]
    return Sample({"first vidur-ppo run": run([*COMMAND, "run", *requests, *output])}, {})


def serving(directory: Path) -> Sample:
    """Small completions through `vidur-ppo serve`, eight at a time, to a backend that answers at once."""
    from router_latency import OURS, connected, free_port, router_command, running

    async def ask(port: int, num_each: int) -> float:
        clients = [await connected(port) for _ in range(8)]

        async def keep_asking(client: Any) -> None:
            for _ in range(num_each):
                await client.request()

        started_s = time.perf_counter()
        await asyncio.gather(*(keep_asking(client) for client in clients))
        elapsed_s = time.perf_counter() - started_s
        for client in clients:
            client.close()
        return elapsed_s

    backend, port, log = free_port(), free_port(), directory / "log.txt"
    seconds = {}
    with running([sys.executable, str(Path(__file__).with_name("_instant_backend.py")), str(backend)], backend, log):
        for policy in (POLICY, HEURISTIC):
            command = router_command(OURS, port, [f"http://127.0.0.1:{backend}"], policy, None)
            with running(command, port, directory / "router.txt"):
                asyncio.run(ask(port, 50))
                seconds[f"serve, {policy}"] = fastest(lambda: asyncio.run(ask(port, 150)), 3)
    return Sample(seconds, {})


MEASUREMENTS: dict[str, Callable[[Path], Sample]] = {
    "python-start": python_start,
    "start-up": start_up,
    "decisions": decisions,
    "simulations": simulations,
    "twin": twin,
    "training-1": lambda directory: training(directory, 1),
    "training-2": lambda directory: training(directory, 2),
    "comparison": comparison,
    "serving": serving,
    "first-run": first_run,
}


def main() -> None:
    """Measure one thing, and print it with the package that it was measured on."""
    name, directory = sys.argv[1], Path(sys.argv[2])
    sample = MEASUREMENTS[name](directory)
    print(json.dumps({**sample._asdict(), "package": str(package_root())}))


if __name__ == "__main__":
    main()
