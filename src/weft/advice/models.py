"""Models that advice is given on: one of the zoo, or a module of the user's own by its import path.

Contract: a model travels to worker processes by name; each worker makes it there, with fake tensors.
"""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule

from weft.advice.blocks import blocks_of, checkpoint, cut, few_layers, is_on_line, kind_of
from weft.advice.layout import TrainingLayout
from weft.errors import CaptureError, compose, nearest
from weft.frontends.capture import TrainingStep, capture
from weft.graph.about import TOKENS_KEY
from weft.graph.assumed_sizes import BALANCED, assume_sizes
from weft.zoo.catalog import ENTRIES, load
from weft.zoo.parallel.parameters import Precision
from weft.zoo.parallel.strategies import parallelise
from weft.zoo.parallel.tensor import check_split, plan_by_names, why_not_split, word_of

OPTIMIZER = "fused-adamw"
CHECKPOINTS = ("none", "selective", "full")
PRECISION = Precision(torch.bfloat16, torch.float32)
"""Parameters are f32; they are gathered and used in bf16, and gradients are reduced in f32."""


class TrainedModel(ABC):
    """A model that can be captured under every layout. It is pickled for each question to a worker, so it is small."""

    @property
    @abstractmethod
    def title(self) -> str:
        """The model as the user named it."""

    @property
    @abstractmethod
    def tokens_per_sample(self) -> int:
        """Tokens of one sequence."""

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Number of parameters, before any layout divides them."""

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Number of layers."""

    @property
    @abstractmethod
    def few_layers(self) -> tuple[int, int] | None:
        """Two numbers of layers to measure instead of all; None if no line through two leads to all.

        The second adds what all further layers repeat (`few_layers` of `blocks.py`).
        """

    @property
    def num_experts(self) -> int:
        """Number of experts that ranks can share; 0 without any."""
        return 0

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """The ways in which its blocks can be checkpointed."""
        return CHECKPOINTS[:1]

    def splits_over(self, _degree: int) -> bool:
        """Whether tensor parallelism of this degree can run it."""
        return False

    @abstractmethod
    def capture(self, layout: TrainingLayout, microbatch: int, num_layers: int | None = None) -> GraphModule:
        """The training step of one microbatch, with the optimizer; all layers if no number is given."""


@dataclass(frozen=True)
class ZooModel(TrainedModel):
    """A model of the zoo, with changes to its configuration."""

    name: str
    changes: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.name not in ENTRIES:
            do = nearest(self.name, ENTRIES) or f"use one of {', '.join(ENTRIES)}"
            raise CaptureError(compose("advise", f"no model is called {self.name!r}", do=do))
        if not hasattr(ENTRIES[self.name].config, "sequence"):
            texts = [name for name, entry in ENTRIES.items() if hasattr(entry.config, "sequence")]
            what = f"{self.name} takes no tokens"
            raise CaptureError(compose("advise", what, do=f"use one of {', '.join(texts)}"))

    @property
    def title(self) -> str:
        changes = "&".join(f"{key}={value}" for key, value in self.changes)
        return f"zoo:{self.name}?{changes}" if changes else f"zoo:{self.name}"

    @property
    def config(self) -> Any:
        """The configuration with the changes."""
        return replace(ENTRIES[self.name].config, **dict(self.changes))

    @property
    def tokens_per_sample(self) -> int:
        return self.config.sequence

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in _without_data(self).parameters())

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @property
    def few_layers(self) -> tuple[int, int] | None:
        num_dense = getattr(self.config, "num_dense", 0)
        return few_layers([number < num_dense for number in range(self.num_layers)])

    @property
    def num_experts(self) -> int:
        return getattr(self.config, "num_experts", 0)

    @property
    def checkpoints(self) -> tuple[str, ...]:
        return CHECKPOINTS

    def splits_over(self, degree: int) -> bool:
        model = _without_data(self)
        if not hasattr(model, "tensor_plan"):
            return False
        try:
            check_split(model, model.tensor_plan, "tp", degree)  # type: ignore[arg-type]
        except CaptureError:
            return False
        return True

    def capture(self, layout: TrainingLayout, microbatch: int, num_layers: int | None = None) -> GraphModule:
        options: dict[str, Any] = {**dict(self.changes), "checkpoint": layout.checkpoint}
        options |= {} if num_layers is None else {"num_layers": num_layers}
        options |= {"mesh": dict(layout.mesh), "reshard": layout.reshard, "optimizer": OPTIMIZER}
        module = load(self.name, layout.parallel, part="step", batch=microbatch, **options)
        assume_sizes(module, BALANCED)  # experts: each rank is sent as many rows as each other
        return module


@functools.lru_cache(maxsize=4)
def _without_data(model: ZooModel) -> nn.Module:
    """The model with tensors that hold no data."""
    with torch.device("meta"):
        return ENTRIES[model.name].make(model.config)


@dataclass(frozen=True)
class ImportedModel(TrainedModel):
    """A model of the user's own: `package.module:function`.

    `function(batch)` returns a function that makes the model, and the example inputs of a batch of that size. The model
    called with these inputs returns the loss. The first input holds tokens, one row for each sequence. Its blocks are
    split for tensor parallelism by their names, or by the plan in its attribute `tensor_plan` (`tensor.py`).
    """

    path: str

    @property
    def title(self) -> str:
        return self.path

    @property
    def tokens_per_sample(self) -> int:
        first: Any = next(iter(self._example(1)[1]), None)
        if not isinstance(first, Tensor) or first.dim() < 1 or first.shape[0] != 1:
            what = f"the first input of {self.path}(1) is not a tensor with one row"
            raise CaptureError(compose("advise", what, do="return the tokens first, as [batch, sequence]"))
        return first.numel()

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in _imported_without_data(self).parameters())

    @property
    def num_layers(self) -> int:
        blocks = blocks_of(_imported_without_data(self))
        return 0 if blocks is None else len(blocks)

    @property
    def few_layers(self) -> tuple[int, int] | None:
        return _few_layers_of(self)

    @property
    def checkpoints(self) -> tuple[str, ...]:
        return CHECKPOINTS if self.num_layers else CHECKPOINTS[:1]

    def splits_over(self, degree: int) -> bool:
        model = _imported_without_data(self)
        plan = _plan_of(model)
        return "sum" in plan.values() and why_not_split(model, plan, degree) is None

    def capture(self, layout: TrainingLayout, microbatch: int, num_layers: int | None = None) -> GraphModule:
        step, inputs = self._step(layout, microbatch, num_layers)
        about = {"model": self.path, TOKENS_KEY: microbatch * self.tokens_per_sample * layout.num_data_ranks}
        return capture(step, inputs, dict(layout.mesh), "step", about=about)

    def capture_undivided(self, num_layers: int) -> GraphModule:
        """Loss and gradients of one sequence on one rank."""
        step, inputs = self._step(TrainingLayout("none", ()), 1, num_layers)
        return capture(step, inputs, None, "joint")

    def _step(
        self, layout: TrainingLayout, microbatch: int, num_layers: int | None
    ) -> tuple[TrainingStep, tuple[Any, ...]]:
        make_model, inputs = self._example(microbatch)

        def make(mesh: DeviceMesh | None) -> nn.Module:
            model = make_model()
            blocks = blocks_of(model)  # a container with one block would not be found after the cut
            if blocks is not None:
                cut(blocks, len(blocks) if num_layers is None else num_layers)
                checkpoint(blocks, layout.checkpoint)
            model.tensor_plan = _plan_of(model)  # type: ignore[assignment]
            parallelise(model, layout.parallel, mesh, PRECISION, layout.reshard)
            return model

        return TrainingStep(make, optimizer=OPTIMIZER), inputs

    def _example(self, batch: int) -> tuple[Callable[[], nn.Module], tuple[Any, ...]]:
        found = self._function()(batch)
        if not (isinstance(found, tuple) and len(found) == 2 and callable(found[0]) and isinstance(found[1], tuple)):
            what = f"{self.path}({batch}) does not return a function and a tuple of inputs"
            raise CaptureError(compose("advise", what, do="return (lambda: Model(), (tokens, targets))"))
        return found

    def _function(self) -> Callable[[int], Any]:
        home, _, name = self.path.partition(":")
        try:
            found: Any = importlib.import_module(home)
        except (ImportError, ValueError) as error:
            do = "give package.module:function, and put its folder on PYTHONPATH"
            raise CaptureError(compose("advise", f"{home!r} cannot be imported: {error}", do=do)) from None
        function: Any = getattr(found, name, None)
        if not callable(function):
            do = nearest(name, dir(found)) or "give package.module:function"
            raise CaptureError(compose("advise", f"{home} has no function called {name!r}", do=do))
        return function


@functools.lru_cache(maxsize=4)
def _imported_without_data(model: ImportedModel) -> nn.Module:
    with torch.device("meta"):
        return model._example(1)[0]()  # pyright: ignore[reportPrivateUsage]


@functools.lru_cache(maxsize=4)
def _few_layers_of(model: ImportedModel) -> tuple[int, int] | None:
    """The numbers of layers that equal blocks suggest, if graphs of the model confirm them."""
    whole_model = _imported_without_data(model)
    blocks = blocks_of(whole_model)
    if blocks is None:
        return None
    plan = _plan_of(whole_model)
    paths = {module: path for path, module in whole_model.named_modules()}
    splits = [[word_of(paths[module], plan) for module in block.modules()] for block in blocks.children()]
    counts = few_layers([*zip(map(kind_of, blocks.children()), splits, strict=True)])
    if counts is None:
        return None
    try:
        few, more, whole = (model.capture_undivided(count) for count in (*counts, len(blocks)))
    except CaptureError:  # it needs all of its layers, or cannot be captured at all, which probes will report
        return None
    return counts if is_on_line(few, more, whole, (*counts, len(blocks))) else None


def _plan_of(model: nn.Module) -> Mapping[str, str]:
    """The plan for tensor parallelism that a model states, or that fits the names of its modules."""
    stated: Any = getattr(model, "tensor_plan", None)
    return stated if isinstance(stated, Mapping) else plan_by_names(model)


def model_of(name: str) -> TrainedModel:
    """The model of a name: `zoo:llama-8b` or `package.module:function`."""
    if not name.startswith("zoo:") and ":" in name:
        return ImportedModel(name)
    return ZooModel(name.removeprefix("zoo:"))
