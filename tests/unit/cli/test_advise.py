"""`weft advise`: its table, its JSON, its page, and the input that it refuses."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import Result

from tests.unit.advice import own_models
from tests.unit.advice.made_advice import FOUND
from weft.advice import advisor
from weft.advice.evaluation import PlannedLayout, Probe, Question
from weft.cli import usage
from weft.cost.cluster import Cluster
from weft.frontends.options import split_options

ARGUMENTS = ("advise", "zoo:llama-debug?layers=1", "--cluster", "h100-2x8", "--batch-tokens", "1K", "--workers", "1")
STEPS = {"DDP 16": 120.0, "FSDP 16": 110.0, "HSDP 2 x 8": 100.0}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures by layout in place of captured graphs; the fastest need the most memory."""

    def step_us(question: Question) -> float:
        longer = 50 if question.layout.checkpoint != "none" else 5 if question.layout.reshard == "always" else 0
        return STEPS.get(question.layout.shape, 1000.0) + longer

    def plan(question: Question) -> PlannedLayout:
        step = step_us(question)
        return replace(
            FOUND,
            microbatch=1,
            step_us=step,
            exposed_us=step - FOUND.compute_us,
            exposed_by_group={"shard": step - FOUND.compute_us},
            peak_bytes=int(1e12 / step),
            runtime_us=step * 1.25,
        )

    monkeypatch.setattr(advisor, "_with_microbatches", lambda questions, *_: questions)
    monkeypatch.setattr(advisor, "probe", lambda question: Probe(1, step_us(question), 80.0, "compute", 1 << 30))
    monkeypatch.setattr(advisor, "plan_layout", plan)


@pytest.mark.usefixtures("made")
def test_the_table_names_the_best_the_second_the_baseline_and_the_lines_to_paste(weft: Callable[..., Result]):
    result = weft(*ARGUMENTS)
    assert result.exit_code == 0
    text = result.stdout
    first = next(line for line in text.splitlines() if line.startswith("1 "))
    assert first.split()[1:7] == ["HSDP", "2", "x", "8", "never", "none"]
    assert (
        "HSDP 2 x 8, reshard always, no checkpointing takes 5.0 % longer: it has 5.00 us more exposed communication"
        in text
    )
    assert "without Weft, the fastest of these is HSDP 2 x 8" in text
    assert "FSDP2 takes 125 us; the first row is 20.0 % shorter" in text
    assert "--parallelism.data_parallel_replicate_degree=2\n" in text
    assert "--parallelism.data_parallel_shard_degree=8\n" in text
    assert 'mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))' in text


@pytest.mark.usefixtures("made")
def test_the_lines_to_paste_name_the_file_of_a_cluster(
    weft: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    weft("cluster", "new", "--from", "h100-2x8", "--nic", "200Gbit/s", "-o", "ours.toml")
    arguments = ["ours.toml" if each == "h100-2x8" else each for each in ARGUMENTS]
    text = weft(*arguments, "-o", "advice.html").stdout
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    pasted = re.search(r"options=(\{.*\})", text)
    assert pasted is not None
    assert split_options(ast.literal_eval(pasted[1]))[0].description == Cluster.load(tmp_path / "ours.toml")
    assert str(tmp_path / "ours.toml") in (tmp_path / "advice.html").read_text()


@pytest.mark.usefixtures("made")
def test_json_has_raw_numbers_and_marks_the_front(weft: Callable[..., Result]):
    data = json.loads(weft(*ARGUMENTS, "--json").stdout)
    best = data["ranked"][0]
    assert best["found"]["step_us"] == 100.0
    assert best["layout"]["mesh"] == [["replicate", 2], ["shard", 8]]
    assert all(each["on_front"] for each in data["ranked"][:2])
    assert data["num_tokens"] == 1024


@pytest.mark.usefixtures("made")
def test_the_page_has_the_table_and_a_point_for_each_layout(weft: Callable[..., Result], tmp_path: Path):
    page = tmp_path / "advice.html"
    result = weft(*ARGUMENTS, "-o", page)
    assert result.exit_code == 0
    text = page.read_text()
    num_rows = sum(line[:1].isdigit() for line in result.stdout.splitlines() if "GPU-h" in line)
    shapes = text.count('<circle cx="90"')
    assert text.count("<circle") - shapes == num_rows
    assert "<script" not in text
    assert "HSDP 2 x 8" in text


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("zoo:llama-debug", "--batch-tokens", "many"), "'many' is not a number of tokens"),
        (("zoo:llama-debug", "--batch-tokens", "0"), "'0' is not a number of tokens"),
        (("llama-debug", "--batch-tokens", "4K"), "write zoo:llama-debug"),
        (("zoo:llama-debag", "--batch-tokens", "4K"), "no model is called 'llama-debag'"),
        (("zoo:llama-debug/fsdp", "--batch-tokens", "4K"), "the advice chooses the layout"),
        (("zoo:llama-debug?ranks=8", "--batch-tokens", "4K"), "the advice chooses the layout"),
        (("zoo:llama-debug?part=joint", "--batch-tokens", "4K"), "part has no effect here"),
        (("zoo:llama-debug", "--batch-tokens", "4K", "--memory-limit", "much"), "'much' is not a size"),
    ],
)
def test_bad_input_is_a_message(weft: Callable[..., Result], arguments: tuple[str, ...], found: str):
    result = weft("advise", *arguments, "--cluster", "h100-2x8")
    assert result.exit_code == 2
    assert found in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_small_model_is_captured_planned_and_ranked(weft: Callable[..., Result]):
    few = [{"h100-2x8": "h100-1x2", "1K": "128"}.get(each, each) for each in ARGUMENTS]
    result = weft(*few)
    assert result.exit_code == 0
    assert result.stdout.startswith("zoo:llama-debug?num_layers=1 on h100-1x2: 2 ranks, 74.5 GiB for each\n")
    assert "takes" in result.stdout
    assert "--parallelism.data_parallel_shard_degree=" in result.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_dask_gives_the_same_table_though_a_worker_is_killed(
    weft: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
):
    distributed = pytest.importorskip("distributed", reason="dask.distributed is not installed")
    model = f"{own_models.__name__}:shallow_decoder"
    arguments = ("advise", model, "--cluster", "h100-1x2", "--batch-tokens", "128")
    options = {"n_workers": 2, "threads_per_worker": 1, "host": "127.0.0.1", "dashboard_address": None}
    killed: list[int] = []
    with distributed.LocalCluster(**options) as local:

        def kill_one(text: str, _done: int, _total: int) -> None:
            if text.startswith("probed") and not killed:
                with distributed.Client(local, set_as_default=False) as client:
                    killed.append(min(client.run(os.getpid).values()))
                os.kill(killed[0], signal.SIGKILL)

        monkeypatch.setattr(usage, "progress_bar", lambda _: contextlib.nullcontext(kill_one))
        spread = weft(*arguments, "--dask", local.scheduler_address)
    assert killed
    assert spread.exit_code == 0, spread.output
    assert spread.stdout == weft(*arguments, "--workers", "1").stdout
