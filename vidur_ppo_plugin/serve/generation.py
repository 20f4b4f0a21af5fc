"""One request to generate: decide, send, retry while the client has not got a byte, stream, tell what came of it."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from vidur_ppo_plugin.record.decision_log import LoggedDecision, LoggedOutcome
from vidur_ppo_plugin.routing.snapshot import RequestInfo

from .decider import Decider, Decision
from .endpoints import ENDPOINTS, Endpoint
from .fleet import Backend, Fleet, NoBackendError
from .http import ABORT, ClientGoneError, HttpError, Scope, Send, header
from .instruments import Instruments
from .prompts import PromptSize
from .record_writer import RecordWriter
from .source import RequestInFlight
from .stored_responses import StoredResponses
from .tokens import PromptCounter
from .upstream import BROKEN, RETRIED_STATUS, Upstream, answered_headers

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Job:
    """A client's request to one of the paths that the policy places."""

    endpoint: Endpoint
    scope: Scope
    send: Send
    body: bytes
    model: str
    size: PromptSize
    is_streaming: bool
    max_tokens: int | None
    arrived_at_s: float
    request_id: bytes
    #: The stored response that it goes on from; empty if from none.
    previous_response: str = ""
    #: The backend that stores it, if that is known.
    only_backend: Backend | None = None
    #: Whether the client has got something: then there is no other try.
    has_begun: bool = False
    #: Since when a piece waits for the client to take it; None if none does.
    blocked_since_s: float | None = None
    task: "asyncio.Task[object] | None" = None
    is_too_slow: bool = False


class _BackendError(Exception):
    """A backend failed; `answer`: what to tell the client if there is no other try."""

    def __init__(self, kind: str, answer: HttpError, *, may_retry: bool = True) -> None:
        super().__init__(kind)
        self.kind = kind
        self.answer = answer
        self.may_retry = may_retry


class _Attempt:
    """One try of a job at one backend, and what was seen of it."""

    def __init__(self, number: int, job: Job, decision: Decision, flight: RequestInFlight) -> None:
        self.number = number
        self.job = job
        self.decision = decision
        self.flight = flight
        self.backend = decision.backend
        self.counter = job.endpoint.counter()
        #: By which the client can ask for this answer later; empty if it cannot.
        self.response_id = ""
        self.first_token_at_s: float | None = None
        self.status = "gone"

    @property
    def output_tokens(self) -> int:
        """Tokens of the output as the backend counts them; without its count, as many as were seen."""
        known = self.counter.completion_tokens
        return self.flight.num_tokens if known is None else known


class Generation:
    """Serves the requests whose backend the policy chooses."""

    def __init__(
        self,
        fleet: Fleet,
        decider: Decider,
        upstream: Upstream,
        instruments: Instruments,
        *,
        retries: int,
        client_timeout_s: float,
        record: RecordWriter | None,
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._source = fleet.source
        self._decider = decider
        self._upstream = upstream
        self._instruments = instruments
        self._retries = retries
        self._client_timeout_s = client_timeout_s
        self._record = record
        self._clock = clock
        self._prompts = {path: PromptCounter() for path in ENDPOINTS}
        #: Where answers are that backends keep.
        self.stored_responses = StoredResponses()
        self._num_decisions = 0
        self._streaming: set[Job] = set()

    async def run(self, job: Job) -> None:
        """Serve a request; HttpError or NoBackendError if no backend could."""
        info = self._source.request_info(self._count_prompt(job), job.arrived_at_s)
        self._instruments.prompt_tokens.inc(info.prompt_tokens)
        tried: list[Backend] = []
        failure: _BackendError | None = None
        while True:
            try:
                attempt = self._place(job, info, tried)
            except NoBackendError:
                if failure is None:
                    raise
                raise failure.answer from None
            if failure is not None:
                self._instruments.retries.inc()
            failure = await self._try(attempt)
            if failure is None:
                return
            tried.append(attempt.backend)
            if job.has_begun or not failure.may_retry or len(tried) > self._retries:
                raise failure.answer

    def _count_prompt(self, job: Job) -> int:
        """Tokens of a prompt, with those of the stored response that it goes on from, if the router knows that."""
        num_tokens = self._prompts[job.endpoint.path].count(job.model, job.size)
        followed = self.stored_responses.find(job.previous_response) if job.previous_response else None
        if followed is None:
            return num_tokens
        job.only_backend = followed.backend
        return num_tokens + followed.num_tokens

    async def _try(self, attempt: "_Attempt") -> "_BackendError | None":
        """Serve a job at one backend; what went wrong, or None."""
        try:
            await self._serve(attempt)
            return None
        except _BackendError as error:
            self._on_failure(attempt, error)
            return error
        except asyncio.CancelledError:
            if not attempt.job.is_too_slow:
                raise
            attempt.job.scope.get(ABORT, _do_nothing)()
            raise ClientGoneError from None
        finally:
            self._end(attempt)

    # --- One try ---

    def _place(self, job: Job, info: RequestInfo, tried: list[Backend]) -> _Attempt:
        now_s = self._clock()
        decision = self._decider.decide(info, now_s, model=job.model, excluded=tried, only=job.only_backend)
        backend = decision.backend
        backend.breaker.on_send(now_s)
        backend.in_flight += 1
        self._instruments.placements.labels(backend.name).inc()
        flight = self._source.on_dispatch(
            backend.replica,
            info.prompt_tokens,
            now_s,
            is_hidden=not job.is_streaming,
            max_tokens=job.max_tokens,
        )
        if self._decider.shadow is not None:
            asyncio.get_running_loop().call_soon(self._decider.ask_shadow, decision, now_s)
        self._num_decisions += 1
        return _Attempt(self._num_decisions, job, decision, flight)

    async def _serve(self, attempt: _Attempt) -> None:
        job, backend = attempt.job, attempt.backend
        headers = self._upstream.headers(job.scope, job.request_id)
        try:
            async with self._upstream.send(backend, job.scope, job.body, headers) as answer:
                if answer.status in RETRIED_STATUS:
                    message = f"the backend answered with {answer.status}"
                    raise _BackendError(
                        f"status_{answer.status}", HttpError(answer.status, message, kind="server_error")
                    )
                is_stream = job.is_streaming and answer.status == 200
                await (self._stream(attempt, answer) if is_stream else self._relay_whole(attempt, answer))
        except asyncio.TimeoutError as error:
            is_connect = isinstance(error, aiohttp.ConnectionTimeoutError)
            answer_504 = HttpError(504, "the backend did not answer in time", kind="server_error")
            await self._break_off(attempt, answer_504)
            raise _BackendError("timeout", answer_504, may_retry=is_connect) from None
        except BROKEN as error:
            answer_502 = HttpError(502, f"the backend failed: {type(error).__name__}", kind="server_error")
            if isinstance(error, aiohttp.ClientConnectorError):
                self._fleet.on_connect_failure(backend)
            await self._break_off(attempt, answer_502)
            raise _BackendError("connection", answer_502) from None
        backend.breaker.on_success()

    async def _relay_whole(self, attempt: _Attempt, answer: aiohttp.ClientResponse) -> None:
        """Relay an answer in one piece, read to its end before the client gets a byte: another try is possible."""
        job = attempt.job
        body = await answer.read()
        attempt.first_token_at_s = now_s = self._clock()
        attempt.status = "ok" if answer.status == 200 else "rejected"
        if answer.status == 200 and not answer.headers.get("content-encoding"):
            attempt.counter.read_whole(body)
            attempt.response_id = job.endpoint.response_id(body)
            missing = (attempt.counter.completion_tokens or 0) - attempt.flight.num_tokens
            if missing > 0:
                self._source.on_tokens(attempt.flight, missing, now_s)
        job.has_begun = True
        headers = answered_headers(answer, job.request_id)
        if not header(headers, b"content-length"):
            headers.append((b"content-length", str(len(body)).encode()))
        await job.send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await job.send({"type": "http.response.body", "body": body})

    async def _stream(self, attempt: _Attempt, answer: aiohttp.ClientResponse) -> None:
        """Relay pieces as they come. Nothing is sent before the first one: until then another backend can take over."""
        job, send, source, flight = attempt.job, attempt.job.send, self._source, attempt.flight
        feed, clock, content = attempt.counter.feed, self._clock, answer.content
        has_named_events = job.endpoint.has_named_events
        piece = await content.readany()
        if not piece:
            raise aiohttp.ServerDisconnectedError("the stream ended before its first byte")
        self._on_first_piece(attempt, piece)
        job.has_begun = True
        job.task = asyncio.current_task()
        self._streaming.add(job)
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": answer.status,
                    "headers": answered_headers(answer, job.request_id),
                }
            )
            while piece:
                now_s, num_tokens = clock(), feed(piece)
                # Where events have names, those of tokens are known, and the first ones come before any token.
                if num_tokens or not has_named_events:
                    source.on_tokens(flight, num_tokens, now_s)
                    if attempt.first_token_at_s is None:
                        attempt.first_token_at_s = now_s
                        self._instruments.ttft_seconds.observe(now_s - job.arrived_at_s)
                job.blocked_since_s = now_s
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                job.blocked_since_s = None
                piece = await content.readany()
            attempt.status = "ok"
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._streaming.discard(job)

    async def _break_off(self, attempt: _Attempt, error: HttpError) -> None:
        """End a stream that has begun as vLLM ends one that fails: with an error as its last event."""
        job = attempt.job
        if not (job.has_begun and job.is_streaming):
            return
        await job.send({"type": "http.response.body", "body": job.endpoint.last_events(error), "more_body": True})
        await job.send({"type": "http.response.body", "body": b""})

    def _on_first_piece(self, attempt: _Attempt, piece: bytes) -> None:
        attempt.response_id = attempt.job.endpoint.response_id(piece)
        if attempt.response_id:  # the client may ask for it before it is complete
            self.stored_responses.add(attempt.response_id, attempt.backend, 0)

    # --- What came of it ---

    def _on_failure(self, attempt: _Attempt, failure: _BackendError) -> None:
        attempt.status = "failed"
        backend = attempt.backend
        if (
            failure.kind != "status_500"
        ):  # the request may be to blame: it must not shut out one backend after the other
            backend.breaker.on_failure(self._clock())
        self._instruments.errors.labels(backend.name, failure.kind).inc()
        logger.warning(
            "backend %s failed request %s (%s)%s",
            backend.name,
            attempt.job.request_id.decode("latin-1", "replace"),
            failure.kind,
            ", which had begun to stream" if attempt.job.has_begun else "",
        )

    def _end(self, attempt: _Attempt) -> None:
        now_s, job, backend = self._clock(), attempt.job, attempt.backend
        backend.in_flight -= 1
        tokens = attempt.output_tokens
        is_ok = attempt.status == "ok"
        if attempt.status == "gone":
            backend.breaker.on_given_up(now_s)
        self._source.on_end(attempt.flight, now_s, completed_tokens=tokens if is_ok else None)
        if is_ok:
            self._instruments.latency_seconds.observe(now_s - job.arrived_at_s)
            self._instruments.output_tokens.inc(tokens)
            prompt_tokens = attempt.counter.prompt_tokens
            if attempt.response_id:
                self.stored_responses.add(attempt.response_id, backend, (prompt_tokens or 0) + tokens)
            if prompt_tokens is not None and not job.previous_response:
                self._prompts[job.endpoint.path].learn(job.model, job.size, prompt_tokens)
        if self._record is not None:
            self._record.add(self._logged(attempt, now_s, tokens))

    def _logged(self, attempt: _Attempt, now_s: float, tokens: int) -> LoggedDecision:
        decision, job = attempt.decision, attempt.job
        first_s = attempt.first_token_at_s
        return LoggedDecision(
            number=attempt.number,
            snapshot=decision.snapshot,
            request=decision.request,
            action=decision.action,
            probability=decision.probability,
            is_explored=decision.is_explored,
            is_fallback=decision.is_fallback,
            backends=tuple(member.name for member in decision.members),
            outcome=LoggedOutcome(
                status=attempt.status,
                latency_s=now_s - job.arrived_at_s if attempt.status == "ok" else None,
                ttft_s=first_s - job.arrived_at_s if first_s is not None and job.is_streaming else None,
                prompt_tokens=attempt.counter.prompt_tokens or decision.request.prompt_tokens,
                output_tokens=tokens,
            ),
        )

    def give_up_slow_clients(self) -> None:
        """End streams whose clients have taken nothing for too long; called now and then."""
        latest_s = self._clock() - self._client_timeout_s
        for job in list(self._streaming):
            since_s = job.blocked_since_s
            if since_s is not None and since_s < latest_s and job.task is not None and not job.is_too_slow:
                job.is_too_slow = True
                self._instruments.rejected.labels("slow_client").inc()
                job.task.cancel()


def _do_nothing() -> None:
    """Stands in where the server offers no way to cut a connection."""
