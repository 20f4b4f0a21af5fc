"""Load and faults, with real processes: a backend that dies and returns, one that is slow, floods of bad requests."""

import asyncio
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from serving import Process, Result, open_loop, router_process, stand_ins, stream


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Process]]:
    with stand_ins(tmp_path, (), ()) as processes:
        yield processes


async def placements(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with session.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    found = (line for line in lines if line.startswith("vidur_ppo_placements_total{"))
    return {line.split('"')[1]: float(line.split()[-1]) for line in found}


def test_a_backend_that_dies_and_returns_loses_nothing_that_had_not_begun(pair: list[Process], tmp_path: Path) -> None:
    with router_process(tmp_path, pair, "--policy", "least_tokens", "--health-interval", 0.3) as router:

        async def play() -> tuple[list[Result], list[Result]]:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                # 200 at once; 40 further ones while the backend is away. Prompts are long enough that many wait.
                tasks = [asyncio.create_task(stream(session, router.url, 600, 60)) for _ in range(200)]
                await asyncio.sleep(1.5)
                pair[0].kill()
                for _ in range(40):
                    tasks.append(asyncio.create_task(stream(session, router.url, 50, 20)))
                    await asyncio.sleep(0.02)
                pair[0].start()
                results = await asyncio.gather(*tasks)
                await asyncio.to_thread(pair[0].wait_until_up)
                await asyncio.sleep(1.0)
                before = await placements(session, router.url)
                later = await asyncio.gather(*(stream(session, router.url, 50, 20) for _ in range(40)))
                after = await placements(session, router.url)
            name = pair[0].url.partition("//")[2]
            assert after[name] > before[name], "the backend that came back gets requests again"
            return results, later

        results, later = asyncio.run(play())
    kinds = Counter(
        "whole" if r.is_whole else "clean error" if r.num_events and r.error and r.is_complete else repr(r)
        for r in results
    )
    assert set(kinds) == {"whole", "clean error"}, kinds
    # Streams that had begun on the one that died: some, and at most half of the first 200.
    assert 0 < kinds["clean error"] <= 110
    assert all(r.num_events == 60 for r in results[:200] if r.is_whole)
    assert all(r.is_whole for r in later)


def test_a_slow_backend_gets_little_and_latency_beats_round_robin(tmp_path: Path) -> None:
    means, shares = {}, {}
    with stand_ins(tmp_path, (), ("--speed", "0.333")) as (fast, slow):
        for policy in ("round_robin", "least_tokens"):
            with router_process(tmp_path, [fast, slow], "--policy", policy) as router:

                async def play(url: str = router.url) -> tuple[list[Result], dict[str, float]]:
                    results = await open_loop(url, qps=12.0, num_requests=96, seed=7, prompt_tokens=1500, max_tokens=40)
                    async with aiohttp.ClientSession() as session:
                        return results, await placements(session, url)

                results, counts = asyncio.run(play())
            assert all(result.is_whole for result in results)
            means[policy] = sum(result.latency_s for result in results) / len(results)
            shares[policy] = counts[slow.url.partition("//")[2]] / counts[fast.url.partition("//")[2]]
    assert shares["round_robin"] == pytest.approx(1.0)
    assert shares["least_tokens"] < 0.5, shares
    assert means["least_tokens"] < means["round_robin"], means


def test_a_flood_of_bad_requests_leaves_good_ones_unharmed(pair: list[Process], tmp_path: Path) -> None:
    options = ("--policy", "least_tokens", "--client-timeout", 3, "--max-header-bytes", 8192)
    with router_process(tmp_path, pair, *options) as router:
        port = int(router.url.rpartition(":")[2])

        async def good() -> list[Result]:
            return await open_loop(router.url, qps=20.0, num_requests=60, seed=3, prompt_tokens=50, max_tokens=10)

        async def malformed(session: aiohttp.ClientSession) -> int:
            async with session.post(f"{router.url}/v1/completions", data=b'{"prompt": "abc') as answer:
                await answer.read()
                return answer.status

        async def raw(data: bytes) -> bytes:
            """Send something, and what comes back until the router hangs up."""
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            try:
                return await asyncio.wait_for(reader.read(), 10)
            except ConnectionError:
                return b""
            finally:
                writer.close()

        async def play() -> None:
            alone = await good()
            huge = b"GET / HTTP/1.1\r\nx: " + b"a" * 100_000 + b"\r\n\r\n"
            slow_body = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=50)) as session:
                bad = [malformed(session) for _ in range(300)]
                bad_raw = [raw(data) for data in (huge, b"GET / HTTP/1.1\r\nx", slow_body, b"\0\1garbage\r\n\r\n") * 50]
                flood = asyncio.gather(asyncio.gather(*bad), asyncio.gather(*bad_raw))
                results = await good()
                statuses, answers = await flood
            assert set(statuses) == {400}
            kinds = Counter(answer.split(b"\r\n")[0] for answer in answers)
            assert kinds[b"HTTP/1.1 408 Request Timeout"] == 100, kinds  # slow headers, slow bodies
            assert kinds[b"HTTP/1.1 431 Request Header Fields Too Large"] + kinds[b""] == 50, kinds
            assert kinds[b"HTTP/1.1 400 Bad Request"] == 50, kinds
            assert all(result.is_whole for result in results)
            mean, mean_alone = (sum(r.latency_s for r in some) / len(some) for some in (results, alone))
            assert mean < 3 * mean_alone + 0.2

        asyncio.run(play())
        assert router.process.poll() is None
        assert "Traceback" not in router.log


def test_what_is_malformed_behind_other_requests_is_one_line_of_log(pair: list[Process], tmp_path: Path) -> None:
    body = b'{"prompt": "x", "max_tokens": 200}'
    good = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    chunked = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    with router_process(tmp_path, pair) as router:
        for data in (good + chunked + b"zz\r\n", good + good + chunked + b"5\r\nhelloXX\r\n", good + b"\0"):
            for _ in range(5):
                with socket.create_connection(("127.0.0.1", int(router.url.rpartition(":")[2])), timeout=10) as sock:
                    sock.sendall(data)
                    assert sock.recv(100).startswith(b"HTTP/1.1 400 ")
        time.sleep(0.2)
        log = router.log
    assert "Traceback" not in log and " ERROR " not in log, log
    assert log.count("WARNING refused a request of 127.0.0.1: ") == log.count(" WARNING ") == 15, log


def test_the_process_imports_neither_torch_nor_vidur(tmp_path: Path) -> None:
    """Checked from outside: no library of theirs is mapped into the router while it serves with a learned policy."""
    from policies import save_policy

    with stand_ins(tmp_path, ()) as processes:
        policy = save_policy(tmp_path / "policy.npz")
        with router_process(tmp_path, processes, "--policy", policy) as router:
            results = asyncio.run(open_loop(router.url, qps=50.0, num_requests=10, seed=1))
            assert all(result.is_whole for result in results)
            mapped = Path(f"/proc/{router.process.pid}/maps").read_text()
        assert "numpy" in mapped  # what is looked for would be found
        assert "libtorch" not in mapped and "/vidur/" not in mapped


def test_it_ends_gracefully(pair: list[Process], tmp_path: Path) -> None:
    with router_process(tmp_path, pair) as router:

        async def play() -> Result:
            async with aiohttp.ClientSession() as session:
                task = asyncio.create_task(stream(session, router.url, 50, 150))
                await asyncio.sleep(0.5)
                router.process.terminate()
                await asyncio.sleep(0.5)
                with pytest.raises(aiohttp.ClientConnectionError):
                    await session.get(f"{router.url}/health")
                return await task

        result = asyncio.run(play())
        assert result.is_whole and result.num_events == 150
        assert router.process.wait(timeout=10) == 0


async def health(session: aiohttp.ClientSession, url: str) -> tuple[int, str]:
    async with session.get(f"{url}/health") as answer:
        return answer.status, (await answer.json())["status"]


def test_load_balancers_see_that_it_leaves_before_it_does(pair: list[Process], tmp_path: Path) -> None:
    with router_process(tmp_path, pair, "--drain-grace", 3) as router:

        async def play() -> None:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
                assert await health(session, router.url) == (200, "ok")
                begun = time.monotonic()
                router.process.terminate()
                while await health(session, router.url) != (503, "stopping"):
                    assert time.monotonic() < begun + 2
                # On new connections, in the grace: served as before.
                results = await asyncio.gather(*(stream(session, router.url, 50, 5) for _ in range(4)))
                assert all(result.is_whole for result in results)
                with pytest.raises(aiohttp.ClientConnectionError):
                    while True:
                        assert await health(session, router.url) == (503, "stopping")
                        await asyncio.sleep(0.05)
                assert 2.9 < time.monotonic() - begun < 6

        asyncio.run(play())
        assert router.process.wait(timeout=10) == 0
        assert "leaving: /health says 503 for 3 s" in router.log


def test_another_signal_or_ctrl_c_skips_the_grace(pair: list[Process], tmp_path: Path) -> None:
    for numbers in ((signal.SIGTERM, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT), (signal.SIGINT,)):
        with router_process(tmp_path, pair, "--drain-grace", 60) as router:
            begun = time.monotonic()
            for number in numbers:
                router.process.send_signal(number)
                time.sleep(0.3)
            assert router.process.wait(timeout=20) == 0
            assert time.monotonic() - begun < 15


def test_wrong_options_are_named(tmp_path: Path) -> None:
    import subprocess
    import sys

    cases = {
        ("--policy", "least_token"): "did you mean 'least_tokens'",
        ("--backend", "ftp://x"): "--backend must be like http://HOST:PORT, got 'ftp://x'",
        ("--explore", "1.5"): "--explore must be >= 0 and < 1, got 1.5",
        ("--drain-grace", "-1"): "--drain-grace must be >= 0, got -1.0",
        ("--pass-paths", "/tokenize,sleep"): "--pass-paths must be paths that begin with /, or *, got 'sleep'",
        ("--admin-port", "7777"): "--admin-port needs a key",
        ("--policy", "pretrained_.npz"): "pretrained_.npz",
        ("--tls-cert", "nowhere.pem"): "--tls-cert and --tls-key must be given together",
    }
    for arguments, expected in cases.items():
        command = [sys.executable, "-m", "vidur_ppo_plugin.cli", "serve", "--backend", "http://127.0.0.1:1", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert expected in done.stderr and "Traceback" not in done.stderr


def test_a_port_that_is_taken_is_named() -> None:
    import subprocess
    import sys

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        command = [sys.executable, "-m", "vidur_ppo_plugin.cli", "serve", "--backend", "http://127.0.0.1:1"]
        done = subprocess.run([*command, "--port", str(port)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
