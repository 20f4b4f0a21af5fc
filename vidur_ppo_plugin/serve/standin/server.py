"""vLLM's API over an engine: generation, embeddings, models, health, metrics; text is made up, times are not."""

import asyncio
import contextlib
import json
from collections import OrderedDict
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..http import ClientGoneError, HttpError, Receive, Scope, Send, answer, read_body
from .apis import APIS, Api
from .engine import Engine, Sequence
from .replies import Reply, ResponsesReply

_MAX_BODY_BYTES = 32 * 1024 * 1024
_TIMEOUT_S = 60.0
# Answers of /v1/responses that are kept.
_MOST_RESPONSES = 1000
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
        self._responses: OrderedDict[str, bytes] = OrderedDict()

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
        if path in APIS and scope["method"] == "POST":
            await self._generate(scope, receive, send, APIS[path])
        elif path.startswith("/v1/responses/"):
            await self._answer_about_response(send, path, scope["method"])
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

    async def _generate(self, scope: Scope, receive: Receive, send: Send, api: Api) -> None:
        body = await read_body(receive, scope["headers"], limit=_MAX_BODY_BYTES, timeout_s=_TIMEOUT_S)
        request = self._parsed(body)
        prompt_tokens = api.prompt_tokens(request) + self._tokens_before(request)
        output_tokens = api.output_tokens(request)
        if prompt_tokens + output_tokens > self.engine.max_model_len:
            raise HttpError(
                400,
                f"This model's maximum context length is {self.engine.max_model_len} tokens, the request has "
                f"{prompt_tokens} in the prompt and {output_tokens} for the completion.",
                kind="BadRequestError",
            )
        reply = api.reply(self._model, prompt_tokens, request)
        number, sequence = self.engine.submit(prompt_tokens, output_tokens)
        watch = asyncio.ensure_future(receive())
        try:
            if request.get("stream") and api.output_limits:
                await self._stream(send, reply, sequence, watch)
            else:
                await self._whole(send, reply, sequence, watch)
        finally:
            watch.cancel()
            self.engine.abort(number)

    # --- /v1/responses keeps its answers, as vLLM does with VLLM_ENABLE_RESPONSES_API_STORE=1 ---

    def _tokens_before(self, request: dict[str, Any]) -> int:
        """Tokens of what a request goes on from."""
        before = request.get("previous_response_id")
        if before is None:
            return 0
        return int(json.loads(self._response(str(before)))["usage"]["total_tokens"])

    def _response(self, response_id: str) -> bytes:
        if response_id not in self._responses:
            raise HttpError(404, f"Response with id '{response_id}' not found.", kind="invalid_request_error")
        return self._responses[response_id]

    def _keep(self, reply: Reply, output_tokens: int) -> None:
        if isinstance(reply, ResponsesReply):
            self._responses[reply.id] = reply.whole(output_tokens)
            if len(self._responses) > _MOST_RESPONSES:
                self._responses.popitem(last=False)

    async def _answer_about_response(self, send: Send, path: str, method: str) -> None:
        response_id, _, verb = path.removeprefix("/v1/responses/").partition("/")
        kept = self._response(response_id)
        if method == "POST" and verb == "cancel":
            raise HttpError(400, "Cannot cancel a synchronous response.")
        if method != "GET" or verb:
            raise HttpError(405, "Method Not Allowed", kind="MethodNotAllowed")
        await answer(send, 200, kept)

    def _parsed(self, body: bytes) -> dict[str, Any]:
        try:
            request = json.loads(body)
        except (ValueError, RecursionError):
            raise HttpError(400, "JSON decode error", kind="BadRequestError") from None
        if not isinstance(request, dict):
            raise HttpError(400, "the body must be an object", kind="BadRequestError")
        if request.get("model", self._model) != self._model:
            raise HttpError(404, f"The model `{request['model']}` does not exist.", kind="NotFoundError")
        return request

    async def _whole(self, send: Send, reply: Reply, sequence: Sequence, watch: "asyncio.Future[Any]") -> None:
        while not sequence.is_finished:
            await self._wait(sequence, watch)
        self._observe(sequence)
        self._keep(reply, sequence.output_tokens)
        await answer(send, 200, reply.whole(sequence.output_tokens))

    async def _stream(self, send: Send, reply: Reply, sequence: Sequence, watch: "asyncio.Future[Any]") -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        num_sent = 0
        if reply.begins_at_once:
            await send({"type": "http.response.body", "body": reply.begin(), "more_body": True})
        while num_sent < sequence.output_tokens:
            await self._wait(sequence, watch)
            events = [reply.begin()] if num_sent == 0 and not reply.begins_at_once else []
            while num_sent < sequence.num_made:
                num_sent += 1
                events.append(reply.token(is_last=num_sent == sequence.output_tokens))
            await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
        self._observe(sequence)
        self._keep(reply, num_sent)
        await send({"type": "http.response.body", "body": reply.end(num_sent)})

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
