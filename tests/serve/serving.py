"""Real processes and sockets on loopback for the tests of `serve`: stand-ins, routers, clients, scripted backends."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import uvicorn

from vidur_ppo_plugin.serve.router import Router
from vidur_ppo_plugin.serve.settings import ServeSettings

METRICS = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


# --- Processes ---


class Process:
    """A command of ours in a process of its own, with its log in a file."""

    def __init__(self, *arguments: object, port: int, log: Path, **environ: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "vidur_ppo_plugin.cli", *map(str, arguments)]
        self._environ = {**os.environ, **environ}
        self._log = log
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as file:
            self.process = subprocess.Popen(self._command, stdout=file, stderr=file, env=self._environ)

    def wait_until_up(self, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"it ended with {self.process.returncode}: {self.log}")
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=1).close()
                return
            time.sleep(0.05)
        raise AssertionError(f"it did not come up: {self.log}")

    @property
    def log(self) -> str:
        return self._log.read_text()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


@contextlib.contextmanager
def stand_ins(directory: Path, *options: tuple[object, ...]) -> Iterator[list[Process]]:
    """Stand-ins of vLLM, one for each tuple of options."""
    processes = []
    try:
        for index, arguments in enumerate(options):
            port = free_port()
            processes.append(Process("standin", "--port", port, *arguments, port=port, log=directory / f"{index}.log"))
        for process in processes:
            process.wait_until_up()
        yield processes
    finally:
        for process in processes:
            process.stop()


@contextlib.contextmanager
def router_process(directory: Path, backends: list[Process], *arguments: object) -> Iterator[Process]:
    """A router in a process of its own."""
    port = free_port()
    urls = [word for backend in backends for word in ("--backend", backend.url)]
    name = "router" + "".join(c for c in "".join(map(str, arguments)) if c.isalnum())[:40]
    always = ("serve", *urls, "--port", port, "--drain-grace", 0)
    process = Process(*always, *arguments, port=port, log=directory / f"{name}.log")
    try:
        process.wait_until_up()
        yield process
    finally:
        process.stop()


# --- Clients ---


@dataclass
class Result:
    """What a client saw of a request."""

    status: int = 0
    num_events: int = 0
    error: dict[str, Any] | None = None
    is_complete: bool = False
    is_broken: bool = False
    latency_s: float = 0.0
    ttft_s: float = 0.0

    @property
    def is_whole(self) -> bool:
        return self.status == 200 and self.is_complete and self.error is None


async def stream(session: aiohttp.ClientSession, url: str, prompt_tokens: int = 32, max_tokens: int = 20) -> Result:
    """A streamed completion."""
    result, begun = Result(), time.monotonic()
    body = {"prompt": [1] * prompt_tokens, "max_tokens": max_tokens, "stream": True}
    try:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            result.status = answer.status
            if answer.status != 200:
                result.error = (await answer.json()).get("error")
                return result
            async for line in answer.content:
                if not line.startswith(b"data: "):
                    continue
                if not result.num_events:
                    result.ttft_s = time.monotonic() - begun
                if line.startswith(b"data: [DONE]"):
                    result.is_complete = True
                elif (event := json.loads(line[6:])).get("error"):
                    result.error = event["error"]
                else:
                    result.num_events += 1
    except (aiohttp.ClientError, OSError):
        result.is_broken = True
    result.latency_s = time.monotonic() - begun
    return result


async def open_loop(url: str, *, qps: float, num_requests: int, seed: int, **options: Any) -> list[Result]:
    """Requests at random times, each sent when it is its turn, whatever the others do."""
    gaps = np.random.default_rng(seed).exponential(1.0 / qps, num_requests)
    tasks = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for gap in gaps.tolist():
            await asyncio.sleep(gap)
            tasks.append(asyncio.create_task(stream(session, url, **options)))
        return await asyncio.gather(*tasks)


# --- A router and scripted backends in this process ---

Reply = Callable[[dict[str, Any], Callable[[dict[str, Any]], Awaitable[None]], Any], Awaitable[None]]


@dataclass
class Backend:
    """A server whose answers a test decides; it counts what it gets."""

    reply: Reply
    metrics: str = METRICS
    models: tuple[str, ...] = ("m",)
    health_status: int = 200
    metrics_status: int = 200
    seen: list[dict[str, Any]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    cancelled: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        path = scope["path"]
        if path == "/health":
            await whole(send, self.health_status, b"")
        elif path == "/metrics":
            await whole(send, self.metrics_status, self.metrics.encode())
        elif path == "/v1/models":
            models = {"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]}
            await whole(send, 200, json.dumps(models).encode())
        else:
            body, more = b"", True
            while more:
                message = await receive()
                body, more = body + message.get("body", b""), message.get("more_body", False)
            self.seen.append(scope)
            self.bodies.append(body)
            await self.reply(scope, send, receive)

    def header(self, name: bytes) -> bytes | None:
        """Of the last request."""
        return dict(self.seen[-1]["headers"]).get(name)


async def whole(send: Any, status: int, body: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    extra = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": extra})
    await send({"type": "http.response.body", "body": body})


def answers(status: int = 200, body: bytes = b"{}", headers: tuple[tuple[bytes, bytes], ...] = ()) -> Reply:
    """The same answer to every request."""

    async def reply(scope: Any, send: Any, receive: Any) -> None:
        await whole(send, status, body, headers)

    return reply


@contextlib.asynccontextmanager
async def listening(*backends: Backend) -> AsyncIterator[None]:
    """Scripted backends on ports of their own."""
    servers, tasks = [], []
    for backend in backends:
        sock = socket.socket()
        sock.bind(("127.0.0.1", backend.port))
        backend.port = sock.getsockname()[1]
        server = uvicorn.Server(
            uvicorn.Config(backend, lifespan="off", log_level="critical", timeout_graceful_shutdown=1)
        )
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        servers.append(server)
        tasks.append(asyncio.create_task(server.serve(sockets=[sock])))
    while not all(server.started for server in servers):
        await asyncio.sleep(0.01)
    try:
        yield
    finally:
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def routing(*backends: Backend | str, **settings: Any) -> AsyncIterator[tuple[Router, str]]:
    """A router in this process, in front of backends or addresses; it and its address."""
    urls = [backend if isinstance(backend, str) else backend.url for backend in backends]
    fast = {"poll_interval": 0.05, "stale_after": 0.3, "health_interval": 0.05, "shutdown_timeout": 3.0}
    router = Router(ServeSettings(**{"backend": urls, "port": 0, "seed": 1, **fast, **settings}))
    try:
        ports = await router.start()
        yield router, f"http://127.0.0.1:{ports[0]}"
    finally:
        await router.close()


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine to its end, within a minute."""

    async def limited() -> None:
        await asyncio.wait_for(main, 60)

    asyncio.run(limited())
