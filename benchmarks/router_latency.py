"""What a router in between costs: ours, vllm-router and sglang-router, against the same backends, by the same client.

    python -m venv routers && routers/bin/pip install vllm-router==0.1.16 sglang-router==0.3.2
    python benchmarks/router_latency.py --routers routers/bin [--json] [--quick] [--policy least_tokens] [--rounds 15]

Two backends that answer at once, each router in a process of its own, all on loopback, all routers up all the time.

- added_p50_ms: small completions one at a time over one kept connection, directly and through each router in turn, in
  short blocks; the median through the router minus the median of direct requests. over_vllm_router and
  over_sglang_router: our added latency as a multiple of theirs.
- requests_per_s: 32 connections, each sending its next request when it has its answer; client, router and backends
  share the machine.
- decision_us: median of 3,000 decisions with 16 backends and 200 requests in flight: the slower of least_tokens and a
  learned policy of the default size.

Limits: 1.5 ms added, 1,000 requests/s, 150 us. Exit status 1 if one is missed. Without --routers the ratios are null.
"""

import argparse
import asyncio
import contextlib
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop
from _reporting import new_parser, parse_options, positive, report

LIMITS = {"added_p50_ms": 1.5, "requests_per_s": 1000.0, "decision_us": 150.0}
OURS, DIRECT = "vidur-ppo", "direct"
PEERS = ("vllm-router", "sglang-router")
BODY = json.dumps({"model": "instant", "prompt": "What is a router for?", "max_tokens": 8}).encode()
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    % len(BODY)
) + BODY
CONNECTIONS = 32


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


# --- Processes ---


@contextlib.contextmanager
def running(command: list[str], port: int, log: Path) -> Iterator[int]:
    """A server, until the end; its port."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{' '.join(command)} did not start: {log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


def router_command(name: str, port: int, backends: list[str], policy: str, routers: Path | None) -> list[str]:
    """How each router is started."""
    if name == OURS:
        urls = [word for url in backends for word in ("--backend", url)]
        return [
            *(sys.executable, "-m", "vidur_ppo_plugin.cli", "serve", *urls, "--port", str(port)),
            *("--policy", policy, "--log-level", "warning"),
        ]
    assert routers is not None
    own = ["--prometheus-port", str(free_port()), "--log-level", "error"]
    launch = [str(routers / name), *(["launch"] if name == "sglang-router" else [])]
    return [
        *(*launch, "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin", *own),
        *("--worker-urls", *backends),
    ]


# --- Clients ---


class Client(asyncio.Protocol):
    """One connection; reads answers by their length and does nothing else."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._data = b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._data[:end].lower()
        if b"content-length: " in head:
            is_whole = len(self._data) >= end + 4 + int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
        else:  # chunked
            is_whole = self._data.endswith(b"0\r\n\r\n")
        if is_whole:
            if not self._data.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"a request failed: {self._data[:300]!r}")
            self._data = b""
            self._answered.set_result(None)

    async def request(self) -> float:
        """Send the request; seconds until the answer is whole."""
        self._answered = asyncio.get_running_loop().create_future()
        begun = time.perf_counter()
        self._transport.write(REQUEST)  # type: ignore[attr-defined]
        await self._answered
        return time.perf_counter() - begun

    def close(self) -> None:
        """Hang up."""
        self._transport.close()


async def connected(port: int) -> Client:
    """A connection."""
    _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
    return client


async def latencies_ms(ports: dict[str, int], rounds: int, block: int = 100) -> dict[str, float]:
    """Median latency of each target; blocks in turn, so that all meet the same disturbances."""
    seen: dict[str, list[float]] = {name: [] for name in ports}
    clients = {name: await connected(port) for name, port in ports.items()}
    for client in clients.values():
        for _ in range(200):
            await client.request()
    names = list(ports)
    for _ in range(rounds):
        random.shuffle(names)
        for name in names:
            seen[name] += [1e3 * await clients[name].request() for _ in range(block)]
    for client in clients.values():
        client.close()
    return {name: statistics.median(values) for name, values in seen.items()}


async def requests_per_s(port: int, seconds: float) -> float:
    """How many small requests go through."""
    clients = [await connected(port) for _ in range(CONNECTIONS)]
    deadline = time.perf_counter() + seconds
    count = 0

    async def keep_asking(client: Client) -> None:
        nonlocal count
        while time.perf_counter() < deadline:
            await client.request()
            count += 1

    begun = time.perf_counter()
    await asyncio.gather(*(keep_asking(client) for client in clients))
    for client in clients:
        client.close()
    return count / (time.perf_counter() - begun)


# --- Decisions ---


def decision_us(policy: str, size: int, num_backends: int = 16) -> float:
    """Median time of a decision as the router makes it."""
    from vidur_ppo_plugin.routing.snapshot import RequestInfo
    from vidur_ppo_plugin.serve.decider import Decider, NamedPolicy
    from vidur_ppo_plugin.serve.fleet import Fleet
    from vidur_ppo_plugin.serve.instruments import Instruments
    from vidur_ppo_plugin.serve.source import VllmReplicaSource

    named = NamedPolicy("policy", policy, seed=1)
    fleet = Fleet(VllmReplicaSource(num_waiting_slots=named.num_waiting_slots), max_in_flight=512, breaker_failures=3)
    for index in range(num_backends):
        fleet.set_up(fleet.add(f"http://backend{index}:8000"))
    rng = random.Random(1)
    for _ in range(200):
        flight = fleet.source.on_dispatch(
            rng.choice(fleet.backends).replica, rng.randrange(10, 4000), 0.0, is_hidden=False
        )
        if rng.random() < 0.7:
            fleet.source.on_tokens(flight, rng.randrange(1, 200), 0.1)
    decider = Decider(
        fleet,
        Instruments(),
        policy=named,
        fallback=NamedPolicy("fallback", "least_tokens", seed=1),
        shadow=None,
        explore=0.0,
        rng=rng,
    )
    times = []
    for index in range(size):
        info = RequestInfo(rng.randrange(10, 4000), 1.0 + index * 0.01, 0.01, 100.0)
        begun = time.perf_counter()
        decider.decide(info, info.arrived_at_s)
        times.append(time.perf_counter() - begun)
    if decider.num_fallbacks:
        raise SystemExit(f"{policy} could not decide")
    return 1e6 * statistics.median(times)


def learned_policy(directory: Path) -> str:
    """A policy of the default size, untrained: what it has learned does not change how long it takes."""
    from vidur_ppo_plugin.flags import PPOModularFlags
    from vidur_ppo_plugin.learn.features import build_features
    from vidur_ppo_plugin.policy.actor import Actor
    from vidur_ppo_plugin.policy.network import ActorCritic, NetworkShape

    flags = PPOModularFlags()
    table = build_features(flags)
    shape = NetworkShape(
        num_replica_features=table.num_replica_features,
        num_request_features=table.num_request_features,
        feature_projection_dim=flags.feature_projection_dim,
        hidden_size=flags.hidden_size,
        critic_gru_layers=0,
        attention_heads=0,
        decoupled=True,
        flat_replicas=0,
    )
    facts = {"feature_hash": table.hash, "features": table.definition, "prior": "least_tokens", "prior_weight": 1.0}
    Actor.from_network(ActorCritic(shape, 1)).save(directory / "policy.npz", facts)
    return str(directory / "policy.npz")


# --- The benchmark ---


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    uvloop.install()
    with tempfile.TemporaryDirectory() as directory:
        return measure_in(Path(directory), options)


def measure_in(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All figures; a directory for logs and the learned policy."""
    learned = learned_policy(directory)
    decisions = {
        name: decision_us(name if name != "learned" else learned, options.decisions)
        for name in ("least_tokens", "learned")
    }
    with contextlib.ExitStack() as stack:
        backends = []
        for index in range(2):
            port = free_port()
            command = [sys.executable, str(Path(__file__).with_name("_instant_backend.py")), str(port)]
            stack.enter_context(running(command, port, directory / f"backend{index}.log"))
            backends.append(f"http://127.0.0.1:{port}")
        ports = {DIRECT: int(backends[0].rpartition(":")[2])}
        for name in (OURS, *(PEERS if options.routers else ())):
            port = free_port()
            policy = learned if options.policy == "learned" else options.policy
            command = router_command(name, port, backends, policy, options.routers)
            ports[name] = stack.enter_context(running(command, port, directory / f"{name}.log"))
        medians = asyncio.run(latencies_ms(ports, options.rounds))
        rates: dict[str, list[float]] = {name: [] for name in ports}
        for _ in range(3):
            for name, port in ports.items():
                rates[name].append(asyncio.run(requests_per_s(port, options.seconds / 3)))
    added = {name: medians[name] - medians[DIRECT] for name in ports if name != DIRECT}
    return {
        "added_p50_ms": added[OURS],
        "requests_per_s": statistics.median(rates[OURS]),
        "over_vllm_router": added[OURS] / added[PEERS[0]] if options.routers else None,
        "over_sglang_router": added[OURS] / added[PEERS[1]] if options.routers else None,
        "decision_us": max(decisions.values()),
        "policy": options.policy,
        "median_ms": medians,
        "added_ms": added,
        "rates_per_s": {name: statistics.median(values) for name, values in rates.items()},
        "decisions_us": decisions,
    }


def lines_of(result: dict[str, Any]) -> Iterator[str]:
    """A table for people."""
    yield f"{'':14}  {'median ms':>9}  {'added ms':>8}  {'requests/s':>10}"
    for name, median in result["median_ms"].items():
        extra = f"{result['added_ms'][name]:8.3f}" if name in result["added_ms"] else " " * 8
        yield f"{name:14}  {median:9.3f}  {extra}  {result['rates_per_s'][name]:10,.0f}"
    for name, value in result["decisions_us"].items():
        yield f"decision with 16 backends, {name}: {value:.0f} us (limit {LIMITS['decision_us']:.0f})"
    for key in ("over_vllm_router", "over_sglang_router"):
        if result[key] is not None:
            yield f"{key}: {result[key]:.2f}"


def missed_by(result: dict[str, Any]) -> list[str]:
    """One line for each limit that is missed."""
    return [
        f"{name} is {result[name]:.2f}, the limit is {limit:g}"
        for name, limit in LIMITS.items()
        if (result[name] < limit if name == "requests_per_s" else result[name] > limit)
    ]


def main() -> int:
    """Measure, show, judge."""
    parser = new_parser(__doc__)
    parser.add_argument("--routers", type=Path, help="directory with the commands vllm-router and sglang-router")
    parser.add_argument("--policy", default="least_tokens", help="of our router; `learned` for a learned one")
    parser.add_argument("--rounds", type=positive, default=15)
    parser.add_argument("--seconds", type=float, default=9.0, help="of the throughput of each router")
    parser.add_argument("--decisions", type=positive, default=3000, help="that are timed")
    options = parse_options(parser, quick={"rounds": 1, "seconds": 0.3, "decisions": 100})
    return report(options, lambda: measure(options), lines_of, missed_by)


if __name__ == "__main__":
    sys.exit(main())
