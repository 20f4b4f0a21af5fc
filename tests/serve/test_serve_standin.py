"""All APIs end to end: a router and stand-ins of vLLM as processes, each path streamed and in one piece."""

import asyncio
import json
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from serving import Process, router_process, stand_ins

MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "x" * 400}]}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d" * 4000, "parameters": {}}}]
#: A request to each path, how many prompt tokens it has at four characters each, and the names of its usage.
REQUESTS: dict[str, tuple[dict[str, Any], int, tuple[str, str]]] = {
    "/v1/completions": ({"prompt": "x" * 400, "max_tokens": 7}, 100, ("prompt_tokens", "completion_tokens")),
    "/v1/chat/completions": ({"messages": MESSAGES, "max_tokens": 7}, 100, ("prompt_tokens", "completion_tokens")),
    "/v1/responses": ({"input": MESSAGES, "max_output_tokens": 7}, 100, ("input_tokens", "output_tokens")),
    "/v1/messages": (
        {"system": "y" * 40, "messages": MESSAGES, "max_tokens": 7},
        110,
        ("input_tokens", "output_tokens"),
    ),
    "/v1/embeddings": ({"input": ["x" * 400, "y" * 40]}, 110, ("prompt_tokens", "completion_tokens")),
}
STREAMED = [path for path in REQUESTS if path != "/v1/embeddings"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serving")


@pytest.fixture(scope="module")
def backends(directory: Path) -> Iterator[list[Process]]:
    with stand_ins(directory, ("--model", "a"), ("--model", "b"), ("--model", "b")) as processes:
        yield processes


@pytest.fixture(scope="module")
def router(directory: Path, backends: list[Process]) -> Iterator[Process]:
    with router_process(directory, backends, "--policy", "round_robin") as process:
        yield process


async def post(url: str, body: dict[str, Any]) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
        return answer.status, await answer.read()


def ask(router: Process, path: str, body: dict[str, Any]) -> Any:
    status, text = asyncio.run(post(f"{router.url}{path}", body))
    assert status == 200, text
    return json.loads(text)


def events_of(text: bytes) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("model", ["a", "b"])
@pytest.mark.parametrize("path", list(REQUESTS))
def test_answers_in_one_piece(router: Process, path: str, model: str) -> None:
    body, prompt_tokens, (prompt, output) = REQUESTS[path]
    answer = ask(router, path, {**body, "model": model})
    assert answer["model"] == model
    num_tokens = 0 if path == "/v1/embeddings" else 7
    assert (answer["usage"][prompt], answer["usage"][output]) == (prompt_tokens, num_tokens)
    if path == "/v1/embeddings":
        assert [vector["index"] for vector in answer["data"]] == [0, 1]
    elif path == "/v1/responses":
        assert answer["output"][0]["content"][0]["text"].split() == ["token"] * 7
    elif path == "/v1/messages":
        assert answer["content"][0]["text"].split() == ["token"] * 7


@pytest.mark.parametrize("path", STREAMED)
def test_streams(router: Process, path: str) -> None:
    body, prompt_tokens, (prompt, output) = REQUESTS[path]
    body = {**body, "model": "b", "stream": True, "stream_options": {"include_usage": True}}
    status, text = asyncio.run(post(f"{router.url}{path}", body))
    events = events_of(text)
    assert status == 200
    names = [line[7:] for line in text.decode().splitlines() if line.startswith("event: ")]
    assert names == ([event["type"] for event in events] if "type" in events[0] else [])
    usages = [event.get("usage") or event.get("response", {}).get("usage") for event in events]
    usage = next(usage for usage in reversed(usages) if usage)
    assert (usage[prompt], usage[output]) == (prompt_tokens, 7)
    kinds = Counter(names)
    if path == "/v1/responses":
        assert (names[0], names[-1]) == ("response.created", "response.completed")
        assert kinds["response.output_text.delta"] == 7
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
    elif path == "/v1/messages":
        assert (names[0], names[-1]) == ("message_start", "message_stop")
        assert kinds["content_block_delta"] == 7
    else:
        assert text.endswith(b"data: [DONE]\n\n")


def estimated_tokens(router: Process) -> float:
    with urllib.request.urlopen(f"{router.url}/metrics", timeout=5) as page:
        lines = page.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith("vidur_ppo_prompt_tokens_total ")).split()[1])


def test_tools_are_part_of_the_prompt_there_and_in_the_estimate(router: Process) -> None:
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
        body, prompt_tokens, (prompt, _) = REQUESTS[path]
        before = estimated_tokens(router)
        told = ask(router, path, {**body, "model": "a", "tools": TOOLS})["usage"][prompt]
        assert told == pytest.approx(prompt_tokens + 1000, abs=40)
        assert estimated_tokens(router) - before == pytest.approx(told, rel=0.1)


def test_what_cannot_be_is_refused_by_the_backend(router: Process) -> None:
    for path, body in (
        ("/v1/messages", {"messages": MESSAGES}),  # max_tokens is required
        ("/v1/responses", {"max_output_tokens": 5}),
        ("/v1/embeddings", {"input": []}),
        ("/v1/embeddings", {"input": "x" * 999_999}),
        ("/v1/responses", {"input": "x", "max_output_tokens": "many"}),
    ):
        status, text = asyncio.run(post(f"{router.url}{path}", {**body, "model": "a"}))
        assert (status, "error" in json.loads(text)) == (400, True), path
    status, _ = asyncio.run(post(f"{router.url}/v1/embeddings", {"input": "x", "model": "nobody's"}))
    assert status == 404


def test_responses_are_found_and_gone_on_from_whichever_backend_has_them(router: Process) -> None:
    async def main() -> None:
        async with aiohttp.ClientSession() as session:
            body = {"model": "b", "input": "x" * 400, "max_output_tokens": 10}
            for is_stream in (False, True) * 2:  # round robin alone would send each turn elsewhere
                total, previous = 0, None
                for _ in range(4):
                    turn = {**body, "stream": is_stream, "previous_response_id": previous}
                    async with session.post(f"{router.url}/v1/responses", json=turn) as answer:
                        text = await answer.read()
                        assert answer.status == 200, text
                    response = events_of(text)[-1]["response"] if is_stream else json.loads(text)
                    assert response["usage"]["input_tokens"] == total + 100
                    total, previous = response["usage"]["total_tokens"], response["id"]
                    async with session.get(f"{router.url}/v1/responses/{previous}") as answer:
                        assert (answer.status, (await answer.json())["id"]) == (200, previous)
                    async with session.post(f"{router.url}/v1/responses/{previous}/cancel") as answer:
                        assert answer.status == 400  # vLLM cancels only what runs in the background
            async with session.get(f"{router.url}/v1/responses/resp_unknown") as answer:
                assert answer.status == 404

    asyncio.run(asyncio.wait_for(main(), 60))
