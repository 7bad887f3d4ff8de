"""Questions about the users and the device of a result, for rewrites that depend on a compiler fusing them."""

from __future__ import annotations

from torch import Tensor

from weft.graph.operator_effects import is_pointwise
from weft.plan.context import Context
from weft.rewriting.draft import AnyNode, Draft


def only_pointwise_users(draft: Draft, node: AnyNode) -> bool:
    """Whether all users of the node are pointwise, directly or through views, and there is at least one."""
    stack = [node]
    while stack:
        users = draft.users(stack.pop())
        views = [user for user in users if not is_pointwise(user.target)]
        if not users or not all(user.op == "call_function" and draft.profile(user).is_view for user in views):
            return False
        stack += views
    return True


def is_on_gpu(value: object, context: Context) -> bool:
    """Whether to assume that a compiler fuses pointwise operators: the tensor is on a GPU, or a cluster is given."""
    return isinstance(value, Tensor) and (value.device.type not in ("cpu", "meta") or context.cluster is not None)
