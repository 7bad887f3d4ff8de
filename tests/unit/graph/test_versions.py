"""The analyses that are kept for each version of a graph."""

import pytest
from torch.fx import Graph, GraphModule

import weft
from weft.errors import GraphError
from weft.graph.edit import Edit
from weft.graph.versions import MOST_GRAPHS, analyses_kept, dag_of
from weft.plan.context import Context
from weft.plan.plan import Step


def step() -> GraphModule:
    return weft.parse("def graph(x: f32[4]):\n    a = relu(x)\n    b = neg(x)\n    return [a, b]\n")


def named(module: GraphModule, name: str):
    return next(node for node in module.graph.nodes if node.name == name)


def test_a_dag_is_built_once_until_an_edit_changes_the_graph():
    module = step()
    with analyses_kept():
        before = dag_of(module.graph)
        assert dag_of(module.graph) is before
        with Edit(module.graph) as edit:
            edit.move_before([named(module, "b")], named(module, "a"))
        after = dag_of(module.graph)
        assert after is not before
        assert [node.name for node in after.nodes] == ["x", "b", "a", "output"]
        assert dag_of(module.graph) is after


def test_an_edit_that_changes_nothing_or_fails_keeps_the_dag():
    module = step()
    with analyses_kept():
        before = dag_of(module.graph)
        with Edit(module.graph):
            pass
        assert dag_of(module.graph) is before
        with pytest.raises(GraphError, match="cannot be erased"), Edit(module.graph) as edit:
            edit.erase(named(module, "a"))
        assert dag_of(module.graph) is before


def test_the_dag_of_a_graph_under_edit_is_new_each_time():
    module = step()
    with analyses_kept():
        before = dag_of(module.graph)
        with Edit(module.graph) as edit:
            assert edit.dag is before
            assert dag_of(module.graph) is not dag_of(module.graph)


def test_nothing_is_kept_outside_of_a_run():
    module = step()
    with analyses_kept():
        inside = dag_of(module.graph)
    assert dag_of(module.graph) is not inside
    assert dag_of(module.graph) is not dag_of(module.graph)


def test_the_oldest_graphs_are_forgotten():
    modules = [step() for _ in range(MOST_GRAPHS + 1)]
    with analyses_kept():
        dags = [dag_of(module.graph) for module in modules]
        assert dag_of(modules[-1].graph) is dags[-1]
        assert dag_of(modules[0].graph) is not dags[0]


def test_a_change_that_no_edit_made_is_found_when_uses_are_checked():
    module = step()
    with analyses_kept():
        dag_of(module.graph)
        named(module, "b").args = (named(module, "a"),)
        with pytest.raises(GraphError, match="the graph changed, but its kept Dag did not"):
            dag_of(module.graph)


class WritesDirectly(weft.Pass):
    """Swaps two nodes without telling its edit."""

    def plan(self, graph: Graph, context: Context) -> Step:
        return Step(str(self))

    def apply(self, edit: Edit, step: Step) -> None:
        first, second = (node for node in edit.graph.nodes if node.op == "call_function")
        first.prepend(second)


def test_a_pass_from_another_package_ends_a_version():
    module, seen = step(), list[list[str]]()

    class Looks(WritesDirectly):
        def plan(self, graph: Graph, context: Context) -> Step:
            seen.append([node.name for node in dag_of(graph).nodes])
            return Step(str(self))

        def apply(self, edit: Edit, step: Step) -> None:
            pass

    with analyses_kept():
        weft.Pipeline((Looks(), WritesDirectly(), Looks())).run(module)
    assert seen == [["x", "a", "b", "output"], ["x", "b", "a", "output"]]
