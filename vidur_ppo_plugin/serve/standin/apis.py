"""The APIs that the stand-in speaks: what a request to each holds, four characters of it being a token."""

import json
from dataclasses import dataclass
from typing import Any

from ..http import HttpError
from .replies import ChatReply, CompletionReply, EmbeddingReply, MessagesReply, Reply, ResponsesReply

_DEFAULT_OUTPUT_TOKENS = 16  # vLLM's and OpenAI's default of max_tokens
_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True)
class Api:
    """One API: its path, and how to read its requests."""

    reply: type[Reply]
    #: The field without which there is no prompt, those that may stand before it, and those whose JSON is in it too.
    prompt: str
    texts: tuple[str, ...] = ()
    schemas: tuple[str, ...] = ()
    output_limits: tuple[str, ...] = ()
    needs_limit: bool = False

    def prompt_tokens(self, request: dict[str, Any]) -> int:
        """Tokens of a request's prompt; HttpError if there is none."""
        prompt = request.get(self.prompt)
        if not isinstance(prompt, (str, list)) or not prompt:
            raise HttpError(400, f"{self.prompt} is missing or of the wrong type", kind="BadRequestError")
        if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            return len(prompt)
        if isinstance(prompt, list) and all(isinstance(tokens, list) for tokens in prompt):
            return sum(len(tokens) for tokens in prompt)
        try:
            characters = _characters(prompt)
            characters += sum(_characters(request.get(name)) for name in self.texts)
            characters += sum(len(json.dumps(request[name])) for name in self.schemas if request.get(name))
        except RecursionError:
            raise HttpError(400, "the prompt is nested too deeply", kind="BadRequestError") from None
        return max(1, characters // _CHARACTERS_PER_TOKEN)

    def output_tokens(self, request: dict[str, Any]) -> int:
        """How many tokens the answer will have; HttpError if that cannot be."""
        if not self.output_limits:
            return 1  # the pass that makes an embedding
        given = [request[name] for name in self.output_limits if request.get(name)]
        if self.needs_limit and not given:
            raise HttpError(400, f"{self.output_limits[0]}: Field required", kind="BadRequestError")
        output_tokens = given[0] if given else _DEFAULT_OUTPUT_TOKENS
        if not isinstance(output_tokens, int) or output_tokens < 1:
            name = self.output_limits[-1]
            raise HttpError(400, f"{name} must be at least 1, got {output_tokens!r}", kind="BadRequestError")
        return output_tokens


APIS = {
    "/v1/completions": Api(CompletionReply, "prompt", output_limits=("max_completion_tokens", "max_tokens")),
    "/v1/chat/completions": Api(
        ChatReply, "messages", schemas=("tools",), output_limits=("max_completion_tokens", "max_tokens")
    ),
    "/v1/responses": Api(
        ResponsesReply, "input", texts=("instructions",), schemas=("tools",), output_limits=("max_output_tokens",)
    ),
    "/v1/messages": Api(
        MessagesReply,
        "messages",
        texts=("system",),
        schemas=("tools",),
        output_limits=("max_tokens",),
        needs_limit=True,
    ),
    "/v1/embeddings": Api(EmbeddingReply, "input"),
}


def _characters(part: Any) -> int:
    if isinstance(part, str):
        return len(part)
    if isinstance(part, list):
        return sum(_characters(piece) for piece in part)
    if not isinstance(part, dict):
        return 0
    texts = sum(_characters(part.get(name)) for name in ("content", "text", "arguments", "output"))
    return texts + sum(len(json.dumps(part[name])) for name in ("tool_calls", "input") if part.get(name))
