"""`weft.predict` and `weft predict`."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from math import log, sqrt
from typing import Any

import pytest
from torch.fx import GraphModule
from typer.testing import CliRunner, Result

import weft
from tests.tiers import quick_first
from weft.cli.main import app
from weft.graph.about import ABOUT_KEY, TOKENS_KEY
from weft.graph.dag import Dag
from weft.prediction.prediction import NO_OPTIMIZER, NO_TOKENS, waiting_share
from weft.prediction.step_kind import parallelism
from weft.prediction.work import flops_of_step

SOURCE = "zoo:llama-debug/fsdp?ranks=8"


@cache
def step(parallel: str = "fsdp", **options: Any) -> GraphModule:
    return weft.zoo.load("llama-debug", parallel, ranks=8, part="step", num_kv_heads=8, **options)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)


def test_figures_follow_from_the_step():
    found = weft.predict(step(), "h100-1x8", execution="compiled")
    assert found.step_us == pytest.approx(found.simulated_us * (1 + 0.01 * sqrt(2 * log(8))))
    assert found.tokens_per_second_per_gpu == pytest.approx(32 / found.step_us * 1e6)
    assert found.num_ranks == 8
    assert found.mfu is not None
    assert found.hfu is not None
    assert 0 < found.mfu <= found.hfu < 1
    assert (found.kind.parallel, found.kind.execution, found.kind.device) == ("fsdp", "compiled", "H100 SXM")
    assert found.notes == ()


def test_the_slowest_of_more_ranks_is_later_and_one_rank_waits_for_nobody():
    assert waiting_share(1, 0.01) == 0
    assert waiting_share(8, 0.01) < waiting_share(128, 0.01) == pytest.approx(0.0312, abs=1e-4)
    assert weft.predict(step(), "h100-1x8", straggler_sigma=0.0).waiting_us == 0


def test_eager_takes_longer_than_compiled():
    times = [weft.predict(step(), "h100-1x8", execution=how).step_us for how in ("compiled", "eager")]
    assert times[0] < times[1]


@pytest.mark.slow
def test_eager_selective_checkpointing_keeps_what_backward_never_reads():
    module = step(checkpoint="selective", sequence=4096)
    unread = module.meta["weft.about"]["saved_unread_bytes"]
    peaks = [
        weft.predict(module, "h100-1x8", runtime=runtime, execution="eager").memory.allocated_bytes
        for runtime in ("fsdp2", "simple-fsdp")  # the latter is one graph, and its partitioner drops such values
    ]
    assert unread > 0
    assert peaks[0] - peaks[1] == unread


def test_recomputation_counts_for_the_hardware_only():
    plain, again = flops_of_step([step()]), flops_of_step([step(checkpoint="full")])
    assert plain is not None
    assert again is not None
    assert plain.model == again.model
    assert plain.hardware < again.hardware


@pytest.mark.parametrize("parallel", quick_first(["tp", "fsdp", "ddp", "fsdp-tp"]))
def test_the_collectives_tell_the_parallelism(parallel: str):
    assert parallelism([Dag(step(parallel).graph)]) == parallel


def test_a_graph_without_optimizer_or_tokens_says_so():
    joint = weft.zoo.load("llama-debug", "fsdp", ranks=8)
    del joint.meta[ABOUT_KEY][TOKENS_KEY]
    found = weft.predict(joint, "h100-1x8")
    assert found.notes == (NO_OPTIMIZER, NO_TOKENS)
    assert found.tokens_per_second_per_gpu is None
    assert weft.predict(joint, "h100-1x8", tokens_per_step=256).tokens_per_second_per_gpu is not None


def test_the_command_prints_each_figure_and_the_json_holds_raw_numbers():
    done = run("predict", SOURCE, "--cluster", "h100-1x8", "--as", "fsdp2", "--compiled")
    names = [line.strip().split("  ")[0] for line in done.stdout.splitlines()]
    assert {"tokens/s per GPU", "step", "MFU", "HFU", "exposed communication", "peak reserved"} <= {*names}
    data = json.loads(run("predict", SOURCE, "--cluster", "h100-1x8", "--json").stdout)
    assert data["memory"]["parts"]["parameters"] > 0
    memory = data["memory"]
    assert {"CUDA context", "NCCL buffers"} == {*memory["outside"]}
    assert {"outside of the allocator", "CUDA context", "NCCL buffers"} <= {*names}
    assert memory["needed_bytes"] == memory["reserved_bytes"] + sum(memory["outside"].values())
    assert data["fits"] is True
    assert data["notes"] == []  # a model of the zoo is predicted with its optimizer


def test_two_ways_of_execution_exclude_each_other():
    done = run("predict", SOURCE, "--cluster", "h100-1x8", "--eager", "--blocks")
    assert (done.exit_code, done.stdout) == (2, "")


def test_the_first_line_says_that_the_step_does_not_fit(tmp_path: Any):
    described: Callable[[str], Any] = tmp_path.joinpath
    listing = described("graph.txt")
    listing.write_text("def graph(x: bf16[262144, 262144]):\n    a = relu(x)\n    return [a]\n")
    done = run("predict", listing, "--cluster", "h100-1x8")
    assert done.stdout.splitlines()[0] == "does not fit: needs 257 GiB, the device has 80 GB"
