"""Paths beyond completions, against scripted backends: placed, retried, recorded, sent where the model is."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from serving import Backend, answers, listening, routing, run

INPUTS = {
    "/v1/completions": {"prompt": "x" * 4000},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x" * 4000}]},
    "/v1/responses": {"input": "x" * 4000},
    "/v1/messages": {"max_tokens": 9, "messages": [{"role": "user", "content": "x" * 4000}]},
    "/v1/embeddings": {"input": "x" * 4000},
}
USAGE = {
    "/v1/responses": {"input_tokens": 1234, "output_tokens": 56},
    "/v1/messages": {"input_tokens": 1234, "output_tokens": 56},
    "/v1/embeddings": {"prompt_tokens": 1234, "total_tokens": 1234},
}
NEW_PATHS = list(USAGE)
STREAMS = {
    "/v1/responses": (
        'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_1","usage":null}}\n\n',
        'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"t"}\n\n',
        'event: response.completed\ndata: {"type":"response.completed","response":{"id":"resp_1","usage":'
        '{"input_tokens":1234,"output_tokens":%d}}}\n\n',
    ),
    "/v1/messages": (
        'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":1234,'
        '"output_tokens":0}}}\n\n',
        'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta","text":"t"}}\n\n',
        'event: message_delta\ndata: {"type":"message_delta","usage":{"input_tokens":1234,"output_tokens":%d}}\n\n'
        'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    ),
}


def whole(path: str, **facts: Any) -> Any:
    """A backend's answer in one piece."""
    return answers(200, json.dumps({"id": "resp_1", **facts, "usage": USAGE[path]}).encode())


def streamed(path: str, count: int, *, breaks: bool = False, before_s: float = 0.0) -> Any:
    """A backend's stream of so many tokens; it breaks off before its end, if told to."""
    begin, token, end = (text.encode() for text in STREAMS[path])

    async def reply(scope: Any, send: Any, receive: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": begin, "more_body": True})
        await asyncio.sleep(before_s)
        for _ in range(count):
            await send({"type": "http.response.body", "body": token, "more_body": True})
        if breaks:
            await asyncio.sleep(0.1)
            raise RuntimeError("broken on purpose")
        await send({"type": "http.response.body", "body": end % count})

    return reply


async def ask(url: str, path: str, body: Any = None, method: str = "POST", **options: Any) -> tuple[int, bytes]:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"{url}{path}", json=body, **options) as answer,
    ):
        return answer.status, await answer.read()


def recorded(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def figure(page: bytes, name: str) -> float:
    return float(next(line for line in page.decode().splitlines() if line.startswith(f"{name} ")).split()[1])


@pytest.mark.parametrize("path", NEW_PATHS)
def test_they_are_placed_by_the_policy_and_recorded(path: str, tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"

    async def main() -> None:
        # By requests in flight alone everything would go to the first backend.
        backends = [Backend(whole(path)), Backend(whole(path))]
        async with (
            listening(*backends),
            routing(*backends, policy="round_robin", record=str(record)) as (router, url),
        ):
            for _ in range(6):
                assert (await ask(url, path, {"model": "m", **INPUTS[path]}))[0] == 200
            assert [len(backend.seen) for backend in backends] == [3, 3]
            assert f'path="{path}"' in router.instruments.page().decode()
            assert router.source.snapshot(0.0).outstanding_requests.sum() == 0

    run(main())
    decisions = recorded(record)
    assert len(decisions) == 6
    first = decisions[0]
    assert first["prompt_tokens"] == pytest.approx(1000, abs=5)  # estimated at four characters a token
    assert decisions[-1]["prompt_tokens"] == pytest.approx(1234, abs=1)  # learned from the answers
    outcome = first["outcome"]
    assert (outcome["status"], outcome["prompt_tokens"]) == ("ok", 1234)
    assert outcome["output_tokens"] == USAGE[path].get("output_tokens", 0)


@pytest.mark.parametrize("path", list(STREAMS))
def test_streams_are_counted_by_their_tokens(path: str, tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"

    async def main() -> None:
        backend = Backend(streamed(path, 5, before_s=0.3))
        async with listening(backend), routing(backend, record=str(record)) as (router, url):
            task = asyncio.create_task(ask(url, path, {**INPUTS[path], "stream": True}))
            await asyncio.sleep(0.2)
            # Its first event is there, no token is: the prompt is still to be prefilled.
            assert router.source.snapshot(0.0).prefill_tokens.sum() == pytest.approx(1000, abs=5)
            status, text = await task
            assert (status, text.count(b"delta\ndata:")) == (200, 5 + (path == "/v1/messages"))
            page = router.instruments.page()
            assert figure(page, "vidur_ppo_time_to_first_token_seconds_sum") > 0.25
            assert figure(page, "vidur_ppo_output_tokens_total") == 5

    run(main())
    outcome = recorded(record)[0]["outcome"]
    assert (outcome["status"], outcome["prompt_tokens"], outcome["output_tokens"]) == ("ok", 1234, 5)
    assert 0.25 < outcome["ttft_s"] <= outcome["latency_s"]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", NEW_PATHS)
def test_they_are_tried_elsewhere_before_the_first_byte(path: str, is_stream: bool) -> None:
    async def main() -> None:
        unwell = Backend(answers(503, b"loading"))
        is_streamed = is_stream and path in STREAMS
        well = Backend(streamed(path, 3) if is_streamed else whole(path))
        async with listening(unwell, well), routing(unwell, well, policy="round_robin") as (router, url):
            for _ in range(4):
                body = {**INPUTS[path], "model": "m", "stream": is_stream}
                assert (await ask(url, path, body))[0] == 200
            assert unwell.seen and len(well.seen) == 4
            assert "vidur_ppo_retries_total 0.0" not in router.instruments.page().decode()

    run(main())


@pytest.mark.parametrize("path", list(STREAMS))
def test_a_stream_that_breaks_ends_with_an_event_that_its_clients_know(path: str) -> None:
    async def main() -> None:
        backend = Backend(streamed(path, 2, breaks=True))
        async with listening(backend), routing(backend) as (_, url):
            _, text = await ask(url, path, {**INPUTS[path], "stream": True})
            *_, last, nothing = text.decode().split("\n\n")
            name, _, data = last.partition("\ndata: ")
            assert (name, nothing) == ("event: error", "")
            error = json.loads(data)
            assert error["type"] == "error" and error["error"]["message"] == error["message"]
            assert error["error"]["type"] == "server_error" and error["code"] == "502"

    run(main())


# --- The model ---


@pytest.mark.parametrize(
    "path", [*NEW_PATHS, "/v1/rerank", "/v1/score", "/tokenize", "/v1/messages/count_tokens", "/v1/responses/x/cancel"]
)
def test_every_path_goes_where_the_model_is(path: str) -> None:
    async def main() -> None:
        reply = answers(200, b"{}")
        first, second = Backend(reply, models=("a",)), Backend(reply, models=("b",))
        async with listening(first, second), routing(first, second) as (_, url):
            for _ in range(4):
                assert (await ask(url, path, {**INPUTS.get(path, {}), "model": "b"}))[0] == 200
            assert (len(first.seen), len(second.seen)) == (0, 4)

    run(main())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/v1/rerank"])
def test_a_model_that_nobody_has_is_for_a_backend_to_refuse_and_one_that_is_away_is_waited_for(path: str) -> None:
    async def main() -> None:
        refuses = answers(404, b'{"error":"no such model"}')
        first, second = Backend(refuses, models=("a",)), Backend(refuses, models=("b",))
        async with listening(first, second), routing(first, second) as (router, url):
            body = {"prompt": "x", "input": "x"}
            assert await ask(url, path, {**body, "model": "c"}) == (404, b'{"error":"no such model"}')
            seen = len(first.seen)
            second.health_status = 503
            while router.fleet.backends[1].is_up:
                await asyncio.sleep(0.02)
            assert (await ask(url, path, {**body, "model": "b"}))[0] == 503
            assert len(first.seen) == seen

    run(main())


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"--multipart", b'{"model": 7}', b'{"model": "nobody"}'])
def test_bodies_that_name_no_model_pass_as_they_are(body: bytes) -> None:
    async def main() -> None:
        backend = Backend(answers(200, b"{}"))
        async with listening(backend), routing(backend) as (_, url), aiohttp.ClientSession() as session:
            async with session.post(f"{url}/v1/audio/transcriptions", data=body) as answer:
                assert answer.status == 200
            assert backend.bodies == [body]

    run(main())


@pytest.mark.parametrize("path", list(INPUTS))
def test_whatever_stands_for_the_model_or_the_prompt_the_router_does_not_fail(path: str) -> None:
    deep = b"[" * 700 + b"]" * 700

    async def main() -> None:
        backend = Backend(answers(400, b"refused"))
        async with listening(backend), routing(backend) as (_, url), aiohttp.ClientSession() as session:
            fields = ("model", "messages", "prompt", "input", "tools", "system", "stream", "max_tokens")
            for field in fields:
                for value in (b"%b" % deep, b"9" * 4000, b'"\\ud800"', b"[[[1]], {}, null]", b'{"a": 1e999}', b"true"):
                    async with session.post(f"{url}{path}", data=b'{"%b": %b}' % (field.encode(), value)) as answer:
                        assert (answer.status, await answer.read()) == (400, b"refused"), (field, value[:20])
                        assert backend.bodies.pop()

    run(main())


@pytest.mark.parametrize("path", list(INPUTS))
def test_no_depth_of_a_body_makes_the_router_fail(path: str) -> None:
    async def main() -> None:
        backend = Backend(answers(400, b"refused"))
        async with listening(backend), routing(backend) as (_, url), aiohttp.ClientSession() as session:
            # Around what json.loads reads, which depends on the version of Python.
            for depth in (*range(930, 1000, 5), 2000, 5000, 20_000, 100_000):
                deep = b'{"prompt": %b, "input": %b}' % ((b"[" * depth + b"]" * depth,) * 2)
                async with session.post(f"{url}{path}", data=deep) as answer:
                    assert answer.status == 400, depth

    run(main())


# --- Answers that a backend keeps ---


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_goes_on_from_a_response_or_asks_for_it_goes_where_it_is(is_stream: bool, tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"

    async def main() -> None:
        path = "/v1/responses"
        reply = streamed(path, 50) if is_stream else whole(path, previous_response_id=None)
        backends = [Backend(reply), Backend(reply), Backend(reply)]
        async with (
            listening(*backends),
            routing(*backends, policy="round_robin", record=str(record)) as (router, url),
        ):
            body = {"model": "m", "input": "x" * 40, "stream": is_stream}
            await ask(url, path, body)
            home = next(backend for backend in backends if backend.seen)
            home.seen.clear()
            for _ in range(3):
                assert (await ask(url, path, {**body, "previous_response_id": "resp_1"}))[0] == 200
            for method, tail in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
                assert (await ask(url, f"{path}/resp_1{tail}", method=method))[0] == 200
            assert len(home.seen) == 7
            assert sum(len(backend.seen) for backend in backends) == 7
            # One that nobody has heard of goes anywhere.
            for _ in range(3):
                assert (await ask(url, path, {**body, "previous_response_id": "resp_2"}))[0] == 200
            assert all(backend.seen for backend in backends)
            assert router.proxy is not None and router.proxy.in_flight == 0

    run(main())
    decisions = recorded(record)
    assert decisions[0]["prompt_tokens"] < 20
    # What it goes on from is part of the prompt.
    assert decisions[1]["prompt_tokens"] >= 1234 + 50
    assert sum(decisions[1]["available"]) == 1 and decisions[1]["p"] == 1.0


def test_what_is_about_a_response_goes_to_its_backend_while_it_drains_and_waits_for_it_while_it_is_down() -> None:
    async def main() -> None:
        path = "/v1/responses"
        backends = [Backend(whole(path)), Backend(whole(path))]
        async with listening(*backends), routing(*backends) as (router, url):
            await ask(url, path, {"input": "x"})
            home = next(backend for backend in backends if backend.seen)
            member = next(one for one in router.fleet.backends if one.url == home.url)
            member.is_draining = True
            assert (await ask(url, path, {"input": "x", "previous_response_id": "resp_1"}))[0] == 200
            assert len(home.seen) == 2
            home.health_status = 503
            while member.is_up:
                await asyncio.sleep(0.02)
            assert (await ask(url, path, {"input": "x", "previous_response_id": "resp_1"}))[0] == 503
            assert (await ask(url, f"{path}/resp_1", method="GET"))[0] == 503
            router.fleet.remove(member)  # then the others may say that they do not have it
            assert (await ask(url, f"{path}/resp_1", method="GET"))[0] == 200
            assert len(home.seen) == 2

    run(main())


def test_the_memory_of_responses_is_bounded() -> None:
    async def main() -> None:
        count = 0

        async def reply(scope: Any, send: Any, receive: Any) -> None:
            nonlocal count
            count += 1
            await answers(200, b'{"id": "resp_%d"}' % count)(scope, send, receive)

        backend = Backend(reply)
        async with listening(backend), routing(backend) as (router, url):
            assert router.proxy is not None
            kept = router.proxy._generation.stored_responses
            await ask(url, "/v1/responses", {"input": "x"})
            member = router.fleet.backends[0]
            assert kept.backend_of("/v1/responses/resp_1") is member
            for number in range(20_000):
                kept.add(f"other_{number}", member, 0)
            assert len(kept) == 16_384
            assert kept.find("resp_1") is None and kept.find("other_19999") is not None

    run(main())


# --- The estimate, seen from outside ---


def test_short_chats_with_tools_do_not_spoil_the_estimate_for_others() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "d" * 7900, "parameters": {}}}
    chat = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool]}

    async def main() -> None:
        usage = b'{"usage": {"prompt_tokens": 2000, "completion_tokens": 1}}'
        backend = Backend(answers(200, usage))
        async with listening(backend), routing(backend) as (router, url):
            for _ in range(3):
                await ask(url, "/v1/chat/completions", chat)
            before = figure(router.instruments.page(), "vidur_ppo_prompt_tokens_total")
            await ask(url, "/v1/chat/completions", INPUTS["/v1/chat/completions"])
            estimate = figure(router.instruments.page(), "vidur_ppo_prompt_tokens_total") - before
            assert 500 <= estimate <= 4300  # at 8 to 1 characters a token, and what a template may add

    run(main())
