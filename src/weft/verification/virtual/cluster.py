"""VirtualCluster: all ranks of a program in one process, with exact collective semantics.

Every rank runs its graph node by node. A launch posts its part and continues; a wait blocks its rank until all members
have posted. Results hold garbage until they are waited for, and inputs are read as late as possible. So a race on real
ranks always gives a wrong value here. Copies to the host with `non_blocking` also hold garbage, until the host waits
for the device. Reads before a wait and writes to a buffer in flight are found by the storages of the actual tensors.
They raise an error, as do deadlocks and ranks that disagree on the launch order of a group. No communication operator
reaches torch's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import getitem
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from weft.compat import HigherOrderOperator, OpOverload, intercept, storage_key, version_of
from weft.errors import VerificationError, WeftError, compose
from weft.graph import ops
from weft.graph.groups import GroupTable
from weft.graph.operator_effects import touched
from weft.verification.rank import Rank, RankProgram, RankResult, check_inputs, one_per_rank, show, tensors_in
from weft.verification.rendezvous import RESHARD, MeetingPlaces, with_distinct_groups
from weft.verification.virtual.hazards import Given, Hazard, read_hazard, write_hazard, written_arguments
from weft.verification.virtual.in_flight import TensorInFlight, TensorsInFlight
from weft.verification.virtual.launches import LaunchReader, poison
from weft.verification.virtual.meetings import Rendezvous
from weft.verification.written_out import each_written_out


@dataclass(frozen=True)
class Blocked:
    """The node at which a rank is blocked, and the tensors that it waits for."""

    node: Node
    flights: tuple[TensorInFlight, ...]

    @property
    def is_over(self) -> bool:
        return all(flight.is_complete for flight in self.flights)


T = TypeVar("T")
Steps = Generator[Blocked, None, RankResult]


@dataclass(frozen=True)
class VirtualCluster:
    """An interpreter that runs `num_ranks` ranks in one process."""

    num_ranks: int

    def run(
        self,
        modules: GraphModule | Sequence[GraphModule],
        inputs: Sequence[Sequence[Any]],
        groups: GroupTable | Sequence[GroupTable],
        seed: int = 0,
        *,
        wide: bool = False,
    ) -> list[RankResult]:
        """Run one graph on every rank, or one graph per rank, on `inputs[rank]`; rank r has the random seed `seed + r`.

        `wide` runs in f64, whatever dtypes the graph asks for.
        """
        graphs = one_per_rank(modules, GraphModule, self.num_ranks, "modules")
        tables = with_distinct_groups(one_per_rank(groups, GroupTable, self.num_ranks, "group tables"))
        graphs = each_written_out(graphs, tables)
        programs = {id(module): RankProgram(module) for module in graphs}
        check_inputs(inputs, [len(programs[id(module)].placeholders) for module in graphs])
        rendezvous, places = Rendezvous(tables), MeetingPlaces()
        with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(devices=[]):
            steps: dict[int, Steps] = {}
            for r in range(self.num_ranks):
                rank = Rank(r, programs[id(graphs[r])], inputs[r], wide=wide)
                reader = LaunchReader(r, self.num_ranks, tables[r], places)
                steps[r] = _RankRun(rank, reader, rendezvous, seed + r).steps()
            return self._take_turns(steps, rendezvous)

    def _take_turns(self, steps: dict[int, Steps], rendezvous: Rendezvous) -> list[RankResult]:
        """Run each rank in turn until it blocks, and repeat until all ranks have ended."""
        blocked: dict[int, Blocked] = {}
        results: dict[int, RankResult] = {}
        while steps:
            able = [r for r in steps if r not in blocked or blocked[r].is_over]
            if not able:
                rendezvous.compare_open()  # an error about a disagreement says more than one about a deadlock
                raise _deadlock(blocked)
            for r in able:
                try:
                    blocked[r] = next(steps[r])
                except StopIteration as end:
                    results[r] = end.value
                    blocked.pop(r, None)
                    del steps[r]
        return [results[r] for r in range(self.num_ranks)]


def _deadlock(blocked: dict[int, Blocked]) -> VerificationError:
    where: list[str] = []
    for r, stand in sorted(blocked.items()):
        flight = next(flight for flight in stand.flights if not flight.is_complete)
        missing = ", ".join(f"rank {m} ({_stand(blocked.get(m))})" for m in flight.meeting.missing)
        waits = f"rank {r}: {stand.node.name} waits for {flight.launch.name} of {flight.meeting.place}"
        where.append(f"{waits}; not launched by {missing}")
    do = "launch the collectives of every group in one order on all its ranks"
    return VerificationError(compose("virtual cluster", "deadlock: no rank can continue", where=where, do=do))


def _stand(blocked: Blocked | None) -> str:
    return f"at {blocked.node.name}" if blocked is not None else "ended"


class _RankRun:
    """One rank on its way through its graph."""

    def __init__(self, rank: Rank, reader: LaunchReader, rendezvous: Rendezvous, seed: int) -> None:
        self.rank, self.reader, self.rendezvous = rank, reader, rendezvous
        self.flights = TensorsInFlight()
        self._host_copies: dict[int, tuple[Tensor, Tensor]] = {}
        """Launched copies to and from host memory by storage, each with its source."""
        self._on_the_way: list[tuple[Tensor, Tensor]] = []
        """Copies to the host that are not done, each with what it will be."""
        self._random_state = torch.Generator().manual_seed(seed).get_state()

    def steps(self) -> Steps:
        """Run the graph; yield wherever the rank must wait for others."""
        rank = self.rank
        for node in rank.program.nodes:
            if node.op == "output":
                outputs = rank.resolve(node.args[0])
                # The caller gets launches without a wait complete.
                yield from self._land(node, tuple(self.flights))
                self._land_copies()
                self._end_copies([copy for copy, _ in self._host_copies.values()])
                return rank.result(outputs)
            target: Any = node.target if node.op == "call_function" else None
            if ops.is_wait(target):
                value, *_ = rank.resolve(ops.bind(node)).values()
                mine = {flight: None for tensor in tensors_in(value) for flight in self.flights.writing(tensor)}
                yield from self._land(node, tuple(mine))
                self._end_copies(tensors_in(value))
            elif ops.host_copy(target) is not None:
                value = self._begin_copy(node)
            elif ops.is_communication(target):
                value = self._launch(node)
                if target.name() == RESHARD:
                    yield from self._land(node, tuple(self.flights.writing(value)))
            else:
                if node in rank.program.syncs:
                    self._land_copies()
                value = self._compute(node)
                value = self._take_off(node, value) if node in rank.program.landings else value
            rank.values[node] = value
            rank.release(node)
        return rank.result(None)

    def _land(self, node: Node, flights: tuple[TensorInFlight, ...]) -> Generator[Blocked, None, None]:
        if not all(flight.is_complete for flight in flights):
            yield Blocked(node, flights)
        for flight in flights:
            flight.land(self.rank.number)
            self.flights.close(flight)

    def _begin_copy(self, node: Node) -> Any:
        """Launch a copy to or from host memory: it holds garbage until its wait, which reads the source."""
        (source,) = tensors_in(self.rank.values[next(iter(node.all_input_nodes))])
        copy = self._compute(node)
        self._host_copies[storage_key(copy)] = copy, source
        poison(copy)
        return copy

    def _end_copies(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if (found := self._host_copies.pop(storage_key(tensor), None)) is not None:
                found[0].copy_(found[1])

    def _take_off(self, node: Node, value: Any) -> Any:
        """Start a copy to the host: its destination holds garbage until the host waits for the device."""
        filled = self.rank.program.landings[node]
        given = {storage_key(tensor) for tensor in self._given(node).tensors}
        if filled == (node,) and any(storage_key(tensor) in given for tensor in tensors_in(value)):
            value = value.clone()  # on one device, the copy may be the argument itself
        self.rank.values[node] = value
        for tensor in [tensor for end in filled for tensor in tensors_in(self.rank.values[end])]:
            self._on_the_way.append((tensor, tensor.clone()))
            poison(tensor)
        return value

    def _land_copies(self) -> None:
        for tensor, value in self._on_the_way:
            tensor.copy_(value)
        self._on_the_way = []

    def _launch(self, node: Node) -> Any:
        target: Any = node.target
        if ops.launch_form(target) is None and target.name() != RESHARD:
            self._refuse(
                node,
                f"cannot run {ops.name_of(target)}",
                "verify on real ranks, or replace the operator",
            )
        launch = self._attempt(node, lambda: self.reader.read(node, self.rank.resolve(ops.bind(node))))
        for part in launch.parts:
            self._stop_at(node, read_hazard(self.flights, self._given(node), part.sent))
        self._stop_at(node, write_hazard(self.flights, self._given(node), launch.written))
        for part in launch.parts:
            meeting = self.rendezvous.post(part.place, part.post)
            for k, result in enumerate(part.results):
                self.flights.add(TensorInFlight(node, meeting, k, part.sent[k] if part.sent else None, result))
                poison(result)
        return launch.value

    # Nodes that compute.

    def _compute(self, node: Node) -> Any:
        """Evaluate a node that does not communicate, and check that it does not touch a tensor in flight."""
        if not self.flights or node.op in ("placeholder", "get_attr"):
            return self._attempt(node, lambda: self._evaluate(node))
        given = self._given(node)
        read = read_hazard(self.flights, given, given.tensors)
        names = written_arguments(node.target) if node.op == "call_function" else ()
        if names:
            bound = ops.bind(node)
            written = tensors_in(self.rank.resolve([bound.get(name) for name in names]))
            self._stop_at(node, write_hazard(self.flights, given, written) or read)
        is_known = isinstance(node.target, OpOverload) or node.target is getitem
        versions = [version_of(tensor) for tensor in given.tensors] if not is_known else []
        value = self._attempt(node, lambda: self._evaluate(node), read)
        if read is not None and not given.is_only_renamed(node, value):
            self._stop_at(node, read)
        changed = [t for t, v in zip(given.tensors, versions, strict=False) if version_of(t) != v]
        self._stop_at(node, write_hazard(self.flights, given, changed))
        return value

    def _given(self, node: Node) -> Given:
        """The tensors that a node takes, with the names of its arguments."""
        return Given([(n.name, t) for n in touched(node) for t in tensors_in(self.rank.values[n])])

    def _evaluate(self, node: Node) -> Any:
        """Evaluate with this rank's random numbers, and raise if the call communicates inside."""
        rank, target = self.rank, node.target if node.op == "call_function" else None
        held = rank.attribute(str(node.target)) if node.op in ("get_attr", "call_module") else None
        if isinstance(held, GraphModule):
            graphs = [inner.graph for inner in held.modules() if isinstance(inner, GraphModule)]
            self._refuse_communication(node, [inner.target for graph in graphs for inner in graph.nodes])
        if node.op in ("placeholder", "get_attr"):
            return rank.evaluate(node)
        if isinstance(target, HigherOrderOperator):
            self._refuse_communication(node, node.args)
        elif isinstance(target, OpOverload):
            if ops.is_wrapper(target):
                return rank.resolve(node.args[0])  # the wrapper of an asynchronous result is the tensor itself
            if not ops.is_random(target):
                return rank.evaluate(node)
        elif ops.name_of(target) is not None:  # a Python function on numbers
            return rank.evaluate(node)
        elif not isinstance(held, GraphModule):  # the call may do anything
            with self._random(), intercept(lambda op: self._refuse_communication(node, [op])):
                return rank.evaluate(node)
        with self._random():
            return rank.evaluate(node)

    @contextmanager
    def _random(self) -> Generator[None]:
        """Draw random numbers from this rank's generator."""
        outside = torch.get_rng_state()
        torch.set_rng_state(self._random_state)
        try:
            yield
        finally:
            self._random_state = torch.get_rng_state()
            torch.set_rng_state(outside)

    # Refusals.

    def _refuse_communication(self, node: Node, targets: Iterable[Any]) -> None:
        """Raise if a nested graph or an opaque call communicates: its tensors in flight cannot be tracked."""
        for target in targets:
            if isinstance(target, OpOverload) and (ops.is_communication(target) or ops.is_wait(target)):
                what = f"{node.name} communicates inside a nested call, by {ops.name_of(target)}"
                self._refuse(node, what, "inline the call into the graph")

    def _attempt(self, node: Node, action: Callable[[], T], likely: Hazard | None = None) -> T:
        """Run an action; turn an exception into an error that names the node, or the hazard that probably caused it."""
        try:
            return action()
        except WeftError:
            raise
        except Exception as error:
            self._stop_at(node, likely)  # garbage in a tensor in flight may have caused it
            text = next(iter(str(error).strip().splitlines()), "")
            self._refuse(node, f"{node.name} failed with {type(error).__name__}: {text}", cause=error)

    def _stop_at(self, node: Node, hazard: Hazard | None) -> None:
        if hazard is not None:
            self._refuse(node, f"{node.name} {hazard}", f"wait for {hazard.launch.name} first")

    def _refuse(self, node: Node, what: str, do: str = "", cause: Exception | None = None) -> NoReturn:
        where = show(node, self.reader.groups)
        message = compose("virtual cluster", f"{what} (rank {self.rank.number})", where=where, do=do)
        raise VerificationError(message) from cause
