"""The proxy against scripted backends, over real sockets: what is passed on, retried, refused and cut off."""

import asyncio
import json
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from policies import save_policy
from serving import METRICS, Backend, answers, free_port, listening, routing, run, stream

OK = json.dumps({"choices": [{"text": "x"}], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}).encode()
BODY = {"model": "m", "prompt": "hello"}


def events(count: int, pause_s: float = 0.0, before_s: float = 0.0, breaks_after: int | None = None) -> Any:
    """A stream of events; it breaks off after some, if told to."""

    async def reply(scope: Any, send: Any, receive: Any) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await asyncio.sleep(before_s)
        for number in range(count):
            if number == breaks_after:
                raise RuntimeError("broken on purpose")
            event = b'data: {"choices":[{"text":"t"}]}\n\n'
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.sleep(pause_s)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    return reply


async def post(url: str, body: Any = BODY, path: str = "/v1/completions", **options: Any) -> tuple[int, bytes, Any]:
    async with aiohttp.ClientSession() as session, session.post(f"{url}{path}", json=body, **options) as answer:
        return answer.status, await answer.read(), answer.headers


def test_answers_in_one_piece_and_streams_come_through_unchanged() -> None:
    async def main() -> None:
        plain, streaming = Backend(answers(200, OK, ((b"x-own", b"1"),))), Backend(events(3))
        async with listening(plain, streaming):
            async with routing(plain) as (_, url):
                status, body, headers = await post(url)
                assert (status, body, headers["x-own"]) == (200, OK, "1")
                assert plain.bodies == [json.dumps(BODY).encode()]
            async with routing(streaming) as (_, url), aiohttp.ClientSession() as session:
                result = await stream(session, url)
                assert result.is_whole and result.num_events == 3

    run(main())


def test_headers_of_the_connection_stay_and_others_pass() -> None:
    async def main() -> None:
        back = ((b"connection", b"x-mine"), (b"x-mine", b"1"), (b"keep-alive", b"timeout=9"), (b"x-theirs", b"2"))
        backend = Backend(answers(200, OK, back))
        async with listening(backend), routing(backend) as (_, url):
            sent = {
                "Connection": "keep-alive, X-Secret",
                "X-Secret": "1",
                "TE": "trailers",
                "Proxy-Authorization": "x",
                "X-Passed": "yes",
                "Authorization": "Bearer client",
            }
            _, _, headers = await post(url, headers=sent)
            assert backend.header(b"x-passed") == b"yes"
            assert backend.header(b"authorization") == b"Bearer client"  # the router has no key of its own
            for name in (b"x-secret", b"te", b"proxy-authorization", b"keep-alive"):
                assert backend.header(name) is None, name
            assert backend.header(b"host") == f"127.0.0.1:{backend.port}".encode()
            assert backend.header(b"x-forwarded-for") == b"127.0.0.1"
            assert backend.header(b"x-request-id") == headers["x-request-id"].encode()
            assert "x-mine" not in headers and headers["x-theirs"] == "2"

    run(main())


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_backend_that_fails_before_the_first_byte_is_replaced(is_stream: bool) -> None:
    async def breaks(scope: Any, send: Any, receive: Any) -> None:
        if is_stream:  # headers, and then nothing
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("broken on purpose")

    async def main() -> None:
        bad, unwell = Backend(breaks), Backend(answers(503, b"loading"))
        good = Backend(events(2) if is_stream else answers(200, OK))
        gone = f"http://127.0.0.1:{free_port()}"
        async with (
            listening(bad, unwell, good),
            routing(bad, unwell, gone, good, policy="round_robin", retries=3) as (router, url),
        ):
            for backend in router.fleet.backends:
                router.fleet.set_up(backend)
            for _ in range(8):
                status, _, _ = await post(url, {**BODY, "stream": is_stream})
                assert status == 200
            assert bad.seen and unwell.seen
            page = router.instruments.page().decode()
        assert "vidur_ppo_retries_total 0.0" not in page
        assert 'kind="connection"' in page and 'kind="status_503"' in page
        assert is_stream or 'kind="status_500"' in page

    run(main())


def test_a_stream_that_has_begun_is_not_retried_and_ends_with_a_clean_error() -> None:
    async def main() -> None:
        bad, good = Backend(events(5, breaks_after=2)), Backend(events(5))
        async with listening(bad, good), routing(bad) as (router, url), aiohttp.ClientSession() as session:
            result = await stream(session, url)
            assert result.num_events == 2 and result.is_complete and result.error is not None
            assert result.error["code"] == 502 and not result.is_broken
            assert len(bad.seen) == 1 and not good.seen
            assert router.source.snapshot(0.0).outstanding_requests.sum() == 0

    run(main())


def test_all_tries_failed_gives_the_last_error() -> None:
    async def main() -> None:
        backends = [Backend(answers(503, b"")), Backend(answers(503, b""))]
        async with listening(*backends), routing(*backends) as (_, url):
            status, body, _ = await post(url)
            assert status == 503 and json.loads(body)["error"]["message"] == "the backend answered with 503"
            assert [len(backend.seen) for backend in backends] == [1, 1]

    run(main())


def test_errors_of_the_request_are_the_backends_to_tell_and_open_no_circuit() -> None:
    async def main() -> None:
        backend = Backend(answers(400, b'{"error":"too long"}'))
        async with listening(backend), routing(backend) as (router, url):
            for _ in range(5):
                assert (await post(url))[:2] == (400, b'{"error":"too long"}')
            assert router.fleet.backends[0].breaker.state == "closed"

    run(main())


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_goes_away_ends_the_request_at_the_backend(is_stream: bool) -> None:
    async def main() -> None:
        ended = asyncio.Event()

        async def slow(scope: Any, send: Any, receive: Any) -> None:
            if is_stream:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass
            ended.set()

        backend = Backend(slow)
        async with listening(backend), routing(backend) as (router, url):
            with pytest.raises(asyncio.TimeoutError):
                await post(url, {**BODY, "stream": is_stream}, timeout=aiohttp.ClientTimeout(total=0.3))
            await asyncio.wait_for(ended.wait(), 2)
            await asyncio.sleep(0.1)
            assert router.proxy is not None and router.proxy.in_flight == 0
            assert router.source.snapshot(0.0).outstanding_requests.sum() == 0
            assert b"vidur_ppo_client_disconnects_total 1.0" in router.instruments.page()

    run(main())


def test_back_pressure_is_429_with_retry_after_and_no_queue() -> None:
    async def main() -> None:
        backend = Backend(events(1, before_s=0.5))
        async with listening(backend):
            for limit in ({"max_in_flight_per_backend": 3}, {"max_in_flight": 3}):
                async with routing(backend, **limit) as (_, url):
                    answered = await asyncio.gather(*(post(url, {**BODY, "stream": True}) for _ in range(8)))
                    assert sorted(status for status, _, _ in answered) == [200] * 3 + [429] * 5
                    refused = next(one for one in answered if one[0] == 429)
                    assert int(refused[2]["retry-after"]) >= 1
                    assert json.loads(refused[1])["error"]["type"] == "rate_limit_error"

    run(main())


def test_no_backend_is_503_and_health_says_so() -> None:
    async def main() -> None:
        async with routing(f"http://127.0.0.1:{free_port()}") as (_, url):
            status, _, headers = await post(url)
            assert status == 503 and headers["retry-after"] == "1"
            async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as answer:
                assert answer.status == 503

    run(main())


def test_a_backend_that_stops_answering_health_checks_gets_nothing_until_it_does() -> None:
    async def main() -> None:
        bad, good = Backend(answers(200, OK)), Backend(answers(200, OK))
        async with listening(bad, good), routing(bad, good) as (router, url):
            bad.health_status = 503
            await asyncio.sleep(0.3)
            bad.seen.clear()
            for _ in range(6):
                assert (await post(url))[0] == 200
            assert not bad.seen
            bad.health_status = 200
            await asyncio.sleep(0.6)
            assert all(backend.is_up for backend in router.fleet.backends)

    run(main())


def test_stale_metrics_are_noticed_and_left_alone() -> None:
    async def main() -> None:
        busy = METRICS.replace("running 0", "running 50")
        backend = Backend(answers(200, OK), metrics=busy)
        async with listening(backend), routing(backend) as (router, url):
            await _until(lambda: router.source.snapshot(0.0).outstanding_requests[0] == 50)
            backend.metrics_status = 500
            await _until(lambda: router.source.snapshot(0.0).outstanding_requests[0] == 0)
            await _until(
                lambda: b'metrics_stale{backend="127.0.0.1:%d"} 1.0' % backend.port in router.instruments.page()
            )
            assert (await post(url))[0] == 200
            backend.metrics_status = 200
            await _until(lambda: router.source.snapshot(0.0).outstanding_requests[0] == 50)

    run(main())


async def _until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def test_models_are_those_of_all_backends_and_requests_go_where_theirs_is() -> None:
    async def main() -> None:
        first, second = Backend(answers(200, OK), models=("a", "b")), Backend(answers(200, OK), models=("c",))
        async with listening(first, second), routing(first, second) as (_, url):
            async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as answer:
                assert [model["id"] for model in (await answer.json())["data"]] == ["a", "b", "c"]
            for _ in range(4):
                await post(url, {"model": "c", "prompt": "x"})
            assert (len(first.seen), len(second.seen)) == (0, 4)

    run(main())


def test_other_paths_are_passed_through() -> None:
    async def main() -> None:
        backend = Backend(answers(201, b"[1]"))
        async with listening(backend), routing(backend) as (_, url):
            assert (await post(url, {}, path="/tokenize?a=1%202"))[:2] == (201, b"[1]")
            assert (backend.seen[-1]["path"], backend.seen[-1]["query_string"]) == ("/tokenize", b"a=1%202")

    run(main())


def test_limits_of_bodies_and_what_is_no_json() -> None:
    async def main() -> None:
        backend = Backend(answers(200, OK))
        async with listening(backend), routing(backend, max_body_bytes=1000) as (_, url):
            assert (await post(url, {"prompt": "x" * 2000}))[0] == 413
            async with aiohttp.ClientSession() as session:
                chunks = (b"x" * 400 for _ in range(5))

                async def chunked() -> Any:
                    for chunk in chunks:
                        yield chunk

                async with session.post(f"{url}/v1/completions", data=chunked()) as answer:
                    assert answer.status == 413
                for bad in (b"", b"{", b"[1]", b'"x"', b"[" * 900):
                    async with session.post(f"{url}/v1/completions", data=bad) as answer:
                        assert answer.status == 400, bad
                        assert (await answer.json())["error"]["type"] == "invalid_request_error"
            assert not backend.seen

    run(main())


def test_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {}
    for name in ("api", "admin", "backend"):
        file = tmp_path / name
        file.write_text(f"{name}-secret\n")
        keys[f"{name}_key_file"] = str(file)

    async def main() -> None:
        backend = Backend(answers(200, OK))
        admin_port = free_port()
        async with listening(backend), routing(backend, admin_port=admin_port, **keys) as (_, url):
            for shown in (
                None,
                "Bearer wrong",
                "Bearer api-secre",
                "Basic api-secret",
                "Bearer admin-secret",
                "api-secret",
            ):
                headers = {} if shown is None else {"Authorization": shown}
                assert (await post(url, headers=headers))[0] == 401, shown
                assert (await post(url, path="/v1/embeddings", headers=headers))[0] == 401
            assert not backend.seen
            assert (await post(url, headers={"Authorization": "Bearer api-secret"}))[0] == 200
            assert backend.header(b"authorization") == b"Bearer backend-secret"
            admin = f"http://127.0.0.1:{admin_port}"
            async with aiohttp.ClientSession() as session:
                for shown in ("Bearer api-secret", "Bearer "):
                    async with session.get(f"{admin}/backends", headers={"Authorization": shown}) as answer:
                        assert answer.status == 401
                # Not on the port of clients, whatever the key.
                async with session.get(f"{url}/backends", headers={"Authorization": "Bearer admin-secret"}) as answer:
                    assert answer.status == 401

    run(main())


def test_backends_are_added_drained_and_removed_while_requests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIDUR_PPO_ADMIN_KEY", "k")

    async def main() -> None:
        first, second = Backend(events(3, pause_s=0.3)), Backend(events(1))
        port = free_port()
        async with listening(first, second), routing(first, admin_port=port) as (router, url):
            admin, headers = f"http://127.0.0.1:{port}", {"Authorization": "Bearer k"}
            async with aiohttp.ClientSession(headers=headers) as session:

                async def tell(path: str, target: str) -> tuple[int, Any]:
                    async with session.post(f"{admin}{path}", json={"url": target}) as answer:
                        return answer.status, await answer.json()

                running = asyncio.create_task(stream(session, url))
                await asyncio.sleep(0.2)
                status, added = await tell("/backends", second.url)
                assert status == 201 and added["is_up"]
                assert (await tell("/backends", second.url))[0] == 400
                assert (await tell("/backends", "file:///etc/passwd"))[0] == 400
                assert (await tell("/backends/drain", first.url))[1]["is_draining"]
                for _ in range(4):
                    assert (await stream(session, url)).is_whole
                assert (len(first.seen), len(second.seen)) == (1, 4)
                assert (await tell("/backends/remove", first.url))[0] == 200
                assert (await running).is_whole  # what it was working on came to its end
                assert (await tell("/backends/remove", first.url))[0] == 404
                async with session.get(f"{admin}/backends") as answer:
                    assert [one["url"] for one in (await answer.json())["backends"]] == [second.url]
                async with session.get(f"{admin}/status") as answer:
                    assert (await answer.json())["policy"] == "least_tokens"
            assert b"127.0.0.1:%d" % first.port not in router.instruments.page().split(b"vidur_ppo_in_flight", 1)[1]

    run(main())


def test_tls_on_both_sides(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {cert} -days 1 -subj /CN=localhost"
    subprocess.run([*command.split(), "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)

    async def main() -> None:
        backend = Backend(answers(200, OK))
        async with listening(backend), routing(backend, tls_cert=str(cert), tls_key=str(key)) as (_, url):
            secure = url.replace("http://", "https://")
            trust = ssl.create_default_context(cafile=str(cert))
            assert (await post(secure, ssl=trust))[0] == 200
            # The same router as a backend of another, which has to trust it.
            async with routing(secure, backend_ca=str(cert)) as (_, outer):
                assert (await post(outer))[0] == 200
            async with routing(secure) as (router, outer):
                assert (await post(outer))[0] == 503
                assert not router.fleet.backends[0].is_up

    run(main())


def test_a_client_that_takes_nothing_is_cut_off() -> None:
    async def endless(scope: Any, send: Any, receive: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(4000):
            await send({"type": "http.response.body", "body": b"data: x\n\n" * 2000, "more_body": True})

    async def main() -> None:
        backend = Backend(endless)
        async with listening(backend), routing(backend, client_timeout=1.0) as (router, url):
            _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]), limit=1024)
            body = json.dumps({**BODY, "stream": True}).encode()
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            )
            assert router.proxy is not None
            await _until(lambda: router.proxy.in_flight == 1)  # type: ignore[union-attr]
            await _until(lambda: router.proxy.in_flight == 0)  # type: ignore[union-attr]
            assert b'vidur_ppo_rejected_total{reason="slow_client"} 1.0' in router.instruments.page()
            writer.close()

    run(main())


def test_no_content_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        bad = Backend(events(2, breaks_after=1))
        async with listening(bad), routing(bad, shadow="round_robin") as (_, url):
            await post(url, {"model": "m", "prompt": "my secret", "stream": True})
            await post(url, {"model": "m", "prompt": "my secret"})

    with caplog.at_level("DEBUG"):
        run(main())
    assert caplog.records and "my secret" not in "".join(
        record.getMessage() for record in caplog.records if record.name.startswith("vidur_ppo_plugin")
    )


def test_neither_torch_nor_vidur_is_imported(tmp_path: Path) -> None:
    """The whole of `vidur-ppo serve` with a learned policy, a request through it, and then what was imported."""
    program = """
import asyncio, sys
from vidur_ppo_plugin import cli
from vidur_ppo_plugin.serve.router import Router
from vidur_ppo_plugin.serve.settings import ServeSettings
sys.path.insert(0, sys.argv[2])
from serving import Backend, answers, listening, routing
import aiohttp

async def main():
    backends = [Backend(answers(200, b"{}")), Backend(answers(200, b"{}"))]
    async with listening(*backends):
        async with routing(*backends, policy=sys.argv[1], shadow="least_tokens") as (router, url):
            async with aiohttp.ClientSession() as session:
                async with session.post(url + "/v1/completions", json={"prompt": "x"}) as answer:
                    assert answer.status == 200
            assert router.decider.num_fallbacks == 0

asyncio.run(main())
print([name for name in ("torch", "vidur", "numba", "numpy") if name in sys.modules])
"""
    policy = save_policy(tmp_path / "policy.npz")
    command = [sys.executable, "-c", program, str(policy), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['numba', 'numpy']"
