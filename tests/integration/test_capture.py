"""Captured steps: every parallelism and part, their values against one process, their names and their texts."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx import GraphModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import weft
from tests.integration.sharded import ShardedModel, worst_difference
from tests.tiers import quick_first, quick_only
from weft import zoo
from weft.errors import CaptureError
from weft.frontends.fake_world import fake_world
from weft.graph.collective import collectives
from weft.graph.groups import Group, read_groups
from weft.graph.ops import op_names
from weft.verification.comparison import compare, example_inputs
from weft.verification.real_ranks.world import RealRanks
from weft.verification.virtual.cluster import VirtualCluster

GRAPHS = Path(__file__).parents[1] / "graphs"
TOLERANCE = 2e-5
"""Of the largest magnitude in a tensor, in f32: sums over a few hundred terms, in another order on several ranks."""
GROUPED_TOLERANCE = 2**-6
"""The same for models with grouped products, which round to bf16."""

STEPS = {
    "ddp": ("llama-debug", "ddp", {"dp": 2}),
    "fsdp": ("llama-debug", "fsdp", {"dp": 4}),
    "hsdp": ("llama-debug", "hsdp", {"replicate": 2, "shard": 2}),
    "tp": ("llama-debug", "tp", {"tp": 4}),
    "fsdp-tp": ("llama-debug", "fsdp-tp", {"dp": 2, "tp": 2}),
    "hsdp-tp": ("llama-debug", "hsdp-tp", {"replicate": 2, "shard": 2, "tp": 2}),
    "moe": ("moe-debug", "ep-fsdp", {"dp": 2, "ep": 2}),
    "moe-tp": ("moe-debug", "tp", {"tp": 2}),
    "dropless-tp": ("dropless-debug", "tp", {"tp": 2}),
    "experts-tp": ("dropless-debug", "ep-tp", {"ep": 2, "tp": 2}),
    "capacity-tp": ("moe-debug", "ep-tp", {"ep": 2, "tp": 2}),
    "latent": ("deepseek-debug", "fsdp-tp", {"dp": 2, "tp": 2}),
    "vision": ("vision-debug", "ddp", {"dp": 2}),
    "vision-fsdp": ("vision-debug", "fsdp", {"dp": 4}),
}


def steps(*names: str, quick: tuple[str, ...]) -> Any:
    """The named steps, or all; the quick loop runs some of them."""
    return pytest.mark.parametrize("step", quick_only(names or STEPS, *quick))


def round_trips(module: GraphModule) -> bool:
    text = weft.listing(module)
    return weft.listing(weft.parse(text)) == text


def counts(module: GraphModule) -> dict[str, int]:
    return dict(Counter(collective.kind.value for collective in collectives(module.graph)))


# Every parallelism and part.


@pytest.mark.parametrize("part", ["backward", "step"])
@steps("ddp", "fsdp", "hsdp", "tp", "fsdp-tp", "hsdp-tp", "moe", "vision", quick=("ddp", "fsdp-tp"))
def test_every_part_of_every_parallelism_is_valid_and_has_a_text(step: str, part: Any):
    name, parallel, mesh = STEPS[step]
    module = zoo.load(name, parallel, mesh=mesh, layers=1, part=part, batch=2)  # `capture` checks every invariant
    assert round_trips(module)
    assert not dist.is_initialized()
    assert module.meta["weft.about"]["part"] == part


@pytest.mark.parametrize(
    ("parallel", "ranks", "expected"),
    quick_first(
        [
            ("fsdp", 64, {"all_gather": 68, "reduce_scatter": 39}),
            ("ddp", 64, {"all_reduce": 39}),
            ("tp", 8, {"all_gather": 18, "reduce_scatter": 18, "all_reduce": 12}),
            ("fsdp-tp", 64, {"all_gather": 86, "reduce_scatter": 57, "all_reduce": 12}),
        ]
    ),
)
def test_a_large_model_has_the_collectives_that_its_layers_ask_for(parallel: str, ranks: int, expected: dict[str, int]):
    module = zoo.load("llama-8b", parallel, ranks=ranks, layers=4)
    assert counts(module) == expected
    assert 1000 < len(module.graph.nodes) < 1600
    with_module = [node for node in module.graph.nodes if node.meta.get("nn_module_stack")]
    assert len(with_module) > 0.9 * len(module.graph.nodes) - 100  # all but inputs, the output and the loss's seed


def test_weights_that_are_kept_are_gathered_once():
    kept = zoo.load("llama-debug", "fsdp", ranks=4, layers=1, reshard=False)
    again = zoo.load("llama-debug", "fsdp", ranks=4, layers=1)
    assert counts(kept) == {"all_gather": 12, "reduce_scatter": 12}
    assert counts(again) == {"all_gather": 20, "reduce_scatter": 12}  # not the three norms and the embedding


@pytest.mark.parametrize(
    ("parallel", "mesh"),
    quick_first(
        [
            ("hsdp", {"replicate": 128, "shard": 8}),
            ("ddp", {"dp": 1024}),
            ("fsdp", {"dp": 2}),
            ("fsdp", {"dp": 1024}),
            ("fsdp-tp", {"dp": 128, "tp": 8}),
        ]
    ),
)
def test_worlds_of_two_to_1024_ranks_are_captured(parallel: str, mesh: dict[str, int]):
    module = zoo.load("llama-8b", parallel, mesh=mesh, layers=1)
    sizes = {group.name: (group.size, group.stride) for group in read_groups(module)}
    strides = dict.fromkeys(mesh, 1) | ({next(iter(mesh)): 8} if len(mesh) == 2 else {})
    assert sizes == {axis: (size, strides[axis]) for axis, size in mesh.items()}


@pytest.mark.parametrize(
    ("name", "parallel", "mesh", "rank"),
    quick_first(
        [
            ("vision-debug", "hsdp", {"replicate": 2, "shard": 2}, 2),
            ("llama-debug", "fsdp-tp", {"dp": 2, "tp": 4}, 7),
            ("moe-debug", "ep-fsdp", {"dp": 2, "ep": 2}, 3),
        ]
    ),
)
def test_every_rank_has_the_same_graph(name: str, parallel: str, mesh: dict[str, int], rank: int):
    first, other = (zoo.load(name, parallel, mesh=mesh, layers=1, batch=2, rank=r) for r in (0, rank))
    assert weft.listing(first) == weft.listing(other)


@pytest.mark.parametrize("parallel", quick_first(["fsdp", "ddp", "tp", "fsdp-tp"]))
def test_the_graphs_in_the_repository_are_what_capture_gives(parallel: str, request: pytest.FixtureRequest):
    file = GRAPHS / f"llama-debug-{parallel}.txt"
    text = weft.listing(zoo.load("llama-debug", parallel, ranks=4))
    if request.config.getoption("update"):
        file.write_text(text)
    assert text == file.read_text()
    assert weft.listing(weft.parse(text)) == text


# Values: the ranks of a virtual cluster against one process.


@steps(quick=("fsdp-tp", "moe"))
def test_loss_and_gradients_are_those_of_one_process(step: str):
    check_gradients(ShardedModel(*STEPS[step], layers=1))


@steps("fsdp", "tp", "fsdp-tp", quick=("fsdp",))
def test_a_weight_that_two_modules_share_has_the_gradient_of_one_process(step: str):
    check_gradients(ShardedModel(*STEPS[step], layers=1, tied=True))


def check_gradients(model: ShardedModel) -> None:
    batches = model.batches(2)
    results = model.run(model.capture(batch=2), [[*p, *b] for p, b in zip(model.parts(), batches, strict=True)])
    loss = model.loss(batches)
    gradients = list(torch.autograd.grad(loss, list(model.whole.parameters())))
    found = [[output.detach() for output in result.outputs[1:]] for result in results]
    tolerance = GROUPED_TOLERANCE if model.name.startswith("dropless") else TOLERANCE
    assert worst_difference(model.parts(gradients), found) < tolerance
    mean = torch.stack([result.outputs[0].detach() for result in results]).mean()
    torch.testing.assert_close(mean, loss.detach(), rtol=tolerance, atol=0)


@pytest.mark.parametrize(
    ("step", "optimizer"), quick_first([("ddp", "adamw"), ("fsdp-tp", "adamw"), ("fsdp-tp", "sgd")])
)
def test_a_whole_step_moves_the_parameters_as_one_process_does(step: str, optimizer: str):
    model = ShardedModel(*STEPS[step], layers=1)
    batches = model.batches(2)
    module = model.capture(part="step", optimizer=optimizer, batch=2)
    before = model.parts()
    states = [_zero_state(module, len(part), len(batches[0])) for part in before]
    results = model.run(module, [[*p, *s, *b] for p, s, b in zip(before, states, batches, strict=True)])

    whole = list(model.whole.parameters())
    gradients = torch.autograd.grad(model.loss(batches), whole)
    for parameter, gradient in zip(whole, gradients, strict=True):
        parameter.grad = gradient
    _make_optimizer(optimizer, whole).step()
    for result, wanted, old in zip(results, model.parts([p.detach() for p in whole]), before, strict=True):
        for after, expected, start in zip(result.inputs, wanted, old, strict=False):
            # On average: the first step of Adam divides a gradient by its size, so that tiny ones may turn around.
            assert (after - expected).abs().mean() < 1e-3 * (expected - start).abs().mean()


def _zero_state(module: GraphModule, num_tensors: int, num_inputs: int) -> list[Tensor]:
    """An optimizer's state before its first step; that of a captured graph stands between buffers and batch."""
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    return [torch.zeros(tuple(node.meta["val"].shape)) for node in nodes[num_tensors : len(nodes) - num_inputs]]


def _make_optimizer(name: str, parameters: list[Tensor]) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=3e-4)
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


@steps("ddp", "fsdp", "tp", "vision", quick=("vision",))
def test_forward_and_backward_together_are_the_joint_graph(step: str):
    model = ShardedModel(*STEPS[step], layers=1)
    inputs = [[*p, *b] for p, b in zip(model.parts(), model.batches(2), strict=True)]
    joint = model.run(model.capture(batch=2), inputs)
    forward = model.capture(part="forward", batch=2)
    first = model.run(forward, inputs)
    saved = [[*result.outputs[1:], torch.ones(())] for result in first]
    second = model.run(model.capture(part="backward", batch=2), saved)
    for whole, one, two in zip(joint, first, second, strict=True):
        assert torch.equal(whole.outputs[0], one.outputs[0])
        assert all(map(torch.equal, whole.outputs[1:], two.outputs))
        assert all(map(torch.equal, whole.inputs, one.inputs))  # running statistics are written in forward


@pytest.mark.distributed
@pytest.mark.xdist_group("ranks")
def test_real_ranks_compute_what_the_virtual_cluster_does(ranks: RealRanks):
    model = ShardedModel(*STEPS["fsdp-tp"], layers=1)
    module = model.capture(batch=2)
    inputs = [[*p, *b] for p, b in zip(model.parts(), model.batches(2), strict=True)]
    real = ranks.run(module, inputs, read_groups(module))
    assert compare(model.run(module, inputs), real, num_terms=4096)


@steps("fsdp", "fsdp-tp", quick=("fsdp",))
def test_a_captured_graph_can_be_optimized_and_computes_the_same(step: str):
    model = ShardedModel(*STEPS[step], layers=1)
    module = model.capture()
    result = weft.optimize(module, pipeline="dedupe-collectives,hoist-launches,sink-waits")
    assert weft.listing(result.module) != weft.listing(module)
    inputs = [[*p, *b] for p, b in zip(model.parts(), model.batches(1), strict=True)]
    assert compare(model.run(module, inputs), model.run(result.module, inputs), num_terms=1).bitwise


@pytest.mark.slow
def test_a_planned_step_over_three_axes_is_proved():
    module = zoo.load(*STEPS["hsdp-tp"][:2], mesh=STEPS["hsdp-tp"][2], layers=1)
    result = weft.optimize(module, cluster="h100-2x4", verify="equivalence")
    assert {decision.pass_name for decision in result.report.applied} >= {"sink-all-reduces", "schedule-overlap"}
    assert "proved equal" in result.report.witnesses[-1]


# Dynamic batch.


@steps("fsdp", "tp", "moe", quick=())
def test_a_dynamic_graph_runs_other_batch_sizes(step: str):
    model = ShardedModel(*STEPS[step], layers=1)
    module = model.capture(batch=4, dynamic=True)
    assert round_trips(module)
    batches = model.batches(3)
    results = model.run(module, [[*p, *b] for p, b in zip(model.parts(), batches, strict=True)])
    loss = model.loss(batches)
    gradients = list(torch.autograd.grad(loss, list(model.whole.parameters())))
    found = [[output.detach() for output in result.outputs[1:]] for result in results]
    assert worst_difference(model.parts(gradients), found) < TOLERANCE


# Names and lines.


def test_forward_and_backward_nodes_have_the_module_and_the_line_they_come_from():
    module = zoo.load("llama-debug", "fsdp-tp", ranks=4, layers=2)
    seen: dict[tuple[str, str], set[str]] = {}
    for node in module.graph.nodes:
        if node.op == "call_function" and node.meta.get("nn_module_stack"):
            path = list(node.meta["nn_module_stack"])[-1]
            seen.setdefault((path, node.meta["partitioner_tag"]), set()).add(node.name.rstrip("_0123456789"))
    for phase in ("is_forward", "is_backward"):
        assert "mm" in seen[("layers.1.feed_forward.down", phase)]
        assert {"all_gather_into_tensor", "wait_tensor"} <= seen[("layers.1.feed_forward.down", phase)]
    assert {"reduce_scatter_tensor"} <= seen[("layers.0.attention_norm", "is_backward")]
    assert {"reduce_scatter_tensor"} <= seen[("layers.0.attention", "is_forward")]
    lines = [node.meta["stack_trace"] for node in module.graph.nodes if node.name.startswith("_scaled_dot_product")]
    assert len(lines) == 4
    assert all("F.scaled_dot_product_attention(" in line.splitlines()[-1] for line in lines)


def test_module_names_have_the_form_of_torch():
    module = zoo.load("llama-debug", "ddp", ranks=2, layers=1)
    node = next(node for node in module.graph.nodes if node.name == "silu")
    assert [path for path, _ in node.meta["nn_module_stack"].values()] == ["", "layers.0", "layers.0.feed_forward"]
    assert node.meta["nn_module_stack"]["layers.0.feed_forward"][1].__name__ == "FeedForward"


def test_inputs_are_parameters_buffers_state_and_batch_under_readable_names():
    module = zoo.load("vision-debug", "ddp", ranks=2, layers=1, batch=2, part="step", optimizer="sgd")
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    assert names[:3] == ["stem_weight", "norm_weight", "norm_bias"]
    assert names[-2:] == ["images", "labels"]
    order = [names.index(n) for n in ("head_bias", "norm_running_mean", "stem_weight_momentum_buffer", "images")]
    assert order == sorted(order)


# Other models and functions.


class Doubled(nn.Module):
    """Two linears that share a weight, one of them frozen otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(F.gelu(self.first(x))) * self.frozen).square().mean()


def test_shared_and_frozen_parameters_are_inputs_once_and_have_one_gradient():
    module = weft.capture(Doubled(), [torch.randn(2, 4)], part="joint")
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    assert names == ["frozen", "first_weight", "first_bias", "x"]
    *_, output = module.graph.nodes
    assert len(output.args[0]) == 3


def test_a_checkpointed_block_runs_again_in_backward():
    plain = zoo.load("llama-debug", "ddp", ranks=2, layers=1)
    module = zoo.load("llama-debug", "ddp", ranks=2, layers=1, checkpoint="full")
    repeated = [node for node in module.graph.nodes if node.name.startswith("silu") and "backward" not in node.name]
    assert [node.meta["partitioner_tag"] for node in repeated] == ["is_forward", "is_backward"]
    inputs = example_inputs(plain, 2)
    results = [VirtualCluster(2).run(graph, inputs, read_groups(graph)) for graph in (plain, module)]
    assert compare(*results, num_terms=1).bitwise


def test_a_step_with_a_loss_and_a_factory_is_captured():
    step = weft.TrainingStep(lambda mesh: nn.Linear(4, 2, device="cpu"), loss=F.mse_loss)
    module = weft.capture(step, [torch.randn(3, 4), torch.randn(3, 2)], part="joint")
    model = nn.Linear(4, 2)
    batch = torch.randn(3, 4), torch.randn(3, 2)
    loss = F.mse_loss(model(batch[0]), batch[1])
    found = module(model.weight, model.bias, *batch)
    for first, second in zip(found, [loss, *torch.autograd.grad(loss, [model.weight, model.bias])], strict=True):
        torch.testing.assert_close(first, second)


def test_a_function_is_traced_as_it_is_and_may_name_axes():
    reduce, wait = op_names()["all_reduce"], op_names()["wait"]

    def step(x: Tensor, scales: list[Tensor]) -> dict[str, Tensor]:
        return {"y": wait(reduce(x * scales[0], "sum", "dp")) + scales[1]}

    module = weft.capture(step, [torch.ones(2), [torch.ones(2), torch.ones(2)]], mesh={"dp": 4, "tp": 2})
    assert weft.listing(module) == (
        "group('dp', size=4, stride=2)\n\n"
        "def graph(x: f32[2], scales_0: f32[2], scales_1: f32[2]):\n"
        "    mul: f32[2] = mul(x, scales_0)\n"
        "    all_reduce: f32[2] = all_reduce(mul, 'sum', 'dp')\n"
        "    wait_tensor: f32[2] = wait(all_reduce)\n"
        "    add: f32[2] = add(wait_tensor, scales_1)\n"
        "    return {'y': add}\n"
    )


def test_a_function_may_ask_for_the_mesh_and_use_constants():
    constant = torch.tensor([1.0, 2.0])

    def step(x: Tensor, mesh: Any) -> Tensor:
        parts = DTensor.from_local(x, mesh, [Shard(0), Replicate()], run_check=False)
        return parts.redistribute(placements=[Replicate(), Replicate()]).to_local() * constant

    module = weft.capture(step, [torch.ones(2, 2)], mesh={"dp": 4, "tp": 2})
    assert counts(module) == {"all_gather": 1}
    assert round_trips(module)
    assert "tensor('_tensor_constant0', f32[2], [1.0, 2.0])" in weft.listing(module)
    assert read_groups(module).groups == {"dp": Group("dp", 4, 2)}


def test_tensor_parallel_gradients_that_torch_leaves_partial_are_laid_out_as_their_parameters():
    class Scale(nn.Module):
        def __init__(self, mesh: Any) -> None:
            super().__init__()
            self.mesh = mesh
            whole = DTensor.from_local(torch.ones(4), mesh, [Replicate()], run_check=False)
            self.weight = nn.Parameter(whole)

        def forward(self, x: Tensor) -> Tensor:
            rows = DTensor.from_local(x, self.mesh, [Shard(0)], run_check=False)
            return (rows * self.weight).to_local().sum()

    module = weft.capture(weft.TrainingStep(Scale), [torch.ones(2, 4)], mesh={"tp": 2}, part="joint")
    assert counts(module) == {"all_reduce": 1}


# A world that is there already.


@pytest.mark.slow
def test_a_process_group_of_the_right_size_is_used_and_left_alone():
    with fake_world({"dp": 4}) as mesh:
        module = zoo.load("llama-debug", "fsdp", ranks=4, layers=1)
        assert dist.is_initialized()
        assert weft.listing(module) == weft.listing(zoo.load("llama-debug", "fsdp", mesh={"dp": 4}, layers=1))
        step = weft.TrainingStep(zoo.build("llama-debug", "fsdp", mesh, layers=1)[0])
        tokens = torch.zeros(1, 32, dtype=torch.long)
        captured = weft.listing(weft.capture(step, [tokens, tokens.clone()], mesh, "joint"))
        assert f"tokens_per_step(128)\n{captured}" == weft.listing(module)  # only the zoo knows what its tokens are
    assert not dist.is_initialized()


def test_a_process_group_of_another_size_is_refused():
    with fake_world({"dp": 4}), pytest.raises(CaptureError) as caught:
        zoo.load("llama-debug", "fsdp", ranks=8)
    assert str(caught.value) == (
        "mesh: a process group of 4 ranks exists, the mesh has 8\ndestroy it first, or give a mesh of its size"
    )


# What is said when something is wrong.


def test_a_step_without_collectives_on_several_ranks_is_warned_of():
    with pytest.warns(UserWarning, match="the step has no collectives") as caught:
        weft.capture(Doubled(), [torch.randn(2, 4)], mesh={"dp": 2}, part="joint")
    assert str(caught[0].message) == (
        "capture: the step has no collectives, though the mesh has 2 ranks\n"
        "    FSDP2 (fully_shard) and DDP by default communicate from hooks, which are not part of the graph\n"
        "shard with weft.simple_fsdp(model, mesh), or use DTensor tensor parallelism or functional collectives"
    )
    assert caught[0].filename == __file__


def test_a_part_without_collectives_of_a_step_that_has_them_is_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert counts(zoo.load("llama-debug", "ddp", ranks=2, layers=1, part="forward")) == {}
        weft.capture(Doubled(), [torch.randn(2, 4)], mesh={"dp": 1}, part="joint")


def linear() -> nn.Module:
    return nn.Linear(4, 1)


X = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("step", "inputs", "options", "message"),
    [
        (linear(), [X], {"part": "jont"}, "capture: no part is called 'jont'\ndid you mean 'joint'?"),
        (
            torch.relu,
            [X],
            {"part": "joint"},
            "capture: a function is traced as it is, so its part is 'step', not 'joint'\n"
            "pass a TrainingStep or a module to choose a part",
        ),
        (
            linear(),
            [X],
            {},
            "capture: part 'step' needs an optimizer, but the step has none\n"
            "give one: TrainingStep(model, optimizer='adamw'); or ask for part='joint'",
        ),
        (
            weft.TrainingStep(linear(), optimizer="adanw"),
            [X],
            {},
            "capture: no optimizer is called 'adanw'\ndid you mean 'adamw'?",
        ),
        (
            linear(),
            [X],
            {"part": "joint"},
            "capture: the loss has shape [2, 1], one element is needed\n"
            "give TrainingStep(model, loss=...), or take the mean",
        ),
        (
            weft.TrainingStep(linear(), loss=lambda output, target: 3, num_targets=1),
            [X, X],
            {"part": "joint"},
            "capture: the loss is a int, a tensor with one element is needed\ngive TrainingStep(model, loss=...)",
        ),
        (
            nn.ReLU(),
            [X],
            {"part": "joint"},
            "capture: the model has no parameter that needs a gradient\ngive parameters requires_grad=True",
        ),
        (
            lambda x: 3,
            [X],
            {},
            "capture: the step returns no tensor: it returns int\nreturn the loss, or another result of the step",
        ),
        (
            weft.TrainingStep(lambda mesh: 3),
            [X],
            {"part": "joint"},
            "capture: the model is a int, a module is needed\nlet the factory return a torch.nn.Module",
        ),
        (
            linear(),
            [torch.ones(1, 4)],
            {"part": "joint", "dynamic": True},
            "capture: input of shape [1, 4], strides [4, 1], cannot have a dynamic batch\n"
            "give a contiguous example with a batch of at least 2",
        ),
        (torch.relu, [X], {"mesh": {}}, "mesh: it has no axes\ngive axes and sizes: mesh={'dp': 8}"),
        (
            torch.relu,
            [X],
            {"mesh": {"dp": 0}},
            "mesh: axis 'dp' has size 0, a whole number of at least 1 is needed\ngive axes and sizes: mesh={'dp': 8}",
        ),
        (
            torch.relu,
            [X],
            {"mesh": {"d p": 2}},
            "mesh: 'd p' cannot be the name of an axis\nuse names such as dp and tp",
        ),
        (
            torch.relu,
            [X],
            {"mesh": {"dp": 2}, "rank": 2},
            "mesh: rank 2 is not in a mesh of 2 ranks\nuse a rank from 0 to 1",
        ),
        (
            torch.relu,
            [X],
            {"mesh": {"dp": 1 << 21}},
            "mesh: it has 2097152 ranks, the limit is 1048576\nuse a smaller mesh",
        ),
    ],
)
def test_what_cannot_be_captured_is_refused_with_what_to_do(step: Any, inputs: Any, options: Any, message: str):
    with pytest.raises(CaptureError) as caught:
        weft.capture(step, inputs, **options)
    assert str(caught.value) == message
    assert not dist.is_initialized()


def wrapped(mesh: Any, how: str) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    return fully_shard(model, mesh=mesh) if how == "FSDP (fully_shard)" else DistributedDataParallel(model)


@pytest.mark.parametrize("made", ["here", "in the capture", "in a function"])
@pytest.mark.parametrize("how", ["FSDP (fully_shard)", "DistributedDataParallel"])
def test_a_wrapper_that_communicates_from_hooks_is_refused_with_what_to_use_instead(how: str, made: str):
    def call(x: Tensor, mesh: Any) -> Tensor:
        return wrapped(mesh, how)(x).sum()

    with fake_world({"dp": 2}) as mesh:
        model: Any = wrapped(mesh, how) if made == "here" else (lambda live: wrapped(live, how))
        step = weft.TrainingStep(model, loss=lambda out: out.sum(), num_targets=0)
        given = (call, "step") if made == "in a function" else (step, "joint")
        with pytest.raises(CaptureError) as caught:
            weft.capture(given[0], [torch.ones(2, 4)], mesh, given[1])  # type: ignore[arg-type]
    first, *_, last = str(caught.value).splitlines()
    assert how in first
    assert "from hooks that are not part of the graph" in first
    assert last.startswith("shard with weft.simple_fsdp(model, mesh)")


def test_a_step_that_fails_is_shown_with_its_reason_and_its_line():
    def step(x: Tensor) -> Tensor:
        return x @ torch.ones(3)

    with pytest.raises(CaptureError) as caught:
        weft.capture(step, [X])
    first, *_, line, last = str(caught.value).splitlines()
    assert first.startswith("capture: the step failed with RuntimeError: ")
    place, _, source = line.strip().partition(": ")
    assert place == f"test_capture.py:{step.__code__.co_firstlineno + 1} in step"
    assert source == "return x @ torch.ones(3)"
    assert last == "the step runs on fake CPU tensors: it must not read their values or use another device"
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_checkpoint_inside_a_function_is_followed():
    def step(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(checkpoint(torch.sin, x, use_reentrant=False).sum(), x)
        return gradient

    module = weft.capture(step, [torch.ones(2)])
    torch.testing.assert_close(module(torch.ones(2)), torch.cos(torch.ones(2)))
