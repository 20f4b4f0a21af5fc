"""Policies by name: a heuristic, a file of `vidur-ppo export`, or the one that comes with the package.

least_tokens                                          a heuristic of ours, or one of Vidur's own
size_split:threshold_tokens=4096,num_long_replicas=1  one with options
policy.npz                                            a learned policy
pretrained@0.25                                       one with a tail preference: 0 for the mean, 1 for the tail
"""

import random
from pathlib import Path

from vidur_ppo_plugin import pretrained
from vidur_ppo_plugin._autoload import suggestion
from vidur_ppo_plugin.hardware.reference import CHUNK_SIZE, reference_roofline
from vidur_ppo_plugin.policy.policy import Policy
from vidur_ppo_plugin.routing.delay_model import DelayModel
from vidur_ppo_plugin.routing.routers import HEURISTICS, STOCK, Router, build_router

SUFFIX = ".npz"


def build_policy(text: str, *, seed: int) -> Router:
    """The router that a name stands for; ValueError says what is wrong with it and what would be right."""
    learned, at, preference = text.rpartition("@") if "@" in text else (text, "", "")
    shipped = pretrained.find(learned)
    if shipped is not None or learned.endswith(SUFFIX):
        if shipped is not None:
            shipped.verify()
        return Policy.load(
            Path(learned) if shipped is None else shipped.policy,
            rng=random.Random(seed),
            delay_model=reference_delay_model(),
            tail_preference=_preference(text, preference) if at else None,
        )
    name, _, rest = text.partition(":")
    names = (*STOCK, *HEURISTICS)
    if name not in names:
        known = (*names, *pretrained.names())
        raise ValueError(
            f"unknown policy {text!r}{suggestion(name, known)}: expected one of {', '.join(known)}, or a file of "
            f"`vidur-ppo export` that ends in {SUFFIX}"
        )
    options = _options(name, rest)
    return build_router(name, seed=seed, delay_model=reference_delay_model(), options=options)


def is_learned(router: Router) -> bool:
    """Whether a router was learned, rather than written."""
    return isinstance(router, Policy)


def reference_delay_model() -> DelayModel:
    """What work costs on the replica that our scenarios simulate; real ones differ by a factor, which cancels out."""
    return DelayModel.from_roofline(reference_roofline(), CHUNK_SIZE)


def _preference(text: str, number: str) -> float:
    try:
        preference = float(number)
    except ValueError:
        preference = -1.0
    if not 0.0 <= preference <= 1.0:
        raise ValueError(f"policy {text!r}: the tail preference after @ must be >= 0 and <= 1, got {number!r}")
    return preference


def _options(name: str, text: str) -> dict[str, float]:
    known = {option.name: option for option in HEURISTICS[name].constant_options} if name in HEURISTICS else {}
    options: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in known or not equals:
            expected = ", ".join(f"{option}=VALUE" for option in known) or "no options"
            raise ValueError(f"policy {name}: expected {expected}, got {part!r}")
        try:
            options[key] = type(known[key].default)(value)
        except ValueError:
            raise ValueError(f"policy {name}: {key} must be a number, got {value!r}") from None
        if options[key] < 0:
            raise ValueError(f"policy {name}: {key} must be >= 0, got {value!r}")
    return options
