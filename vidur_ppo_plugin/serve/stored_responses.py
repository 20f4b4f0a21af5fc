"""Which backend keeps which answer of /v1/responses: what asks for one or goes on from it has to go there."""

import re
from collections import OrderedDict
from dataclasses import dataclass

from .fleet import Backend

# Answers that are remembered, the oldest are forgotten first; each takes some 300 bytes.
_MOST_ANSWERS = 16_384
_PATH = re.compile(r"/v1/responses/([^/]{1,128})(?:/.*)?")


@dataclass(frozen=True)
class StoredResponse:
    """Where an answer is, and how many tokens it and all before it have: the context of what goes on from it."""

    backend: Backend
    num_tokens: int


class StoredResponses:
    """Remembers the newest ones."""

    def __init__(self) -> None:
        self._answers: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, answer_id: str, backend: Backend, num_tokens: int) -> None:
        """A backend made an answer."""
        self._answers[answer_id] = StoredResponse(backend, num_tokens)
        self._answers.move_to_end(answer_id)
        if len(self._answers) > _MOST_ANSWERS:
            self._answers.popitem(last=False)

    def find(self, answer_id: str) -> StoredResponse | None:
        """Where an answer is; None if that is not known or no longer there."""
        kept = self._answers.get(answer_id)
        if kept is None or kept.backend.is_removed:
            return None
        self._answers.move_to_end(answer_id)
        return kept

    def backend_of(self, path: str) -> Backend | None:
        """The backend that a path like /v1/responses/ID/cancel is about; None if that is not known."""
        found = _PATH.fullmatch(path)
        kept = self.find(found[1]) if found is not None else None
        return kept.backend if kept is not None else None
