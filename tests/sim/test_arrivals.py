"""The curriculum's load in real simulations: gaps between arrivals are stretched, stage by stage."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulation import arguments, simulate, vidur_main

from vidur_ppo_plugin.sim.arrivals import ArrivalClock

CURRICULUM = "p_p_o_global_scheduler_modular_config_curriculum"
ROLLOUT = "p_p_o_global_scheduler_modular_config_rollout_len"


def gaps(tmp_path: Path, **flags: Any) -> list[float]:
    outcome = simulate(tmp_path, global_scheduler_config_type="ppo_modular", **flags)
    assert len(outcome.completed) == 100
    arrivals = sorted(request.arrived_at_s for request in outcome.requests)
    return [float(gap) for gap in np.diff([0.0, *arrivals])]


def test_each_stage_has_its_load(tmp_path: Path) -> None:
    nominal = gaps(tmp_path)
    stretched = gaps(tmp_path, **{CURRICULUM: "load=0.5,decisions=30;load=0.8,decisions=40;load=1.0"})
    factors = np.array(stretched) / np.array(nominal)
    # A gap belongs to the stage in which the arrival before it was placed.
    assert factors[1:30] == pytest.approx(2.0)
    assert factors[32:70] == pytest.approx(1.25)
    assert factors[72:] == pytest.approx(1.0)


def test_a_stage_can_end_when_a_metric_is_reached(tmp_path: Path) -> None:
    nominal = gaps(tmp_path, **{ROLLOUT: 10})
    text = "load=0.5,entropy_above=0.0,updates=2;load=1.0"
    factors = np.array(gaps(tmp_path, **{ROLLOUT: 10, CURRICULUM: text})) / np.array(nominal)
    assert factors[1:20] == pytest.approx(2.0)
    assert factors[23:] == pytest.approx(1.0)


def test_switches_are_logged_and_recorded(tmp_path: Path) -> None:
    flags = {CURRICULUM: "load=0.9,decisions=50;load=1.0", ROLLOUT: 32}
    done = vidur_main(arguments(tmp_path, global_scheduler_config_type="ppo_modular", **flags))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "curriculum: stage 2 of 2 begins" in done.stdout
    (table,) = tmp_path.glob("*/ppo_metrics.csv")
    lines = [line.split(",") for line in table.read_text().splitlines()]
    column = lines[0].index("curriculum_stage")
    assert [float(line[column]) for line in lines[1:]] == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("load=2.0", "load must be at most 1"),
        ("load=0.5,lateness_below=3;load=1", "'lateness' is not recorded"),
        ("load=0.5", None),
        ("load=half,decisions=3;load=1", "load must be a number, got 'half'"),
        ("load=0.5;load=1", "never ends"),
    ],
)
def test_a_wrong_curriculum_is_refused_by_name(tmp_path: Path, text: str, reason: str | None) -> None:
    if reason is None:
        assert len(gaps(tmp_path, **{CURRICULUM: text})) == 100
        return
    with pytest.raises(ValueError, match=reason) as raised:
        simulate(tmp_path, global_scheduler_config_type="ppo_modular", **{CURRICULUM: text})
    assert f"--{CURRICULUM}" in str(raised.value)


class Arrival:
    def __init__(self, arrived_at: float) -> None:
        self._arrived_at = arrived_at


def test_early_events_wait_for_their_turn() -> None:
    load = [0.5]
    clock = ArrivalClock(lambda: load[0])
    first, second, third = Arrival(1.0), Arrival(2.0), Arrival(3.0)
    assert clock.on_event(first, 1.0) == (False, [(2.0, first)])
    # At two the event of the second comes before the first has arrived: its time is not known yet.
    assert clock.on_event(second, 2.0) == (False, [])
    arrives, later = clock.on_event(first, 2.0)
    assert arrives and later == [(4.0, second)]
    assert clock.on_event(third, 3.0) == (False, [])
    load[0] = 1.0
    arrives, later = clock.on_event(second, 4.0)
    assert arrives and later == [(5.0, third)]
    assert clock.on_event(third, 5.0) == (True, [])
