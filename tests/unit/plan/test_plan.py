"""Plans: data that is saved, read back, compared and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import weft
from weft.errors import PlanError
from weft.plan.decision import Decision, Reason
from weft.plan.plan import Erase, Move, Plan, Replace, Step, what_differs

LISTING = """group('dp', size=2)

def graph(x: f32[4, 4], p: f32[2, 4]):
    a: f32[4, 4] = mm(x, x)
    ag: f32[4, 4] = all_gather(p, 2, 'dp')
    w: f32[4, 4] = wait(ag)
    w2: f32[4, 4] = wait(ag)
    r: f32[4, 4] = add(w, w2)
    return [a, r]
"""


def plan_of(listing: str = LISTING, pipeline: str = "auto") -> Plan:
    return weft.optimize(weft.parse(listing), pipeline=pipeline).plan


def every_kind_of_action() -> Plan:
    step = Step(
        "sink-waits",
        (Move(("a", "b"), "c", "before"), Move(("d",), "e", "after"), Replace("f", "g"), Erase(("h", "i"))),
        (
            Decision("sink-waits", Reason.APPLIED, "a sinks", ("a",), "c"),
            Decision("sink-waits", Reason.MUTATED, "b stays", ("b",)),
        ),
        "0" * 32,
    )
    return Plan((step,), {"torch": "2.13.0", "num_nodes": 7})


def test_a_plan_is_read_back_as_it_was_written():
    for plan in (every_kind_of_action(), plan_of(), Plan(())):
        assert Plan.from_json(plan.to_json()) == plan
        assert Plan.from_json(plan.to_json()).digest == plan.digest


def test_a_plan_is_saved_and_loaded(tmp_path: Path):
    path = tmp_path / "plan.json"
    plan_of().save(path)
    assert Plan.load(path) == plan_of()
    assert Plan.load(str(path)) == plan_of()


def test_equal_graphs_give_equal_plans_and_digests():
    assert plan_of().to_json() == plan_of().to_json()
    assert plan_of().digest == plan_of().digest


def test_other_graphs_and_pipelines_give_other_digests():
    digests = {plan_of().digest, plan_of(LISTING.replace("4, 4", "8, 8").replace("2, 4", "4, 8")).digest}
    digests |= {plan_of(pipeline="sink-waits").digest, plan_of(pipeline="none").digest}
    assert len(digests) == 4


def test_each_step_carries_the_digest_of_the_listing_it_was_made_for():
    plan = plan_of(pipeline="dedupe-collectives,hoist-launches,sink-waits")
    assert len({step.digest for step in plan.steps}) == len(plan.steps) == 3


def test_plans_for_ranks_whose_constants_differ_are_equal():
    listing = """tensor('k', i64[2], [{}, 1])

def graph(x: i64[2]):
    k: i64[2] = attribute('k')
    y: i64[2] = add(x, k)
    return [y]
"""
    first, second = (weft.parse(listing.format(value)) for value in (0, 7))
    assert weft.listing(first) != weft.listing(second)
    assert weft.optimize(first).plan.digest == weft.optimize(second).plan.digest


def test_a_step_sorts_its_decisions():
    (step,) = every_kind_of_action().steps
    assert [d.sentence for d in step.applied] == ["a sinks"]
    assert [d.sentence for d in step.declined] == ["b stays"]


def test_only_what_was_possible_and_not_done_is_a_refusal():
    assert {reason.value for reason in Reason if not reason.is_refusal} == {
        "applied",
        "exposed-by-dependency",
        "exposed-by-queue",
        "exposed-by-link",
        "exposed-by-memory",
        "exposed-by-order",
        "no-gain",
        "no-product",
        "already-done",
        "alone",
        "full",
        "other-role",
        "forbidden",
    }


def test_reasons_are_words_with_dashes():
    assert all(reason.value == reason.name.lower().replace("_", "-") for reason in Reason)


# Malformed files.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "",
            "plan: this is not a valid plan\n"
            "    file: Invalid JSON: EOF while parsing a value at line 1 column 0\n"
            "create it again with weft.optimize",
        ),
        (
            "[]",
            "plan: this is not a valid plan\n    file: Input should be an object\ncreate it again with weft.optimize",
        ),
        (
            "{}",
            "plan: this is not a valid plan\n    steps: Field required\ncreate it again with weft.optimize",
        ),
        (
            '{"steps": [{}, {"spec": 3}], "format": 4}',
            "plan: this is not a valid plan\n"
            "    steps.0.spec: Field required\n"
            "    steps.1.spec: Input should be a valid string\n"
            "create it again with weft.optimize",
        ),
        (
            '{"steps": [{"spec": "sink-waits", "decisions": [{"pass_name": "a", "reason": "bored", "sentence": "", '
            '"nodes": []}]}]}',
            "plan: this is not a valid plan\n"
            "    steps.0.decisions.0.reason: Input should be "
            + ", ".join(f"'{reason.value}'" for reason in list(Reason)[:-1])
            + f" or '{list(Reason)[-1].value}'\n"
            "create it again with weft.optimize",
        ),
        (
            '{"steps": [], "format": 1}',
            "plan: its format is 1, but this version of Weft reads 4\ncreate it again with weft.optimize",
        ),
        (
            '{"steps": []}',
            "plan: it has no digest of its contents\n"
            "pass the file as plan.save wrote it, or create it again with weft.optimize",
        ),
    ],
)
def test_an_invalid_plan_lists_all_its_faults(text: str, message: str):
    with pytest.raises(PlanError) as error:
        Plan.from_json(text)
    assert str(error.value) == message


def test_a_file_in_which_anything_was_edited_is_refused():
    text = plan_of(pipeline="dedupe-collectives,sink-waits").to_json()
    edits = [("2.", "3."), ('"applied"', '"alone"'), ("sink-waits", "hoist-launches"), ('"stride": 1', '"stride": 2')]
    for old, new in edits:
        assert old in text
        with pytest.raises(PlanError, match=r"it was edited after it was saved: the file says digest '[0-9a-f]{32}'"):
            Plan.from_json(text.replace(old, new, 1))
    assert Plan.from_json(json.dumps(json.loads(text)))  # the layout of the text does not count


def test_an_action_of_an_unknown_kind_is_refused():
    data = json.loads(every_kind_of_action().to_json())
    data["steps"][0]["actions"][0]["kind"] = "run"
    with pytest.raises(PlanError) as error:
        Plan.from_json(json.dumps(data))
    assert "steps.0.actions.0" in str(error.value)


def test_each_action_is_read_as_its_kind():
    """A field too many must not make one kind of action look like another."""
    (step,) = Plan.from_json(every_kind_of_action().to_json()).steps
    assert [type(action) for action in step.actions] == [Move, Move, Replace, Erase]


@pytest.mark.parametrize(
    ("name", "why"),
    [("missing", "No such file or directory"), ("folder", "Is a directory"), ("binary", "it is not UTF-8 text")],
)
def test_a_file_that_cannot_be_read_is_named_with_what_to_do(tmp_path: Path, name: str, why: str):
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    path = tmp_path / name
    with pytest.raises(PlanError) as error:
        Plan.load(path)
    assert str(error.value) == f"plan: {path} cannot be read: {why}\npass a file that plan.save wrote"


def test_a_plan_is_not_saved_where_there_is_no_folder(tmp_path: Path):
    path = tmp_path / "missing" / "plan.json"
    with pytest.raises(PlanError) as error:
        every_kind_of_action().save(path)
    assert str(error.value) == (
        f"{path}: it cannot be written: No such file or directory\ncreate the folder {path.parent} first"
    )


def test_a_plan_is_not_saved_as_a_folder(tmp_path: Path):
    with pytest.raises(PlanError) as error:
        every_kind_of_action().save(tmp_path)
    assert str(error.value) == f"{tmp_path}: it cannot be written: Is a directory\nchoose a path that can be written"


# Other graphs.


def test_what_differs_names_each_fact_on_both_sides():
    here = {"torch": "2.13.0", "num_nodes": 7, "groups": {"dp": {"size": 2, "stride": 1}}}
    plan = {"torch": "2.12.0", "num_nodes": 7, "groups": {"dp": {"size": 4, "stride": 1}}}
    assert what_differs(plan, here) == [
        "groups: {'dp': {'size': 2, 'stride': 1}} here, {'dp': {'size': 4, 'stride': 1}} in the plan",
        "torch: '2.13.0' here, '2.12.0' in the plan",
    ]
    assert what_differs(plan, plan) == []


def test_a_fact_that_one_side_does_not_have_is_none_there():
    assert what_differs({}, {"torch": "2.13.0"}) == ["torch: '2.13.0' here, None in the plan"]
