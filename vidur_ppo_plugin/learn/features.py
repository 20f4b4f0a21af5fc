"""What the flags of `ppo_modular` say of what a policy sees; needs no torch."""

from vidur_ppo_plugin.flags import PPOModularFlags
from vidur_ppo_plugin.policy.policy import Observer
from vidur_ppo_plugin.routing.delay_model import DelayModel
from vidur_ppo_plugin.routing.features import FeatureScales, FeatureTable
from vidur_ppo_plugin.routing.prior import Prior


def build_features(flags: PPOModularFlags) -> FeatureTable:
    """The feature table that the flags describe, without a history."""
    return FeatureTable(
        num_waiting_slots=flags.max_queue_requests_per_replica,
        trend_window=flags.trend_window,
        scales=FeatureScales(requests=flags.request_scale, tokens=flags.token_scale, seconds=flags.time_scale_s),
        tail_preference=flags.tail_preference,
    )


def build_prior(flags: PPOModularFlags, delay_model: DelayModel) -> Prior:
    """The prior that the flags describe: the heuristic that the policy is a residual of."""
    return Prior(flags.prior, weight=flags.prior_weight, delay_model=delay_model)


def build_observer(flags: PPOModularFlags, delay_model: DelayModel) -> Observer:
    """Features and prior that the flags describe, for one run."""
    return Observer(build_features(flags), build_prior(flags, delay_model))
