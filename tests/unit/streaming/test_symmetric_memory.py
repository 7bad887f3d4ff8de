"""Torch's fused operators: what is given to them means what it stands for, and what they cannot take is declined.

They have no kernel for the CPU, so `weft.verify` writes them out in plain nodes, which then run on virtual ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map_only

import weft
from tests.unit.streaming.streams import Case, cases, gather, scatter
from weft.frontends.fake_world import fake_world
from weft.graph import ops
from weft.graph.collective import collectives
from weft.graph.dag import Dag
from weft.graph.edit import Edit, copy_module, recompile
from weft.graph.groups import read_groups
from weft.passes.communication.fuse_matmul_reduce_scatters import FuseMatmulReduceScatters
from weft.passes.pipeline import Pipeline
from weft.plan.context import Context
from weft.plan.decision import Refusal
from weft.streaming.chunking import Chunking
from weft.streaming.gather_sites import read_gather
from weft.streaming.lowerings import sharing
from weft.streaming.lowerings.symmetric_memory import SymmetricMemory
from weft.streaming.scatter_sites import read_scatter
from weft.verification.comparison import example_inputs
from weft.verification.symbolic.equivalence import prove

PLAIN = [case for n in (2, 4) for case in cases(n, ("plain",))]
SCALED = [case for n in (2, 4) for case in cases(n, ("fp8", "fp8-rows")) if case.dim < len(case.shape) - 1]
GATHER = "fuse-all-gather-matmuls{chunks=2 kernel=symmetric-memory}"


def cut_of(module: GraphModule) -> Chunking:
    collective = next(collectives(module.graph))
    is_gather = collective.kind is ops.Kind.ALL_GATHER
    site = read_gather(collective, Dag(module.graph)) if is_gather else read_scatter(collective, Dag(module.graph))
    assert not isinstance(site, Refusal)
    cut = site.cut(2)
    assert isinstance(cut, Chunking)
    return cut


def fused(before: GraphModule) -> GraphModule:
    """The module with the fused operator in the place of its site, on whatever device it is."""
    after = copy_module(before)
    with Edit(after.graph) as edit:
        kernel = SymmetricMemory()
        edit.replace_each(kernel.build(edit, kernel.fit(cut_of(after))))
    recompile(after)
    return after


def check(listing: str, num_ranks: int, *, is_proved: bool = True) -> None:
    """Compare values on virtual ranks and try a proof, which does not know that a linear layer is a product."""
    before = weft.parse(listing)
    after = fused(before)
    inputs = example_inputs(before, num_ranks, integers=True)
    verdict = weft.verify(before, after, ranks=num_ranks, inputs=inputs)
    assert verdict.bitwise, f"{verdict}\n{weft.listing(after)}"
    proof = prove(before, after, reassociates=True)
    assert proof.proved == is_proved, f"{proof}\n{weft.listing(after)}"


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_a_gather_and_its_product_mean_what_the_fused_operator_means(case: Case):
    check(gather(case), case.num_ranks)


@pytest.mark.parametrize("case", [case for case in PLAIN if not case.used], ids=str)
def test_a_product_and_its_scatter_mean_what_the_fused_operator_means(case: Case):
    check(scatter(case), case.num_ranks)


@pytest.mark.parametrize("case", SCALED, ids=str)
def test_a_gather_and_its_product_of_fp8_mean_what_the_fused_operator_means(case: Case):
    check(gather(case), case.num_ranks)


@pytest.mark.parametrize("case", [case for case in SCALED if not case.used], ids=str)
def test_a_product_of_fp8_and_its_scatter_mean_what_the_fused_operator_means(case: Case):
    check(scatter(case), case.num_ranks)


GATHERED = ("ag = all_gather(x, 2, 'tp')", "w = wait(ag)")
SUMMED = ("y = mm(a, b)", "z = mm(c, d)")
SCATTERED = ("rs = reduce_scatter(s, 'sum', 2, 'tp')", "o = wait(rs)")
INPUTS = "x: f32[4, 8], b: f32[8, 6], c: f32[8, 8], d: f32[6], e: f32[6, 8]"
TERMS = "a: f32[8, 4], b: f32[4, 6], c: f32[8, 10], d: f32[10, 6], e: f32[8, 6], f: f32[6, 6]"


def listing_of(inputs: str, *lines: str) -> str:
    body = "".join(f"    {line}\n" for line in lines)
    return f"group('tp', size=2)\n\ndef graph({inputs}):\n{body}"


@pytest.mark.parametrize(
    ("lines", "calls"),
    [
        (("v = view(w, [2, 4, 8])", "u = view(v, [8, 8])", "y = mm(w, b)", "z = mm(u, c)", "return [y, z]"), "[b, c]"),
        (("y = addmm(d, w, b)", "z = mm(w, c)", "return [y, z]"), "[b, c]"),
        (("h = relu(w)", "y = mm(w, b)", "z = mm(h, c)", "return [y, z]"), "[b]"),
        (("y = mm(w, b)", "g = t(y)", "z = mm(g, w)", "return [y, z]"), "[b]"),
        (("y = mm(w, b)", "v = view(w, [4, 16])", "i = cat([c, c])", "z = mm(v, i)", "return [y, z]"), "[b]"),
    ],
    ids=["views", "bias", "a call between", "the gradient of a weight", "other rows"],
)
def test_products_of_one_gather_that_the_operator_can_take_are_fused(lines: tuple[str, ...], calls: str):
    listing = listing_of(INPUTS, *GATHERED, *lines)
    assert calls in weft.listing(fused(weft.parse(listing)))
    check(listing, 2)


@pytest.mark.parametrize("line", ["y = linear(v, e, d)", "y = matmul(v, b)"])
def test_products_of_other_operators_are_fused(line: str):
    check(listing_of(INPUTS, *GATHERED, "v = view(w, [2, 4, 8])", line, "return [y]"), 2, is_proved=False)


@pytest.mark.parametrize(
    "lines",
    [
        (*SUMMED, "s = add(y, z)", *SCATTERED, "return [o]"),
        (*SUMMED, "u = view(y, [2, 4, 6])", "v = view(z, [2, 4, 6])", "s = add(u, v)", *SCATTERED, "return [o]"),
        (*SUMMED, "t0 = mm(e, f)", "p = add(y, z)", "s = add(p, t0)", *SCATTERED, "return [o]"),
    ],
    ids=["two", "through views", "three"],
)
def test_a_sum_of_products_is_scattered_as_one_product(lines: tuple[str, ...]):
    listing = listing_of(TERMS, *lines)
    text = weft.listing(fused(weft.parse(listing)))
    assert text.count("fused_matmul_reduce_scatter") == 1
    assert "mm(" not in text
    check(listing, 2)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (("s = add(e, y)",), "s adds another tensor"),
        (("s = mul(y, 2.0)",), "s stands between it and the product"),
        (("s = _to_copy(y, dtype=bf16)",), "s stands between it and the product"),
    ],
)
def test_other_sums_are_declined_with_the_node_that_prevents_them(lines: tuple[str, ...], why: str):
    module = weft.parse(listing_of(TERMS, "y = mm(a, b)", *lines, *SCATTERED, "return [o]"))
    refusal = SymmetricMemory().why_not(cut_of(module), None)
    assert refusal is not None
    assert refusal.sentence == WHY.format(launch="rs") + why


@pytest.mark.parametrize("case", [*PLAIN, *SCALED], ids=str)
def test_torch_takes_what_is_given_to_it_and_gives_what_is_expected(case: Case):
    listings = [gather(case)] + ([scatter(case)] if not case.used else [])
    for listing in listings:
        module = weft.parse(listing.replace("out_dtype=f32", "out_dtype=bf16"))
        node = next(n for n in fused(module).graph.nodes if "symm_mem" in str(n.target))
        with fake_world({"tp": case.num_ranks}) as mesh:
            name = mesh.get_group("tp").group_name
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            given = tree_map_only(torch.Tensor, on_meta, (args, kwargs))
            found = node.target(*(name if arg == "tp" else arg for arg in given[0]), **given[1])
        shapes = [tuple(value.shape) if value is not None else None for value in tree_leaves(found)]
        expected = [tuple(value.shape) if value is not None else None for value in tree_leaves(node.meta["val"])]
        assert shapes == expected


def on_meta(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


LISTING = """group('tp', size=2)

def graph(x: f32[4, 4](device='{device}'), b: f32[4, 6](device='{device}')):
    ag = all_gather(x, 2, 'tp')
    w = wait(ag)
{between}    y = mm({operand}, b)
    return [y]
"""


def declined(spec: str, device: str = "cpu", between: str = "", operand: str = "w") -> str:
    listing = LISTING.format(device=device, between=between, operand=operand).replace("(device='cpu')", "")
    (entry,) = Pipeline.parse(spec).run(weft.parse(listing)).log
    (decision,) = entry.step.decisions
    return f"{decision.reason.value}: {decision.sentence}"


def test_on_the_cpu_it_is_declined():
    assert declined(GATHER) == "no-kernel: ag is on cpu, but symmetric memory needs cuda"


def test_without_a_live_group_it_is_declined():
    assert declined(GATHER, "cuda") == "no-kernel: symmetric memory is not available for the group of ag"


def test_a_call_between_is_declined():
    found = declined(GATHER, "cuda", "    h = relu(w)\n", "h")
    assert found == "no-kernel: torch has no fused operator for ag: h stands between it and y"


def test_auto_takes_plain_nodes_where_the_fused_operators_cannot_run():
    assert declined(GATHER.replace("symmetric-memory", "auto"), "cuda") == "applied: streamed ag with y in 2 chunks"


def test_where_the_group_has_symmetric_memory_one_operator_is_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sharing, "has_symmetric_memory", lambda name, enabled: True)
    before = weft.parse(LISTING.format(device="cuda", between="", operand="w"))
    for spec in (GATHER, GATHER.replace("symmetric-memory", "auto")):
        run = Pipeline.parse(spec).run(before)
        (decision,) = run.plan.steps[0].decisions
        assert (decision.applied, decision.nodes) == (True, ("ag", "y"))
        line = "symm_mem.fused_all_gather_matmul.default(x, [b], 0, 'tp', return_A=False)"
        assert line in run.after
        assert "all_gather(" not in run.after
        assert weft.listing(weft.apply(before, weft.Plan.from_json(run.plan.to_json()))) == run.after


WHY = "torch has no fused operator for {launch}: "


def test_maxima_are_not_for_the_fused_scatter():
    listing = """group('tp', size=2)

def graph(a: f32[8, 4](device='cuda'), b: f32[4, 6](device='cuda')):
    y = mm(a, b)
    rs = reduce_scatter(y, 'max', 2, 'tp')
    w = wait(rs)
    return [w]
"""
    module = weft.parse(listing)
    rewrite: Any = FuseMatmulReduceScatters(chunks=2, kernel="symmetric-memory")
    (decision,) = rewrite.plan(module.graph, Context(read_groups(module))).decisions
    assert decision.sentence == WHY.format(launch="rs") + "the operator sums or averages, but rs reduces by max"


FP8 = """group('tp', size=2)

def graph(x: f8e4m3fn[16, 16](device='cuda'), b: f8e4m3fn[16, 16](device='cuda'), s: f32[()](device='cuda'),
          u: f32[()](device='cuda')):
    ag = all_gather(x, 2, 'tp')
    w = wait(ag)
    t0 = t(b)
    y = _scaled_mm(w, t0, s, s, out_dtype=bf16)
    z = _scaled_mm(w, t0, {scale}, s, out_dtype=bf16)
    return [y, z]
"""


def has_symmetric_memory(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    monkeypatch.setattr(module, "has_symmetric_memory", lambda name, enabled: True)


def test_two_products_of_fp8_with_one_scale_are_one_operator(monkeypatch: pytest.MonkeyPatch):
    has_symmetric_memory(monkeypatch, sharing)
    run = Pipeline.parse(GATHER).run(weft.parse(FP8.format(scale="s")))
    line = "(x, [t0, t0], s, [s, s], 0, 'tp', [None, None], [None, None], [bf16, bf16], [False, False])"
    assert f"symm_mem.fused_all_gather_scaled_matmul.default{line}" in run.after


def test_of_two_products_of_fp8_with_two_scales_one_waits_for_the_gathered_tensor(monkeypatch: pytest.MonkeyPatch):
    has_symmetric_memory(monkeypatch, sharing)
    run = Pipeline.parse(GATHER).run(weft.parse(FP8.format(scale="u")))
    declined, applied = run.plan.steps[0].decisions
    assert declined.sentence == "z waits for all of ag: another product has another form"
    assert applied.nodes == ("ag", "y")
    assert "(x, [t0], s, [s], 0, 'tp', [None], [None], [bf16], [False])" in run.after
    assert "_scaled_mm(ag_gathered, t0, u, s, out_dtype=bf16)" in run.after


def test_fp8_along_the_last_dim_is_declined(monkeypatch: pytest.MonkeyPatch):
    has_symmetric_memory(monkeypatch, sharing)
    for make, name in ((gather, "all-gather-matmul"), (scatter, "matmul-reduce-scatter")):
        listing = make(Case(2, (4, 16), 1, "fp8", used=False))
        head, _, body = listing.partition("\n")
        module = weft.parse(f"{head}\ndevice('cuda')\n{body}")
        (decision,) = (
            Pipeline.parse(f"fuse-{name}s{{chunks=2 kernel=symmetric-memory}}").run(module).plan.steps[0].decisions
        )
        assert decision.sentence.endswith(": the fp8 operator splits rows, not the last dim")


STEP = """group('tp', size=8)
device('cuda')

def graph(x: bf16[{rows}, 4096], b: bf16[4096, {columns}], c: bf16[{columns}, 4096]):
    ag = all_gather(x, 8, 'tp')
    w = wait(ag)
    y = mm(w, b)
    r = relu(y)
    z = mm(r, c)
    rs = reduce_scatter(z, 'sum', 8, 'tp')
    o = wait(rs)
    return [o]
"""
STREAM = "fuse-all-gather-matmuls{kernel=%s},fuse-matmul-reduce-scatters{kernel=%s}"


def steps_us(listing: str) -> dict[str, float]:
    """The planned step with each kernel, and without streaming."""
    specs = {kernel: STREAM % (kernel, kernel) for kernel in ("auto", "portable", "symmetric-memory")}
    made = {
        kernel: weft.optimize(weft.parse(listing), cluster="h100-8", pipeline=f"{spec},schedule-overlap")
        for kernel, spec in {**specs, "whole": "remove-noops"}.items()
    }
    return {kernel: result.plan.evidence.step_ns / 1000 for kernel, result in made.items() if result.plan.evidence}


@pytest.mark.parametrize(("rows", "columns"), [(512, 2048), (2048, 2048), (2048, 14336)])
def test_auto_is_as_short_as_the_best_kernel(monkeypatch: pytest.MonkeyPatch, rows: int, columns: int):
    has_symmetric_memory(monkeypatch, sharing)
    found = steps_us(STEP.format(rows=rows, columns=columns))
    assert found["auto"] <= min(found.values()) * 1.001
    assert found["symmetric-memory"] < found["whole"]


def test_a_plan_for_a_cluster_needs_no_device():
    listing = STEP.format(rows=2048, columns=2048).replace("device('cuda')\n", "")
    spec = STREAM % ("symmetric-memory", "symmetric-memory")
    result = weft.optimize(weft.parse(listing), cluster="h100-8", pipeline=spec)
    assert [decision.reason.value for decision in result.report.applied] == ["applied", "applied"]
    other = weft.optimize(weft.parse(listing), cluster="a100-8", pipeline=spec)
    (first, _) = other.report.declined
    assert first.sentence == "the cluster lists no symmetric memory for the level 'nvlink' of ag"


def test_a_note_says_how_to_enable_symmetric_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sharing, "has_symmetric_memory", lambda name, enabled: not enabled)
    run = Pipeline.parse("fuse-all-gather-matmuls").run(weft.parse(STEP.format(rows=2048, columns=2048)))
    note, _ = run.plan.steps[0].decisions
    assert note.sentence.startswith(
        "the group of ag does not use symmetric memory: to enable it, call torch.distributed"
    )


ALONG_THE_SEQUENCE = """group('tp', size=2)

def graph(x: f32[3, 4, 8], b: f32[8, 6], g: f32[24, 6]):
    ag = all_gather(x, 2, 'tp')
    w = wait(ag)
    parts: [f32[3, 4, 8], f32[3, 4, 8]] = split(w, 3)
    first = parts[0]
    second = parts[1]
    whole = cat([first, second], 1)
    rows = view(whole, [24, 8])
    y = mm(rows, b)
    t = t(rows)
    gradient = mm(t, g)
    return [y, gradient]
"""


def test_other_uses_read_the_gathered_tensor_as_the_operator_returns_it():
    after = fused(weft.parse(ALONG_THE_SEQUENCE))
    names = [ops.name_of(node.target) for node in after.graph.nodes if node.op == "call_function"]
    assert not {"cat", "split"} & {name.rpartition(".")[2] for name in names}
    check(ALONG_THE_SEQUENCE, 2)


@pytest.mark.slow
def test_a_decoder_with_all_its_products_fused_is_proved_equal():
    before = weft.parse((Path(__file__).parents[2] / "graphs/llama-debug-tp.txt").read_text())
    options = "{only=activations chunks=2 kernel=symmetric-memory}"
    spec = f"fuse-all-gather-matmuls{options},fuse-matmul-reduce-scatters{options},schedule-overlap"
    after = weft.optimize(before, cluster="h100-8", pipeline=spec).module
    text = weft.listing(after)
    assert [text.count(f"symm_mem.fused_{name}.") for name in ("all_gather_matmul", "matmul_reduce_scatter")] == [9, 9]
    proof = prove(before, after, reassociates=True)
    assert proof, str(proof)
