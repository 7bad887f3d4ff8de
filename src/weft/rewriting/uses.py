"""Questions about the users and the device of a result, for rewrites that depend on a compiler fusing them."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.compat import OpOverload
from weft.plan.context import Context
from weft.rewriting.draft import AnyNode, Draft


def has_pointwise_tag(node: AnyNode) -> bool:
    """Whether torch tags the operator as pointwise: each element of the result depends on the elements at its index."""
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def only_pointwise_users(draft: Draft, node: AnyNode) -> bool:
    """Whether all users of the node are pointwise, directly or through views, and there is at least one."""
    stack = [node]
    while stack:
        users = draft.users(stack.pop())
        views = [user for user in users if not has_pointwise_tag(user)]
        if not users or not all(user.op == "call_function" and draft.profile(user).is_view for user in views):
            return False
        stack += views
    return True


def is_on_gpu(value: object, context: Context) -> bool:
    """Whether to assume that a compiler fuses pointwise operators: the tensor is on a GPU, or a cluster is given."""
    return isinstance(value, Tensor) and (value.device.type not in ("cpu", "meta") or context.cluster is not None)
