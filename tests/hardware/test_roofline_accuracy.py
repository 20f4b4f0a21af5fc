"""The accuracy benchmark, run as people run it, on tiny profiles made here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vidur_ppo_plugin.hardware import DEVICES, NETWORKS, ModelShape, Roofline

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "roofline_accuracy.py"
LLAMA_3_8B = ModelShape("llama-3-8b", 32, 32, 8, 4096, 14336)
PHI_2 = ModelShape("phi-2", 32, 32, 32, 2560, 10240, use_gated_mlp=False, post_attn_norm=False)
KEYS = {
    "linear_median_error",
    "linear_p90_error",
    "layer_median_error",
    "layer_p90_error",
    "decode_median_error",
    "prefill_median_error",
    "all_reduce_median_error",
    "send_recv_median_error",
    "files",
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def run_json(directory: Path) -> tuple[int, dict[str, object]]:
    result = run("--profiles", str(directory), "--json")
    return result.returncode, json.loads(result.stdout)


def line_of(model: ModelShape) -> Roofline:
    return Roofline(model, DEVICES["a100"], NETWORKS["a100_dgx"])


def write_linear(path: Path, model: ModelShape, factor: float, *, second_norm: str | None) -> None:
    """A profile that is the model's own prediction times factor; second_norm: cell text, None: no column."""
    header = "extra,n_head,n_kv_head,n_embd,n_expanded_embd,use_gated_mlp,num_tensor_parallel_workers,num_tokens,"
    header += "emb_ms,attn_pre_proj_ms,attn_post_proj_ms,mlp_up_proj_ms,mlp_down_proj_ms,input_layernorm_ms"
    lines = [header + (",post_attention_layernorm_ms" if second_norm is not None else "")]
    for tokens in (1, 100, 4096, 9999):
        times = line_of(model).layer_times(tokens)
        wrong = 1e6 if tokens > 4096 else factor  # rows above 4,096 tokens do not count
        cells = [
            *("x", model.num_q_heads, model.num_kv_heads, model.embedding_dim, model.mlp_hidden_dim),
            *(model.use_gated_mlp, 1, tokens, 77.0),
            *(times.attn_pre_proj_ms * wrong, times.attn_post_proj_ms * wrong),
            *(times.mlp_up_proj_ms * wrong, times.mlp_down_proj_ms * wrong, times.attn_norm_ms * wrong),
            *([second_norm] if second_norm is not None else []),
        ]
        lines.append(",".join(map(str, cells)))
    path.write_text("\n".join(lines) + "\n")


def write_attention(path: Path, model: ModelShape, factor: float) -> None:
    line = line_of(model)
    path.write_text(
        "num_tensor_parallel_workers,is_prefill,batch_size,prefill_chunk_size,kv_cache_size,median_ms\n"
        f"1,False,16,0,700,{line.decode_attention_ms(16, 16 * 700) * factor}\n"
        f"1,True,1,256,512,{line.prefill_attention_ms(256, 512) * factor}\n"
        "1,True,1,256,512,nan\n"
    )


@pytest.mark.parametrize("second_norm", [None, "", "nan"])
def test_exact_profile_without_a_second_norm_has_no_error(tmp_path: Path, second_norm: str | None) -> None:
    write_linear(tmp_path / "a100_phi-2_linear.csv", PHI_2, 1.0, second_norm=second_norm)
    status, result = run_json(tmp_path)
    assert status == 0
    assert set(result) == KEYS
    assert result["linear_p90_error"] == pytest.approx(0.0, abs=1e-12)
    assert result["layer_p90_error"] == pytest.approx(0.0, abs=1e-12)
    for key in ("decode", "prefill", "all_reduce", "send_recv"):
        assert result[f"{key}_median_error"] is None
    file = result["files"]["a100_phi-2_linear.csv"]  # type: ignore[index]
    assert file["linear"]["rows"] == 3


def test_errors_are_relative_to_the_measurement_and_misses_exit_with_1(tmp_path: Path) -> None:
    write_linear(tmp_path / "a100_llama-3-8b_linear.csv", LLAMA_3_8B, 2.0, second_norm=None)
    status, result = run_json(tmp_path)
    assert status == 1
    assert result["linear_median_error"] == pytest.approx(0.5)
    assert result["layer_p90_error"] == pytest.approx(0.5)
    assert "linear median error 50.0% is above 8%" in run("--profiles", str(tmp_path)).stderr


@pytest.mark.parametrize(("name", "beside"), [("llama-3-8b", False), ("mystery-1b", True)])
def test_shape_of_an_attention_profile_is_found(tmp_path: Path, name: str, beside: bool) -> None:
    """From Vidur's models by name, or from a linear profile of the same model, on whatever device."""
    if beside:
        write_linear(tmp_path / f"h100_{name}_linear.csv", LLAMA_3_8B, 1.0, second_norm=None)
    write_attention(tmp_path / f"a100_{name}_attention_sample.csv", LLAMA_3_8B, 1.25)
    _, result = run_json(tmp_path)
    assert result["decode_median_error"] == pytest.approx(0.2)
    assert result["prefill_median_error"] == pytest.approx(0.2)


def test_network_profiles(tmp_path: Path) -> None:
    """Only all-reduces inside one node count; send/receive counts both places."""
    network, header = NETWORKS["a100_dgx"], "num_workers,devices_per_node,size_bytes,median_ms\n"
    (tmp_path / "a100_dgx_all_reduce.csv").write_text(
        header + f"4,4,5000000,{network.all_reduce_ms(5e6, 4) / 1.1}\n4,2,5000000,1000.0\n"
    )
    (tmp_path / "a100_dgx_send_recv.csv").write_text(
        header
        + f"2,2,5000000,{network.send_recv_ms(5e6, same_node=True) / 1.3}\n"
        + f"2,1,5000000,{network.send_recv_ms(5e6, same_node=False) / 1.3}\n"
    )
    status, result = run_json(tmp_path)
    assert status == 0
    assert result["all_reduce_median_error"] == pytest.approx(0.1)
    assert result["send_recv_median_error"] == pytest.approx(0.3)
    assert result["linear_median_error"] is None


def test_table_shows_files_workers_and_token_ranges(tmp_path: Path) -> None:
    write_linear(tmp_path / "a100_llama-3-8b_linear.csv", LLAMA_3_8B, 1.0, second_norm=None)
    result = run("--profiles", str(tmp_path))
    assert result.returncode == 0
    for text in ("a100_llama-3-8b_linear.csv", "all files", "tp 1", "65-256", "1025-4096"):
        assert text in result.stdout


def test_missing_and_empty_directories_are_errors_that_name_the_flag(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    for directory, reason in ((missing, "no such directory"), (tmp_path, "no profiles there")):
        result = run("--profiles", str(directory), "--json")
        assert result.returncode == 2
        assert result.stdout == ""
        assert f"--profiles {directory}: {reason}" in result.stderr


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("b200_llama-3-8b_linear.csv", "a,b\n", "unknown device 'b200'"),
        ("a100_mystery-1b_attention.csv", "a,b\n", "unknown model 'mystery-1b'"),
        ("b200_dgx_all_reduce.csv", "a,b\n", "unknown network 'b200_dgx'"),
        (
            "a100_dgx_send_recv.csv",
            "num_workers,size_bytes\n",
            "missing column(s) devices_per_node, median_ms",
        ),
        (
            "a100_dgx_send_recv.csv",
            "num_workers,devices_per_node,size_bytes,median_ms\n2,2,7,soon\n",
            "column median_ms holds 'soon'",
        ),
    ],
)
def test_unusable_files_are_errors_that_name_the_file(tmp_path: Path, name: str, content: str, reason: str) -> None:
    (tmp_path / name).write_text(content)
    result = run("--profiles", str(tmp_path), "--json")
    assert result.returncode == 2
    assert str(tmp_path / name) in result.stderr
    assert reason in result.stderr
