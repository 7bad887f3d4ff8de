"""Session: the record of all graphs of a run, whichever way they reached Weft.

Contract: every graph that a compiler hands over becomes one entry of the report: forward, backward, and each again for
a recompile. If a compiler takes its result from a cache, Weft is not called; the report then reads the entry that was
written to the side file when the result was made. Listings, decisions and times also go to the structured trace
(TORCH_TRACE, tlparse), to Dynamo's counters and compile times, and to the `weft` logger (TORCH_LOGS=weft).

A fault of Weft never ends a compilation, unless `strict` is set. Planning, applying, verifying and cutting a joint
graph decide which graph runs: if they fail on one rank, the graph stays unchanged on all ranks that are connected
through its groups (`consensus.py`), since ranks with different graphs would hang. They fix the order of a graph in
Inductor's code after a vote of its own. If they cannot agree, because one of them runs the rewritten graph already, the
compilation ends with an error. Reporting depends on the machine (a full disk, a log handler), so a fault in it changes
nothing but the report.
"""

from __future__ import annotations

import hashlib
import json
import logging
import traceback
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule

from weft.api import Result, carry_out, listing, optimize, simulate
from weft.bounds.bounded_simulation import simulate_modules
from weft.compat import compilers as compat
from weft.compat import resolve_group, shared_store
from weft.cost.cluster import ASSUMED_NODES, assumed_cluster
from weft.errors import PlanError, VerificationError, WeftError, compose
from weft.frontends.fault_file import write_fault
from weft.frontends.options import DISABLE, PREFIX, Options, is_disabled
from weft.frontends.parts import BESIDE_KEY, peak_of_part
from weft.frontends.run_report import GraphEntry, RunReport, read_entries, side_file, write_entry
from weft.graph.aliasing import APART_KEY
from weft.graph.collective import collectives
from weft.graph.edit import Snapshot, recompile
from weft.graph.groups import read_groups
from weft.graph.listings.text import digest
from weft.graph.origins import INPUTS_KEY, PHASE_KEY
from weft.passes.pipeline import Pipeline, identity_of, replay_in_place
from weft.plan.folder import PlanFolder
from weft.report.layers import exposed_by_layer, why_slow
from weft.report.simulated import SimulatedReport, with_simulations
from weft.simulation.timeline import NS_PER_US
from weft.verification.agreement.agreement import Agreement
from weft.verification.agreement.consensus import WAIT_S, BallotBox, Resolution, Vote, as_ranges, decide, tell
from weft.verification.agreement.issue_order import read_order
from weft.verification.agreement.rank_record import FolderBoard, Statement, StoreBoard, check_published, publish

log = logging.getLogger("weft")

NO_COLLECTIVES = (
    "no graph so far holds collectives although torch.distributed runs {ranks} ranks, so Weft has nothing to do. "
    "FSDP2 (fully_shard) and default DDP communicate outside of compiled graphs. Use DTensor parametrisation "
    "(SimpleFSDP), tensor parallelism or functional collectives; for DDP wrap the model with weft.ddp, and compile a "
    "function that calls backward()"
)
REPORT_IT = (
    "this is a bug in Weft, please report it; the traceback is in weft.run_report() and under TORCH_LOGS=weft, and "
    "the option weft.strict raises the error"
)
ALL_RANKS = "the ranks that are connected through its process groups leave it as it was, too, so training goes on"
OTHER_RANKS = (
    "all ranks with this graph should leave it unchanged; if only some of them print this, they run different "
    "collectives and will hang; the option weft.agreement detects that"
)
SILENT_RANKS = (
    "{ranks} said nothing about graph {name!r} within {seconds:.0f} s, perhaps because a cache had the graph there. "
    "Weft waits no longer for {them} in this run; the option weft.agreement still detects differences"
)
SAME_PLANS = (
    "all ranks must find the same plans: if only some of them print this, they may run different collectives and hang; "
    "the option weft.agreement detects that"
)
RUN_PAGE = "run.html"
"""The page of all graphs in the folder of the option `weft.report`."""
MAX_SIMULATED = 64
"""Number of graphs whose figures can be asked for; graphs before the last ones are forgotten to save memory."""
OPTIMIZERS = str(Path(torch.optim.__file__).parent)
_HOME = Path(__file__).parents[2]
_NONE_SO_FAR = NO_COLLECTIVES.partition("{")[0]
PHASES = ("backward", "forward", "inference")
"""The graphs that AOTAutograd makes of one compilation: the first two, or the last."""
NOT_CALLED = "Inductor's post-grad passes are switched off (mode='lite' does so), so Weft is not called"


class Session:
    """All graphs that this process compiled since it started, or since `reset`."""

    def __init__(self) -> None:
        # Never reset, because the store keeps all votes.
        self._num_compilations = Counter[str]()  # by Dynamo's id
        self._num_votes = Counter[str]()  # by graph of a compilation
        self.reset()

    def reset(self) -> None:
        """Forget everything: for the next run in the same process."""
        self._entries: list[GraphEntry] = []
        self._messages: dict[str, None] = {}
        self._frames: dict[str, list[str]] = {}  # by compilation; DDP's own optimizer splits one into several
        self._looked_up: dict[tuple[str, str], tuple[Path, set[str]]] = {}
        self._has_collectives = False
        self._options: Options | None = None  # those that ask for agreement
        self._published: set[tuple[str, ...]] = set()
        self._silent: set[int] = set()  # ranks that did not vote in time once
        self._asked_for: set[str] = set()  # phases that caches were asked for in the current compilation
        self._handed_over: tuple[str, str] | None = None  # compilation and phase of the graph that is compiled now
        self._woven: _Election | None = None  # of the rewritten graph that is compiled now
        self._simulated: dict[tuple[str, ...], SimulatedReport] = {}  # of the last graphs, on rank 0

    def report(self, *, simulate: bool = False) -> RunReport:
        """One report over all graphs, including those from a cache; with `simulate` rank 0 adds simulated figures."""
        found: dict[tuple[str, ...], GraphEntry] = {}
        for (identity, compile_id), (folder, phases) in self._looked_up.items():
            called = {e.phase for e in self._entries if (e.identity, e.compile_id) == (identity, compile_id)}
            for entry in self._of_earlier_runs(identity, compile_id, folder):
                # AOTAutograd has a cache of its own, and asks before there is a forward or a backward.
                is_missing = entry.phase in phases - called if phases != {""} else not called
                if is_missing:
                    found[entry.key] = entry
        entries = (*self._entries, *found.values())
        has_collectives = any(entry.num_collectives for entry in entries)
        # A graph without collectives may come before those with them: an evaluation, an optimizer.
        said = (text for text in self._messages if not (has_collectives and text.startswith(_NONE_SO_FAR)))
        whole: dict[str, Any] = {}
        with self.contained("the figures of the run", strict=False):
            if simulate:
                entries = tuple(map(self._with_figures, entries))
                whole = self._whole_step(entries)
        return RunReport(entries, tuple(said), whole)

    def _of_earlier_runs(self, identity: str, compile_id: str, folder: Path) -> Iterable[GraphEntry]:
        frames = self._frames.get(compile_id, [])
        for entry in read_entries(side_file(folder, identity)):
            # A bare hook does not see the module that Dynamo compiles, so the compilation id has to do.
            if entry.frame in frames or (not entry.frame and not frames and entry.compile_id == compile_id):
                yield replace(entry, compile_id=compile_id, from_cache=True)

    def _has_unknown_graphs(self, known: Iterable[GraphEntry]) -> bool:
        """Whether a cache supplied a graph without a known report: it may communicate without Weft's knowledge."""
        phases = {(entry.identity, entry.compile_id, entry.phase) for entry in known}
        compilations = {found[:2] for found in phases}
        return any(
            (*asked, phase) not in phases if phase else asked not in compilations
            for asked, (_, looked_up) in self._looked_up.items()
            for phase in looked_up
        )

    def note_frame(self, module: GraphModule, inputs: Sequence[Any]) -> None:
        """Remember the module that Dynamo hands over: later runs find their entries by its digest."""
        compile_id = compat.compilation()[0]
        self._num_compilations[compile_id] += 1
        self._asked_for = set()
        found = _digest_of_frame(module, inputs)
        self._frames.setdefault(compile_id, []).append(found)

    def note_compiled(self) -> None:
        """A graph is compiled: if it was not handed over, it came from a cache, and other ranks need not wait."""
        compile_id, phase = compat.compilation()
        phase = phase or "inference"
        if self._handed_over != (compile_id, phase):
            self._vote_as_cached(phase)
            self._publish_cached()
        self._handed_over = self._woven = None

    def note_all_compiled(self) -> None:
        """All graphs of a compilation are compiled, except a backward that waits for its first call."""
        if self._asked_for == {""}:  # AOTAutograd's cache is asked before there are graphs, and had them all
            self._vote_as_cached(*PHASES)
            self._publish_cached()

    def _vote_as_cached(self, *phases: str) -> None:
        """Tell the other ranks that a cache supplied a graph; an error if they do not run the same graph."""
        divergence: tuple[str, str] | None = None
        with self.contained("the vote of this rank", strict=False):
            if (store := shared_store()) is None:
                return
            compile_id = compat.compilation()[0]
            entries = self.report().entries
            for phase in phases:
                known = [e for e in entries if e.from_cache and (e.compile_id, e.phase) == (compile_id, phase)]
                ranks = as_ranges(rank for entry in known for rank in _ranks_in(entry.statement))
                vote = Vote("", "from a cache", "", ranks, is_final=True)
                if known and all(entry.skipped for entry in known):
                    vote = Vote("", "", "its compiler's cache has the graph as it was", ranks)
                name = f"{self._compilation(phase, compile_id)} 1"
                divergence = tell(StoreBoard(store), name, _rank(), vote) or divergence
                if vote.is_final:
                    divergence = tell(StoreBoard(store), _vote_on_order(name, 1), _rank(), vote) or divergence
        if divergence is not None:
            raise _error_of(divergence)

    def note_look_up(self, identity: str, folder: Path, options: Options | None = None) -> None:
        """Remember that a cache was asked for the result of a pass: if the pass is not called now, the cache had it."""
        if options is not None and options.agreement is not None:
            self._options = options
        compile_id, phase = compat.compilation()
        self._asked_for.add(phase)
        self._looked_up.setdefault((identity, compile_id), (folder, set()))[1].add(phase)

    def say(self, message: str) -> None:
        """Warn, once."""
        if message not in self._messages:
            self._messages[message] = None
            log.warning("weft: %s", message)

    def weave(
        self,
        module: GraphModule,
        options: Options,
        identity: str,
        folder: Path | None,
        *,
        fuses: bool = True,
        apart: bool = True,
        is_cut: bool = False,
        inputs: tuple[str, ...] = (),
        prepare: Callable[[], None] | None = None,
        finish: Callable[[], None] | None = None,
    ) -> bool:
        """Optimize the graph of a module in place; False if it stays unchanged. The side file is in `folder`.

        `fuses` says whether the compiler fuses a chain of pointwise operators into one kernel. `apart` says that no two
        inputs share memory, which holds for the graphs of AOTAutograd. `is_cut` says that forward and backward come
        from a joint graph that was planned for the memory limit. `inputs` are the paths of the parameters that Dynamo
        passes to AOTAutograd, as in `INPUTS_KEY`. `prepare` and `finish` are called before planning and after the
        rewrite: an error in them leaves the graph as it was on all ranks, too.
        """
        if apart:
            module.meta[APART_KEY] = True
        module.meta.pop(PHASE_KEY, None)
        module.meta[INPUTS_KEY] = inputs
        entry = GraphEntry(identity, "", "", "inference")
        with self.contained("the name of a graph", options.strict):
            entry = self._entry(identity, module)
            self._handed_over = (entry.compile_id, entry.phase)
            if entry.role in ("forward", "backward", "optimizer"):
                module.meta[PHASE_KEY] = entry.role
        election = _Election(None, "", 0, ())
        self._woven = None
        if is_disabled():
            self.say(f"{DISABLE} is set, so no graph is changed")
            with self.contained("a report of a graph", strict=False):
                num_left = sum(1 for _ in collectives(module.graph))
                self._add(replace(entry, skipped=f"{DISABLE} is set", num_left=num_left), None)
            with self.contained("the vote of this rank", strict=False):
                election = self._election(module, entry)
            self._leave_together(election, f"{DISABLE} is set")
            return False
        with self.contained("the vote of this rank", options.strict):
            election = self._election(module, entry)
        kept: Snapshot | None = None
        is_rewritten, plan_identity = False, ""
        simulated: SimulatedReport | None = None
        try:
            kept = Snapshot(module) if election.ranks or prepare or finish else None
            if prepare is not None:
                prepare()
            with compat.timed("weft"):
                is_part = is_cut and entry.phase in ("forward", "backward")
                result = self._result(module, options, fuses, is_part)
            with self.contained("a report of a graph", options.strict):
                entry = replace(entry, report=json.loads(result.report.to_json(simulate=False)))
                _emit(entry, module, result)
            with self.contained("the check of the device's memory", options.strict):
                self._warn_of_memory(result, entry, options)
            with self.contained("the figures of a graph", options.strict):
                simulated = _with_simulations(result, module, options, fuses) if _rank() == 0 else None
            with self.contained("a recorded plan", options.strict):
                plan_identity = identity_of(module, options.groups)[1] if options.record is not None else ""
            replay_in_place(module, result.report.bare_plan, groups=options.groups)
            is_rewritten = True
            if finish is not None:
                finish()
        except Exception as error:  # the compiler can go on without Weft
            if kept is not None:
                kept.restore()
            if is_rewritten:  # torch cannot compile every graph that it hands over
                recompile(module)
            self._leave_together(election, _told(error).splitlines()[0], wait=not options.strict)
            if options.strict:
                raise
            self._leave(module, entry, options, folder, error, ALL_RANKS if election.ranks else OTHER_RANKS)
            return False
        if (found := self._objection(election, result)) is not None and kept is not None:
            kept.restore()
            recompile(module)
            error = VerificationError(compose("agreement", found))
            if options.strict:
                raise error
            self._leave(module, entry, options, folder, error, ALL_RANKS)
            return False
        self._woven = election
        with self.contained("a recorded plan", options.strict):
            if options.record is not None and plan_identity:
                PlanFolder(options.record).record(result.plan, plan_identity)
        with self.contained("a statement for other ranks", options.strict):
            if folder is not None or options.agreement is not None:
                entry = replace(entry, statement=_state(result.module, options, result))
        with self.contained("the figures of a graph", options.strict):
            if simulated is not None and entry.report:
                self._simulated[entry.key] = simulated
                for oldest in list(self._simulated)[:-MAX_SIMULATED]:
                    del self._simulated[oldest]
                entry = self._with_figures(entry) if options.report is not None else entry
        with self.contained("a report of a graph", options.strict):
            self._add(entry, folder)
        with self.contained("the page of the run", options.strict):
            if options.report is not None and _rank() == 0:
                self._save_page(Path(options.report))
        with self.contained("a statement for other ranks", options.strict):
            self._publish(entry, options)
        with self.contained("a search for collectives", options.strict):
            if entry.report:
                self._look_for_collectives(entry)
        return True

    def _save_page(self, folder: Path) -> None:
        """Write the page of all graphs so far."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.say(f"no report is written: {error}")
            return
        self.report(simulate=True).save_html(folder / RUN_PAGE)

    def _with_figures(self, entry: GraphEntry) -> GraphEntry:
        """The entry with its simulated figures, if this process has simulated the graph and has none yet."""
        if entry.figures or entry.key not in self._simulated:
            return entry
        report = self._simulated[entry.key]
        run, summary = report.runs[1], report.summary
        figures = {
            "cluster": str(report.cluster),
            "before": asdict(summary.before),
            "after": asdict(summary.after),
            "why": run.why_slow,
            "layers": [list(row.row) for row in run.exposed_layers],
        }
        return replace(entry, figures=figures)

    def _whole_step(self, entries: Iterable[GraphEntry]) -> dict[str, Any]:
        """The figures of the last version of each graph in one timeline: forward, backward, optimizer.

        They also say why the step is slow, and list its exposed time by layer.
        """
        parts = [entry for entry in entries if entry.phase != "joint"]  # forward and backward follow a joint graph
        last = {entry.place: entry for entry in parts if entry.report and entry.key in self._simulated}
        if any(entry.is_by_compiled_autograd for entry in last.values()):  # it contains the other backward graphs
            last = {k: e for k, e in last.items() if e.is_by_compiled_autograd or e.role != "backward"}
        roles = {"backward": 1, "optimizer": 2}
        ordered = sorted(last.values(), key=lambda entry: roles.get(entry.role, 0))
        backward = [entry for entry in ordered if entry.role == "backward"]
        first = len([entry for entry in ordered if roles.get(entry.role, 0) == 0])
        ordered[first : first + len(backward)] = reversed(backward)
        reports = [self._simulated[entry.key] for entry in ordered]
        if len({report.cluster for report in reports}) != 1:
            return {}
        modules = [report.graphs[1].graph.module for report in reports]
        timeline = simulate_modules(modules, reports[0].simulated_cluster, reports[0].graphs[1].given, bound=True)
        keys = ("step_us", "exposed_us", "lower_bound_us", "peak_bytes")
        # Graphs may use the same names, so the place of an operation tells its graph.
        ends = [*accumulate(len(report.graphs[1].program.names) for report in reports)]
        records = [report.runs[1].record_of for report in reports]
        exposed = ((records[bisect_right(ends, span.op)].get(span.name), span) for span in timeline.collectives)
        layers = exposed_by_layer((record, span.exposed_ns / NS_PER_US) for record, span in exposed if record)
        return {
            "after": {key: getattr(timeline, key) for key in keys},
            "why": why_slow(timeline.step_us, timeline.compute_us, timeline.exposed_us, layers),
            "layers": [list(row.row) for row in layers],
        }

    def _election(self, module: GraphModule, entry: GraphEntry) -> _Election:
        """The election on a graph; without ranks if no other process runs its collectives."""
        store, ranks = shared_store(), _ranks_of_groups(module)
        if store is None or not ranks - {_rank()}:
            return _Election(None, "", _rank(), ())
        # Graphs without collectives do not count: a rank may find in a cache what another one has just compiled.
        name = self._compilation(entry.phase, entry.compile_id)
        self._num_votes[name] += 1
        return _Election(StoreBoard(store), f"{name} {self._num_votes[name]}", _rank(), as_ranges(ranks))

    def _compilation(self, phase: str, compile_id: str) -> str:
        """A name for one compilation of a graph that all ranks give it, whatever they find in caches."""
        return f"{phase} {compile_id} {self._num_compilations[compile_id]}"

    def _objection(self, election: _Election, result: Result) -> str | None:
        """Why a graph that this rank has rewritten must stay as it was on all ranks; None: it need not."""
        mine = Vote(result.report.before.digest, result.report.plan_digest, "", election.ranks)
        return self._resolve(election, mine).objection

    def _leave_together(self, election: _Election, why: str, *, wait: bool = True) -> None:
        """Vote to leave a graph as it was; an error if another rank runs the rewritten graph all the same."""
        mine = Vote("", "", why, election.ranks)
        if wait:
            self._resolve(election, mine)
        elif election.board is not None:
            with self.contained("the vote of this rank", strict=False):
                tell(election.board, election.name, election.rank, mine)

    def _resolve(self, election: _Election, mine: Vote) -> Resolution:
        """The decision of the ranks; an error if this rank cannot rewrite the graph, or leave it, as the others do."""
        found = Resolution()
        with self.contained("the vote of the other ranks", strict=False):
            if election.board is not None:
                found = decide(election.board, election.name, election.rank, mine, self._silent)
            if silent := [rank for rank in found.silent if rank not in self._silent]:
                self._silent.update(silent)
                ranks, them = f"rank {silent[0]}", "it"
                if len(silent) > 1:
                    ranks, them = f"ranks {', '.join(map(str, silent))}", "them"
                self.say(SILENT_RANKS.format(ranks=ranks, name=election.name, seconds=WAIT_S, them=them))
        if found.divergence is not None:
            raise _error_of(found.divergence)
        return found

    def order_together(self, arrange: Callable[[], Callable[[], None] | None]) -> None:
        """Fix the order of the rewritten graph in the compiler's code on all of its ranks, or on none.

        `arrange` returns a function that undoes it, or None if there is no order to fix. If it raises, nothing changed.
        """
        if self._woven is None:  # the graph is as it was, and so is its order
            return
        undo: Callable[[], None] | None = None
        why = ""
        try:
            if (undo := arrange()) is None:
                return
        except Exception as error:
            log.info("weft: the order of a graph is not kept", exc_info=error)
            why = _told(error)
        self._num_votes[self._woven.name] += 1
        name = _vote_on_order(self._woven.name, self._num_votes[self._woven.name])
        mine = Vote("", "" if why else "ordered", why.partition("\n")[0], self._woven.ranks)
        found = self._resolve(replace(self._woven, name=name), mine).objection
        if undo is not None and found is not None:
            undo()
        if why or found is not None:
            self.say(f"Inductor may change the order that Weft gave a graph, on all ranks alike: {why or found}")

    def _result(self, module: GraphModule, options: Options, fuses: bool, is_part: bool) -> Result:
        """The result of the plan that was recorded for a graph, or of a new one."""
        if options.plan is not None:
            try:
                plan = PlanFolder(options.plan).find(*identity_of(module, options.groups))
                return carry_out(module, plan, options.description, verify=options.verify, groups=options.groups)
            except PlanError as error:
                if options.strict:
                    raise
                lines = [f"a graph is planned anew: {error}", *([SAME_PLANS] if _num_ranks() > 1 else [])]
                self.say("\n".join(lines))
        return _optimize(module, options, fuses, is_part)

    def _warn_of_memory(self, result: Result, entry: GraphEntry, options: Options) -> None:
        """Without a memory limit, say if a graph needs more memory than the device of the stated cluster has."""
        if _rank() or options.memory_limit_bytes is not None or not isinstance(result.report, SimulatedReport):
            return
        if found := result.report.does_not_fit:
            self.say(f"the {entry.role} graph {found}; with the option weft.memory_limit, Weft decides what to keep")

    @contextmanager
    def contained(self, what: str, strict: bool) -> Generator[None]:
        """Turn an error inside the block into a warning, so that the compilation continues; `strict` raises it."""
        try:
            yield
        except Exception as error:
            if strict:
                raise
            log.info("weft: %s failed", what, exc_info=error)
            self.say(f"{what} is missing: {_told(error)}")

    def _entry(self, identity: str, module: GraphModule) -> GraphEntry:
        compile_id, phase = compat.compilation()
        frame = self._frames.get(compile_id, [""])[-1]
        phase = phase or "inference"
        return GraphEntry(identity, frame, compile_id, phase, rank=_rank(), role=_role(module, compile_id, phase))

    def _leave(
        self,
        module: GraphModule,
        entry: GraphEntry,
        options: Options,
        folder: Path | None,
        error: Exception,
        others: str,
    ) -> None:
        """Record that a graph stays unchanged, and why; `others` says what the other ranks do."""
        told = _told(error)
        is_fault = not isinstance(error, WeftError)
        file: Path | None = None
        entry = replace(entry, report={}, skipped=told.splitlines()[0])
        if is_fault:
            log.info("weft: a graph is left as it was", exc_info=error)
            entry = replace(entry, fault="".join(traceback.format_exception(error)))
            with self.contained("a file to report", strict=False):
                file = write_fault(lambda: listing(module), options, entry.fault, folder)
        with self.contained("a statement for other ranks", strict=False):
            num_left = sum(1 for _ in collectives(module.graph))
            entry = replace(entry, num_left=num_left, statement=_state(module, options))
        with self.contained("a report of a graph", strict=False):
            self._add(entry, folder)
        with self.contained("a statement for other ranks", strict=False):
            self._publish(entry, options)
        with self.contained("a search for collectives", strict=False):
            self._look_for_collectives(entry)
        lines = [f"a graph is left as it was: {told}"]
        lines += [REPORT_IT] if is_fault else []
        lines += (
            [f"attach {file}: it has the options, the versions and the graph, with no data but small constants"]
            if file
            else []
        )
        lines += [others] if _num_ranks() > 1 and entry.num_left else []
        self.say("\n".join(lines))

    def _add(self, entry: GraphEntry, folder: Path | None) -> None:
        self._entries.append(entry)
        if folder is not None:
            try:
                write_entry(side_file(folder, entry.identity), entry)
            except OSError as error:
                self.say(f"no report is written: {error}")
        name, nodes, collectives, applied, declined, milliseconds, *_, note = entry.row
        if note:
            log.info("weft: %s: %s", name, note)
        else:
            text = "weft: %s: nodes %s, collectives %s, %s applied, %s declined, %s ms"
            log.info(text, name, nodes, collectives, applied, declined, milliseconds)

    def _publish(self, entry: GraphEntry, options: Options) -> None:
        """Publish the statement about a graph to the other ranks, and compare it with theirs."""
        if options.agreement is None or not entry.statement:
            return
        self._options = options
        self._published.add(entry.key)
        said = replace(
            Statement.from_json(entry.statement),
            name=entry.name,
            decisions=tuple(d["sentence"] for key in ("applied", "declined") for d in entry.report.get(key, ())),
        )
        try:
            conflicts = publish(FolderBoard(options.agreement), _rank(), _num_ranks(), said)
        except OSError as error:
            self.say(f"a graph was not published to the other ranks: {error}")
            return
        for conflict in conflicts:
            if options.strict:
                raise VerificationError(str(conflict))
            self.say(str(conflict))

    def _publish_cached(self) -> None:
        """Publish the graphs that came from a cache, which no pass saw."""
        if self._options is None or self._options.agreement is None:
            return
        for entry in self.report().entries:
            if entry.key not in self._published:
                self._publish(entry, self._options)

    def check_agreement(self) -> Agreement:
        """Publish the graphs that a bare hook did not see, and check the statements of all ranks."""
        if self._options is None or self._options.agreement is None:
            do = f"compile with the option {PREFIX}agreement, a folder that all ranks see"
            raise VerificationError(compose("agreement", "no graph was compiled for it", do=do))
        self._publish_cached()
        return check_published(FolderBoard(self._options.agreement), _num_ranks())

    def _look_for_collectives(self, entry: GraphEntry) -> None:
        """Warn if there must be communication and no graph has any.

        A forward graph proves nothing, since DDP communicates in backward; nor does a graph after one with collectives
        (a micro-step that does not synchronize). While DDP's python reducer is on, neither a graph of compiled autograd
        proves anything, nor the backward graph that AOTAutograd makes of dynamic shapes: compiled autograd adds the
        collectives to it later.
        """
        self._has_collectives |= entry.num_collectives > 0
        if self._has_collectives or entry.phase == "forward":
            return
        reducer = compat.settings_of("dynamo").optimize_ddp == "python_reducer" and entry.role == "backward"
        if reducer or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        known = self.report().entries  # cached graphs too
        self._has_collectives = any(entry.num_collectives for entry in known)
        if not self._has_collectives and not self._has_unknown_graphs(known):
            self.say(NO_COLLECTIVES.format(ranks=dist.get_world_size()))


@dataclass(frozen=True)
class _Election:
    """The vote on one graph."""

    board: BallotBox | None
    name: str
    rank: int
    ranks: tuple[tuple[int, int, int], ...]
    """The ranks of the graph's groups, as ranges."""


def _vote_on_order(name: str, number: int) -> str:
    """The name of a vote on the order of a graph in the compiler's code, by the name of the vote on the graph."""
    return f"{name} order {number}"


def _ranks_of_groups(module: GraphModule) -> set[int]:
    """The ranks of the live groups whose collectives are in a graph."""
    names = dict.fromkeys(each.group for each in collectives(module.graph))
    groups = (group for name in names if (group := resolve_group(name)) is not None)
    return {rank for group in groups for rank in dist.get_process_group_ranks(group)}


def _ranks_in(statement: str) -> set[int]:
    """The ranks of this rank's groups in a statement; those that it cannot tell are missing."""
    if not statement:
        return set()
    found: set[int] = set()
    for group in Statement.from_json(statement).order.groups.values():
        is_tiled = group.ranks is not None or (group.span > 0 and _num_ranks() % group.span == 0)
        parts = group.partition(_num_ranks()) if is_tiled else ()
        found.update(*(part for part in parts if _rank() in part))
    return found


def _error_of(divergence: tuple[str, str]) -> VerificationError:
    what, do = divergence
    return VerificationError(compose("agreement", what, do=do))


SESSION = Session()
"""The session of this process."""


def run_report() -> RunReport:
    """One report over all graphs that this process compiled through Weft, including those from a compiler's cache.

    On rank 0 it has the simulated figures of each graph and of the whole step.
    """
    return SESSION.report(simulate=_rank() == 0)


def check_agreement() -> Agreement:
    """Whether all graphs of all ranks can run together; for runs compiled with the option `weft.agreement`.

    It does not wait: a rank without a statement is an error that names the rank. Call it on all ranks once they have
    compiled, or once more on one rank after a barrier.
    """
    return SESSION.check_agreement()


def _optimize(module: GraphModule, options: Options, fuses: bool, is_part: bool) -> Result:
    cluster = options.description
    if cluster is not None and not fuses:
        cluster = replace(cluster, device=replace(cluster.device, fuses=False))
    passes, limit = options.passes, options.memory_limit_bytes
    if is_part and limit is not None:
        # The values to save are decided. Backward holds them as inputs, which count to its end, so its given order may
        # seem to need more than the limit; no other order may then need more than that one.
        passes = passes.without(["decide-memory"])
        chosen = passes.chosen(module.graph, read_groups(module, options.groups)).passes
        is_planned = any(each.keeps_memory_limit for each in chosen)  # no order is planned without collectives
        limit = max(limit, simulate(module, cluster, groups=options.groups).peak_bytes) if is_planned else None

    def run(pipeline: Pipeline, limit_bytes: int | None) -> Result:
        return optimize(
            module,
            cluster,
            pipeline=pipeline,
            memory_limit_bytes=limit_bytes,
            effort=options.effort,
            strict=options.strict,
            verify=options.verify,
            groups=options.groups,
            cache=options.cache,
        )

    result = run(passes, limit)
    if limit is None or options.memory_limit_bytes is None or not is_part:
        return result
    # As inputs that count to the end, saved values hide what another order holds beside them while they are freed.
    known = cluster or assumed_cluster(read_groups(module, options.groups), ASSUMED_NODES)
    before, after = (peak_of_part(each, read_groups(each, options.groups), known) for each in (module, result.module))
    room = options.memory_limit_bytes - module.meta.get(BESIDE_KEY, options.memory_limit_bytes)
    return result if after <= max(before, room) else run(passes.without(["schedule-overlap"]), None)


def _role(module: GraphModule, compile_id: str, phase: str) -> str:
    """The part of the step that a graph computes."""
    if compile_id.startswith("!"):  # by compiled autograd
        return "backward"
    if phase != "inference":
        return phase
    traces = [str(node.meta["stack_trace"]) for node in module.graph.nodes if node.meta.get("stack_trace")]
    is_optimizer = bool(traces) and all(OPTIMIZERS in trace for trace in traces)
    return "optimizer" if is_optimizer else "inference"


def _with_simulations(result: Result, module: GraphModule, options: Options, fuses: bool) -> SimulatedReport:
    """The report with both graphs simulated on demand, on the assumed cluster if none is given."""
    if isinstance(result.report, SimulatedReport):
        return result.report
    cluster = assumed_cluster(read_groups(module, options.groups), ASSUMED_NODES)
    cluster = replace(cluster, device=replace(cluster.device, fuses=fuses))
    return with_simulations(result.report, module, result.module, cluster, groups=options.groups)


def _emit(entry: GraphEntry, module: GraphModule, result: Result) -> None:
    """Write the listings and the report where users of the compiler stack look for them."""
    compat.emit_artifact("weft_before", lambda: listing(module))
    for position, done in enumerate(result.log, 1):
        if done.changed:  # the listing after each pass, in order
            name = done.step.spec.partition("{")[0].replace("-", "_")
            compat.emit_artifact(f"weft_{position:02}_{name}", lambda text=done.after: text)
    compat.emit_artifact("weft_after", lambda: listing(result.module))
    compat.emit_artifact("weft_report", lambda: json.dumps(entry.report), encoding="json")
    log.debug("weft: %s", result.report)
    compat.count("graphs")
    compat.count("graphs changed", any(record.changed for record in result.report.passes))
    compat.count("collectives before", result.report.before.num_collectives)
    compat.count("collectives after", result.report.after.num_collectives)
    for name, number in sorted(Counter(decision.pass_name for decision in result.report.applied).items()):
        compat.count(f"{name} applied", number)
    for reason, number in sorted(Counter(decision.reason.value for decision in result.report.declined).items()):
        compat.count(f"declined {reason}", number)


def _digest_of_frame(module: GraphModule, inputs: Sequence[Any]) -> str:
    found = hashlib.sha256(module.code.encode())
    for value in inputs:
        if isinstance(value, Tensor):
            found.update(f"{value.dtype} {list(value.shape)} {value.stride()} {value.device}".encode())
            found.update(f"{type(value).__name__} {value.requires_grad}".encode())
        else:
            found.update(type(value).__name__.encode())
    return found.hexdigest()[:32]


def _state(module: GraphModule, options: Options, result: Result | None = None) -> str:
    """The statement about a compiled graph that ranks compare; empty if it cannot be made."""
    try:
        order = read_order(module, read_groups(module, options.groups))
        left = digest(listing(module)) if result is None else ""
    except WeftError:
        return ""
    if result is None:
        return Statement("", left, "", left, order=order).to_json()
    report = result.report
    graphs = (report.before.digest, report.plan_digest, report.after.digest)
    return Statement("", *graphs, facts=report.bare_plan.facts, order=order).to_json()


def _told(error: Exception) -> str:
    """The text of an error, with its type and place in Weft unless Weft raised it on purpose."""
    if isinstance(error, WeftError):
        return str(error)
    try:
        text = next(iter(str(error).strip().splitlines()), "")
    except Exception:
        text = "no text"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _HOME in Path(frame.filename).parents]
    place = f" ({Path(frames[-1].filename).relative_to(_HOME)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{f': {text}' if text else ''}{place}"


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
