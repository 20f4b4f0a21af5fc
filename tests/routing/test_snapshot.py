"""What a router remembers of the prompts that it sent to a replica."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidur_ppo_plugin.routing.averages import PROMPT_MEMORY_TOKENS, updated_typical_prompt


def test_the_first_prompt_is_typical() -> None:
    assert updated_typical_prompt(0.0, 700) == 700.0


def test_prompts_count_by_their_tokens() -> None:
    """Nine short prompts and a long one with as many tokens as they weigh about the same."""
    typical = 100.0
    for _ in range(200):
        for _ in range(100):
            typical = updated_typical_prompt(typical, 100)
        typical = updated_typical_prompt(typical, 10_000)
    assert typical == pytest.approx((100 * 100**2 + 10_000**2) / 20_000, rel=0.15)


def test_memory_lasts_about_as_many_tokens_as_it_says() -> None:
    typical, sent = 16_000.0, 0
    while sent < PROMPT_MEMORY_TOKENS:
        typical = updated_typical_prompt(typical, 512)
        sent += 512
    assert typical == pytest.approx(512 + (16_000 - 512) * 0.3679, rel=0.01)


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=50))
def test_it_stays_between_the_shortest_and_the_longest(prompts: list[int]) -> None:
    typical = 0.0
    for prompt in prompts:
        typical = updated_typical_prompt(typical, prompt)
    assert min(prompts) - 1e-6 <= typical <= max(prompts) + 1e-6
