"""Real ranks train under a memory limit: Weft decides what forward saves, and the weights stay those of torch."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.integration.test_default_training import ROUNDING
from tests.integration.training import Trained, distance, same, train
from tests.integration.worlds import World
from weft import zoo
from weft.errors import PipelineError
from weft.frontends.fake_world import fake_world
from weft.frontends.options import split_options
from weft.frontends.session import SESSION

STEP: dict[str, Any] = {"steps": 5, "layers": 2, "batch_size": 16}


def choices(trained: Trained) -> set[str]:
    """The new choices for values that backward needs."""
    sentences = [
        d["sentence"] for graph in trained.graphs for d in graph["applied"] if d["pass_name"] == "decide-memory"
    ]
    return {
        name
        for name in ("recomputed", "gathered again", "offloaded")
        for sentence in sentences
        if f": {name}" in sentence
    }


def check(world: World, parallel: str, mesh: dict[str, int], limit: str, expected: set[str]) -> None:
    options = {"weft.memory_limit": limit, "weft.pipeline": "exact", "weft.effort": "fast"}
    found = world.run(train, parallel=parallel, mesh=mesh, backend="weft_eager", options=options, **STEP)
    wanted = world.reference(train, parallel=parallel, mesh=mesh, backend="aot_eager", **STEP)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.messages == ()
        assert choices(mine) == expected
        assert same(mine, theirs)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    ("parallel", "expected"), [("fsdp", {"recomputed", "gathered again"}), ("ddp", {"recomputed"})]
)
def test_recomputed_and_regathered_values_train_the_same_weights(two_ranks: World, parallel: str, expected: set[str]):
    check(two_ranks, parallel, {"dp": 2}, "600KB", expected)


FAST_HOST = """
base = "h100-1x8"
name = "fast-host"

[device.host_memory]
bandwidth = "1000000 GB/s"
latency = "0 us"
limit = "1 GB"
"""
"""A link to host memory on which small tensors pay to be copied."""


@pytest.fixture
def fast_host(tmp_path: Path) -> str:
    file = tmp_path / "fast-host.toml"
    file.write_text(FAST_HOST)
    return str(file)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
def test_offloaded_values_train_the_same_weights(two_ranks: World, fast_host: str, parallel: str):
    options = {"weft.memory_limit": "600KB", "weft.pipeline": "exact", "weft.effort": "fast"}
    options |= {"weft.offload": True, "weft.cluster": fast_host}
    step = {"parallel": parallel, "mesh": {"dp": 2}, **STEP}
    found = two_ranks.run(train, backend="weft_eager", options=options, **step)
    wanted = two_ranks.reference(train, backend="aot_eager", **step)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.messages == ()
        assert "offloaded" in choices(mine)
        assert same(mine, theirs)


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.xdist_group("ranks")
def test_four_ranks_with_two_axes_train_the_same_weights(four_ranks: World):
    check(four_ranks, "fsdp-tp", {"dp": 2, "tp": 2}, "400KB", {"gathered again", "recomputed"})


@pytest.mark.long
@pytest.mark.needs_cpp
@pytest.mark.distributed
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    ("parallel", "expected"), [("fsdp", {"recomputed", "gathered again"}), ("ddp", {"recomputed"})]
)
def test_inductor_trains_the_same_weights_but_for_rounding(two_ranks: World, parallel: str, expected: set[str]):
    options = {"weft.memory_limit": "600KB", "weft.effort": "fast"}
    step = {"parallel": parallel, "mesh": {"dp": 2}, **STEP}
    found = two_ranks.run(train, backend="weft", options=options, **step)
    wanted = two_ranks.reference(train, backend="inductor", **step)
    for mine, theirs in zip(found, wanted, strict=True):
        assert choices(mine) == expected
        assert distance(mine, theirs) < ROUNDING


class Chain(nn.Module):
    """Pointwise operators between products: their results are cheap to make again."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(64, 64) / 8) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = (x @ weight).sin().exp().tanh()
        return x.sum()


def gradients(backend: str, options: dict[str, Any] | None) -> list[Tensor]:
    torch._dynamo.reset()
    SESSION.reset()
    torch.manual_seed(0)
    model, x = Chain(), torch.randn(2048, 64)
    torch.compile(model, backend=backend, options=options)(x).backward()
    return [weight.grad for weight in model.weights if weight.grad is not None]


def test_forward_saves_less_under_a_limit():
    wanted = gradients("aot_eager", None)
    found = gradients("weft_eager", {"weft.memory_limit": "7MB", "weft.strict": True})
    assert all(map(torch.equal, found, wanted))
    joint = SESSION.report().entries[0]
    assert joint.phase == "joint"
    assert any(": recomputed" in decision["sentence"] for decision in joint.report["applied"])


class LiveBytes(TorchDispatchMode):
    """Counts the storages that are alive while operators run, also inside compiled functions."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0
        self._hold(given)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def _hold(self, tensors: Iterable[Tensor]) -> None:
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage._cdata not in self.live:
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata)
        self.peak = max(self.peak, sum(self.live.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._hold(each for each in tree_leaves(out) if type(each) is Tensor)
        return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "mesh", "limit"), [("fsdp", {"dp": 2}, 9_200_000), ("fsdp-tp", {"dp": 2, "tp": 2}, 8_330_000)]
)
def test_after_the_cut_both_parts_together_keep_the_limit(fresh: None, parallel: str, mesh: dict[str, int], limit: int):
    shape: dict[str, Any] = {
        "dim": 64,
        "num_heads": 4,
        "num_kv_heads": 4,
        "ffn_dim": 256,
        "vocabulary": 128,
        "sequence": 64,
    }
    options: dict[str, Any] = {"weft.memory_limit_bytes": limit, "weft.effort": "fast", "weft.strict": True}
    with fake_world(mesh) as made:
        model, batch = zoo.build("llama-debug", parallel, made, layers=2, compute_dtype=torch.float32, **shape)
        compiled, inputs = torch.compile(model, backend="weft_eager", options=options), batch(16, seed=0)
        compiled(*inputs).backward()
        model.zero_grad()
        given = (t.to_local() if isinstance(t, DTensor) else t for t in (*model.parameters(), *model.buffers()))
        with LiveBytes([*given, *inputs]) as counted:
            compiled(*inputs).backward()
    report = SESSION.report(simulate=True)
    assert [entry.phase for entry in report.entries] == ["joint", "forward", "backward"]
    simulated = report.whole_step["after"]["peak_bytes"]
    assert simulated <= limit
    assert 0.9 * simulated < counted.peak <= limit


@pytest.mark.parametrize(
    ("backend", "without"),
    [("weft_eager", "aot_eager"), pytest.param("weft", "inductor", marks=[pytest.mark.slow, pytest.mark.needs_cpp])],
)
def test_forward_saves_copies_in_host_memory(fast_host: str, backend: str, without: str):
    wanted = gradients(without, None)
    options = {"weft.memory_limit": "7MB", "weft.strict": True, "weft.offload": True, "weft.cluster": fast_host}
    found = gradients(backend, options)
    assert all(torch.allclose(mine, theirs, rtol=1e-4, atol=1e-4) for mine, theirs in zip(found, wanted, strict=True))
    if backend == "weft_eager":
        assert all(map(torch.equal, found, wanted))
    joint = SESSION.report().entries[0]
    assert any(": offloaded" in decision["sentence"] for decision in joint.report["applied"])


def test_torch_decides_if_nothing_fits_and_a_warning_names_the_least():
    wanted = gradients("aot_eager", None)
    found = gradients("weft_eager", {"weft.memory_limit": "1kB"})
    assert all(map(torch.equal, found, wanted))
    assert any("the smallest peak found is" in message for message in SESSION.report().messages)


@pytest.mark.parametrize(("memory_bytes", "fits"), [(1_000_000, False), (1_000_000_000, True)])
def test_without_a_limit_a_warning_says_that_a_graph_does_not_fit(tmp_path: Path, memory_bytes: int, fits: bool):
    file = tmp_path / "small.toml"
    file.write_text(f'base = "h100-1x8"\nname = "small"\n\n[device]\nmemory_bytes = {memory_bytes}\n')
    gradients("weft_eager", {"weft.cluster": str(file)})
    said = any("does not fit" in message for message in SESSION.report().messages)
    assert said is not fits


def test_a_cut_that_fails_ends_no_training(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("injected")

    wanted = gradients("aot_eager", None)
    monkeypatch.setattr("weft.compat.compilers.cut_by_order", fail)
    found = gradients("weft_eager", {"weft.memory_limit": "7MB"})
    assert all(map(torch.equal, found, wanted))
    assert any("injected" in message for message in SESSION.report().messages)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weft.memory_limit": "much"}, "weft.memory_limit is 'much', expected a size such as '24GiB'"),
        ({"weft.memory_limit": "1GiB", "weft.memory_limit_bytes": 1}, "are both given"),
    ],
)
def test_a_limit_that_cannot_be_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(PipelineError, match=message):
        split_options(options)


def test_a_limit_is_a_size():
    assert split_options({"weft.memory_limit": "1.5GiB"})[0].memory_limit_bytes == 3 << 29
