"""Golden Markdown: what a section holds, how it is run, and how its blocks are rewritten.

A file is titled by a pass spec (`# hoist-launches`), or `# (checks)` for the invariants of valid graphs. Each `##`
heading is one behaviour as a sentence; a line `Pass: hoist-launches{max-in-flight-bytes=64}` right below it overrides
the title. Behind optional prose stand fenced blocks:

    before      a listing; required
    after       the listing behind the pass; absent: unchanged
    declined    one line `reason: sentence` per refusal; absent: none
    error       the whole text of the error that is raised instead

A line `Not proved: why`, below a heading or for the whole file below its title, says that the symbolic proof does not
know this algebra; values are compared all the same. `Not run: why` says that they cannot be. In the same places
`Cluster: unit` names a file of `clusters/` that the pass plans for, and `Memory: 512` a limit in bytes.

A listing that sends to a peer is written for rank 0 of a ring: on rank r of its group every peer is r further on. So is
one whose pass is told `rank=0`: on rank r what is called `own`, a slice or an item, is r parts further on.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

import weft
from tests.golden import operators  # noqa: F401  (golden files name them)
from weft.errors import WeftError
from weft.graph.check import validate
from weft.graph.dag import Dag
from weft.graph.edit import MEMBERS_KEY, ORIGINS_KEY
from weft.graph.groups import read_groups
from weft.passes.base import Numerics
from weft.passes.pipeline import Pipeline, Run
from weft.verification.comparison import compare, example_inputs
from weft.verification.symbolic.equivalence import prove
from weft.verification.virtual.cluster import VirtualCluster

FOLDER = Path(__file__).parent
CHECKS = "(checks)"
BLOCKS = ("before", "after", "declined", "error")
FENCE = "```"
UNPROVED = "Not proved: "
NOT_RUN = "Not run: "
CLUSTER = "Cluster: "
MEMORY = "Memory: "


class GoldenError(Exception):
    """A golden file that is malformed, or a section that does not hold; the text is shown without a traceback."""


@dataclass(frozen=True)
class Outcome:
    """What running a section gives, in the words of its blocks."""

    before: str
    after: str | None = None
    declined: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Section:
    """One behaviour: a heading with its blocks."""

    path: Path
    title: str
    spec: str
    line: int
    """Of the heading, counted from 0."""
    before: str
    after: str | None = None
    declined: str | None = None
    error: str | None = None
    needs_proof: bool = True
    is_run: bool = True
    cluster: Path | None = None
    memory_limit_bytes: int | None = None

    @property
    def id(self) -> str:
        """`hoist-launches: a launch goes up`, for tests that take every section."""
        return f"{self.path.stem}: {self.title}"

    @property
    def num_ranks(self) -> int:
        """The ranks of the smallest world that its groups tile."""
        pairs = re.findall(r"^group\('\w+', size=(\d+)(?:, stride=(\d+))?\)", self.before, re.MULTILINE)
        spans = [int(size) * int(stride or 1) for size, stride in pairs]
        listed = re.findall(r"^group\('\w+', ranks=(.*)\)", self.before, re.MULTILINE)
        spans += [len(re.findall(r"\d+", ranks)) for ranks in listed]
        return lcm(1, *spans)

    def modules(self, listing: str) -> GraphModule | list[GraphModule]:
        """The modules of a listing: one for all ranks, or one for each where it names peers."""
        if self.is_by_rank:
            return [weft.parse(_shift_parts(listing, rank)) for rank in range(self.num_ranks)]
        if not re.search(r"= (send|recv|batch_p2p)\(", listing):
            return weft.parse(listing)
        return [weft.parse(_shift_peers(listing, rank, self.num_ranks)) for rank in range(self.num_ranks)]

    @property
    def is_by_rank(self) -> bool:
        """Whether the pass is told the rank that the listing is of."""
        return "rank=0" in self.spec

    def pipeline(self, rank: int) -> Pipeline:
        """The pass as a rank runs it."""
        return Pipeline.parse(self.spec.replace("rank=0", f"rank={rank}") if self.is_by_rank else self.spec)

    def run(self, module: GraphModule, rank: int = 0) -> Run:
        """What the section's pass makes of a module."""
        limit = self.memory_limit_bytes
        return self.pipeline(rank).run(module, cluster=self.cluster, memory_limit_bytes=limit)

    def inputs(self, seed: int = 0) -> list[list[Any]]:
        """Arguments for each rank; a size without a hint is 2."""
        hinted = re.sub(r"^symbol\('(\w+)'\)", r"symbol('\1', hint=2)", self.before, flags=re.MULTILINE)
        return example_inputs(weft.parse(hinted), self.num_ranks, seed=seed)


def sections(folder: Path = FOLDER) -> list[Section]:
    """Every section of every golden file, in order."""
    return [section for path in sorted(folder.glob("*.md")) for section in read(path)]


def read(path: Path) -> list[Section]:
    """The sections of one file."""
    lines = path.read_text().splitlines()
    if not lines or not lines[0].startswith("# "):
        raise GoldenError(f"{path.name}: the first line is no title such as `# hoist-launches`")
    spec = lines[0].removeprefix("# ").strip()
    starts = [k for k in _outside_fences(lines) if lines[k].startswith("## ")]
    found = [_read_section(path, lines, k, end, spec) for k, end in zip(starts, [*starts, len(lines)][1:], strict=True)]
    titles = [section.title for section in found]
    twice = next((title for title in titles if titles.count(title) > 1), None)
    if twice is not None:
        raise GoldenError(f"{path.name}: two sections are called {twice!r}")
    return found


def _read_section(path: Path, lines: Sequence[str], start: int, end: int, spec: str) -> Section:
    title = lines[start].removeprefix("## ").strip()
    below = next((line for line in lines[start + 1 : end] if line.strip()), "")
    if below.startswith("Pass: "):
        spec = below.removeprefix("Pass: ").strip()
    blocks = _blocks(path, lines, start, end)
    texts = {name: "\n".join([*lines[first + 1 : last], ""]) for name, (first, last) in blocks.items()}
    if "before" not in texts:
        raise GoldenError(f"{path.name}:{start + 1}: {title!r} has no block `before`")
    first = min(fence for fence, _ in blocks.values())
    head = next(k for k in _outside_fences(lines) if lines[k].startswith("## "))
    notes = (*lines[start:first], *lines[:head])  # those of the section come before those of the file
    unproved, not_run = (any(line.startswith(note) for line in notes) for note in (UNPROVED, NOT_RUN))
    cluster, limit = _note(notes, CLUSTER), _note(notes, MEMORY)
    file = path.parent / "clusters" / f"{cluster}.toml" if cluster else None
    number = int(limit) if limit else None
    return Section(
        path,
        title,
        spec,
        start,
        **texts,
        needs_proof=not unproved,
        is_run=not not_run,
        cluster=file,
        memory_limit_bytes=number,
    )


def _note(lines: Sequence[str], name: str) -> str:
    return next((line.removeprefix(name).strip() for line in lines if line.startswith(name)), "")


def _blocks(path: Path, lines: Sequence[str], start: int, end: int) -> dict[str, tuple[int, int]]:
    """The blocks of a section: the lines of their two fences."""
    fences = [k for k in range(start, end) if lines[k].startswith(FENCE)]
    if len(fences) % 2:
        raise GoldenError(f"{path.name}:{fences[-1] + 1}: this block has no end")
    found: dict[str, tuple[int, int]] = {}
    for first, last in zip(fences[::2], fences[1::2], strict=True):
        name = lines[first].removeprefix(FENCE).strip()
        if name not in BLOCKS or name in found:
            what = "occurs twice in its section" if name in found else f"is none of {', '.join(BLOCKS)}"
            raise GoldenError(f"{path.name}:{first + 1}: block {name!r} {what}")
        found[name] = (first, last)
    return found


def _outside_fences(lines: Sequence[str]) -> Iterator[int]:
    inside = False
    for k, line in enumerate(lines):
        if line.startswith(FENCE):
            inside = not inside
        elif not inside:
            yield k


def _shift_peers(listing: str, rank: int, size: int) -> str:
    def shift(matched: re.Match[str]) -> str:
        return matched[1] + re.sub(r"\d+", lambda peer: str((int(peer[0]) + rank) % size), matched[2])

    listing = re.sub(r"(= (?:send|recv)\(\w+, )(\d+)", shift, listing)
    return re.sub(r"(= batch_p2p\(\[[^]]*\], )(\[[^]]*\])", shift, listing)


def _shift_parts(listing: str, rank: int) -> str:
    """The listing of another rank: the lines of `own` parts take the part of that rank."""

    def shift(matched: re.Match[str]) -> str:
        line = re.sub(r"(\w+)\[0\]$", rf"\1[{rank}]", matched[0])
        line = re.sub(r"(narrow\(\w+, \d+), 0, (\d+)", lambda m: f"{m[1]}, {rank * int(m[2])}, {m[2]}", line)
        bounds = re.search(r"slice\(\w+, \d+, 0, (\d+)", line)
        length = int(bounds[1]) if bounds else 0
        return re.sub(r"(slice\(\w+, \d+), 0, \d+", rf"\1, {rank * length}, {(rank + 1) * length}", line)

    return re.sub(r"^    own(:.*)? = .*$", shift, listing, flags=re.MULTILINE)


# Running.


def run(section: Section) -> Outcome:
    """What the section's pass, or the checks, make of its `before`."""
    modules = section.modules(section.before)
    first = modules if isinstance(modules, GraphModule) else modules[0]
    before = weft.listing(first)
    try:
        if section.spec == CHECKS:
            validate(Dag(first.graph))
            return Outcome(before)
        done = section.run(first)
    except WeftError as error:
        return Outcome(before, error=f"{error}\n")
    refusals = [d for entry in done.log for d in entry.step.declined if d.reason.is_refusal]
    declined = "".join(f"{d.reason.value}: {d.sentence}\n" for d in refusals) or None
    after = weft.listing(done.module)
    return Outcome(before, after if after != before else None, declined)


def check(section: Section, *, compare: bool = True) -> None:
    """Raise a GoldenError unless the section says what happens and what happens is sound."""
    outcome = run(section)
    _same("`before` is not written as a listing is", section.before, outcome.before)
    if compare:
        _same("the error differs", section.error, outcome.error)
        _same("the listing behind the pass differs", section.after or section.before, outcome.after or outcome.before)
        _same("what is declined differs", section.declined, outcome.declined)
    if section.spec != CHECKS and outcome.error is None:
        check_soundness(section)


def check_soundness(section: Section) -> None:
    """Raise unless the pass leaves its argument alone, is idempotent, replays from JSON, and keeps every value."""
    modules = section.modules(section.before)
    each = [modules] if isinstance(modules, GraphModule) else modules
    texts = [weft.listing(module) for module in each]
    runs = [section.run(module, rank) for rank, module in enumerate(each)]
    for rank, (module, text, done) in enumerate(zip(each, texts, runs, strict=True)):
        after = weft.listing(done.module)
        _same("the pass changed its argument", text, weft.listing(module))
        again = section.run(done.module, rank)
        _same("a second run changes the graph", after, weft.listing(again.module))
        if any(entry.changed for entry in again.log):
            raise GoldenError("a second run says that it changed the graph, and did not")
        replayed = weft.apply(module, weft.Plan.from_json(done.plan.to_json()))
        _same("the plan, replayed from JSON, gives another graph", after, weft.listing(replayed))
    check_names(section)
    if section.is_run:
        check_values(section, modules, runs)


def check_names(section: Section) -> None:
    """Raise unless every new call has the annotations and the modules of all calls that it replaces.

    A call that replaces none, such as a slice of an input, has those of its inputs.
    """
    modules = section.modules(section.before)
    module = modules if isinstance(modules, GraphModule) else modules[0]
    for node in _nodes_of(module):
        node.meta["custom"] = {node.name: True}
        node.meta["nn_module_stack"] = {node.name: (node.name, "Module")}
    for node in _nodes_of(section.run(module).module):
        annotations = node.meta.get("custom", {})
        if node.op != "call_function" or [*annotations] == [node.name]:
            continue
        paths = {
            name for each in (node.meta, *node.meta.get(ORIGINS_KEY, ())) for name in each.get("nn_module_stack", {})
        }
        members = {*node.meta.get(MEMBERS_KEY, ())}
        if not members or members - (annotations.keys() & paths):
            lost = sorted(members - (annotations.keys() & paths))
            raise GoldenError(f"{node.name} has lost the names of {lost or 'all that it replaces'}")


def _nodes_of(module: GraphModule) -> Iterator[Node]:
    """The nodes of a module and of the graphs nested in it."""
    yield from module.graph.nodes
    for nested in module.children():
        if isinstance(nested, GraphModule):
            yield from _nodes_of(nested)


def check_values(section: Section, modules: GraphModule | list[GraphModule], runs: Sequence[Run]) -> None:
    """Raise unless the modules compute the same on every virtual rank, before and after."""
    after = runs[0].module if isinstance(modules, GraphModule) else [done.module for done in runs]
    passes = Pipeline.parse(section.spec).passes
    exact = all(each.numerics is Numerics.EXACT for each in passes)
    try:
        if coarsest := coarsest_dtype(section, after):
            cluster = VirtualCluster(section.num_ranks)
            results = [cluster.run(side, section.inputs(), read_groups(runs[0].module)) for side in (modules, after)]
            verdict = compare(*results, num_terms=section.num_ranks, compute_dtype=coarsest)
        else:
            verdict = weft.verify(modules, after, ranks=section.num_ranks, inputs=section.inputs())
    except WeftError as error:
        raise GoldenError(f"the graphs do not run:\n{error}") from None
    if not (verdict.bitwise if exact else verdict.equal):
        raise GoldenError(str(verdict))
    if isinstance(modules, GraphModule) and isinstance(after, GraphModule):
        proof = prove(modules, after, reassociates=not exact)
        if section.needs_proof and not proof:
            raise GoldenError(str(proof))


def coarsest_dtype(section: Section, after: GraphModule | list[GraphModule]) -> torch.dtype | None:
    """The coarsest dtype of a graph that a pass computes in another dtype; None if no pass of the section does."""
    if all(each.numerics is not Numerics.CHANGES_DTYPE for each in Pipeline.parse(section.spec).passes):
        return None
    modules = [after] if isinstance(after, GraphModule) else after
    values = [node.meta.get("val") for module in modules for node in module.graph.nodes]
    dtypes = [v.dtype for v in values if isinstance(v, torch.Tensor) and v.dtype.is_floating_point]
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _same(what: str, expected: str | None, found: str | None) -> None:
    if expected == found:
        return
    lines = [(text or "").splitlines() for text in (expected, found)]
    diff = difflib.unified_diff(*lines, "expected", "found", lineterm="", n=100)
    raise GoldenError("\n".join([what, *diff]))


# Rewriting.


def update(section: Section) -> Section:
    """Write what happens into the section's blocks, and read it again."""
    outcome = run(section)
    lines = section.path.read_text().splitlines()
    starts = [k for k in _outside_fences(lines) if lines[k].startswith("## ")]
    start = next(k for k in starts if lines[k].removeprefix("## ").strip() == section.title)
    end = next((k for k in starts if k > start), len(lines))
    blocks = _blocks(section.path, lines, start, end)
    last = blocks["before"][1]
    made: list[list[str]] = []
    for name in BLOCKS:
        text = getattr(outcome, name)
        if text is not None:
            made.append([f"{FENCE}{name}", *text.splitlines(), FENCE])
        if name in blocks and name != "before":
            first, last_line = blocks[name]
            lines[first : last_line + 1] = [_GONE] * (last_line + 1 - first)
    lines[blocks["before"][0] : last + 1] = [line for block in made for line in (*block, "")][:-1]
    section.path.write_text(_without_gaps(lines))
    return next(s for s in read(section.path) if s.title == section.title)


_GONE = "\0"


def _without_gaps(lines: Sequence[str]) -> str:
    """The lines without those that are gone, and without the second of two empty lines outside of blocks."""
    kept = [line for line in lines if line != _GONE]
    outside = set(_outside_fences(kept))
    text = [line for k, line in enumerate(kept) if line or k not in outside or k == 0 or kept[k - 1]]
    while text and not text[-1]:
        text.pop()
    return "\n".join([*text, ""])
