"""Requests taken strictly: one form of the target, whatever the client wrote, one Host, and which paths may pass."""

import re
from collections.abc import Iterable
from fnmatch import translate
from urllib.parse import quote, unquote_to_bytes

from .http import Headers

#: Paths that the router answers itself, whatever the method and the spelling.
OWN_PATHS = ("/health", "/metrics")

# Most targets are in normal form already.
_NORMAL = re.compile(rb"(?:/[a-z0-9_-]+)+")
_VISIBLE = re.compile(rb"[!-\[\]-~]+")  # printable ASCII without space and backslash
_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=:%\[\]-]*")  # RFC 9110, section 7.2: no path, no user, no list
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_UNQUOTED = "!$&'()*+,;=:@"  # RFC 3986, section 3.3: allowed in a segment as they are


class MalformedError(ValueError):
    """A request that must not be acted on; the message says why, and repeats nothing of what the client wrote."""


def checked_target(method: bytes, target: bytes, headers: Headers, http_version: str) -> bytes:
    """The normal form of a request's target: `/path` or `/path?query`, or `*` for OPTIONS; MalformedError without one.

    Percent-encoding is undone and done again, so that a path has one spelling; doubled and trailing slashes and dot
    segments go. Every byte of the result comes after a `/`: glued to the address of a backend it cannot change host or
    port.
    """
    host = _only_host(headers, http_version)
    _check_transfer_encoding(headers, http_version)
    if _NORMAL.fullmatch(target):
        return target
    if not _VISIBLE.fullmatch(target):
        raise MalformedError("the request target has a character that must be percent-encoded")
    if b"#" in target:
        raise MalformedError("the request target has a fragment")
    if target == b"*" and method == b"OPTIONS":
        return target
    path, mark, query = _origin_form(target, host).partition(b"?")
    return _normal_path(path) + mark + query


def _only_host(headers: Headers, http_version: str) -> bytes:
    hosts = [value.strip() for name, value in headers if name == b"host"]
    if len(hosts) > 1:
        raise MalformedError("there must be one Host header, not several")
    if not hosts and http_version != "1.0":
        raise MalformedError("there must be a Host header")
    host = hosts[0] if hosts else b""
    if not _HOST.fullmatch(host):
        raise MalformedError("the Host header must be HOST or HOST:PORT")
    return host


def _check_transfer_encoding(headers: Headers, http_version: str) -> None:
    """Other encodings, and any in HTTP/1.0, are read in one way here and in another elsewhere (RFC 9112, section 6)."""
    for name, value in headers:
        if name == b"transfer-encoding" and (value.strip().lower() != b"chunked" or http_version == "1.0"):
            raise MalformedError("Transfer-Encoding may be chunked, in HTTP/1.1")


def _origin_form(target: bytes, host: bytes) -> bytes:
    """The target from its path on; the absolute form is taken where its authority is that of the Host header."""
    if target.startswith(b"/"):
        return target
    scheme, _, rest = target.partition(b"://")
    authority, after = rest[: len(host)], rest[len(host) :]
    is_own = bool(host) and scheme.lower() in (b"http", b"https") and authority.lower() == host.lower()
    if not is_own or after[:1] not in (b"", b"/", b"?"):
        raise MalformedError("the request target must begin with /")
    return after if after.startswith(b"/") else b"/" + after


def _normal_path(path: bytes) -> bytes:
    try:
        text = unquote_to_bytes(path).decode()
    except UnicodeDecodeError:
        raise MalformedError("the path must be UTF-8") from None
    if "%" in text:
        raise MalformedError("the path is percent-encoded twice, or not as it should be")
    if "\\" in text or _CONTROL.search(text):
        raise MalformedError("the path has a backslash or a control character")
    segments: list[str] = []
    for segment in text.split("/"):
        if segment == "..":
            del segments[-1:]
        elif segment not in ("", "."):
            segments.append(segment)
    text = "/" + "/".join(segments)
    return quote(text.lower() if text.lower() in OWN_PATHS else text, safe="/" + _UNQUOTED).encode()


class PassPaths:
    """The paths that go to backends: shell patterns over normal forms, where `*` is any characters, slashes too."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._pattern = re.compile("|".join(map(translate, patterns)) or "(?!)")

    def allow(self, path: str) -> bool:
        """Whether a path may pass. What begins as our metrics never may: vLLM answers all of it with its own."""
        lowered = path.lower()
        return self._pattern.match(path) is not None and lowered not in OWN_PATHS and not lowered.startswith("/metrics")
