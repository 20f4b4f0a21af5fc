"""Traces: the formats that are read, windows, and errors that name line and column."""

from pathlib import Path

import numpy as np
import pytest

from vidur_ppo_plugin.workload.lengths import parse_lengths
from vidur_ppo_plugin.workload.trace import TraceError, read_lengths, read_trace

VIDUR = "Date,Time,PromptTokenCount,CompletionTokenCount\n2023-11-16,0.5,374,44\n2023-11-16,4.5,396,0\n"
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.6805900,396,1\n"
)
OWN = "num_decode_tokens,arrived_at,num_prefill_tokens\n44,0.5,374\n\n1,4.5,396\n"


def write(directory: Path, text: str) -> Path:
    path = directory / "trace.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize("text", [VIDUR, AZURE, OWN, "\ufeff" + VIDUR], ids=["vidur", "azure", "own", "with a mark"])
def test_formats(tmp_path: Path, text: str) -> None:
    trace = read_trace(write(tmp_path, text))
    assert trace.prompt_tokens.tolist() == [374, 396]
    assert trace.decode_tokens.tolist() == [44, 1]  # a request without output still costs a token
    assert np.diff(trace.arrived_at_s) == pytest.approx([4.0])
    assert trace.rate_qps == pytest.approx(0.25)


def test_a_window_starts_at_zero_is_stretched_and_cut(tmp_path: Path) -> None:
    rows = "".join(f"{second},{100 * second + 1},50\n" for second in range(10))
    trace = read_trace(write(tmp_path, "time,prompt_tokens,decode_tokens\n" + rows))
    window = trace.window(4, 3, time_scale=0.5, max_tokens=520)
    assert window.arrived_at_s.tolist() == [0.0, 0.5, 1.0]
    assert window.prompt_tokens.tolist() == [401, 501, 519]
    assert window.decode_tokens.tolist() == [50, 19, 1]
    with pytest.raises(ValueError, match="there are no requests 8 to 10 in a trace of 10"):
        trace.window(8, 3)


def test_lengths_need_no_times(tmp_path: Path) -> None:
    path = write(tmp_path, "num_prefill_tokens,num_decode_tokens\n3772,54\n2015,156\n")
    assert read_lengths(path).decode_tokens.tolist() == [54, 156]
    prompts, outputs = parse_lengths(f"trace({path})").draw(0, 1000)
    assert {*zip(prompts.tolist(), outputs.tolist(), strict=True)} == {(3772, 54), (2015, 156)}
    assert (prompts == 3772).mean() == pytest.approx(0.5, abs=0.06)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", r"trace.csv:1: no column for the arrival: expected one of .* got an empty file"),
        ("Time,Prompt\n1,2\n", r"trace.csv:1: no column for the prompt: expected one of .* got Time, Prompt"),
        ("Time,ContextTokens,GeneratedTokens\n1,2,3\n2,x,3\n", r"trace.csv:3: column 'ContextTokens' .* got 'x'"),
        ("Time,ContextTokens,GeneratedTokens\n1,2,3\n2,3\n", r":3: column 'GeneratedTokens' is missing: .* 2 fields"),
        ("Time,ContextTokens,GeneratedTokens\n1,2,1.5\n", r":2: column 'GeneratedTokens' must be a whole number"),
        ("Time,ContextTokens,GeneratedTokens\n1,-2,1\n", r":2: column 'ContextTokens' .* >= 0, got '-2'"),
        ("Time,ContextTokens,GeneratedTokens\n5,2,1\n4,2,1\n", r":3: column 'Time' must not be before the line above"),
        ("Time,ContextTokens,GeneratedTokens\nnoon,2,1\n", r":2: column 'Time' must be seconds or a date with time"),
        ("Time,ContextTokens,GeneratedTokens\nnan,2,1\n", r":2: column 'Time' must be a finite time"),
        ("Time,ContextTokens,GeneratedTokens\n1,2,1\n1,2,1\n", r"needs requests at two different times"),
    ],
)
def test_errors_name_line_and_column(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(TraceError, match=problem):
        read_trace(write(tmp_path, text))


def test_an_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"missing.csv: cannot be read: .*No such file"):
        read_trace(tmp_path / "missing.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match=r"binary.csv: cannot be read"):
        read_trace(tmp_path / "binary.csv")
