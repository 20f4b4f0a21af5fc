"""How long a prompt is, read from the body of a request: characters of text, messages, attachments, token ids.

It takes whatever JSON a client can send: nothing raises, nothing is called recursively, and the time is bounded.
Nothing of the body is kept.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

#: Tokens that a chat template puts around a message: its start, its role and its end (4 in ChatML, 5 in Llama 3).
TOKENS_PER_MESSAGE = 4
#: Tokens that one image or sound stands for: its true size is known to the model only.
TOKENS_PER_ATTACHMENT = 576
# Where a message or a part of one has text that ends in the prompt; what has none of these is an attachment.
_TEXT_KEYS = frozenset(
    (
        "content",
        "text",
        "name",
        "arguments",
        "output",
        "summary",
        "refusal",
        "reasoning",
        "reasoning_content",
        "thinking",
    )
)
# Where it has JSON that ends in the prompt, names included: calls of tools.
_JSON_KEYS = frozenset(("tool_calls", "function_call", "input"))
# Values that are looked at (some 20 ms of work); a body with more of them is taken for as long as it has bytes.
_MOST_VALUES = 50_000
_CHARACTERS_PER_NUMBER = 4


@dataclass
class PromptSize:
    """The size of a prompt: characters of text, and tokens known without reading it."""

    characters: int = 0
    messages: int = 0
    attachments: int = 0
    token_ids: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of all but the text: given, or assumed for templates and attachments."""
        return self.token_ids + TOKENS_PER_MESSAGE * self.messages + TOKENS_PER_ATTACHMENT * self.attachments


def prompt_size(
    body: dict[str, Any], *, prompt: Iterable[str], schemas: Iterable[str] = (), num_bytes: int = 0
) -> PromptSize:
    """The size of what the fields `prompt` (texts, messages, token ids) and `schemas` (JSON, as for tools) hold."""
    reader = _Reader()
    for name in prompt:
        reader.read_prompt(body.get(name))
    for name in schemas:
        if body.get(name) is not None:
            reader.json_values.append(body[name])
    reader.read_json()
    size = reader.size
    if reader.num_left <= 0:
        size.characters = max(size.characters, num_bytes)
    return size


class _Reader:
    """Reads values with a stack of its own: how deep they are nested is the client's choice."""

    def __init__(self) -> None:
        self.size = PromptSize()
        self.num_left = _MOST_VALUES
        self.json_values: list[Any] = []
        self._values: list[Any] = []

    def read_prompt(self, value: Any) -> None:
        """Read a field: a text, token ids, or a list of texts, of lists of token ids, or of messages."""
        if isinstance(value, list) and not _are_token_ids(value):
            for item in islice(value, max(self.num_left, 0)):
                if isinstance(item, dict):
                    self.size.messages += 1
                    self._open(item)
                else:
                    self._values.append(item)
            self.num_left -= len(value)
        else:
            self._values.append(value)
        self._read_texts()

    def _read_texts(self) -> None:
        size, values = self.size, self._values
        while values and self.num_left > 0:
            self.num_left -= 1
            value = values.pop()
            if isinstance(value, str):
                size.characters += len(value)
            elif isinstance(value, list):
                if _are_token_ids(value):
                    size.token_ids += len(value)
                else:
                    values.extend(value)
            elif isinstance(value, dict) and not self._open(value):
                size.attachments += 1

    def _open(self, item: dict[str, Any]) -> bool:
        """Count the texts of a message or a part of one, put the rest on the stacks; False if it says nothing."""
        says_something = False
        for key, value in item.items():
            if key in _TEXT_KEYS:
                says_something = True
                if isinstance(value, str):
                    self.size.characters += len(value)
                else:
                    self._values.append(value)
            elif key in _JSON_KEYS and value is not None:
                says_something = True
                self.json_values.append(value)
        return says_something

    def read_json(self) -> None:
        """Count the characters of JSON, about as a template writes it into the prompt."""
        size, values = self.size, self.json_values
        while values and self.num_left > 0:
            self.num_left -= 1
            value = values.pop()
            if isinstance(value, str):
                size.characters += len(value) + len('""')
            elif isinstance(value, dict):
                size.characters += sum(map(len, value)) + len('"":,') * len(value)
                values.extend(value.values())
            elif isinstance(value, list):
                size.characters += len(value) + 1
                values.extend(value)
            else:
                size.characters += _CHARACTERS_PER_NUMBER


def _are_token_ids(values: list[Any]) -> bool:
    """Whether a list is token ids, which its first value tells: servers refuse lists that mix them with others."""
    return bool(values) and isinstance(values[0], int)
