"""The options of `vidur-ppo serve`, checked as a whole before anything starts."""

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from simple_parsing import field

API_KEY_VARIABLE = "VIDUR_PPO_API_KEY"
ADMIN_KEY_VARIABLE = "VIDUR_PPO_ADMIN_KEY"
BACKEND_KEY_VARIABLE = "VIDUR_PPO_BACKEND_API_KEY"
#: The public paths of OpenAI's and vLLM's API. Not vLLM's development endpoints, which put servers to sleep, change
#: weights or run code, nor its pages for people; nor OpenAI's that are kept by one server (files, batches, threads).
PUBLIC_PATHS = (
    "/v1/models/*,/v1/completions,/v1/completions/render,/v1/chat/completions,/v1/chat/completions/batch,"
    "/v1/chat/completions/render,/v1/responses,/v1/responses/*,/v1/messages,/v1/messages/count_tokens,/v1/embeddings,"
    "/v2/embed,/v1/moderations,/v1/audio/*,/v1/images/*,/pooling,/classify,/score,/v1/score,/rerank,/v1/rerank,"
    "/v2/rerank,/generative_scoring,/tokenize,/detokenize,/invocations,/version,/ping,/load"
)


class SettingsError(ValueError):
    """An option that is not valid; the message names it and says what would be right."""


@dataclass
class ServeSettings:
    """Everything that can be set."""

    # Address of a server that speaks vLLM's API, such as http://127.0.0.1:8001; once for each.
    backend: list[str] = field(default_factory=list, action="append", type=str, metavar="URL")
    # Who decides: a heuristic (NAME or NAME:option=value,...), a file of `vidur-ppo export`, or pretrained.
    policy: str = "least_tokens"
    # Decides where the policy cannot; a heuristic.
    fallback: str = "least_tokens"
    # Another policy that is asked what it would do, without touching traffic.
    shadow: str = ""
    # Share of requests placed at random, which makes a record usable for evaluating other policies.
    explore: float = 0.0
    # File to write decisions and outcomes to, JSON lines without any content of requests.
    record: str = ""
    # Seed of ties and exploration; -1 to draw one.
    seed: int = -1

    # Address to listen on; loopback unless you say otherwise.
    host: str = "127.0.0.1"
    # Port to listen on; 0 for any that is free.
    port: int = 8000
    # Port of the admin paths, which have a listener of their own; 0 for none. Needs an admin key.
    admin_port: int = 0
    # Address that the admin paths listen on.
    admin_host: str = "127.0.0.1"
    # File with the key that clients must show; or VIDUR_PPO_API_KEY in the environment.
    api_key_file: str = ""
    # File with the key that admins must show; or VIDUR_PPO_ADMIN_KEY.
    admin_key_file: str = ""
    # File with the key to show to backends; or VIDUR_PPO_BACKEND_API_KEY.
    backend_key_file: str = ""
    # Certificate, a PEM file: listen with TLS.
    tls_cert: str = ""
    # Its key, a PEM file.
    tls_key: str = ""
    # Certificates to trust in backends that speak TLS, besides the usual ones.
    backend_ca: str = ""

    # Seconds between two looks at a backend's metrics.
    poll_interval: float = 0.5
    # Seconds after which metrics are too old to go by.
    stale_after: float = 3.0
    # Seconds between two health checks.
    health_interval: float = 1.0
    # Health checks in a row that must fail before a backend gets no more requests.
    health_failures: int = 2
    # Failed requests in a row before a backend is left alone for a while.
    breaker_failures: int = 3
    # Other backends to try while the client has not got a byte.
    retries: int = 2

    # Seconds to connect to a backend.
    connect_timeout: float = 2.0
    # Seconds without a byte from a backend.
    response_timeout: float = 600.0
    # Seconds for a client to send its headers, and its body; and to take what is sent to it.
    client_timeout: float = 30.0
    # Seconds after SIGTERM for which requests are served and /health says 503, so that load balancers look elsewhere.
    drain_grace: float = 5.0
    # Seconds that requests get to finish when the router is told to stop.
    shutdown_timeout: float = 30.0
    # Requests in flight; further ones are told to come again (429).
    max_in_flight: int = 2048
    # Requests in flight at one backend.
    max_in_flight_per_backend: int = 512
    # Connections of clients.
    max_connections: int = 4096
    # Largest body of a request.
    max_body_bytes: int = 16 * 1024 * 1024
    # Largest headers of a request.
    max_header_bytes: int = 32 * 1024

    # Paths besides the placed ones that go to backends, with * for anything: /v1/audio/*,/tokenize; * alone for all.
    pass_paths: str = PUBLIC_PATHS

    # Relative speeds of the backends, in their order; only the heuristic shortest_delay goes by them.
    speeds: list[float] = field(default_factory=list)
    # What goes to standard error.
    log_level: str = field(default="info", choices=["debug", "info", "warning", "error"])

    def __post_init__(self) -> None:
        # argparse gives a list for each time that the flag is there.
        given: list[Any] = list(self.backend)
        self.backend = [url for item in given for url in (item if isinstance(item, list) else [item])]

    def check(self) -> None:
        """SettingsError if an option is not valid."""
        if not self.backend:
            raise SettingsError("--backend must be given at least once, such as --backend http://127.0.0.1:8001")
        names = [check_url(url) for url in self.backend]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise SettingsError(f"--backend {twice[0]} is given twice")
        if not 0.0 <= self.explore < 1.0:
            raise SettingsError(f"--explore must be >= 0 and < 1, got {self.explore}")
        if self.speeds and (len(self.speeds) != len(self.backend) or min(self.speeds) <= 0):
            raise SettingsError(f"--speeds must be > 0, one for each of {len(self.backend)} backends: {self.speeds}")
        self._check_numbers()
        for pattern in self.pass_patterns:
            if pattern != "*" and not pattern.startswith("/"):
                raise SettingsError(f"--pass-paths must be paths that begin with /, or *, got {pattern!r}")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise SettingsError("--tls-cert and --tls-key must be given together")
        for flag, path in (("tls-cert", self.tls_cert), ("tls-key", self.tls_key), ("backend-ca", self.backend_ca)):
            if path and not Path(path).is_file():
                raise SettingsError(f"--{flag} must be a file, got {path!r}")
        if self.admin_port and self.admin_key is None:
            raise SettingsError(f"--admin-port needs a key: give --admin-key-file, or set {ADMIN_KEY_VARIABLE}")
        if self.admin_port and self.admin_port == self.port:
            raise SettingsError(f"--admin-port must differ from --port, got {self.port} for both")

    def _check_numbers(self) -> None:
        for name in ("poll_interval", "stale_after", "health_interval", "connect_timeout", "response_timeout"):
            self._check_above_zero(name)
        for name in ("client_timeout", "shutdown_timeout", "max_in_flight", "max_in_flight_per_backend"):
            self._check_above_zero(name)
        for name in ("max_connections", "max_body_bytes", "max_header_bytes", "health_failures", "breaker_failures"):
            self._check_above_zero(name)
        for name in ("retries", "drain_grace"):
            if getattr(self, name) < 0:
                raise SettingsError(f"--{name.replace('_', '-')} must be >= 0, got {getattr(self, name)}")
        for name, port in (("port", self.port), ("admin-port", self.admin_port)):
            if not 0 <= port < 65536:
                raise SettingsError(f"--{name} must be in 0 ... 65535, got {port}")
        if self.stale_after <= self.poll_interval:
            raise SettingsError(
                f"--stale-after must be larger than --poll-interval ({self.poll_interval}), got {self.stale_after}"
            )

    def _check_above_zero(self, name: str) -> None:
        if not getattr(self, name) > 0:
            raise SettingsError(f"--{name.replace('_', '-')} must be > 0, got {getattr(self, name)}")

    @property
    def api_key(self) -> bytes | None:
        """What clients must show; None for nothing."""
        return _key("api-key-file", self.api_key_file, API_KEY_VARIABLE)

    @property
    def admin_key(self) -> bytes | None:
        """What admins must show."""
        return _key("admin-key-file", self.admin_key_file, ADMIN_KEY_VARIABLE)

    @property
    def backend_key(self) -> bytes | None:
        """What the router shows to backends; None to pass on what the client shows."""
        return _key("backend-key-file", self.backend_key_file, BACKEND_KEY_VARIABLE)

    @property
    def pass_patterns(self) -> list[str]:
        """`pass_paths` one by one."""
        return [pattern.strip() for pattern in self.pass_paths.split(",") if pattern.strip()]

    @property
    def is_open_to_others(self) -> bool:
        """Whether other machines can reach the router."""
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host != "localhost"


def check_url(url: str) -> str:
    """The address of a backend in its usual form; SettingsError if it is not valid."""
    parts = urlsplit(url)
    try:
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number
        is_right = False
    if not is_right or parts.query or parts.fragment or parts.username is not None or any(c.isspace() for c in url):
        raise SettingsError(f"--backend must be like http://HOST:PORT, got {url!r}")
    return f"{parts.scheme}://{parts.netloc.lower()}{parts.path.rstrip('/')}"


def _key(flag: str, path: str, variable: str) -> bytes | None:
    if not path:
        return os.environ[variable].encode() if os.environ.get(variable) else None
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise SettingsError(f"--{flag} cannot be read: {error}") from error
    if not key:
        raise SettingsError(f"--{flag} must hold a key, {path} is empty")
    return key
