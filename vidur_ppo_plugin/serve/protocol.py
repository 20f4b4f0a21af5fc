"""uvicorn's HTTP protocol with what it lacks: strict request lines, limits of headers, of time and of connections."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from .http import ABORT, ON_DISCONNECT, Headers, HttpError
from .targets import MalformedError, checked_target

logger = logging.getLogger(__name__)

_ANSWERS = {
    400: b"400 Bad Request",
    408: b"408 Request Timeout",
    431: b"431 Request Header Fields Too Large",
    503: b"503 Service Unavailable",
}


def _has_body(headers: Headers) -> bool:
    return any(name == b"transfer-encoding" or (name == b"content-length" and value != b"0") for name, value in headers)


def limited_protocol(
    *, max_header_bytes: int, header_timeout_s: float, max_connections: int, on_malformed: Callable[[], None]
) -> type[HttpToolsProtocol]:
    """The protocol class for uvicorn, with these limits; `on_malformed` is called for each request that is no HTTP."""

    class LimitedProtocol(HttpToolsProtocol):
        """One connection."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._header_bytes = 0
            self._in_headers = True
            self._is_refused = False
            self._header_timer: asyncio.TimerHandle | None = None
            self._on_disconnect: set[Callable[[], None]] = set()
            #: Requests on this connection that are not answered yet; uvicorn knows the last one and those that wait.
            self._open_cycles: list[RequestResponseCycle] = []

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                self._refuse(503)
                return
            self._start_header_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_header_timer()
            super().connection_lost(exc)
            self._end_cycles()
            for tell in list(self._on_disconnect):
                tell()

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            if self._in_headers:
                if self._header_timer is None:
                    self._start_header_timer()
                # The end of the headers and a beginning of the body may come in one piece: that much is let through.
                self._header_bytes += data.find(b"\r\n\r\n") if b"\r\n\r\n" in data else len(data)
                if self._header_bytes > max_header_bytes:
                    self._refuse(431)
                    return
            self._unset_keepalive_if_required()
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade:
                pass  # nobody has to upgrade: the request is answered in HTTP/1.1
            except httptools.HttpParserError as error:  # bad chunks, conflicting lengths, what is no HTTP
                self._refuse_malformed(str(error))

        def on_headers_complete(self) -> None:
            if self._is_refused:
                return
            self._in_headers = False
            self._stop_header_timer()
            parser = self.parser
            try:
                self.url = checked_target(parser.get_method(), self.url, self.headers, parser.get_http_version())
                if parser.should_upgrade() and _has_body(self.headers):  # it would be read as the next request
                    raise MalformedError("a request with a body must not ask for an upgrade")
            except MalformedError as error:
                self._refuse_malformed(str(error))
                return
            self.scope[ON_DISCONNECT] = self._on_disconnect  # type: ignore[literal-required]
            self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]
            super().on_headers_complete()
            self._open_cycles = [cycle for cycle in self._open_cycles if not cycle.response_complete] + [self.cycle]

        def on_body(self, body: bytes) -> None:
            if not self._is_refused:
                super().on_body(body)

        def on_message_complete(self) -> None:
            self._in_headers, self._header_bytes = True, 0
            if not self._is_refused:
                super().on_message_complete()

        def _start_header_timer(self) -> None:
            self._header_timer = self.loop.call_later(header_timeout_s, self._refuse, 408)

        def _stop_header_timer(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _refuse_malformed(self, problem: str) -> None:
            if self._is_refused:
                return
            self._is_refused = True
            on_malformed()
            logger.warning("refused a request of %s: %s", self.client[0] if self.client else "a client", problem)
            self._refuse(400, HttpError(400, problem).body)

        def _refuse(self, status: int, body: bytes = b"") -> None:
            self._stop_header_timer()
            if self.transport.is_closing():
                return
            cycle = self.cycle
            # In the middle of an answer to an earlier request on this connection, nothing else may be written.
            if cycle is None or cycle.response_complete or not cycle.response_started:
                kind = b"content-type: application/json\r\n" if body else b""
                self.transport.write(
                    b"HTTP/1.1 %b\r\n%bconnection: close\r\ncontent-length: %d\r\n\r\n%b"
                    % (_ANSWERS[status], kind, len(body), body)
                )
            self.transport.close()
            self._end_cycles()

        def _end_cycles(self) -> None:
            """Nobody gets what is still to be answered: without this, uvicorn would write to a closed connection."""
            for cycle in self._open_cycles:
                cycle.disconnected = True
                cycle.message_event.set()

    return LimitedProtocol
