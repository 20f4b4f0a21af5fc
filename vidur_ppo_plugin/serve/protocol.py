"""uvicorn's HTTP protocol with limits that it lacks: size of headers, time to send them, number of connections."""

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .http import ABORT, ON_DISCONNECT

_ANSWERS = {
    400: b"400 Bad Request",
    408: b"408 Request Timeout",
    431: b"431 Request Header Fields Too Large",
    503: b"503 Service Unavailable",
}


def limited_protocol(
    *, max_header_bytes: int, header_timeout_s: float, max_connections: int
) -> type[HttpToolsProtocol]:
    """The protocol class for uvicorn, with these limits."""

    class LimitedProtocol(HttpToolsProtocol):
        """One connection."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._header_bytes = 0
            self._in_headers = True
            self._header_timer: asyncio.TimerHandle | None = None
            self._on_disconnect: set[Callable[[], None]] = set()

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                self._refuse(503)
                return
            self._start_header_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_header_timer()
            super().connection_lost(exc)
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
            super().data_received(data)

        def on_headers_complete(self) -> None:
            self._in_headers = False
            self._stop_header_timer()
            self.scope[ON_DISCONNECT] = self._on_disconnect  # type: ignore[literal-required]
            self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._in_headers, self._header_bytes = True, 0
            super().on_message_complete()

        def _start_header_timer(self) -> None:
            self._header_timer = self.loop.call_later(header_timeout_s, self._refuse, 408)

        def _stop_header_timer(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _refuse(self, status: int) -> None:
            self._stop_header_timer()
            if not self.transport.is_closing():
                self.transport.write(
                    b"HTTP/1.1 " + _ANSWERS[status] + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
                )
                self.transport.close()

    return LimitedProtocol
