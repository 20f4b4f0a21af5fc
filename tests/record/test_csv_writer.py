"""The CSV file is whole after every row."""

import csv
import math
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidur_ppo_plugin.record.csv_writer import MetricsCsv


def test_rows_are_on_the_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ppo_metrics.csv"
    writer = MetricsCsv(path, ["update", "entropy", "latency_mean"])
    assert path.read_text() == "update,entropy,latency_mean\n"
    writer.write({"update": 1, "entropy": 0.1})
    assert path.read_text().splitlines()[1:] == ["1,0.1,"]
    writer.write({"latency_mean": None, "update": np.int64(2), "entropy": np.float32(0.5)})
    writer.write({"update": True, "entropy": math.nan, "latency_mean": -math.inf})
    assert path.read_text().splitlines()[2:] == ["2,0.5,", "1,nan,-inf"]
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="is closed"):
        writer.write({})


def test_unknown_names_are_refused_and_leave_no_row(tmp_path: Path) -> None:
    writer = MetricsCsv(tmp_path / "m.csv", ["update"])
    with pytest.raises(ValueError, match="no column for entropie, x"):
        writer.write({"update": 1, "x": 2, "entropie": 3})
    writer.close()
    assert (tmp_path / "m.csv").read_text() == "update\n"


@pytest.mark.parametrize("names", [[], ["a", "b", "a"]])
def test_a_header_has_each_name_once(names: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a header needs names, each once"):
        MetricsCsv(tmp_path / "m.csv", names)


@given(st.lists(st.floats(), min_size=1, max_size=4))
def test_numbers_read_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:
    path = tmp_path_factory.mktemp("csv") / "m.csv"
    writer = MetricsCsv(path, ["x"])
    for value in values:
        writer.write({"x": value})
    writer.close()
    with path.open(newline="") as file:
        read = [float(row["x"]) for row in csv.DictReader(file)]
    assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(read, values, strict=True))


def test_a_file_is_continued_and_its_broken_last_line_cut(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_text("a,b\n1,2\n3,")
    writer = MetricsCsv(path, ["a", "b"])
    writer.write({"a": 5, "b": 6})
    writer.close()
    assert path.read_text() == "a,b\n1,2\n5,6\n"


def test_a_file_of_an_earlier_version_gets_the_columns_that_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_text("c,a\n1,2.5\n3,nan\n5,")
    writer = MetricsCsv(path, ["a", "b", "c"])
    writer.write({"a": 5, "b": 6, "c": 7})
    writer.close()
    assert path.read_text() == "a,b,c\n2.5,,1\nnan,,3\n5,6,7\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.csv"]


def test_a_file_of_other_columns_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_text("a,c\n1,2\n")
    with pytest.raises(ValueError, match=r"m\.csv has other columns"):
        MetricsCsv(path, ["a", "b"])
    assert path.read_text() == "a,c\n1,2\n"


def test_a_full_disk_leaves_no_half_row(tmp_path: Path) -> None:
    """A limit on the size of files cuts a write short, as a full disk does."""
    path = tmp_path / "m.csv"
    writer = MetricsCsv(path, ["x", "y"])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, hard))
    try:
        with pytest.raises(OSError, match="bytes of a row fitted"):
            for _ in range(10):
                writer.write({"x": 0.123456, "y": 0.5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "x,y\n" + "0.123456,0.5\n" * 3
    writer.write({"x": 1, "y": 2})
    assert path.read_text().endswith("0.5\n1,2\n")
    writer.close()


def test_a_killed_process_leaves_whole_rows(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    code = (
        "import itertools, sys, pathlib\n"
        "from vidur_ppo_plugin.record.csv_writer import MetricsCsv\n"
        "names = [f'metric_{i}' for i in range(60)]\n"
        "writer = MetricsCsv(pathlib.Path(sys.argv[1]), names)\n"
        "for n in itertools.count():\n"
        "    writer.write({name: n / 7 for name in names})\n"
        "    if n == 300: print('go', flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    text = path.read_text()
    assert text.endswith("\n")
    rows = text.splitlines()
    assert len(rows) > 300
    assert {row.count(",") for row in rows} == {59}
