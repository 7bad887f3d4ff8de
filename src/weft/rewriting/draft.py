"""Draft: the graph as it would be after the rewrites planned so far. The graph itself does not change.

Contract: a draft answers a rewrite's questions (arguments, users, values, writes) about nodes of the graph and planned
calls (`New`) alike, and records the actions that turn the graph into the draft. It refuses a replacement that behaves
differently from the original, because of a write in between or because tensors would newly share memory.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from weft.compat import OpOverload, storage_key
from weft.errors import GraphError
from weft.graph import metadata, ops
from weft.graph.listings import call_lines
from weft.graph.operator_effects import PLAIN, Profile, profile
from weft.graph.versions import dag_of
from weft.plan.decision import Reason, Refusal
from weft.plan.plan import Rewrite
from weft.rewriting.new_nodes import AnyNode, New, op_word, sources, swapped
from weft.rewriting.strides import ALIGNMENT_BYTES, Change, is_alike, is_stride_blind

MAX_RESTRIDED = 32
"""Maximum number of nodes whose strides one rewrite may change."""


class Draft:
    """A graph with planned changes."""

    def __init__(self, graph: Graph) -> None:
        self.dag = dag_of(graph)
        self.actions: list[Rewrite] = []
        self.gone: dict[AnyNode, None] = {}
        """The nodes removed so far."""
        effects = self.dag.effects
        self._special = dict(effects.special)
        self.notes: dict[Any, Any] = {}
        """Cached facts about nodes, for rules."""
        self._arguments: dict[AnyNode, tuple[tuple[Any, ...], Mapping[str, Any]]] = {}
        self._swaps: dict[AnyNode, dict[AnyNode, AnyNode]] = {}
        """Replacements not yet written into a user's arguments. Deferring them rewrites a user of many nodes once."""
        self._users: dict[AnyNode, dict[AnyNode, None]] = {}
        self._held: dict[AnyNode, tuple[int, ...]] = {}
        self._next_storage = 1 << 48
        self._taken = {node.name for node in self.dag.nodes}
        self._pending: list[New] = []
        self._memory = effects.memory
        self._boundaries = [i for i, p in effects.special if p.opaque]
        self._escaping: dict[int, int] = {}
        """The storages that the graph returns, each with the number of results that hold it."""
        for node in self.results:
            self._count_result(node, 1)
        self._outside = {s for i, n in enumerate(self.dag.nodes) if _is_given(n) for s in effects.held(i)}

    @functools.cached_property
    def mode(self) -> Any:
        """The fake mode of the graph."""
        return metadata.mode_of(self.dag.nodes)

    @functools.cached_property
    def results(self) -> tuple[Node, ...]:
        """The nodes that the graph returns."""
        return tuple(self.dag.nodes[-1].all_input_nodes)

    # Questions about a node.

    def arguments(self, node: AnyNode) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The positional and keyword arguments of a call; the same object until they change."""
        found = self._arguments.get(node)
        if found is None:
            found = self._arguments[node] = (node.args, node.kwargs)
        swaps = self._swaps.pop(node, None)
        if swaps is not None:
            found = self._arguments[node] = (swapped(found[0], swaps), swapped(found[1], swaps))
        return found

    def bind(self, node: AnyNode) -> dict[str, Any]:
        """The arguments of a call by their names in the schema, with defaults filled in."""
        return ops.bind_arguments(node.target, *self.arguments(node))

    def users(self, node: AnyNode) -> Sequence[AnyNode]:
        """The users of a node."""
        return list(self._users_of(node))

    def num_users(self, node: AnyNode) -> int:
        """The number of users of a node."""
        return len(self._users_of(node))

    def _users_of(self, node: AnyNode) -> Mapping[Any, None]:
        return self._users[node] if node in self._users else getattr(node, "users", {})

    def position(self, node: AnyNode) -> int:
        """The position of a node; a planned call has the position of the node that it is inserted before."""
        return node.position if isinstance(node, New) else self.dag.index[node]

    def value(self, node: AnyNode) -> Any:
        """The fake value of a node. That of a planned call is computed on first use; GraphError if it cannot be."""
        if isinstance(node, New) and "val" not in node.meta:
            args, kwargs = self._looked_up([list(node.args), node.kwargs], {})
            node.meta["val"] = metadata.compute(node.target, args, kwargs, self.mode)
        return node.meta.get("val")

    def _looked_up(self, item: Any, known: Mapping[AnyNode, Any]) -> Any:
        """Arguments with nodes replaced by their values."""
        if isinstance(item, New | Node):
            return known[item] if item in known else self.value(item)
        if isinstance(item, call_lines.GroupOf):
            return "group"
        if isinstance(item, Mapping):
            return {key: self._looked_up(value, known) for key, value in item.items()}
        return [self._looked_up(part, known) for part in item] if isinstance(item, list | tuple) else item

    def profile(self, node: AnyNode) -> Profile:
        """The effects of a node: on storages, random state and other ranks."""
        if isinstance(node, New):
            return profile(node.target)
        return self._special.get(self.dag.index[node], PLAIN)

    # Memory.

    def held(self, node: AnyNode) -> tuple[int, ...]:
        """The storages that a node holds."""
        if isinstance(node, Node) and node not in self._held:
            return self.dag.effects.held(self.dag.index[node])
        if node not in self._held:
            self._held[node] = self._held_by_new(node) if isinstance(node, New) else ()
        return self._held[node]

    def _held_by_new(self, node: New) -> tuple[int, ...]:
        if self.is_alias(node) and node.args and isinstance(node.args[0], New | Node):
            return self.held(node.args[0])
        self._next_storage += 1
        return (self._next_storage,)

    def is_alias(self, node: AnyNode) -> bool:
        """Whether the node's result shares memory with its input."""
        found = self.profile(node)
        if not found.may_copy:
            return found.is_view
        mine, source = self.value(node), self.arguments(node)[0][0]
        theirs = self.value(source) if isinstance(source, New | Node) else None
        if not isinstance(mine, Tensor) or not isinstance(theirs, Tensor):
            return True
        return storage_key(mine) == storage_key(theirs)

    def reads(self, node: AnyNode) -> Iterable[int]:
        """The storages that a node reads, limited to those that are written anywhere."""
        if isinstance(node, Node):
            accesses = self._memory.by_node.get(self.dag.index[node], ())
            return [storage for storage, is_write in accesses if not is_write]
        if self.is_alias(node):
            return ()
        held = {s for source in sources(node.args, node.kwargs) for s in self.held(source)}
        return sorted(s for s in held if s in self._memory.writes)

    def first_write(self, storage: int, begin: int, end: int | None = None) -> Node | None:
        """The first node strictly between two positions that writes a storage."""
        found = self._memory.first_write(storage, begin, end)
        return self.dag.nodes[found] if found is not None else None

    def boundary(self, begin: int, end: int) -> Node | None:
        """The first unknown call strictly between two positions. It may change any mode, so no match may cross it."""
        k = bisect_right(self._boundaries, begin)
        found = k < bisect_left(self._boundaries, end)
        return self.dag.nodes[self._boundaries[k]] if found else None

    # Changing.

    def call(self, target: Any, *args: Any, before: AnyNode, name: str = "", **kwargs: Any) -> New:
        """Plan a call; `target` is an operator, or its name as in listings."""
        op = ops.op_of(target) if isinstance(target, str) else target
        base = name or f"{before.name}_{op_word(op)}"
        unique = base
        number = 0
        while unique in self._taken:
            number += 1
            unique = f"{base}_{number}"
        self._taken.add(unique)
        made = New(unique, op, args, kwargs, self.position(before))
        self._users[made] = {}
        self._pending.append(made)
        return made

    def forget(self) -> None:
        """Discard the calls planned since the last replacement."""
        self._taken.difference_update(made.name for made in self._pending)
        for made in self._pending:
            del self._users[made]
        self._pending = []

    def why_not_replace(self, old: AnyNode, new: AnyNode, *, keeps_strides: bool = True) -> Refusal | None:
        """Why `new` cannot replace `old`; None if it can."""
        try:
            is_same = metadata.same(self.value(old), self.value(new))
            is_fit = is_same or (not keeps_strides and self._may_restride(old, new))
        except GraphError as error:
            return Refusal(Reason.UNSUPPORTED_FORM, f"{old.name} stays: {str(error).splitlines()[0]}")
        if not is_fit:
            return Refusal(
                Reason.UNSUPPORTED_FORM, f"{old.name} stays: its replacement has a different type or strides"
            )
        mine, theirs = set(self.held(old)), set(self.held(new))
        if mine == theirs:
            return self._why_not_same(old, new)
        if new in self._pending and not self.is_alias(new):  # planned for this rewrite; an earlier call has other users
            return self._why_not_copy(old, mine) if self.is_alias(old) else None
        return self._why_not_share(old, new, mine, theirs)

    def _may_restride(self, old: AnyNode, new: AnyNode) -> bool:
        """Whether no user depends on the changed strides, followed until strides are the same as before."""
        was, value = self.value(old), self.value(new)
        if not is_alike(was, value):
            return False
        changed: dict[AnyNode, Any] = {old: value}
        change = self._change(old, new)
        waiting: list[AnyNode] = [old]
        while waiting:
            for user in self.users(waiting.pop()):
                if not self.is_stride_blind(user, change) or len(changed) > MAX_RESTRIDED:
                    return False
                args, kwargs = self.arguments(user)
                args, kwargs = self._looked_up([list(args), dict(kwargs)], changed)
                result = metadata.compute(user.target, args, kwargs, self.mode)
                if self.profile(user).aliases or not metadata.same(result, self.value(user)):
                    if not is_alike(result, self.value(user)):
                        return False
                    changed[user] = result
                    waiting.append(user)
        return True

    def _change(self, old: AnyNode, new: AnyNode) -> Change:
        """How a replacement differs from the original in memory. The caller's tensors may begin at any address."""
        was, value = self.value(old), self.value(new)
        if not metadata.same(list(was.stride()), list(value.stride())):
            return Change.STRIDES
        offsets: list[Any] = [was.storage_offset(), value.storage_offset()]
        is_known = all(type(n) is int for n in offsets) and self._outside.isdisjoint((*self.held(old), *self.held(new)))
        distance = (offsets[0] - offsets[1]) * was.element_size() if is_known else 1
        return Change.PLACE if distance % ALIGNMENT_BYTES else Change.ALIGNED_PLACE

    def is_stride_blind(self, node: AnyNode, change: Change = Change.STRIDES) -> bool:
        """Whether a node gives the same bits if its inputs change in this way."""
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            return False
        values = [self.value(n) for n in (*sources(*self.arguments(node)), node)]
        return is_stride_blind(node.target, self.bind(node), values, change)

    def _why_not_same(self, old: AnyNode, new: AnyNode) -> Refusal | None:
        """Why a returned view cannot become an input or a tensor that is returned as well: the caller sees aliases."""
        if not self._is_returned(old) or isinstance(new, New):
            return None
        if _is_given(new):
            return Refusal(
                Reason.ESCAPES,
                f"{old.name} stays: it is returned, and its replacement {new.name} is an input",
                new.name,
            )
        if self._is_returned(new):
            return Refusal(
                Reason.ESCAPES, f"{old.name} stays: it and its replacement {new.name} are both returned", new.name
            )
        return None

    def _is_returned(self, node: AnyNode) -> bool:
        return self.dag.nodes[-1] in self._users_of(node)

    def _why_not_copy(self, old: AnyNode, mine: set[int]) -> Refusal | None:
        """Why a view cannot become a copy: its memory is written, or the caller receives it as a view of an input."""
        if mine & self._memory.writes.keys():
            return Refusal(Reason.MUTATED, f"{old.name} stays: the memory that it is a view of is written")
        if mine & self._escaping.keys() & self._outside and self._reaches_output(old):
            return Refusal(Reason.ESCAPES, f"{old.name} stays: it is returned as a view of an input")
        return None

    def _reaches_output(self, node: AnyNode) -> bool:
        """Whether the graph returns the node or a view of it."""
        stack = [node]
        while stack:
            for user in self.users(stack.pop()):
                if user.op == "output":
                    return True
                if user.op == "call_function" and self.is_alias(user):
                    stack.append(user)
        return False

    def _why_not_share(self, old: AnyNode, new: AnyNode, mine: set[int], theirs: set[int]) -> Refusal | None:
        """Why a tensor with its own memory cannot become one that shares memory with another."""
        place = self.position(old)
        for storage in sorted(mine | theirs):
            write = self.first_write(storage, place)
            if write is not None:
                sentence = f"{old.name} stays: {write.name} writes {old.name} or {new.name} later"
                return Refusal(Reason.MUTATED, sentence, write.name)
        if (theirs & self._escaping.keys() or theirs & self._outside) and self._reaches_output(old):
            return Refusal(Reason.ESCAPES, f"{old.name} stays: it is returned, and would share memory with {new.name}")
        return None

    def replace(self, replacements: Mapping[AnyNode, AnyNode], candidates: Iterable[AnyNode]) -> Refusal | None:
        """Let the users of each node use its replacement, and remove the candidates that become unused."""
        texts = [call_lines.write(made.name, made.target, made.args, made.kwargs) for made in self._pending]
        if None in texts:
            first = next(iter(replacements))
            self.forget()
            return Refusal(Reason.UNKNOWN_SIZE, f"{first.name} stays: a size in its replacement has no name")
        calls = tuple(text for text in texts if text is not None)
        for made in self._pending:
            for source in sources(made.args, made.kwargs):
                self._changed_users(source)[made] = None
        self._pending = []
        for old, new in replacements.items():
            self._inherit(old, new)
        erased = self._erase([*replacements, *candidates])
        last = max(replacements, key=self.position)
        named = tuple((old.name, new.name) for old, new in replacements.items())
        self.actions.append(Rewrite(calls, last.name, named, tuple(node.name for node in erased)))
        return None

    def _inherit(self, old: AnyNode, new: AnyNode) -> None:
        if isinstance(new, New) and not self.is_alias(new) and not self.is_alias(old):
            known = self._held.get(new, ())  # a later write to the one is a write to the other
            self._held[new] = tuple(dict.fromkeys((*known, *self.held(old))))
        if self._is_returned(old):
            self._count_result(old, -1)
            self._count_result(new, 0 if self._is_returned(new) else 1)
        users, held = self.users(old), self.held(new)
        for user in users:
            self._swaps.setdefault(user, {})[old] = new
            self._changed_users(new)[user] = None
        self._users[old] = {}
        if not set(held).issuperset(self.held(old)):
            self._hold(users, held)

    def _hold(self, users: Sequence[AnyNode], held: tuple[int, ...]) -> None:
        """Update the storages of all views among the users of a node, and of their views, to its new storages."""
        stack = list(users)
        while stack:
            node = stack.pop()
            if node.op != "call_function" or not self.is_alias(node) or self.held(node) == held:
                continue
            is_returned = self._is_returned(node)
            self._count_result(node, -1 if is_returned else 0)
            self._held[node] = held
            self._count_result(node, 1 if is_returned else 0)
            stack += self.users(node)

    def _count_result(self, node: AnyNode, times: int) -> None:
        for storage in self.held(node):
            count = self._escaping.pop(storage, 0) + times
            if count:
                self._escaping[storage] = count

    def _changed_users(self, node: AnyNode) -> dict[AnyNode, None]:
        if node not in self._users:
            self._users[node] = dict.fromkeys(getattr(node, "users", {}))
        return self._users[node]

    def _erase(self, candidates: Sequence[AnyNode]) -> list[AnyNode]:
        """Remove unused candidates, users first, and then every node that only they used."""
        erased: list[AnyNode] = []
        order = itertools.count()
        heap = [(-self.position(node), next(order), node) for node in dict.fromkeys(candidates)]
        heapq.heapify(heap)
        while heap:
            node = heapq.heappop(heap)[2]
            if node in self.gone or node.op != "call_function" or self.num_users(node):
                continue
            self.gone[node] = None
            erased.append(node)
            for source in sources(*self.arguments(node)):
                users = self._changed_users(source)
                users.pop(node, None)
                if not users and self._is_pure(source):
                    heapq.heappush(heap, (-self.position(source), next(order), source))
        return erased

    def _is_pure(self, node: AnyNode) -> bool:
        """Whether the node has no effect but its result."""
        found = self.profile(node)
        acts = found.opaque or found.random or found.ordered or found.writes or found.launch or found.wait
        return node.op == "call_function" and not acts


def _is_given(node: AnyNode) -> bool:
    return node.op in ("placeholder", "get_attr")
