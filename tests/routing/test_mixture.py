"""Teachers by name and weight, as a flag gives them."""

import pytest

from vidur_ppo_plugin.routing.heuristics import TEACHERS
from vidur_ppo_plugin.routing.mixture import parse_mixture


def test_mixtures() -> None:
    assert parse_mixture("lor") == {"lor": 1.0}
    assert parse_mixture("least_tokens:0.7, round_robin:0.3") == pytest.approx(
        {"least_tokens": 0.7, "round_robin": 0.3}
    )
    assert parse_mixture("random,lor:3") == {"random": 0.25, "lor": 0.75}
    assert set(parse_mixture(",".join(TEACHERS))) == set(TEACHERS)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "least_token",
            r"unknown teacher 'least_token' \(did you mean least_tokens\?\): choose from random, round_robin",
        ),
        ("lor,,random", "unknown teacher ''"),
        ("lor,lor:2", "'lor' is named twice"),
        ("lor:much", "weight of lor must be a number, got 'much'"),
        ("lor:", "weight of lor must be a number, got ''"),
        ("lor:0", "weight of lor must be finite and > 0, got '0'"),
        ("lor:nan", "weight of lor must be finite and > 0"),
        ("lor:inf", "weight of lor must be finite and > 0"),
    ],
)
def test_a_bad_mixture_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_mixture(text)
