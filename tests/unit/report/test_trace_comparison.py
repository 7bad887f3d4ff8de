"""A measured step beside a predicted one: which collectives correspond, and where order and times differ."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from weft.cost.calibration.measured_step import MeasuredCollective, MeasuredStep, TracedGroup
from weft.graph.groups import Group
from weft.graph.ops import Kind
from weft.report.collective_alignment import align
from weft.report.trace_comparison import TraceComparison, compare_step
from weft.simulation.prediction import PredictedCollective, Prediction, one_after_the_other

AG, RS, AR = Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE
DP, TP = Group("dp", 4), Group("tp", 2)
WORLD, PAIR = TracedGroup("0", 4, (0, 1, 2, 3)), TracedGroup("1", 2, (0, 1))

Launched = tuple[Kind, int | None, str]


def predicted(*launches: Launched, us: int = 10, groups: Sequence[Group] = (DP, TP)) -> Prediction:
    """Collectives of 10 us, one each 20 us; the last 4 us of each are exposed."""
    found = [
        PredictedCollective(
            f"c{i}", kind.value, group, num_bytes, i * 20_000, i * 20_000, i * 20_000 + us * 1000, None, 4000
        )
        for i, (kind, num_bytes, group) in enumerate(launches)
    ]
    return Prediction(len(found) * 20_000, len(found) * 12_000, tuple(found), tuple(groups))


def measured(
    *launches: Launched, groups: Sequence[TracedGroup] = (WORLD, PAIR), is_issued: bool = True, us: int = 15
) -> MeasuredStep:
    """The same in a step whose collectives take 15 us, of which 9 us are exposed."""
    found = [
        MeasuredCollective(
            kind, group, num_bytes, i * 25_000 if is_issued else None, i * 25_000, i * 25_000 + us * 1000, 9000
        )
        for i, (kind, num_bytes, group) in enumerate(launches)
    ]
    return MeasuredStep("trace.json", 0, None, len(found) * 25_000, len(found) * 12_000, 0, tuple(found), tuple(groups))


def test_the_planned_collectives_in_the_planned_order_are_as_planned():
    plan = predicted((AG, 64, "dp"), (AR, 8, "tp"), (AG, 64, "dp"))
    found = align(plan, measured((AG, 64, "0"), (AR, 8, "1"), (AG, 64, "0")))
    assert found.is_as_planned
    assert found.pairs == ((0, 0), (1, 1), (2, 2))
    assert found.groups == {"0": "dp", "1": "tp"}
    assert found.first is None


def test_a_collective_that_runs_later_than_planned_is_the_one_that_moved():
    plan = predicted((AG, 1, "dp"), (AG, 2, "dp"), (AG, 3, "dp"), (AG, 4, "dp"))
    found = align(plan, measured((AG, 2, "0"), (AG, 3, "0"), (AG, 1, "0"), (AG, 4, "0")))
    assert not found.is_as_planned
    assert found.moved == ((0, 2),)
    assert found.first == (0, 0)
    assert not found.missing
    assert not found.extra


def test_a_bucket_that_ran_as_single_collectives_is_regrouped():
    plan = predicted((AG, 60, "dp"), (RS, 8, "dp"))
    found = align(plan, measured((AG, 20, "0"), (AG, 30, "0"), (AG, 10, "0"), (RS, 8, "0")))
    assert [(each.planned, each.ran) for each in found.regrouped] == [((0,), (0, 1, 2))]
    assert (found.missing, found.extra, found.pairs) == ((), (), ((1, 3),))
    assert not found.is_as_planned


def test_single_collectives_that_ran_as_a_bucket_are_regrouped():
    plan = predicted((AG, 20, "dp"), (AG, 30, "dp"), (RS, 8, "dp"))
    found = align(plan, measured((AG, 50, "0"), (RS, 8, "0")))
    assert [(each.planned, each.ran) for each in found.regrouped] == [((0, 1), (0,))]


def test_sizes_that_never_add_up_are_missing_and_extra():
    plan = predicted((RS, 8, "dp"), (AG, 60, "dp"), (RS, 8, "dp"))
    found = align(plan, measured((RS, 8, "0"), (AG, 70, "0"), (RS, 8, "0")))
    assert (found.missing, found.extra, found.regrouped) == ((1,), (1,), ())
    assert found.first == (1, 1)


def test_collectives_after_the_last_planned_one_are_outside_of_the_plan():
    plan = predicted((AG, 64, "dp"), (AG, 64, "dp"))
    found = align(plan, measured((AG, 64, "0"), (AG, 64, "0"), (AR, 4, "0")))
    assert found.is_as_planned
    assert found.outside == (2,)


def test_collectives_of_a_group_that_the_plan_does_not_have_are_outside_of_the_plan():
    plan = predicted((AG, 64, "dp"), (AG, 64, "dp"), groups=[DP])
    found = align(plan, measured((AG, 64, "0"), (AR, 4, "1"), (AG, 64, "0")))
    assert found.is_as_planned
    assert found.outside == (1,)


def test_an_unplanned_collective_between_planned_ones_is_extra():
    plan = predicted((AG, 64, "dp"), (AG, 64, "dp"))
    found = align(plan, measured((AG, 64, "0"), (AR, 4, "0"), (AG, 64, "0")))
    assert not found.is_as_planned
    assert found.extra == (1,)
    assert found.first == (1, 1)


def test_the_order_of_two_groups_counts_if_the_launches_of_the_host_are_known():
    plan = predicted((AG, 64, "dp"), (AR, 8, "tp"))
    ran = (AR, 8, "1"), (AG, 64, "0")
    assert len(align(plan, measured(*ran)).moved) == 1
    assert align(plan, measured(*ran, is_issued=False)).is_as_planned


def test_kernels_without_size_and_group_are_matched_by_kind_and_order():
    plan = predicted((AG, 64, "dp"), (AR, 8, "tp"), (AG, 32, "dp"))
    found = align(plan, measured((AG, None, ""), (AR, None, ""), (AG, None, "")))
    assert found.is_as_planned
    assert not align(plan, measured((AR, None, ""), (AG, None, ""), (AG, None, ""))).is_as_planned


def test_collectives_without_group_are_matched_by_kind_and_size():
    plan = predicted((AG, 64, "dp"), (AG, 32, "tp"))
    assert align(plan, measured((AG, 64, ""), (AG, 32, ""), groups=())).is_as_planned
    assert not align(plan, measured((AG, 32, ""), (AG, 64, ""), groups=())).is_as_planned


@pytest.mark.parametrize(
    ("planned", "traced", "expected"),
    [
        ((Group("a", 2), Group("b", 2)), (TracedGroup("0", 2, axis="b"), TracedGroup("1", 2, axis="a")), "ba"),
        ((Group("a", 2, 2), Group("b", 2)), (TracedGroup("0", 2, (2, 3)), TracedGroup("1", 2, (1, 3))), "ba"),
        ((Group("0", 2), Group("1", 2)), (TracedGroup("1", 2), TracedGroup("0", 2)), "01"),
    ],
    ids=["by axis", "by ranks", "by name"],
)
def test_groups_are_recognised(planned: Sequence[Group], traced: Sequence[TracedGroup], expected: str):
    plan = predicted((AG, 64, planned[0].name), (AG, 64, planned[1].name), groups=planned)
    found = align(plan, measured((AG, 64, "0"), (AG, 64, "1"), groups=traced))
    assert [found.groups[name] for name in ("0", "1")] == list(expected)


def test_groups_that_nothing_else_tells_apart_are_recognised_by_what_they_carry():
    plan = predicted((AG, 64, "a"), (AR, 8, "b"), groups=[Group("a", 2), Group("b", 2)])
    found = align(plan, measured((AG, 64, "x"), (AR, 8, "y"), groups=[TracedGroup("y", 2), TracedGroup("x", 2)]))
    assert found.groups == {"x": "a", "y": "b"}


def test_transfers_and_collectives_of_one_rank_are_not_compared():
    plan = predicted((AG, 64, "one"), (Kind.SEND, 8, "dp"), (AG, 64, "dp"), groups=[DP, Group("one", 1)])
    found = compare_step(plan, measured((AG, 64, "0")))
    assert found.is_as_planned
    assert (found.num_planned, found.num_ran) == (1, 1)
    assert any("2 planned" in note for note in found.notes)


def test_many_alike_collectives_are_lined_up_in_time():
    many = 9_000
    plan = predicted(*((AG, 64 + i % 3, "dp") for i in range(many)))
    found = align(plan, measured(*((AG, 64 + (i + 1) % 3, "0") for i in range(many))))
    assert len(found.pairs) == many
    assert len(found.moved) == many // 3


def comparison() -> TraceComparison:
    plan = predicted((AG, 64, "dp"), (RS, 64, "dp"))
    return compare_step(plan, measured((AG, 64, "0"), (RS, 64, "0")))


def test_totals_of_both_steps_stand_beside_each_other():
    totals = {total.name: (total.predicted_us, total.measured_us) for total in comparison().totals}
    assert totals["step"] == (40, 50)
    assert totals["compute"] == (24, 24)
    assert totals["communication"] == (20, 30)
    assert totals["exposed"] == (8, 18)
    assert totals["gaps"] == (8, 8)


def test_each_collective_has_predicted_and_measured_times():
    first = comparison().collectives[0]
    assert (first.name, first.planned_position, first.position) == ("c0", 0, 0)
    assert (first.predicted_us, first.measured_us, first.predicted_exposed_us, first.exposed_us) == (10, 15, 4, 9)
    assert first.late_us is None


def test_the_largest_disagreement_comes_first():
    plan = predicted((AG, 64, "dp"), (RS, 64, "dp"))
    step = measured((AG, 64, "0"), (RS, 64, "0"))
    slow = MeasuredCollective(RS, "0", 64, 25_000, 25_000, 95_000, 9000)
    found = compare_step(plan, MeasuredStep("t", 0, None, 95_000, 0, 0, (step.collectives[0], slow), (WORLD,)))
    assert [row.name for row in found.collectives] == ["c1", "c0"]


def test_the_shortest_time_over_the_ranks_counts_and_the_rest_is_waiting_for_late_ranks():
    plan = predicted((AG, 64, "dp"))
    found = compare_step(plan, measured((AG, 64, "0"), us=15), [measured((AG, 64, "0"), us=11)])
    (row,) = found.collectives
    assert (row.measured_us, row.late_us) == (11, 4)


def test_collectives_by_group_and_kind_add_up():
    plan = predicted((AG, 64, "dp"), (AG, 32, "dp"), (AR, 8, "tp"))
    found = compare_step(plan, measured((AG, 64, "0"), (AG, 32, "0"), (AR, 8, "1")))
    assert [(each.group, each.kind, each.count, each.measured_us, each.exposed_us) for each in found.kinds] == [
        ("dp", "all_gather", 2, 30, 18),
        ("tp", "all_reduce", 1, 15, 9),
    ]


def test_exposed_times_that_differ_by_more_than_a_hundredth_of_the_step_are_surprises():
    assert [each.name for each in comparison().surprises] == ["c0", "c1"]
    plan = predicted((AG, 64, "dp"))
    alike = MeasuredCollective(AG, "0", 64, 0, 0, 10_000, 4100)
    assert compare_step(plan, MeasuredStep("t", 0, None, 20_000, 0, 0, (alike,), (WORLD,))).surprises == ()


def test_times_that_the_trace_does_not_show_are_unknown():
    plan = predicted((AG, 64, "dp"))
    unknown = MeasuredCollective(AG, "0", 64, 0, 0, None)
    found = compare_step(plan, MeasuredStep("t", 0, None, 20_000, 12_000, 0, (unknown,), (WORLD,)))
    assert found.collectives[0].measured_us is None
    assert {total.name for total in found.totals if total.measured_us is None} == {"communication", "exposed", "gaps"}
    assert found.surprises == ()
    assert "does not show" in str(found)


def test_the_json_has_every_field():
    data = json.loads(comparison().to_json())
    assert data["is_as_planned"] is True
    assert data["surprises"] == ["c0", "c1"]
    assert [row["name"] for row in data["collectives"]] == ["c0", "c1"]


def test_control_characters_of_names_do_not_reach_the_terminal():
    plan = Prediction(10, 5, (PredictedCollective("\x1b[31mx", "all_gather", "dp", 64, 0, 0, 10),), (DP,))
    assert "\x1b" not in str(compare_step(plan, measured((AG, 64, "0"))))


def test_graphs_that_run_one_after_the_other_are_one_prediction():
    joined = one_after_the_other([predicted((AG, 64, "dp")), predicted((RS, 8, "dp"))])
    assert joined.step_ns == 40_000
    assert [(each.start_ns, each.end_ns) for each in joined.collectives] == [(0, 10_000), (20_000, 30_000)]
    assert len(joined.groups) == 2
