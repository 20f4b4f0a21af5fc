"""A backend that answers at once, for measuring routers: vLLM's paths, a fixed short completion, no work.

python benchmarks/_instant_backend.py PORT
"""

import asyncio
import json
import sys

import httptools
import uvloop

ANSWER = json.dumps(
    {
        "id": "cmpl-0",
        "object": "text_completion",
        "created": 1,
        "model": "instant",
        "choices": [{"index": 0, "text": " word" * 8, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 8, "completion_tokens": 8, "total_tokens": 16},
    }
).encode()
METRICS = b"".join(
    b'vllm:%b{engine="0",model_name="instant"} 0.0\n' % name
    for name in (b"num_requests_running", b"num_requests_waiting", b"kv_cache_usage_perc")
)
PAGES = {
    b"/metrics": METRICS,
    b"/health": b"",
    b"/v1/models": b'{"object":"list","data":[{"id":"instant","object":"model"}]}',
    b"/get_server_info": b'{"model_path":"instant"}',
    b"/get_model_info": b'{"model_path":"instant","is_generation":true}',
}


class Protocol(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_message_complete(self) -> None:
        body = PAGES.get(self._url, ANSWER)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)  # type: ignore[attr-defined]


async def main(port: int) -> None:
    """Serve for ever."""
    server = await asyncio.get_running_loop().create_server(Protocol, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.install()
    asyncio.run(main(int(sys.argv[1])))
