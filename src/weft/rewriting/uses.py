"""What becomes of a result: questions that several rewrites ask."""

from __future__ import annotations

from torch import Tensor

from weft.graph.profiles import is_pointwise
from weft.plan.context import Context
from weft.rewriting.draft import AnyNode, Draft


def only_pointwise_users(draft: Draft, node: AnyNode) -> bool:
    """Whether only pointwise operators take the node, directly or through views; something must."""
    stack = [node]
    while stack:
        users = draft.users(stack.pop())
        views = [user for user in users if not is_pointwise(user.target)]
        if not users or not all(user.op == "call_function" and draft.profile(user).is_view for user in views):
            return False
        stack += views
    return True


def is_on_gpu(value: object, context: Context) -> bool:
    """Whether a tensor is computed where a compiler fuses pointwise operators: a GPU, or a cluster that is given."""
    return isinstance(value, Tensor) and (value.device.type not in ("cpu", "meta") or context.cluster is not None)
