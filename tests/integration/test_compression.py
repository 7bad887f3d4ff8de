"""Compressed communication on whole models: the error of gradients and weights against communication in f32."""

from __future__ import annotations

import pytest
import torch
from torch.fx import GraphModule

from tests.integration.sharded import ShardedModel
from tests.integration.training import distance, train
from tests.integration.worlds import World
from weft import zoo
from weft.graph.collective import collectives
from weft.graph.ops import Kind
from weft.passes.pipeline import Pipeline
from weft.plan.decision import Reason

BF16, FP8, SUMS = (
    "compress-all-gathers{always=true}",
    "compress-all-gathers{dtype=fp8 always=true}",
    "compress-reduce-scatters{always=true}",
)
ERRORS = {SUMS: 4e-3, BF16: 2e-2, FP8: 0.1}
"""Largest error of all gradients of a rank: the norm of the difference from f32, relative to the norm. On 2026-11-19
the errors of llama-debug were 0.17 %, 0.23 % and 3.5 %, those of moe-debug 0.17 %, 0.81 % and 3.9 %."""
SHARES = {SUMS: 0.5, BF16: 0.5, FP8: 0.265}
"""Bytes that are sent, relative to f32."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-debug", "moe-debug"])
def test_the_error_of_gradients_and_the_bytes_are_those_of_the_dtype(name: str):
    parallel, mesh = ("ep-fsdp", {"dp": 2, "ep": 2}) if name == "moe-debug" else ("fsdp", {"dp": 4})
    model = ShardedModel(name, parallel, mesh, layers=1)
    module = model.capture(batch=2)
    inputs = [[*p, *b] for p, b in zip(model.parts(), model.batches(2), strict=True)]
    exact = model.run(module, inputs)
    for spec, bound in ERRORS.items():
        changed = Pipeline.parse(spec).run(module).module
        kinds = {Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL} if spec == SUMS else {Kind.ALL_GATHER}
        if name == "llama-debug":  # whose own exchanges would count
            assert sent_bytes(changed, kinds) == pytest.approx(sent_bytes(module, kinds) * SHARES[spec], rel=0.01)
        for one, other in zip(exact, model.run(changed, inputs), strict=True):
            pairs = list(zip(one.outputs[1:], other.outputs[1:], strict=True))
            difference = torch.cat([(a - b).detach().flatten() for a, b in pairs]).norm()
            error = float(difference / torch.cat([a.detach().flatten() for a, _ in pairs]).norm())
            assert bound / 20 < error < bound, spec


def sent_bytes(module: GraphModule, kinds: set[Kind]) -> int:
    return sum(each.input_bytes or 0 for each in collectives(module.graph) if each.kind in kinds)


@pytest.mark.slow
def test_compressed_reductions_lose_across_slow_links_and_win_inside_a_node():
    """An exchange sends each part over the network by itself; a ring passes sums on."""
    found: dict[str, set[Reason]] = {}
    for cluster, ranks in (("h100-8", 8), ("h100-8x8", 64)):
        module = zoo.load("llama-1b", "fsdp", ranks=ranks, layers=1, part="joint", reduce_dtype=torch.float32)
        run = Pipeline.parse("compress-reduce-scatters").run(module, cluster=cluster)
        largest = max(
            collectives(module.graph), key=lambda c: c.input_bytes or 0 if c.kind is Kind.REDUCE_SCATTER else 0
        )
        waits = {wait.name for wait in largest.waits}
        found[cluster] = {d.reason for d in run.log[0].step.decisions if waits & {*d.nodes}}
    assert found == {"h100-8": {Reason.APPLIED}, "h100-8x8": {Reason.NO_GAIN}}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("spec", [f"{SUMS},{BF16}", f"{SUMS},{FP8}"])
def test_real_ranks_train_nearly_the_same_weights(two_ranks: World, spec: str):
    options = {"weft.pipeline": f"{spec},auto"}
    found = two_ranks.run(train, parallel="fsdp", mesh={"dp": 2}, backend="weft_eager", options=options, model="mini")
    wanted = two_ranks.reference(train, parallel="fsdp", mesh={"dp": 2}, backend="aot_eager", model="mini")
    for rank, expected in zip(found, wanted, strict=True):
        assert rank.messages == ()
        assert distance(rank, expected) > 0
        assert rank.losses != expected.losses
        assert rank.losses == pytest.approx(expected.losses, rel=2e-2)
