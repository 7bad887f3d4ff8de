"""Mutated logs, runnables, listings and archives: each gives a graph or an error of Weft's own, and nothing else.

Nothing in them is run: a file that hostile code would make never appears, and an audit hook sees no process started, no
file written and no address looked up. Nothing hangs: a case may take a number of seconds of processor time. Memory is
bounded. Seeds are the names of the tests, and an assertion names the seed that failed.

`make test` runs a few hundred seeds of each kind; `make test-full` (WEFT_FUZZ=full) runs many more.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import json
import os
import resource
import signal
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import weft
from tests.property.mutations import mutate, mutate_bytes, untyped
from tests.property.strategies.listings import random_listing
from weft.compat import register_operators
from weft.errors import WeftError
from weft.frontends import archive
from weft.frontends.printed.runnable import read_runnable
from weft.frontends.trace_log import LoggedGraph, read_log

FULL = os.environ.get("WEFT_FUZZ") == "full"
NUM_SEEDS = 20_000 if FULL else 200
CHUNK = 50
CHUNKS = [range(start, start + CHUNK) for start in range(0, NUM_SEEDS, CHUNK)]
DATA = Path(__file__).parents[1] / "data"
CPU_SECONDS = 20.0
MAX_GROWTH_KIB = 1 << 20
MAX_MESSAGE = 20_000
PREFIX = "V0115 10:00:00.000000 77 torch/_inductor/compile_fx.py:1404] "

SEEN: list[str] = []
WATCHED = (
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "subprocess.Popen",
    "os.remove",
    "os.putenv",
)
WATCHED += ("os.rename", "os.rmdir", "shutil.rmtree", "socket.connect", "socket.getaddrinfo", "ctypes.dlopen")


def audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Note what a reader has no reason to do; the hook stays for the process and looks only inside `watched`."""
    if not Watch.active:
        return
    writes = event == "open" and isinstance(arguments[1], str) and any(mode in arguments[1] for mode in "wax+")
    if writes or event in WATCHED:
        SEEN.append(f"{event}{arguments!r}")


class Watch:
    """Whether the audit hook looks, and whether it is there."""

    active = False
    installed = False


class Hung(BaseException):
    """A case took too long."""


@contextmanager
def watched(canary: Path) -> Iterator[None]:
    """Inside, nothing may be run, hang, or change the state of the process."""
    if not Watch.installed:
        for namespace in ("prims", "bucketing", "quantized_decomposed"):
            register_operators(namespace)  # torch sets a variable of the environment when these are imported
        sys.addaudithook(audit)
        Watch.installed = True

    def stop(*_: Any) -> None:
        raise Hung

    state = torch.get_rng_state().clone(), torch.is_grad_enabled(), torch.get_default_dtype(), dict(os.environ)
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    Watch.active = True
    try:
        yield
    finally:
        Watch.active = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    after = torch.get_rng_state(), torch.is_grad_enabled(), torch.get_default_dtype(), dict(os.environ)
    assert not SEEN, SEEN
    assert not canary.exists()
    assert torch.equal(state[0], after[0])
    assert state[1:] == after[1:]


def survive(seeds: range, canary: Path, attempt: Callable[[Random], list[GraphModule]], show: str) -> None:
    """Run the attempt for each seed; what it gives must be valid enough to be written and read again."""
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    num_graphs = 0
    messages: list[str] = []
    for seed in seeds:
        try:
            with watched(canary):
                for module in attempt(Random(f"{show} {seed}")):
                    num_graphs += 1
                    text = weft.listing(module)
                    assert weft.listing(weft.parse(text)) == text
        except WeftError as error:
            messages.append(str(error))
        except BaseException as error:
            raise AssertionError(f"{show}, seed {seed}: {type(error).__name__}: {str(error)[:2000]}") from error
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start
    assert growth < MAX_GROWTH_KIB, f"{show}, seeds {seeds}: memory grew by {growth} KiB"
    assert [message for message in messages if not 10 < len(message) < MAX_MESSAGE] == []
    assert num_graphs + len(messages) > 0


# What is mutated: real graphs of real logs.


@functools.cache
def logged() -> list[LoggedGraph]:
    """Graphs of a moderate size, so that a case takes milliseconds."""
    graphs = [graph for file in sorted(DATA.iterdir()) if ".log" in file.name for graph in read_log(file)]
    return [graph for graph in graphs if graph.kind != "dynamo_output_graph" and graph.num_lines < 130]


@functools.cache
def modules() -> list[GraphModule]:
    """Those of them that can be read; one runnable does not hold its nested graphs."""
    made: list[GraphModule] = []
    for graph in logged():
        with suppress(WeftError):
            made.append(graph.load(groups={"3": 2}))
    return made


@functools.cache
def texts(kind: str) -> list[tuple[str, str]]:
    """The kinds and texts of the printed graphs, or of the runnables."""
    is_runnable = kind == "runnables"
    return [(graph.kind, graph.text()) for graph in logged() if (graph.kind == "fx_graph_runnable") == is_runnable]


@functools.cache
def listings() -> list[str]:
    read = dict.fromkeys(map(weft.listing, modules()))
    return [*read, *(random_listing(Random(seed)) for seed in range(10))]


def log_of(kind: str, text: str) -> str:
    """A log with one graph and a symbol."""
    symbol = {"create_symbol": {"symbol": "s77", "val": "8"}, "frame_id": 0, "frame_compile_id": 0}
    event = {"artifact": {"name": kind, "encoding": "string"}, "rank": 0, "frame_id": 0, "frame_compile_id": 0}
    event["has_payload"] = hashlib.md5(text.encode()).hexdigest()
    payload = "\n".join(f"\t{line}" for line in text.split("\n"))
    return f"{PREFIX}{json.dumps(symbol)}\n{PREFIX}{json.dumps(event)}\n{payload}\n"


def ids(seeds: range) -> str:
    return f"seeds {seeds.start}-{seeds.stop - 1}"


@pytest.mark.parametrize("seeds", CHUNKS, ids=ids)
def test_a_mutated_log_gives_graphs_or_a_clear_error(seeds: range, tmp_path: Path) -> None:
    canary, file = tmp_path / "pwned", tmp_path / "rank_0_.log"

    def attempt(rng: Random) -> list[GraphModule]:
        kind, text = rng.choice(texts("graphs"))
        if rng.random() < 0.7:
            content = log_of(kind, mutate(untyped(text, rng), rng, str(canary))).encode(errors="surrogatepass")
        else:
            content = mutate(log_of(kind, text), rng, str(canary)).encode(errors="surrogatepass")
        if rng.random() < 0.2:
            content = mutate_bytes(content, rng)
        if rng.random() < 0.1:
            packed = gzip.compress(content)
            content = mutate_bytes(packed, rng) if rng.random() < 0.7 else packed
        Watch.active = False
        file.write_bytes(content)
        Watch.active = True
        return [graph.load(groups={"3": 2}) for graph in read_log(file, strict=rng.random() < 0.7)]

    survive(seeds, canary, attempt, "log")


@pytest.mark.parametrize("seeds", CHUNKS, ids=ids)
def test_a_mutated_runnable_gives_a_graph_or_a_clear_error(seeds: range, tmp_path: Path) -> None:
    canary = tmp_path / "pwned"

    def attempt(rng: Random) -> list[GraphModule]:
        _, text = rng.choice(texts("runnables"))
        return [read_runnable(mutate(text, rng, str(canary)) + "\n")]

    survive(seeds, canary, attempt, "runnable")


@pytest.mark.parametrize("seeds", CHUNKS, ids=ids)
def test_a_mutated_listing_gives_a_graph_or_a_clear_error(seeds: range, tmp_path: Path) -> None:
    canary = tmp_path / "pwned"
    listings()

    def attempt(rng: Random) -> list[GraphModule]:
        return [weft.parse(mutate(untyped(rng.choice(listings()), rng), rng, str(canary)))]

    survive(seeds, canary, attempt, "listing")


@functools.cache
def archives() -> list[bytes]:
    made: list[bytes] = []
    with tempfile.TemporaryDirectory() as folder:
        for module in modules()[::3]:
            archive.save(module, Path(folder) / "graph.weft")
            made.append((Path(folder) / "graph.weft").read_bytes())
    return made


def repacked(content: bytes, rng: Random, canary: str) -> bytes:
    """The archive with one file mutated, checksums made right again half of the time."""
    with zipfile.ZipFile(io.BytesIO(content)) as opened:
        files = {name: opened.read(name) for name in opened.namelist()}
    name = rng.choice(sorted(files))
    if name.endswith(".bin"):
        files[name] = mutate_bytes(files[name], rng)
    else:
        files[name] = mutate(files[name].decode(), rng, canary).encode(errors="surrogatepass")
    if rng.random() < 0.1:
        files[rng.choice(["../../pwned", "/etc/pwned", "constants/../x.bin", "constants/9999.bin", "a"])] = b"x"
    if rng.random() < 0.7 and name != "facts.json":
        facts = json.loads(files["facts.json"])
        facts["sha256"] = {key: hashlib.sha256(files[key]).hexdigest() for key in facts["sha256"]}
        files["facts.json"] = json.dumps(facts).encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as opened:
        for key, value in files.items():
            opened.writestr(key, value)
    return packed.getvalue()


@pytest.mark.parametrize("seeds", CHUNKS, ids=ids)
def test_a_mutated_archive_gives_a_graph_or_a_clear_error(seeds: range, tmp_path: Path) -> None:
    canary, file = tmp_path / "pwned", tmp_path / "graph.weft"
    archives()  # saved before anybody watches what is written

    def attempt(rng: Random) -> list[GraphModule]:
        content = rng.choice(archives())
        content = mutate_bytes(content, rng) if rng.random() < 0.4 else repacked(content, rng, str(canary))
        Watch.active = False
        file.write_bytes(content)
        Watch.active = True
        return [archive.load(file)]

    survive(seeds, canary, attempt, "archive")
