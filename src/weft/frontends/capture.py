"""Training steps to graphs, in one process: fake tensors, a fake world, any number of ranks.

Contract: every rank runs this graph. Its inputs are parameters, buffers, optimizer state and the batch, in this order,
under readable names. Its nodes carry fake values, module names, source lines, and a forward or backward tag. It needs
no process group, because the graph carries a table of its groups.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel

from weft.arguments import MESH_EXAMPLE, check_choice, check_type
from weft.compat import FakeTensorMode, OpOverload, as_if_compiled, new_fake_mode, python_kernels, resolve_group
from weft.errors import CaptureError, WeftError, compose, nearest
from weft.frontends.cleanup import tidy
from weft.frontends.clipping import clip_gradients
from weft.frontends.fake_inputs import Faker, plain
from weft.frontends.fake_world import fake_world, mesh_groups
from weft.frontends.min_cut import Partition, recomputed
from weft.frontends.partition import cut
from weft.frontends.provenance import OPTIMIZER, Recorder, failing_line
from weft.graph.about import ABOUT_KEY, UNREAD_KEY
from weft.graph.aliasing import APART_KEY, parts
from weft.graph.check import validate
from weft.graph.collective import collectives
from weft.graph.dag import Dag, collector_paused
from weft.graph.groups import MADE_UP, TABLE_KEY, Group, GroupTable, read_groups, table_of
from weft.passes.pipeline import Pipeline
from weft.process import left_as_it_was
from weft.verification.rank import tensors_in

TANGENT = "loss_gradient"
DDP, FSDP = "DistributedDataParallel", "FSDP (fully_shard)"
WRAPPERS = ((DistributedDataParallel, DDP), (FSDPModule, FSDP), (FullyShardedDataParallel, FSDP))
INSTEAD = "shard with weft.simple_fsdp(model, mesh), or use DTensor tensor parallelism or functional collectives"
_TURN = threading.RLock()
"""One capture at a time: the default process group and the state that torch changes while tracing are per process."""

Part = Literal["step", "joint", "forward", "backward"]
Reduce = Literal["last", "each"]
Optimizer = Callable[[list[Tensor]], torch.optim.Optimizer]
Mesh = Mapping[str, int] | DeviceMesh

OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=3e-4, foreach=True, capturable=True),
    "fused-adamw": lambda parameters: torch.optim.AdamW(parameters, lr=3e-4, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, foreach=True),
}


@dataclass(frozen=True)
class TrainingStep:
    """A model, its loss and its optimizer."""

    model: nn.Module | Callable[[DeviceMesh | None], nn.Module]
    """A module, or a factory that takes a mesh; a model that a factory makes takes no memory, whatever its size."""
    loss: Callable[..., Tensor] | None = None
    """A function of the model's output and the targets; None if the model returns its loss."""
    num_targets: int = 1
    """Number of example inputs, counted from the end, that go to the loss instead of the model."""
    optimizer: Optimizer | str | None = None
    """A function that makes an optimizer for a list of parameters, or `adamw`, `fused-adamw` or `sgd`."""
    clip_norm: float = 0.0
    """Largest norm of all gradients together; larger gradients are scaled down before the optimizer. 0: no limit."""
    accumulate: int = 1
    """Number of microbatches; dim 0 of each example input is divided among them, and their gradients are averaged."""
    reduce: Reduce = "last"
    """Whether gradients are reduced over ranks after the last microbatch only, or after each.

    For `last`, the model needs FSDP2's method `set_requires_gradient_sync(bool)`; models of the zoo have it.
    """


@left_as_it_was()
def capture(
    step: Callable[..., Any] | TrainingStep,
    example_inputs: Sequence[Any],
    mesh: Mesh | None = None,
    part: Part = "step",
    dynamic: bool = False,
    *,
    rank: int = 0,
    partition: Partition = "autograd",
    memory_budget: float = 1.0,
    about: Mapping[str, Any] | None = None,
) -> GraphModule:
    """The graph of a training step on a mesh, traced with fake tensors: nothing is computed or sent.

    A function of tensors is traced as it is; if it has an argument called `mesh`, it gets the device mesh. `part`
    selects a part of a `TrainingStep`, or of a module that returns a loss: `forward` (the loss, and the values that
    backward needs), `backward`, `joint` (loss and gradients), or `step` (joint, and the optimizer updates parameters
    and state in place).

    `example_inputs` are the arguments of one call on one rank. `mesh` gives axes and sizes, `{'dp': 8, 'tp': 4}`, the
    last one varying fastest, or is a live `DeviceMesh`; a step without collectives does not need one. `dynamic` makes
    dim 0 of the example inputs symbolic. `rank` is the rank that this process plays. `about` is kept with the graph:
    the zoo puts the model and its tokens there. `capture.md` lists the models that can be captured.

    `partition` says who chooses the values that backward finds saved. With `autograd` each operator keeps what its
    gradient needs, as in eager execution. With `min-cut` AOTAutograd chooses, as under `torch.compile`, and backward
    recomputes the rest; with `min-cut-layers` it chooses for the layers only. `memory_budget` is AOTAutograd's
    `activation_memory_budget`, which bounds what a region saves: 1 is the min-cut, 0 saves its inputs only.

    Raises `CaptureError` if the step cannot be traced, or uses a group that the mesh does not have.
    """
    _check_arguments(step, example_inputs, mesh)
    asked = _what_is_asked(step, part)
    _check_partition(asked, partition, memory_budget)
    with _TURN, collector_paused(), _world(mesh, rank) as live:
        mode = new_fake_mode()
        tracing = _Tracing(mode, live, dynamic, partition, memory_budget)
        if isinstance(asked, TrainingStep):
            traced = tracing.step(asked, example_inputs, part)
        else:
            traced = tracing.function(asked, example_inputs)
        _refuse_in_place(traced)
        traced.meta[TABLE_KEY] = _group_table(traced, live)
        traced.meta[APART_KEY] = True
        if live is not None:
            _warn_without_collectives(traced, live)
        module = Pipeline.parse("remove-dead-code").run(traced).module
        if part in ("forward", "backward"):
            module = cut(module, TANGENT)[part == "backward"]
            module.meta[TABLE_KEY] = _group_table(module, live)
    axes = dict(zip(live.mesh_dim_names or (), live.shape, strict=True)) if live is not None else {}
    chosen: dict[str, Any] = {"partition": partition} if partition != "autograd" else {}
    chosen |= {"memory_budget": memory_budget} if memory_budget != 1 else {}
    unread = module.meta.pop(UNREAD_KEY, 0) // (asked.accumulate if isinstance(asked, TrainingStep) else 1)
    chosen |= {UNREAD_KEY: unread} if unread else {}
    module.meta[ABOUT_KEY] = {"part": part, "mesh": axes, **chosen, **(about or {})}
    validate(Dag(module.graph))
    return module


def _check_arguments(step: Any, example_inputs: Any, mesh: Any) -> None:
    if not callable(step) and not isinstance(step, TrainingStep):
        do = "pass a function of tensors, a module, or weft.TrainingStep(model, loss, optimizer='adamw')"
        check_type("capture", "step", step, TrainingStep, "a function or a TrainingStep", do=do, error=CaptureError)
    do = "give the arguments of one call: [inputs, targets]"
    check_type("capture", "example_inputs", example_inputs, Sequence, "a list of arguments", do=do, error=CaptureError)
    if mesh is not None:
        said = "a mapping of axes or a DeviceMesh"
        check_type("capture", "mesh", mesh, (Mapping, DeviceMesh), said, do=MESH_EXAMPLE, error=CaptureError)


def _what_is_asked(step: Callable[..., Any] | TrainingStep, part: str) -> Callable[..., Any] | TrainingStep:
    """The training step, a module made into one, or a plain function."""
    known = get_args(Part)
    if part not in known:
        do = nearest(part, known) or f"use one of {', '.join(known)}"
        raise CaptureError(compose("capture", f"no part is called {part!r}", do=do))
    if isinstance(step, nn.Module):
        step = TrainingStep(step)
    if not isinstance(step, TrainingStep):
        if part != "step":
            what = f"a function is traced as it is, so its part is 'step', not {part!r}"
            raise CaptureError(compose("capture", what, do="pass a TrainingStep or a module to choose a part"))
        return step
    if part == "step" and step.optimizer is None:
        do = "give one: TrainingStep(model, optimizer='adamw'); or ask for part='joint'"
        raise CaptureError(compose("capture", "part 'step' needs an optimizer, but the step has none", do=do))
    return step


def _check_partition(asked: Callable[..., Any] | TrainingStep, partition: str, memory_budget: float) -> None:
    check_choice("capture", "partition", partition, get_args(Partition), error=CaptureError)
    if partition != "autograd" and not isinstance(asked, TrainingStep):
        what = f"a function is traced as it is, so its partition is 'autograd', not {partition!r}"
        raise CaptureError(compose("capture", what, do="pass a TrainingStep or a module to choose a partition"))
    if not 0 <= memory_budget <= 1:
        raise CaptureError(compose("capture", f"memory_budget is {memory_budget:g}, expected 0 to 1"))
    if partition == "autograd" and memory_budget != 1:
        what = "autograd saves what each operator asks for, whatever the memory budget"
        raise CaptureError(compose("capture", what, do="use partition='min-cut' or 'min-cut-layers'"))


def _check_accumulation(
    step: TrainingStep, model: nn.Module, example_inputs: Sequence[Any], part: str, mesh: DeviceMesh | None
) -> None:
    check_choice("capture", "reduce", step.reduce, get_args(Reduce), error=CaptureError)
    if step.accumulate < 1:
        do = "use accumulate=1 or more"
        raise CaptureError(compose("capture", f"accumulate is {step.accumulate}, expected 1 or more", do=do))
    if step.accumulate == 1:
        return
    if part in ("forward", "backward"):
        what = f"part {part!r} covers one microbatch, but accumulate is {step.accumulate}"
        raise CaptureError(compose("capture", what, do="ask for part='joint' or part='step'"))
    rows = [value.shape[0] for value in example_inputs if isinstance(value, Tensor) and value.dim()]
    uneven = next((size for size in rows if size % step.accumulate), None)
    if uneven is not None:
        what = f"an example input has {uneven} rows, which {step.accumulate} microbatches cannot share evenly"
        raise CaptureError(compose("capture", what, do="give example inputs for all microbatches together"))
    if step.reduce == "last" and mesh is not None and not hasattr(model, "set_requires_gradient_sync"):
        what = f"{type(model).__name__} cannot leave gradients unreduced: it has no set_requires_gradient_sync"
        raise CaptureError(compose("capture", what, do="use reduce='each', or give the model this method of FSDP2"))


def _world(mesh: Mesh | None, rank: int) -> contextlib.AbstractContextManager[DeviceMesh | None]:
    if isinstance(mesh, Mapping):
        return fake_world(mesh, rank=rank)
    return contextlib.nullcontext(mesh)


def _group_table(module: GraphModule, mesh: DeviceMesh | None) -> GroupTable:
    """The groups of the launches, named after their mesh axes; a group of all ranks is called `world`."""
    module.meta.pop(TABLE_KEY, None)
    found = read_groups(module)
    axes = mesh_groups(mesh) if mesh is not None else {}
    named: dict[str, Group] = {}
    # A step may use both the run-time name of a group and its axis. Run-time names come first, so that the axis
    # becomes the canonical name of both.
    for name, group in sorted(found.groups.items(), key=lambda item: found.runtime[item[0]].isidentifier()):
        key = found.runtime[name]
        if axes.get(key) in named.values():
            continue
        if key not in axes and resolve_group(key) is None:
            raise CaptureError(_unknown_group(key, mesh))
        spans_world = dist.is_initialized() and group.size == dist.get_world_size() and group.ranks is None
        if key in axes:
            named[key] = axes[key]
        elif spans_world:
            named[key] = replace(group, name="world", id=f"world{group.identity}")
        else:
            named[key] = replace(group, name="" if MADE_UP.fullmatch(name) else name, id=group.identity)
    return table_of(named)


def _unknown_group(name: str, mesh: DeviceMesh | None) -> str:
    if mesh is None:
        found, do = "no mesh was given", f"give the axis and its size: mesh={{{name!r}: 8}}"
    else:
        axes = ", ".join(map(repr, mesh.mesh_dim_names or ())) or "without names"
        found = f"the mesh has {'axis' if mesh.ndim == 1 else 'axes'} {axes}"
        do = f"name an axis of the mesh in the step, or add {name!r} to the mesh"
    return compose("capture", f"the step communicates in group {name!r}, but {found}", do=do)


def _warn_without_collectives(module: GraphModule, mesh: DeviceMesh) -> None:
    if mesh.size() == 1 or any(True for _ in collectives(module.graph)):
        return
    what = f"the step has no collectives, though the mesh has {mesh.size()} ranks"
    why = ["FSDP2 (fully_shard) and DDP by default communicate from hooks, which are not part of the graph"]
    warnings.warn(
        compose("capture", what, where=why, do=INSTEAD), stacklevel=4
    )  # one of the levels is the decorator of `capture`


def _refuse_hooks(model: nn.Module) -> None:
    """Refuse a model whose wrapper communicates outside the graph."""
    for path, module in model.named_modules():
        found = next((name for kind, name in WRAPPERS if isinstance(module, kind)), None)
        if found is not None:
            where = f"module {path!r}" if path else "the model"
            what = f"{where} is wrapped by {found}, which communicates from hooks that are not part of the graph"
            raise CaptureError(compose("capture", what, do=INSTEAD))


def _refuse_in_place(module: GraphModule) -> None:
    """Refuse c10d collectives, which write in place and are waited for outside the graph."""
    for node in module.graph.nodes:
        if isinstance(node.target, OpOverload) and node.target.namespace == "c10d":
            what = (
                f"the step calls {node.target}, which is not a functional collective: {FSDP} and {DDP} communicate "
                "from hooks that are not part of the graph"
            )
            raise CaptureError(compose("capture", what, do=INSTEAD))


def _refuse_failed_hooks(error: BaseException) -> None:
    """Name the wrapper that failed: it may be inside a function, or fail while the model is built."""
    seen: BaseException | None = error
    while seen is not None:
        files = [frame.filename.replace("\\", "/") for frame in traceback.extract_tb(seen.__traceback__)]
        for part, name in (("/nn/parallel/distributed.py", DDP), ("/distributed/fsdp/", FSDP)):
            if any(part in file for file in files):
                text = next(iter(str(error).strip().splitlines()), "")
                what = f"the step uses {name}, which communicates from hooks that are not part of the graph"
                where = [f"{type(error).__name__}: {text}", *failing_line(error)]
                raise CaptureError(compose("capture", what, where=where, do=INSTEAD)) from error
        seen = seen.__cause__ or seen.__context__


class _Tracing:
    """One trace."""

    def __init__(
        self,
        mode: FakeTensorMode,
        mesh: DeviceMesh | None,
        dynamic: bool,
        partition: Partition,
        memory_budget: float,
    ) -> None:
        self.mode, self.mesh, self.dynamic = mode, mesh, dynamic
        self.partition, self.memory_budget = partition, memory_budget
        self.faker = Faker(mode, _device(mesh))
        self.recorder = Recorder()
        self.leaves: list[tuple[str, Tensor]] = []
        """Path and value of each leaf that becomes an input of the graph, in the order of the inputs."""
        self.num_state = 0
        """Number of inputs that are parameters, buffers or optimizer state; the batch comes after them."""

    # Tracing.

    def function(self, step: Callable[..., Any], example_inputs: Sequence[Any]) -> GraphModule:
        """Trace a plain function."""
        arguments = self._batch(step, example_inputs)
        keywords = {"mesh": self.mesh} if "mesh" in _parameters(step) else {}
        return self._trace(lambda: step(*arguments, **keywords), None)

    def step(self, step: TrainingStep, example_inputs: Sequence[Any], part: str) -> GraphModule:
        """Trace a training step up to the requested part, that part included."""
        model = self._model(step)
        state = self._state(model)
        trainable = {name: leaf for name, leaf in state.items() if leaf.requires_grad}
        if not trainable:
            what = "the model has no parameter that needs a gradient"
            raise CaptureError(compose("capture", what, do="give parameters requires_grad=True"))
        optimizer = self._optimizer(step, trainable) if part == "step" else None
        self.num_state = len(self._inputs())
        _check_accumulation(step, model, example_inputs, part, self.mesh)
        arguments = self._batch(model.forward, example_inputs)
        count = len(arguments) - (step.num_targets if step.loss is not None else 0)
        tangent = None
        if part in ("forward", "backward"):
            tangent = self._add(TANGENT, torch.empty((), device="meta"))

        def run() -> list[Any]:
            losses: list[Tensor] = []
            placed: list[Tensor | None] = [None] * len(trainable)
            for number in range(step.accumulate):
                _set_reduction(model, step, number)
                inputs = [_microbatch(value, number, step.accumulate) for value in arguments]
                output = model(*inputs[:count])
                loss = _loss(output if step.loss is None else step.loss(output, *inputs[count:]))
                loss = loss / step.accumulate if step.accumulate > 1 else loss
                seed = None if tangent is None else [tangent.to(loss.dtype)]
                gradients = torch.autograd.grad(loss, list(trainable.values()), seed, allow_unused=True)
                found = [_placed(gradient, leaf) for gradient, leaf in zip(gradients, trainable.values(), strict=True)]
                placed = [_sum(total, gradient) for total, gradient in zip(placed, found, strict=True)]
                losses.append(loss)
            loss = losses[0] if len(losses) == 1 else torch.stack([loss.detach() for loss in losses]).sum()
            if optimizer is None:
                return [loss, *placed]
            self.recorder.phase = OPTIMIZER
            if step.clip_norm:
                clip_gradients([gradient for gradient in placed if gradient is not None], step.clip_norm)
            self._update(optimizer, list(trainable.values()), placed)
            return [loss]

        held = {f"model.{path}": leaf for path, leaf in state.items()}
        return self._trace(lambda: torch.func.functional_call(_Host(model), held, (run,)), model)

    def _update(self, optimizer: torch.optim.Optimizer, leaves: list[Tensor], gradients: list[Tensor | None]) -> None:
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        with as_if_compiled():
            optimizer.step()

    def _trace(self, run: Callable[[], Any], model: nn.Module | None) -> GraphModule:
        inputs = self._inputs()

        def traced(*_inputs: Tensor) -> Any:
            with self.recorder.record(model):
                result = run()
            if not any(True for _ in tensors_in(result)):
                what = f"the step returns no tensor: it returns {type(result).__name__}"
                raise CaptureError(compose("capture", what, do="return the loss, or another result of the step"))
            return plain(result)

        kernels = python_kernels() if self.dynamic else contextlib.nullcontext()
        try:
            with self.mode, kernels, torch.autograd.set_multithreading_enabled(False):
                module = make_fx(traced)(*inputs.values())
        except WeftError:
            raise
        except Exception as error:
            _refuse_failed_hooks(error)
            text = next(iter(str(error).strip().splitlines()), "")
            what = f"the step failed with {type(error).__name__}: {text}"
            kind = self.faker.device.type.upper()
            do = f"the step runs on fake {kind} tensors: it must not read their values or use another device"
            raise CaptureError(compose("capture", what, where=failing_line(error), do=do)) from error
        again: dict[Node, bool] = {}
        if self.partition != "autograd":
            layers_only = self.partition == "min-cut-layers"
            again = recomputed(module, self.num_state, layers_only, self.memory_budget)
        return tidy(module, list(inputs), self.faker.constant, again)

    # Inputs.

    def _model(self, step: TrainingStep) -> nn.Module:
        if isinstance(step.model, nn.Module):
            _refuse_hooks(step.model)
            return step.model
        try:
            with self.mode:
                made: Any = step.model(self.mesh)
        except Exception as error:
            _refuse_failed_hooks(error)
            raise
        if not isinstance(made, nn.Module):
            what = f"the model is a {type(made).__name__}, a module is needed"
            raise CaptureError(compose("capture", what, do="let the factory return a torch.nn.Module"))
        _refuse_hooks(made)
        return made

    def _state(self, model: nn.Module) -> dict[str, Tensor]:
        """Parameters and buffers by path; shared ones appear once."""
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {path: self._add(path, tensor) for path, tensor in tensors.items()}

    def _optimizer(self, step: TrainingStep, trainable: Mapping[str, Tensor]) -> torch.optim.Optimizer:
        factory: Any = step.optimizer
        if isinstance(factory, str):
            if factory not in OPTIMIZERS:
                do = nearest(factory, OPTIMIZERS) or f"use one of {', '.join(OPTIMIZERS)}, or give a function"
                raise CaptureError(compose("capture", f"no optimizer is called {factory!r}", do=do))
            factory = OPTIMIZERS[factory]
        optimizer: torch.optim.Optimizer = factory(list(trainable.values()))
        with self.mode, as_if_compiled():  # the first step creates the optimizer state
            for leaf in trainable.values():
                leaf.grad = torch.zeros_like(leaf)
            optimizer.step()
        for path, leaf in trainable.items():
            leaf.grad = None
            state: dict[str, Any] = optimizer.state[leaf]
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = self._add(f"{path}.{key}", value)
        return optimizer

    def _batch(self, called: Callable[..., Any], example_inputs: Sequence[Any]) -> list[Any]:
        names = [name for name in _parameters(called) if name != "mesh"]
        made: list[Any] = []
        for i, value in enumerate(example_inputs):
            name = names[i] if i < len(names) else f"target_{i - len(names)}"
            made.append(self._input(name, value))
        return made

    def _input(self, name: str, value: Any) -> Any:
        """An example input with fake tensors in place of its tensors; other values stay constants."""
        if isinstance(value, Tensor):
            return self._add(name, value, batch=self.dynamic)
        if isinstance(value, list | tuple):
            items = [self._input(f"{name}.{i}", item) for i, item in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, dict):
            return {key: self._input(f"{name}.{key}", item) for key, item in value.items()}
        return value

    def _add(self, name: str, tensor: Tensor, batch: bool = False) -> Tensor:
        leaf = self.faker.with_symbolic_batch(name, tensor) if batch else self.faker.leaf(tensor)
        self.leaves.append((name, leaf))
        return leaf

    def _inputs(self) -> dict[str, Tensor]:
        """The plain tensors of all leaves, under names that are valid for nodes."""
        inputs: dict[str, Tensor] = {}
        for path, leaf in self.leaves:
            base = "".join(c if c.isalnum() else "_" for c in path)
            found = parts(leaf)
            for i, part in enumerate(found):
                name = base if len(found) == 1 else f"{base}_{i}"
                while name in inputs:
                    name += "_"
                inputs[name] = part
        return inputs


def _device(mesh: DeviceMesh | None) -> torch.device:
    """The device of a live mesh. A graph for GPUs has other operators than one for CPUs, for attention for example."""
    kind = "cpu" if mesh is None else mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


class _Host(nn.Module):
    """Runs a function while a model holds other tensors; covers backward too, which may run the model again."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


def _parameters(called: Callable[..., Any]) -> list[str]:
    """The names of the positional arguments of a function."""
    try:
        found = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) or p.name == "mesh"]


def _loss(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        what = f"the loss is a {type(value).__name__}, a tensor with one element is needed"
        raise CaptureError(compose("capture", what, do="give TrainingStep(model, loss=...)"))
    if value.numel() != 1:
        what = f"the loss has shape {list(value.shape)}, one element is needed"
        raise CaptureError(compose("capture", what, do="give TrainingStep(model, loss=...), or take the mean"))
    return value


def _microbatch(value: Any, number: int, count: int) -> Any:
    """The part of an argument that one of several microbatches takes; values that are not tensors stay whole."""
    if count == 1 or not isinstance(value, Tensor):
        return value
    return value.chunk(count)[number]


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return second if first is None else first if second is None else first + second


def _set_reduction(model: nn.Module, step: TrainingStep, number: int) -> None:
    """Tell the model whether this microbatch reduces gradients over ranks."""
    switch: Any = getattr(model, "set_requires_gradient_sync", None)
    if step.accumulate > 1 and step.reduce == "last" and switch is not None:
        switch(number == step.accumulate - 1)


def _placed(gradient: Tensor | None, leaf: Tensor) -> Tensor | None:
    """The gradient with the placements of its parameter."""
    placements = getattr(leaf, "placements", None)
    if gradient is None or placements is None or getattr(gradient, "placements", None) == placements:
        return gradient
    redistribute: Any = getattr(gradient, "redistribute", None)
    return gradient if redistribute is None else redistribute(placements=placements)
