"""The curriculum: what a flag means, when stages switch, and what is refused."""

import logging
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidur_ppo_plugin.learn.curriculum import EXAMPLE, Curriculum, Stage, parse_stages


def test_the_example_flag() -> None:
    assert parse_stages(EXAMPLE) == [
        Stage(load=0.5, decisions=2000),
        Stage(load=0.8, penalty=0.5, metric="latency_mean", target=6.0, lower_is_better=True, updates=3),
        Stage(load=1.0),
    ]
    assert parse_stages("  ") == [Stage()]
    assert parse_stages(" load = 2 , mean_reward_above = -0.5 , updates = 7 ; penalty=0") == [
        Stage(load=2.0, metric="mean_reward", target=-0.5, lower_is_better=False, updates=7),
        Stage(penalty=0.0),
    ]


STAGES = st.builds(
    Stage,
    load=st.floats(0.01, 10.0),
    penalty=st.floats(0.0, 10.0),
    decisions=st.integers(1, 10_000),
    metric=st.sampled_from(["latency", "ttft_p99"]),
    target=st.floats(-1e9, 1e9),
    lower_is_better=st.booleans(),
    updates=st.integers(1, 9),
)


@given(stages=st.lists(STAGES, max_size=4))
def test_a_stage_is_written_as_it_is_read(stages: list[Stage]) -> None:
    stages = [*stages, Stage(load=1.5)]
    assert parse_stages(";".join(map(str, stages))) == stages


def test_switches_by_decisions_and_by_metric(caplog: pytest.LogCaptureFixture) -> None:
    curriculum = Curriculum.parse("load=0.5,decisions=3;load=0.8,penalty=0.5,latency_below=6,updates=2;load=1.2")
    assert (curriculum.num_stages, curriculum.metric_names) == (3, ["latency"])
    with caplog.at_level(logging.INFO, logger="vidur_ppo_plugin"):
        assert not curriculum.on_update({})  # this stage watches nothing
        assert (curriculum.stage, curriculum.load, curriculum.penalty_scale) == (0, 0.5, 1.0)
        assert [curriculum.on_decision() for _ in range(3)] == [False, False, True]
        assert (curriculum.stage, curriculum.load, curriculum.penalty_scale) == (1, 0.8, 0.5)
        assert not any(curriculum.on_decision() for _ in range(50))
        values = [5.0, 6.0, 5.0, math.nan, 5.0, 5.9]  # exactly the target is not better, nor is the unknown
        assert [curriculum.on_update({"latency": value}) for value in values] == [False] * 5 + [True]
        assert (curriculum.stage, curriculum.load, curriculum.penalty_scale) == (2, 1.2, 1.0)
        assert not any(curriculum.on_decision() for _ in range(50))
        assert not any(curriculum.on_update({"latency": 0.0}) for _ in range(5))
    assert [record.getMessage() for record in caplog.records] == [
        "curriculum: stage 2 of 3 begins (load=0.8,penalty=0.5,latency_below=6.0,updates=2) after 3 decisions",
        "curriculum: stage 3 of 3 begins (load=1.2,penalty=1.0) after latency 5.9, better than 6 for 2 updates",
    ]


def test_whichever_comes_first_and_counts_start_anew() -> None:
    text = "decisions=5,reward_above=0,updates=2;decisions=5,reward_above=0,updates=2;load=1"
    curriculum = Curriculum.parse(text)
    for _ in range(4):
        curriculum.on_decision()
    curriculum.on_update({"reward": 1.0})
    assert curriculum.on_update({"reward": 1.0})
    assert not any(curriculum.on_decision() for _ in range(4))
    assert not curriculum.on_update({"reward": 1.0})
    assert curriculum.on_decision()
    assert curriculum.stage == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("load=0.5;load=1", r"stage 1 \(load=0.5,penalty=1.0\) never ends"),
        ("load=1,decisions=5", "the last stage .* must not end"),
        ("load=0.5,decisions=5;", "'' is not of the form key=value"),
        ("load:0.5", "'load:0.5' is not of the form key=value"),
        ("speed=2", "'speed' is unknown, a stage knows load, penalty"),
        ("_below=2", "'_below' is unknown"),
        ("load=fast", "load must be a number, got 'fast'"),
        ("load=0", "load must be finite and > 0, got 0.0"),
        ("load=nan", "load must be finite and > 0, got nan"),
        ("penalty=-1", "penalty must be finite and >= 0, got -1.0"),
        ("decisions=2.5;load=1", "decisions must be a whole number >= 1, got '2.5'"),
        ("decisions=0;load=1", "decisions must be a whole number >= 1, got '0'"),
        ("latency_below=inf;load=1", "the target of latency must be finite, got inf"),
        ("latency_below=5,updates=0;load=1", "updates must be a whole number"),
        ("decisions=5,updates=2;load=1", "updates in 'decisions=5,updates=2' needs a metric"),
        ("load=1,load=2", "'load' is given twice"),
        ("latency_below=5,ttft_below=1;load=1", "'ttft_below' is given twice"),
    ],
)
def test_a_bad_flag_is_quoted_with_the_reason_and_an_example(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        Curriculum.parse(text, flag="--my_curriculum")
    assert str(caught.value).startswith(f"--my_curriculum={text!r}: ")
    assert str(caught.value).endswith(f"for example, {EXAMPLE!r}")


def test_bad_stages_and_missing_metrics_are_named() -> None:
    with pytest.raises(ValueError, match="stages must hold at least one"):
        Curriculum(stages=[])
    with pytest.raises(ValueError, match="decisions must be"):
        Stage(decisions=-1)
    with pytest.raises(ValueError, match="updates must be"):
        Stage(updates=0)
    curriculum = Curriculum.parse("latensy_below=6;load=1")
    with pytest.raises(ValueError, match="waits for 'latensy', which is none of: latency, entropy"):
        curriculum.on_update({"latency": 1.0, "entropy": 1.0})


@given(
    events=st.lists(st.floats(0.0, 10.0) | st.none(), max_size=60),
    save_at=st.integers(0, 60),
)
def test_continues_from_its_state(events: list[float | None], save_at: int) -> None:
    """None is a decision, a number an update with that latency; the state is taken somewhere in the middle."""
    text = "load=0.5,decisions=4;load=0.6,latency_below=7,updates=2;load=0.7,decisions=9,latency_below=6;load=1.0"

    def follow(curriculum: Curriculum, part: list[float | None]) -> list[tuple[bool, float]]:
        seen = []
        for event in part:
            switched = curriculum.on_decision() if event is None else curriculum.on_update({"latency": event})
            seen.append((switched, curriculum.load))
        return seen

    curriculum, restored = Curriculum.parse(text), Curriculum.parse(text)
    follow(curriculum, events[:save_at])
    restored.load_state_dict(curriculum.state_dict())
    assert follow(curriculum, events[save_at:]) == follow(restored, events[save_at:])
    assert curriculum.state_dict() == restored.state_dict()


def test_a_state_of_other_stages_is_refused() -> None:
    state = Curriculum.parse("load=0.5,decisions=4;load=1").state_dict()
    with pytest.raises(ValueError, match=r"must be the saved one, 'load=0.5.*got 'load=0.6"):
        Curriculum.parse("load=0.6,decisions=4;load=1").load_state_dict(state)
