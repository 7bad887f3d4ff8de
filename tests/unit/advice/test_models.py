"""Models that advice is given on: those of the zoo, and modules by their import path."""

from __future__ import annotations

import pytest

from tests.unit.advice import own_models
from weft.advice.advisor import advise
from weft.advice.layout import TrainingLayout
from weft.advice.models import ImportedModel, ZooModel, model_of
from weft.errors import CaptureError
from weft.graph.about import tokens_per_step
from weft.graph.collective import collectives
from weft.graph.ops import Kind

PATH = "tests.unit.advice.own_models:decoder"


def test_a_module_of_ones_own_is_sharded_without_rewriting():
    module = ImportedModel(PATH).capture(TrainingLayout("fsdp", (("dp", 8),)), 2)
    kinds = {each.kind for each in collectives(module.graph)}
    assert {Kind.ALL_GATHER, Kind.REDUCE_SCATTER} <= kinds
    assert tokens_per_step(module) == 2 * 32 * 8


def test_a_module_of_ones_own_is_counted():
    model = ImportedModel(PATH)
    assert model.tokens_per_sample == 32
    assert model.num_parameters == sum(each.numel() for each in own_models.Decoder().parameters())


def test_a_function_that_returns_something_else_is_an_error():
    with pytest.raises(CaptureError, match="does not return a function and a tuple of inputs"):
        _ = ImportedModel("tests.unit.advice.own_models:without_inputs").tokens_per_sample


def test_a_source_is_a_model_of_the_zoo_or_an_import_path():
    assert model_of("zoo:llama-debug") == ZooModel("llama-debug")
    assert model_of(PATH) == ImportedModel(PATH)


@pytest.mark.slow
def test_advice_on_a_module_of_ones_own():
    found = advise(PATH, "h100-2x8", 32 * 32)
    assert {each.layout.parallel for each in (*found.ranked, *found.left_out)} == {"ddp", "fsdp", "hsdp"}
    assert found.best.found.step_us == min(each.found.step_us for each in found.ranked)
