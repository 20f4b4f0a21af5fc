"""The JSON and the events of answers as vLLM writes them, for each API; the text is made up."""

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any, ClassVar

_TOKEN = " token"
_DONE = b"data: [DONE]\n\n"


class Reply:
    """One answer to a request, in one piece or as the events of a stream."""

    #: What identifiers begin with.
    prefix: ClassVar[str]
    #: Whether the events before the first token come when the request does.
    begins_at_once: ClassVar[bool] = False

    def __init__(self, model: str, prompt_tokens: int, request: dict[str, Any]) -> None:
        self.id = f"{self.prefix}{uuid.uuid4().hex}"
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._request = request
        self._created_s = int(time.time())

    def begin(self) -> bytes:
        """Events before the first token."""
        return b""

    def token(self, *, is_last: bool) -> bytes:
        """The event of a token."""
        raise NotImplementedError

    def end(self, output_tokens: int) -> bytes:
        """Events after the last token."""
        raise NotImplementedError

    def whole(self, output_tokens: int) -> bytes:
        """The answer in one piece."""
        raise NotImplementedError


class CompletionReply(Reply):
    """/v1/completions."""

    prefix = "cmpl-"
    _kinds: ClassVar[Sequence[str]] = ("text_completion", "text_completion")

    def __init__(self, model: str, prompt_tokens: int, request: dict[str, Any]) -> None:
        super().__init__(model, prompt_tokens, request)
        self._head = {"id": self.id, "object": self._kinds[0], "created": self._created_s, "model": model}
        self._events = [self._choice_event(reason) for reason in (None, "length")]

    def _choice(self, text: str, *, is_whole: bool) -> dict[str, Any]:
        return {"text": text}

    def token(self, *, is_last: bool) -> bytes:
        return self._events[is_last]

    def end(self, output_tokens: int) -> bytes:
        if not (self._request.get("stream_options") or {}).get("include_usage"):
            return _DONE
        return _event({**self._head, "choices": [], "usage": self._usage(output_tokens)}) + _DONE

    def whole(self, output_tokens: int) -> bytes:
        choice = {"index": 0, "finish_reason": "length", **self._choice(_TOKEN * output_tokens, is_whole=True)}
        head = {**self._head, "object": self._kinds[1]}
        return json.dumps({**head, "choices": [choice], "usage": self._usage(output_tokens)}).encode()

    def _choice_event(self, finish_reason: str | None) -> bytes:
        choice = {"index": 0, "finish_reason": finish_reason, **self._choice(_TOKEN, is_whole=False)}
        return _event({**self._head, "choices": [choice]})

    def _usage(self, output_tokens: int) -> dict[str, int]:
        prompt = self._prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": output_tokens, "total_tokens": prompt + output_tokens}


class ChatReply(CompletionReply):
    """/v1/chat/completions."""

    prefix = "chatcmpl-"
    _kinds = ("chat.completion.chunk", "chat.completion")

    def _choice(self, text: str, *, is_whole: bool) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}} if is_whole else {"delta": {"content": text}}

    def begin(self) -> bytes:
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return _event({**self._head, "choices": [choice]})


class EmbeddingReply(Reply):
    """/v1/embeddings: one vector for each input, and no tokens."""

    prefix = "embd-"

    def whole(self, output_tokens: int) -> bytes:
        given = self._request.get("input")
        count = len(given) if isinstance(given, list) and not isinstance(given[0], int) else 1
        data = [{"index": index, "object": "embedding", "embedding": [0.5] * 8} for index in range(count)]
        usage = {"prompt_tokens": self._prompt_tokens, "total_tokens": self._prompt_tokens, "completion_tokens": 0}
        head = {"id": self.id, "object": "list", "created": self._created_s, "model": self._model}
        return json.dumps({**head, "data": data, "usage": usage}).encode()


class ResponsesReply(Reply):
    """/v1/responses."""

    prefix = "resp_"
    begins_at_once = True

    def __init__(self, model: str, prompt_tokens: int, request: dict[str, Any]) -> None:
        super().__init__(model, prompt_tokens, request)
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._num_events = 0

    def begin(self) -> bytes:
        answer = self._answer("in_progress", output=[], usage=None)
        return b"".join(
            (
                self._event("response.created", response=answer),
                self._event("response.in_progress", response=answer),
                self._event("response.output_item.added", output_index=0, item=self._item("in_progress", "")),
                self._part_event("response.content_part.added", part=_text_part("")),
            )
        )

    def token(self, *, is_last: bool) -> bytes:
        return self._part_event("response.output_text.delta", delta=_TOKEN, logprobs=[])

    def end(self, output_tokens: int) -> bytes:
        text = _TOKEN * output_tokens
        return b"".join(
            (
                self._part_event("response.output_text.done", text=text, logprobs=[]),
                self._part_event("response.content_part.done", part=_text_part(text)),
                self._event("response.output_item.done", output_index=0, item=self._item("completed", text)),
                self._event("response.completed", response=json.loads(self.whole(output_tokens))),
            )
        )

    def whole(self, output_tokens: int) -> bytes:
        prompt = self._prompt_tokens
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + output_tokens,
        }
        output = [self._item("completed", _TOKEN * output_tokens)]
        return json.dumps(self._answer("incomplete", output=output, usage=usage)).encode()

    def _answer(self, status: str, *, output: list[Any], usage: dict[str, Any] | None) -> dict[str, Any]:
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        given = {name: self._request.get(name) for name in ("instructions", "previous_response_id")}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "incomplete_details": why,
            "model": self._model,
            **given,
            "tools": self._request.get("tools") or [],
            "output": output,
            "usage": usage,
        }

    def _item(self, status: str, text: str) -> dict[str, Any]:
        content = [_text_part(text)] if text else []
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part_event(self, name: str, **facts: Any) -> bytes:
        return self._event(name, item_id=self._item_id, output_index=0, content_index=0, **facts)

    def _event(self, name: str, **facts: Any) -> bytes:
        self._num_events += 1
        return _named_event({"type": name, "sequence_number": self._num_events - 1, **facts})


class MessagesReply(Reply):
    """/v1/messages, Anthropic's API."""

    prefix = "chatcmpl-"

    def begin(self) -> bytes:
        message = {**self._message(), "content": [], "usage": {"input_tokens": self._prompt_tokens, "output_tokens": 0}}
        block = {"type": "text", "text": ""}
        return _named_event({"type": "message_start", "message": message}) + _named_event(
            {"type": "content_block_start", "index": 0, "content_block": block}
        )

    def token(self, *, is_last: bool) -> bytes:
        delta = {"type": "text_delta", "text": _TOKEN}
        return _named_event({"type": "content_block_delta", "index": 0, "delta": delta})

    def end(self, output_tokens: int) -> bytes:
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": output_tokens}
        events: list[dict[str, Any]] = [
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": usage},
            {"type": "message_stop"},
        ]
        return b"".join(map(_named_event, events)) + _DONE

    def whole(self, output_tokens: int) -> bytes:
        content = [{"type": "text", "text": _TOKEN * output_tokens}]
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": output_tokens}
        return json.dumps({**self._message(), "content": content, "stop_reason": "max_tokens", "usage": usage}).encode()

    def _message(self) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self._model}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _named_event(value: dict[str, Any]) -> bytes:
    return f"event: {value['type']}\n".encode() + _event(value)
