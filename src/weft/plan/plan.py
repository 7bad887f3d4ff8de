"""Plans: everything the passes decided, as data that can be read, compared, saved and applied again.

Contract: a plan refers to nodes by name and to groups by canonical name, so it means the same on every rank. Each step
records the digest of the listing it was made for, and the plan records the digest of the final listing. Weft refuses
to apply a plan to any other graph, or to accept any other result. A plan file also holds a digest of its contents, and
Weft refuses a file that was edited.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from weft.errors import PlanError, WeftError, compose
from weft.files import write_whole
from weft.plan.decision import Decision
from weft.simulation.predicted_step import PredictedStep

FORMAT = 4
"""Version of the file format. Since 2, a plan holds the digests of its resulting graph and of its contents. Since 3, it
holds its graph's listing and the predicted times of its collectives. Since 4, a step holds how it changed the listing.
"""


@dataclass(frozen=True)
class Move:
    """Move nodes directly before or after an anchor, in the given order."""

    nodes: tuple[str, ...]
    anchor: str
    side: Literal["before", "after"]
    kind: Literal["move"] = "move"


@dataclass(frozen=True)
class Replace:
    """Make the users of one node use another node instead."""

    node: str
    by: str
    kind: Literal["replace"] = "replace"


@dataclass(frozen=True)
class Erase:
    """Remove nodes."""

    nodes: tuple[str, ...]
    kind: Literal["erase"] = "erase"


def bucket_names(first: str) -> tuple[str, str]:
    """The names of a bucket's launch and wait, derived from its first member."""
    return f"{first}_bucket", f"{first}_done"


@dataclass(frozen=True)
class Merge:
    """Merge collectives into one bucket: one launch and, unless `keeps_waits`, one wait."""

    launches: tuple[str, ...]
    strategy: Literal["concat", "coalesced", "pack"]
    owned: tuple[int, ...] = ()
    """Indices, counted over the launches, of tensors that get memory of their own instead of a view of the buffer."""
    folded: tuple[str, ...] = ()
    """Casts and scalings before the launches that the bucket applies once, while packing or after it."""
    carried: tuple[str, ...] = ()
    """Cheap nodes that move up together with the launch because it needs them."""
    launch_before: str | None = None
    """Place the launch before this node; None: where the last member was launched."""
    wait_before: str | None = None
    """Place the wait before this node; None: directly after the launch."""
    together: bool = False
    """Whether to move the launches next to each other first, because a node between them writes to memory they hold."""
    keeps_waits: bool = False
    """Whether each member keeps its own wait in its place. Only `coalesced` buckets can."""
    kind: Literal["merge"] = "merge"


@dataclass(frozen=True)
class Settle:
    """Apply all earlier actions now. Later actions name the nodes of the resulting graph."""

    kind: Literal["settle"] = "settle"


@dataclass(frozen=True)
class Arrange:
    """Reorder all nodes. Only allowed as the first action or directly after a `Settle`."""

    runs: tuple[tuple[str, str], ...]
    """Runs of consecutive nodes in the current order, each as (first, last), listed in the new order."""
    kind: Literal["arrange"] = "arrange"


@dataclass(frozen=True)
class Fold:
    """Sum first and reduce once, instead of summing several reduced tensors."""

    additions: tuple[str, ...]
    """The additions of one tree, its root last."""
    kind: Literal["fold"] = "fold"


@dataclass(frozen=True)
class Rewrite:
    """Insert calls, redirect the users of old nodes to them, and remove nodes that are no longer needed."""

    calls: tuple[str, ...]
    """Lines of a listing, such as `sum_addmm = addmm(bias, x, w)`. They use nodes of the graph and earlier lines."""
    before: str
    """Insert the calls before this node."""
    heirs: tuple[tuple[str, str], ...]
    """Pairs (old, new): the users of the old node use the new one."""
    erased: tuple[str, ...] = ()
    kind: Literal["rewrite"] = "rewrite"


@dataclass(frozen=True)
class Inside:
    """Rewrite a nested graph, such as the body of a scan."""

    path: tuple[str, ...]
    """Attribute names that lead to the nested graph, outermost first."""
    rewrites: tuple[Rewrite, ...]
    kind: Literal["inside"] = "inside"


@dataclass(frozen=True)
class Stream:
    """Split a collective and its matrix products into chunks, so that one chunk is sent while another is multiplied."""

    launch: str
    products: tuple[str, ...]
    chunks: int
    kernel: Literal["portable", "symmetric-memory", "low-contention", "ring"] = "portable"
    own: int | None = None
    """For `ring`: this rank's index in the group."""
    apart: int = 0
    """Size of the group, for an all-reduce whose chunks run as reduce-scatter and all-gather; otherwise 0."""
    kind: Literal["stream"] = "stream"


@dataclass(frozen=True)
class Loop:
    """Run the body of a scan or a map in a loop that writes each round into results allocated beforehand."""

    call: str
    path: tuple[str, ...] = ()
    """Attribute names that lead to the graph with the call; empty for the outermost graph."""
    kind: Literal["loop"] = "loop"


@dataclass(frozen=True)
class Unwrap:
    """Call the mutating operator inside a functional wrapper directly, on its arguments or on copies of them."""

    call: str
    copied: tuple[str, ...] = ()
    """Arguments that are copied first, because others still need their old contents."""
    erased: tuple[str, ...] = ()
    """Copies of results back into inputs; the operator now writes these inputs itself."""
    kind: Literal["unwrap"] = "unwrap"


@dataclass(frozen=True)
class Retention:
    """The choice for alike values that the late part of a step needs from the early part."""

    group: str
    """Module path without layer numbers, and operator."""
    choice: Literal["kept", "gathered again", "recomputed", "offloaded"]
    num_values: int
    num_bytes: int
    """Bytes of all these values together."""
    work_us: float
    """Time of the kernels, collectives and copies that run for them in addition; 0 for values that are kept."""
    given: Literal["kept", "made again", "not needed", "both"]
    """Their treatment by the given graph."""

    @property
    def is_new(self) -> bool:
        """Whether the given graph does something else."""
        return (self.given == "kept") != (self.choice == "kept")


@dataclass(frozen=True)
class Offload:
    """Copy a value to host memory, and back for its later users."""

    value: str
    names: tuple[str, str, str, str]
    """Names of the new nodes: the copy to host memory and its wait, the copy back and its wait."""
    wait_before: str
    """The node before which the step waits for the copy to host memory; from there on the device holds no value."""
    fetch_before: str
    """The node before which the value comes back."""


@dataclass(frozen=True)
class Repeat:
    """Compute values a second time for their later users, instead of holding them; or share one value again.

    Nodes that lose their last user are removed.
    """

    copies: tuple[tuple[str, str, str], ...]
    """Triples (node, copy, before): repeat the node under another name right before a third one. A copy uses the
    repetitions of its inputs that come before it in this list, or in `values`."""
    values: tuple[tuple[str, str], ...] = ()
    """Pairs (node, repetition): repetitions that the graph has already."""
    users: tuple[str, ...] = ()
    """The nodes that use repetitions in place of the original nodes."""
    replaced: tuple[tuple[str, str], ...] = ()
    """Pairs (old, new): the users of the old node use the new one."""
    offloads: tuple[Offload, ...] = ()
    """Values that leave for host memory. Copies and users take the value that comes back."""
    table: tuple[Retention, ...] = ()
    """The choice for each group of values; for reports only."""
    kind: Literal["repeat"] = "repeat"


Action = Arrange | Settle | Move | Replace | Erase | Merge | Fold | Rewrite | Inside | Stream | Loop | Unwrap | Repeat


@dataclass(frozen=True)
class Step:
    """The actions and decisions of one pass for one graph."""

    spec: str
    """The pass with its options, as in a pipeline string."""
    actions: tuple[Action, ...] = ()
    decisions: tuple[Decision, ...] = ()
    digest: str = ""
    """Digest of the listing that this step was made for."""
    lines: tuple[tuple[int, int] | str, ...] = ()
    """The listing after this step: new lines, and runs of lines of the listing before it, each as (index, count). Empty
    if the step changes nothing."""

    @property
    def stages(self) -> tuple[Self, ...]:
        """The step split at each `Settle`. Each stage applies to the graph that the previous stage produced."""
        stages: list[list[Action]] = [[]]
        for action in self.actions:
            if isinstance(action, Settle):
                stages.append([])
            else:
                stages[-1].append(action)
        return tuple(replace(self, actions=tuple(actions)) for actions in stages)

    @property
    def applied(self) -> tuple[Decision, ...]:
        return tuple(d for d in self.decisions if d.applied)

    @property
    def declined(self) -> tuple[Decision, ...]:
        return tuple(d for d in self.decisions if not d.applied)


@dataclass(frozen=True)
class Evidence:
    """The simulated step of a plan on a cluster, and a proven lower bound to compare it with."""

    cluster: str
    step_ns: int
    """Simulated step of the resulting graph."""
    peak_bytes: int
    bound_ns: int
    """No order and no merging of the collectives makes the step shorter; `bound_of` says for which graph."""
    bound: str
    """Name of the bound and the argument that proves it."""
    certificate: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """`weft.bounds.checker` recomputes the bound from this and the graph alone."""
    bound_of: Literal["before", "after"] = "before"
    """`before`: the bound holds for the input graph. `after`: for the resulting graph, because a pass removed work."""
    prediction: PredictedStep | None = None
    """When each collective runs in that step; `weft compare` lines it up with a trace."""

    @property
    def gap(self) -> float:
        """How far the step is above the bound, as a share of the bound."""
        return self.step_ns / self.bound_ns - 1 if self.bound_ns else 0.0


@dataclass(frozen=True)
class Plan:
    """The steps of all passes in order, and facts about the graph that they were made for."""

    steps: tuple[Step, ...]
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Versions, groups, inputs and number of nodes: used to explain why a digest differs."""
    evidence: Evidence | None = None
    """None if the plan was made without a cluster."""
    result: str = ""
    """Digest of the listing after the last step."""
    listing: str = ""
    """The graph that it was made for, to name the nodes in which another graph differs."""
    format: int = FORMAT

    @property
    def start(self) -> str:
        """Digest of the listing that the plan was made for."""
        return self.steps[0].digest if self.steps else self.result

    def listing_after(self, num_steps: int) -> str:
        """The listing after the first steps, to name the nodes in which another graph differs."""
        lines = self.listing.splitlines()
        for step in self.steps[:num_steps]:
            if step.lines:
                lines = [
                    line
                    for part in step.lines
                    for line in ([part] if isinstance(part, str) else lines[part[0] : sum(part)])
                ]
        return "\n".join(lines)

    @property
    def digest(self) -> str:
        """Two plans have the same digest exactly if they are equal, on every rank."""
        return _digest_of(asdict(self))

    def to_json(self) -> str:
        """The plan as JSON, with its digest. Equal plans give equal text."""
        contents = asdict(self)
        return json.dumps({**contents, "digest": _digest_of(contents)}, indent=1, sort_keys=True)

    def to_bytes(self) -> bytes:
        """The plan as compact JSON without a digest, for a cache that checks its files itself."""
        return _reader_of(type(self)).dump_json(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The plan that `to_bytes` wrote. Raises ValueError for anything else."""
        return _reader_of(cls).validate_json(data)

    def save(self, path: str | Path) -> None:
        """Write the plan to a file. Its folder must exist."""
        save_text(path, self.to_json() + "\n", PlanError)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a plan. The error lists every fault with its path; a plan that was edited is refused."""
        from pydantic import ValidationError

        sealed = _sealed(text)
        try:
            plan: Self = _reader_of(cls).validate_json(text)
        except ValidationError as error:
            faults = [f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors()]
            raise PlanError(
                compose("plan", "this is not a valid plan", where=faults, do="create it again with weft.optimize")
            ) from None
        if sealed != plan.digest:
            found = f"the file says digest {sealed!r}, its contents give {plan.digest!r}"
            what = f"it was edited after it was saved: {found}" if sealed else "it has no digest of its contents"
            do = "pass the file as plan.save wrote it, or create it again with weft.optimize"
            raise PlanError(compose("plan", what, do=do))
        return plan

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan from a file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # not UTF-8, or a NUL in the path
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            do = "pass a file that plan.save wrote"
            raise PlanError(compose("plan", f"{path} cannot be read: {why}", do=do)) from None
        return cls.from_json(text)


def _digest_of(contents: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents, indent=1, sort_keys=True).encode()).hexdigest()[:32]


def _sealed(text: str) -> Any:
    """The digest written in the text of a plan. Refuses plans of other formats."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    held: dict[str, Any] = data if isinstance(data, dict) else {}
    if held.get("format", FORMAT) != FORMAT:
        do = "create it again with weft.optimize"
        what = f"its format is {held['format']!r}, but this version of Weft reads {FORMAT}"
        raise PlanError(compose("plan", what, do=do))
    return held.get("digest")


def save_text(path: str | Path, text: str, fault: type[WeftError]) -> None:
    """Write a file completely or not at all."""
    try:
        write_whole(path, text)
    except OSError as error:
        folder = Path(path).parent
        do = "choose a path that can be written" if folder.is_dir() else f"create the folder {folder} first"
        raise fault(compose(str(path), f"it cannot be written: {error.strerror or error}", do=do)) from error


@functools.cache
def _reader_of(cls: type[Plan]) -> Any:
    """The pydantic reader. It is cached because building it takes longer than reading most plans."""
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def change_of_lines(before: str, after: str) -> tuple[tuple[int, int] | str, ...]:
    """How one listing becomes another, as a step holds it."""
    indices = {line: index for index, line in enumerate(before.splitlines())}
    parts: list[tuple[int, int] | str] = []
    for line in after.splitlines():
        index, last = indices.get(line), parts[-1] if parts else ""
        if index is None:
            parts.append(line)
        elif not isinstance(last, str) and index == sum(last):
            parts[-1] = last[0], last[1] + 1
        else:
            parts.append((index, 1))
    return tuple(parts)


def nodes_that_differ(expected: str, found: str) -> list[str]:
    """The first nodes in which two listings differ, and how many nodes only one of them has."""
    there, here = ([line.strip() for line in text.splitlines() if line.startswith(" ")] for text in (expected, found))
    place = next((k for k, (a, b) in enumerate(zip(there, here, strict=False)) if a != b), min(len(there), len(here)))
    if not expected or place == len(there) == len(here):
        return []
    first = [lines[place] if place < len(lines) else "nothing" for lines in (here, there)]
    counts = [sum((Counter(a) - Counter(b)).values()) for a, b in ((here, there), (there, here))]
    only = f"{counts[0]} nodes only here, {counts[1]} only in the plan"
    return [
        f"first different node here: {first[0]}",
        f"in the plan: {first[1]}",
        only if any(counts) else "both have the same nodes, in another order",
    ]


def what_differs(expected: Mapping[str, Any], found: Mapping[str, Any], only: Iterable[str] = ()) -> list[str]:
    """One line for each fact in which two graphs differ."""
    return [
        f"{key}: {found.get(key)!r} here, {expected.get(key)!r} in the plan"
        for key in sorted(only or {*expected, *found})
        if expected.get(key) != found.get(key)
    ]
