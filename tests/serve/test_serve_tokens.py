"""Counting without a tokenizer: prompts in any body, what is learned from `usage`, tokens in streams however cut."""

import json
import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vidur_ppo_plugin.serve.endpoints import ENDPOINTS, model_in, named_model
from vidur_ppo_plugin.serve.prompts import TOKENS_PER_ATTACHMENT, TOKENS_PER_MESSAGE, PromptSize
from vidur_ppo_plugin.serve.tokens import MOST_HIDDEN_TOKENS, PromptCounter

CHAT = "/v1/chat/completions"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{number}",
            "description": "Looks up what the weather will be like. " * 5,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
    for number in range(20)
]


def size_of(path: str, body: dict[str, Any]) -> PromptSize:
    return ENDPOINTS[path].prompt_size(body, len(json.dumps(body)))


# --- What a body holds ---


@pytest.mark.parametrize(
    ("path", "body", "characters", "tokens"),
    [
        ("/v1/completions", {"prompt": "x" * 40}, 40, 0),
        ("/v1/completions", {"prompt": ["x" * 40, "y" * 2]}, 42, 0),
        ("/v1/completions", {"prompt": [5, 6, 7]}, 0, 3),
        ("/v1/completions", {"prompt": [[5, 6], [7]]}, 0, 3),
        ("/v1/embeddings", {"input": "x" * 40}, 40, 0),
        ("/v1/embeddings", {"input": ["x" * 40, "y" * 2]}, 42, 0),
        ("/v1/embeddings", {"input": [5, 6, 7]}, 0, 3),
        ("/v1/embeddings", {"input": [[5, 6], [7]]}, 0, 3),
        ("/v1/responses", {"input": "x" * 40, "instructions": "y" * 2}, 42, 0),
        (
            "/v1/responses",
            {
                "input": [
                    {"role": "user", "content": "x" * 40},
                    {"role": "user", "content": [{"type": "input_text", "text": "y" * 2}, {"type": "input_image"}]},
                    {"type": "function_call", "call_id": "z" * 99, "name": "f", "arguments": '{"a": 1}'},
                    {"type": "function_call_output", "call_id": "z" * 99, "output": "sunny"},
                    {"type": "item_reference", "id": "z" * 99},
                ]
            },
            40 + 2 + 1 + 8 + 5,
            5 * TOKENS_PER_MESSAGE + TOKENS_PER_ATTACHMENT,
        ),
        ("/v1/messages", {"system": "s" * 9, "messages": [{"role": "user", "content": "x"}]}, 10, TOKENS_PER_MESSAGE),
        (
            "/v1/messages",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"data": "A" * 99_999}}]},
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "z" * 99, "name": "f", "input": {}}]},
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "content": [{"type": "text", "text": "sunny"}]}],
                    },
                ]
            },
            1 + 5,
            3 * TOKENS_PER_MESSAGE + TOKENS_PER_ATTACHMENT,
        ),
        (
            CHAT,
            {
                "messages": [
                    {"role": "system", "content": "a" * 40},
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "b" * 40},
                            {"type": "image_url", "image_url": {"url": "data:" + "A" * 99_999}},
                        ],
                    },
                    {"role": "assistant", "content": None},
                ]
            },
            80,
            3 * TOKENS_PER_MESSAGE + TOKENS_PER_ATTACHMENT,
        ),
    ],
)
def test_prompts_of_every_path_are_read(path: str, body: dict[str, Any], characters: int, tokens: int) -> None:
    size = size_of(path, body)
    assert (size.characters, size.tokens) == (characters, tokens)


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
def test_tools_count_about_as_their_json(path: str) -> None:
    plain, written = size_of(path, {}).characters, len(json.dumps(TOOLS))
    assert 0.8 * written < size_of(path, {"tools": TOOLS}).characters - plain <= written


@pytest.mark.parametrize(
    ("path", "field"), [(CHAT, "functions"), (CHAT, "response_format"), (CHAT, "documents"), ("/v1/responses", "text")]
)
def test_schemas_and_documents_count(path: str, field: str) -> None:
    assert size_of(path, {field: {"schema": TOOLS}}).characters > 0.8 * len(json.dumps(TOOLS))


def test_calls_of_tools_and_their_results_count() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}' * 9}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny" * 9},
    ]
    counted = size_of(CHAT, {"messages": messages}).characters
    assert 9 * (16 + 5) < counted < len(json.dumps(messages))


# --- Whatever a client sends ---

WORDS = """model messages prompt input instructions system tools text content role type name arguments output tool_calls
max_tokens max_output_tokens stream previous_response_id source image_url"""
NAMES = st.sampled_from(WORDS.split())
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES | st.text(max_size=3), inner, max_size=4),
    max_leaves=25,
)


@pytest.mark.parametrize("path", list(ENDPOINTS))
@given(body=st.dictionaries(NAMES, VALUES, max_size=6))
def test_any_body_has_at_least_one_token_and_none_raises(path: str, body: dict[str, Any]) -> None:
    endpoint = ENDPOINTS[path]
    size = size_of(path, body)
    assert PromptCounter().count(named_model(body), size) >= 1
    assert size.characters <= len(json.dumps(body))
    limit = endpoint.output_limit(body)
    assert limit is None or limit >= 0
    assert endpoint.is_streaming(body) in (True, False)
    assert isinstance(endpoint.previous_response(body), str)


@given(st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_the_model_of_any_body_is_a_text(body: bytes) -> None:
    assert isinstance(model_in(body), str)


def nested(depth: int, is_list: bool) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value] if is_list else {"content": value}
    return value


@pytest.mark.parametrize("is_list", [True, False])
@pytest.mark.parametrize("path", list(ENDPOINTS))
def test_depth_does_not_matter(path: str, is_list: bool) -> None:
    deep = nested(100_000, is_list)  # deeper than json.loads would read it
    for field in (*ENDPOINTS[path].prompt, *ENDPOINTS[path].schemas, "model"):
        ENDPOINTS[path].prompt_size({field: deep}, 10)
    assert named_model({"model": deep}) == ""
    if path != "/v1/embeddings":  # 40,000 levels are within what is looked at
        assert ENDPOINTS[path].prompt_size({ENDPOINTS[path].prompt[-1]: nested(40_000, is_list)}, 10).characters == 1


@pytest.mark.parametrize(
    "values",
    [
        [[] for _ in range(1_000_000)],
        [1] * 2_000_000,
        ["x"] * 1_000_000,
        [{"role": "user"} for _ in range(300_000)],
        [{"content": [{"text": "x"}] * 10} for _ in range(100_000)],
        [{"tool_calls": [0] * 1_000_000}],
    ],
    ids=["lists", "ids", "texts", "messages", "parts", "calls"],
)
def test_huge_bodies_take_bounded_time_and_are_not_taken_for_short(values: list[Any]) -> None:
    num_bytes = len(json.dumps(values))
    for path, field in ((CHAT, "messages"), ("/v1/responses", "input"), ("/v1/completions", "prompt")):
        begun_s = time.process_time()
        size = ENDPOINTS[path].prompt_size({field: values}, num_bytes)
        assert time.process_time() - begun_s < 0.5
        assert size.characters == num_bytes or size.token_ids == len(values)


# --- What is learned ---


def test_before_any_answer_a_token_is_four_characters_and_afterwards_what_backends_said() -> None:
    counter = PromptCounter()
    text = PromptSize(characters=400)
    assert counter.count("m", text) == 100
    counter.learn("m", text, 200)
    assert counter.count("m", text) == 200
    assert counter.count("another", text) == 100
    for _ in range(500):
        counter.learn("m", text, 50)
    assert counter.count("m", text) == 50


@given(st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)), max_size=100), st.integers(0, 10**7))
def test_estimates_stay_in_bounds_whatever_backends_say(said: list[tuple[int, int]], characters: int) -> None:
    counter = PromptCounter()
    for length, tokens in said:
        counter.learn("m", PromptSize(characters=length), tokens)
    count = counter.count("m", PromptSize(characters=characters))
    assert max(1, round(characters / 8)) <= count <= max(1, characters + MOST_HIDDEN_TOKENS)


@given(st.data())
def test_a_minority_of_odd_answers_moves_nothing_out_of_the_range_of_the_others(data: st.DataObject) -> None:
    sane = data.draw(st.lists(st.tuples(st.integers(300, 9000), st.floats(3.0, 5.0)), min_size=9, max_size=60))
    odd = data.draw(st.lists(st.tuples(st.integers(1, 9000), st.integers(1, 10**6)), max_size=(len(sane) - 1) // 2))
    answers = [(length, round(length / ratio)) for length, ratio in sane] + odd
    random.Random(1).shuffle(answers)
    counter = PromptCounter()
    for length, tokens in [*answers, *[(2, 1)] * 8]:  # the last ones make it look at all
        counter.learn("m", PromptSize(characters=length), tokens)
    assert 0.9 * 10_000 / 5 <= counter.count("m", PromptSize(characters=10_000)) <= 1.1 * 10_000 / 3 + 256


def test_three_short_chats_with_tools_do_not_make_the_estimate_run_away() -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    counter = PromptCounter()
    for _ in range(3):
        counter.learn("m", size_of(CHAT, chat), 2000)
    assert 500 <= counter.count("m", size_of(CHAT, {"messages": [{"content": "x" * 4000}]})) <= 2000
    assert counter.count("m", size_of(CHAT, chat)) == pytest.approx(2000, rel=0.02)


def test_short_chats_tell_what_the_template_adds_and_not_how_long_tokens_are() -> None:
    counter, short = PromptCounter(), PromptSize(characters=20, messages=1)
    for _ in range(20):
        counter.learn("m", short, 45)
    assert counter.count("m", short) == 45
    assert counter.count("m", PromptSize(characters=4000, messages=1)) == 1000 + 40  # the tokens the template adds
    assert counter.count("m", PromptSize(token_ids=7)) == 7  # no template is around token ids


def test_memory_is_bounded() -> None:
    counter = PromptCounter()
    for number in range(1000):
        counter.learn(f"model-{number}", PromptSize(characters=400), 200)
    assert counter.count("model-0", PromptSize(characters=400)) == 200
    assert counter.count("model-999", PromptSize(characters=400)) == 100  # one too many to learn about


# --- Streams ---

STREAMS = {
    CHAT: b'data: {"text":"%s\\n\\n"}\n\n',
    "/v1/responses": b'event: response.output_text.delta\ndata: {"delta":"%s.delta\\ndata:\\n\\n"}\n\n',
    "/v1/messages": b'event: content_block_delta\ndata: {"delta":{"text":"%s content_block_delta\\ndata:"}}\n\n',
}
ENDS = {
    CHAT: b'data: {"choices":[],"usage":{"prompt_tokens":123,"total_tokens":579,"completion_tokens":456}}',
    "/v1/responses": b'event: response.completed\ndata: {"response":{"usage":{"input_tokens":123,'
    b'"input_tokens_details":{"cached_tokens":7},"output_tokens":456,"total_tokens":579}}}',
    "/v1/messages": b'event: message_delta\ndata: {"usage":{"input_tokens":100,"cache_read_input_tokens":20,'
    b'"cache_creation_input_tokens":3,"output_tokens":456}}',
}


@pytest.mark.parametrize("path", list(STREAMS))
@given(st.lists(st.integers(0, 300), min_size=1, max_size=20), st.lists(st.integers(1, 40), max_size=60))
def test_tokens_and_usage_are_counted_wherever_the_pieces_are_cut(path: str, sizes: list[int], cuts: list[int]) -> None:
    text = b"".join(STREAMS[path] % (b"x" * size) for size in sizes) + ENDS[path]
    counter, total, position = ENDPOINTS[path].counter(), 0, 0
    for cut in [*cuts, *[9] * (len(text) // 9), len(text)]:
        if text[position : position + cut]:
            total += counter.feed(text[position : position + cut])
        position += cut
    assert total == len(sizes)
    assert (counter.prompt_tokens, counter.completion_tokens) == (123, 456)


def test_events_that_are_no_tokens_are_not_counted() -> None:
    counter = ENDPOINTS["/v1/messages"].counter()
    begin = b'event: message_start\ndata: {"message":{"usage":{"input_tokens":9,"output_tokens":0}}}\n\n'
    assert counter.feed(begin + b'event: content_block_start\ndata: {"index":0}\n\nevent: ping\ndata: {}\n\n') == 0
    assert (counter.prompt_tokens, counter.completion_tokens) == (9, None)
    counter = ENDPOINTS["/v1/responses"].counter()
    assert counter.feed(b'event: response.created\ndata: {"response":{"usage":null}}\n\n') == 0
    assert counter.feed(b'event: response.function_call_arguments.delta\ndata: {"delta":"{"}\n\n') == 1
    assert counter.feed(b'event: response.output_text.done\ndata: {"text":"x"}\n\n') == 0


@settings(max_examples=30)
@given(st.sampled_from(list(ENDPOINTS)), st.binary(max_size=400))
def test_whatever_a_backend_sends_is_counted_without_harm(path: str, piece: bytes) -> None:
    counter = ENDPOINTS[path].counter()
    counter.read_whole(piece + b'"usage": {"completion_tokens": ' + b"9" * 5000)
    assert counter.feed(piece) >= 0
    assert isinstance(ENDPOINTS[path].response_id(piece), str)


def test_usage_is_taken_over_and_text_about_it_is_not() -> None:
    counter = ENDPOINTS[CHAT].counter()
    counter.feed(b'data: {"text":"\\"completion_tokens\\": 5"}\n\n')
    assert counter.completion_tokens is None
    whole = ENDPOINTS["/v1/responses"].counter()
    whole.read_whole(b'{"tools":[{"input_tokens":1,"output_tokens":2}],"usage":{"input_tokens":7,"output_tokens":3}}')
    assert (whole.prompt_tokens, whole.completion_tokens) == (7, 3)
