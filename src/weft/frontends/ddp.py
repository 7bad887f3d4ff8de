"""Torch's `DistributedDataParallel` with its all-reduces in the compiled graphs.

By default DDP communicates from hooks, where no compiler sees it. Dynamo's python reducer writes the all-reduces into
the backward graph, which compiled autograd then compiles.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn.parallel import DistributedDataParallel

from weft.compat.compilers import compiled_autograd, settings_of

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


@contextmanager
def compiled_backward(backend: str = "weft", options: Mapping[str, Any] | None = None) -> Generator[None]:
    """Compile every `backward()` inside the block, with the all-reduces of models that DDP wraps there.

    For trainers that wrap the model and call `backward()` themselves. `torch.compile` gets `backend` and
    `options`; the forward is compiled as the trainer does it. The settings are restored at the end of the block.
    """

    def compiler(graph: GraphModule) -> Any:
        return torch.compile(graph, backend=backend, options=dict(options) if options else None, dynamic=False)

    with settings_of("dynamo").patch(optimize_ddp=SETTINGS["optimize_ddp"]), compiled_autograd(compiler):
        yield
