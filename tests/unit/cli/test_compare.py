"""`weft compare`: a profiled step beside its plan, or beside a simulated graph."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

import weft as library
from tests.unit.cli.conftest import LISTING
from tests.unit.cost.measured import write_trace
from tests.unit.cost.step_events import collective, kernel, mark
from weft.cost.calibration.step_trace import read_step_trace
from weft.plan.plan import Plan

DATA = Path(__file__).parents[2] / "data"
GATHER = collective("all_gather", 16, 10, 30)
"""64 bytes in all, as the listing's."""
STEP = [kernel(0, 20), GATHER, kernel(42, 8)]
Command = Callable[..., Result]


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    library.optimize(library.parse(LISTING), cluster="h100-8").plan.save(path)
    return path


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    path = tmp_path / "step.txt"
    path.write_text(LISTING)
    return path


def trace(folder: Path, *events: Any, name: str = "trace.json.gz") -> Path:
    return write_trace(folder / name, events)


def test_a_plan_keeps_when_its_collectives_run(plan: Path):
    evidence = Plan.load(plan).evidence
    assert evidence is not None
    assert evidence.prediction is not None
    (found,) = evidence.prediction.collectives
    assert (found.name, found.kind, found.group, found.num_bytes) == ("ag", "all_gather", "dp", 64)
    assert found.end_ns - found.start_ns > 0
    assert evidence.prediction.step_ns == evidence.step_ns


def test_a_step_that_ran_as_planned_gives_status_0(weft: Command, plan: Path, tmp_path: Path):
    done = weft("compare", trace(tmp_path, *STEP), plan, "--json")
    assert done.exit_code == 0
    data = json.loads(done.stdout)
    assert data["is_as_planned"] is True
    assert [(row["name"], row["measured_us"], row["exposed_us"]) for row in data["collectives"]] == [("ag", 30.0, 20.0)]


def test_another_collective_gives_status_1_and_the_first_difference(weft: Command, plan: Path, tmp_path: Path):
    done = weft("compare", trace(tmp_path, kernel(0, 20), collective("all_gather", 32, 10, 30)), plan)
    assert done.exit_code == 1
    assert "first difference" in done.stdout
    assert "all_gather of 64 B" in done.stdout


def test_a_graph_is_simulated_on_the_given_cluster(weft: Command, graph: Path, tmp_path: Path):
    path = trace(tmp_path, *STEP)
    fast, slow = (json.loads(weft("compare", path, graph, "--cluster", name, "--json").stdout) for name in CLUSTERS)
    assert fast["collectives"][0]["predicted_us"] < slow["collectives"][0]["predicted_us"]
    assert fast["collectives"][0]["measured_us"] == slow["collectives"][0]["measured_us"] == 30.0


CLUSTERS = ("h100-8", "loopback-2")


def test_the_text_and_the_json_go_to_a_file(weft: Command, plan: Path, tmp_path: Path):
    path = tmp_path / "out.json"
    assert weft("compare", trace(tmp_path, *STEP), plan, "--json", "-o", path).exit_code == 0
    assert json.loads(path.read_text())["num_planned"] == 1


def test_a_marked_step_can_be_chosen(weft: Command, plan: Path, tmp_path: Path):
    later = [kernel(100, 20), collective("all_gather", 16, 110, 35), kernel(150, 8)]
    path = trace(tmp_path, mark(3, 0, 90), mark(4, 90, 90), *STEP, *later)
    chosen = json.loads(weft("compare", path, plan, "--step", 3, "--json").stdout)
    last = json.loads(weft("compare", path, plan, "--json").stdout)
    assert (chosen["step"], chosen["collectives"][0]["measured_us"]) == (3, 30.0)
    assert (last["step"], last["collectives"][0]["measured_us"]) == (4, 35.0)
    wrong = weft("compare", path, plan, "--step", 7)
    assert wrong.exit_code == 2
    assert "3, 4" in wrong.stderr


def test_several_steps_without_marks_are_refused(weft: Command, plan: Path, tmp_path: Path):
    done = weft("compare", trace(tmp_path, *STEP, collective("all_gather", 16, 110, 30)), plan)
    assert done.exit_code == 1
    assert "prof.step()" in done.stderr


def test_the_trace_of_another_rank_separates_waiting(weft: Command, plan: Path, tmp_path: Path):
    other = trace(tmp_path, kernel(0, 20), collective("all_gather", 16, 10, 12), name="other.json")
    data = json.loads(weft("compare", trace(tmp_path, *STEP), plan, "--rank", other, "--json").stdout)
    assert (data["collectives"][0]["measured_us"], data["collectives"][0]["late_us"]) == (12.0, 18.0)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["missing.json", "plan.json"], 2),
        (["trace.json.gz", "missing.json"], 2),
        (["trace.json.gz", "step.txt"], 2),
        (["trace.json.gz", "plan.json", "step.txt"], 2),
        (["trace.json.gz", "plan.json", "--cluster", "h100-8"], 2),
        (["trace.json.gz", "plan.json", "-o", "plan.json"], 2),
        (["trace.json.gz"], 2),
        (["trace.json.gz", "bare.json"], 1),
        (["trace.json.gz", "trace.json"], 1),
        (["plan.json", "plan.json"], 1),
    ],
)
def test_unusable_arguments_are_refused(
    weft: Command,
    plan: Path,
    graph: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    status: int,
):
    trace(tmp_path, *STEP)
    trace(tmp_path, *STEP, name="trace.json")
    library.optimize(library.parse(LISTING)).plan.save(tmp_path / "bare.json")
    monkeypatch.chdir(tmp_path)
    done = weft("compare", *arguments)
    assert done.exit_code == status
    assert done.stderr


def test_real_kernels_of_nccl_are_lined_up_with_a_graph_of_the_same_collectives(weft: Command, tmp_path: Path):
    """The graph launches what the trace has; then its first two launches are swapped."""
    path = DATA / "loopback_rank1.json.gz"
    step = read_step_trace(path).step()
    sizes = {"0": 4, "1": 2}
    launches = [(each.kind.value, each.num_bytes or 0, sizes[each.group]) for each in step.collectives]
    graph, swapped = tmp_path / "as_traced.txt", tmp_path / "swapped.txt"
    graph.write_text(listing_of(launches))
    swapped.write_text(listing_of([launches[1], launches[0], *launches[2:]]))
    done = weft("compare", path, graph, "--cluster", "loopback-4", "--json")
    data = json.loads(done.stdout)
    assert (done.exit_code, data["num_planned"], data["num_ran"]) == (0, 78, 78)
    measured = {row["planned_position"]: row["measured_us"] for row in data["collectives"]}
    assert measured[0] == 283.585
    other = weft("compare", path, swapped, "--cluster", "loopback-4", "--json")
    assert other.exit_code == 1
    assert len(json.loads(other.stdout)["moved"]) == 1


def listing_of(launches: list[tuple[str, int, int]]) -> str:
    """Launches of f32 by kind, bytes of the full tensor and size of the group."""
    lines, arguments = list[str](), list[str]()
    for i, (kind, num_bytes, size) in enumerate(launches):
        full = num_bytes // 4
        given = full // size if kind == "all_gather" else full
        made = full // size if kind == "reduce_scatter" else full
        part = [made // size] * size
        middle = {
            "all_gather": str(size),
            "reduce_scatter": f"'sum', {size}",
            "all_reduce": "'sum'",
            "all_to_all": f"{part}, {part}",
            "broadcast": "0",
        }[kind]
        arguments.append(f"x{i}: f32[{given}]")
        lines.append(f"    c{i}: f32[{made}] = {kind}(x{i}, {middle}, 'g{size}')")
    lines += [f"    w{i}: f32[{line.split('[')[1].split(']')[0]}] = wait(c{i})" for i, line in enumerate(lines[:])]
    returned = ", ".join(f"w{i}" for i in range(len(launches)))
    head = "group('g4', size=4)\ngroup('g2', size=2)\n\n"
    return f"{head}def graph({', '.join(arguments)}):\n" + "\n".join(lines) + f"\n    return [{returned}]\n"


PRODUCTS = """group('dp', size=2)

def graph(x: bf16[8, 4], y: bf16[4, 6], z: bf16[2, 3, 4], t: bf16[2, 4, 3]):
    ag: bf16[16, 4] = all_gather(x, 2, 'dp')
    w: bf16[16, 4] = wait(ag)
    p: bf16[16, 6] = mm(w, y)
    q: bf16[8, 6] = mm(x, y)
    b: bf16[2, 3, 3] = bmm(z, t)
    return [p, q, b]
"""
BF16 = "c10::BFloat16"


def called(name: str, *shapes: list[int], ts: float = 5.0) -> Any:
    """An operator of the host, with the shapes of its arguments."""
    args = {"Input Dims": list(shapes), "Input type": [BF16] * len(shapes)}
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": ts, "dur": 1.0, "args": args}


def test_the_products_that_ran_are_compared_with_those_of_the_plan(weft: Command, tmp_path: Path):
    plan = tmp_path / "plan.json"
    library.optimize(library.parse(PRODUCTS), cluster="h100-8", pipeline="none").plan.save(plan)
    step = [mark(1, 0, 60), kernel(1, 20), collective("all_gather", 32, 10, 30), kernel(42, 8)]
    first, second = called("aten::mm", [16, 4], [4, 6]), called("aten::addmm", [6], [8, 4], [4, 6])
    batch, late = called("aten::bmm", [2, 3, 4], [2, 4, 3]), called("aten::mm", [9, 9], [9, 9], ts=70.0)

    def compared(*events: Any) -> Any:
        return json.loads(weft("compare", trace(tmp_path, *step, *events), plan, "--json").stdout)

    as_planned = compared(first, second, batch, late)  # the last one is after the step
    assert as_planned["are_products_as_planned"] is True
    assert [(p["dtype"], p["batch"], p["rows"], p["columns"], p["terms"]) for p in as_planned["products"]] == [
        ("bf16", 1, 8, 6, 4),
        ("bf16", 1, 16, 6, 4),
        ("bf16", 2, 3, 3, 4),
    ]
    other = compared(first, called("aten::mm", [4, 4], [4, 6]), called("aten::mm", [4, 4], [4, 6]), batch)
    assert other["are_products_as_planned"] is False
    counts = {(p["rows"], p["planned"], p["ran"]) for p in other["products"]}
    assert counts == {(4, 0, 2), (8, 1, 0), (16, 1, 1), (3, 1, 1)}
    text = weft("compare", trace(tmp_path, *step, first, batch), plan).stdout
    assert "bf16 8 x 6 x 4: planned 1, ran 0" in text
    unknown = compared()
    assert (unknown["products"], unknown["are_products_as_planned"]) == (None, None)
