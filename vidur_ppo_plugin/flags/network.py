"""The policy's network, its features and its prior."""

from dataclasses import dataclass

from .flag import flag, require


@dataclass
class NetworkFlags:
    """The policy's shape, and what it starts from."""

    enable_decoupled_ac: bool = flag(True, "Separate branches for actor and critic; otherwise one shared trunk.")
    enable_flat_network: bool = flag(
        False, "Concatenate replicas in order (the plan's network) instead of a set encoder."
    )
    feature_projection_dim: int = flag(
        64, "Width of the feature projection. Raise it for richer features, lower it for speed.", low=1, high=4096
    )
    hidden_size: int = flag(
        64, "Width of the branches. Raise it for richer policies, lower it for faster decisions.", low=1, high=4096
    )
    critic_gru_layers: int = flag(
        1, "Layers of the critic's memory. Raise it if explained_variance is low, lower it for speed.", low=0, high=8
    )
    attention_heads: int = flag(
        0,
        "Attention across replicas; 0 pools mean and maximum. Raise it if replicas must be told apart in detail, "
        "lower it for faster decisions (attention acts in torch, not in numpy).",
        low=0,
        high=64,
    )
    prior: str = flag(
        "least_tokens",
        "The heuristic that the policy is a residual of: untrained, it is exactly this heuristic.",
        choices=[
            "none",
            "least_outstanding",
            "least_kv",
            "least_tokens",
            "shortest_delay",
            "log_least_tokens",
            "log_least_work",
        ],
    )
    prior_weight: float = flag(
        3.0, "Weight of the prior's logits. Lower it to learn away from it sooner, raise it to stay with it.", low=0
    )
    max_candidates: int = flag(
        0,
        "Score only this many replicas, the prior's choice among them; 0 for all. Lower it if deciding is too slow "
        "in a large fleet, raise it to look further.",
        low=0,
    )
    max_queue_requests_per_replica: int = flag(
        4,
        "Waiting requests of each replica that are features. Raise it if long queues differ in what waits, lower it "
        "for faster decisions.",
        low=0,
        high=64,
    )
    trend_window: int = flag(
        32, "Decisions that a trend's moving average remembers. Raise it for slow trends, lower it for bursts.", low=1
    )
    request_scale: float = flag(
        8.0, "Requests at which a count's feature bends. Raise it for long queues, lower it for short ones.", above=0
    )
    token_scale: float = flag(
        4096.0, "Tokens at which a token feature bends. Raise it for long prompts, lower it for short ones.", above=0
    )
    time_scale_s: float = flag(
        2.0, "Seconds at which a time's feature bends. Raise it for slow clusters, lower it for fast ones.", above=0
    )


def check_network(flags: NetworkFlags) -> None:
    """ValueError naming the flag if parts of the network do not fit each other."""
    heads, is_flat = flags.attention_heads, flags.enable_flat_network
    require(flags, not (heads and is_flat), "attention_heads", "0 with the flat network")
    is_divisor = not heads or flags.hidden_size % heads == 0
    require(flags, is_divisor, "attention_heads", f"a divisor of hidden_size ({flags.hidden_size})")
    require(flags, not (flags.max_candidates and is_flat), "max_candidates", "0 with the flat network")
    require(flags, flags.max_candidates != 1, "max_candidates", "0 (all) or at least 2")
