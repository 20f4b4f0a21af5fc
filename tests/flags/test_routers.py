"""The text of a flag that says which replicas are drained, and when."""

import pytest

from vidur_ppo_plugin.flags import Drain, TieBreakingFlags, check_scheduler, format_drains, parse_drains


def test_texts_of_drains() -> None:
    drains = (Drain(1, 60.0, 120.5), Drain(0, 1 / 3, 2.0))
    assert parse_drains(format_drains(drains), 2) == drains
    assert parse_drains("", 2) == ()
    for text, problem in (
        ("1:60", "expected REPLICA:FROM_S:TO_S, got '1:60'"),
        ("1:60:x", "expected REPLICA:FROM_S:TO_S, got '1:60:x'"),
        ("1:60:50", "0 <= FROM_S < TO_S"),
        ("2:1:2", r"the replica must be in 0 \.\.\. 1, got '2:1:2'"),
    ):
        with pytest.raises(ValueError, match=problem):
            parse_drains(text, 2)


def test_wrong_drains_name_the_flag() -> None:
    check_scheduler(TieBreakingFlags(drained="1:60:120, 0:1:2"), 2)
    with pytest.raises(ValueError, match=r"--tie_breaking_flags_drained='1:60': expected REPLICA:FROM_S:TO_S"):
        check_scheduler(TieBreakingFlags(drained="1:60"), 2)
