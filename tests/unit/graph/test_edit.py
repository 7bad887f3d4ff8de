"""Edit: a transaction that changes a graph wholly or not at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule, Node

import weft
from weft.errors import GraphError
from weft.graph.edit import MEMBERS_KEY, ORIGINS_KEY, Edit, copy_module
from weft.graph.ops import op_of, value_of
from weft.graph.output_names import result_names

aten = torch.ops.aten

LISTING = """group('dp', size=2)

def graph(x: f32[4], p: f32[4], new: f32[4]):
    a: f32[4] = relu(x)
    ag: f32[8] = all_gather(p, 2, 'dp')
    w: f32[8] = wait(ag)
    c: f32[4] = copy_(p, new)
    b: f32[4] = neg(a)
    r: f32[8] = neg(w)
    return [b, r]
"""


def module_of(text: str = LISTING) -> GraphModule:
    return weft.parse(text)


def nodes_of(module: GraphModule) -> dict[str, Node]:
    return {node.name: node for node in module.graph.nodes}


def body(module: GraphModule) -> list[str]:
    """The names of the calls in order."""
    return [node.name for node in module.graph.nodes if node.op == "call_function"]


def chain(*names: str) -> GraphModule:
    """Independent relus of one input."""
    lines = "".join(f"    {name}: f32[4] = relu(x)\n" for name in names)
    return module_of(f"def graph(x: f32[4]):\n{lines}    return [{', '.join(names)}]\n")


# Rolling back.


def create(edit: Edit, nodes: dict[str, Node]) -> None:
    edit.call(aten.relu.default, (nodes["x"],), name="made", before=nodes["a"])


def replace(edit: Edit, nodes: dict[str, Node]) -> None:
    edit.replace(nodes["a"], nodes["x"])


def change_arguments(edit: Edit, nodes: dict[str, Node]) -> None:
    edit.set_arguments(nodes["b"], (nodes["new"],), {})


def erase(edit: Edit, nodes: dict[str, Node]) -> None:
    edit.replace(nodes["b"], nodes["a"])
    edit.erase(nodes["b"])


def move(edit: Edit, nodes: dict[str, Node]) -> None:
    edit.move_before([nodes["ag"]], nodes["a"])


STAGES = (create, replace, change_arguments, erase, move)


@pytest.mark.parametrize("count", range(len(STAGES) + 1))
def test_an_exception_at_any_stage_leaves_the_graph_as_it_was(count: int):
    module = module_of()
    nodes = nodes_of(module)

    def fail_after_some_stages() -> None:
        with Edit(module.graph) as edit:
            for stage in STAGES[:count]:
                stage(edit, nodes)
            raise KeyError("from the pass")

    with pytest.raises(KeyError, match="from the pass"):
        fail_after_some_stages()
    assert weft.listing(module) == LISTING
    module.graph.lint()


def shrink(edit: Edit, nodes: dict[str, Node]) -> None:
    """The result of the gather gets another size, which `r` sees and `late` does not fit."""
    half = edit.call(op_of("slice"), (nodes["p"], 0, 0, 2), before=nodes["ag"])
    edit.set_arguments(nodes["ag"], (half, 2, "dp"))


def read_in_flight(edit: Edit, nodes: dict[str, Node]) -> None:
    edit.call(aten.relu.default, (nodes["ag"],), before=nodes["w"])


def close_a_cycle(edit: Edit, nodes: dict[str, Node]) -> None:
    edit.set_arguments(nodes["a"], (nodes["b"],))


def erase_what_is_used(edit: Edit, nodes: dict[str, Node]) -> None:
    edit.erase(nodes["a"])


def launch_without_a_wait(edit: Edit, nodes: dict[str, Node]) -> None:
    edit.call(op_of("all_gather"), (nodes["x"], 2, "dp"), before=nodes["a"])


def mismatch(edit: Edit, nodes: dict[str, Node]) -> None:
    edit.set_arguments(nodes["r"], (nodes["w"], nodes["x"]))


@pytest.mark.parametrize("fault", [read_in_flight, close_a_cycle, erase_what_is_used, launch_without_a_wait, mismatch])
def test_a_commit_that_fails_leaves_the_graph_as_it_was(fault: Callable[[Edit, dict[str, Node]], None]):
    module = module_of()
    nodes = nodes_of(module)
    values = {name: value_of(node) for name, node in nodes.items()}
    edit = Edit(module.graph)
    create(edit, nodes)
    fault(edit, nodes)
    with pytest.raises(GraphError):
        edit.commit()
    assert weft.listing(module) == LISTING
    assert all(value_of(node) is values[node.name] for node in module.graph.nodes)
    assert not edit.changed


def test_values_that_were_recomputed_are_put_back_when_a_later_check_fails():
    module = module_of()
    nodes = nodes_of(module)
    edit = Edit(module.graph)
    shrink(edit, nodes)
    read_in_flight(edit, nodes)
    with pytest.raises(GraphError):
        edit.commit()
    assert weft.listing(module) == LISTING


def test_a_rolled_back_edit_can_be_used_again():
    module = module_of()
    nodes = nodes_of(module)
    edit = Edit(module.graph)
    create(edit, nodes)
    edit.rollback()
    move(edit, nodes)
    edit.commit()
    assert body(module) == ["ag", "a", "w", "c", "b", "r"]


# Moving.


def test_nodes_moved_together_keep_the_order_given():
    module = chain("a", "b", "c", "d", "e")
    nodes = nodes_of(module)
    with Edit(module.graph) as edit:
        edit.move_before([nodes["c"], nodes["d"], nodes["e"]], nodes["a"])
    assert body(module) == ["c", "d", "e", "a", "b"]


def test_only_what_must_move_moves():
    names = [f"n{k}" for k in range(40)]
    module = chain(*names)
    nodes = nodes_of(module)
    with Edit(module.graph) as edit:
        edit.move_after([nodes["n3"]], nodes["n20"])
    assert body(module) == [*names[:3], *names[4:21], "n3", *names[21:]]


def test_nodes_moved_behind_another_keep_the_order_given():
    module = chain("a", "b", "c", "d", "e")
    nodes = nodes_of(module)
    with Edit(module.graph) as edit:
        edit.move_after([nodes["a"], nodes["b"], nodes["c"]], nodes["d"])
    assert body(module) == ["d", "a", "b", "c", "e"]


def test_nodes_may_be_moved_beside_moved_nodes():
    module = chain("a", "b", "c", "d", "e")
    nodes = nodes_of(module)
    with Edit(module.graph) as edit:
        edit.move_after([nodes["a"]], nodes["e"])
        edit.move_before([nodes["c"]], nodes["a"])
        edit.move_after([nodes["b"]], nodes["c"])
    assert body(module) == ["d", "e", "c", "b", "a"]


def test_the_last_move_of_a_node_counts():
    module = chain("a", "b", "c")
    nodes = nodes_of(module)
    with Edit(module.graph) as edit:
        edit.move_after([nodes["a"]], nodes["c"])
        edit.move_after([nodes["a"]], nodes["b"])
    assert body(module) == ["b", "a", "c"]


def test_a_node_goes_as_far_as_its_dependencies_allow():
    module = module_of(
        "def graph(x: f32[4]):\n    a = relu(x)\n    b = neg(a)\n    c = neg(b)\n    d = relu(x)\n    return [c, d]\n"
    )
    nodes = nodes_of(module)
    with Edit(module.graph) as edit:
        edit.move_before([nodes["c"]], nodes["a"])
    assert body(module) == ["a", "b", "c", "d"]
    assert not edit.changed


def test_a_read_never_moves_past_a_write_of_what_it_reads():
    text = """def graph(x: f32[4], y: f32[4]):
    v: f32[2, 2] = view(x, [2, 2])
    old: f32[2, 2] = relu(v)
    c: f32[4] = copy_(x, y)
    new: f32[2, 2] = neg(v)
    return [old, new]
"""
    module = module_of(text)
    nodes = nodes_of(module)
    with Edit(module.graph) as edit:
        edit.move_after([nodes["old"]], nodes["new"])
        edit.move_before([nodes["new"]], nodes["v"])
    order = body(module)
    assert order.index("old") < order.index("c") < order.index("new")


def test_the_issue_order_of_a_group_is_kept():
    text = """group('dp', size=2)
group('tp', size=2)

def graph(x: f32[4]):
    a: f32[4] = all_reduce(x, 'sum', 'dp')
    b: f32[4] = all_reduce(x, 'max', 'dp')
    c: f32[4] = all_reduce(x, 'sum', 'tp')
    wa: f32[4] = wait(a)
    wb: f32[4] = wait(b)
    wc: f32[4] = wait(c)
    return [wa, wb, wc]
"""
    module = module_of(text)
    nodes = nodes_of(module)
    with Edit(module.graph) as edit:
        edit.move_before([nodes["b"], nodes["c"]], nodes["a"])
    order = body(module)
    assert order.index("a") < order.index("b")

    module = module_of(text)
    nodes = nodes_of(module)
    with Edit(module.graph, keep_issue_order=False) as edit:
        edit.move_before([nodes["b"], nodes["c"]], nodes["a"])
    assert body(module) == ["b", "c", "a", "wa", "wb", "wc"]


def test_inputs_stay_first_and_the_output_last():
    module = chain("a", "b")
    nodes = nodes_of(module)
    with Edit(module.graph) as edit:
        edit.move_before([nodes["b"]], nodes["x"])
        edit.move_after([nodes["a"]], nodes["output"])
    assert [node.op for node in module.graph.nodes] == ["placeholder", "call_function", "call_function", "output"]
    assert body(module) == ["b", "a"]


def test_an_edit_that_changes_nothing_says_so():
    module = module_of()
    nodes = nodes_of(module)
    with Edit(module.graph) as edit:
        edit.move_before([nodes["a"]], nodes["ag"])
    assert not edit.changed
    assert weft.listing(module) == LISTING


def test_an_edit_that_moves_says_so():
    module = module_of()
    with Edit(module.graph) as edit:
        move(edit, nodes_of(module))
    assert edit.changed


# Creating and erasing.


def test_a_new_node_stands_where_it_was_asked_for():
    module = module_of()
    nodes = nodes_of(module)
    with Edit(module.graph) as edit:
        made = edit.call(aten.neg.default, (nodes["a"],), name="made", before=nodes["w"])
        edit.set_arguments(nodes["b"], (made,))
    assert body(module) == ["a", "ag", "made", "w", "c", "b", "r"]
    assert weft.listing(module).count("b: f32[4] = neg(made)") == 1


def test_where_a_reader_is_created_says_whether_it_reads_before_or_after_a_write():
    for place, expected in (("c", ["read", "c"]), ("b", ["c", "read"])):
        module = module_of()
        nodes = nodes_of(module)
        with Edit(module.graph) as edit:
            read = edit.call(aten.relu.default, (nodes["p"],), name="read", before=nodes[place])
            edit.set_arguments(nodes["output"], ([nodes["b"], nodes["r"], read],))
            edit.move_after([read], nodes["r"])
            edit.move_before([nodes["c"]], nodes["a"])
        assert [name for name in body(module) if name in ("read", "c")] == expected


def test_a_created_writer_is_ordered_against_the_reads_around_it():
    module = module_of("def graph(x: f32[4]):\n    a = relu(x)\n    b = neg(x)\n    return [a, b]\n")
    nodes = nodes_of(module)
    with Edit(module.graph) as edit:
        edit.call(aten.zero_.default, (nodes["x"],), name="zero", before=nodes["b"])
        edit.move_before([nodes["b"]], nodes["a"])
    assert body(module) == ["a", "zero", "b"]


def test_a_new_node_has_its_value_without_being_run():
    module = module_of()
    nodes = nodes_of(module)
    with Edit(module.graph) as edit:
        joined = edit.call(aten.cat.default, ([nodes["a"], nodes["new"]],), before=nodes["w"])
        edit.set_arguments(nodes["b"], (joined,))
    assert tuple(value_of(joined).shape) == (8,)
    assert tuple(value_of(nodes["b"]).shape) == (8,)


def test_a_value_that_the_caller_knows_is_taken():
    module = module_of()
    nodes = nodes_of(module)
    edit = Edit(module.graph)
    value = value_of(nodes["w"])
    made = edit.call(aten.neg.default, (nodes["w"],), value=value)
    assert value_of(made) is value
    edit.rollback()
    assert weft.listing(module) == LISTING


def test_a_call_that_is_not_possible_creates_nothing():
    module = module_of()
    nodes = nodes_of(module)
    edit = Edit(module.graph)
    with pytest.raises(GraphError, match=r"^mm: "):
        edit.call(aten.mm.default, (nodes["x"], nodes["x"]))
    edit.rollback()
    assert weft.listing(module) == LISTING


def test_provenance_comes_from_the_nodes_that_a_new_one_is_like():
    module = module_of()
    nodes = nodes_of(module)
    nodes["a"].meta |= {"stack_trace": "File 'a'", "nn_module_stack": {"m": 1}, "seq_nr": 7, "private": 1}
    nodes["b"].meta |= {"stack_trace": "File 'b'"}
    with Edit(module.graph) as edit:
        first = edit.call(aten.relu.default, (nodes["x"],), like=[nodes["a"], nodes["b"]], before=nodes["ag"])
        second = edit.call(aten.relu.default, (first,), like=[first, nodes["r"]], before=nodes["ag"])
    assert first.meta["stack_trace"] == "File 'a'"
    assert (first.meta["nn_module_stack"], first.meta["seq_nr"]) == ({"m": 1}, 7)
    assert "private" not in first.meta
    assert first.meta[MEMBERS_KEY] == ("a", "b")
    assert second.meta[MEMBERS_KEY] == ("a", "b", "r")


def test_a_node_that_replaces_several_keeps_the_provenance_and_annotations_of_each():
    module = module_of()
    nodes = nodes_of(module)
    for name in "ab":
        nodes[name].meta |= {"nn_module_stack": {name: (name, object)}, "custom": {"fqn": name}}
    with Edit(module.graph) as edit:
        alone = edit.call(aten.relu.default, (nodes["x"],), like=[nodes["a"]], before=nodes["ag"])
        first = edit.call(aten.relu.default, (alone,), like=[alone, nodes["b"]], before=nodes["ag"])
        second = edit.call(aten.relu.default, (first,), like=[first], before=nodes["ag"])
    assert ORIGINS_KEY not in alone.meta
    assert [origin["custom"]["fqn"] for origin in first.meta[ORIGINS_KEY]] == ["a", "b"]
    assert [list(origin["nn_module_stack"]) for origin in first.meta[ORIGINS_KEY]] == [["a"], ["b"]]
    assert second.meta[ORIGINS_KEY] == first.meta[ORIGINS_KEY]


def test_a_new_node_has_the_annotations_of_all_that_it_is_like_and_the_first_ones_where_they_disagree():
    module = module_of()
    nodes = nodes_of(module)
    nodes["a"].meta["custom"] = {"layer": 1, "stage": 0}
    nodes["b"].meta["custom"] = {"layer": 2, "recompute": True}
    nodes["w"].meta["custom"] = {"stage": 7}
    nodes["r"].meta["custom"] = "not a dict"
    with Edit(module.graph) as edit:
        like = [nodes["a"], nodes["b"], nodes["r"]]
        first = edit.call(aten.relu.default, (nodes["x"],), like=like, before=nodes["ag"])
        second = edit.call(aten.relu.default, (first,), like=like, annotated=[nodes["w"]], before=nodes["ag"])
        plain = edit.call(aten.relu.default, (first,), like=[nodes["x"]], before=nodes["ag"])
    assert first.meta["custom"] == {"layer": 1, "stage": 0, "recompute": True}
    assert second.meta["custom"] == {"layer": 1, "stage": 7, "recompute": True}
    assert "custom" not in plain.meta
    assert nodes["a"].meta["custom"] == {"layer": 1, "stage": 0}


def test_users_follow_a_replacement():
    module = module_of()
    nodes = nodes_of(module)
    with Edit(module.graph) as edit:
        edit.replace(nodes["a"], nodes["x"])
        edit.erase(nodes["a"])
    assert "b: f32[4] = neg(x)" in weft.listing(module)
    assert "a" not in nodes_of(module)


def test_a_node_that_replaces_itself_by_its_user_does_not_follow_itself():
    module = chain("a")
    nodes = nodes_of(module)
    with Edit(module.graph) as edit:
        made = edit.call(aten.neg.default, (nodes["a"],), name="made", before=nodes["output"])
        edit.replace(nodes["a"], made)
    assert weft.listing(module).endswith("made: f32[4] = neg(a)\n    return [made]\n")


def test_values_behind_a_change_are_recomputed():
    module = module_of()
    nodes = nodes_of(module)
    with Edit(module.graph) as edit:
        shrink(edit, nodes)
    assert "w: f32[4] = wait(ag)" in weft.listing(module)
    assert "r: f32[4] = neg(w)" in weft.listing(module)


# Errors.


def message(module: GraphModule, change: Callable[[Edit, dict[str, Node]], None]) -> str:
    edit = Edit(module.graph)
    change(edit, nodes_of(module))
    with pytest.raises(GraphError) as error:
        edit.commit()
    return str(error.value)


def test_the_error_for_an_erased_node_that_is_used_names_the_user():
    assert message(module_of(), erase_what_is_used) == (
        "edit: a cannot be erased, b uses it\n    b: f32[4] = neg(a)\n    ^\nreplace a first"
    )


def test_the_error_for_a_cycle_names_its_nodes():
    assert message(module_of(), close_a_cycle) == (
        "edit: no order is possible: a before b before a\n    a: f32[4] = relu(b)\n    ^\nleave one of these edits out"
    )


def test_the_error_for_a_node_beside_itself_names_it():
    module = chain("a", "b")
    nodes = nodes_of(module)
    edit = Edit(module.graph)
    edit.move_after([nodes["a"]], nodes["b"])
    with pytest.raises(GraphError) as error:
        edit.move_after([nodes["b"]], nodes["a"])
    assert str(error.value) == (
        "edit: b cannot be moved next to itself\n    b: f32[4] = relu(x)\n    ^\nchoose another anchor"
    )


def test_the_error_for_a_broken_rule_is_that_of_the_rule():
    assert message(module_of(), launch_without_a_wait) == (
        "graph: all_gather_into_tensor_default is never waited for and is not an output of the graph\n"
        "    all_gather_into_tensor_default: f32[8] = all_gather(x, 2, 'dp')\n"
        "    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^\n"
        "wait for it, return it, or delete the launch"
    )


# Copies.


def test_a_copy_of_a_module_has_its_own_graph_and_shares_its_constants():
    text = (
        "tensor('c', f32[2], [1.0, 2.0])\n\ndef graph(x: f32[2]):\n"
        "    c: f32[2] = attribute('c')\n    r: f32[2] = mul(x, c)\n    return [r]\n"
    )
    module = module_of(text)
    copied = copy_module(module)
    assert weft.listing(copied) == text
    assert copied.c is module.c
    nodes = nodes_of(copied)
    with Edit(copied.graph) as edit:
        edit.replace(nodes["r"], nodes["x"])
    assert weft.listing(module) == text
    assert weft.listing(copied) != text


def test_a_copy_of_a_module_runs():
    module = chain("a", "b")
    (first, _) = copy_module(module)(torch.tensor([1.0, -1.0, 2.0, -2.0]))
    assert first.tolist() == [1.0, 0.0, 2.0, 0.0]


def test_what_stands_for_a_result_is_known_by_its_name_too():
    module = weft.parse("def graph(x: f32[4]):\n    a = relu(x)\n    b = clone(a)\n    return [b]\n")
    a, b = (node for node in module.graph.nodes if node.op == "call_function")
    with Edit(module.graph) as edit:
        edit.replace(b, a)
        edit.erase(b)
    assert result_names(a) == ("a", "b")
    with Edit(module.graph) as edit:
        new = edit.call(op_of("relu"), tuple(a.all_input_nodes), before=a, name="c")
        edit.replace(a, new)
        edit.erase(a)
    assert result_names(new) == ("c", "a", "b")


def test_a_graph_that_returns_something_else_hands_no_names_on():
    module = weft.parse("def graph(x: f32[4]):\n    a = relu(x)\n    b = clone(a)\n    return [b]\n")
    a, b = (node for node in module.graph.nodes if node.op == "call_function")
    with Edit(module.graph) as edit:
        edit.set_arguments(list(module.graph.nodes)[-1], ([a, b],))
    assert (result_names(a), result_names(b)) == (("a",), ("b",))
