"""The router's own metrics, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_DECISION_BUCKETS = (2e-5, 5e-5, 1e-4, 1.5e-4, 2.5e-4, 5e-4, 1e-3, 5e-3, 2.5e-2)
_SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Instruments:
    """Every figure by its name; docs/serving.md explains them."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "vidur_ppo_requests", "Answers, by path and status code.", ["path", "code"], registry=registry
        )
        self.placements = Counter("vidur_ppo_placements", "Requests sent there.", ["backend"], registry=registry)
        self.decision_seconds = Histogram(
            "vidur_ppo_decision_seconds",
            "Time of a decision: snapshot, policy, choice.",
            buckets=_DECISION_BUCKETS,
            registry=registry,
        )
        self.ttft_seconds = Histogram(
            "vidur_ppo_time_to_first_token_seconds",
            "From the request's arrival to the first token of a stream.",
            buckets=_SECONDS_BUCKETS,
            registry=registry,
        )
        self.latency_seconds = Histogram(
            "vidur_ppo_request_seconds",
            "From the request's arrival to the end of its answer.",
            buckets=_SECONDS_BUCKETS,
            registry=registry,
        )
        self.errors = Counter(
            "vidur_ppo_errors", "Requests that backends failed, by kind.", ["backend", "kind"], registry=registry
        )
        self.retries = Counter("vidur_ppo_retries", "Requests sent again, elsewhere.", registry=registry)
        self.rejected = Counter("vidur_ppo_rejected", "Requests turned away, by reason.", ["reason"], registry=registry)
        self.disconnects = Counter("vidur_ppo_client_disconnects", "Clients that went away.", registry=registry)
        self.fallbacks = Counter(
            "vidur_ppo_fallback_decisions", "Decisions that the policy could not make.", registry=registry
        )
        self.explored = Counter("vidur_ppo_explored", "Requests placed at random.", registry=registry)
        self.shadow = Counter(
            "vidur_ppo_shadow_decisions",
            "Decisions that the shadow policy was asked about: same, other, or failed.",
            ["result"],
            registry=registry,
        )
        self.in_flight = Gauge("vidur_ppo_in_flight", "Requests on their way.", ["backend"], registry=registry)
        self.backend_up = Gauge("vidur_ppo_backend_up", "1 if it answers.", ["backend"], registry=registry)
        self.circuit_open = Gauge("vidur_ppo_circuit_open", "1 if it is left alone.", ["backend"], registry=registry)
        self.stale = Gauge(
            "vidur_ppo_backend_metrics_stale", "1 if its metrics are too old to go by.", ["backend"], registry=registry
        )
        self.record_dropped = Counter(
            "vidur_ppo_record_dropped", "Decisions that could not be written to the record in time.", registry=registry
        )
        self.prompt_tokens = Counter("vidur_ppo_prompt_tokens", "Prompt tokens, estimated.", registry=registry)
        self.output_tokens = Counter("vidur_ppo_output_tokens", "Tokens sent to clients.", registry=registry)

    def page(self) -> bytes:
        """The text of the metrics page."""
        return generate_latest(self.registry)

    def forget(self, backend: str) -> None:
        """A backend is gone: its gauges too, so that none shows a value for ever."""
        for gauge in (self.in_flight, self.backend_up, self.circuit_open, self.stale):
            if (backend,) in gauge._metrics:
                gauge.remove(backend)
