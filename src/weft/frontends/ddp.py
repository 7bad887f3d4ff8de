"""Torch's `DistributedDataParallel` with its all-reduces in the compiled graphs.

By default DDP communicates from hooks, where no compiler sees it. Dynamo's python reducer writes the all-reduces into
the backward graph, which compiled autograd then compiles.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from weft.compat.compilers import settings_of

SETTINGS = {"optimize_ddp": "python_reducer", "compiled_autograd": True}


def ddp(model: nn.Module, **keywords: Any) -> DistributedDataParallel:
    """Wrap a model in `DistributedDataParallel` so that `torch.compile` sees its all-reduces.

    `keywords` go to `DistributedDataParallel`. Compile a function that calls `backward()`: compiled autograd is on only
    inside it. This changes two settings of Dynamo for the process, `optimize_ddp` and `compiled_autograd`.
    """
    config = settings_of("dynamo")
    for name, value in SETTINGS.items():  # the constructor of DDP reads them
        setattr(config, name, value)
    return DistributedDataParallel(model, **keywords)
