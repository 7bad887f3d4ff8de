"""All choices for the values of a step, in the form in which a bound covers them.

Contract: the program has each operation of the given graph once; late repetitions are left out. Values that can be made
again may be made any number of times, for any use. A kernel of its own and a collective take the same time in every
mixture. A fused operation takes only the time of traffic that no mixture avoids (`least_traffic.py`): what it reads and
no other fused operation does, and what it writes for a reader outside. The second is an operation of its own, since
another run than the first one may write it. Launch gaps are left out, for fusion may save kernels.

Only clusters without an execution have such least times: otherwise the clocks, and what a compiler fuses, depend on the
whole step.
"""

from __future__ import annotations

from dataclasses import replace

from weft.bounds.choices import ONCE, Choices
from weft.compat import input_nodes
from weft.cost.device import Device, HostMemory
from weft.cost.least_traffic import least_traffic
from weft.graph import ops
from weft.retention.repeats import is_removable
from weft.retention.sites import Sites
from weft.simulation.program import OpKind


def all_choices(sites: Sites, device: Device, host_memory: HostMemory | None = None) -> Choices | None:
    """Every mixture of keeping, gathering again and recomputing, and with host memory of offloading.

    None if the device has an execution.
    """
    if device.execution:
        return None
    return _LeastProgram(sites, device, host_memory).choices()


class _LeastProgram:
    def __init__(self, sites: Sites, device: Device, host_memory: HostMemory | None) -> None:
        self.sites, self.dag, self.given, self.host_memory = sites, sites.dag, sites.program, host_memory
        self.original = [sites.twin.get(i, i) for i in range(len(self.dag.nodes))]
        self.least = least_traffic(self.dag, device, self.original)
        self.needed = self._needed()
        self.storage = self._storages()

    def _needed(self) -> list[int]:
        """The operations that run in every mixture: what the step returns or does depends on them."""
        index, found = self.dag.index, set[int]()
        stack = [i for i, node in enumerate(self.dag.nodes) if not is_removable(node)]
        while stack:
            i = self.original[stack.pop()]
            if i not in found:
                found.add(i)
                stack += [index[source] for source in input_nodes(self.dag.nodes[i])]
        return sorted(found)

    def _storages(self) -> dict[int, int]:
        """For the storages of repetitions those of the originals."""
        allocates, found = self.given.allocates, dict[int, int]()
        for i, first in enumerate(self.original):
            if [size for _, size in allocates[i]] == [size for _, size in allocates[first]]:
                found |= {mine: its for (mine, _), (its, _) in zip(allocates[i], allocates[first], strict=True)}
        return found

    def choices(self) -> Choices:
        given, original, written = self.given, self.original, self.least.written_ns
        is_needed = set(self.needed)
        rows: list[tuple[int, bool]] = []
        """Each operation, and after it the writing of its result, if that counts by itself."""
        for i in self.needed:
            rows.append((i, False))
            if i in written and original[written[i][0]] in is_needed:
                rows.append((i, True))
        number = {row: k for k, row in enumerate(rows)}
        writes: dict[int, list[int]] = {}
        """The writings that come before a reader."""
        for i, is_write in rows:
            if is_write:
                writes.setdefault(original[written[i][0]], []).append(number[i, True])

        def before(i: int) -> tuple[int, ...]:
            earlier = (original[j] for j in given.preds[i])
            found = [number[j, False] for j in earlier if j in is_needed and j != i]
            return tuple(dict.fromkeys((*found, *writes.get(i, ()))))

        def used(i: int) -> tuple[int, ...]:
            return tuple(dict.fromkeys(self.storage.get(s, s) for s in given.uses[i]))

        def waited(i: int) -> tuple[int, ...]:
            return tuple(dict.fromkeys(number[original[j], False] for j in given.waits_for[i]))

        size = len(rows)
        program = replace(
            given,
            names=tuple(f"{given.names[i]}_written" if w else given.names[i] for i, w in rows),
            kinds=tuple(OpKind.COMPUTE if w else given.kinds[i] for i, w in rows),
            duration_ns=tuple(written[i][1] if w else self._least_ns(i) for i, w in rows),
            preds=tuple((number[i, False],) if w else before(i) for i, w in rows),
            queue=tuple(-1 if w else given.queue[i] for i, w in rows),
            waits_for=tuple(() if w else waited(i) for i, w in rows),
            drains=(False,) * size,
            launch_gap_ns=0,
            allocates=tuple(() if w else given.allocates[i] for i, w in rows),
            uses=tuple(() if w else used(i) for i, w in rows),
            latency_ns=tuple(0 if w else given.latency_ns[i] for i, w in rows) if given.latency_ns else (),
            kernel=(),
            host_ns=(),
            sm_share_ppm=(),
        )
        again = tuple(ONCE if w else self._again_ns(i) for i, w in rows)
        memory = self.host_memory
        return Choices(program, again, (memory.limit_bytes, int(memory.bandwidth_gbps * 1000) + 1) if memory else None)

    def _least_ns(self, i: int) -> int:
        least = self.least
        return least.result_ns[i] + least.read_ns[i] if least.is_fused[i] else self.given.duration_ns[i]

    def _again_ns(self, i: int) -> int:
        sites, node = self.sites, self.dag.nodes[i]
        if i >= sites.cut or node.op != "call_function" or not sites.is_free(sites.site_of[i]):
            return ONCE
        if ops.is_wait(node.target):
            return 0
        return self.least.result_ns[i] if self.least.is_fused[i] else self.given.duration_ns[i]
