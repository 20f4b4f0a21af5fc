"""Looks after the backends: health, metrics, models, each on its interval and without holding up requests."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from .fleet import Backend, Fleet
from .instruments import Instruments
from .reports import parse_report
from .settings import ServeSettings

logger = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
# Seconds between two questions for the models of a backend.
_MODELS_INTERVAL_S = 10.0
# While it is down a backend is asked more often: it shall not wait for traffic.
_DOWN_INTERVAL_S = 0.25


class Monitor:
    """Two tasks for each backend: one asks how it is, one reads its metrics."""

    def __init__(
        self,
        fleet: Fleet,
        instruments: Instruments,
        session: aiohttp.ClientSession,
        settings: ServeSettings,
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._instruments = instruments
        self._session = session
        self._settings = settings
        self._clock = clock
        self._timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        self._tasks: dict[Backend, list[asyncio.Task[None]]] = {}
        key = settings.backend_key
        self._headers = {} if key is None else {"authorization": f"Bearer {key.decode('latin-1')}"}

    def _get(self, backend: Backend, path: str) -> Any:
        """A page of a backend, as a context manager; redirects are not followed, the key is for the backend alone."""
        return self._session.get(
            f"{backend.url}{path}", timeout=self._timeout, headers=self._headers, allow_redirects=False
        )

    def watch(self, backend: Backend) -> None:
        """Begin to watch a backend."""
        self._tasks[backend] = [
            asyncio.create_task(self._repeat(backend, self._check_health, self._health_interval)),
            asyncio.create_task(self._repeat(backend, self._read_metrics, lambda _: self._settings.poll_interval)),
            asyncio.create_task(self._repeat(backend, self._read_models, _models_interval)),
        ]

    async def forget(self, backend: Backend) -> None:
        """Stop watching a backend."""
        tasks = self._tasks.pop(backend, [])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._instruments.forget(backend.name)

    async def first_look(self, backend: Backend) -> None:
        """Ask all backends once and wait for their answers, before the first request comes."""
        await asyncio.gather(self._check_health(backend), self._read_metrics(backend), self._read_models(backend))

    async def close(self) -> None:
        """Stop watching all backends."""
        for backend in list(self._tasks):
            await self.forget(backend)

    async def _repeat(
        self, backend: Backend, work: Callable[[Backend], Awaitable[None]], interval: Callable[[Backend], float]
    ) -> None:
        while True:
            try:
                await work(backend)
            except asyncio.CancelledError:
                raise
            except Exception:  # a defect of ours must not end the watch for good
                logger.exception("looking after backend %s failed", backend.name)
            await asyncio.sleep(interval(backend))

    def _health_interval(self, backend: Backend) -> float:
        return (
            self._settings.health_interval if backend.is_up else min(_DOWN_INTERVAL_S, self._settings.health_interval)
        )

    async def _check_health(self, backend: Backend) -> None:
        try:
            async with self._get(backend, "/health") as answer:
                await answer.read()
                is_well = answer.status < 500
                problem = f"answers health checks with {answer.status}"
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            is_well, problem = False, f"does not answer health checks: {error!r}"
        if is_well:
            self._fleet.set_up(backend)
        else:
            backend.failed_checks += 1
            if backend.failed_checks >= self._settings.health_failures:
                self._fleet.set_down(backend, problem)
        self._instruments.backend_up.labels(backend.name).set(backend.is_up)
        self._instruments.circuit_open.labels(backend.name).set(backend.breaker.state != "closed")

    async def _read_metrics(self, backend: Backend) -> None:
        source, now_s = self._fleet.source, self._clock()
        try:
            async with self._get(backend, "/metrics") as page:
                if page.status != 200:
                    raise ValueError(f"/metrics answers with {page.status}")
                report = parse_report((await page.read()).decode("utf-8", "replace"))
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            last_s = backend.reported_at_s
            if last_s is None and backend.is_up and not backend.is_known_silent:
                backend.is_known_silent = True
                logger.warning("metrics of %s cannot be read, the router goes by what it sent: %r", backend.name, error)
            if last_s is not None and self._clock() - last_s > self._settings.stale_after:
                backend.reported_at_s, backend.is_known_silent = None, True
                source.on_stale(backend.replica)
                logger.warning("metrics of %s are stale, the router goes by what it sent: %r", backend.name, error)
        else:
            backend.reported_at_s, backend.is_known_silent = now_s, False
            source.on_report(backend.replica, report)
        source.estimate_hidden(backend.replica, self._clock())
        self._instruments.stale.labels(backend.name).set(backend.reported_at_s is None)

    async def _read_models(self, backend: Backend) -> None:
        try:
            async with self._get(backend, "/v1/models") as answer:
                if answer.status == 200:
                    page = await answer.json(content_type=None)
                    backend.models = {str(model["id"]): model for model in page["data"]}
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
            logger.debug("models of %s are not known: %r", backend.name, error)


def _models_interval(backend: Backend) -> float:
    return _MODELS_INTERVAL_S if backend.models is not None else 1.0
