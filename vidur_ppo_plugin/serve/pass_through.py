"""Paths that the policy does not place: they go to the backend with the fewest requests, and come back as they are."""

from collections.abc import Callable

import aiohttp

from .fleet import Backend, Fleet
from .http import HttpError, Scope, Send
from .upstream import BROKEN, Upstream, answered_headers


async def pass_through(
    fleet: Fleet,
    upstream: Upstream,
    scope: Scope,
    send: Send,
    body: bytes,
    request_id: bytes,
    clock: Callable[[], float],
    model: str = "",
    only: Backend | None = None,
) -> None:
    """Pass one request on; tried once elsewhere if nobody listens, since what it does is not known.

    `model`: the one that it names, for which some backends may be wrong; `only`: the backend that it is about.
    """
    tried: list[Backend] = []
    while True:
        members, available = fleet.members(clock(), model=model, excluded=tried, only=only)
        open_to = [b for index, b in enumerate(members) if available is None or available[index]]
        backend = min(open_to, key=lambda candidate: candidate.in_flight)
        backend.in_flight += 1
        has_begun = False
        try:
            async with upstream.send(backend, scope, body, upstream.headers(scope, request_id)) as answer:
                has_begun = True
                headers = answered_headers(answer, request_id)
                await send({"type": "http.response.start", "status": answer.status, "headers": headers})
                async for piece in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
                return
        except BROKEN as error:
            if has_begun:
                return  # the answer stays incomplete, and uvicorn closes the connection: the client sees that it broke
            tried.append(backend)
            backend.breaker.on_failure(clock())
            if isinstance(error, aiohttp.ClientConnectorError):
                fleet.on_connect_failure(backend)
            may_retry = isinstance(error, aiohttp.ClientConnectorError) and len(tried) == 1 and len(open_to) > 1
            if not may_retry:
                raise HttpError(502, f"the backend failed: {type(error).__name__}", kind="server_error") from None
        finally:
            backend.in_flight -= 1
