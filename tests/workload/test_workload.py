"""Workloads: their statistics and their streams; a seed gives the same requests however they are drawn."""

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidur_ppo_plugin.workload.arrivals import arrival_times, gaps
from vidur_ppo_plugin.workload.distributions import Fixed, Lognormal, Uniform, parse_distribution
from vidur_ppo_plugin.workload.lengths import BLOCK, parse_lengths
from vidur_ppo_plugin.workload.synthetic import draw_requests

DOCUMENTS = "0.97: lognormal(400, 1.0, 10, 4000) / lognormal(139, 0.97, 5, 2000); 0.03: uniform(8000, 24000) / fixed(7)"


def test_lognormal_has_its_median_spread_and_bounds() -> None:
    values = Lognormal(400, 1.0, 10, 4000).draw(np.random.default_rng(0), 100_000)
    assert values.dtype == np.int64
    assert np.median(values) == pytest.approx(400, rel=0.02)
    assert np.percentile(values, 84.13) == pytest.approx(400 * math.e, rel=0.03)  # one sigma
    assert (values.min(), values.max()) == (10, 4000)  # both bounds are reached: 100,000 draws, 2.3 sigma


def test_uniform_includes_both_bounds_and_fixed_is_fixed() -> None:
    values = Uniform(3, 5).draw(np.random.default_rng(0), 3000)
    assert np.unique(values).tolist() == [3, 4, 5]
    assert Fixed(9).draw(np.random.default_rng(0), 4).tolist() == [9] * 4


def test_a_mixture_has_its_shares() -> None:
    prompts, outputs = parse_lengths(DOCUMENTS).draw(1, 200_000)
    is_document = prompts > 4000
    assert is_document.mean() == pytest.approx(0.03, abs=0.002)
    assert prompts[is_document].min() >= 8000 and prompts[is_document].max() <= 24000
    assert (outputs[is_document] == 7).all()  # prompt and output belong to the same class
    assert (outputs[~is_document] == 7).mean() < 0.01


def test_requests_are_cut_to_max_tokens() -> None:
    prompts, outputs = parse_lengths("uniform(50, 300) / uniform(50, 300)", max_tokens=200).draw(1, 5000)
    assert (prompts + outputs).max() == 200
    assert prompts.max() == 199 and outputs.min() == 1


@given(seed=st.integers(0, 2**31), short=st.integers(0, 3 * BLOCK), more=st.integers(0, BLOCK))
def test_a_longer_run_begins_with_the_same_requests(seed: int, short: int, more: int) -> None:
    lengths = parse_lengths(DOCUMENTS)
    few = draw_requests(lengths, seed, short, qps=3.0, cv=2.0)
    many = draw_requests(lengths, seed, short + more, qps=3.0, cv=2.0)
    assert len(few) == short
    for name in ("arrived_at_s", "prompt_tokens", "decode_tokens"):
        assert np.array_equal(getattr(few, name), getattr(many, name)[:short])


def test_seeds_and_streams_are_independent() -> None:
    lengths = parse_lengths("uniform(1, 1000) / uniform(1, 1000)")
    one, two = (draw_requests(lengths, seed, 20_000, qps=1.0) for seed in (1, 2))
    for a, b in itertools.combinations(
        [one.prompt_tokens, one.decode_tokens, np.diff(one.arrived_at_s, prepend=0.0), two.prompt_tokens], 2
    ):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.03


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gaps_have_their_rate_and_spread(cv: float) -> None:
    arrived_s = arrival_times(3, 400_000, qps=12.0, cv=cv)
    drawn_s = np.diff(arrived_s)
    assert (drawn_s >= 0).all()
    assert 1 / drawn_s.mean() == pytest.approx(12.0, rel=0.02 * max(1.0, cv))
    assert drawn_s.std() / drawn_s.mean() == pytest.approx(cv, rel=0.05)


def test_another_rate_stretches_the_same_gaps() -> None:
    assert next(gaps(5, qps=2.0)) == pytest.approx(next(gaps(5, qps=1.0)) / 2)


def test_a_million_requests_take_a_moment() -> None:
    lengths = parse_lengths(DOCUMENTS)
    started_s = time.perf_counter()
    draw_requests(lengths, 1, 1_000_000, qps=10.0)
    assert time.perf_counter() - started_s < 5.0  # about 0.2 s on a free core


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "expected at least one class"),
        ("lognormal(1, 2, 3, 4)", r"a class is `PROMPT / OUTPUT` or trace\(FILE.csv\), got"),
        ("fixed(1) / fixd(2)", r"expected lognormal\(median, sigma, low, high\) or .*, got 'fixd\(2\)'"),
        ("fixed(1) / uniform(2)", r"uniform takes \(low, high\), got 'uniform\(2\)'"),
        ("fixed(1) / uniform(2, many)", r"uniform takes numbers"),
        ("fixed(1) / uniform(3, 2)", r"1 <= low <= high <= 10000000, got 3 and 2"),
        ("fixed(0) / fixed(1)", "1 <= low"),
        ("lognormal(0, 1, 1, 2) / fixed(1)", "the median must be > 0"),
        ("lognormal(5, -1, 1, 2) / fixed(1)", "sigma must be >= 0"),
        ("fixed(1) / fixed(1); fixed(2) / fixed(2)", "each of several classes needs a weight"),
        ("half: fixed(1) / fixed(1)", "the weight of a class must be a number, got 'half'"),
        ("-1: fixed(1) / fixed(1)", "the weights of a mixture must be finite and > 0"),
        ("trace(/no/such/file.csv)", "/no/such/file.csv: cannot be read"),
    ],
)
def test_bad_texts_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_lengths(text)


def test_a_distribution_reads_as_it_is_written() -> None:
    assert parse_distribution(" lognormal( 245, 1.5 ,10,4000) ") == Lognormal(245, 1.5, 10, 4000)


@pytest.mark.parametrize(("qps", "cv"), [(0.0, 1.0), (math.nan, 1.0), (1.0, 0.0), (1.0, math.inf)])
def test_bad_rates_are_refused(qps: float, cv: float) -> None:
    with pytest.raises(ValueError, match=r"must be finite and > 0"):
        next(gaps(1, qps=qps, cv=cv))
