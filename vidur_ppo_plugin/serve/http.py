"""Small pieces of HTTP: answers, bodies, headers that belong to one connection, keys."""

import asyncio
import hmac
import json
import sys
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

#: Where a scope has a function that cuts the connection at once, whatever is still to be sent.
ABORT = "vidur_ppo.abort"
#: Where a scope has a set of functions to call when the client goes away; without it `receive` has to be watched.
ON_DISCONNECT = "vidur_ppo.on_disconnect"
#: RFC 9110, section 7.6.1: they are about one connection and are never passed on.
HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)


class HttpError(Exception):
    """An answer that is an error, in the form that OpenAI's clients know."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        retry_after_s: int = 0,
        allow: bytes = b"",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.retry_after_s = retry_after_s
        self.allow = allow

    @property
    def body(self) -> bytes:
        """The error as a JSON body."""
        error = {"message": self.message, "type": self.kind, "param": None, "code": self.status}
        return json.dumps({"error": error}).encode()

    async def send(self, send: Send) -> None:
        """Send the error as the answer."""
        extra = [(b"retry-after", str(self.retry_after_s).encode())] if self.retry_after_s else []
        if self.allow:
            extra.append((b"allow", self.allow))
        if self.status in (408, 413, 431):
            extra.append((b"connection", b"close"))  # what is left of the request will not be read
        await answer(send, self.status, self.body, extra=extra)


async def answer(
    send: Send,
    status: int,
    body: bytes,
    *,
    kind: bytes = b"application/json",
    extra: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    """Send a whole answer."""
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *extra]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class ClientGoneError(Exception):
    """The client went away before its request was complete."""


async def read_body(receive: Receive, headers: Headers, *, limit: int, timeout_s: float) -> bytes:
    """The body of a request; HttpError if it is too large or too slow."""
    for name, value in headers:
        if name == b"content-length" and (not value.isdigit() or int(value) > limit):
            raise HttpError(413, f"the body must have at most {limit} bytes")
    message = await _receive_in_time(receive, timeout_s)
    if message["type"] == "http.disconnect":
        raise ClientGoneError
    body: bytes = message.get("body", b"")
    if not message.get("more_body"):
        return _checked(body, limit)
    parts, size = [body], len(body)
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    while message.get("more_body"):
        message = await _receive_in_time(receive, deadline_s - asyncio.get_running_loop().time())
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise HttpError(413, f"the body must have at most {limit} bytes")
    return b"".join(parts)


def _checked(body: bytes, limit: int) -> bytes:
    if len(body) > limit:
        raise HttpError(413, f"the body must have at most {limit} bytes")
    return body


async def _receive_in_time(receive: Receive, timeout_s: float) -> Message:
    try:
        if sys.version_info < (3, 11):
            return await asyncio.wait_for(receive(), timeout_s)
        async with asyncio.timeout(timeout_s):  # makes no task, unlike wait_for
            return await receive()
    except asyncio.TimeoutError:
        raise HttpError(408, "the body of the request did not arrive in time") from None


def end_to_end(headers: Iterable[tuple[bytes, bytes]], *, without: frozenset[bytes] = frozenset()) -> Headers:
    """Headers that may be passed on: not those of the connection, nor those that it names, nor `without`."""
    named: set[bytes] = set()
    lowered = []
    for name, value in headers:
        name = name.lower()
        lowered.append((name, value))
        if name == b"connection":
            named.update(token.strip().lower() for token in value.split(b","))
    return [
        (name, value) for name, value in lowered if name not in HOP_BY_HOP and name not in without and name not in named
    ]


def header(headers: Headers, wanted: bytes) -> bytes:
    """The first value of a header, empty without one; names are in lower case."""
    for name, value in headers:
        if name == wanted:
            return value
    return b""


def is_authorised(headers: Headers, key: bytes | None) -> bool:
    """Whether a request shows the key; compared in constant time."""
    if key is None:
        return True
    scheme, _, shown = header(headers, b"authorization").partition(b" ")
    return hmac.compare_digest(shown.strip(), key) and scheme.lower() == b"bearer"
