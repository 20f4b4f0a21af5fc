"""The admin paths, on a listener of their own and behind a key of their own: backends come, are drained, and go.

GET  /backends                     which there are, and how they are
POST /backends {"url": ...}        add one
POST /backends/drain {"url": ...}  no new requests there; /backends/resume takes it back
POST /backends/remove {"url": ...} forget it; requests that it works on are finished
GET  /status                       the policy, how often it fell back, what the shadow policy says
"""

import json
import logging
from collections.abc import Callable
from typing import Any

from .decider import Decider
from .fleet import Backend, Fleet
from .http import ClientGoneError, HttpError, Receive, Scope, Send, answer, is_authorised, read_body
from .monitor import Monitor

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 16 * 1024
_TIMEOUT_S = 10.0


class Admin:
    """The application."""

    def __init__(
        self, key: bytes, fleet: Fleet, decider: Decider, monitor: Monitor, clock: Callable[[], float]
    ) -> None:
        self._key = key
        self._fleet = fleet
        self._decider = decider
        self._monitor = monitor
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            status, result = await self._handle(scope, receive)
            await answer(send, status, json.dumps(result).encode())
        except HttpError as error:
            await error.send(send)
        except ClientGoneError:
            return

    async def _handle(self, scope: Scope, receive: Receive) -> tuple[int, Any]:
        if not is_authorised(scope["headers"], self._key):
            raise HttpError(401, "the admin key is missing or wrong", kind="authentication_error")
        path, method = scope["path"].rstrip("/"), scope["method"]
        if method == "GET" and path == "/backends":
            return 200, {"backends": self._described()}
        if method == "GET" and path == "/status":
            return 200, self._status()
        if method == "POST" and path == "/backends":
            return 201, await self._add(await self._url(scope, receive))
        if method == "POST" and path in ("/backends/drain", "/backends/resume", "/backends/remove"):
            backend = self._find(await self._url(scope, receive))
            if path == "/backends/remove":
                self._fleet.remove(backend)
                await self._monitor.forget(backend)
            else:
                backend.is_draining = path == "/backends/drain"
            logger.info("backend %s: %s", backend.name, path.rpartition("/")[2])
            return 200, backend.describe(self._clock())
        raise HttpError(404, f"there is no {method} {scope['path']}")

    async def _url(self, scope: Scope, receive: Receive) -> str:
        body = await read_body(receive, scope["headers"], limit=_MAX_BODY_BYTES, timeout_s=_TIMEOUT_S)
        try:
            url = json.loads(body)["url"]
        except (ValueError, KeyError, TypeError):
            url = None
        if not isinstance(url, str):
            raise HttpError(400, 'the body must be {"url": "http://HOST:PORT"}')
        return url

    async def _add(self, url: str) -> Any:
        try:
            backend = self._fleet.add(url)
        except ValueError as error:
            raise HttpError(400, str(error)) from None
        await self._monitor.first_look(backend)
        self._monitor.watch(backend)
        logger.info("backend %s was added", backend.name)
        return backend.describe(self._clock())

    def _find(self, url: str) -> Backend:
        try:
            return self._fleet.find(url)
        except ValueError as error:
            raise HttpError(404, str(error)) from None

    def _described(self) -> list[dict[str, object]]:
        return [backend.describe(self._clock()) for backend in self._fleet.backends]

    def _status(self) -> dict[str, Any]:
        decider = self._decider
        shadow = None
        if decider.shadow is not None:
            shadow = {"policy": decider.shadow.name, **decider.shadow_counts}
        return {"policy": decider.policy.name, "fallbacks": decider.num_fallbacks, "shadow": shadow}
