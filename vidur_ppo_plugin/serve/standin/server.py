"""vLLM's API over an engine: completions, chat, models, health, metrics; the text is made up, the times are not."""

import asyncio
import contextlib
import json
import time
import uuid
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..http import ClientGoneError, HttpError, Receive, Scope, Send, answer, read_body
from .engine import Engine, Sequence

_MAX_BODY_BYTES = 32 * 1024 * 1024
_TIMEOUT_S = 60.0
_DEFAULT_OUTPUT_TOKENS = 16  # vLLM's and OpenAI's default of max_tokens
_CHARACTERS_PER_TOKEN = 4
_LABELS = ["engine", "model_name"]
_SECONDS_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """The metrics page of vLLM, as far as routers read it."""

    def __init__(self, engine: Engine, model: str, *, with_old_names: bool) -> None:
        self._engine = engine
        registry = self._registry = CollectorRegistry()
        labels = ("0", model)

        def gauge(name: str, text: str) -> Any:
            return Gauge(f"vllm:{name}", text, _LABELS, registry=registry).labels(*labels)

        def counter(name: str, text: str) -> Any:
            return Counter(f"vllm:{name}", text, _LABELS, registry=registry).labels(*labels)

        def histogram(name: str, text: str) -> Any:
            return Histogram(f"vllm:{name}", text, _LABELS, buckets=_SECONDS_BUCKETS, registry=registry).labels(*labels)

        self._running = gauge("num_requests_running", "Number of requests in model execution batches.")
        self._waiting = gauge("num_requests_waiting", "Number of requests waiting to be processed.")
        self._kv = gauge("gpu_cache_usage_perc" if with_old_names else "kv_cache_usage_perc", "KV-cache usage.")
        self._prompt = counter("prompt_tokens", "Number of prefill tokens processed.")
        self._generated = counter("generation_tokens", "Number of generation tokens processed.")
        self._preemptions = counter("num_preemptions", "Cumulative number of preemptions.")
        self.ttft = histogram("time_to_first_token_seconds", "Time to first token in seconds.")
        self.tbt = histogram(
            "time_per_output_token_seconds" if with_old_names else "inter_token_latency_seconds",
            "Time between output tokens in seconds.",
        )
        self.latency = histogram("e2e_request_latency_seconds", "End-to-end request latency in seconds.")
        info = Gauge(
            "vllm:cache_config_info", "Cache config.", ["block_size", "engine", "num_gpu_blocks"], registry=registry
        )
        info.labels("16", "0", str(engine.kv_blocks)).set(1)
        self._seen = {"prompt": 0, "generated": 0, "preemptions": 0}

    def page(self) -> bytes:
        """What a scrape gets."""
        engine = self._engine
        self._running.set(engine.num_running)
        self._waiting.set(engine.num_waiting)
        self._kv.set(engine.kv_used_fraction)
        for name, metric, total in (
            ("prompt", self._prompt, engine.num_prompt_tokens),
            ("generated", self._generated, engine.num_generated_tokens),
            ("preemptions", self._preemptions, engine.num_preemptions),
        ):
            metric.inc(total - self._seen[name])
            self._seen[name] = total
        return generate_latest(self._registry)


class StandIn:
    """The application."""

    def __init__(self, engine: Engine, *, model: str, with_old_names: bool = False) -> None:
        self.engine = engine
        self._model = model
        self._metrics = Metrics(engine, model, with_old_names=with_old_names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            await self._handle(scope, receive, send)
        except HttpError as error:
            await error.send(send)
        except ClientGoneError:
            return

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path in ("/v1/completions", "/v1/chat/completions") and scope["method"] == "POST":
            await self._generate(scope, receive, send, is_chat=path.endswith("chat/completions"))
        elif path == "/health":
            await answer(send, 200, b"")
        elif path == "/metrics":
            await answer(send, 200, self._metrics.page(), kind=b"text/plain; version=0.0.4; charset=utf-8")
        elif path == "/v1/models":
            card = {
                "id": self._model,
                "object": "model",
                "owned_by": "vllm",
                "max_model_len": self.engine.max_model_len,
            }
            await answer(send, 200, json.dumps({"object": "list", "data": [card]}).encode())
        elif path == "/version":
            await answer(send, 200, b'{"version":"stand-in"}')
        else:
            raise HttpError(404, "Not Found", kind="NotFoundError")

    async def _generate(self, scope: Scope, receive: Receive, send: Send, *, is_chat: bool) -> None:
        body = await read_body(receive, scope["headers"], limit=_MAX_BODY_BYTES, timeout_s=_TIMEOUT_S)
        request = self._parsed(body)
        prompt_tokens = _prompt_tokens(request, is_chat=is_chat)
        output_tokens = request.get("max_completion_tokens") or request.get("max_tokens") or _DEFAULT_OUTPUT_TOKENS
        if not isinstance(output_tokens, int) or output_tokens < 1:
            raise HttpError(400, f"max_tokens must be at least 1, got {output_tokens!r}", kind="BadRequestError")
        if prompt_tokens + output_tokens > self.engine.max_model_len:
            raise HttpError(
                400,
                f"This model's maximum context length is {self.engine.max_model_len} tokens, the request has "
                f"{prompt_tokens} in the prompt and {output_tokens} for the completion.",
                kind="BadRequestError",
            )
        reply = _Reply(self._model, prompt_tokens, is_chat=is_chat)
        number, sequence = self.engine.submit(prompt_tokens, output_tokens)
        watch = asyncio.ensure_future(receive())
        try:
            if request.get("stream"):
                await self._stream(send, reply, sequence, watch, request.get("stream_options") or {})
            else:
                await self._whole(send, reply, sequence, watch)
        finally:
            watch.cancel()
            self.engine.abort(number)

    def _parsed(self, body: bytes) -> dict[str, Any]:
        try:
            request = json.loads(body)
        except ValueError:
            raise HttpError(400, "JSON decode error", kind="BadRequestError") from None
        if not isinstance(request, dict):
            raise HttpError(400, "the body must be an object", kind="BadRequestError")
        if request.get("model", self._model) != self._model:
            raise HttpError(404, f"The model `{request['model']}` does not exist.", kind="NotFoundError")
        return request

    async def _whole(self, send: Send, reply: "_Reply", sequence: Sequence, watch: "asyncio.Future[Any]") -> None:
        while not sequence.is_finished:
            await self._wait(sequence, watch)
        self._observe(sequence)
        await answer(send, 200, reply.whole(sequence.output_tokens))

    async def _stream(
        self,
        send: Send,
        reply: "_Reply",
        sequence: Sequence,
        watch: "asyncio.Future[Any]",
        options: dict[str, Any],
    ) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        num_sent = 0
        while num_sent < sequence.output_tokens:
            await self._wait(sequence, watch)
            events = [reply.role()] if num_sent == 0 and reply.is_chat else []
            while num_sent < sequence.num_made:
                num_sent += 1
                events.append(reply.token(is_last=num_sent == sequence.output_tokens))
            await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
        self._observe(sequence)
        end = reply.usage(num_sent) if options.get("include_usage") else b""
        await send({"type": "http.response.body", "body": end + b"data: [DONE]\n\n"})

    async def _wait(self, sequence: Sequence, watch: "asyncio.Future[Any]") -> None:
        """Until there is something new, or nobody to get it."""
        if not sequence.changed.is_set():
            changed = asyncio.ensure_future(sequence.changed.wait())
            await asyncio.wait((changed, watch), return_when=asyncio.FIRST_COMPLETED)
            if not changed.done():
                changed.cancel()
                raise ClientGoneError
        sequence.changed.clear()

    def _observe(self, sequence: Sequence) -> None:
        first_s = sequence.first_token_at_s
        if first_s is None:
            return
        now_s = self.engine.now_s
        self._metrics.ttft.observe(first_s - sequence.arrived_at_s)
        self._metrics.latency.observe(now_s - sequence.arrived_at_s)
        if sequence.output_tokens > 1:
            self._metrics.tbt.observe((now_s - first_s) / (sequence.output_tokens - 1))


class _Reply:
    """The JSON of an answer."""

    def __init__(self, model: str, prompt_tokens: int, *, is_chat: bool) -> None:
        self.is_chat = is_chat
        self._prompt_tokens = prompt_tokens
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._token, self._last = (self._choice_event(end) for end in (None, "length"))

    def role(self) -> bytes:
        """The first event of a chat."""
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return _event({**self._head, "choices": [choice]})

    def token(self, *, is_last: bool) -> bytes:
        """The event of a token."""
        return self._last if is_last else self._token

    def usage(self, output_tokens: int) -> bytes:
        """The event after the last one, for clients that ask for it."""
        return _event({**self._head, "choices": [], "usage": self._usage(output_tokens)})

    def whole(self, output_tokens: int) -> bytes:
        """The answer in one piece."""
        text = " token" * output_tokens
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        choice |= {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        head = {**self._head, "object": "chat.completion" if self.is_chat else "text_completion"}
        return json.dumps({**head, "choices": [choice], "usage": self._usage(output_tokens)}).encode()

    def _choice_event(self, finish_reason: str | None) -> bytes:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason}
        choice |= {"delta": {"content": " token"}} if self.is_chat else {"text": " token"}
        return _event({**self._head, "choices": [choice]})

    def _usage(self, output_tokens: int) -> dict[str, int]:
        prompt = self._prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": output_tokens, "total_tokens": prompt + output_tokens}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _prompt_tokens(request: dict[str, Any], *, is_chat: bool) -> int:
    key = "messages" if is_chat else "prompt"
    prompt = request.get(key)
    if not isinstance(prompt, (str, list)) or not prompt:
        raise HttpError(400, f"{key} is missing or of the wrong type", kind="BadRequestError")
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return len(prompt)
    characters = len(prompt) if isinstance(prompt, str) else sum(_characters(part) for part in prompt)
    return max(1, characters // _CHARACTERS_PER_TOKEN)


def _characters(part: Any) -> int:
    if isinstance(part, str):
        return len(part)
    content = part.get("content", "") if isinstance(part, dict) else ""
    if isinstance(content, list):
        return sum(len(piece.get("text", "")) for piece in content if isinstance(piece, dict))
    return len(content) if isinstance(content, str) else 0


async def serve(app: StandIn, host: str, port: int) -> None:
    """Listen until told to stop."""
    import uvicorn

    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="warning",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=2,
    )
    running = asyncio.create_task(app.engine.run())
    try:
        await uvicorn.Server(config).serve()
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
