"""Compare the roofline model with measured profiles: how far is it off, and where.

    python benchmarks/roofline_accuracy.py [--json] [--quick] [--profiles DIR]

DIR holds files named `{device}_{model}_linear.csv`, `{device}_{model}_attention*.csv` and
`{device}_dgx_{all_reduce,send_recv}.csv`. Errors are absolute relative errors of the predicted time.
With --quick one file of each kind is read.
Exit status: 0 if every target is met, 1 if one is missed, 2 if the profiles cannot be read.
"""

import csv
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from _reporting import new_parser, parse_options, report

from vidur_ppo_plugin.hardware import DEVICES, NETWORKS, ModelShape, NetworkSpec, Roofline

DEFAULT_PROFILES = Path(__file__).resolve().parents[1] / "../shared/data/profiles"
MAX_TOKENS = 4096

PROJECTIONS = ("attn_pre_proj_ms", "attn_post_proj_ms", "mlp_up_proj_ms", "mlp_down_proj_ms")
OPERATIONS = (
    *(*PROJECTIONS, "input_layernorm_ms", "attn_rope_ms", "attn_kv_cache_save_ms"),
    *("post_attention_layernorm_ms", "mlp_act_ms", "add_ms"),
)
# Columns whose name is not that of the field of LayerTimes.
FIELD_OF_COLUMN = {"input_layernorm_ms": "attn_norm_ms", "post_attention_layernorm_ms": "mlp_norm_ms"}

# Largest allowed median and 90th percentile; None: reported only.
TARGETS: dict[str, tuple[float | None, float | None]] = {
    "linear": (0.08, 0.20),
    "layer": (0.08, 0.20),
    "decode": (0.08, None),
    "prefill": (0.15, None),
    "all_reduce": (None, None),
    "send_recv": (None, None),
}

# Vidur 0.0.26, vidur/config/model_config.py: for attention profiles without a linear profile beside them.
# (layers, query heads, KV heads, embedding, MLP, gated, norm after attention)
VIDUR_MODELS: dict[str, tuple[int, int, int, int, int, bool, bool]] = {
    "codellama/CodeLlama-34b-Instruct-hf": (48, 64, 8, 8192, 22016, True, True),
    "meta-llama/Llama-2-7b-hf": (32, 32, 32, 4096, 11008, True, True),
    "meta-llama/Llama-2-70b-hf": (80, 64, 8, 8192, 28672, True, True),
    "meta-llama/Llama-3-8B": (32, 32, 8, 4096, 14336, True, True),
    "meta-llama/Llama-3-70B": (80, 64, 8, 8192, 28672, True, True),
    "internlm/internlm-20b": (60, 40, 40, 5120, 13824, True, True),
    "internlm/internlm2-20b": (48, 48, 8, 6144, 16384, True, True),
    "microsoft/phi-2": (32, 32, 32, 2560, 10240, False, False),
    "Qwen/Qwen-72B": (80, 64, 64, 8192, 24576, True, True),
}

SHAPE_COLUMNS = ("n_head", "n_kv_head", "n_embd", "n_expanded_embd", "use_gated_mlp")
ATTENTION_COLUMNS = (
    *("num_tensor_parallel_workers", "is_prefill", "batch_size"),
    *("prefill_chunk_size", "kv_cache_size", "median_ms"),
)
NETWORK_COLUMNS = ("num_workers", "devices_per_node", "size_bytes", "median_ms")
TOKEN_RANGES = ((1, 64), (65, 256), (257, 1024), (1025, MAX_TOKENS))


class ProfileError(Exception):
    """A profile cannot be used; the message says which and why."""


@dataclass
class Errors:
    """Absolute relative errors, with what they are broken down by."""

    values: list[float] = field(default_factory=list)
    groups: list[tuple[str, str]] = field(default_factory=list)

    def add(self, predicted_ms: float, measured_ms: float, row: str, column: str) -> None:
        if measured_ms > 0:
            self.values.append(abs(predicted_ms / measured_ms - 1.0))
            self.groups.append((row, column))

    def median(self) -> float | None:
        return median(self.values) if self.values else None

    def p90(self) -> float | None:
        """90th percentile, interpolated between neighbours."""
        if not self.values:
            return None
        ordered = sorted(self.values)
        position = 0.9 * (len(ordered) - 1)
        low = math.floor(position)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (position - low) * (ordered[high] - ordered[low])

    def by_group(self) -> dict[tuple[str, str], list[float]]:
        grouped: dict[tuple[str, str], list[float]] = {}
        for value, group in zip(self.values, self.groups, strict=True):
            grouped.setdefault(group, []).append(value)
        return grouped


FileErrors = dict[str, Errors]


def read_rows(path: Path, required: Iterable[str]) -> list[dict[str, str]]:
    """Rows of a CSV file that has at least the required columns."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in required if name not in (reader.fieldnames or [])]
        if missing:
            raise ProfileError(f"{path}: missing column(s) {', '.join(missing)}")
        return list(reader)


def number(path: Path, row: dict[str, str], column: str) -> float:
    """A cell as a number; NaN for a column or a cell that is absent."""
    text = (row.get(column) or "nan").strip() or "nan"
    try:
        return float(text)
    except ValueError:
        raise ProfileError(f"{path}: column {column} holds {text!r}, which is not a number") from None


def integer(path: Path, row: dict[str, str], column: str) -> int:
    """A cell as an integer."""
    value = number(path, row, column)
    if not value.is_integer():
        raise ProfileError(f"{path}: column {column} holds {row.get(column)!r}, which is not an integer")
    return int(value)


def is_true(text: str | None) -> bool:
    return (text or "").strip().lower() in ("true", "1", "1.0")


def split_name(path: Path, suffix: str) -> tuple[str, str]:
    """Device and model of `{device}_{model}_{suffix}*.csv`."""
    match = re.fullmatch(rf"([^_]+)_(.+?)_{suffix}.*", path.stem)
    if match is None:
        raise ProfileError(f"{path}: the name must be {{device}}_{{model}}_{suffix}.csv")
    device, model = match.groups()
    if device not in DEVICES:
        raise ProfileError(f"{path}: unknown device {device!r}, known are {', '.join(sorted(DEVICES))}")
    return device, model


def normalised(name: str) -> str:
    """A model name without organisation, suffixes and punctuation: meta-llama/Llama-2-7b-hf is llama27b."""
    name = name.lower().rsplit("/", 1)[-1].removeprefix("meta-")
    name = re.sub(r"[-_](hf|instruct|chat|base)(?=$|[-_])", "", name)
    return re.sub(r"[^a-z0-9]", "", name)


def shape_of_row(path: Path, model: str, row: dict[str, str]) -> ModelShape:
    """The shape that the columns of a linear profile give."""
    try:
        return ModelShape(
            name=model,
            num_layers=1,
            num_q_heads=integer(path, row, "n_head"),
            num_kv_heads=integer(path, row, "n_kv_head"),
            embedding_dim=integer(path, row, "n_embd"),
            mlp_hidden_dim=integer(path, row, "n_expanded_embd"),
            use_gated_mlp=is_true(row.get("use_gated_mlp")),
        )
    except ValueError as error:
        raise ProfileError(f"{path}: {error}") from None


def find_shape(path: Path, model: str) -> ModelShape:
    """Shape of an attention profile's model: from a linear profile beside it, else from Vidur's models."""
    for other in sorted(path.parent.glob("*_linear.csv")):
        if normalised(split_name(other, "linear")[1]) == normalised(model):
            rows = read_rows(other, SHAPE_COLUMNS)
            if rows:
                return shape_of_row(other, model, rows[0])
    for name, shape in VIDUR_MODELS.items():
        if normalised(name) == normalised(model):
            return ModelShape(name, *shape)
    raise ProfileError(
        f"{path}: unknown model {model!r}: no linear profile of it beside the file, and Vidur knows only "
        f"{', '.join(VIDUR_MODELS)}"
    )


class Rooflines:
    """Rooflines by shape and tensor-parallel size; the network does not matter here."""

    def __init__(self, device: str) -> None:
        self._device = DEVICES[device]
        self._by_key: dict[tuple[ModelShape, int], Roofline] = {}

    def get(self, path: Path, shape: ModelShape, tensor_parallel_size: int) -> Roofline:
        key = (shape, tensor_parallel_size)
        if key not in self._by_key:
            try:
                self._by_key[key] = Roofline(
                    shape, self._device, NETWORKS["a100_dgx"], tensor_parallel_size=tensor_parallel_size
                )
            except ValueError as error:
                raise ProfileError(f"{path}: {error}") from None
        return self._by_key[key]


def token_range(tokens: int) -> str:
    for low, high in TOKEN_RANGES:
        if tokens <= high:
            return f"{low}-{high}"
    return f">{MAX_TOKENS}"


def linear_errors(path: Path) -> FileErrors:
    """Errors of a layer's projections, and of all its operations, for batches of up to MAX_TOKENS."""
    device, model = split_name(path, "linear")
    rooflines = Rooflines(device)
    errors = {"linear": Errors(), "layer": Errors()}
    for row in read_rows(path, (*SHAPE_COLUMNS, "num_tensor_parallel_workers", "num_tokens")):
        num_tokens = integer(path, row, "num_tokens")
        if not 1 <= num_tokens <= MAX_TOKENS:
            continue
        workers = integer(path, row, "num_tensor_parallel_workers")
        times = rooflines.get(path, shape_of_row(path, model, row), workers).layer_times(num_tokens)
        for key, operations in (("linear", PROJECTIONS), ("layer", OPERATIONS)):
            measured_ms = predicted_ms = 0.0
            for column in operations:
                value_ms = number(path, row, column)
                if not math.isnan(value_ms):  # an operation this model does not have
                    measured_ms += value_ms
                    predicted_ms += getattr(times, FIELD_OF_COLUMN.get(column, column))
            errors[key].add(predicted_ms, measured_ms, f"tp {workers}", token_range(num_tokens))
    return errors


def attention_errors(path: Path) -> FileErrors:
    """Errors of the attention kernels; kv_cache_size counts the tokens of each request."""
    device, model = split_name(path, "attention")
    shape = find_shape(path, model)
    rooflines = Rooflines(device)
    errors = {"decode": Errors(), "prefill": Errors()}
    for row in read_rows(path, ATTENTION_COLUMNS):
        workers = integer(path, row, "num_tensor_parallel_workers")
        roofline = rooflines.get(path, shape, workers)
        batch_size = integer(path, row, "batch_size")
        cached_tokens = integer(path, row, "kv_cache_size")
        measured_ms = number(path, row, "median_ms")
        if is_true(row["is_prefill"]):
            chunk_tokens = integer(path, row, "prefill_chunk_size")
            predicted_ms = batch_size * roofline.prefill_attention_ms(chunk_tokens, cached_tokens)
            errors["prefill"].add(predicted_ms, measured_ms, f"tp {workers}", token_range(chunk_tokens))
        else:
            predicted_ms = roofline.decode_attention_ms(batch_size, batch_size * cached_tokens)
            errors["decode"].add(predicted_ms, measured_ms, f"tp {workers}", token_range(batch_size))
    return errors


def network_of(path: Path, suffix: str) -> NetworkSpec:
    name = path.stem.removesuffix(f"_{suffix}")
    if name not in NETWORKS:
        raise ProfileError(f"{path}: unknown network {name!r}, known are {', '.join(sorted(NETWORKS))}")
    return NETWORKS[name]


def size_range(size_bytes: int) -> str:
    """Whether the latency or the bandwidth of the network decides."""
    return "< 1 MiB" if size_bytes < 2**20 else ">= 1 MiB"


def all_reduce_errors(path: Path) -> FileErrors:
    """Errors of all-reduce in the rows that Vidur uses: all workers in one node."""
    network = network_of(path, "all_reduce")
    errors = Errors()
    for row in read_rows(path, NETWORK_COLUMNS):
        workers = integer(path, row, "num_workers")
        if integer(path, row, "devices_per_node") == workers:
            size_bytes = integer(path, row, "size_bytes")
            predicted_ms = network.all_reduce_ms(size_bytes, workers)
            measured_ms = number(path, row, "median_ms")
            errors.add(predicted_ms, measured_ms, f"{workers} workers", size_range(size_bytes))
    return {"all_reduce": errors}


def send_recv_errors(path: Path) -> FileErrors:
    """Errors of send/receive inside a node (two devices in it) and across nodes (one in each)."""
    network = network_of(path, "send_recv")
    errors = Errors()
    for row in read_rows(path, NETWORK_COLUMNS):
        same_node = integer(path, row, "devices_per_node") > 1
        size_bytes = integer(path, row, "size_bytes")
        predicted_ms = network.send_recv_ms(size_bytes, same_node=same_node)
        place = "in a node" if same_node else "across nodes"
        errors.add(predicted_ms, number(path, row, "median_ms"), place, size_range(size_bytes))
    return {"send_recv": errors}


READERS = (
    (re.compile(r".+_linear\.csv"), linear_errors),
    (re.compile(r".+_attention.*\.csv"), attention_errors),
    (re.compile(r".+_all_reduce\.csv"), all_reduce_errors),
    (re.compile(r".+_send_recv\.csv"), send_recv_errors),
)


def evaluate(directory: Path, *, most_of_a_kind: int | None = None) -> dict[str, FileErrors]:
    """Errors of the profiles in a directory, by file name; of all of them unless `most_of_a_kind` says how many."""
    if not directory.is_dir():
        raise ProfileError(f"--profiles {directory}: no such directory")
    by_file: dict[str, FileErrors] = {}
    num_read: Counter[int] = Counter()
    for path in sorted(directory.glob("*.csv")):
        kind = next((index for index, (pattern, _) in enumerate(READERS) if pattern.fullmatch(path.name)), None)
        if kind is not None and num_read[kind] != most_of_a_kind:
            num_read[kind] += 1
            by_file[path.name] = READERS[kind][1](path)
    if not by_file:
        wanted = "*_linear.csv, *_attention*.csv, *_all_reduce.csv or *_send_recv.csv"
        raise ProfileError(f"--profiles {directory}: no profiles there; wanted {wanted}")
    return by_file


def pool(by_file: dict[str, FileErrors]) -> FileErrors:
    """All errors of a kind together."""
    return {
        key: Errors([value for file in by_file.values() if key in file for value in file[key].values])
        for key in TARGETS
    }


def summary(pooled: FileErrors, by_file: dict[str, FileErrors]) -> dict[str, object]:
    """The object that --json prints."""
    result: dict[str, object] = {f"{key}_median_error": pooled[key].median() for key in TARGETS}
    result |= {f"{key}_p90_error": pooled[key].p90() for key in ("linear", "layer")}
    result["files"] = {
        name: {
            key: {"rows": len(errors.values), "median_error": errors.median(), "p90_error": errors.p90()}
            for key, errors in errors_of_file.items()
        }
        for name, errors_of_file in by_file.items()
    }
    return result


def missed_targets(label: str, errors_by_key: FileErrors) -> list[str]:
    """One line for each target that is missed."""
    missed = []
    for key, errors in errors_by_key.items():
        targets = zip(TARGETS[key], ("median", "p90"), (errors.median(), errors.p90()), strict=True)
        for limit, statistic, value in targets:
            if limit is not None and value is not None and value > limit:
                missed.append(f"{label}: {key} {statistic} error {value:.1%} is above {limit:.0%}")
    return missed


def lines_of(by_file: dict[str, FileErrors]) -> Iterator[str]:
    """A report for people: each file, then by tensor-parallel size and number of tokens (medians)."""
    pooled = pool(by_file)
    yield f"{'file':<42} {'what':<11} {'rows':>6} {'median':>8} {'p90':>8}"
    for name, errors_by_key in [*by_file.items(), ("all files", pooled)]:
        for key, errors in errors_by_key.items():
            if errors.values:
                rows, middle, p90 = len(errors.values), errors.median(), errors.p90()
                yield f"{name:<42} {key:<11} {rows:>6} {middle:>8.1%} {p90:>8.1%}"
    for name, errors_by_key in by_file.items():
        for key, errors in errors_by_key.items():
            grouped = errors.by_group()
            # Ranges in ascending order: a shorter name is a smaller number.
            columns = sorted({column for _, column in grouped}, key=lambda name: (len(name), name))
            yield f"\n{name}: {key}, median error\n{'':<14}" + "".join(f"{column:>12}" for column in columns)
            for row in sorted({row for row, _ in grouped}):
                cells = [grouped.get((row, column)) for column in columns]
                yield f"{row:<14}" + "".join(f"{median(c):>12.1%}" if c else f"{'':>12}" for c in cells)


def missed_by(by_file: dict[str, FileErrors]) -> list[str]:
    """One line for each target that all files together, or one of them, misses."""
    missed = missed_targets("all files", pool(by_file))
    for name, errors in by_file.items():
        missed += missed_targets(name, errors)
    return missed


def main() -> int:
    """Compare, print, judge."""
    parser = new_parser(__doc__)
    parser.add_argument(
        "--profiles",
        type=Path,
        default=DEFAULT_PROFILES,
        metavar="DIR",
        help="directory of measured profiles",
    )
    options = parse_options(parser, quick={})
    try:
        by_file = evaluate(options.profiles, most_of_a_kind=1 if options.quick else None)
    except (ProfileError, OSError) as error:
        print(f"roofline_accuracy: {error}", file=sys.stderr)
        return 2
    missed = missed_by(by_file)
    return report(options, lambda: summary(pool(by_file), by_file), lambda _: lines_of(by_file), lambda _: missed)


if __name__ == "__main__":
    sys.exit(main())
