"""Gather parameters in a narrower dtype, and cast the result back.

Why: parameters that are stored in f32 are often gathered in f32. In bf16, a gather sends half of the bytes; in fp8,
a quarter.

Before::

    ag: f32[4, 8] = all_gather(p, 2, 'dp')
    w: f32[4, 8] = wait(ag)

After::

    w_to_copy: bf16[2, 8] = _to_copy(p, dtype=bf16)
    w_all_gather: bf16[4, 8] = all_gather(w_to_copy, 2, 'dp')
    w_wait: bf16[4, 8] = wait(w_all_gather)
    w_to_copy_1: f32[4, 8] = _to_copy(w_wait, dtype=f32)

In fp8, each row is divided by its largest magnitude / 448, and its f32 scale travels with it in the same launch. Then a
value of w differs from its original by at most 1/16 of itself (bf16: 1/256), or, near zero, by 1/458752 of the largest
magnitude of its row.

Declines: gathers of anything but parameters; tensors whose dtype is not wider; in fp8, tensors of one dim; any gather
without a cluster to predict times on; gathers that would not become faster.
Numerics: changes-dtype: every rank, also the one that holds the shard, computes with the rounded parameters. Bytes on
the wire: a half or a quarter. No preset contains this pass.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.fx import Node

from weft.graph.collective import Collective, num_bytes
from weft.graph.ops import Kind
from weft.graph.roles import Role, Roles
from weft.passes.base import Numerics
from weft.passes.rewrite_pass import RewritePass
from weft.plan.context import Context
from weft.plan.decision import Reason, Refusal
from weft.rewriting.draft import AnyNode, Draft
from weft.rewriting.launches import gathered, group_of, why_not_alone, why_not_faster
from weft.rewriting.pattern import ANY, Match, Var, op
from weft.rewriting.rules import Replacement, Rule

PATTERN = op("wait", op("all_gather", Var("sent"), Var("size"), ANY).named("launch"))
FP8 = torch.float8_e4m3fn
DTYPES = {"bf16": torch.bfloat16, "fp8": FP8}
SCALE_BYTES = 4
"""Bytes of the f32 scale of a row."""
LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Scale of a row of zeros."""


@dataclass(frozen=True)
class CompressAllGathers(RewritePass):
    """Gather parameters in bf16 or fp8, and cast the result back."""

    numerics = Numerics.CHANGES_DTYPE

    dtype: Literal["bf16", "fp8"] = "bf16"
    """The dtype in which parameters are sent."""
    always: bool = False
    """Compress even where it saves no time."""

    def rules(self, context: Context) -> Iterable[Rule]:
        roles = functools.cache(lambda draft: Roles(draft.dag))

        def replace(draft: Draft, match: Match) -> Replacement:
            launch = match["launch"]
            if not isinstance(launch, Node):  # planned by this pass
                return None
            role = roles(draft).of(Collective(launch))
            return self._why_not(draft, match, role, context) or self._compressed(draft, match)

        return [Rule(PATTERN, replace)]

    def _why_not(self, draft: Draft, match: Match, role: Role, context: Context) -> Refusal | None:
        name, value, dtype = match.root.name, draft.value(match["sent"]), DTYPES[self.dtype]
        if role is not Role.PARAMETERS:
            return Refusal(Reason.OTHER_ROLE, f"{name} stays: it carries {role.value}, not parameters")
        if not value.dtype.is_floating_point or value.dtype.itemsize <= dtype.itemsize:
            return Refusal(Reason.NO_GAIN, f"{name} stays: its dtype is not wider than {self.dtype}")
        if not value.is_contiguous() or not all(type(size) is int for size in value.shape):
            return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: the gathered tensor is not contiguous or static")
        if dtype is FP8 and (value.dim() < 2 or not value.numel()):
            return Refusal(Reason.NO_GAIN, f"{name} stays: it has no rows that could share a scale")
        refusal = why_not_alone(draft, match["launch"], match.root)
        if refusal is not None or self.always:
            return refusal
        full, rows = num_bytes(draft.value(match.root)), value.shape[0] * match["size"] if value.dim() else 0
        if full is None:
            return Refusal(Reason.UNKNOWN_SIZE, f"{name} stays: its size is not known")
        sent = full // value.dtype.itemsize * dtype.itemsize + (rows * SCALE_BYTES if dtype is FP8 else 0)
        group = group_of(draft, match["launch"], context)
        casts = (full + sent) * (match["size"] + 1) // match["size"]  # of the shard, and of the gathered tensor
        return why_not_faster(name, context, group, (Kind.ALL_GATHER, full), (Kind.ALL_GATHER, sent), casts)

    def _compressed(self, draft: Draft, match: Match) -> AnyNode:
        sent, launch, size, root = match["sent"], match["launch"], match["size"], match.root
        value = draft.value(sent)
        if DTYPES[self.dtype] is not FP8:
            narrow = draft.call("_to_copy", sent, dtype=DTYPES[self.dtype], before=root)
            whole = gathered(draft, narrow, 0, size, launch, root)
            return draft.call("_to_copy", whole, dtype=value.dtype, before=root)
        rows, columns = value.shape[0], value.numel() // value.shape[0]
        wide = sent if value.dim() == 2 else draft.call("view", sent, [rows, columns], before=root)
        if value.dtype is not torch.float32:
            wide = draft.call("_to_copy", wide, dtype=torch.float32, before=root)
        largest = draft.call("amax", draft.call("abs", wide, before=root), [1], True, before=root)
        scale = draft.call("div", largest, torch.finfo(FP8).max, before=root)
        scale = draft.call("clamp_min.default", scale, LEAST_SCALE, before=root)
        scaled = draft.call("_to_copy", draft.call("div", wide, scale, before=root), dtype=FP8, before=root)
        parts = [draft.call("view.dtype", part, torch.uint8, before=root) for part in (scaled, scale)]
        whole = gathered(draft, draft.call("cat", parts, 1, before=root), 0, size, launch, root)
        scaled = draft.call("slice", whole, 1, 0, columns, before=root)
        scaled = draft.call("view.dtype", scaled, FP8, before=root)
        scaled = draft.call("_to_copy", scaled, dtype=torch.float32, before=root)
        scale = draft.call("slice", whole, 1, columns, columns + SCALE_BYTES, before=root)
        scale = draft.call("clone", scale, memory_format=torch.contiguous_format, before=root)
        scale = draft.call("view.dtype", scale, torch.float32, before=root)
        result = draft.call("mul", scaled, scale, before=root)
        if value.dtype is not torch.float32:
            result = draft.call("_to_copy", result, dtype=value.dtype, before=root)
        return result if value.dim() == 2 else draft.call("view", result, list(draft.value(root).shape), before=root)
