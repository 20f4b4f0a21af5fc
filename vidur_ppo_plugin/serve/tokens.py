"""Counting tokens without a tokenizer: prompts by their length in characters, outputs by the events of a stream.

Token ids are counted. Text is estimated by characters per token, which is learned for each model from the `usage` that
backends send with answers. Nothing of a request or an answer is kept.
"""

import re
from collections import deque
from collections.abc import Sequence

from .prompts import PromptSize

#: Characters of a token before the first answer: about right for English in the tokenizers of today.
INITIAL_CHARACTERS_PER_TOKEN = 4.0
#: The least and the most that is believed: byte by byte, and longer than the words of any tokenizer in the mean.
CHARACTERS_PER_TOKEN_RANGE = (1.0, 8.0)
#: The most tokens that are believed to be in every prompt of a model without being in its body, as templates add them.
MOST_HIDDEN_TOKENS = 256
# Shorter prompts say little about characters per token: most of what they hold is template.
_LONG_CHARACTERS = 256
# Answers that the medians are taken over.
_WINDOW = 64
# The first answers are learned from one by one, later ones this many at a time: sorting costs some 10 us.
_STRIDE = 16
_MOST_MODELS = 256


class PromptCounter:
    """Prompt tokens of requests to one path, by model."""

    def __init__(self) -> None:
        self._models: dict[str, _Learned] = {}

    def count(self, model: str, size: PromptSize) -> int:
        """Tokens of a prompt, at least one."""
        learned = self._models.get(model, _UNKNOWN)
        hidden = learned.hidden_tokens if size.characters else 0.0
        return max(1, round(size.tokens + hidden + size.characters / learned.characters_per_token))

    def learn(self, model: str, size: PromptSize, prompt_tokens: int) -> None:
        """A backend said how many tokens a prompt had."""
        if size.attachments or size.characters < 1 or prompt_tokens < 1:
            return
        learned = self._models.get(model)
        if learned is None:
            if len(self._models) >= _MOST_MODELS:
                return
            learned = self._models[model] = _Learned()
        learned.add(size.characters, max(1, prompt_tokens - size.tokens))


class _Learned:
    """What recent answers say about one model. Medians: a few odd answers move nothing."""

    def __init__(self) -> None:
        self.characters_per_token = INITIAL_CHARACTERS_PER_TOKEN
        self.hidden_tokens = 0.0
        self._ratios: deque[float] = deque(maxlen=_WINDOW)
        self._texts: deque[tuple[int, int]] = deque(maxlen=_WINDOW)
        self._num_added = 0

    def add(self, characters: int, tokens: int) -> None:
        """A text of so many characters was so many tokens."""
        self._texts.append((characters, tokens))
        if characters >= _LONG_CHARACTERS:
            self._ratios.append(characters / tokens)
        self._num_added += 1
        if self._num_added <= _STRIDE or self._num_added % _STRIDE == 0:
            self._update()

    def _update(self) -> None:
        if self._ratios:
            least, most = CHARACTERS_PER_TOKEN_RANGE
            self.characters_per_token = min(most, max(least, _median(self._ratios)))
        ratio = self.characters_per_token
        beyond = _median([tokens - characters / ratio for characters, tokens in self._texts])
        self.hidden_tokens = min(float(MOST_HIDDEN_TOKENS), max(0.0, beyond))


_UNKNOWN = _Learned()


def _median(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


class UsagePattern:
    """Finds token counts in the `usage` of an answer or of the last events of a stream."""

    def __init__(self, prompt: Sequence[str], output: str) -> None:
        """`prompt`: the fields whose sum is the prompt, the first of which is always there."""
        self._prompt = [_number_of(name) for name in prompt]
        self._output = _number_of(output)
        #: Where these bytes are not, there is nothing to find.
        self.mark = f'"{output}"'.encode()

    def prompt_tokens(self, text: bytes) -> int | None:
        """The last that is said of the prompt."""
        found = [numbers[-1] for pattern in self._prompt if (numbers := pattern.findall(text))]
        return sum(map(int, found)) or None

    def output_tokens(self, text: bytes) -> int | None:
        """The last that is said of the output; 0, which is what streams begin with, says nothing."""
        found = self._output.findall(text)
        return (int(found[-1]) or None) if found else None


def _number_of(field: str) -> re.Pattern[bytes]:
    return re.compile(rb'"%b":\s*(\d{1,9})' % field.encode())


# Bytes of a stream that are looked at again with the next piece: `usage` may be cut anywhere.
_KEPT_BYTES = 256


class StreamCounter:
    """Tokens of an answer, in one piece or as the events of a stream, of which each of a certain kind carries one."""

    __slots__ = ("_kept", "_num_kept", "_token_mark", "_usage", "completion_tokens", "prompt_tokens")

    def __init__(self, usage: UsagePattern, token_mark: bytes) -> None:
        """`token_mark`: the bytes, with a newline that JSON cannot have, which each event of a token has once."""
        self._usage = usage
        self._token_mark = token_mark
        self._kept = b""
        self._num_kept = 0
        #: As the backend counts them, if it says so.
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None

    def feed(self, piece: bytes) -> int:
        """The events of tokens that a piece of the stream completes."""
        seen = self._kept + piece if self._kept else piece
        num_events = seen.count(self._token_mark) - self._num_kept
        if self._usage.mark in seen:
            self._take(seen)
        if piece.endswith(b"\n\n"):  # the end of an event, as most pieces: nothing is cut
            self._kept, self._num_kept = b"", 0
        else:
            self._kept = kept = seen[-_KEPT_BYTES:]
            self._num_kept = kept.count(self._token_mark)
        return num_events

    def read_whole(self, body: bytes) -> None:
        """Take over what an answer in one piece says in its `usage`, and not what else has such names in it."""
        begins = body.rfind(b'"usage"')
        if begins >= 0:
            self._take(body[begins:])

    def _take(self, text: bytes) -> None:
        prompt, output = self._usage.prompt_tokens(text), self._usage.output_tokens(text)
        if prompt is not None:
            self.prompt_tokens = prompt
        if output is not None:
            self.completion_tokens = output
