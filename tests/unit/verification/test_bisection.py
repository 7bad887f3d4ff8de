"""Bisection: a pass with a planted fault is found among others and named, with the action that is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.fx import Graph
from typer.testing import CliRunner, Result

import weft
from weft.cli.main import app
from weft.errors import VerificationError
from weft.passes import base
from weft.passes.base import Numerics, Pass, all_passes
from weft.plan.context import Context
from weft.plan.decision import Reason
from weft.plan.plan import Erase, Move, Replace, Rewrite, Step

LISTING = """group('dp', size=2)

def graph(x: f32[4, 4], p: f32[2, 4]):
    v: f32[16] = view(x, [16])
    u: f32[4, 4] = view(v, [4, 4])
    a: f32[4, 4] = mm(u, u)
    ag: f32[4, 4] = all_gather(p, 2, 'dp')
    w: f32[4, 4] = wait(ag)
    b: f32[4, 4] = relu(a)
    c: f32[4, 4] = relu(w)
    d: f32[4, 4] = neg(b)
    r: f32[4, 4] = add(b, c)
    return [r, d]
"""


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """Passes that go wrong, which are forgotten behind each test."""
    known = dict(all_passes())
    define()
    yield
    base._PASSES.clear()
    base._PASSES.update(known)


def define() -> None:
    """Passes that go wrong, each in another way."""

    @dataclass(frozen=True)
    class LoseSigns(Pass):
        """Wrong: takes what is negated for the negative, beside two rewrites that are right."""

        numerics = Numerics.EXACT

        def plan(self, graph: Graph, context: Context) -> Step:
            right = Rewrite(("b_again = relu(a)",), "b", (("b", "b_again"),), ("b",))
            also = Rewrite(("c_again = relu(w)",), "c", (("c", "c_again"),), ("c",))
            wrong = Rewrite(("d_abs = abs(b_again)",), "d", (("d", "d_abs"),), ("d",))
            decision = self.decision(Reason.APPLIED, "signs are lost", "d")
            return self.step([right, wrong, also], [decision])

    @dataclass(frozen=True)
    class RoundMore(Pass):
        """Says that it is exact, and rounds."""

        numerics = Numerics.EXACT

        def plan(self, graph: Graph, context: Context) -> Step:
            calls = ("t = mul(b, 3.0)", "s = div(t, 3.0)", "d_rounded = neg(s)")
            return self.step([Rewrite(calls, "d", (("d", "d_rounded"),), ("d",))], [])

    @dataclass(frozen=True)
    class LoseWaits(Pass):
        """Wrong: takes away the wait."""

        numerics = Numerics.EXACT

        def plan(self, graph: Graph, context: Context) -> Step:
            return self.step([Move(("b",), "c", "after"), Replace("w", "ag"), Erase(("w",))], [])

    @dataclass(frozen=True)
    class StumbleOften(Pass):
        """Ends with an error that is none of Weft's."""

        numerics = Numerics.EXACT

        def plan(self, graph: Graph, context: Context) -> Step:
            raise KeyError("no such thing")


def found(pipeline: str, **options: str) -> weft.Fault:
    module = weft.parse(LISTING)
    fault = weft.bisect(module, pipeline=pipeline, **options)  # type: ignore[arg-type]
    assert fault is not None
    assert weft.listing(module) == LISTING
    return fault


@pytest.mark.parametrize("pipeline", ["auto", "exact", "clean,hoist-launches,sink-waits", ""])
@pytest.mark.parametrize("verify", ["values", "equivalence"])
def test_passes_that_are_right_have_no_fault(pipeline: str, verify: str):
    assert weft.bisect(weft.parse(LISTING), "h100-8", pipeline=pipeline, verify=verify) is None  # type: ignore[arg-type]


def test_a_pass_that_changes_values_is_named_with_the_action_that_does():
    fault = found("cancel-views,hoist-launches,lose-signs,sink-waits,stumble-often")
    assert (fault.spec, fault.position, fault.num_passes) == ("lose-signs", 3, 5)
    assert fault.what.startswith("rank 0 differs") or "differ" in fault.what
    assert isinstance(fault.action, Rewrite)
    assert fault.action.calls == ("d_abs = abs(b_again)",)
    assert (fault.action_position, fault.num_actions) == (2, 3)
    assert "d: f32[4, 4] = neg(b)" in fault.before
    assert "d_abs: f32[4, 4] = abs(b_again)" in fault.after
    assert str(fault).splitlines()[0].startswith("lose-signs, pass 3 of 5: ")
    assert str(fault).splitlines()[-1].startswith("    action 2 of 3: Rewrite(calls=('d_abs = abs(b_again)',)")


def test_what_a_fault_was_given_shows_the_fault_again():
    fault = found("cancel-views,hoist-launches,lose-signs")
    again = weft.bisect(weft.parse(fault.before), pipeline="lose-signs")
    assert again is not None
    assert (again.what, again.action) == (fault.what, fault.action)


def test_a_proof_finds_it_without_data():
    fault = found("cancel-views,lose-signs,sink-waits", verify="equivalence")
    assert (fault.spec, fault.position) == ("lose-signs", 2)
    assert "not proved equal: outputs[1]" in fault.what


def test_a_pass_that_is_not_as_exact_as_it_says_is_at_fault():
    fault = found("round-more")
    assert (fault.spec, fault.action_position) == ("round-more", 1)


def test_a_pass_that_breaks_a_check_is_named_with_the_action_that_does():
    fault = found("sink-waits,lose-waits,hoist-launches")
    assert (fault.spec, fault.position) == ("lose-waits", 2)
    assert fault.what.startswith("graph: ag is never waited for and is not an output of the graph\n")
    assert fault.action == Erase(("w",))
    assert (fault.action_position, fault.num_actions) == (3, 3)


def test_a_pass_that_ends_with_any_error_is_named():
    fault = found("remove-noops,stumble-often")
    assert (fault.spec, fault.position, fault.action) == ("stumble-often", 2, None)
    assert fault.what == "it raised KeyError: 'no such thing'"


def test_a_wrong_witness_is_refused():
    with pytest.raises(
        VerificationError, match="bisect: no witness is called 'structure'\nuse 'values' or 'equivalence'"
    ):
        weft.bisect(weft.parse(LISTING), verify="structure")  # type: ignore[arg-type]


# On the command line.


def run(path: Path, *arguments: str) -> Result:
    path.write_text(LISTING)
    return CliRunner().invoke(app, ["optimize", str(path), *arguments], catch_exceptions=False)


def test_the_command_names_the_pass_and_shows_what_it_was_given(tmp_path: Path):
    done = run(tmp_path / "graph.txt", "--bisect", "--pipeline", "clean,lose-signs,auto")
    assert done.exit_code == 1
    assert done.stdout.startswith("lose-signs, pass 7 of ")
    assert "    action 2 of 3: Rewrite(" in done.stdout
    assert "the input of that pass:\ngroup('dp', size=2)\n\ndef graph(" in done.stdout


def test_the_command_tells_that_all_is_well(tmp_path: Path):
    done = run(tmp_path / "graph.txt", "--bisect", "--verify", "equivalence")
    assert (done.exit_code, done.stdout) == (0, "no pass changes values or breaks a check\n")


def test_the_command_tells_a_fault_as_json(tmp_path: Path):
    done = run(tmp_path / "graph.txt", "--bisect", "--json", "--pipeline", "lose-signs")
    assert done.exit_code == 1
    fault = json.loads(done.stdout)["fault"]
    assert (fault["spec"], fault["action"]["calls"]) == ("lose-signs", ["d_abs = abs(b_again)"])
    assert json.loads(run(tmp_path / "graph.txt", "--bisect", "--json").stdout) == {"fault": None}


def test_bisect_writes_no_result(tmp_path: Path):
    done = run(tmp_path / "graph.txt", "--bisect", "-o", str(tmp_path / "out.txt"))
    assert done.exit_code == 2
    assert done.stderr == "optimize: --bisect writes no result, so -o has no effect\nleave -o off\n"


def test_listings_behind_passes_go_to_stderr(tmp_path: Path):
    done = run(tmp_path / "graph.txt", "--pipeline", "clean,sink-waits", "--print-after", "all")
    heads = [line for line in done.stderr.splitlines() if line.startswith("# after pass ")]
    assert [head.partition(" (changed, ")[0] for head in heads] == [
        "# after pass 3 of 7: cancel-views",
        "# after pass 7 of 7: sink-waits",
    ]
    assert done.stdout == done.stderr[done.stderr.index(heads[1]) + len(heads[1]) + 1 :][: len(done.stdout)]
    one = run(tmp_path / "graph.txt", "--pipeline", "clean,sink-waits", "--print-after", "remove-noops")
    (head,) = [line for line in one.stderr.splitlines() if line.startswith("# after pass ")]
    assert head.startswith("# after pass 1 of 7: remove-noops (unchanged, ")
    assert f"{head}\n{LISTING}" in one.stderr


def test_a_pass_that_the_pipeline_has_not_is_refused(tmp_path: Path):
    done = run(tmp_path / "graph.txt", "--pipeline", "clean", "--print-after", "cancel-vews")
    assert (done.exit_code, done.stdout) == (2, "")
    what = "--print-after: no pass of the pipeline is called 'cancel-vews'\ndid you mean 'cancel-views'?\n"
    assert done.stderr == what
