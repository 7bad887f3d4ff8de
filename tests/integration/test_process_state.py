"""Calling Weft leaves the process as it was, and captures in several threads take turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.integration.worlds import PYTHONPATH, REPOSITORY

SNAPSHOT = """
import logging, os, random, signal, sys, warnings
import numpy, torch, torch.distributed as dist
import weft

def state():
    return {
        "environment": dict(os.environ),
        "excepthook": id(sys.excepthook),
        "random": hash(random.getstate()),
        "numpy": hash(numpy.random.get_state()[1].tobytes()),
        "torch": hash(torch.get_rng_state().numpy().tobytes()),
        "filters": [str(each) for each in warnings.filters],
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "signals": {number: str(signal.getsignal(number)) for number in signal.valid_signals()},
        "levels": {name: logging.getLogger(name).level for name in ("", "torch", "weft", "torch.distributed")},
        "directory": os.getcwd(),
        "path": list(sys.path),
        "world": dist.is_initialized(),
        "recursion": sys.getrecursionlimit(),
    }

class Watched:
    def __call__(self, name, call):
        random.seed(7); numpy.random.seed(7); torch.manual_seed(7)
        before = state()
        made = call()
        after = state()
        changed = [key for key in before if before[key] != after[key]]
        assert not changed, f"{name} changed {changed}: " + str([(before[key], after[key]) for key in changed])[:3000]
        return made

watched = Watched()
"""
CALLS = """
load = lambda **more: weft.zoo.load("llama-debug", parallel="fsdp", ranks=4, layers=1, **more)
gm = watched("zoo.load", load)
watched("zoo.load again", load)
model, _ = weft.zoo.build("llama-debug", layers=1)
watched("capture", lambda: weft.capture(lambda x: x * 2, [torch.ones(4)]))
result = watched("optimize", lambda: weft.optimize(gm, cluster="h100-8"))
text = watched("listing", lambda: weft.listing(gm))
watched("parse", lambda: weft.parse(text))
watched("apply", lambda: weft.apply(gm, result.plan))
watched("simulate", lambda: weft.simulate(gm, "h100-8"))
watched("the report", lambda: str(result.report))
watched("the JSON", lambda: result.report.to_json())
watched("the page", lambda: result.report.save_html(folder + "/page.html"))
watched("the trace", lambda: result.report.save_trace(folder + "/trace.json"))
watched("the plan", lambda: weft.Plan.from_json(result.plan.to_json()))
watched("a cluster", lambda: weft.Cluster.load("h100-8"))
watched("optimize with values", lambda: weft.optimize(gm, pipeline="sink-waits", verify="values"))
watched("optimize with a proof", lambda: weft.optimize(gm, pipeline="sink-waits", verify="equivalence"))
watched("verify", lambda: weft.verify(gm, result.module))
watched("bisect", lambda: weft.bisect(gm, pipeline="sink-waits"))
watched("run_report", lambda: weft.run_report())
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TORCHINDUCTOR_CACHE_DIR"}
    environment |= {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_every_function_leaves_the_process_as_it_was(tmp_path: Path):
    done = run(f"{SNAPSHOT}\nfolder = {json.dumps(str(tmp_path))}\n{CALLS}")
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
def test_an_error_after_a_capture_is_shown_by_the_hook_of_the_caller():
    code = (
        "import weft\nfor _ in range(3):\n    weft.zoo.load('llama-debug', ranks=2, layers=1)\nraise ValueError('mine')"
    )
    done = run(code)
    assert done.stderr.rstrip().splitlines()[-1] == "ValueError: mine"
    assert "rank0" not in done.stderr


@pytest.mark.slow
def test_captures_in_several_threads_are_those_of_one(tmp_path: Path):
    models: list[dict[str, Any]] = [
        {"parallel": "fsdp", "ranks": 4},
        {"parallel": "ddp", "ranks": 8},
        {"parallel": "tp", "ranks": 2},
    ]
    expected = [weft.listing(weft.zoo.load("llama-debug", layers=1, **model)) for model in models]
    found: dict[int, str] = {}
    faults: list[BaseException] = []

    def load(number: int) -> None:
        try:
            found[number] = weft.listing(weft.zoo.load("llama-debug", layers=1, **models[number]))
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=load, args=(number,)) for number in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
    assert faults == []
    assert [found[number] for number in range(len(models))] == expected


@pytest.mark.parametrize(
    "call",
    [
        lambda: weft.optimize(weft.parse("def graph(x: f32[4]):\n    return [x]\n"), cluster="no-such"),
        lambda: weft.capture(lambda x: x.tolist(), [torch.ones(4)], mesh={"dp": 2}),
    ],
    ids=["optimize", "capture"],
)
def test_an_error_leaves_the_process_as_it_was_too(call: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    hook, before = sys.excepthook, dict(os.environ)
    with pytest.raises(weft.WeftError):
        call()
    assert (sys.excepthook, dict(os.environ)) == (hook, before)
