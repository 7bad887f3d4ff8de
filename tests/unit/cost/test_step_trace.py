"""Steps in traces of torch.profiler: their collectives, stalls and marks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.cost.measured import write_trace
from tests.unit.cost.step_events import bare, collective, issue, kernel, mark
from weft.cost.calibration.measured_step import MeasuredStep
from weft.cost.calibration.samples import MeasurementError
from weft.cost.calibration.stalls import attribute_stalls
from weft.cost.calibration.step_trace import read_step_trace
from weft.graph.ops import Kind

DATA = Path(__file__).parents[2] / "data"
GROUP = {"backend": "gloo", "rank": 1, "pg_config": [{"pg_name": "0", "ranks": [0, 1]}]}


def step_of(path: Path, *events: Any, **beside: Any) -> MeasuredStep:
    return read_step_trace(write_trace(path / "trace.json", events, **beside)).step()


def test_a_stall_belongs_to_the_collectives_that_end_in_it_in_order_of_their_ends():
    assert attribute_stalls([(10, 40)], [(0, 20), (5, 30), (35, 90)]) == [10, 10, 0]


def test_the_part_of_a_stall_without_a_running_collective_is_not_exposed():
    assert attribute_stalls([(10, 40)], [(25, 30)]) == [5]


def test_a_collective_that_ends_while_compute_runs_is_not_exposed():
    assert attribute_stalls([(10, 20), (40, 50)], [(0, 30)]) == [0]


def test_a_stall_up_to_the_end_of_a_collective_is_exposed_and_the_rest_is_a_gap(tmp_path: Path):
    step = step_of(tmp_path, kernel(0, 10), collective("all_gather", 64, 5, 25), kernel(32, 8))
    (found,) = step.collectives
    assert (found.kind, found.num_bytes, found.start_ns, found.end_ns) == (Kind.ALL_GATHER, 256, 5000, 30000)
    assert (found.exposed_ns, step.compute_ns, step.step_ns, step.host_late_ns) == (20_000, 18_000, 40_000, 0)


def test_idle_time_until_the_host_issues_the_next_kernel_is_not_exposed(tmp_path: Path):
    events = [kernel(0, 10), collective("all_gather", 64, 5, 25), issue(26, 3), kernel(32, 8, correlation=3)]
    step = step_of(tmp_path, *events)
    assert (step.host_late_ns, step.exposed_ns) == (16_000, 4_000)


def test_a_kernel_on_another_stream_does_not_end_a_stall(tmp_path: Path):
    events = [kernel(0, 10), collective("all_gather", 64, 5, 25), kernel(15, 2, stream=9), kernel(32, 8)]
    step = step_of(tmp_path, *events)
    assert (step.exposed_ns, step.compute_ns) == (20_000, 18_000)
    assert len(step.notes) == 1


def test_a_kernel_belongs_to_the_step_in_which_the_host_issued_it(tmp_path: Path):
    events = [
        mark(4, 0, 100),
        mark(5, 100, 100),
        issue(10, 1),
        collective("all_gather", 64, 150, 5, correlation=1),
        issue(110, 2),
        collective("all_reduce", 64, 250, 5, correlation=2),
    ]
    trace = read_step_trace(write_trace(tmp_path / "trace.json", events))
    assert trace.numbers == (4, 5)
    assert [each.kind for each in trace.step(4).collectives] == [Kind.ALL_GATHER]
    assert [each.kind for each in trace.step().collectives] == [Kind.ALL_REDUCE]
    assert trace.step().number == 5


def test_collectives_are_in_the_order_of_the_host_whatever_their_streams_do(tmp_path: Path):
    events = [issue(1, 1), collective("all_gather", 64, 90, 5, correlation=1)]
    events += [issue(2, 2), collective("all_reduce", 64, 30, 5, correlation=2)]
    step = step_of(tmp_path, *events)
    assert [each.kind for each in step.collectives] == [Kind.ALL_GATHER, Kind.ALL_REDUCE]
    assert step.has_launch_order


def test_one_issue_of_a_cuda_graph_does_not_order_its_collectives(tmp_path: Path):
    events = [issue(1, 1), collective("all_gather", 64, 90, 5, correlation=1)]
    events += [collective("all_reduce", 64, 30, 5, correlation=1)]
    assert not step_of(tmp_path, *events).has_launch_order


def test_kernels_without_arguments_give_their_kind_and_a_note(tmp_path: Path):
    step = step_of(tmp_path, bare("AllGather", 0, 5), bare("ReduceScatter_Sum_bf16", 9, 5), bare("SendRecv", 20, 5))
    assert [(each.kind, each.group, each.num_bytes) for each in step.collectives] == [
        (Kind.ALL_GATHER, "", None),
        (Kind.REDUCE_SCATTER, "", None),
    ]
    assert len(step.notes) == 2  # sizes are unknown; the transfer is left out


def test_groups_have_their_ranks_and_mesh_axis(tmp_path: Path):
    named = collective("all_gather", 64, 0, 5)
    named["args"]["Process Group Description"] = "mesh_tp"
    step = step_of(tmp_path, named)
    (group,) = step.groups
    assert (group.name, group.num_ranks, group.ranks, group.axis) == ("0", 2, (0, 1), "tp")


@pytest.mark.parametrize(
    "wrong",
    [
        {"ts": "soon"},
        {"ts": float("nan")},
        {"dur": -1},
        {"dur": 10**400},
        {"args": {"Collective name": "allreduce", "dtype": "BFloat16"}},
    ],
)
def test_a_malformed_collective_is_a_fault(tmp_path: Path, wrong: dict[str, Any]):
    with pytest.raises(MeasurementError, match=r"trace.json:\d+: "):
        step_of(tmp_path, kernel(0, 5), collective("all_gather", 64, 0, 5) | wrong)


def test_other_malformed_events_are_ignored(tmp_path: Path):
    odd = [kernel(0, 5) | {"dur": "long"}, mark(1, 0, 5) | {"name": 3}, issue(0, 1) | {"args": []}]
    assert step_of(tmp_path, *odd, collective("all_gather", 64, 0, 5)).compute_ns == 0


def test_a_trace_without_collectives_is_refused(tmp_path: Path):
    with pytest.raises(MeasurementError):
        step_of(tmp_path, kernel(0, 5))


def test_marks_without_collectives_are_refused(tmp_path: Path):
    with pytest.raises(MeasurementError, match="ProfilerStep#"):
        step_of(tmp_path, mark(1, 0, 10), collective("all_gather", 64, 20, 5))


def test_real_kernels_of_nccl_are_read():
    step = read_step_trace(DATA / "loopback_rank1.json.gz").step()
    assert len(step.collectives) == 78
    assert [(group.num_ranks, group.ranks) for group in step.groups] == [(4, (0, 1, 2, 3)), (2, (0, 1))]
    first = step.collectives[0]
    assert (first.kind, first.num_bytes, first.end_ns) == (Kind.ALL_REDUCE, 4096, first.start_ns + 283_585)
    assert first.exposed_ns == 283_585  # no compute runs beside it


def operator(name: str, ts: float, us: float, dims: list[Any], *concrete: str, dtype: str = "float") -> dict[str, Any]:
    args = {"Input Dims": [dims], "Input type": [dtype], "Concrete Inputs": ["", *concrete]}
    return {"ph": "X", "cat": "cpu_op", "name": name, "tid": 1, "ts": ts, "dur": us, "args": args}


def gloo(name: str, ts: float, us: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": f"gloo:{name}", "tid": 2, "ts": ts, "dur": us}


def test_operators_of_the_host_stand_for_kernels_if_there_is_no_device(tmp_path: Path):
    step = step_of(
        tmp_path,
        operator("_c10d_functional::all_gather_into_tensor", 0, 4, [8, 2], "2"),
        operator("c10d::allgather_into_tensor_coalesced_", 1, 2, [[8, 2]]),
        operator("aten::mm", 5, 10, [8, 8]),
        operator("_c10d_functional::wait_tensor", 16, 20, [16, 2]),
        operator("aten::relu", 20, 5, [16, 2]),  # inside of the wait
        operator("aten::relu", 40, 10, [16, 2]),
        gloo("all_gather", 2, 33),
        distributedInfo=GROUP,
    )
    (found,) = step.collectives
    assert (found.kind, found.group, found.num_bytes) == (Kind.ALL_GATHER, "0", 128)
    assert (found.launched_ns, found.start_ns, found.end_ns) == (0, 2000, 35_000)
    assert (found.exposed_ns, step.compute_ns, step.step_ns) == (19_000, 20_000, 50_000)


@pytest.mark.parametrize("sizes", [(1, 1), (2,)], ids=["one for each", "one for all"])
def test_a_list_of_tensors_is_one_collective_however_gloo_runs_it(tmp_path: Path, sizes: tuple[int, ...]):
    launch = operator("_c10d_functional::all_reduce_coalesced", 0, 4, [[4], [4]], dtype="TensorList")
    wait = operator("_c10d_functional::wait_tensor", 10, 10, [4])
    us = 10 / len(sizes)
    ran = [gloo("all_reduce", 2 + i * us, us) | {"args": {"Input Dims": [[4]] * size}} for i, size in enumerate(sizes)]
    step = step_of(tmp_path, launch, wait, *ran, distributedInfo=GROUP)
    (found,) = step.collectives
    assert (found.num_bytes, found.start_ns, found.end_ns) == (None, 2000, 12_000)


def test_times_are_unknown_if_gloo_ran_another_number_of_collectives(tmp_path: Path):
    launch = operator("_c10d_functional::all_reduce", 0, 4, [4])
    step = step_of(tmp_path, launch, distributedInfo=GROUP)
    assert [each.end_ns for each in step.collectives] == [None]
    assert len(step.notes) == 1
