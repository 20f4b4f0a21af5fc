"""Documentation that is made from tables is up to date, complete, and readable as Markdown."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

import pytest
from packaging_tools import ROOT

from vidur_ppo_plugin.flags import PPOModularFlags, flag_name
from vidur_ppo_plugin.routing import features, heuristics
from vidur_ppo_plugin.sim import flag_docs

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
COLUMNS = 120


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """The lines of a page, with their numbers, that can be wrapped: no code, no rows of tables, no links."""
    is_code = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.lstrip().startswith("|") and "](" not in line and "://" not in line:
            yield number, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_are_wrapped(page: Path) -> None:
    long = [f"{page.name}:{number}: {len(line)} columns" for number, line in prose(page) if len(line) > COLUMNS]
    assert long == []


def test_the_flags_are_up_to_date() -> None:
    text = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert text == flag_docs.docs(), "run: python -m vidur_ppo_plugin.sim.flag_docs > docs/flags.md"


def test_every_flag_is_explained_once() -> None:
    rows = [line for line in flag_docs.docs().splitlines() if line.startswith("| `--")]
    flags = [
        flag_name(config_class, item.name)
        for config_class in flag_docs.config_classes()
        for item in dataclasses.fields(config_class)
        if "low" in item.metadata
    ]
    assert sorted(row.split("`")[1] for row in rows) == sorted(flags)
    assert len(flags) > 90
    assert all(row.replace("\\|", "").count("|") == 6 for row in rows)  # a bar inside a text would break its row


def test_flags_are_described_as_they_are() -> None:
    text = flag_docs.docs()
    for line in (
        "| `--p_p_o_global_scheduler_modular_config_lr` | float | 0.001 | > 0, ≤ 1 | Learning rate.",
        "| `--p_p_o_global_scheduler_modular_config_lr_end` | float | not set | > 0, ≤ 1 |",
        "| `--p_p_o_global_scheduler_modular_config_inference_only` | switch | off | any |",
        "| `--least_kv_global_scheduler_config_seed` | int | 42 | ≥ 0, ≤ 1e+09 |",
        "| `--roofline_execution_time_predictor_config_replica_speed_factors` | list of float | 1 | > 0 |",
    ):
        assert f"\n{line}" in text, line


def test_the_features_are_up_to_date() -> None:
    text = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")
    assert text == features.docs(), "run: python -m vidur_ppo_plugin.routing.features > docs/features.md"


def test_every_feature_is_explained() -> None:
    table, lines = features.FeatureTable(), features.docs().splitlines()
    for feature in (*table.replica_features, *table.request_features):
        assert f"| `{feature.name}` | {feature.unit} | {feature.formula} |" in lines
    assert all(line.count("|") == 4 for line in lines if line.startswith("|"))


def test_the_heuristics_of_the_readme_are_up_to_date() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert heuristics.docs() in text, "paste: python -m vidur_ppo_plugin.routing.heuristics"


def test_every_number_of_ppo_modular_says_when_to_raise_and_when_to_lower_it() -> None:
    for item in dataclasses.fields(PPOModularFlags):
        if item.type in (int, float, Optional[float]) and item.name != "seed":  # noqa: UP045
            help_text = item.metadata["help"].lower()
            assert "raise" in help_text and "lower it" in help_text, item.name
