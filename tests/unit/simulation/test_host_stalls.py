"""Reads of device data by the host: where it waits, for how long, and reads of memory that is on the host already."""

from __future__ import annotations

from pathlib import Path

import weft
from weft import zoo
from weft.cost.cluster import Cluster
from weft.frontends.printed.runnable import read_runnable
from weft.graph.groups import read_groups
from weft.graph.host import is_read_on_host
from weft.simulation.build import program_of
from weft.simulation.host_stalls import host_stalls, notes_on_stalls
from weft.simulation.simulator import run

DATA = Path(__file__).parents[2] / "data"


def test_a_copy_that_blocks_is_the_only_wait_for_its_numbers():
    """The numbers are read from memory of the host, and the asynchronous copy before it does not wait."""
    module = read_runnable(DATA / "experts_forward.txt")
    assert [node.name for node in module.graph.nodes if is_read_on_host(node)] == ["device_put_1"]


def test_a_size_that_is_given_is_not_counted_on_the_host():
    listing = "def graph(x: i64[4]):\n    r: i64[8] = repeat_interleave(x, output_size=8)\n    return [r]\n"
    assert not any(map(is_read_on_host, weft.parse(listing).graph.nodes))


def test_the_host_waits_at_the_reads_of_its_sizes():
    module = zoo.load("dropless-debug", "ep-fsdp", mesh={"dp": 2, "ep": 2}, layers=1)
    weft.simulate(module, "h100-8x8", sizes="balanced")
    cluster = Cluster.load("h100-8x8").running("eager")
    program = program_of(module, read_groups(module), cluster)
    stalls = host_stalls(program)
    assert stalls
    assert {stall.name.rstrip("_0123456789") for stall in stalls} == {"_local_scalar_dense"}
    assert sum(stall.stall_ns for stall in stalls) < run(program).step_ns
    (note,) = notes_on_stalls(program)
    assert note.startswith("the host waits ")
    assert "_local_scalar_dense" in note


def test_a_prediction_names_the_stalls_and_without_host_times_there_are_none():
    module = zoo.load("dropless-debug", "ep-fsdp", mesh={"dp": 2, "ep": 2}, layers=1)
    eager, plain = (weft.predict(module, "h100-8x8", execution=how, sizes="balanced") for how in ("eager", None))
    assert any(note.startswith("the host waits ") for note in eager.notes)
    assert not any(note.startswith("the host waits ") for note in plain.notes)
