"""The tutorial as a program: python docs/tutorial.py. Its page, tutorial.md, is made by tools/docs_tutorial.py."""

# %% [markdown]
# # Tutorial
#
# This tutorial leads from a model to an optimized training step in eight short sections: capture, read the listing,
# simulate, bucket, plan, explain, prove, keep. You need no GPU and no process group. All output below comes from the
# script `docs/tutorial.py`. To run it yourself, call `make setup` and use the `python` of `.venv/bin`:
#
# ```sh
# python docs/tutorial.py
# ```
#
# ## Capture
#
# The example is a model of three linear layers, whose weights are sharded over four ranks, as in FSDP. Each layer
# gathers its weight before its matmul. In the backward pass, the weight's gradient is averaged over the ranks and
# scattered. `weft.capture` traces the training step with fake tensors and as many fake ranks as you ask for, so it
# allocates no memory for tensors and needs no GPU. `part="joint"` captures forward and backward as one graph.

# %%
import re
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize

import weft
from weft.verification.symbolic.equivalence import prove


class Gathered(nn.Module):
    """The whole of a sharded weight; its gradient is averaged and scattered."""

    def forward(self, shard):
        return shard.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])


def make_model(mesh):
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16) for _ in range(3)))
    for layer in model:
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
        parametrize.register_parametrization(layer, "weight", Gathered(), unsafe=True)
    return model


step = weft.TrainingStep(make_model, loss=nn.functional.mse_loss, optimizer=None)
batch = torch.empty(8192, 4096, dtype=torch.bfloat16)
gm = weft.capture(step, (batch, batch), mesh={"dp": 4}, part="joint")
print(type(gm).__name__, "with", len(gm.graph.nodes), "nodes")

# %% [markdown]
# ## Read the listing
#
# A listing shows the graph as text. Each line is a value with its type and the operator that computes it; `group`
# declares the ranks that communicate. `all_gather` *launches* a collective, and `wait` blocks until its result has
# arrived. `base='input_1'` says that two inputs share memory: this example passes the same tensor twice.

# %%
print(weft.listing(gm))

# %% [markdown]
# The step waits for every collective right after its launch. While data is on the wire, the GPUs compute nothing.
#
# ## Simulate
#
# How long does the step take on four of the eight H100s of a node? The simulator computes this from a description of
# the cluster. Communication is *exposed* while the GPUs wait for it. The lower bound is a time that no order of the
# graph can beat.

# %%
before = weft.simulate(gm, cluster="h100-8")
print(f"step {before.step_us:.0f} us, including {before.exposed_us:.0f} us of exposed communication")
print(f"no order takes less than {before.lower_bound_us:.0f} us; this one takes {before.gap:.0%} more")

# %% [markdown]
# ## Bucket
#
# You can run a single pass by its name. `bucket-all-gathers` merges gathers of one group into *buckets*. Like every
# pass, it gives a reason for each decision.

# %%
bucketed = weft.optimize(gm, pipeline="bucket-all-gathers")
for decision in bucketed.report.applied + bucketed.report.declined:
    print(f"{decision.reason.value}: {decision.sentence}")

# %% [markdown]
# Fewer launches, but is the step shorter?

# %%
print(f"step {weft.simulate(bucketed.module, cluster='h100-8').step_us:.0f} us, {before.step_us:.0f} us before")

# %% [markdown]
# It is not: copying two weights out of the bucket takes longer than the launch that was saved, and no matmul hides the
# gather yet. Order and buckets must be decided together.
#
# ## Plan
#
# The planner decides both together, and `weft.optimize` runs it by default. It moves launches, waits and compute,
# merges collectives where that pays, and compares candidate orders in the simulator.

# %%
result = weft.optimize(gm, cluster="h100-8")
after = weft.simulate(result.module, cluster="h100-8")
print(f"step {after.step_us:.0f} us, including {after.exposed_us:.0f} us exposed; {after.gap:.1%} above the bound")

# %% [markdown]
# The listing shows the new order; here are only its matmuls, launches and waits. An operator `..._coalesced` launches
# several collectives as one. The gathers of the second and third weight are merged, and run during the first matmul.
# The first two reduce-scatters are merged too, and the step waits for all gradients only at the end.

# %%
shown = re.compile(r"\b(mm|all_gather|reduce_scatter|all_gather_coalesced|reduce_scatter_coalesced|wait)\(")
print("\n".join(line for line in weft.listing(result.module).splitlines() if shown.search(line)))

# %% [markdown]
# `print(result.report)` prints the figures as a table, and `result.report.save_html("report.html")` draws the
# timelines before and after.
#
# ## Explain
#
# Which collectives are still exposed, and what would have to change? The report has a decision on every collective. For
# an exposed one, the decision names the obstacle and the time that removing the obstacle could save.

# %%
for decision in result.report.declined:
    if decision.reason.value.startswith("exposed"):
        print(f"{decision.reason.value}: {decision.sentence}")

# %% [markdown]
# No compute of this graph can hide the first gather and the last reduce-scatter. In a training loop, the optimizer and
# the next step could.
#
# ## Prove
#
# Does the new graph compute the same values? `weft.optimize` has checked the invariants of the graph after every pass.
# A symbolic proof, which is independent of the passes, covers all data for tensors of these shapes. `weft.verify`
# instead runs both graphs on four virtual ranks in this process and compares the values; here, we use a small model for
# that.

# %%
print(prove(gm, result.module))
small = weft.zoo.load("llama-debug", parallel="fsdp", ranks=4, layers=1)
print(weft.verify(small, weft.optimize(small, cluster="h100-8").module, ranks=4))

# %% [markdown]
# ## Keep
#
# A plan is data: you can review it, diff it, and send it to all ranks. Weft refuses to apply it to another graph.

# %%
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "plan.json"
    result.plan.save(path)
    again = weft.apply(gm, weft.Plan.load(path))
    print("the same graph:", weft.listing(again) == weft.listing(result.module))
    try:
        weft.apply(weft.capture(step, (batch, batch), mesh={"dp": 8}, part="joint"), weft.Plan.load(path))
    except weft.WeftError as error:
        print(error)

# %% [markdown]
# ## Next
#
# In a training script, Weft is one line, `torch.compile(model, backend="weft")`: see `integrations.md`. On the command
# line, there are `weft optimize`, `weft explain`, `weft simulate` and `weft verify`: see `cli.md`. `concepts.md`
# explains the terms, and `planning.md` explains how the planner finds its orders.
