"""Passes and pipelines: spec strings, options, registration, presets, strictness."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch.fx import Graph

import weft
from weft.errors import GraphError, PipelineError, PlanError, RefusedError
from weft.graph.edit import Edit
from weft.graph.groups import GroupTable
from weft.passes import base
from weft.passes.base import Numerics, Pass, all_passes, broken_passes, parse_pass
from weft.passes.communication.hoist_launches import HoistLaunches
from weft.passes.communication.sink_waits import SinkWaits
from weft.passes.pipeline import Pipeline, replay
from weft.passes.presets import PRESETS, STAGES
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason
from weft.plan.plan import Loop, Move, Plan, Step, Stream

LISTING = """group('dp', size=2)

def graph(x: f32[4, 4], p: f32[2, 4]):
    a: f32[4, 4] = mm(x, x)
    ag: f32[4, 4] = all_gather(p, 2, 'dp')
    w: f32[4, 4] = wait(ag)
    b: f32[4, 4] = relu(a)
    r: f32[4, 4] = add(b, w)
    return [r]
"""
REGATHER = """group('dp', size=2)

def graph(x: f32[4, 4], p: f32[2, 4]):
    ag0: f32[4, 4] = all_gather(p, 2, 'dp')
    w0: f32[4, 4] = wait(ag0)
    a: f32[4, 4] = mm(x, w0)
    ag1: f32[4, 4] = all_gather(p, 2, 'dp')
    w1: f32[4, 4] = wait(ag1)
    b: f32[4, 4] = mm(a, w1)
    return [b]
"""
PLUGIN = """from dataclasses import dataclass
from weft.passes.base import Numerics, Pass

@dataclass(frozen=True)
class ReuseNothing(Pass):
    '''Do nothing.'''
    numerics = Numerics.EXACT
    def plan(self, graph, context):
        return self.step([], [])
"""


@pytest.fixture
def registry() -> Iterator[None]:
    """Passes that a test defines are forgotten behind it."""
    known = dict(all_passes())
    yield
    base._PASSES.clear()
    base._PASSES.update(known)


def fault(spec: str) -> str:
    with pytest.raises(PipelineError) as error:
        Pipeline.parse(spec)
    return str(error.value)


# Spec strings.


@pytest.mark.parametrize(
    "spec",
    [
        "sink-waits",
        "hoist-launches{max-in-flight-bytes=64}",
        "hoist-launches{max-in-flight-bytes=none}",
        "remove-dead-code,dedupe-collectives,hoist-launches,sink-waits",
        "hoist-launches{max-in-flight-bytes=64},hoist-launches{max-in-flight-bytes=none},sink-waits",
        "",
    ],
)
def test_a_spec_is_given_back(spec: str):
    assert str(Pipeline.parse(spec)) == spec


@pytest.mark.parametrize("name", all_passes())
def test_the_spec_of_every_pass_at_its_defaults_is_its_name(name: str):
    assert str(parse_pass(name)) == name
    assert parse_pass(name) == all_passes()[name]()


def test_an_option_at_its_default_is_left_out():
    default = HoistLaunches().max_in_flight_bytes
    assert str(Pipeline.parse(f"hoist-launches{{max-in-flight-bytes={default}}}")) == "hoist-launches"


def test_spaces_do_not_matter():
    assert str(Pipeline.parse("  hoist-launches { max-in-flight-bytes=64 } , sink-waits ")) == (
        "hoist-launches{max-in-flight-bytes=64},sink-waits"
    )


def test_a_pipeline_is_a_value():
    assert Pipeline.parse("sink-waits") == Pipeline((SinkWaits(),))
    assert hash(Pipeline.parse("sink-waits")) == hash(Pipeline((SinkWaits(),)))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sink-wait", "pipeline: no pass is called 'sink-wait'\ndid you mean 'sink-waits'?"),
        ("zzz", "pipeline: no pass is called 'zzz'\n`weft passes` lists them"),
        ("sink waits", "pipeline: 'sink waits' is not a pass\nwrite name or name{option=value}"),
        ("sink-waits{", "pipeline: 'sink-waits{' is not a pass\nwrite name or name{option=value}"),
        ("remove-dead-code{fast=true}", "remove-dead-code: no option is called 'fast'\nit has no options"),
        (
            "hoist-launches{max-in-flight=64}",
            "hoist-launches: no option is called 'max-in-flight'\ndid you mean 'max-in-flight-bytes'?",
        ),
        (
            "hoist-launches{colour=red}",
            "hoist-launches: no option is called 'colour'\nits options are max-in-flight-bytes",
        ),
        (
            "hoist-launches{max-in-flight-bytes=lots}",
            "hoist-launches: max-in-flight-bytes is 'lots', expected int | None\nwrite max-in-flight-bytes=VALUE",
        ),
        (
            "hoist-launches{max-in-flight-bytes}",
            "hoist-launches: max-in-flight-bytes is '', expected int | None\nwrite max-in-flight-bytes=VALUE",
        ),
    ],
)
def test_a_wrong_spec_is_refused_by_name(spec: str, message: str):
    assert fault(spec) == message


def test_presets_are_pipelines_by_name():
    assert {"none", "exact", "ddp", "fsdp", "hsdp", "tp", "fsdp-tp", "moe"} == set(PRESETS)
    for name, spec in PRESETS.items():
        assert Pipeline.parse(name) == Pipeline.parse(spec)
        assert Pipeline.parse(str(Pipeline.parse(name))) == Pipeline.parse(name)
    assert Pipeline.parse("none").passes == ()
    assert str(Pipeline.parse(" auto ")) == "auto"


def test_a_preset_is_its_stages_in_their_order():
    assert str(Pipeline.parse("ddp")) == ",".join(
        STAGES[name] for name in ("clean", "algebra", "communication", "axes", "copy", "plan")
    )
    for spec in PRESETS.values():
        places = [list(STAGES).index(name) for name in spec.split(",") if name in STAGES]
        assert places == sorted(places)


def test_with_a_memory_limit_a_preset_decides_what_to_keep_before_it_chooses_copies():
    chosen = Pipeline.parse("fsdp").chosen(Graph(), GroupTable(), memory_limit_bytes=1 << 30)
    names = [each.name() for each in chosen.passes]
    assert names[-3:] == ["decide-memory", "copy-collectives", "schedule-overlap"]
    assert chosen.from_presets == frozenset(range(len(names)))
    own = Pipeline.parse("copy-collectives,plan").chosen(Graph(), GroupTable(), memory_limit_bytes=1 << 30)
    assert [each.name() for each in own.passes] == ["copy-collectives", "decide-memory", "schedule-overlap"]
    assert own.from_presets == {1, 2}


def test_the_exact_preset_has_exact_passes_only():
    assert {each.numerics for each in Pipeline.parse("exact").passes} == {Numerics.EXACT}
    assert {each.numerics for each in Pipeline.parse("clean,algebra,communication").passes} == {Numerics.EXACT}


def test_no_preset_computes_in_another_dtype():
    for name in PRESETS:
        assert Numerics.CHANGES_DTYPE not in {each.numerics for each in Pipeline.parse(name).passes}


def test_stages_and_presets_stand_among_passes():
    assert str(Pipeline.parse("sink-waits,algebra,hoist-launches")) == "sink-waits,simplify-arithmetic,hoist-launches"
    assert str(Pipeline.parse("none,sink-waits")) == "sink-waits"
    assert Pipeline.parse("exact,sink-waits").passes == (*Pipeline.parse("exact").passes, SinkWaits())


def test_passes_run_before_and_behind_auto():
    pipeline = Pipeline.parse("hoist-launches, auto ,sink-waits")
    assert str(pipeline) == "hoist-launches,auto,sink-waits"
    assert Pipeline.parse(str(pipeline)) == pipeline
    run = pipeline.run(weft.parse(LISTING))
    chosen = Pipeline.parse("auto").run(weft.parse(LISTING))
    specs = [step.spec for step in chosen.plan.steps]
    assert [step.spec for step in run.plan.steps] == ["hoist-launches", *specs, "sink-waits"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("auto,sink-waits,auto", "pipeline: 'auto' is given twice\ngive it once"),
        ("tp{kernel=portable}", "pipeline: 'tp' stands for several passes and has no options"),
        ("claen,auto", "pipeline: no pass is called 'claen'\ndid you mean 'clean'?"),
        ("fdsp", "pipeline: no pass is called 'fdsp'\ndid you mean 'fsdp'?"),
    ],
)
def test_a_wrong_stage_or_preset_is_refused_by_name(spec: str, message: str):
    assert fault(spec) == message


# Defining passes.


def test_no_pass_takes_the_name_of_a_stage(registry: None):
    with pytest.raises(PipelineError, match="the name 'clean' of a pass is taken by a stage or preset\nrename it"):

        class Clean(Pass):
            """Do nothing."""

            numerics = Numerics.EXACT


def test_a_pass_defined_anywhere_has_a_name_a_spec_and_a_parser(registry: None):
    @dataclass(frozen=True)
    class SwapNothingMuch(Pass):
        """Do nothing."""

        numerics = Numerics.EXACT
        max_bytes: int = 4
        ratio: float = 0.5
        careful: bool = False
        label: str = "a"
        mode: Literal["near", "far"] = "near"
        limit: int | None = None

        def plan(self, graph: Graph, context: Context) -> Step:
            return self.step([], [])

    assert SwapNothingMuch.name() == "swap-nothing-much"
    changed = SwapNothingMuch(8, 0.25, True, "b", "far", 3)
    spec = "swap-nothing-much{max-bytes=8 ratio=0.25 careful=true label=b mode=far limit=3}"
    assert str(changed) == spec
    assert parse_pass(spec) == changed
    assert parse_pass("swap-nothing-much{limit=none}") == SwapNothingMuch()
    assert "swap-nothing-much" in all_passes()
    for wrong in ("max-bytes=8.5", "ratio=half", "careful=yes", "mode=nowhere"):
        with pytest.raises(PipelineError):
            parse_pass(f"swap-nothing-much{{{wrong}}}")
    module = weft.parse(LISTING)
    assert weft.listing(Pipeline((changed,)).run(module).module) == LISTING


def test_two_passes_of_one_name_are_refused(registry: None):
    with pytest.raises(PipelineError) as error:

        @dataclass(frozen=True)
        class SinkWaits(Pass):
            """Another one."""

            numerics = Numerics.EXACT

            def plan(self, graph: Graph, context: Context) -> Step:
                return self.step([], [])

    home = "weft.passes.communication.sink_waits"
    assert str(error.value) == f"passes: two passes are called 'sink-waits': {home} and {__name__}\nrename one of them"
    assert all_passes()["sink-waits"].__module__ == home


def test_a_pass_may_be_defined_again_in_its_own_place(registry: None):
    """As a notebook or a reload does."""
    for _ in range(2):

        @dataclass(frozen=True)
        class SwapNothing(Pass):
            """Do nothing."""

            numerics = Numerics.EXACT

            def plan(self, graph: Graph, context: Context) -> Step:
                return self.step([], [])

    assert all_passes()["swap-nothing"] is SwapNothing


def test_a_class_without_a_plan_is_no_pass(registry: None):
    class SharedBase(Pass):
        """What several passes share."""

    assert "shared-base" not in all_passes()


@pytest.mark.parametrize("cls", all_passes().values())
def test_every_pass_is_a_frozen_dataclass_with_numerics_and_documented_options(cls: type[Pass]):
    assert isinstance(cls.numerics, Numerics)
    assert cls.__doc__
    with pytest.raises(dataclasses.FrozenInstanceError):
        cls().anything = 1
    assert all(f.default is not dataclasses.MISSING for f in dataclasses.fields(cls))


def test_a_package_offers_a_pass_by_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: None):
    (tmp_path / "weft_plugin.py").write_text(PLUGIN)
    offer(tmp_path, "[weft.passes]\nreuse-nothing = weft_plugin:ReuseNothing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "weft_plugin", raising=False)
    assert str(Pipeline.parse("reuse-nothing,sink-waits")) == "reuse-nothing,sink-waits"
    assert all_passes()["reuse-nothing"].__module__ == "weft_plugin"


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("no-pass", "json:JSONDecoder", "it is not a Pass"),
        ("no-module", "no_such_module_at_all:Broken", "No module named 'no_such_module_at_all'"),
        ("no-class", "json:NoSuchClass", "module 'json' has no attribute 'NoSuchClass'"),
        ("no-text", "weft_unreadable:Broken", "SyntaxError: "),
        ("no-return", "weft_leaving:Broken", "SystemExit: 3"),
        ("no-base", "weft.passes.rewrite_pass:RewritePass", "it is a base class: it has no plan or no numerics"),
        ("another-name", "weft.passes.communication.sink_waits:SinkWaits", "the pass is called 'sink-waits'"),
    ],
)
def test_an_entry_point_that_gives_no_pass_is_told_to_who_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: None, name: str, value: str, why: str
):
    (tmp_path / "weft_unreadable.py").write_text("class (:\n")
    (tmp_path / "weft_leaving.py").write_text("raise SystemExit(3)\n")
    offer(tmp_path, f"[weft.passes]\n{name} = {value}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    told = fault(f"sink-waits,{name}")
    assert told.startswith(f"passes: weft-plugin 1.0 offers '{name}' ({value}), but ")
    assert why in told
    assert told.endswith("\nfix or uninstall weft-plugin 1.0")
    assert {key: str(error) for key, error in broken_passes().items()} == {name: told}
    assert name not in all_passes()
    assert str(Pipeline.parse("sink-waits")) == "sink-waits"


def test_an_entry_point_that_takes_a_name_of_ours_is_told_and_ours_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: None
):
    (tmp_path / "weft_rival.py").write_text(PLUGIN.replace("ReuseNothing", "SinkWaits"))
    offer(tmp_path, "[weft.passes]\nsink-waits = weft_rival:SinkWaits\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (told,) = map(str, broken_passes().values())
    assert "weft-plugin 1.0 offers 'sink-waits' (weft_rival:SinkWaits)" in told
    assert "two passes are called 'sink-waits'" in told
    assert all_passes()["sink-waits"] is SinkWaits


def test_what_a_broken_module_has_defined_is_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: None):
    (tmp_path / "weft_half.py").write_text(f"{PLUGIN.replace('ReuseNothing', 'ReuseHalf')}\nno_such_name\n")
    offer(tmp_path, "[weft.passes]\nreuse-half = weft_half:ReuseHalf\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for _ in range(2):
        assert "but it cannot be loaded: NameError: name 'no_such_name' is not defined" in fault("reuse-half")


def test_a_package_that_is_installed_later_is_found_and_one_that_is_removed_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: None
):
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "reuse-later" not in broken_passes()
    offer(tmp_path, "[weft.passes]\nreuse-later = weft_later:ReuseLater\n")
    assert "No module named 'weft_later'" in str(broken_passes()["reuse-later"])
    shutil.rmtree(tmp_path / "weft_plugin-1.0.dist-info")
    assert "reuse-later" not in broken_passes()


def offer(folder: Path, entry_points: str) -> None:
    """An installed distribution with these entry points."""
    info = folder / "weft_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weft-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


# Running.


def test_a_run_leaves_its_argument_as_it_was_and_logs_every_pass():
    module = weft.parse(LISTING)
    run = Pipeline.parse("hoist-launches,sink-waits,sink-waits").run(module)
    assert weft.listing(module) == LISTING
    assert [entry.step.spec for entry in run.log] == ["hoist-launches", "sink-waits", "sink-waits"]
    assert [entry.changed for entry in run.log] == [True, True, False]
    assert run.log[0].before == LISTING
    assert run.log[0].after == run.log[1].before
    assert run.log[2].after == weft.listing(run.module)
    assert all(entry.seconds >= 0 for entry in run.log)


def test_the_module_of_a_run_has_the_code_of_its_graph():
    run = Pipeline.parse("remove-dead-code").run(
        weft.parse("def graph(x: f32[2]):\n    a = relu(x)\n    b = neg(x)\n    return [b]\n")
    )
    assert "relu" not in run.module.code
    assert run.module(torch.ones(2))[0].tolist() == [-1.0, -1.0]


def test_a_pass_sees_the_same_in_a_graph_as_in_its_listing():
    """What a pass left in memory may not lead the next one to other decisions than the text would."""
    text = """group('dp', size=2)

def graph(x: f32[2, 4], p: f32[4, 4]):
    ag0: f32[4, 4] = all_gather(x, 2, 'dp')
    ag1: f32[4, 4] = all_gather(x, 2, 'dp')
    w0: f32[4, 4] = wait(ag0)
    w1: f32[4, 4] = wait(ag1)
    v: f32[16] = reshape(w1, [16])
    a: f32[4, 4] = mm(p, p)
    r: f32[16] = relu(v)
    s: f32[4, 4] = neg(w0)
    return [a, r, s]
"""
    first = Pipeline.parse("dedupe-collectives").run(weft.parse(text)).module
    sink = Pipeline.parse("sink-waits")
    assert weft.listing(sink.run(first).module) == weft.listing(sink.run(weft.parse(weft.listing(first))).module)


def test_an_invalid_graph_is_refused_and_left_as_it_was():
    text = LISTING.replace("    w: f32[4, 4] = wait(ag)\n", "").replace("add(b, w)", "add(b, b)")
    module = weft.parse(text)
    with pytest.raises(GraphError) as error:
        Pipeline.parse("none").run(module)
    assert str(error.value) == (
        "graph: ag is never waited for and is not an output of the graph\n"
        "    ag: f32[4, 4] = all_gather(p, 2, 'dp')\n"
        "    ^^\n"
        "wait for it, return it, or delete the launch"
    )
    assert weft.listing(module) == text


def test_strict_turns_a_refusal_into_an_error():
    module = weft.parse(REGATHER)
    with pytest.raises(RefusedError) as error:
        Pipeline.parse("dedupe-collectives").run(module, strict=True)
    assert str(error.value) == (
        "dedupe-collectives: ag1 repeats ag0 and stays: 64 B would stay in memory from a to ag1\n"
        "leave strict off to accept this"
    )
    assert weft.listing(module) == REGATHER


def test_strict_asks_nothing_of_passes_that_a_preset_brings():
    for spec in ("auto", "fsdp", "communication", "sink-waits,auto"):
        Pipeline.parse(spec).run(weft.parse(REGATHER), strict=True)
    for spec in ("clean,dedupe-collectives,algebra,auto", str(Pipeline.parse("communication"))):
        with pytest.raises(RefusedError):
            Pipeline.parse(spec).run(weft.parse(REGATHER), strict=True)


def test_strict_accepts_what_is_not_of_the_form_or_does_not_pay():
    text = "def graph(x: f32[4]):\n    a: f32[4] = add(x, 0.0)\n    b: f32[4] = mul(a, 0)\n    return [b]\n"
    run = Pipeline.parse("simplify-arithmetic").run(weft.parse(text), strict=True)
    assert [d.reason for d in run.log[0].step.decisions] == [Reason.UNSUPPORTED_FORM] * 2


def test_strict_accepts_what_is_done_already():
    run = Pipeline.parse("sink-waits").run(weft.parse(REGATHER), strict=True)
    assert [d.reason for d in run.log[0].step.decisions] == [Reason.ALREADY_DONE, Reason.ALREADY_DONE]


def test_a_memory_limit_is_refused_where_no_pass_keeps_it():
    with pytest.raises(PipelineError) as error:
        Pipeline.parse("sink-waits").run(weft.parse(LISTING), memory_limit_bytes=1)
    assert str(error.value) == (
        "pipeline: no pass of 'sink-waits' keeps a memory limit\nadd schedule-overlap, or leave memory_limit_bytes out"
    )


GATHERS_IN_TURN = "\n".join(
    [
        "group('dp', size=2)",
        "",
        "def graph(x: f32[4, 4], p: f32[2, 4], q: f32[2, 4], r: f32[2, 4]):",
        *(
            line
            for name, shard, source in (("a", "p", "x"), ("b", "q", "ya"), ("c", "r", "yb"))
            for line in (
                f"    g{name}: f32[4, 4] = all_gather({shard}, 2, 'dp')",
                f"    w{name}: f32[4, 4] = wait(g{name})",
                f"    y{name}: f32[4, 4] = mm({source}, w{name})",
            )
        ),
        "    return [yc]\n",
    ]
)


def test_a_pass_after_the_planner_cannot_break_the_limit():
    """Each gather of 64 bytes is used before the next one; hoisted, all are held at once."""
    module = weft.parse(GATHERS_IN_TURN)
    peak = weft.simulate(module, "h100-8").peak_bytes
    Pipeline.parse("schedule-overlap").run(module, cluster="h100-8", memory_limit_bytes=peak)
    hoisted = Pipeline.parse("schedule-overlap,hoist-launches{max-in-flight-bytes=none}")
    with pytest.raises(RefusedError, match=r"above the memory limit of .*\nput schedule-overlap last"):
        hoisted.run(module, cluster="h100-8", memory_limit_bytes=peak)


def test_a_pass_that_breaks_an_invariant_changes_nothing(registry: None):
    @dataclass(frozen=True)
    class RemoveWaits(Pass):
        """Break the graph."""

        numerics = Numerics.EXACT

        def plan(self, graph: Graph, context: Context) -> Step:
            return self.step([], [self.decision(Reason.APPLIED, "it breaks", "w")])

        def apply(self, edit: Edit, step: Step) -> None:
            nodes = {node.name: node for node in edit.graph.nodes}
            edit.replace(nodes["w"], nodes["ag"])
            edit.erase(nodes["w"])

    module = weft.parse(LISTING)
    with pytest.raises(GraphError) as error:
        RemoveWaits().run(module.graph, Context())
    assert str(error.value) == (
        "graph: ag is never waited for and is not an output of the graph\n"
        "    ag: f32[4, 4] = all_gather(p, 2, 'dp')\n"
        "    ^^\n"
        "wait for it, return it, or delete the launch"
    )
    assert weft.listing(module) == LISTING


def test_a_pass_may_reorder_launches_only_if_it_says_so(registry: None):
    text = """group('dp', size=2)

def graph(x: f32[4]):
    a: f32[4] = all_reduce(x, 'sum', 'dp')
    b: f32[4] = all_reduce(x, 'max', 'dp')
    wa: f32[4] = wait(a)
    wb: f32[4] = wait(b)
    return [wa, wb]
"""

    @dataclass(frozen=True)
    class MoveLaunches(Pass):
        """Move `b` to the top."""

        numerics = Numerics.EXACT

        def plan(self, graph: Graph, context: Context) -> Step:
            return self.step([Move(("b",), "a", "before")], [])

    @dataclass(frozen=True)
    class MoveLaunchesBoldly(MoveLaunches):
        """The same, for every rank."""

        reorders_launches = True

    timid, bold = (Pipeline((p(),)).run(weft.parse(text)).module for p in (MoveLaunches, MoveLaunchesBoldly))
    assert weft.listing(timid) == text
    assert weft.listing(bold).index("b: ") < weft.listing(bold).index("a: f32[4] = all_reduce")


# Replaying.


def test_a_plan_is_replayed_on_the_graph_it_was_made_for():
    run = Pipeline.parse("auto").run(weft.parse(LISTING))
    again = replay(weft.parse(LISTING), Plan.from_json(run.plan.to_json()))
    assert weft.listing(again.module) == weft.listing(run.module)
    assert again.plan == run.plan


def test_a_plan_for_other_shapes_is_refused_with_what_differs():
    plan = Pipeline.parse("sink-waits").run(weft.parse(LISTING)).plan
    module = weft.parse(LISTING.replace("4, 4", "8, 8").replace("2, 4", "4, 8"))
    text = weft.listing(module)
    with pytest.raises(PlanError) as error:
        replay(module, plan)
    assert str(error.value) == (
        "plan: step 'sink-waits' was made for another graph\n"
        "    inputs: 'x: f32[8, 8], p: f32[4, 8]' here, 'x: f32[4, 4], p: f32[2, 4]' in the plan\n"
        "    first different node here: a: f32[8, 8] = mm(x, x)\n"
        "    in the plan: a: f32[4, 4] = mm(x, x)\n"
        "    5 nodes only here, 5 only in the plan\n"
        "make the plan again for this graph with weft.optimize"
    )
    assert weft.listing(module) == text


def test_a_plan_for_another_group_is_refused_with_what_differs():
    plan = Pipeline.parse("sink-waits").run(weft.parse(LISTING)).plan
    with pytest.raises(PlanError) as error:
        replay(weft.parse(LISTING.replace("size=2", "size=2, stride=4")), plan)
    assert str(error.value) == (
        "plan: step 'sink-waits' was made for another graph\n"
        "    groups: {'dp': {'size': 2, 'stride': 4}} here, {'dp': {'size': 2, 'stride': 1}} in the plan\n"
        "    num_ranks: 8 here, 2 in the plan\n"
        "make the plan again for this graph with weft.optimize"
    )


MESH = """group('dp', size=2, stride=4)
group('tp', size=4)

def graph(x: f32[8]):
    a: f32[8] = all_reduce(x, 'sum', 'dp')
    wa: f32[8] = wait(a)
    b: f32[8] = all_reduce(wa, 'sum', 'tp')
    wb: f32[8] = wait(b)
    return [wb]
"""


@pytest.mark.parametrize(
    ("header", "lines"),
    [
        pytest.param(
            "group('dp', size=4, stride=4)\ngroup('tp', size=4)",
            [
                "groups: {'dp': {'size': 4, 'stride': 4}, 'tp': {'size': 4, 'stride': 1}} here, "
                "{'dp': {'size': 2, 'stride': 4}, 'tp': {'size': 4, 'stride': 1}} in the plan",
                "num_ranks: 16 here, 8 in the plan",
            ],
            id="another world size",
        ),
        pytest.param(
            "group('dp', size=4, stride=2)\ngroup('tp', size=2)",
            [
                "groups: {'dp': {'size': 4, 'stride': 2}, 'tp': {'size': 2, 'stride': 1}} here, "
                "{'dp': {'size': 2, 'stride': 4}, 'tp': {'size': 4, 'stride': 1}} in the plan"
            ],
            id="another mesh of as many ranks",
        ),
        pytest.param(
            "group('dp', size=2, stride=4)\ngroup('tp', ranks=[[0, 2, 4, 6], [1, 3, 5, 7]])",
            [
                "groups: {'dp': {'size': 2, 'stride': 4}, 'tp': [[0, 2, 4, 6], [1, 3, 5, 7]]} here, "
                "{'dp': {'size': 2, 'stride': 4}, 'tp': {'size': 4, 'stride': 1}} in the plan"
            ],
            id="the same axes over other ranks",
        ),
    ],
)
def test_a_plan_for_another_world_or_mesh_is_refused_with_just_that(header: str, lines: list[str]):
    plan = Pipeline.parse("sink-waits").run(weft.parse(MESH)).plan
    other = weft.parse(header + MESH[MESH.index("\n\n") :])
    with pytest.raises(PlanError) as error:
        replay(other, Plan.from_json(plan.to_json()))
    assert str(error.value).splitlines()[1:-1] == [f"    {line}" for line in lines]


@pytest.mark.parametrize("pipeline", ["sink-waits", "none"])
def test_a_plan_made_with_another_torch_is_refused_though_the_graph_is_the_same(pipeline: str):
    plan = Pipeline.parse(pipeline).run(weft.parse(MESH)).plan
    old = Plan(plan.steps, {**plan.facts, "torch": "2.0.0"})
    here = plan.facts["torch"]
    with pytest.raises(PlanError) as error:
        replay(weft.parse(MESH), old)
    assert str(error.value) == (
        "plan: it was made with another version of torch\n"
        f"    torch: {here!r} here, '2.0.0' in the plan\n"
        "make the plan again with this version"
    )


def test_a_plan_for_a_group_of_listed_ranks_is_replayed_from_its_file(tmp_path: Path):
    text = MESH.replace("group('tp', size=4)", "group('tp', ranks=[[0, 2, 4, 6], [1, 3, 5, 7]])")
    run = Pipeline.parse("auto").run(weft.parse(text))
    run.plan.save(tmp_path / "plan.json")
    assert replay(weft.parse(text), Plan.load(tmp_path / "plan.json")).plan == run.plan


def test_a_plan_for_other_nodes_is_refused():
    plan = Pipeline.parse("sink-waits").run(weft.parse(LISTING)).plan
    with pytest.raises(PlanError) as error:
        replay(weft.parse(LISTING.replace("relu(a)", "neg(a)")), plan)
    assert str(error.value) == (
        "plan: step 'sink-waits' was made for another graph\n"
        "    first different node here: b: f32[4, 4] = neg(a)\n"
        "    in the plan: b: f32[4, 4] = relu(a)\n"
        "    1 nodes only here, 1 only in the plan\n"
        "make the plan again for this graph with weft.optimize"
    )


def test_a_plan_whose_last_step_leads_elsewhere_is_refused():
    run = Pipeline.parse("sink-waits").run(weft.parse(LISTING))
    (step,) = run.plan.steps
    assert step.actions
    forged = dataclasses.replace(run.plan, steps=(dataclasses.replace(step, actions=()),))
    with pytest.raises(PlanError) as error:
        replay(weft.parse(LISTING), forged)
    assert str(error.value) == (
        "plan: step 'sink-waits' leads to another graph than it did when the plan was made\n"
        "    first different node here: w: f32[4, 4] = wait(ag)\n"
        "    in the plan: b: f32[4, 4] = relu(a)\n"
        "    both have the same nodes, in another order\n"
        "make the plan again for this graph with weft.optimize"
    )


def test_a_step_that_leads_elsewhere_is_named_with_the_nodes_that_differ():
    """The first step removes a node in the plan and does nothing here, as another version of the pass might."""
    listing = LISTING.replace("    b: ", "    dead: f32[4, 4] = neg(a)\n    b: ")
    plan = Pipeline.parse("remove-dead-code,sink-waits").run(weft.parse(listing)).plan
    first, second = plan.steps
    assert first.actions
    assert second.actions
    assert plan.listing_after(2) == replay(weft.parse(listing), Plan.from_json(plan.to_json())).after.rstrip()
    forged = dataclasses.replace(plan, steps=(dataclasses.replace(first, actions=()), second))
    with pytest.raises(PlanError) as error:
        replay(weft.parse(listing), forged)
    assert str(error.value) == (
        "plan: step 'remove-dead-code' leads to another graph than it did when the plan was made\n"
        "    first different node here: dead: f32[4, 4] = neg(a)\n"
        "    in the plan: b: f32[4, 4] = relu(a)\n"
        "    1 nodes only here, 0 only in the plan\n"
        "make the plan again for this graph with weft.optimize"
    )


def test_a_plan_without_steps_is_for_its_own_graph_too():
    plan = Pipeline.parse("none").run(weft.parse(LISTING)).plan
    assert weft.listing(replay(weft.parse(LISTING), plan).module) == LISTING
    with pytest.raises(PlanError, match="it was made for another graph"):
        replay(weft.parse(LISTING.replace("relu(a)", "neg(a)")), plan)


def test_a_step_that_fails_in_any_other_way_is_an_error_of_the_plan():
    run = Pipeline.parse("fuse-all-gather-matmuls{chunks=2}").run(weft.parse(STREAMED))
    (step,) = run.plan.steps
    (action,) = step.actions
    assert isinstance(action, Stream)
    forged = dataclasses.replace(step, actions=(dataclasses.replace(action, chunks=0),))
    with pytest.raises(PlanError) as error:
        replay(weft.parse(STREAMED), dataclasses.replace(run.plan, steps=(forged,)))
    told = str(error.value).splitlines()
    assert told[0].startswith("plan: step 'fuse-all-gather-matmuls{chunks=2}' cannot be carried out: ")
    assert told[1] == "    action 'stream' names g: f32[8, 8] = all_gather(x, 2, 'dp')"


STREAMED = """group('dp', size=2)

def graph(x: f32[4, 8], w: f32[8, 8]):
    g: f32[8, 8] = all_gather(x, 2, 'dp')
    full: f32[8, 8] = wait(g)
    y: f32[8, 8] = mm(full, w)
    return [y]
"""


def test_a_plan_with_an_unknown_pass_is_refused():
    plan = Plan((Step("sink-weights"),))
    with pytest.raises(PipelineError) as error:
        replay(weft.parse(LISTING), plan)
    assert str(error.value) == "pipeline: no pass is called 'sink-weights'\ndid you mean 'sink-waits'?"


def test_a_plan_that_was_changed_by_hand_cannot_break_the_graph():
    run = Pipeline.parse("sink-waits").run(weft.parse(LISTING))
    (step,) = run.plan.steps
    for action, text in (
        (Move(("nobody",), "w", "before"), "plan: the graph has no node 'nobody'"),
        (
            Move(("w",), "w", "before"),
            "edit: w cannot be moved next to itself\n    w: f32[4, 4] = wait(ag)\n    ^\nchoose another anchor",
        ),
        (
            Loop("w"),
            "sink-waits: it has no action 'loop': the plan is for another pass\n"
            "    Loop(call='w', path=(), kind='loop')",
        ),
    ):
        forged = Plan((dataclasses.replace(step, actions=(action,)),), run.plan.facts)
        module = weft.parse(LISTING)
        with pytest.raises((PlanError, GraphError)) as error:
            replay(module, forged)
        assert str(error.value) == text
        assert weft.listing(module) == LISTING


def test_decisions_name_their_nodes_and_what_blocks_them():
    run = Pipeline.parse("sink-waits").run(weft.parse(LISTING))
    assert run.log[0].step.decisions == (
        Decision("sink-waits", Reason.APPLIED, "moved w down to its first use, r", ("w",), "r"),
    )


def test_a_dead_call_of_a_nested_graph_that_communicates_stays():
    text = """group('dp', size=2)

def graph(p: b8[()], x: f32[4]):
    def yes(a: f32[4]):
        ar: f32[4] = all_reduce(a, 'sum', 'dp')
        w: f32[4] = wait(ar)
        return (w,)
    yes = attribute('yes')
    def no(a: f32[4]):
        n: f32[4] = neg(a)
        return (n,)
    no = attribute('no')
    call: (f32[4],) = higher_order.cond(p, yes, no, (x,))
    r: f32[4] = relu(x)
    return [r]
"""
    run = Pipeline.parse("remove-dead-code").run(weft.parse(text))
    assert weft.listing(run.module) == text


def test_a_rewrite_leaves_out_the_passes_that_a_run_leaves_out():
    before = weft.parse("def graph(x: f32[4]):\n    unused = relu(x)\n    y = neg(x)\n    return [y]\n")
    pipeline = Pipeline.parse("remove-dead-code")
    kept = pipeline.without(["remove-dead-code"]).rewrite(before)
    assert (weft.listing(kept.module), kept.changed) == (weft.listing(before), False)
    assert pipeline.rewrite(before).changed
