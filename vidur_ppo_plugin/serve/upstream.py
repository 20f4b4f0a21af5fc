"""Requests to backends: pooled connections, what may be passed on, and what went wrong in words."""

import ssl
from pathlib import Path
from typing import Any

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from .fleet import Backend
from .http import Headers, HttpError, Scope, end_to_end
from .settings import ServeSettings, SettingsError

#: Answers of a backend that another one may do better: it is broken, starting, stopping, or behind a broken proxy.
RETRIED_STATUS = frozenset((500, 502, 503, 504))
#: Errors of the connection, whether it was never made or broke.
BROKEN = (aiohttp.ClientError, ConnectionError, OSError)

_NOT_SENT_ON = frozenset((b"host", b"content-length", b"expect"))
_NOT_SENT_BACK = frozenset((b"date", b"server"))
_OWN_AUTO_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


def open_session(settings: ServeSettings) -> aiohttp.ClientSession:
    """Connections to all backends; they are kept for the next request."""
    context: ssl.SSLContext | bool = True
    if settings.backend_ca:
        context = ssl.create_default_context()
        try:
            context.load_verify_locations(cafile=str(Path(settings.backend_ca)))
        except ssl.SSLError as error:
            raise SettingsError(f"--backend-ca must be a PEM file, got {settings.backend_ca!r}: {error}") from error
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=context, ttl_dns_cache=60, keepalive_timeout=30),
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=settings.connect_timeout, sock_read=settings.response_timeout
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=_OWN_AUTO_HEADERS,
        max_line_size=settings.max_header_bytes,
        max_field_size=settings.max_header_bytes,
        read_bufsize=2**18,
    )


class Upstream:
    """Sends a client's request to a backend."""

    def __init__(self, session: aiohttp.ClientSession, settings: ServeSettings) -> None:
        self._session = session
        self._backend_key = settings.backend_key
        self._has_own_key = settings.api_key is not None

    def headers(self, scope: Scope, request_id: bytes) -> CIMultiDict[str]:
        """What a backend gets to see: the client's headers without those of its connection and of its key for us."""
        sent = CIMultiDict[str]()
        for name, value in end_to_end(scope["headers"], without=_NOT_SENT_ON):
            if name == b"authorization" and (self._has_own_key or self._backend_key is not None):
                continue
            if name != b"x-request-id":
                sent.add(name.decode("latin-1"), value.decode("latin-1"))
        if self._backend_key is not None:
            sent["authorization"] = f"Bearer {self._backend_key.decode('latin-1')}"
        sent["x-request-id"] = request_id.decode("latin-1")
        client = scope.get("client")
        if client:
            before = sent.pop("x-forwarded-for", "")
            sent["x-forwarded-for"] = f"{before}, {client[0]}" if before else client[0]
        return sent

    def send(self, backend: Backend, scope: Scope, body: bytes, headers: CIMultiDict[str]) -> Any:
        """The backend's answer, as a context; the address is that of the backend, whatever the client wrote."""
        path = scope["raw_path"].decode("latin-1")
        query = scope["query_string"].decode("latin-1")
        url = checked_url(f"{backend.url}{path}?{query}" if query else f"{backend.url}{path}", backend)
        return self._session.request(scope["method"], url, headers=headers, data=body or None, allow_redirects=False)


def checked_url(text: str, backend: Backend) -> URL:
    """The address of a request; HttpError if it leads to anything but the backend.

    Nothing that a client can write should come so far; a request with our key in it is worth a second look.
    """
    base = URL(backend.url, encoded=True)
    try:
        url = URL(text, encoded=True)
        leads_there = (url.scheme, url.raw_authority) == (base.scheme, base.raw_authority) and not url.raw_fragment
    except ValueError:  # no address at all
        leads_there = False
    if not leads_there or not text.startswith(f"{backend.url}/"):
        raise HttpError(400, "the request target leads away from the backend")
    return url


def answered_headers(answer: aiohttp.ClientResponse, request_id: bytes) -> Headers:
    """What the client gets to see of a backend's headers."""
    headers = end_to_end(answer.raw_headers, without=_NOT_SENT_BACK | {b"x-request-id"})
    headers.append((b"x-request-id", request_id))
    return headers
