"""Puts the router together, runs it, and takes it down again."""

import asyncio
import contextlib
import logging
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import numpy as np
import uvicorn

from vidur_ppo_plugin import __version__
from vidur_ppo_plugin.routing.snapshot import RequestInfo

from .admin import Admin
from .app import Proxy
from .decider import RECORDED_SLOTS, Decider, NamedPolicy
from .fleet import Fleet
from .generation import Generation
from .instruments import Instruments
from .monitor import Monitor
from .protocol import limited_protocol
from .record_writer import RecordWriter
from .settings import ServeSettings, SettingsError
from .source import VllmReplicaSource
from .upstream import Upstream, open_session

logger = logging.getLogger(__name__)

_SWEEP_INTERVAL_S = 1.0
_KEEP_ALIVE_S = 75


class Router:
    """Everything that a running router has; build it, `start`, and `close` it, inside one event loop."""

    def __init__(self, settings: ServeSettings) -> None:
        """SettingsError if an option is not valid; nothing listens yet."""
        settings.check()
        self.settings = settings
        seed = random.SystemRandom().randrange(2**32) if settings.seed < 0 else settings.seed
        self.instruments = Instruments()
        policy = NamedPolicy("policy", settings.policy, seed=seed)
        fallback = NamedPolicy("fallback", settings.fallback, seed=seed)
        if fallback.is_learned:
            raise SettingsError(f"--fallback must be a heuristic, got {settings.fallback!r}")
        shadow = NamedPolicy("shadow", settings.shadow, seed=seed) if settings.shadow else None
        slots = max(one.num_waiting_slots for one in (policy, shadow) if one is not None)
        if settings.record:
            slots = max(slots, RECORDED_SLOTS)
        self.source = VllmReplicaSource(num_waiting_slots=slots)
        self.fleet = Fleet(
            self.source,
            max_in_flight=settings.max_in_flight_per_backend,
            breaker_failures=settings.breaker_failures,
        )
        speeds = settings.speeds or [1.0] * len(settings.backend)
        for url, speed_factor in zip(settings.backend, speeds, strict=True):
            self.fleet.add(url, speed_factor)
        self._check_size(policy)
        self.decider = Decider(
            self.fleet,
            self.instruments,
            policy=policy,
            fallback=fallback,
            shadow=shadow,
            explore=settings.explore,
            rng=random.Random(seed),
        )
        self._warm_up([one for one in (policy, fallback, shadow) if one is not None])
        self.record = self._open_record(slots)
        self._servers: list[uvicorn.Server] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None
        self.proxy: Proxy | None = None

    def _check_size(self, policy: NamedPolicy) -> None:
        size = int(getattr(policy.router, "num_replicas", 0))
        if size and size != len(self.settings.backend):
            raise SettingsError(
                f"--policy {policy.name}: its flat network is for {size} backends, there are "
                f"{len(self.settings.backend)}"
            )

    def _warm_up(self, policies: list[NamedPolicy]) -> None:
        """Decide once without consequences: what is compiled at its first use is compiled before the first request."""
        info = RequestInfo(1, 0.0)
        snapshot = self.source.snapshot(0.0)
        for policy in policies:
            for available in (None, np.ones(snapshot.num_replicas, dtype=np.bool_)):
                snapshot.available = available
                state = getattr(policy.router, "rng", None)
                before = None if state is None else state.getstate()
                with contextlib.suppress(FloatingPointError):
                    if policy.is_learned:
                        policy.choose(snapshot, info, [])
                if state is not None:
                    state.setstate(before)
            if hasattr(policy.router, "reset"):
                policy.router.reset()

    def _open_record(self, slots: int) -> RecordWriter | None:
        settings = self.settings
        if not settings.record:
            return None
        if not settings.explore:
            logger.warning("--record without --explore: other policies cannot be evaluated on this record")
        return RecordWriter(
            Path(settings.record),
            self.instruments,
            policy=settings.policy,
            explore=settings.explore,
            num_waiting_slots=slots,
            plugin_version=__version__,
            started_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )

    async def start(self) -> list[int]:
        """Look at the backends, then listen; the ports, first the one for clients."""
        begun_s = time.monotonic()  # the clock of uvloop counts milliseconds

        def clock() -> float:
            return time.monotonic() - begun_s

        settings = self.settings
        self._session = open_session(settings)
        upstream = Upstream(self._session, settings)
        monitor = self.monitor = Monitor(self.fleet, self.instruments, self._session, settings, clock)
        generation = Generation(
            self.fleet,
            self.decider,
            upstream,
            self.instruments,
            retries=settings.retries,
            client_timeout_s=settings.client_timeout,
            record=self.record,
            clock=clock,
        )
        self.proxy = Proxy(settings, self.fleet, self.decider, upstream, generation, self.instruments, clock)
        await asyncio.gather(*(monitor.first_look(backend) for backend in self.fleet.backends))
        for backend in self.fleet.backends:
            monitor.watch(backend)
        self._tasks.append(asyncio.create_task(_repeat(generation.give_up_slow_clients)))
        ports = [await self._listen(self.proxy, settings.host, settings.port)]
        if settings.admin_port and settings.admin_key is not None:
            admin = Admin(settings.admin_key, self.fleet, self.decider, monitor, clock)
            ports.append(await self._listen(admin, settings.admin_host, settings.admin_port))
        return ports

    async def _listen(self, app: object, host: str, port: int) -> int:
        settings = self.settings
        config = uvicorn.Config(
            app,  # type: ignore[arg-type]
            http=limited_protocol(
                max_header_bytes=settings.max_header_bytes,
                header_timeout_s=settings.client_timeout,
                max_connections=settings.max_connections,
                on_malformed=self.instruments.rejected.labels("malformed").inc,
            ),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=2048,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(settings.shutdown_timeout) or 1,
            ssl_certfile=settings.tls_cert or None,
            ssl_keyfile=settings.tls_key or None,
        )
        config.load()
        sock = _bound(host, port)
        server = _Server(config)
        self._servers.append(server)
        task = asyncio.create_task(server.serve(sockets=[sock]))
        self._tasks.append(task)
        while not server.started:
            if task.done():
                task.result()
                raise SettingsError(f"cannot listen on {host}:{port}")
            await asyncio.sleep(0.01)
        return int(sock.getsockname()[1])

    async def leave(self, skip: asyncio.Event) -> None:
        """Say 503 on /health for `--drain-grace` seconds, so that load balancers look elsewhere; serve until then."""
        if self.proxy is not None:
            self.proxy.is_leaving = True
        if not skip.is_set():
            logger.info("leaving: /health says 503 for %g s, another signal cuts this short", self.settings.drain_grace)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(skip.wait(), self.settings.drain_grace)

    async def close(self) -> None:
        """Take no new requests, let those in flight finish, and end."""
        if self.proxy is not None:
            self.proxy.is_leaving = self.proxy.is_closing = True
        for server in self._servers:
            server.should_exit = True
        servers, others = self._tasks[1:], self._tasks[:1]
        await asyncio.gather(*servers, return_exceptions=True)
        for task in others:
            task.cancel()
        if hasattr(self, "monitor"):
            await self.monitor.close()
        if self._session is not None:
            await self._session.close()
        if self.record is not None:
            self.record.close()


class _Server(uvicorn.Server):
    """Signals are ours: there are two listeners and one end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run(settings: ServeSettings, announce: Callable[[str], None] = print) -> None:
    """Serve until SIGINT or SIGTERM; SettingsError if it cannot start.

    SIGTERM comes from those who run many: it leaves load balancers `--drain-grace` seconds, which another signal cuts
    short. After that, or after SIGINT, one more ends the process at once.
    """
    router = Router(settings)
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set() or number == signal.SIGINT:
            hurry.set()
        stop.set()

    # Before anybody can connect: whoever sees it answer may send a signal.
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    try:
        ports = await router.start()
        scheme = "https" if settings.tls_cert else "http"
        up = sum(backend.is_up for backend in router.fleet.backends)
        announce(
            f"Routing by {settings.policy} on {scheme}://{settings.host}:{ports[0]} to {len(router.fleet.backends)} "
            f"backends, {up} of them up" + (f"; admin on port {ports[1]}" if len(ports) > 1 else "")
        )
        if settings.is_open_to_others and settings.api_key is None:
            logger.warning("other machines can reach %s and no API key is set", settings.host)
        await stop.wait()
        await router.leave(hurry)
        logger.info("stopping: %d requests in flight may finish", router.proxy.in_flight if router.proxy else 0)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
    finally:
        await router.close()
    if router.decider.shadow is not None:
        logger.info("shadow %s: %s", router.decider.shadow.name, router.decider.shadow_summary())


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family=family)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        raise SettingsError(f"cannot listen on {host}:{port}: {error}") from error
    sock.set_inheritable(True)
    return sock


async def _repeat(work: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(_SWEEP_INTERVAL_S)
        work()
