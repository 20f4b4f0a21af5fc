"""The paths whose requests the policy places: how to read each one's prompt, limit, usage, and stream.

One row of the table is all that a further path takes.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from .http import HttpError
from .prompts import PromptSize, prompt_size
from .tokens import StreamCounter, UsagePattern

_OPENAI_USAGE = UsagePattern(("prompt_tokens",), "completion_tokens")
_RESPONSES_USAGE = UsagePattern(("input_tokens",), "output_tokens")
# Anthropic's clients are told apart what was cached; all of it is the prompt.
_MESSAGES_USAGE = UsagePattern(
    ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"), "output_tokens"
)
_ANSWER_ID = re.compile(rb'"id":\s*"([^"\\]{1,128})"')
# The identifier stands before everything that is long.
_ID_WITHIN_BYTES = 4096


@dataclass(frozen=True)
class Endpoint:
    """A path whose requests are placed, and how to read them and their answers."""

    path: str
    #: Fields of the body that hold the prompt: texts, messages, or token ids.
    prompt: tuple[str, ...]
    usage: UsagePattern
    #: Fields whose JSON gets into the prompt.
    schemas: tuple[str, ...] = ()
    #: Fields that limit the output, the first one that is there counts.
    output_limits: tuple[str, ...] = ()
    #: What each event of a stream that carries a token has once; None if there are no streams and no output tokens.
    token_mark: bytes | None = None
    #: Whether the events of its streams have names.
    has_named_events: bool = False
    #: Whether a backend keeps its answers, for later requests to ask for and to follow.
    keeps_answers: bool = False

    def prompt_size(self, body: dict[str, Any], num_bytes: int) -> PromptSize:
        """The size of the prompt in a body of so many bytes."""
        return prompt_size(body, prompt=self.prompt, schemas=self.schemas, num_bytes=num_bytes)

    def output_limit(self, body: dict[str, Any]) -> int | None:
        """Most tokens of the output, if the request says so."""
        if self.token_mark is None:
            return 0
        for name in self.output_limits:
            value = body.get(name)
            if isinstance(value, int) and value > 0:
                return value
        return None

    def is_streaming(self, body: dict[str, Any]) -> bool:
        """Whether the answer will be a stream."""
        return self.token_mark is not None and body.get("stream") is True

    def counter(self) -> StreamCounter:
        """A counter of the tokens of one answer."""
        return StreamCounter(self.usage, self.token_mark or b"\n\n")

    def previous_response(self, body: dict[str, Any]) -> str:
        """The identifier of the stored response that a request goes on from; empty if there is none."""
        followed = body.get("previous_response_id") if self.keeps_answers else None
        return followed if isinstance(followed, str) else ""

    def response_id(self, beginning: bytes) -> str:
        """The identifier of a stored response, read from the beginning of its answer; empty if there is none."""
        found = _ANSWER_ID.search(beginning, 0, _ID_WITHIN_BYTES) if self.keeps_answers else None
        return found[1].decode("utf-8", "replace") if found is not None else ""

    def last_events(self, error: HttpError) -> bytes:
        """How a stream that has begun ends when the backend fails: with an error that clients of this path know."""
        if not self.has_named_events:
            return b"data: " + error.body + b"\n\ndata: [DONE]\n\n"
        # Anthropic's clients read `error`, those of /v1/responses `code` and `message`.
        details = {"type": error.kind, "message": error.message}
        event = {"type": "error", "error": details, "code": str(error.status), "message": error.message, "param": None}
        return b"event: error\ndata: " + json.dumps(event).encode() + b"\n\n"


_TABLE = (
    Endpoint(
        "/v1/completions",
        prompt=("prompt",),
        usage=_OPENAI_USAGE,
        output_limits=("max_tokens",),
        token_mark=b"\n\n",
    ),
    Endpoint(
        "/v1/chat/completions",
        prompt=("messages",),
        usage=_OPENAI_USAGE,
        schemas=("tools", "functions", "response_format", "documents"),
        output_limits=("max_completion_tokens", "max_tokens"),
        token_mark=b"\n\n",
    ),
    Endpoint(
        "/v1/responses",
        prompt=("instructions", "input"),
        usage=_RESPONSES_USAGE,
        schemas=("tools", "text"),
        output_limits=("max_output_tokens",),
        token_mark=b".delta\ndata:",
        has_named_events=True,
        keeps_answers=True,
    ),
    Endpoint(
        "/v1/messages",
        prompt=("system", "messages"),
        usage=_MESSAGES_USAGE,
        schemas=("tools",),
        output_limits=("max_tokens",),
        token_mark=b"content_block_delta\ndata:",
        has_named_events=True,
    ),
    Endpoint("/v1/embeddings", prompt=("input", "messages"), usage=_OPENAI_USAGE),
)
ENDPOINTS = {endpoint.path: endpoint for endpoint in _TABLE}


def named_model(body: Any) -> str:
    """The model that the JSON of a request names; empty if it names none."""
    model = body.get("model") if isinstance(body, dict) else None
    return model if isinstance(model, str) else ""


def model_in(body: bytes) -> str:
    """The model that a body names, whatever it is; empty if it is no JSON or names none."""
    if not body[:64].lstrip().startswith(b"{"):
        return ""
    try:
        return named_model(json.loads(body))
    except (ValueError, RecursionError):
        return ""
