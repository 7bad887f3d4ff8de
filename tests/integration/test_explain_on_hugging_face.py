"""`weft explain` of a captured model of Hugging Face: names of its layers and parameters, on one screen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import weft
from tests.integration.test_advice_on_hugging_face import LLAMA, made
from weft.cli.main import app
from weft.frontends import archive

pytestmark = [pytest.mark.slow, pytest.mark.needs_package("transformers")]
LAYERS = 32
WEIGHTS = 9
"""Of one layer: four of attention, three of the MLP, two norms."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama that is sharded over 8 ranks, captured and written to a file."""
    make, inputs = made("Llama", num_hidden_layers=LAYERS, **LLAMA)

    def make_model(mesh: Any) -> nn.Module:
        return weft.simple_fsdp(make(), mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    path = tmp_path_factory.mktemp("llama") / "step.weft"
    archive.save(weft.capture(weft.TrainingStep(make_model), inputs, mesh={"dp": 8}, part="joint"), path)
    return str(path)


def explain(*arguments: str) -> list[str]:
    result = CliRunner().invoke(app, ["explain", *arguments, "--cluster", "h100-8"])
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_thirty_two_layers_fit_a_screen_and_are_named(source: str):
    lines = explain(source)
    assert len(lines) <= 60
    layers = f"model.model.layers.0-{LAYERS - 1}"
    forward = next(line for line in lines if line.startswith(f"{layers}, forward: "))
    assert f" {LAYERS * WEIGHTS} all-gathers over dp (8 ranks)" in forward
    assert "self_attn.q_proj" in forward
    assert any(line.startswith(f"{layers}, backward: {LAYERS * WEIGHTS} reduce-scatters") for line in lines)
    first, head, row, *_ = lines
    assert head.startswith("exposed by layer ")
    assert row.split("  ")[0] in first
    assert row.startswith("model.model.")


def test_the_weights_of_one_layer_are_named(source: str):
    heads = [line for line in explain(source, "model.model.layers.7") if not line.startswith(" ")]
    gathers = [line for line in heads if ": all-gather of model.model.layers.7." in line]
    assert len(gathers) == 2 * WEIGHTS - 2  # the norms are not gathered again in backward
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj", "input_layernorm"):
        assert any(f"layers.7.{name} (" in line for line in gathers), name
