"""What the pages take as given: small graphs, files of the names that they use, models that are cut to one layer.

Contract: code of a page runs in a folder of its own, and leaves no pass, setting or module behind.
"""

from __future__ import annotations

import functools
import inspect
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

import weft
from tests.docs.pages import REPOSITORY
from tests.unit.advice import own_models
from weft.advice import models
from weft.advice.models import ZooModel
from weft.frontends.session import SESSION
from weft.passes import base
from weft.plan.decision import Reason
from weft.plan.plan import Step
from weft.scheduling import search
from weft.verification.agreement.issue_order import read_order
from weft.verification.agreement.rank_record import FolderBoard, Statement, publish

DATA = REPOSITORY / "tests" / "data"
SMALL = {"name": "llama-debug", "ranks": 4, "layers": 1}
NCCL_TESTS = """\
# nThread 1 nGpus 4 minBytes 4096 maxBytes 4194304 step: 32(factor) warmup iters: 5 iters: 20
# all_gather_perf
#  Rank  0 Group  0 Pid   100 on    node device  0 [0x00] NVIDIA H100
#  Rank  1 Group  0 Pid   100 on    node device  1 [0x01] NVIDIA H100
#  Rank  2 Group  0 Pid   100 on    node device  2 [0x02] NVIDIA H100
#  Rank  3 Group  0 Pid   100 on    node device  3 [0x03] NVIDIA H100
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
        4096           256     float    none      -1    20.00    0.20    0.15      0    20.00    0.20    0.15      0
      131072          8192     float    none      -1    25.00    5.24    3.93      0    25.00    5.24    3.93      0
     4194304        262144     float    none      -1    60.00   69.91   52.43      0    60.00   69.91   52.43      0
"""


@functools.cache
def small(parallel: str = "fsdp") -> GraphModule:
    """A training step of a tiny decoder."""
    return load_whole(SMALL["name"], parallel, ranks=SMALL["ranks"], layers=SMALL["layers"])


@functools.cache
def listings() -> tuple[str, str]:
    """That step as text, before and after it is planned."""
    return weft.listing(small()), weft.listing(weft.optimize(small(), cluster="h100-8").module)


load_whole = weft.zoo.load
"""The loader as it is, before a page's is cut."""


def load_cut(*args: Any, **given: Any) -> GraphModule:
    """`weft.zoo.load` with one layer at most: pages load models of full size, which takes minutes."""
    bound = inspect.signature(load_whole).bind(*args, **given)
    bound.arguments["layers"] = 1
    return load_whole(*bound.args, **bound.kwargs)


advise_whole = weft.advise


def advise_cut(*args: Any, **given: Any) -> weft.Advice:
    """`weft.advise` on a tiny model and two ranks, in this process."""
    inspect.signature(advise_whole).bind(*args, **given)
    return advise_whole(ZooModel("llama-debug", (("num_layers", 1),)), "h100-1x2", 64)


@contextmanager
def prepared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with the files that pages name, and everything set back behind."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(weft.zoo, "load", load_cut)
    monkeypatch.setattr(weft, "advise", advise_cut)
    monkeypatch.setattr(models, "CHECKPOINTS", ("none",))  # fewer layouts
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "my_models", raising=False)
    (folder / "my_models.py").write_text(f"from {own_models.__name__} import shallow_decoder as decoder\n")
    for budget in (search.LEAST, search.OPERATIONS):
        monkeypatch.setitem(budget, "best", budget["default"])  # the same search, not as long
    base.all_passes()
    known = dict(base._PASSES)
    text, after = listings()
    for name in ("before.txt", *(f"stage{i}.txt" for i in range(4))):
        (folder / name).write_text(text)
    (folder / "after.txt").write_text(after)
    for rank in range(4):
        shutil.copy(DATA / f"loopback_rank{rank}.json.gz", folder / f"rank{rank}.json.gz")
    shutil.copy(DATA / "loopback_rank0.json.gz", folder / "trace.json")
    (folder / "folder").mkdir()
    shutil.copy(DATA / "train_inductor.log", folder / "folder" / "dedicated_log_torch_trace_rank_0.log")
    (folder / "all_gather.txt").write_text(NCCL_TESTS)
    (folder / "all_reduce.txt").write_text(NCCL_TESTS.replace("all_gather", "all_reduce"))
    try:
        with torch._dynamo.config.patch(optimize_ddp=True, compiled_autograd=False):
            yield
    finally:
        base._PASSES.clear()
        base._PASSES.update(known)
        SESSION.reset()
        torch._dynamo.reset()


def given_names(page: str) -> dict[str, Any]:
    """What a page uses without saying where it is from."""
    names: dict[str, Any] = {"weft": weft, "torch": torch, "gm": small()}
    return names | GIVEN.get(page, dict)()


def _of_capture() -> dict[str, Any]:
    def shard_parameters(model: torch.nn.Module, mesh: Any) -> None:
        from torch.distributed.tensor import Shard, distribute_tensor

        weight = distribute_tensor(model.weight.detach(), mesh["dp"], [Shard(0)])
        model.weight = torch.nn.Parameter(weight)
        torch.nn.utils.parametrize.register_parametrization(model, "weight", _Gathered(), unsafe=True)

    my_model = functools.partial(torch.nn.Linear, 64, 64, bias=False)
    inputs, targets = torch.empty(16, 64), torch.empty(16, dtype=torch.int64)
    return {"MyModel": my_model, "shard_parameters": shard_parameters, "inputs": inputs, "targets": targets}


class _Gathered(torch.nn.Module):
    def forward(self, shard: Any) -> torch.Tensor:
        from torch.distributed.tensor import Partial, Replicate

        return shard.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])


def _with_model() -> dict[str, Any]:
    return {"model": torch.nn.Linear(8, 8)}


def _of_rewrites() -> dict[str, Any]:
    from weft.passes import rewrite_pass
    from weft.rewriting import draft, pattern, rules

    modules = (draft, pattern, rules, rewrite_pass)
    names = {name: getattr(module, name) for module in modules for name in vars(module)}
    names = {name: value for name, value in names.items() if not name.startswith("__")}
    known = {"Iterable": Iterable, "dataclass": dataclass, "Reason": Reason}
    return names | known | {"Context": base.Context, "Numerics": base.Numerics}


def _of_advice() -> dict[str, Any]:
    return {"GPT": own_models.Decoder, "config": 128, "model": own_models.NamedDecoder()}


def _of_planning() -> dict[str, Any]:
    """The passes that the page calls the reader's own."""

    @dataclass(frozen=True)
    class MyPass(base.Pass):
        numerics = base.Numerics.EXACT

        def plan(self, graph: Graph, context: base.Context) -> Step:
            return self.step([], [])

    @dataclass(frozen=True)
    class MyOtherPass(MyPass):
        numerics = base.Numerics.EXACT

    return {}


GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "README.md": _with_model,
    "docs/advice.md": _of_advice,
    "docs/capture.md": _of_capture,
    "docs/planning.md": _of_planning,
    "docs/rewrites.md": _of_rewrites,
}


def say(folder: Path) -> None:
    """What the ranks of a run leave in a folder that all of them see."""
    order = read_order(small())
    for rank in range(4):
        publish(FolderBoard(folder), rank, 4, Statement("joint", "graph", "plan", "result", order=order))
