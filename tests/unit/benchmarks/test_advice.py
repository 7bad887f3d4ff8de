"""The benchmark of the advisor: its own models can be advised on, and the docs show what was measured."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scenarios
from weft.advice.models import model_of

RESULTS = sorted((scenarios.HERE / "results").glob("advice-*.json"))


@pytest.fixture
def benchmark_of_advice(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(scenarios.HERE))
    return importlib.import_module("advice")


def test_the_docs_show_the_latest_times(benchmark_of_advice: Any, tmp_path: Path):
    made = benchmark_of_advice
    copy = tmp_path / "advice.md"
    copy.write_text(made.PAGE.read_text())
    made.fill(copy, made.page(json.loads(RESULTS[-1].read_text())), made.BEGIN, made.END)
    assert copy.read_text() == made.PAGE.read_text(), f"run: python benchmarks/advice.py --docs {RESULTS[-1]}"


@pytest.mark.slow
def test_a_decoder_like_nanogpt_is_measured_with_few_layers(benchmark_of_advice: Any):
    model = model_of(benchmark_of_advice.CASES["nanogpt"].model)
    assert (model.tokens_per_sample, model.num_layers, model.few_layers) == (1024, 12, (1, 2))
    assert model.num_parameters == 50304 * 768 + 1024 * 768 + 12 * (12 * 768 * 768 + 2 * 768) + 768
    assert model.splits_over(4)
