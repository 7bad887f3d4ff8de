"""Real ranks train small models: the backends of Weft compute what torch's own backends compute, bit by bit.

The pipeline `exact` changes no bit, so `weft_eager` must equal `aot_eager`, and `weft` must equal Inductor. Both equal
eager training within TOLERANCE: Inductor's loops and eager's operators round differently, and three steps of AdamW
(learning rate 0.01, weights of order 0.1, f32) carry that on.
"""

from __future__ import annotations

import pytest

from tests.integration.training import Trained, distance, same, train
from tests.integration.worlds import World
from weft.frontends.session import NO_COLLECTIVES

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]

TOLERANCE = 1e-4
MOVES = ("bucket-all-gathers", "hoist-launches", "sink-waits", "schedule-overlap")

ON_TWO = {
    "ddp-reducer": {"dp": 2},
    "ddp": {"dp": 2},
    "simple-fsdp": {"dp": 2},
    "fsdp": {"dp": 2},
    "tp": {"tp": 2},
}
ON_FOUR = {
    "ddp": {"dp": 4},
    "fsdp": {"dp": 4},
    "tp": {"tp": 4},
    "fsdp-tp": {"dp": 2, "tp": 2},
    "hsdp": {"replicate": 2, "shard": 2},
    "ep-fsdp": {"dp": 2, "ep": 2},
}


EXACT = {
    "weft_eager": {"weft.pipeline": "exact"},
    # Inductor chooses kernels by the strides it sees: with merged gathers it may multiply in another order.
    "weft": {"weft.pipeline": "clean,algebra,communication,hoist-launches,sink-waits"},
}
IN_SHORT = "fsdp"
"""The one that is not long: `make test` runs it with `weft_eager`."""


def each(meshes: dict[str, dict[str, int]]) -> pytest.MarkDecorator:
    names = [name if name == IN_SHORT else pytest.param(name, marks=pytest.mark.long) for name in meshes]
    return pytest.mark.parametrize("parallel", names)


def check(
    world: World, parallel: str, mesh: dict[str, int], backend: str, reference: str, model: str = "llama-debug"
) -> None:
    found = world.run(train, parallel=parallel, mesh=mesh, backend=backend, model=model, options=EXACT[backend])
    expected, eager = (
        world.reference(train, parallel=parallel, mesh=mesh, backend=name, model=model) for name in (reference, "eager")
    )
    for rank in range(world.num_ranks):
        assert same(found[rank], expected[rank])
        assert distance(found[rank], eager[rank]) < TOLERANCE
        assert found[rank].messages == ()
    assert_woven(parallel, found)


def assert_woven(parallel: str, found: list[Trained]) -> None:
    """The passes ran on both graphs and changed them, and every rank made the same plans.

    Seen in reports and not in counters: a rank may find in Inductor's cache what another has just compiled.
    """
    for rank in found:
        assert len(rank.graphs) == 2
        assert sum(graph["before"]["num_collectives"] for graph in rank.graphs) > 0
        if parallel != "ddp-reducer":  # there torch launches each all-reduce as soon as it can, and waits last
            changed = [graph for graph in rank.graphs if graph["before"]["digest"] != graph["after"]["digest"]]
            assert any(decision["pass_name"] in MOVES for graph in changed for decision in graph["applied"])
    assert len({tuple(sorted((graph["phase"], graph["plan_digest"]) for graph in rank.graphs)) for rank in found}) == 1


@each(ON_TWO)
def test_weft_eager_trains_as_aot_eager_does_on_two_ranks(two_ranks: World, parallel: str):
    check(two_ranks, parallel, ON_TWO[parallel], "weft_eager", "aot_eager")


@pytest.mark.long
@pytest.mark.parametrize("parallel", ON_FOUR)
def test_weft_eager_trains_as_aot_eager_does_on_four_ranks(four_ranks: World, parallel: str):
    model = "moe-debug" if parallel == "ep-fsdp" else "llama-debug"
    check(four_ranks, parallel, ON_FOUR[parallel], "weft_eager", "aot_eager", model)


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "reference"),
    [("weft_eager", "aot_eager"), pytest.param("weft", "inductor", marks=pytest.mark.needs_cpp)],
)
def test_experts_whose_exchanges_depend_on_data_train_as_without_weft(four_ranks: World, backend: str, reference: str):
    options = {"parallel": "ep-fsdp", "mesh": {"dp": 2, "ep": 2}, "model": "dropless-debug"}
    found = four_ranks.run(train, backend=backend, options=EXACT[backend], **options)
    expected = four_ranks.run(train, backend=reference, **options)
    assert all(map(same, found, expected))
    assert_woven("ep-fsdp", found)


@pytest.mark.long
def test_micro_steps_that_do_not_synchronize_say_nothing(two_ranks: World):
    found, expected = (
        two_ranks.run(train, parallel="ddp-reducer", mesh={"dp": 2}, backend=name, model="mini", micro_steps=2)
        for name in ("weft_eager", "aot_eager")
    )
    assert all(map(same, found, expected))
    first, *_, last = [graph for graph in found[0].graphs if graph["phase"] != "forward"]
    assert (first["before"]["num_collectives"], last["before"]["num_collectives"]) == (0, 3)
    assert {graph["role"] for graph in (first, last)} == {"backward"}, "compiled autograd makes it"
    assert found[0].messages == ()


@pytest.mark.long
@pytest.mark.parametrize("parallel", ["ddp-default", "fsdp2"])
def test_communication_outside_of_graphs_is_named_once(two_ranks: World, parallel: str):
    found = two_ranks.run(train, parallel=parallel, mesh={"dp": 2}, backend="weft_eager", model="mini")
    assert [rank.messages for rank in found] == [(NO_COLLECTIVES.format(ranks=2),)] * 2


@pytest.mark.slow
@pytest.mark.needs_cpp
@each({name: ON_TWO[name] for name in ("ddp-reducer", "ddp", "fsdp", "tp")})
def test_weft_trains_as_inductor_does_on_two_ranks(two_ranks: World, parallel: str):
    check(two_ranks, parallel, ON_TWO[parallel], "weft", "inductor", "mini")


@pytest.mark.long
@pytest.mark.needs_cpp
@pytest.mark.parametrize("parallel", ON_FOUR)
def test_weft_trains_as_inductor_does_on_four_ranks(four_ranks: World, parallel: str):
    model = "moe-debug" if parallel == "ep-fsdp" else "mini"
    check(four_ranks, parallel, ON_FOUR[parallel], "weft", "inductor", model)
