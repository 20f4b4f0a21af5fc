"""A results directory: what is written comes back, and nothing half-written ever counts."""

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from vidur_ppo_plugin.compare.metrics import METRICS, REQUEST_COLUMNS
from vidur_ppo_plugin.compare.results import Cell, Results, ResultsError, file_name

METADATA: dict[str, Any] = {
    "reference": "round_robin",
    "seeds": [1000, 1001],
    "scenarios": {"chat": {"why": "Because."}},
    "schedulers": {"round_robin": {}, "mine=a/b:c": {}},
}
REQUESTS = pd.DataFrame([(0.1, 10, 2, 1, 0.1, 0.2, 0.30000000000000004, 0, False)], columns=list(REQUEST_COLUMNS))
VALUES = {name: index + 0.1 for index, name in enumerate(METRICS)}


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results.create(tmp_path / "out", METADATA)


def test_cells_come_back_to_the_last_bit(results: Results) -> None:
    values = VALUES | {"e2e_mean": 0.1 + 0.2, "e2e_mean_long": math.nan}
    results.write_cell(Cell("chat", "mine=a/b:c", 1001), values, REQUESTS)
    read = Results(results.directory)
    row = read.cells.iloc[0]
    assert row[["scenario", "scheduler", "seed"]].tolist() == ["chat", "mine=a/b:c", 1001]
    assert row["e2e_mean"] == 0.1 + 0.2 and math.isnan(row["e2e_mean_long"])
    assert list(read.cells.columns) == ["scenario", "scheduler", "seed", *METRICS]
    pd.testing.assert_frame_equal(read.requests("chat", "mine=a/b:c", 1001), REQUESTS, check_exact=True)


def test_cells_are_in_the_order_of_the_plan(results: Results) -> None:
    for cell in reversed(results.planned):
        results.write_cell(cell, VALUES, REQUESTS)
    assert [Cell(*row[:3]) for row in results.cells.itertuples(index=False)] == results.planned
    assert all(map(results.is_finished, results.planned))


def test_a_failure_is_kept_until_the_cell_succeeds(results: Results) -> None:
    cell = results.planned[0]
    results.write_failure(cell, "Traceback: out of luck")
    assert results.failures == [{**cell._asdict(), "error": "Traceback: out of luck"}]
    assert not results.is_finished(cell) and results.cells.empty
    results.write_cell(cell, VALUES, REQUESTS)
    assert results.failures == [] and results.is_finished(cell)


def test_a_cell_without_its_metrics_is_not_finished(results: Results) -> None:
    """The metrics are written last: a run killed between the two files does the cell again."""
    cell = results.planned[0]
    results.write_cell(cell, VALUES, REQUESTS)
    (results.directory / "cells" / "chat" / "round_robin" / "1000.json").unlink()
    assert not results.is_finished(cell) and results.cells.empty


def test_the_table_leaves_out_wall_clock_times(results: Results) -> None:
    results.write_cell(results.planned[0], VALUES, REQUESTS)
    first = results.write_table().read_bytes()
    results.write_cell(results.planned[0], VALUES | {"decision_us": 77.0}, REQUESTS)
    assert results.write_table().read_bytes() == first
    assert b"decision_us" not in first and b"e2e_mean" in first


def test_errors_name_the_file(results: Results, tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"nowhere/metadata.json: not the metadata of a comparison"):
        Results(tmp_path / "nowhere")
    with pytest.raises(ResultsError, match=r"metadata.json: exists"):
        Results.create(results.directory, METADATA)
    with pytest.raises(ResultsError, match=r"1000.parquet: cannot be read"):
        results.requests("chat", "round_robin", 1000)
    cell = results.planned[0]
    results.write_cell(cell, VALUES, REQUESTS)
    path = results.directory / "cells" / "chat" / "round_robin" / "1000.json"
    path.write_text(json.dumps({"e2e_mean": 1.0}))
    with pytest.raises(ResultsError, match=r"1000.json: not the metrics of a cell: metrics missing: \['decision_us'"):
        _ = results.cells


def test_labels_become_file_names() -> None:
    assert file_name("mine=ppo_modular:../x y") == "mine_ppo_modular_.._x_y"
