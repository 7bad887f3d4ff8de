"""The compiled core, if it is built, gives the same integers as the files that it was built from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from weft import core

ROOT = Path(__file__).parents[2]
NUM_PROGRAMS = 60
RESULTS = '''
import sys
from dataclasses import replace
from random import Random

import weft
from weft.core import CoreFinder

if "pure" in sys.argv:
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, CoreFinder)]

from tests.property.strategies.programs import random_gradients, random_order, random_program, with_peer_copies
from weft.bounds.lower_bound import lower_bound
from weft.scheduling import scheduler
from weft.scheduling.search import search
from weft.simulation.program import OpKind
from weft.simulation.simulator import simulate

LAST = {"names": "output", "kinds": OpKind.NOTHING, "duration_ns": 0, "queue": -1, "waits_for": (), "drains": False}
LATER = {"allocates": (), "uses": (), "latency_ns": 0, "kernel": -1, "host_ns": 0, "sm_share_ppm": 0}


def with_output(program):
    """The program of a graph ends with its output."""
    ends = LAST | {key: value for key, value in LATER.items() if getattr(program, key)}
    ends |= {"preds": tuple(range(len(program.names)))}
    return replace(program, **{key: (*getattr(program, key), value) for key, value in ends.items()})


print("pure" if scheduler.__file__.endswith(".py") else "compiled")
for seed in range(int(sys.argv[1])):
    rng = Random(seed)
    program = random_gradients(rng) if seed % 3 == 0 else random_program(rng)
    program = with_peer_copies(rng, program) if seed % 4 == 0 else program
    timeline = simulate(program, random_order(rng, program))
    found = search(with_output(program), "fast")
    bound = lower_bound(program)
    print(timeline.compute, timeline.collectives, timeline.critical_path, timeline.memory)
    print(list(found.order), found.buckets, found.step_ns, found.peak_bytes, found.num_evaluations)
    print(bound.bound_ns, bound.name, bound.certificate)
'''


def results(*arguments: str) -> list[str]:
    command = [sys.executable, "-c", RESULTS, str(NUM_PROGRAMS), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(not core.is_built(), reason="no core is built; `make core` builds it")
def test_orders_times_and_bounds_of_random_programs_are_the_same_with_and_without_the_core():
    (made_by, *compiled), (run_by, *pure) = results(), results("pure")
    assert (made_by, run_by) == ("compiled", "pure")
    assert compiled == pure


def test_a_core_of_other_files_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(core, "DIGEST", tmp_path / "digest")
    assert not core.is_built()
    core.DIGEST.write_text(core.digest_of_sources())
    assert core.is_built()
    changed = tmp_path / "simulator.py"
    changed.write_text(core.source_of("weft.simulation.simulator").read_text() + "\n")
    plain = core.source_of
    monkeypatch.setattr(core, "source_of", lambda name: changed if name.endswith(".simulator") else plain(name))
    assert not core.is_built()


def test_the_core_serves_its_own_modules_only():
    finder = core.CoreFinder()
    assert finder.find_spec("weft.api") is None
    assert finder.find_spec("weft.scheduling.search") is None
