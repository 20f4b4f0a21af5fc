"""The feature table that the flags of `ppo_modular` describe; needs no torch."""

from vidur_ppo_plugin.flags import PPOModularFlags
from vidur_ppo_plugin.routing.features import FeatureScales, FeatureTable


def build_features(flags: PPOModularFlags) -> FeatureTable:
    """A table without a history."""
    return FeatureTable(
        num_waiting_slots=flags.max_queue_requests_per_replica,
        trend_window=flags.trend_window,
        scales=FeatureScales(requests=flags.request_scale, tokens=flags.token_scale, seconds=flags.time_scale_s),
        tail_preference=flags.tail_preference,
    )
