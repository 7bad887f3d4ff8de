"""The hook beside other hooks, and how it is told apart by Inductor's caches."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph

import weft
from tests.integration.functions import gather_and_multiply, gather_and_multiply_arguments, gather_twice, multiply
from weft.compat import refresh_names
from weft.compat.compilers import SCHEDULER_PASS, settings_of
from weft.errors import PipelineError
from weft.frontends.inductor import InductorPass, KeepOrder, inductor_pass
from weft.frontends.options import Options
from weft.frontends.session import SESSION

HOOK = "post_grad_custom_post_pass"


class Users:
    """A hook of the user, with an identity, that notes what it saw."""

    def __init__(self, uuid: Any = "users") -> None:
        self.seen: list[int] = []
        self._uuid = uuid

    def __call__(self, graph: Graph) -> None:
        self.seen.append(sum(node.op == "call_function" for node in graph.nodes))

    def uuid(self) -> Any:
        return self._uuid


def run(mesh: DeviceMesh, **compile_options: Any) -> None:
    function = torch.compile(gather_and_multiply, **compile_options)
    function(*gather_and_multiply_arguments(mesh.get_group().group_name))


# What it does to a graph.

LISTING = """group('dp', size=2)

def graph(x: f32[4, 4], p: f32[2, 4]):
    a: f32[4, 4] = mm(x, x)
    ag: f32[4, 4] = all_gather(p, 2, 'dp')
    w: f32[4, 4] = wait(ag)
    w2: f32[4, 4] = wait(ag)
    b: f32[4, 4] = relu(a)
    r: f32[4, 4] = add(b, w)
    s: f32[4, 4] = add(r, w2)
    return [s]
"""


def test_the_graph_is_edited_in_place(fresh: None, tmp_path: Path):
    module = weft.parse(LISTING)
    nodes = {node.name: node for node in module.graph.nodes}
    inductor_pass(report=tmp_path)(module.graph)
    assert weft.listing(module) == weft.listing(weft.optimize(weft.parse(LISTING)).module)
    assert all(nodes[node.name] is node for node in module.graph.nodes)


def test_a_new_node_is_called_as_it_would_be_in_a_copy():
    graph = weft.parse(LISTING).graph
    gone = graph.create_node("call_function", torch.relu, name="bucket")
    graph.erase_node(gone)
    assert graph.create_node("call_function", torch.relu, name="bucket").name == "bucket_1"
    graph = weft.parse(LISTING).graph
    graph.erase_node(graph.create_node("call_function", torch.relu, name="bucket"))
    refresh_names(graph)
    assert graph.create_node("call_function", torch.relu, name="bucket").name == "bucket"
    assert graph.create_node("call_function", torch.relu, name="a").name == "a_1"


UNCAPTURED = """def graph(x: f32[4, 4](device=device('cuda')), m: b8[4, 4](device=device('cuda'))):
    a = relu(x)
    count = nonzero(m)
    return [a, count]
"""


@pytest.mark.parametrize("makes_graphs", [True, False])
def test_what_does_not_fit_into_a_cuda_graph_is_named(fresh: None, tmp_path: Path, makes_graphs: bool):
    module = weft.parse(UNCAPTURED)
    with settings_of("inductor").patch({"triton.cudagraphs": makes_graphs}):
        inductor_pass(report=tmp_path)(module.graph)
    told = [text for text in weft.run_report().messages if "CUDA graph" in text]
    assert len(told) == makes_graphs
    assert all("count: the host waits for data of the device" in text for text in told)


# In front of Weft.


def test_a_hook_that_is_set_is_called_first():
    users = Users()
    with settings_of("inductor").patch({HOOK: users}):
        assert inductor_pass().chain == (users,)
    assert inductor_pass().chain == ()


def test_a_hook_is_chained_where_it_is_given():
    users, others = Users(), Users()
    assert inductor_pass(chain=users).chain == (users,)
    with settings_of("inductor").patch({HOOK: others}):
        assert inductor_pass(chain=[users, others]).chain == (users, others)


def test_weft_is_not_chained_to_itself():
    with settings_of("inductor").patch({HOOK: inductor_pass()}):
        assert inductor_pass().chain == ()


@pytest.mark.needs_cpp
def test_both_hooks_see_the_graph_under_the_bare_hook(mesh: DeviceMesh):
    users = Users()
    run(mesh, options={HOOK: inductor_pass(chain=users, cluster="h100-3x8")})
    assert len(users.seen) == 1
    assert len(SESSION.report().entries) == 1


@pytest.mark.needs_cpp
@pytest.mark.parametrize("place", ["options", "settings"])
def test_both_hooks_see_the_graph_under_the_backend(mesh: DeviceMesh, place: str):
    users = Users(place)
    options = {"weft.cluster": "h100-4x8", **({HOOK: users} if place == "options" else {})}
    with settings_of("inductor").patch({HOOK: users} if place == "settings" else {}):
        run(mesh, backend="weft", options=options)
    assert len(users.seen) == 1
    assert len(SESSION.report().entries) == 1


@pytest.mark.needs_cpp
def test_a_pass_of_the_scheduler_is_called_first_too(mesh: DeviceMesh):
    seen: list[int] = []

    def users(nodes: list[Any]) -> list[Any]:
        seen.append(len(nodes))
        return nodes

    run(mesh, backend="weft", options={SCHEDULER_PASS: users, "weft.cluster": "h100-5x8"})
    assert len(seen) == 1


# Identity.


def test_the_identity_covers_the_chained_hooks():
    plain, users, others = (InductorPass(Options(), chain).uuid() for chain in ([], [Users()], [Users("others")]))
    assert len({plain, users, others}) == 3
    assert InductorPass(Options(), [Users()]).uuid() == users


@pytest.mark.parametrize("hook", [Users(None), print])
def test_a_hook_without_identity_keeps_the_results_from_the_cache(hook: Any):
    assert InductorPass(Options(), [hook]).uuid() is None
    assert KeepOrder(hook).uuid() is None


def test_torch_may_copy_its_settings():
    hook = inductor_pass()
    assert copy.deepcopy(hook) is hook


# What is said aloud.


@pytest.mark.needs_cpp
def test_the_lite_mode_which_leaves_weft_out_is_named(mesh: DeviceMesh):
    run(mesh, backend="weft", mode="lite")
    assert SESSION.report().messages == (
        "Inductor's post-grad passes are switched off (mode='lite' does so), so Weft is not called",
    )


def test_inductors_own_fusion_of_all_reduces_is_named(fresh: None):
    graph = torch.fx.symbolic_trace(multiply).graph
    with settings_of("inductor").patch({"_fuse_ddp_communication": True}):
        inductor_pass(pipeline="none")(graph)
    (message,) = SESSION.report().messages
    assert message == (
        "Inductor moves collectives itself; "
        "set torch._inductor.config._fuse_ddp_communication = False to leave it to Weft"
    )


def test_a_graph_that_cannot_be_read_is_left_as_it_was_and_named(fresh: None):
    module = torch.fx.symbolic_trace(multiply)
    node = next(node for node in module.graph.nodes if node.op == "call_method")
    node.update_kwarg("why", object())
    code = module.code
    inductor_pass()(module.graph)
    (message,) = SESSION.report().messages
    assert message == (
        "a graph is left as it was: listing: an argument of type object has no text\nmake it a graph input"
    )
    (entry,) = SESSION.report().entries
    assert entry.skipped == "listing: an argument of type object has no text"
    assert module.code == code


# Wrong use.


def test_a_graph_without_a_module_is_refused():
    with pytest.raises(PipelineError) as error:
        inductor_pass()(Graph())
    assert str(error.value) == "inductor pass: the graph has no module\nmake a GraphModule of it"


def test_keywords_of_earlier_versions_still_work():
    options = weft.inductor_pass(report_dir="reports", agreement_dir="run-17").options
    assert (options.report, options.agreement) == ("reports", "run-17")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline": "sink-wates"}, "pipeline: no pass is called 'sink-wates'\ndid you mean 'sink-waits'?"),
        ({"effort": "bst"}, "options: weft.effort is 'bst', expected one of fast, default, best"),
        ({"verify": True}, "options: weft.verify is True, expected one of structure, equivalence, values, off"),
        ({"strict": "yes"}, "options: weft.strict is 'yes', expected True or False"),
        ({"cluster": 8}, "options: weft.cluster is 8, expected a name"),
        ({"memory_limit_bytes": "1G"}, "options: weft.memory_limit_bytes is '1G', expected an int"),
        ({"groups": ["tp"]}, "options: weft.groups is ['tp'], expected a dict such as {'tp': 8}"),
        ({"report": 1}, "options: weft.report is 1, expected a folder"),
        ({"pipeline": None}, "options: weft.pipeline is None, expected a preset, a spec string or a Pipeline"),
    ],
)
def test_wrong_options_are_told_at_once(options: dict[str, Any], message: str):
    with pytest.raises(PipelineError) as error:
        weft.inductor_pass(**options)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        ("weft", {"weft.clustr": "x"}, "options: no option is called 'weft.clustr'\ndid you mean 'weft.cluster'?"),
        ("weft_eager", {"weft.zzz": 1}, "options: no option is called 'weft.zzz'\nthe options are weft.cluster, "),
        ("weft", {"weft.strict": 1}, "options: weft.strict is 1, expected True or False"),
        (
            "weft",
            {"max_autotun": True},
            "backend weft: no option is called 'max_autotun'\ndid you mean 'max_autotune'?",
        ),
        ("weft", {"cluster": "x"}, "backend weft: no option is called 'cluster'\ndid you mean 'weft.cluster'?"),
        (
            "weft_eager",
            {"max_autotune": True},
            "backend weft_eager: option 'max_autotune' is for Inductor, which this backend does not use\n"
            "leave it out, or use backend='weft'",
        ),
    ],
)
def test_wrong_options_of_a_backend_are_told_with_the_nearest(
    fresh: None, backend: str, options: dict[str, Any], message: str
):
    with pytest.raises(Exception, match=r"options|backend") as error:
        torch.compile(multiply, backend=backend, options=options)(torch.ones(2, 2))
    assert message in str(error.value)


def test_strict_refusals_reach_whoever_compiles(mesh: DeviceMesh):
    options = {"weft.strict": True, "weft.pipeline": "dedupe-collectives"}
    function = torch.compile(gather_twice, backend="weft_eager", options=options)
    with pytest.raises(Exception, match=r"dedupe-collectives: .* stays: 1.00 KiB would stay in memory"):
        function(torch.ones(16, 16), torch.ones(8, 16), mesh.get_group().group_name)
