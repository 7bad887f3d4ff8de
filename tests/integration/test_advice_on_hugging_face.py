"""Advice on models of Hugging Face, given by an import path: captured as they are, split by the names of modules."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.advice.layout import TrainingLayout
from weft.advice.models import ImportedModel
from weft.graph.collective import collectives
from weft.graph.ops import Kind

pytestmark = [pytest.mark.slow, pytest.mark.needs_package("transformers")]
LLAMA = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}


class WithLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=labels, use_cache=False).loss


def made(name: str, **config: Any) -> tuple[Callable[[], nn.Module], tuple[Tensor, Tensor]]:
    home = importlib.import_module("transformers")
    described = getattr(home, f"{name}Config")(vocab_size=256, bos_token_id=0, eos_token_id=1, **config)
    model = {"Llama": "LlamaForCausalLM", "GPT2": "GPT2LMHeadModel"}[name]
    tokens = torch.zeros(1, 64, dtype=torch.long)
    return lambda: WithLoss(getattr(home, model)(described)), (tokens, tokens)


def llama(_batch: int) -> tuple[Callable[[], nn.Module], tuple[Tensor, Tensor]]:
    return made("Llama", num_hidden_layers=2, **LLAMA)


def gpt2(_batch: int) -> tuple[Callable[[], nn.Module], tuple[Tensor, Tensor]]:
    return made("GPT2", n_embd=128, n_layer=2, n_head=4)


def test_a_llama_is_split_by_the_names_of_its_modules():
    model = ImportedModel(f"{__name__}:llama")
    assert [degree for degree in (2, 4, 8) if model.splits_over(degree)] == [2, 4]
    module = model.capture(TrainingLayout("fsdp-tp", (("dp", 4), ("tp", 2))), 1)
    kinds = Counter(each.kind for each in collectives(module.graph))
    assert kinds[Kind.ALL_REDUCE] == 8  # of two blocks in each of two layers: the result, and the gradient of the input
    assert kinds[Kind.ALL_GATHER] > 0


def deep_llama(_batch: int) -> tuple[Callable[[], nn.Module], tuple[Tensor, Tensor]]:
    return made("Llama", num_hidden_layers=4, **LLAMA)


def test_a_llama_is_measured_with_few_layers_and_checkpointed():
    model = ImportedModel(f"{__name__}:deep_llama")
    assert (model.num_layers, model.few_layers) == (4, (1, 2))
    assert model.checkpoints == ("none", "selective", "full")
    layout = TrainingLayout("fsdp", (("dp", 8),))
    products = [
        sum(node.target is torch.ops.aten.mm.default for node in model.capture(each, 1).graph.nodes)
        for each in (layout, replace(layout, checkpoint="full"))
    ]
    assert products[1] > products[0]


def test_a_gpt2_is_sharded_but_not_split():
    model = ImportedModel(f"{__name__}:gpt2")
    assert not model.splits_over(2)
    module = model.capture(TrainingLayout("fsdp", (("dp", 8),)), 1)
    assert {Kind.ALL_GATHER, Kind.REDUCE_SCATTER} <= {each.kind for each in collectives(module.graph)}
