"""A fault of Weft while it compiles: training goes on as it would without Weft, and the fault is named."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule

import weft
from tests.integration import functions
from tests.tiers import quick_first
from weft.errors import GraphError, VerificationError
from weft.frontends.inductor import inductor_pass
from weft.frontends.session import OTHER_RANKS, REPORT_IT, SESSION
from weft.passes import pipeline


class Unprintable(Exception):  # noqa: N818  # not an error that anyone raises
    """An error that cannot even say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


FAKE_SUMS_ARE_DEFINED = torch.__version__ >= "2.13"
"""Before 2.13, the reduce-scatter of a fake process group does not write its result, so gradients are arbitrary."""
DECIDING = {
    "planning": "weft.passes.communication.schedule_overlap.ScheduleOverlap.plan",
    "choosing passes": "weft.passes.pipeline.recognise",
    "applying": "weft.graph.edit.Edit.commit",
    "applying in place": "weft.passes.pipeline.refresh_names",
    "checking": "weft.graph.check.validate",
    "reading groups": "weft.passes.pipeline.read_groups",
    "listing": "weft.passes.pipeline.render",
    "digest": "weft.passes.pipeline.digest",
    "proving": "weft.api.prove",
    "timing": "weft.compat.compilers.timed",
}
"""Where a fault leaves the graph as it came."""
REPORTING = {
    "compilation": "weft.compat.compilers.compilation",
    "report": "weft.report.report.Report.to_json",
    "side file": "weft.frontends.session.write_entry",
    "counting": "weft.compat.compilers.count",
    "trace": "weft.compat.compilers.emit_artifact",
    "statement": "weft.frontends.session.read_order",
    "publishing": "weft.frontends.session.publish",
    "frame": "weft.frontends.session._digest_of_frame",
}
"""Where a fault changes nothing but what is said."""
KINDS = [
    RuntimeError("injected"),
    KeyError("injected"),
    RecursionError("injected"),
    MemoryError(),
    AssertionError(),
    OSError(errno.ENOSPC, "No space left on device"),
    GraphError("injected"),
    VerificationError("injected"),
    Unprintable(),
]


def inject(monkeypatch: pytest.MonkeyPatch, path: str, error: Exception) -> None:
    """Let a function of Weft raise."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(path, fail)


def train(mesh: DeviceMesh, tmp_path: Path, backend: str = "weft_eager", **options: Any) -> tuple[Tensor, ...]:
    """A step of attention with gathered weights, compiled; the loss and the gradients."""
    torch.manual_seed(0)
    group = mesh.get_group().group_name
    x, shards, _ = functions.attend_arguments(group)
    given = {
        "weft.verify": "equivalence",
        "weft.report": str(tmp_path / "reports"),
        "weft.agreement": str(tmp_path / "agreement"),
        **options,
    }
    loss: Tensor = torch.compile(functions.attend, backend=backend, options=given)(x, shards, group)
    loss.backward()
    return (loss, *(shard.grad for shard in shards))  # type: ignore[misc]


def eager(mesh: DeviceMesh) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    x, shards, group = functions.attend_arguments(mesh.get_group().group_name)
    loss = functions.attend(x, shards, group)
    loss.backward()
    return (loss, *(shard.grad for shard in shards))  # type: ignore[misc]


def assert_trains(mesh: DeviceMesh, tmp_path: Path, **options: Any) -> None:
    pairs = [*zip(train(mesh, tmp_path, **options), eager(mesh), strict=True)]
    for found, expected in pairs if FAKE_SUMS_ARE_DEFINED else pairs[:1]:
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("where", quick_first(DECIDING, 2))
def test_where_the_decision_fails_the_graph_stays_as_it_came(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
):
    inject(monkeypatch, DECIDING[where], KeyError("injected"))
    assert_trains(mesh, tmp_path)
    report = SESSION.report()
    assert [bool(entry.skipped) for entry in report.entries] == [True, True]
    assert all(entry.skipped.startswith("KeyError: 'injected'") for entry in report.entries)
    assert all("KeyError" in entry.fault for entry in report.entries)
    said = next(text for text in report.messages if text.startswith("a graph is left as it was: KeyError: 'injected'"))
    assert REPORT_IT in said
    assert OTHER_RANKS in said


@pytest.mark.parametrize("where", quick_first(REPORTING, 2))
def test_where_the_report_fails_the_graph_is_rewritten_all_the_same(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
):
    seen: list[GraphModule] = []
    weave = SESSION.weave

    def noted(module: GraphModule, *args: Any, **keywords: Any) -> bool:
        expected = weft.optimize(module).module
        seen.append(expected)
        woven = weave(module, *args, **keywords)
        assert weft.listing(module) == weft.listing(expected)  # what the other ranks run
        return woven

    monkeypatch.setattr(SESSION, "weave", noted)
    inject(monkeypatch, REPORTING[where], KeyError("injected"))
    assert_trains(mesh, tmp_path)
    assert len(seen) == 2
    assert any("is missing: KeyError: 'injected'" in message for message in SESSION.report().messages)


def test_strict_raises_the_fault(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    inject(monkeypatch, DECIDING["planning"], KeyError("injected"))
    with pytest.raises(Exception, match="injected"):
        train(mesh, tmp_path, **{"weft.strict": True})


def test_whoever_interrupts_the_compilation_ends_it(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    inject(monkeypatch, DECIDING["planning"], KeyboardInterrupt())  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        train(mesh, tmp_path)


@pytest.mark.needs_cpp
@pytest.mark.parametrize(
    "path",
    quick_first(
        [
            DECIDING["planning"],
            DECIDING["applying in place"],
            REPORTING["side file"],
            "weft.compat.compilers.keep_kernel_order",
            "weft.frontends.options._source_digest",
            "weft.frontends.inductor._keep_order",
            "weft.frontends.inductor._name_rivals",
        ]
    ),
)
def test_a_fault_ends_no_training_under_inductor(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str
):
    inject(monkeypatch, path, KeyError("injected"))
    with torch._inductor.config.patch(force_disable_caches=True):
        assert_trains(mesh, tmp_path, backend="weft")
    assert any("'injected'" in message for message in SESSION.report().messages)


LISTING = """group('dp', size=2)

def graph(x: f32[4, 4], p: f32[2, 4], q: f32[2, 4]):
    a: f32[4, 4] = mm(x, x)
    ag: f32[4, 4] = all_gather(p, 2, 'dp')
    w: f32[4, 4] = wait(ag)
    ah: f32[4, 4] = all_gather(q, 2, 'dp')
    w2: f32[4, 4] = wait(ah)
    dead: f32[4, 4] = relu(x)
    b: f32[4, 4] = relu(a)
    r: f32[4, 4] = add(b, w)
    s: f32[4, 4] = add(r, w2)
    return [s]
"""


def _identities(meta: dict[str, Any]) -> dict[str, int]:
    return {key: id(value) for key, value in meta.items()}


def everything(module: GraphModule) -> Any:
    """All that a module and its graph hold."""
    nodes = [
        (node, node.name, node.op, node.target, node.args, node.kwargs, _identities(node.meta), list(node.users))
        for node in module.graph.nodes
    ]
    return nodes, dict(module._modules), dict(module._buffers), module.code


@pytest.mark.parametrize("path", DECIDING.values())
def test_the_module_is_what_it_was_after_a_fault(
    fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str
):
    module = weft.parse(LISTING)
    before = everything(module)
    inject(monkeypatch, path, KeyError("injected"))
    inductor_pass(report=tmp_path, verify="equivalence")(module.graph)
    assert SESSION.report().entries[0].skipped.startswith("KeyError: 'injected'")
    assert everything(module) == before


@pytest.mark.parametrize("error", KINDS, ids=lambda error: type(error).__name__)
def test_no_kind_of_error_ends_a_compilation(
    fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
):
    module = weft.parse(LISTING)
    inject(monkeypatch, DECIDING["planning"], error)
    inject(monkeypatch, REPORTING["side file"], error)
    inductor_pass(report=tmp_path)(module.graph)
    assert SESSION.report().entries[0].skipped
    assert weft.listing(module) == weft.listing(weft.parse(LISTING))


PASSES = "remove-dead-code,bucket-all-gathers,hoist-launches,sink-waits,reuse-buffers"


@pytest.mark.parametrize("last", range(len(PASSES.split(","))))
def test_half_of_a_plan_is_taken_back(monkeypatch: pytest.MonkeyPatch, last: int):
    module = weft.parse(LISTING)
    plan = weft.optimize(module, pipeline=PASSES).plan
    before, listing = everything(module), weft.listing(module)
    parse: Callable[[str], Any] = pipeline.parse_pass

    def fail_at(spec: str) -> Any:
        if spec == plan.steps[last].spec:
            raise MemoryError
        return parse(spec)

    monkeypatch.setattr(pipeline, "parse_pass", fail_at)
    with pytest.raises(MemoryError):
        pipeline.replay_in_place(module, plan)
    assert everything(module) == before
    module.graph.lint()
    assert weft.listing(module) == listing
    monkeypatch.undo()
    pipeline.replay_in_place(module, plan)  # and what is taken back can be done
    assert weft.listing(module) == weft.listing(weft.apply(weft.parse(LISTING), plan))
