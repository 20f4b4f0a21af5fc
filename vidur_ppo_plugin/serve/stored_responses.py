"""Which backend stores which response of /v1/responses: what asks for one or goes on from it has to go there."""

import re
from collections import OrderedDict
from dataclasses import dataclass

from .fleet import Backend

# Responses that are remembered, the oldest are forgotten first; each takes some 300 bytes.
_MOST_RESPONSES = 16_384
_PATH = re.compile(r"/v1/responses/([^/]{1,128})(?:/.*)?")


@dataclass(frozen=True)
class StoredResponse:
    """Where a response is stored, and the tokens of it and of all before it: the context of what goes on from it."""

    backend: Backend
    num_tokens: int


class StoredResponses:
    """Where the newest stored responses are."""

    def __init__(self) -> None:
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._responses)

    def add(self, response_id: str, backend: Backend, num_tokens: int) -> None:
        """Remember which backend stores a response."""
        self._responses[response_id] = StoredResponse(backend, num_tokens)
        self._responses.move_to_end(response_id)
        if len(self._responses) > _MOST_RESPONSES:
            self._responses.popitem(last=False)

    def find(self, response_id: str) -> StoredResponse | None:
        """Where a response is stored; None if that is not known or the backend is no longer there."""
        stored = self._responses.get(response_id)
        if stored is None or stored.backend.is_removed:
            return None
        self._responses.move_to_end(response_id)
        return stored

    def backend_of(self, path: str) -> Backend | None:
        """The backend that a path like /v1/responses/ID/cancel is about; None if that is not known."""
        found = _PATH.fullmatch(path)
        stored = self.find(found[1]) if found is not None else None
        return stored.backend if stored is not None else None
