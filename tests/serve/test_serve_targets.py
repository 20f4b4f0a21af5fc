"""The normal form of request targets, which paths pass, and the last look at the address before a request is sent."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from yarl import URL

from vidur_ppo_plugin.serve.breaker import CircuitBreaker
from vidur_ppo_plugin.serve.fleet import Backend
from vidur_ppo_plugin.serve.http import HttpError
from vidur_ppo_plugin.serve.settings import ServeSettings, SettingsError
from vidur_ppo_plugin.serve.source import VllmReplicaSource
from vidur_ppo_plugin.serve.targets import MalformedError, PassPaths, checked_target
from vidur_ppo_plugin.serve.upstream import checked_url

HOST = (b"host", b"router:8000")


def normal(target: bytes, method: bytes = b"GET") -> bytes:
    return checked_target(method, target, [HOST], "1.1")


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (b"/v1/completions", b"/v1/completions"),
        (b"/", b"/"),
        (b"/v1/Models/a.b-c?x=%2F&y=1%202", b"/v1/Models/a.b-c?x=%2F&y=1%202"),  # the query stays as it is
        (b"//health", b"/health"),
        (b"/health/", b"/health"),
        (b"/./health", b"/health"),
        (b"/v1/../health", b"/health"),
        (b"/../../health", b"/health"),
        (b"/%68ealth", b"/health"),
        (b"/v1%2Fcompletions", b"/v1/completions"),
        (b"/%2e%2e/Health", b"/health"),
        (b"/METRICS?a", b"/metrics?a"),
        (b"/v1/completions?", b"/v1/completions?"),
        (b"/a%3Fb%23c%20d", b"/a%3Fb%23c%20d"),
        (b"/%C3%A9", b"/%C3%A9"),
        (b"/@127.0.0.1:1/x", b"/@127.0.0.1:1/x"),
        (b"http://router:8000/v1/models", b"/v1/models"),
        (b"HTTPS://ROUTER:8000", b"/"),
        (b"http://router:8000?a=b", b"/?a=b"),
    ],
)
def test_a_path_has_one_spelling(target: bytes, expected: bytes) -> None:
    assert normal(target) == expected


@pytest.mark.parametrize(
    "target",
    [
        b"*",
        b"*@127.0.0.1:8001/metrics",
        b"*:8001/",
        b"@host/",
        b":80/",
        b"health",
        b"",
        b"?a",
        b"http://elsewhere/v1/models",
        b"http://router:80001/v1/models",  # begins as the router's address
        b"http://router:8000@elsewhere/",
        b"http://user@router:8000/",
        b"ftp://router:8000/",
        b"router:8000",
        b"/\\elsewhere",
        b"\\\\elsewhere/",
        b"/%5cx",
        b"/a#b",
        b"/a b",
        b"/a\x00",
        b"/%00",
        b"/%0d%0aX: y",
        b"/\xc3\xa9",
        b"/%ff",
        b"/%C2%85",
        b"/%2568ealth",
        b"/100%",
    ],
)
def test_what_is_no_path_is_refused(target: bytes) -> None:
    with pytest.raises(MalformedError):
        normal(target)


def test_the_star_is_for_options() -> None:
    assert normal(b"*", b"OPTIONS") == b"*"
    with pytest.raises(MalformedError):
        normal(b"*@host", b"OPTIONS")


@pytest.mark.parametrize(
    ("headers", "version"),
    [
        ([], "1.1"),
        ([], "0.9"),
        ([HOST, HOST], "1.1"),
        ([HOST, HOST], "1.0"),
        ([(b"host", b"user@router")], "1.1"),
        ([(b"host", b"a, b")], "1.1"),
        ([(b"host", b"a/b")], "1.1"),
        ([HOST, (b"transfer-encoding", b"gzip, chunked")], "1.1"),
        ([HOST, (b"transfer-encoding", b"chunked")], "1.0"),
    ],
)
def test_headers_that_can_be_read_in_two_ways_are_refused(headers: list[tuple[bytes, bytes]], version: str) -> None:
    with pytest.raises(MalformedError):
        checked_target(b"GET", b"/health", headers, version)


def test_headers_that_are_right_pass() -> None:
    for headers, version in (
        ([], "1.0"),
        ([(b"host", b"")], "1.1"),
        ([(b"host", b"[::1]:80")], "1.1"),
        ([HOST, (b"transfer-encoding", b"Chunked")], "1.1"),
    ):
        assert checked_target(b"GET", b"/health", headers, version) == b"/health"


PIECES = (
    *"/*@:?#\\.%;~",
    "..",
    "//",
    "%2e",
    "%2F",
    "%5c",
    "%25",
    "http://",
    "router:8000",
    "127.0.0.1:1",
    "metrics",
    "a",
)


@given(st.one_of(st.lists(st.sampled_from(PIECES), max_size=8).map(lambda some: "".join(some).encode()), st.binary()))
@example(b"/%2e%2e//metrics/")
def test_whatever_comes_it_cannot_lead_elsewhere(target: bytes) -> None:
    try:
        result = normal(target)
    except MalformedError:
        return
    path = result.partition(b"?")[0]
    assert path.startswith(b"/") and b"//" not in path and b"\\" not in path
    assert not {b".", b".."} & set(path.split(b"/"))
    assert path == b"/" or not path.endswith(b"/")
    assert normal(result) == result
    url = URL("http://127.0.0.1:9" + result.decode(), encoded=True)
    assert url.raw_authority == "127.0.0.1:9" and url.raw_path_qs.rstrip("?") == result.decode().rstrip("?")


def test_public_paths_pass_and_those_for_developers_do_not() -> None:
    paths = PassPaths(ServeSettings().pass_patterns)
    for path in (
        *("/v1/models/m", "/v1/embeddings", "/v1/responses", "/v1/responses/resp_1/cancel", "/v1/messages"),
        *("/v1/messages/count_tokens", "/v1/audio/transcriptions", "/tokenize", "/detokenize", "/pooling", "/classify"),
        *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/version", "/ping", "/v1/chat/completions"),
    ):
        assert paths.allow(path), path
    for path in (
        *("/reset_prefix_cache", "/sleep", "/wake_up", "/collective_rpc", "/server_info", "/start_profile"),
        *("/stop_profile", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/pause", "/update_weights", "/docs"),
        *("/openapi.json", "/scale_elastic_ep", "/health", "/metrics", "/metrics/x", "/", "*"),
    ):
        assert not paths.allow(path), path
    assert normal(b"/v1/models/%2e%2e/%2e%2e/sleep") == b"/sleep"


def test_patterns_and_what_they_never_open() -> None:
    everything, nothing = PassPaths(["*"]), PassPaths([])
    assert everything.allow("/sleep") and not nothing.allow("/sleep")
    for path in ("/metrics", "/health", "/metrics2", "/metrics;a", "/Metrics/x"):
        assert not everything.allow(path), path
    assert PassPaths(["/a", "/b/*"]).allow("/b/c/d") and not PassPaths(["/a", "/b/*"]).allow("/a/c")
    with pytest.raises(SettingsError, match="--pass-paths must be paths that begin with /, or \\*, got 'sleep'"):
        ServeSettings(backend=["http://a"], pass_paths="/a, sleep").check()


@pytest.mark.parametrize("base", ["http://127.0.0.1:9", "http://127.0.0.1", "https://host/prefix"])
def test_the_address_is_looked_at_once_more_before_sending(base: str) -> None:
    backend = Backend(base, VllmReplicaSource().add(base, 1.0), CircuitBreaker())
    assert str(checked_url(f"{base}/v1/x?a=@b", backend)) == f"{base}/v1/x?a=@b"
    for tail in ("*@127.0.0.1:8001/metrics", "*", "8/x", ":1/x", "@host/", ".evil/x", "", "/a#b", "[/x"):
        with pytest.raises(HttpError) as error:
            checked_url(base + tail, backend)
        assert error.value.status == 400
    for other in ("http://elsewhere/x", "//elsewhere/x", "/x", base.replace("//", "//user@") + "/x"):
        with pytest.raises(HttpError):
            checked_url(other, backend)
