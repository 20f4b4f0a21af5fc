"""Request lines that want to lead elsewhere, over real sockets: nothing but the backends is ever connected to.

A trap listens where the request lines point to. It is no backend: whatever reaches it is a failure, most of all with
the key for backends.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from serving import Backend, answers, listening, routing, run, whole

from vidur_ppo_plugin.serve.router import Router

LEGITIMATE = frozenset((200, 204, 400, 404, 405, 431))


@dataclass
class Trap:
    """A listener that is no backend, and all that reached it."""

    port: int = 0
    caught: list[bytes] = field(default_factory=list)


@contextlib.asynccontextmanager
async def trap() -> AsyncIterator[Trap]:
    it = Trap()

    async def catch(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        it.caught.append(b"")
        it.caught[-1] = await reader.read(2000)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\nconnection: close\r\n\r\nleaked")
        writer.close()

    server = await asyncio.start_server(catch, "127.0.0.1", 0)
    it.port = server.sockets[0].getsockname()[1]
    async with server:
        yield it


@contextlib.contextmanager
def logged() -> Iterator[list[logging.LogRecord]]:
    """What the router and its server log, in this process."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = records.append  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("uvicorn.error", "vidur_ppo_plugin.serve", "asyncio")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
    try:
        yield records
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)


@pytest.fixture
def backend_key(tmp_path: Path) -> str:
    file = tmp_path / "key"
    file.write_text("backend-secret\n")
    return str(file)


async def tell(url: str, request: bytes, timeout_s: float = 5.0) -> tuple[int, bytes]:
    """Send bytes as they are; the status and the whole answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    try:
        writer.write(request)
        reply = await asyncio.wait_for(reader.read(), timeout_s)
    finally:
        writer.close()
    return int(reply.split(b" ", 2)[1]) if reply.startswith(b"HTTP/1.1 ") else 0, reply


def line(target: str | bytes, method: str = "GET", *, host: str = "router") -> bytes:
    encoded = target if isinstance(target, bytes) else target.encode()
    return f"{method} ".encode() + encoded + f" HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode()


def all_are_well(router: Router) -> bool:
    return all(one.is_up and one.breaker.state == "closed" for one in router.fleet.backends)


# Health checks are so rare that a backend which is taken out of service stays so until it is looked at.
WATCHFUL = {"breaker_failures": 1, "health_interval": 30.0}


@pytest.mark.parametrize("has_key", [False, True])
def test_it_is_no_open_proxy(backend_key: str, has_key: bool) -> None:
    settings = {**WATCHFUL, "backend_key_file": backend_key if has_key else ""}

    async def main() -> None:
        backend = Backend(answers(200, b"{}"))
        async with (
            trap() as elsewhere,
            listening(backend),
            routing(backend, **settings) as (router, url),
        ):
            there = f"127.0.0.1:{elsewhere.port}"
            for target in (
                *(f"*@{there}/metrics", f"@{there}/", f"*:{elsewhere.port}/", f":{elsewhere.port}/", there),
                *(f"http://{there}/v1/embeddings", f"http://router@{there}/", f"\\\\{there}/x", f"/\\{there}/x"),
                *(f"/x#@{there}/", f"/%00@{there}/", "*", "x", "/%ff"),
            ):
                for method in ("GET", "POST", "HEAD"):
                    status, reply = await tell(url, line(target, method))
                    assert status == 400, (target, reply)
                    assert all_are_well(router), target
            for target in (f"//{there}/metrics", f"/%2f{there}/x", f"/.@{there}/x", f"/..//@{there}/x"):
                assert (await tell(url, line(target)))[0] == 404, target
                assert all_are_well(router), target
            assert not elsewhere.caught and not backend.seen
            # The absolute form with the same Host is a path of ours, whatever the name.
            assert (await tell(url, line(f"http://{there}/tokenize", "POST", host=there)))[0] == 200
            assert not elsewhere.caught and len(backend.seen) == 1

    run(main())


def test_the_absolute_form_is_taken_for_the_routers_own_authority() -> None:
    async def main() -> None:
        backend = Backend(answers(200, b"{}"))
        async with listening(backend), routing(backend) as (_, url):
            status, _ = await tell(url, line("http://Router:80/tokenize?a=1", "POST", host="router:80"))
            assert status == 200
            assert (backend.seen[-1]["raw_path"], backend.seen[-1]["query_string"]) == (b"/tokenize", b"a=1")
            assert (await tell(url, line("http://router/tokenize", host="router:80")))[0] == 400

    run(main())


def test_options_of_the_server_are_answered_by_the_router(backend_key: str) -> None:
    """With a backend without a port, `*` made a host name of its address that does not exist."""

    async def main() -> None:
        async with routing("http://127.0.0.1", backend_key_file=backend_key, **WATCHFUL) as (router, url):
            router.fleet.set_up(router.fleet.backends[0])
            status, reply = await tell(url, line("*", "OPTIONS"))
            assert status == 204 and b"\r\nallow: GET, HEAD, POST" in reply
            assert all_are_well(router)

    run(main())


@pytest.mark.parametrize("settings", [{}, {"pass_paths": "*"}])
def test_health_and_metrics_are_the_routers_in_every_spelling(backend_key: str, settings: dict[str, Any]) -> None:
    async def main() -> None:
        passed: list[bytes] = []

        class Watched(Backend):
            """The usual one answers these paths unseen."""

            async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
                if b"x-forwarded-for" in dict(scope["headers"]):  # from a client, not the router's own question
                    passed.append(scope["raw_path"])
                await super().__call__(scope, receive, send)

        backend = Watched(answers(200, b"{}"))
        async with listening(backend), routing(backend, api_key_file=backend_key, **settings) as (router, url):
            for path in ("/health", "/metrics"):
                own = b'"backends_up": 1' if path == "/health" else b"vidur_ppo_requests_total"
                name = path[1:]
                for spelling in (
                    *(path, f"/%{ord(name[0]):x}{name[1:]}", f"/{path}", f"{path}/", f"/.{path}", f"/a/..{path}"),
                    *(f"/a/%2e%2e{path}", f"%2f{path}".replace("%2f", "/%2f"), path.upper(), f"{path}?x=1"),
                ):
                    status, reply = await tell(url, line(spelling))
                    assert status == 200 and own in reply, (spelling, reply)
                    assert (await tell(url, line(spelling, "HEAD")))[0] == 200
                    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH"):
                        status, reply = await tell(url, line(spelling, method))
                        assert status == 405 and b"\r\nallow: GET, HEAD\r\n" in reply, (method, spelling, reply)
            assert not passed
            assert router.proxy is not None and router.proxy.in_flight == 0

    run(main())


def test_only_the_paths_that_may_pass_do() -> None:
    async def main() -> None:
        backend = Backend(answers(200, b"{}"))
        async with listening(backend):
            async with routing(backend) as (_, url):
                for target in (
                    *("/sleep", "/%73leep", "/v1/models/../../sleep", "/v1/models/%2e%2e/%2e%2e/sleep", "//sleep/"),
                    *("/v1/audio/..%2f..%2fwake_up", "/reset_prefix_cache", "/collective_rpc", "/v1/load_lora_adapter"),
                ):
                    status, reply = await tell(url, line(target, "POST"))
                    assert status == 404 and b"not_found_error" in reply, target
                assert not backend.seen
                for target, sent in (
                    ("/tokenize", b"/tokenize"),
                    ("/v1/audio/transcriptions", b"/v1/audio/transcriptions"),
                    ("/v1//audio/./x/../speech/", b"/v1/audio/speech"),
                    ("/%74okenize", b"/tokenize"),
                ):
                    assert (await tell(url, line(target, "POST")))[0] == 200, target
                    assert backend.seen[-1]["raw_path"] == sent
            async with routing(backend, pass_paths="/sleep,/own/*") as (_, url):
                for target, status in (("/sleep", 200), ("/own/a/b", 200), ("/tokenize", 404), ("/own", 404)):
                    assert (await tell(url, line(target, "POST")))[0] == status, target

    run(main())


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n"
POST = b"POST /tokenize HTTP/1.1\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        CHUNKED + b"\r\nzz\r\n",
        CHUNKED + b"\r\n5\r\nhello\r\nzz\r\n\r\n",
        CHUNKED + b"\r\n5\r\nhelloXX\r\n0\r\n\r\n",
        CHUNKED + b"\r\n-1\r\n\r\n",
        CHUNKED + b"\r\nfffffffffffffffffff\r\n",
        CHUNKED + b"content-length: 5\r\n\r\n0\r\n\r\n",
        POST + b"host: a\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        POST + b"host: a\r\ncontent-length: 2, 2\r\n\r\n{}",
        POST + b"host: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        POST + b"host: a\r\ntransfer-encoding: identity\r\n\r\n",
        POST.replace(b"1.1", b"1.0") + b"host: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"content-length: 2\r\n\r\n{}",
        POST + b"host: a\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}",
        POST + b"host: a@b\r\ncontent-length: 2\r\n\r\n{}",
        POST + b"host: a\r\nupgrade: h2c\r\nconnection: upgrade\r\ncontent-length: 2\r\n\r\n{}",
    ],
)
def test_malformed_requests_are_400_and_one_line_of_log(request_bytes: bytes) -> None:
    async def main() -> None:
        backend = Backend(answers(200, b"{}"))
        async with listening(backend), routing(backend, **WATCHFUL) as (router, url):
            with logged() as records:
                for _ in range(3):
                    status, reply = await tell(url, request_bytes)
                    assert status == 400, reply
                    assert b'"type": "invalid_request_error"' in reply
                    assert reply.count(b"HTTP/1.1 ") == 1
                await asyncio.sleep(0.05)
            assert len(records) == 3 and not any(record.exc_info for record in records), records
            assert not backend.seen and all_are_well(router)
            assert b'vidur_ppo_rejected_total{reason="malformed"} 3.0' in router.instruments.page()

    run(main())


def test_what_is_malformed_behind_a_request_does_not_get_into_its_answer() -> None:
    async def streams(scope: Any, send: Any, receive: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(50):
            await send({"type": "http.response.body", "body": b"data: x\n\n", "more_body": True})
            await asyncio.sleep(0.01)

    async def main() -> None:
        backend = Backend(streams)
        async with listening(backend), routing(backend) as (_, url):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(line("/tokenize").replace(b"connection: close\r\n", b""))
            begin = await reader.readuntil(b"data: x\n\n")
            writer.write(b"GET *@nowhere HTTP/1.1\r\nhost: a\r\n\r\n")
            rest = await asyncio.wait_for(reader.read(), 5)
            writer.close()
            assert begin.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 400" not in rest

    run(main())


def test_redirects_of_backends_are_not_followed(backend_key: str) -> None:
    async def main() -> None:
        async with trap() as elsewhere:
            to_trap = ((b"location", f"http://127.0.0.1:{elsewhere.port}/x".encode()),)

            class Redirecting(Backend):
                async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
                    await whole(send, 307, b"", to_trap)

            backend = Redirecting(answers())
            async with listening(backend), routing(backend, backend_key_file=backend_key) as (router, url):
                assert router.fleet.backends[0].is_up  # it answers
                status, reply = await tell(url, line("/tokenize", "POST"))
                assert status == 307 and b"\r\nlocation: " in reply
                await asyncio.sleep(0.2)
            assert not elsewhere.caught

    run(main())


# --- Fuzzing ---


def targets(rng: random.Random, trap_port: int, count: int) -> Iterator[bytes]:
    """Request targets of all kinds, most of which point to the trap."""
    there = [f"127.0.0.1:{trap_port}", f"localhost:{trap_port}", f"[::1]:{trap_port}", f"u:p@127.0.0.1:{trap_port}"]
    before = [
        "",
        "/",
        "//",
        "///",
        "*",
        "*@",
        "@",
        ":",
        "*:",
        "http://",
        "HTTP://",
        "https://",
        "http:/",
        "http:",
        "ftp://",
    ]
    before += [
        "/\\",
        "\\\\",
        "/%5c",
        "/..",
        "/../",
        "/%2e%2e/",
        "/.",
        ".",
        "?",
        "/?",
        "#",
        "/#",
        ";",
        "/;",
        "/@",
        "/%40",
    ]
    before += ["/%00", "/%0d%0a", "/%250d", "%", "/%", "/%2", "/%2f", "/%2f%2f", "x", "x@", "x:", "router", "router@"]
    before += ["http://router@", "http://router/@", "http://router:", "/v1/models/", "/v1/audio/", "/v1/completions"]
    paths = [
        "",
        "/",
        "/metrics",
        "/health",
        "/v1/models",
        "/x",
        "/%6detrics",
        "/METRICS",
        "/v1/../sleep",
        "?a=b",
        "#f",
        "/\\",
    ]
    for _ in range(count):
        text = rng.choice(before) + rng.choice([rng.choice(there), str(trap_port), ""]) + rng.choice(paths)
        target = bytearray(text.encode())
        for _ in range(rng.choice((0, 0, 0, 1, 2))):  # line ends would make several requests of it
            byte = rng.choice([rng.randrange(33, 256), rng.choice(b"/@:?#\\%*.\x00\x01\t\x7f")])
            target.insert(rng.randrange(len(target) + 1), byte)
        yield bytes(target) or b"/"


@pytest.mark.parametrize("settings", [{}, {"pass_paths": "*"}])
def test_no_request_line_leads_elsewhere_or_harms_a_backend(backend_key: str, settings: dict[str, Any]) -> None:
    rng = random.Random(7)
    methods = ("GET", "GET", "GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "PURGE")

    async def main() -> None:
        backends = [Backend(answers(200, b"{}")), Backend(answers(200, b"{}"))]
        async with (
            trap() as elsewhere,
            listening(*backends),
            routing(*backends, backend_key_file=backend_key, **WATCHFUL, **settings) as (router, url),
        ):
            found: dict[int, int] = {}

            async def one(target: bytes) -> None:
                method = rng.choice(methods)
                body = b"content-length: 2\r\n\r\n{}" if method in ("POST", "PUT", "PATCH") else b"\r\n"
                head = line(target, method, host=rng.choice(("router", f"127.0.0.1:{elsewhere.port}")))
                status, reply = await tell(url, head[:-2] + body)
                assert status in LEGITIMATE, (method, target, reply)
                assert b"leaked" not in reply and b"backend-secret" not in reply, (method, target, reply)
                assert all_are_well(router), (method, target)
                found[status] = found.get(status, 0) + 1

            with logged() as records:
                some = list(targets(rng, elsewhere.port, 1200))
                for begin in range(0, len(some), 8):
                    await asyncio.gather(*(one(target) for target in some[begin : begin + 8]))
            assert not elsewhere.caught, elsewhere.caught
            assert not [record for record in records if record.exc_info or record.levelno > logging.WARNING]
            assert {200, 400} < set(found), found  # not all were refused, nor all taken
            for backend in backends:
                assert backend.seen
                for scope in backend.seen:
                    assert scope["raw_path"].startswith(b"/") and b"//" not in scope["raw_path"]
                    assert dict(scope["headers"])[b"host"] == f"127.0.0.1:{backend.port}".encode()

    run(main())
