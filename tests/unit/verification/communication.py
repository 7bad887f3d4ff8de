"""Graphs for the tests of verification: one for every kind and form of communication."""

from torch.fx import GraphModule

from weft.graph.groups import GroupTable, read_groups
from weft.graph.listings.text import parse
from weft.verification.comparison import example_inputs
from weft.verification.rank import RankResult
from weft.verification.real_ranks.world import RealRanks
from weft.verification.virtual.cluster import VirtualCluster

HEADER = "group('tp', size=2)\ngroup('dp', size=2, stride=2)\ngroup('world', size=4)\n"
PAIR = "group('dp', size=2)\ngroup('other', size=2)\n"

EVERY_FORM = {
    "all_gather": """
        def graph(x: f32[2, 3]):
            a = all_gather(x, 2, 'dp')
            w = wait(a)
            return [w]""",
    "all_gather, autograd": """
        def graph(x: f32[2, 3]):
            a = _c10d_functional_autograd.all_gather_into_tensor.default(x, 2, 'dp')
            w = wait(a)
            return [w]""",
    "all_gather_out": """
        def graph(x: f32[2, 3], out: f32[4, 3]):
            a = all_gather_out(x, 2, 'dp', out=out)
            w = wait(a)
            return [w]""",
    "all_gather_out into the buffer it reads": """
        def graph(out: f32[4, 3]):
            x = slice.Tensor(out, 0, 0, 2)
            c = clone(x)
            a = all_gather_out(c, 2, 'dp', out=out)
            w = wait(a)
            return [w]""",
    "all_gather_coalesced": """
        def graph(x: f32[2, 3], y: bf16[1]):
            a = all_gather_coalesced([x, y], 2, 'dp')
            a0 = a[0]
            a1 = a[1]
            w1 = wait(a1)
            w0 = wait(a0)
            return [w0, w1]""",
    "reduce_scatter": """
        def graph(x: f32[4, 3]):
            a = reduce_scatter(x, 'sum', 2, 'dp')
            w = wait(a)
            return [w]""",
    "reduce_scatter, autograd": """
        def graph(x: f32[4, 3]):
            a = _c10d_functional_autograd.reduce_scatter_tensor.default(x, 'sum', 2, 'dp')
            w = wait(a)
            return [w]""",
    "reduce_scatter_out": """
        def graph(x: f32[4, 3], out: f32[2, 3]):
            a = reduce_scatter_out(x, 'avg', 2, 'dp', out=out)
            w = wait(a)
            return [w]""",
    "reduce_scatter_coalesced": """
        def graph(x: f32[4, 3], y: f32[2]):
            a = reduce_scatter_coalesced([x, y], 'max', 2, 'dp')
            a0 = a[0]
            a1 = a[1]
            w0 = wait(a0)
            w1 = wait(a1)
            return [w0, w1]""",
    "all_reduce": """
        def graph(x: f32[2, 3]):
            a = all_reduce(x, 'sum', 'dp')
            w = wait(a)
            return [w]""",
    "all_reduce of a transposed tensor": """
        def graph(x: f32[2, 3]):
            t = permute(x, [1, 0])
            a = all_reduce(t, 'sum', 'dp')
            w = wait(a)
            return [w]""",
    "all_reduce_": """
        def graph(x: f32[2, 3]):
            a = all_reduce_(x, 'sum', 'dp')
            w = wait(a)
            return [w]""",
    "all_reduce_coalesced": """
        def graph(x: f32[2, 3], y: f32[()]):
            a = all_reduce_coalesced([x, y], 'sum', 'dp')
            a0 = a[0]
            a1 = a[1]
            w0 = wait(a0)
            w1 = wait(a1)
            return [w0, w1]""",
    "all_reduce_coalesced_": """
        def graph(x: f32[2, 3], y: f32[2]):
            a = all_reduce_coalesced_([x, y], 'sum', 'dp')
            a0 = a[0]
            a1 = a[1]
            w0 = wait(a0)
            w1 = wait(a1)
            return [w0, w1]""",
    "all_to_all": """
        def graph(x: f32[4, 3]):
            a = all_to_all(x, [2, 2], [2, 2], 'dp')
            w = wait(a)
            return [w]""",
    "all_to_all, autograd": """
        def graph(x: f32[4, 3]):
            a = _c10d_functional_autograd.all_to_all_single.default(x, [2, 2], [2, 2], 'dp')
            w = wait(a)
            return [w]""",
    "broadcast from the second rank of each group": """
        def graph(x: f32[2, 3]):
            a = broadcast(x, 1, 'dp')
            w = wait(a)
            return [w]""",
    "broadcast_": """
        def graph(x: f32[2, 3]):
            a = broadcast_(x, 1, 'dp')
            w = wait(a)
            return [w]""",
    "a shard moved from one dim to another": """
        def graph(x: f32[4, 3]):
            a: f32[2, 6] = _dtensor.shard_dim_alltoall.default(x, 1, 0, 'dp')
            r = relu(a)
            return [r]""",
    "launches that escape": """
        def graph(x: f32[2, 3], y: f32[2]):
            a = all_gather(x, 2, 'dp')
            b = all_reduce_(y, 'sum', 'dp')
            v = view(a, [12])
            return [v, None]""",
    "a write to the input behind its wait": """
        def graph(x: f32[2, 3]):
            a = all_gather(x, 2, 'dp')
            w = wait(a)
            z = mul_(x, 3)
            again = wait(a)
            return [again]""",
}


def module_of(text: str, header: str = PAIR) -> GraphModule:
    """The module of a listing that is indented with the test."""
    lines = text.strip("\n").splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    return parse(header + "\n".join(line[indent:] for line in lines) + "\n")


def run(
    modules: GraphModule | list[GraphModule],
    num_ranks: int = 2,
    inputs: list[list[object]] | None = None,
    seed: int = 0,
) -> list[RankResult]:
    """The results of a virtual cluster, on small whole numbers."""
    first = modules if isinstance(modules, GraphModule) else modules[0]
    given = inputs if inputs is not None else example_inputs(first, num_ranks, integers=True)
    return VirtualCluster(num_ranks).run(modules, given, tables(modules), seed)


def run_real(
    world: RealRanks, modules: GraphModule | list[GraphModule], num_ranks: int = 2, seed: int = 0
) -> list[RankResult]:
    """The results of real ranks, on the same numbers."""
    if isinstance(modules, GraphModule):
        given = example_inputs(modules, num_ranks, integers=True)
    else:
        given = [example_inputs(module, num_ranks, integers=True)[r] for r, module in enumerate(modules)]
    return world.run(modules, given, tables(modules), seed)


def tables(modules: GraphModule | list[GraphModule]) -> GroupTable | list[GroupTable]:
    return read_groups(modules) if isinstance(modules, GraphModule) else [read_groups(module) for module in modules]
