"""What ranks run: the ways in which people train, each a few steps of a small model on two ranks.

Contract: a way takes the mesh and a function that compiles with the backend under test, trains, and returns its losses
and the state it ends in. Whatever a way checks of itself (that a scaler skipped a step, say) it checks on the rank.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.optim.adamw import adamw

from tests.integration.training import SHAPE, Trained, shard_parameters
from weft import zoo
from weft.frontends.session import SESSION
from weft.zoo.parallel.collectives import all_reduce, group_name

Compiler = Callable[..., Any]
State = dict[str, Tensor]
MOVES = "remove-dead-code,dedupe-collectives,hoist-launches,sink-waits"
"""Passes that change no value and no shape: under any compiler the results are those without them, bit by bit."""
Outcome = tuple[list[float], State]


def train_by(way: str, backend: str) -> Trained:
    """Train in one of WAYS with one backend."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    SESSION.reset()
    torch.manual_seed(0)
    # Its own: ways share graphs and not the frames of Dynamo by which the reports of cached graphs are found.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(
        Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).with_name(f"inductor-{way}")
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))

    def compiled(function: Any, **settings: Any) -> Any:
        options = {"weft.pipeline": MOVES} if backend.startswith("weft") else None
        return torch.compile(function, backend=backend, options=options, **settings)

    losses, state = WAYS[way](mesh, compiled)
    report = SESSION.report()
    return Trained(
        losses,
        {name: _local(value).detach().numpy().copy() for name, value in state.items()},
        [{"phase": entry.phase, **entry.report} for entry in report.entries],
        report.messages,
    )


def error_of(way: str, backend: str) -> str:
    """The first line of what a way fails with; empty if it does not."""
    try:
        train_by(way, backend)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


# The ways.


def accumulate_gradients(mesh: DeviceMesh, compiled: Compiler) -> Outcome:
    """Two micro-steps without and one with synchronization, by DDP's python reducer."""
    with torch._dynamo.config.patch(optimize_ddp="python_reducer", compiled_autograd=True):
        plain, make_batch = _llama()
        model = DistributedDataParallel(plain)  # its constructor looks at the settings
        optimizer = _adamw(model.parameters())

        @compiled
        def micro_step(*inputs: Tensor) -> Tensor:
            loss = model(*inputs)
            loss.backward()
            return loss

        losses: list[float] = []
        for step in range(6):
            with nullcontext() if step % 3 == 2 else model.no_sync():
                losses.append(micro_step(*make_batch(2, seed=_seed(step))).item())
            if step == 0:
                assert SESSION.report().messages == ()  # nothing was synchronized yet
            if step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    return losses, _state_of(plain)


def checkpoint_blocks(mesh: DeviceMesh, compiled: Compiler) -> Outcome:
    """Blocks keep only their input and run, gathers included, again in backward; shards are plain tensors."""
    model, make_batch = _llama("fsdp", mesh, checkpoint="full", reshard=True)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(_local(parameter).detach()))
    return _train(model, make_batch, compiled)


def checkpoint_blocks_of_dtensors(mesh: DeviceMesh, compiled: Compiler) -> Outcome:
    """The same, with shards that are DTensors."""
    return _train(*_llama("fsdp", mesh, checkpoint="full", reshard=True), compiled)


def tie_embeddings(mesh: DeviceMesh, compiled: Compiler) -> Outcome:
    """The output projection is the embedding's weight: one parameter is gathered by two modules."""
    model, make_batch = _llama("fsdp", mesh, tied=True)
    untied, _ = _llama("fsdp", mesh)
    assert len(list(model.parameters())) == len(list(untied.parameters())) - 1
    return _train(model, make_batch, compiled)


def share_batch_statistics(mesh: DeviceMesh, compiled: Compiler) -> Outcome:
    """Batch norms all-reduce their sums in forward and in backward; running statistics are written in place."""
    shape = {"channels": 4, "num_classes": 4, "image_size": 8}
    built = zoo.build("vision-debug", "ddp", mesh, layers=1, compute_dtype=torch.float32, **shape)
    return _train(*built, compiled)


def keep_f32_masters(mesh: DeviceMesh, compiled: Compiler) -> Outcome:
    """Shards are f32, gathered in bf16, their gradients reduced in f32."""

    class Narrowed(nn.Module):
        def forward(self, shard: DTensor) -> Tensor:
            dtypes = {"forward_dtype": torch.bfloat16, "backward_dtype": torch.float32}
            whole = shard.redistribute(placements=[Replicate()], **dtypes)
            return whole.to_local(grad_placements=[Partial("avg")])

    plain, make_batch = zoo.build("llama-debug", layers=1, compute_dtype=torch.float32, **SHAPE)
    model = shard_parameters(plain, mesh)
    for module in model.modules():
        if isinstance(module, parametrize.ParametrizationList):
            module[0] = Narrowed()
    return _train(model, _own_batches(make_batch), compiled)


def train_adapters(mesh: DeviceMesh, compiled: Compiler) -> Outcome:
    """LoRA: the model is sharded and frozen, small matrices beside its projections are trained."""
    plain, make_batch = _llama()
    for block in cast(Any, plain).layers:
        block.attention.query = Adapted(block.attention.query)
        block.attention.value = Adapted(block.attention.value)
    model = shard_parameters(plain, mesh)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("adapter" in name)
    return _train(model, make_batch, compiled)


class Adapted(nn.Module):
    """A projection with a trained correction of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.adapter_in = nn.Linear(base.in_features, rank, bias=False)
        self.adapter_out = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.adapter_out(self.adapter_in(x))


def scale_the_loss(mesh: DeviceMesh, compiled: Compiler) -> Outcome:
    """GradScaler on sharded parameters, its look at the gradients compiled: found_inf is all-reduced by DTensor."""
    model, make_batch = _llama("fsdp", mesh)
    optimizer = _adamw(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    forward = compiled(model)
    unscale = compiled(scaler.unscale_)
    losses: list[float] = []
    for step in range(4):
        loss = forward(*make_batch(2, seed=step))
        scaler.scale(loss).backward()
        if step == 1 and dist.get_rank() == 1:
            _last_gradient(model).mul_(float("inf"))  # one rank's shard overflows, all ranks must skip
        unscale(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert scaler.get_scale() == 2.0**10  # halved by the second step, doubled by the third and fourth
    return losses, _state_of(model)


def unscale_in_a_function(mesh: DeviceMesh, compiled: Compiler) -> Outcome:
    """What GradScaler does, by functional collectives in one compiled function."""
    model, make_batch = _llama("fsdp", mesh)
    optimizer = _adamw(model.parameters())
    forward = compiled(model)
    scale, skipped = 2.0**10, 0
    group = group_name(mesh, ("dp",))

    @compiled
    def unscale(gradients: list[Tensor], inverse: Tensor) -> Tensor:
        found = torch.zeros(1)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
        return all_reduce(found, "max", group)

    losses: list[float] = []
    for step in range(3):
        loss = forward(*make_batch(2, seed=step))
        (loss * scale).backward()
        if step == 1 and dist.get_rank() == 1:
            _last_gradient(model).mul_(float("inf"))
        found = unscale([_local(p.grad) for p in model.parameters() if p.grad is not None], torch.tensor(1 / scale))
        if found.item():
            skipped, scale = skipped + 1, scale / 2
        else:
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert (skipped, scale) == (1, 2.0**9)
    return losses, _state_of(model)


def clip_by_global_norm(mesh: DeviceMesh, compiled: Compiler) -> Outcome:
    """Gradients are scaled by the norm over all parameters and ranks, in a compiled function."""
    model, make_batch = _llama("fsdp", mesh)
    parameters = list(model.parameters())
    norms: list[float] = []

    @compiled
    def clip() -> Tensor:
        norm = nn.utils.clip_grad_norm_(parameters, 0.1)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def clip_and_note() -> None:
        norms.append(clip().item())

    losses, state = _train(model, make_batch, compiled, before_step=clip_and_note)
    assert min(norms) > 0.1
    return losses + norms, state


def change_the_batch(mesh: DeviceMesh, compiled: Compiler) -> Outcome:
    """Symbolic from the start; a batch of one is compiled again."""
    return _train(*_llama("fsdp", mesh), compiled, sizes=(2, 3, 1), dynamic=True)


def find_the_batch_changed(mesh: DeviceMesh, compiled: Compiler) -> Outcome:
    """Static at first, symbolic when compiled again for another size, which then serves a third."""
    return _train(*_llama("fsdp", mesh), compiled, sizes=(2, 3, 4))


def save_and_resume(mesh: DeviceMesh, compiled: Compiler) -> Outcome:
    """A file after two of four steps; a new model and compiler go on from it as if there had been no break."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "state.pt"
        whole, end = _train(*_llama("fsdp", mesh), compiled, sizes=(2,) * 4, save=(2, file))
        torch._dynamo.reset()
        losses, state = _train(*_llama("fsdp", mesh, seed=1), compiled, resume=file, first_step=2)
    assert losses == whole[2:]
    assert all(torch.equal(_local(state[name]), _local(value)) for name, value in end.items())
    return whole + losses, state


def compile_the_optimizer(mesh: DeviceMesh, compiled: Compiler) -> Outcome:
    """The whole step is one compiled function; AdamW (foreach) gets a graph of its own, by torch's own graph break."""
    model, make_batch = _llama("fsdp", mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)

    @compiled
    def train_step(*inputs: Tensor) -> Tensor:
        loss = model(*inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return [train_step(*make_batch(2, seed=step)).item() for step in range(3)], _state_of(model)


def put_the_optimizer_in_the_graph(mesh: DeviceMesh, compiled: Compiler) -> Outcome:
    """Forward, backward and AdamW (foreach) are one graph, which writes parameters and state in place."""
    model, make_batch = _llama("fsdp", mesh)
    parameters: Any = list(model.parameters())
    averages, squares = ([torch.zeros_like(p, requires_grad=False) for p in parameters] for _ in range(2))
    counts = [torch.zeros(()) for _ in parameters]
    settings: Any = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
    settings |= {"foreach": True, "capturable": True, "amsgrad": False, "maximize": False}

    def train_step(*inputs: Tensor) -> Tensor:
        loss = model(*inputs)
        gradients = list(torch.autograd.grad(loss, parameters))
        with torch.no_grad():
            adamw(parameters, gradients, averages, squares, [], counts, **settings)
        return loss.detach()

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        run = compiled(train_step, fullgraph=True)
        return [run(*make_batch(2, seed=step)).item() for step in range(3)], _state_of(model)


WAYS: dict[str, Callable[[DeviceMesh, Compiler], Outcome]] = {
    way.__name__: way
    for way in (
        accumulate_gradients,
        checkpoint_blocks,
        checkpoint_blocks_of_dtensors,
        keep_f32_masters,
        scale_the_loss,
        unscale_in_a_function,
        clip_by_global_norm,
        tie_embeddings,
        train_adapters,
        share_batch_statistics,
        change_the_batch,
        find_the_batch_changed,
        save_and_resume,
        compile_the_optimizer,
        put_the_optimizer_in_the_graph,
    )
}


# What they share.


def _llama(parallel: str = "none", mesh: DeviceMesh | None = None, seed: int = 0, **keywords: Any) -> Any:
    torch.manual_seed(seed)
    live = mesh if parallel != "none" else None
    keywords = {"compute_dtype": torch.float32, "reshard": False, **SHAPE, **keywords}
    return zoo.build("llama-debug", parallel, live, layers=1, **keywords)


def _train(
    model: nn.Module,
    make_batch: Callable[..., tuple[Tensor, ...]],
    compiled: Compiler,
    *,
    sizes: Iterable[int] = (2, 2),
    first_step: int = 0,
    before_step: Callable[[], None] = lambda: None,
    save: tuple[int, Path] | None = None,
    resume: Path | None = None,
    **settings: Any,
) -> Outcome:
    """The plain loop: the model is compiled, the optimizer is not."""
    optimizer = _adamw(parameter for parameter in model.parameters() if parameter.requires_grad)
    if resume is not None:
        saved = torch.load(resume, weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    forward = compiled(model, **settings)
    losses: list[float] = []
    for step, size in enumerate(sizes, first_step):
        loss = forward(*make_batch(size, seed=step))
        loss.backward()
        before_step()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if save is not None and len(losses) == save[0]:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, save[1])
    return losses, _state_of(model)


def _adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


def _own_batches(make_batch: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    return lambda size, seed: make_batch(size, seed=_seed(seed))


def _seed(step: int) -> int:
    """Ranks see different data; the zoo knows it only of models that it spreads."""
    return step * dist.get_world_size() + dist.get_rank()


def _state_of(model: nn.Module) -> State:
    """Parameters and buffers."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _last_gradient(model: nn.Module) -> Tensor:
    return [_local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None][-1]


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
