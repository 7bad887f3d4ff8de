"""Whether the ranks of a group share memory, so that kernels and copies can reach the memory of a peer.

Contract: a live group on CUDA shares memory if torch does. A graph without a live group is only planned, so there the
cluster decides: the level that holds the group has to list a transport through symmetric memory.
"""

from __future__ import annotations

from torch import Tensor
from torch.fx import Node

from weft.compat import ENABLE_SYMMETRIC_MEMORY, has_symmetric_memory, resolve_group
from weft.graph import ops
from weft.graph.collective import Collective
from weft.graph.groups import group_argument
from weft.plan.context import Context
from weft.plan.decision import Reason, Refusal


def why_not_shared(launch: Node, context: Context, *, asked_for: bool) -> Refusal | None:
    """Why the ranks of a collective do not share memory; None if they do. `asked_for`: the user chose a kernel."""
    name = launch.name
    group = Collective(launch).group
    if resolve_group(group) is None and asked_for and context.cluster is not None:
        level = context.cluster.level_of(context.groups.group(group_argument(launch)))
        if level.symmetric is not None:
            return None
        what = f"the cluster lists no symmetric memory for the level {level.name!r} of {name}"
        return Refusal(Reason.NO_KERNEL, what, name)
    device = _device_of(launch)
    if device != "cuda":
        return Refusal(Reason.NO_KERNEL, f"{name} is on {device}, but symmetric memory needs cuda", name)
    if has_symmetric_memory(group, enabled=not asked_for):
        return None
    what = f"symmetric memory is not available for the group of {name}"
    return how_to_share(launch) or Refusal(Reason.NO_KERNEL, what, name)


def how_to_share(launch: Node) -> Refusal | None:
    """How to enable symmetric memory for the group of a collective; None if it is enabled or cannot be."""
    name, group = launch.name, Collective(launch).group
    can_share = _device_of(launch) == "cuda" and has_symmetric_memory(group, enabled=False)
    if not can_share or has_symmetric_memory(group, enabled=True):
        return None
    what = f"the group of {name} does not use symmetric memory: to enable it, call {ENABLE_SYMMETRIC_MEMORY}"
    return Refusal(Reason.NO_KERNEL, what, name)


def _device_of(launch: Node) -> str:
    """The type of the device that a collective sends from; a launch may return several tensors."""
    value: Tensor = ops.value_of(Collective(launch).inputs[0])
    return value.device.type
