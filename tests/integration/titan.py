"""Functions that ranks run: torchtitan's debug models under its own parallelisms, trained with and without Weft.

torchtitan's `Trainer` cannot start without an accelerator: `tools.utils.device_type` is "cuda" even without one, and
the trainer reads memory statistics of the device. The rest runs on CPU, and is used here: the configs, the models,
their `parallelize_fn`, and the step of `GraphTrainer`, which traces, applies passes and runs.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.integration.worlds import REPOSITORY
from weft.errors import PipelineError
from weft.frontends.session import SESSION

SEQUENCE, BATCH, LAYERS = 32, 2, 2
NOT_ON_CPU = (
    "selective_activation_remat_pass",
    "joint_transformer_block_bucketing_reordering_pass",
    "cudagraph_pass",
)
"""Passes of torchtitan that fail on CPU: attention counts as a random operator there, Triton is asked for the bandwidth
of the memory, and CUDA graphs need CUDA."""


@dataclass
class Outcome:
    losses: list[float]
    graphs: list[tuple[int, int]]
    """The numbers of collectives before and after Weft, by graph."""
    messages: tuple[str, ...]


def train(model: str, degrees: dict[str, int], way: str, name: str, folder: str, steps: int = 10) -> Outcome:
    """Train a debug model.

    With the `way` "trace", the graph trainer traces and runs the step, and `name` is its pass pipeline, torchtitan's or
    Weft's, by the configs of `examples/torchtitan_weft`. With "compile", the model is compiled, and `name` is the
    backend.
    """
    torch._dynamo.reset()
    SESSION.reset()
    config = _config(model, degrees, name == "weft")
    if way == "trace":
        assert (config.compile.mode, config.compile.pass_pipeline) == ("aot_fx_trace", name)
        config.compile.disable_passes = list(NOT_ON_CPU)
    else:
        config.compile.mode, config.compile.backend = "jit", name
    step, made = _build(config, folder)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
    losses: list[float] = []
    for number in range(steps):
        tokens = torch.randint(0, 2000, (BATCH, SEQUENCE + 1), generator=_generator(config, number))
        losses.append(step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).item())
        optimizer.step()
        optimizer.zero_grad()
    report = SESSION.report()
    graphs = [(e.report["before"]["num_collectives"], e.report["after"]["num_collectives"]) for e in report.entries]
    return Outcome(losses, graphs, report.messages)


def error_of_settings(name: str) -> str:
    """The error that a setting of `compile` meets in the pipeline `weft`, or an empty text."""
    config = _config("llama3", {}, with_weft=True)
    setattr(config.compile, name, True)
    make_passes = importlib.import_module("torchtitan.experiments.graph_trainer.registry").PASS_PIPELINE_REGISTRY
    try:
        make_passes["weft"](None, config)
    except PipelineError as error:
        return str(error)
    return ""


def read_config(*options: str) -> Any:
    """A config by torchtitan's own command line, which finds the modules of `examples`."""
    manager = importlib.import_module("torchtitan.config.manager").ConfigManager()
    with mock.patch.object(sys, "path", [*sys.path, str(REPOSITORY / "examples")]):
        return manager.parse_args(list(options))


def _config(model: str, degrees: dict[str, int], with_weft: bool) -> Any:
    loss = importlib.import_module("torchtitan.components.loss").CrossEntropyLoss.Config
    module, prefix = ("torchtitan_weft", "") if with_weft else (f"graph_trainer.{model}", "graph_trainer_")
    sizes = [f"--parallelism.{name}_degree={degree}" for name, degree in degrees.items()]
    options = [*sizes, "--training.disable_cuda_graphs"]  # with experts, torchtitan refuses them by default
    config = read_config(f"--module={module}", f"--config={prefix}{model}_debugmodel", *options)
    attention = importlib.import_module("torchtitan.models.common.attention").ScaledDotProductAttention
    config.loss = loss(global_vocab_size=config.model_spec.model.vocab_size)
    config.model_spec.model.layers = config.model_spec.model.layers[:LAYERS]
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = attention.Config()  # FlexAttention has no backward on CPU
    config.training.seq_len, config.training.local_batch_size = SEQUENCE, BATCH
    config.training.mixed_precision_param = "float32"
    return config


def _build(config: Any, folder: str) -> tuple[Any, nn.Module]:
    """A function that computes the loss and the gradients, and the model."""
    tools = importlib.import_module("torchtitan.tools.utils")
    tools.device_type, tools.device_module = "cpu", torch.cpu
    parallel = importlib.import_module("torchtitan.distributed.parallel_dims")
    ranks = importlib.import_module("torchtitan.distributed.utils")
    parallel.device_type = ranks.device_type = "cpu"
    dims = parallel.ParallelDims.from_config(config.parallelism, dist.get_world_size())
    ranks.set_spmd_backend(config.parallelism.spmd_backend)
    spec = config.model_spec
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder=str(Path(folder)),
    )
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    loss = config.loss.build(compile_config=config.compile)
    count = torch.tensor(float(BATCH * SEQUENCE))
    parameters = list(model.parameters())
    trainer = object.__new__(importlib.import_module("torchtitan.experiments.graph_trainer.trainer").GraphTrainer)
    trainer.config, trainer.loss_fn, trainer.parallel_dims = config, loss, dims
    trainer.model_parts, trainer._traced_step = [model], None
    trainer.train_context = ranks.get_spmd_context(parallel_dims=dims, spmd_typechecking=False)

    def trace(inputs: Tensor, labels: Tensor) -> Tensor:
        return trainer._make_fx_forward_backward_step(model, inputs, labels, count, parameters, {})

    def compile(inputs: Tensor, labels: Tensor) -> Tensor:
        found = loss(model(inputs), labels, global_valid_tokens=count)
        value = found[0] if isinstance(found, tuple) else found
        value.backward()
        return value

    return trace if config.compile.mode == "aot_fx_trace" else compile, model


def _generator(config: Any, number: int) -> torch.Generator:
    """Ranks that share a batch, which is those of tensor parallelism, see the same tokens."""
    batch = dist.get_rank() // config.parallelism.tensor_parallel_degree
    return torch.Generator().manual_seed(100 * number + batch)
