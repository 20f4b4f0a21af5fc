"""Counting tokens without a tokenizer: prompts by their length in characters, outputs by the events of a stream.

Token ids are counted. Text is estimated by characters per token, which is learned for each model from the `usage` that
backends send with answers. Nothing of a request or an answer is kept.
"""

import re
from typing import Any

#: Characters of a token before the first answer: about right for English in the tokenizers of today.
INITIAL_CHARACTERS_PER_TOKEN = 4.0
#: Tokens that one image or sound stands for: its true size is known to the model only.
TOKENS_PER_ATTACHMENT = 576
# Weight of the newest answer in the moving average.
_WEIGHT = 0.05
_MOST_MODELS = 256
_PROMPT_TOKENS = re.compile(rb'"prompt_tokens":\s*(\d+)')
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')


class PromptCounter:
    """Prompt tokens of a request body."""

    def __init__(self) -> None:
        self._characters_per_token: dict[str, float] = {}

    def count(self, model: str, size: "PromptSize") -> int:
        """Tokens of a prompt, at least one."""
        ratio = self._characters_per_token.get(model, INITIAL_CHARACTERS_PER_TOKEN)
        return max(1, round(size.tokens + size.characters / ratio))

    def learn(self, model: str, size: "PromptSize", prompt_tokens: int) -> None:
        """A backend said how many tokens a prompt had."""
        if size.tokens or size.characters < 1 or prompt_tokens < 1:
            return
        ratio = size.characters / prompt_tokens
        known = self._characters_per_token.get(model)
        if known is None and len(self._characters_per_token) >= _MOST_MODELS:
            return
        self._characters_per_token[model] = ratio if known is None else known + _WEIGHT * (ratio - known)


class PromptSize:
    """How long a prompt is: characters of text, and tokens where they are given or assumed."""

    __slots__ = ("characters", "tokens")

    def __init__(self, characters: int = 0, tokens: int = 0) -> None:
        self.characters = characters
        self.tokens = tokens

    @classmethod
    def of(cls, body: dict[str, Any]) -> "PromptSize":
        """Of the body of a completion or chat completion."""
        size = cls()
        if "messages" in body:
            size._add_messages(body["messages"])
        else:
            size._add_prompt(body.get("prompt"))
        return size

    def _add_prompt(self, prompt: Any) -> None:
        if isinstance(prompt, str):
            self.characters += len(prompt)
        elif isinstance(prompt, list):
            if prompt and isinstance(prompt[0], int):
                self.tokens += len(prompt)
            else:
                for part in prompt:
                    self._add_prompt(part)

    def _add_messages(self, messages: Any) -> None:
        for message in messages if isinstance(messages, list) else ():
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, str):
                self.characters += len(content)
            for part in content if isinstance(content, list) else ():
                text = part.get("text") if isinstance(part, dict) else None
                if isinstance(text, str):
                    self.characters += len(text)
                else:
                    self.tokens += TOKENS_PER_ATTACHMENT


class StreamCounter:
    """Events of a server-sent stream, piece by piece; each carries one token, but for a few."""

    __slots__ = ("_is_newline_open", "completion_tokens", "prompt_tokens")

    def __init__(self) -> None:
        self._is_newline_open = False
        #: As the backend counts them, if it says so.
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None

    def feed(self, piece: bytes) -> int:
        """The events that a piece of the stream completes. JSON has no bare newlines, so an empty line ends one."""
        events = piece.count(b"\n\n")
        if self._is_newline_open and piece[:1] == b"\n":
            events += 1
        self._is_newline_open = piece[-1:] == b"\n" and piece[-2:] != b"\n\n"
        if b'"completion_tokens"' in piece:
            self.read_usage(piece)
        return events

    def read_usage(self, text: bytes) -> None:
        """Take over what `usage` says: the last of it counts."""
        prompt, completion = _PROMPT_TOKENS.findall(text), _COMPLETION_TOKENS.findall(text)
        if prompt:
            self.prompt_tokens = int(prompt[-1])
        if completion:
            self.completion_tokens = int(completion[-1])
