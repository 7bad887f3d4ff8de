"""Sizes that only the data decides: priced as stated, told, and never believed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.fx import GraphModule

import weft
from weft.errors import GraphError
from weft.frontends.printed.runnable import read_runnable
from weft.graph.assumed_sizes import assume_sizes, notes_on_sizes, size_of
from weft.graph.collective import collectives

DATA = Path(__file__).parents[2] / "data"


def forward() -> GraphModule:
    return read_runnable(DATA / "experts_forward.txt")


def extents(module: GraphModule) -> list[int | None]:
    """The rows that each all-to-all returns."""
    return [size_of(each.launch.meta["val"].shape[0]) for each in collectives(module.graph)]


def test_balanced_exchanges_send_even_shares():
    module = forward()
    assert extents(module) == [4, None, None]
    assume_sizes(module, "balanced")
    assert extents(module) == [4, 128, 128]
    assert notes_on_sizes(module) == ("sizes that the data decides are assumed: u0, u1, u2, u3 = 64",)


def test_sizes_by_name_are_put_into_expressions():
    module = forward()
    assume_sizes(module, {"u2": 100, "u3": 29})
    assert extents(module) == [4, 129, None]
    padded = next(node for node in module.graph.nodes if node.name == "full")
    assert size_of(padded.meta["val"].shape[0]) == (129 + 71) // 8 * 8
    assert [note.partition(":")[0] for note in notes_on_sizes(module)] == [
        "sizes that the data decides are assumed",
        "sizes that the data decides are assumed",
        "sizes that the data decides are unknown and count as nothing",
    ]


def test_a_longer_exchange_takes_longer_and_the_report_says_why():
    short, long = (weft.simulate(forward(), "h100-8x8", sizes={"u2": n, "u3": n}).step_us for n in (100, 10**6))
    assert long > 5 * short
    report = weft.optimize(forward(), "h100-8x8", sizes="balanced").report
    assert "sizes that the data decides are assumed: u0, u1, u2, u3 = 64" in report.notes


def test_assumptions_change_no_listing_and_no_eligibility():
    module = forward()
    before = weft.listing(module)
    assume_sizes(module, "balanced")
    assert weft.listing(module) == before
    assert [each.output_bytes for each in collectives(module.graph)] == [32, None, None]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"u7": 3}, "sizes: 'u7' is not a size that the data decides"),
        ({"u0": -1}, "sizes: u0 is -1, expected a whole number of 0 or more"),
        ("even", "sizes: no assumption is called 'even'\nuse 'balanced', 'zipf:1.2' or {'u0': 512}"),
        ("zipf:", "sizes: no assumption is called 'zipf:'"),
        ({"experts": []}, "sizes: experts is [], expected a list with the share of the rows"),
        ({"experts": [1, 2, 3]}, "sizes: 3 experts cannot be spread evenly over 2 ranks"),
    ],
)
def test_assumptions_that_cannot_be_meant_are_told(sizes: Any, message: str):
    with pytest.raises(GraphError) as error:
        assume_sizes(forward(), sizes)
    assert str(error.value).startswith(message)


def test_a_graph_without_such_sizes_has_nothing_to_tell():
    assert notes_on_sizes(weft.parse("def graph(x: f32[2]):\n    return [x]\n")) == ()


def splits(module: GraphModule) -> list[int | None]:
    """The numbers that the host reads: the rows sent to each rank, and those received from each."""
    reads = [node for node in module.graph.nodes if node.name.startswith("_local_scalar_dense")]
    return [size_of(node.meta["val"]) for node in reads]


def test_with_shares_of_the_experts_times_are_those_of_the_busiest_rank():
    """Two ranks have two experts each; each rank sends 128 rows, so the first one receives three quarters of 256."""
    module = forward()
    assume_sizes(module, {"experts": [1, 2, 1, 0]})
    assert splits(module) == [96, 32, 96, 96]
    assert extents(module) == [4, 192, 128]
    assert notes_on_sizes(module)[0].endswith("the rank that gets most rows, 75 % instead of 50 %")
    even = weft.simulate(forward(), "h100-8x8", sizes={"experts": [1, 1, 1, 1]})
    assert even.step_us == weft.simulate(forward(), "h100-8x8", sizes="balanced").step_us


def test_shares_by_a_power_favour_the_first_experts_and_names_override_them():
    module = forward()
    assume_sizes(module, "zipf:1")  # 1, 1/2, 1/3, 1/4: 72 % for the first rank
    assert splits(module) == [92, 36, 92, 92]
    assume_sizes(module, {"experts": [1, 0], "u2": 5})
    assert splits(module) == [128, 0, 5, 128]
    assume_sizes(module, "balanced")
    assert splits(module) == [64, 64, 64, 64]
    assert not any("unequal" in note for note in notes_on_sizes(module))


def test_an_exchange_of_unequal_parts_takes_the_time_of_the_busiest_rank():
    sent = {"u0": 10**6, "u1": 10**6}
    even, skewed = (
        max(span.end_ns - span.start_ns for span in weft.simulate(forward(), "h100-8x8", sizes=sizes).collectives)
        for sizes in ({**sent, "u2": 10**6, "u3": 10**6}, {**sent, "u2": 2 * 10**6, "u3": 2 * 10**6})
    )
    assert skewed > 1.5 * even
