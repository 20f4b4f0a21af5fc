"""The proxy: an ASGI application that answers for the router itself and passes everything else on to a backend."""

import asyncio
import json
import logging
import uuid
from collections.abc import Callable
from typing import Any

from .decider import Decider
from .endpoints import ENDPOINTS, model_in, named_model
from .fleet import Fleet, NoBackendError
from .generation import Generation, Job
from .http import (
    ON_DISCONNECT,
    ClientGoneError,
    HttpError,
    Receive,
    Scope,
    Send,
    answer,
    header,
    is_authorised,
    read_body,
)
from .instruments import Instruments
from .pass_through import pass_through
from .settings import ServeSettings
from .targets import OWN_PATHS, PassPaths
from .upstream import Upstream

logger = logging.getLogger(__name__)

#: Paths whose requests the policy places.
GENERATING = frozenset(ENDPOINTS)
#: What a request may do here at all; a path may take fewer.
_METHODS = b"GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"
_MOST_LABELS = frozenset((*GENERATING, *OWN_PATHS, "/v1/models"))


class Proxy:
    """The application."""

    def __init__(
        self,
        settings: ServeSettings,
        fleet: Fleet,
        decider: Decider,
        upstream: Upstream,
        generation: Generation,
        instruments: Instruments,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._decider = decider
        self._upstream = upstream
        self._generation = generation
        self._instruments = instruments
        self._clock = clock
        self._api_key = settings.api_key
        self._pass_paths = PassPaths(settings.pass_patterns)
        self._id_prefix = uuid.uuid4().hex[:12]
        self._num_requests = 0
        self.in_flight = 0
        #: Set when the router was told to stop: load balancers shall send no more, what they send is still served.
        self.is_leaving = False
        #: Set when the listeners close: nothing new is served.
        self.is_closing = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        status = 0

        async def counted_send(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._handle(scope, receive, counted_send)
        except HttpError as error:
            if not status:
                await error.send(counted_send)
        except ClientGoneError:
            self._instruments.disconnects.inc()
            status = 499
        path = scope["path"]
        label = path if path in _MOST_LABELS else "other"
        self._instruments.requests.labels(label, str(status or 499)).inc()

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method, headers = scope["path"], scope["method"], scope["headers"]
        if path in OWN_PATHS:  # without the key of clients, as vLLM does: load balancers and Prometheus ask for them
            await self._answer_own(path, method, send)
            return
        if path == "*":  # OPTIONS of the server as a whole
            await send({"type": "http.response.start", "status": 204, "headers": [(b"allow", _METHODS)]})
            await send({"type": "http.response.body", "body": b""})
            return
        if not is_authorised(headers, self._api_key):
            self._instruments.rejected.labels("key").inc()
            raise HttpError(401, "the API key is missing or wrong", kind="authentication_error")
        if path in GENERATING and method == "POST":
            await self._generate(scope, receive, send)
        elif path == "/v1/models" and method == "GET":
            await self._answer_models(send)
        elif method in ("CONNECT", "TRACE"):
            raise HttpError(405, f"{method} is not allowed", allow=_METHODS)
        elif not self._pass_paths.allow(path):
            raise HttpError(404, f"there is no {path} here", kind="not_found_error")
        else:
            await self._pass_through(scope, receive, send)

    # --- What the router answers itself ---

    async def _answer_own(self, path: str, method: str, send: Send) -> None:
        if method not in ("GET", "HEAD"):
            raise HttpError(405, f"{path} takes GET and HEAD, got {method}", allow=b"GET, HEAD")
        if path == "/health":
            await self._answer_health(send)
            return
        self._set_gauges()
        await answer(send, 200, self._instruments.page(), kind=b"text/plain; version=0.0.4; charset=utf-8")

    async def _answer_health(self, send: Send) -> None:
        up = sum(backend.is_up and not backend.is_draining for backend in self._fleet.backends)
        is_well = up > 0 and not self.is_leaving
        body = {"status": "ok" if is_well else "stopping" if self.is_leaving else "no backend", "backends_up": up}
        await answer(send, 200 if is_well else 503, json.dumps(body).encode())

    async def _answer_models(self, send: Send) -> None:
        models: dict[str, dict[str, object]] = {}
        for backend in self._fleet.backends:
            if backend.is_up:
                models |= backend.models or {}
        await answer(send, 200, json.dumps({"object": "list", "data": list(models.values())}).encode())

    def _set_gauges(self) -> None:
        for backend in self._fleet.backends:
            self._instruments.in_flight.labels(backend.name).set(backend.in_flight)

    # --- What goes to a backend ---

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived_at_s = self._clock()
        settings = self._settings
        body = await read_body(
            receive, scope["headers"], limit=settings.max_body_bytes, timeout_s=settings.client_timeout
        )
        parsed = _parse(body)
        endpoint = ENDPOINTS[scope["path"]]
        job = Job(
            endpoint=endpoint,
            scope=scope,
            send=send,
            body=body,
            model=named_model(parsed),
            size=endpoint.prompt_size(parsed, len(body)),
            is_streaming=endpoint.is_streaming(parsed),
            max_tokens=endpoint.output_limit(parsed),
            arrived_at_s=arrived_at_s,
            request_id=self._request_id(scope),
            previous_response=endpoint.previous_response(parsed),
        )
        await self._while_connected(scope, receive, self._generation.run, job)

    async def _pass_through(self, scope: Scope, receive: Receive, send: Send) -> None:
        settings = self._settings
        body = await read_body(
            receive, scope["headers"], limit=settings.max_body_bytes, timeout_s=settings.client_timeout
        )
        await self._while_connected(
            scope,
            receive,
            pass_through,
            self._fleet,
            self._upstream,
            scope,
            send,
            body,
            self._request_id(scope),
            self._clock,
            model_in(body) if scope["method"] == "POST" else "",
            self._generation.stored_responses.backend_of(scope["path"]),
        )

    async def _while_connected(self, scope: Scope, receive: Receive, work: Callable[..., Any], *arguments: Any) -> None:
        """Do the work; a client that goes away ends it, and with it the request to the backend."""
        if self.in_flight >= self._settings.max_in_flight or self.is_closing:
            self._instruments.rejected.labels("stopping" if self.is_closing else "busy").inc()
            if self.is_closing:
                raise HttpError(503, "the router is stopping", kind="server_error", retry_after_s=1)
            raise HttpError(429, "too many requests in flight", kind="rate_limit_error", retry_after_s=1)
        self.in_flight += 1
        task = asyncio.current_task()
        assert task is not None
        is_gone = False

        def on_disconnect() -> None:
            nonlocal is_gone
            is_gone = True
            task.cancel()

        stop_watching = _watch(scope, receive, on_disconnect)
        try:
            await work(*arguments)
        except asyncio.CancelledError:
            if not is_gone:
                raise
            raise ClientGoneError from None
        except NoBackendError as error:
            raise self._refusal(error) from None
        finally:
            self.in_flight -= 1
            stop_watching()

    def _refusal(self, error: NoBackendError) -> HttpError:
        if not error.is_busy:
            self._instruments.rejected.labels("no_backend").inc()
            return HttpError(503, str(error), kind="server_error", retry_after_s=1)
        self._instruments.rejected.labels("busy").inc()
        return HttpError(429, str(error), kind="rate_limit_error", retry_after_s=self._fleet.retry_after_s())

    def _request_id(self, scope: Scope) -> bytes:
        given = header(scope["headers"], b"x-request-id")
        if given and len(given) <= 128:
            return given
        self._num_requests += 1
        return f"{self._id_prefix}-{self._num_requests}".encode()


def _watch(scope: Scope, receive: Receive, on_disconnect: Callable[[], None]) -> Callable[[], None]:
    """Call a function when the client goes away; returns one that ends this."""
    hooks: set[Callable[[], None]] | None = scope.get(ON_DISCONNECT)
    if hooks is not None:
        hooks.add(on_disconnect)
        return lambda: hooks.discard(on_disconnect)
    watch = asyncio.ensure_future(receive())

    def on_message(done: "asyncio.Future[Any]") -> None:
        if not done.cancelled() and done.exception() is None and done.result()["type"] == "http.disconnect":
            on_disconnect()

    watch.add_done_callback(on_message)

    def stop() -> None:
        watch.remove_done_callback(on_message)
        watch.cancel()

    return stop


def _parse(body: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        raise HttpError(400, "the body must be JSON") from None
    if not isinstance(parsed, dict):
        raise HttpError(400, f"the body must be a JSON object, got {type(parsed).__name__}")
    return parsed
