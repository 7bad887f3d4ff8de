"""Logs of torch.compile: which graphs they hold, each graph as it was, and a clear word about every fault."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import weft
from weft.compat import register_operators
from weft.errors import ReadError
from weft.frontends.trace_log import LoggedGraph, read_log, read_ranks
from weft.graph import ops
from weft.graph.about import ABOUT_KEY
from weft.graph.groups import TABLE_KEY
from weft.graph.listings.text import source_of
from weft.graph.origins import originals_of

DATA = Path(__file__).parents[2] / "data"
PREFIX = "V0115 10:00:00.000000 77 torch/_inductor/compile_fx.py:1404] "


def find(file: str, kind: str, compile_id: str, part: str = "forward") -> LoggedGraph:
    found = [g for g in read_log(DATA / file) if (g.kind, g.compile_id, g.part) == (kind, compile_id, part)]
    return found[0]


def event(kind: str, text: str | None = None, **more: object) -> str:
    """A line of a log, and the text behind it."""
    record: dict[str, object] = {"artifact": {"name": kind, "encoding": "string"}, "rank": 3, "frame_id": 0}
    record |= {"frame_compile_id": 0, "attempt": 0, **more}
    if text is None:
        return f"{PREFIX}{json.dumps(record)}\n"
    record["has_payload"] = hashlib.md5(text.encode()).hexdigest()
    payload = "\n".join(f"\t{line}" for line in text.split("\n"))
    return f"{PREFIX}{json.dumps(record)}\n{payload}\n"


def graph_text(*lines: str, inputs: str = 'x: "f32[2, 4][4, 1]cpu"', result: str = "(r,)") -> str:
    body = "".join(f"        {line}\n" for line in lines)
    return f"class GraphModule(torch.nn.Module):\n    def forward(self, {inputs}):\n{body}        return {result}\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "dedicated_log_torch_trace_rank_5_abc.log"


def load(log: Path, text: str, **options: object) -> GraphModule:
    log.write_text(event("inductor_post_grad_graph", text))
    (graph,) = read_log(log)
    return graph.load(**options)  # type: ignore[arg-type]


def fault(log: Path, text: str, **options: object) -> str:
    """What is wrong with a graph, without the path of the log."""
    with pytest.raises(ReadError) as error:
        load(log, text, **options)
    return str(error.value).replace(str(log), "log")


# What a log holds.


def test_the_graphs_of_a_log_are_listed_with_kind_compilation_part_rank_and_line():
    graphs = read_log(DATA / "train_inductor.log")
    assert [(g.kind, g.compile_id, g.part, g.line) for g in graphs if g.compile_id == "1/0"] == [
        ("dynamo_output_graph", "1/0", "forward", 412),
        ("aot_joint_graph", "1/0", "joint", 442),
        ("aot_forward_graph", "1/0", "forward", 498),
        ("aot_backward_graph", "1/0", "backward", 533),
        ("fx_graph_runnable", "1/0", "forward", 563),
        ("inductor_post_grad_graph", "1/0", "forward", 662),
        ("fx_graph_runnable", "1/0", "backward", 688),
        ("inductor_post_grad_graph", "1/0", "backward", 783),
    ]
    assert {g.rank for g in graphs} == {0}
    assert {g.torch_version for g in graphs} == {"2.13.0+cpu"}
    assert {g.compile_id for g in graphs} == {"0/0_1", "1/0"}


def test_the_line_of_a_collective_is_one_of_the_model():
    module = find("train_inductor.log", "aot_forward_graph", "0/0_1").load()
    sources = [origin.source for origin in originals_of(module.graph).values()]
    assert sources == ["model.py:26 in forward: h = torch.relu(x @ w + self.b)"]


def test_a_graph_is_read_with_its_types_groups_and_outputs():
    module = find("train_inductor.log", "inductor_post_grad_graph", "1/0").load()
    assert weft.listing(module) == (
        "group('g0', size=2)\n"
        "\n"
        "def graph(primals_1: f32[8, 16](strides=(1, 0)), primals_2: f32[()], primals_3: f32[16]):\n"
        "    mul: f32[8, 16] = mul(primals_1, primals_2)\n"
        "    all_reduce: f32[8, 16] = all_reduce_(mul, 'sum', 'g0')\n"
        "    wait_tensor: f32[8, 16] = wait(all_reduce)\n"
        "    mul_1: f32[8, 16] = mul(wait_tensor, primals_3)\n"
        "    split: [f32[8, 8], f32[8, 8]] = split(mul_1, 8, 1)\n"
        "    getitem: f32[8, 8] = split[0]\n"
        "    getitem_1: f32[8, 8] = split[1]\n"
        "    sum_1: f32[()] = sum(getitem)\n"
        "    convert_element_type: bf16[8, 8] = prims.convert_element_type.default(getitem_1, bf16)\n"
        "    convert_element_type_1: f32[8, 8] = prims.convert_element_type.default(convert_element_type, f32)\n"
        "    mean: f32[()] = mean(convert_element_type_1)\n"
        "    add: f32[()] = add(sum_1, mean)\n"
        "    return (add, primals_2, primals_3)\n"
    )
    assert module.meta[TABLE_KEY].runtime == {"g0": "3"}
    assert module.meta[ABOUT_KEY] == {
        "source": "trace log",
        "kind": "inductor_post_grad_graph",
        "compile_id": "1/0",
        "part": "forward",
        "rank": 0,
        "torch": "2.13.0+cpu",
    }


@pytest.mark.parametrize("file", sorted(path.name for path in DATA.iterdir() if ".log" in path.name))
def test_every_graph_of_operators_of_the_real_logs_is_read_and_its_listing_reads_back(file: str):
    graphs = [g for g in read_log(DATA / file) if g.kind not in ("dynamo_output_graph", "fx_graph_runnable")]
    assert graphs
    for graph in graphs:
        text = weft.listing(graph.load(groups={"3": 2}))
        assert weft.listing(weft.parse(text)) == text, graph


def test_the_pass_pipeline_runs_on_what_was_read():
    module = find("train_inductor.log", "aot_joint_graph", "0/0_1", "joint").load()
    result = weft.optimize(module)
    assert "all_gather(primals_1, 4, 'g0')" in weft.listing(result.module)


def test_comments_become_the_source_lines_of_nodes():
    module = find("train_inductor.log", "inductor_post_grad_graph", "1/0").load()
    sources = {node.name: source_of(node) for node in module.graph.nodes}
    assert (
        sources["mul_1"] == "model.py:31 in torch_dynamo_resume_in_forward_at_29: s = torch.split(h * self.c, 8, dim=1)"
    )
    assert sources["primals_1"] == ""


def test_a_constant_has_a_type_and_no_values():
    module = find("train_inductor.log", "aot_forward_graph", "0/0_1").load()
    assert "tensor('_tensor_constant0', f32[2])\n" in weft.listing(module)
    assert module._tensor_constant0.device.type == "meta"


def test_nested_graphs_are_read():
    text = weft.listing(find("branches_inductor.log", "inductor_post_grad_graph", "0/0").load())
    assert "    def true_graph_0(arg0_1: f32[8, 16]):\n        sin: f32[8, 16] = sin(arg0_1)\n" in text
    assert "    cond: (f32[8, 16],) = higher_order.cond(gt, true_graph_0, false_graph_0, (arg0_1,))\n" in text


def test_a_log_of_another_version_and_of_a_device_that_is_not_here_is_read():
    module = find("conv_attention_cuda_2.11.log.gz", "inductor_post_grad_graph", "0/0").load()
    text = weft.listing(module)
    assert text.startswith("group('g0', size=4)\ngroup('g1', size=2)\ndevice('cuda:0')\n")
    assert "_attention" in text
    values = {node.name: ops.value_of(node) for node in module.graph.nodes}
    assert {v.device for v in values.values() if isinstance(v, Tensor)} == {torch.device("cuda:0")}


def test_strides_that_an_accelerator_chose_are_taken_as_written():
    module = find("conv_attention_cuda_2.11.log.gz", "inductor_post_grad_graph", "0/0").load()
    values = {node.name: ops.value_of(node) for node in module.graph.nodes}
    assert values["convolution"].stride() == (14400, 1, 480, 16)


# Symbolic sizes.


def test_hints_of_symbols_come_from_the_log():
    graph = find("dynamic_aot_eager.log", "aot_forward_graph", "0/0_1")
    assert graph.hints == {"s77": 8, "s27": 16}
    text = weft.listing(graph.load())
    assert "symbol('s0', hint=8)\n" in text
    assert "primals_2: int[s0], primals_3: f32[s0, 16]" in text


def test_hints_that_are_given_count_more_than_those_of_the_log():
    graph = find("dynamic_aot_eager.log", "aot_forward_graph", "0/0_1")
    assert "symbol('s0', hint=32)\n" in weft.listing(graph.load(hints={"s77": 32}))


def test_a_symbol_without_a_hint_is_unbacked(log: Path):
    text = graph_text(
        'r: "f32[s5, 4][4, 1]cpu" = torch.ops.aten.relu.default(x);  x = None',
        inputs='n: "Sym(s5)", x: "f32[s5, 4][4, 1]cpu"',
    )
    assert "symbol('u0')\n\ndef graph(n: int[u0], x: f32[u0, 4]):\n" in weft.listing(load(log, text))
    assert "symbol('s0', hint=6)\n\ndef graph(n: int[s0], x: f32[s0, 4]):\n" in weft.listing(
        load(log, text, hints={"s5": 6})
    )


def test_expressions_in_sizes_and_arithmetic_on_them_are_read(log: Path):
    text = graph_text(
        'rows: "Sym(2*s5)" = n * 2',
        'half: "Sym((s5//2))" = n // 2;  n = None',
        'is_large: "Sym(s5 > 3)" = rows > 3;  is_large = None',
        'r: "f32[2*s5, 2][2, 1]cpu" = torch.ops.aten.view.default(x, [rows, 2]);  rows = x = None',
        inputs='n: "Sym(s5)", x: "f32[s5, 4][4, 1]cpu"',
        result="(r, half)",
    )
    listing = weft.listing(load(log, text, hints={"s5": 6}))
    assert "    rows: int[2*s0] = operator.mul(n, 2)\n    half: int[(s0//2)] = operator.floordiv(n, 2)\n" in listing
    assert "    r: f32[2*s0, 2] = view(x, [rows, 2])\n" in listing


def test_a_size_that_data_decides_is_the_one_its_operator_makes(log: Path):
    text = graph_text(
        'places: "i64[u3, 2][1, u3]cpu" = torch.ops.aten.nonzero.default(x);  x = None',
        'r: "i64[u3, 2][1, u3]cpu" = torch.ops.aten.neg.default(places);  places = None',
    )
    assert "    places: i64[u0, 2] = nonzero(x)\n    r: i64[u0, 2] = neg(places)\n" in weft.listing(load(log, text))


# Groups.

LAUNCHES = (
    "a: \"f32[2, 4][4, 1]cpu\" = torch.ops._c10d_functional.all_reduce.default(x, 'sum', '11');  x = None",
    'r: "f32[2, 4][4, 1]cpu" = torch.ops._c10d_functional.wait_tensor.default(a);  a = None',
)


def test_the_sizes_and_ranks_of_groups_can_be_given(log: Path):
    assert weft.listing(load(log, graph_text(*LAUNCHES), groups={"11": 8})).startswith("group('g0', size=8)\n")
    ranks = [[0, 2], [1, 3]]
    module = load(log, graph_text(*LAUNCHES), groups={"11": ranks, "12": 3})
    assert weft.listing(module).startswith("group('g0', ranks=[[0, 2], [1, 3]])\n")
    assert module.meta[TABLE_KEY].runtime == {"g0": "11"}


def test_the_size_of_a_group_is_known_from_other_graphs_of_the_log(log: Path):
    gather = graph_text(
        "a: \"f32[6, 4][4, 1]cpu\" = torch.ops._c10d_functional.all_gather_into_tensor.default(x, 3, '11');  x = None",
        'r: "f32[6, 4][4, 1]cpu" = torch.ops._c10d_functional.wait_tensor.default(a);  a = None',
    )
    log.write_text(event("aot_forward_graph", graph_text(*LAUNCHES)) + event("aot_backward_graph", gather))
    assert weft.listing(read_log(log)[0].load()).startswith("group('g0', size=3)\n")


def test_a_group_whose_size_nobody_says_is_a_fault(log: Path):
    assert fault(log, graph_text(*LAUNCHES)) == (
        "log:4: the text does not say how many ranks group '11' has\n"
        "    a: \"f32[2, 4][4, 1]cpu\" = torch.ops._c10d_functional.all_reduce.default(x, 'sum', '11');  x = None\n"
        "                                                                                      ^^^^\n"
        "give its size: groups={'11': 8}"
    )


def test_options_of_the_wrong_type_are_told(log: Path):
    text = graph_text(*LAUNCHES)
    assert fault(log, text, groups={"11": "x"}) == (
        "groups: 'x' is neither a size nor a list of ranks for group '11'\n"
        "give a size, or the ranks of every group: groups={'1': [[0, 1], [2, 3]]}"
    )
    assert fault(log, text, hints={"s5": "8"}) == "hints: '8' is not a size for s5\ngive hints={'s0': 8}"


def test_live_groups_of_this_process_are_not_asked(log: Path, mesh: object):
    assert weft.listing(load(log, graph_text(*LAUNCHES).replace("'11'", "'1'"), groups={"1": 64})).startswith(
        "group('g0', size=64)\n"
    )


# Files.


def test_a_packed_log_is_read(tmp_path: Path):
    path = tmp_path / "rank_0_.log.gz"
    path.write_bytes(gzip.compress((DATA / "train_inductor.log").read_bytes()))
    plain = find("train_inductor.log", "aot_joint_graph", "1/0", "joint")
    packed = next(g for g in read_log(path) if (g.kind, g.compile_id) == ("aot_joint_graph", "1/0"))
    assert weft.listing(packed.load()) == weft.listing(plain.load())


def test_a_folder_stands_for_the_logs_in_it(tmp_path: Path):
    for rank in (1, 0):
        (tmp_path / f"rank_{rank}_x.log").write_text(event("aot_forward_graph", graph_text(result="(x,)"), rank=rank))
    assert [graph.rank for graph in read_log(tmp_path)] == [0, 1]


def test_a_log_that_does_not_say_its_rank_has_the_one_in_its_name(log: Path):
    log.write_text(event("aot_forward_graph", graph_text(result="(x,)"), rank=None))
    assert [graph.rank for graph in read_log(log)] == [5]


def test_ends_of_lines_of_windows_are_read(log: Path):
    text = event("aot_forward_graph", graph_text('r: "f32[2, 4][4, 1]cpu" = torch.ops.aten.relu.default(x)'))
    log.write_bytes(text.replace("\n", "\r\n").encode())
    assert "relu(x)" in weft.listing(read_log(log)[0].load())


def test_a_compilation_by_compiled_autograd_keeps_its_id(log: Path):
    log.write_text(event("aot_inference_graph", graph_text(result="(x,)"), compiled_autograd_id=2, attempt=1))
    assert [graph.compile_id for graph in read_log(log)] == ["!2/0/0_1"]


def test_only_what_is_loaded_is_held(log: Path):
    with log.open("w") as file:
        for _ in range(200):
            file.write(event("aot_forward_graph", graph_text("#" * 100_000, result="(x,)")))
    graphs = read_log(log)
    assert len(graphs) == 200
    assert sum(len(repr(graph)) for graph in graphs) < 100_000
    assert weft.listing(graphs[-1].load()) == "def graph(x: f32[2, 4]):\n    return (x,)\n"


# Faults of files.


def file_fault(log: Path, content: str | bytes, **options: bool) -> str:
    log.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ReadError) as error:
        _ = [graph.load() for graph in read_log(log, **options)]
    return str(error.value).replace(str(log), "log")


def test_another_file_is_no_trace_log(log: Path):
    assert file_fault(log, "import torch\nprint(1)\n") == (
        "log:1: it is not a trace log: expected an event, or text indented by a tab after one\n"
        "    import torch\n"
        "    ^\n"
        "give a file that TORCH_TRACE wrote"
    )


def test_an_empty_file_is_no_trace_log(log: Path):
    assert file_fault(log, "") == (
        "log: it is not a trace log: it has no events\ncompile something with TORCH_TRACE=folder set"
    )


def test_a_line_without_a_tab_is_told(log: Path):
    content = event("aot_forward_graph", graph_text(result="(x,)")).replace("\t    def", "    def")
    assert file_fault(log, content) == (
        "log:3: expected an event, or text indented by a tab after one\n"
        '    def forward(self, x: "f32[2, 4][4, 1]cpu"):\n'
        "    ^\n"
        "read_log(path, strict=False) skips it"
    )


def test_an_event_that_is_no_json_is_told(log: Path):
    content = event("a") + PREFIX + '{"artifact": {\n' + event("b")
    assert file_fault(log, content) == (
        "log:2: the event is not valid JSON: Expecting property name enclosed in double quotes: "
        "line 2 column 1 (char 15)\n"
        f'    {PREFIX}{{"artifact": {{\n'
        "    ^\n"
        "read_log(path, strict=False) skips it"
    )
    assert file_fault(log, event("a") + PREFIX + "[1]\n").startswith("log:2: the event is not a JSON object\n")


def test_a_log_that_was_cut_in_an_event_is_told(log: Path):
    message = file_fault(log, event("a") + event("b")[:120])
    assert message.startswith("log:2: the event is not valid JSON: ")
    assert "; the file ends in the middle of the line\n" in message


def test_a_log_that_was_cut_in_a_graph_is_told(log: Path):
    content = event("aot_forward_graph", graph_text('r: "f32[2, 4][4, 1]cpu" = torch.ops.aten.relu.default(x)'))
    assert file_fault(log, content[: content.index("return")]) == (
        "log:4: forward does not end with a return\n"
        '    r: "f32[2, 4][4, 1]cpu" = torch.ops.aten.relu.default(x)\n'
        "    ^\n"
        "is the text complete?\n"
        "the log was truncated or edited: the checksum of this text does not match"
    )


def test_lines_that_are_malformed_can_be_passed_over(log: Path):
    graph = event("aot_forward_graph", graph_text(result="(x,)"))
    log.write_text(f"garbage\n{graph}{PREFIX}{{broken\n\tits text\nmore garbage\n{graph}{graph[:30]}")
    assert [g.line for g in read_log(log, strict=False)] == [2, 10]
    assert {weft.listing(g.load()) for g in read_log(log, strict=False)} == {
        "def graph(x: f32[2, 4]):\n    return (x,)\n"
    }


def test_a_packed_log_that_was_cut_is_told_and_its_beginning_can_be_read(tmp_path: Path):
    path = tmp_path / "x.log.gz"
    content = "".join(event(f"aot_forward_graph_{i}", graph_text(f"# {i * 7919}", result="(x,)")) for i in range(2000))
    path.write_bytes(gzip.compress(content.encode())[:-2000])
    with pytest.raises(ReadError, match=r"it cannot be read: Compressed file ended") as error:
        read_log(path)
    assert str(error.value).endswith("read_log(path, strict=False) reads the intact part of a truncated file")
    graphs = read_log(path, strict=False)
    assert len(graphs) > 1000
    assert "return (x,)" in weft.listing(graphs[0].load())


def test_bytes_that_are_no_text_are_told(log: Path):
    content = event("aot_forward_graph", graph_text("# here", result="(x,)")).encode()
    assert file_fault(log, content.replace(b"here", b"\xff\xfe")) == "log:4: the line is not valid UTF-8"


def test_of_each_compilation_of_a_rank_the_graph_that_runs_is_read(tmp_path: Path):
    listing = "group('dp', size=2)\n\ndef graph(x: f32[2, 4]):\n    r = relu(x)\n    return [r]\n"
    text = graph_text('r: "f32[2, 4]" = torch.ops.aten.neg.default(x)')
    joint = text.replace("self, x:", "self, tangents_1:").replace("(x)", "(tangents_1)")
    events = [
        event("aot_joint_graph", joint),
        event("aot_forward_graph", text),
        event("aot_backward_graph", joint),
        event("weft_after", listing),
        event("aot_inference_graph", text, frame_id=1),
        event("inductor_post_grad_graph", text.replace("neg", "exp"), frame_id=1),
    ]
    for rank in range(2):
        (tmp_path / f"dedicated_log_torch_trace_rank_{rank}_abc.log").write_text("".join(events))
    ranks = read_ranks(tmp_path)
    found = [[str(list(module.graph.nodes)[1].target) for module in modules] for modules in ranks]
    assert found == [["aten.relu.default", "aten.neg.default", "aten.exp.default"]] * 2
    (tmp_path / "dedicated_log_torch_trace_rank_0_xyz.log").write_text("".join(events))
    with pytest.raises(ReadError, match="rank 0 has another log"):
        read_ranks(tmp_path)


def test_a_missing_file_and_a_folder_without_logs_are_told(tmp_path: Path):
    with pytest.raises(ReadError, match=r"nowhere\.log: it cannot be read: .*No such file"):
        read_log(tmp_path / "nowhere.log")
    with pytest.raises(
        ReadError, match=r"the folder has no \*\.log of TORCH_TRACE\ngive the folder that TORCH_TRACE names"
    ):
        read_log(tmp_path)


def test_a_graph_from_before_autograd_is_refused_with_what_to_load():
    graph = find("train_inductor.log", "dynamo_output_graph", "1/0")
    with pytest.raises(ReadError) as error:
        graph.load()
    assert str(error.value).endswith(
        "train_inductor.log:412: graphs of kind dynamo_output_graph call torch functions, not operators\n"
        "load an aot_* or a *_post_grad_graph of the log"
    )


# Faults of graphs.

RELU = 'r: "f32[2, 4][4, 1]cpu" = torch.ops.aten.relu.default(x);  x = None'
FAULTS: dict[str, tuple[str, str]] = {
    "an unknown operator": (
        graph_text("r = torch.ops.aten.rellu.default(x)"),
        "log:4: no operator is called 'aten.rellu.default'\n"
        "    r = torch.ops.aten.rellu.default(x)\n"
        "                  ^^^^^^^^^^^^^^^^^^\n"
        "did you mean 'aten.relu.default'?\n"
        "import the library that registers it, if it is not part of torch",
    ),
    "an operator of a library that is not here": (
        graph_text("r = torch.ops.somewhere.fast.default(x)"),
        "log:4: no operator is called 'somewhere.fast.default'\n"
        "    r = torch.ops.somewhere.fast.default(x)\n"
        "                  ^^^^^^^^^^^^^^^^^^^^^^\n"
        "import the library that registers it, if it is not part of torch",
    ),
    "a function of torch": (
        graph_text("r = torch.relu(x)"),
        "log:4: 'torch.relu' is not an operator\n"
        "    r = torch.relu(x)\n"
        "        ^^^^^^^^^^\n"
        "give a graph of operators, as AOTAutograd (aot_*) and Inductor (*_post_grad_graph) print them",
    ),
    "a method": (
        graph_text("r = x.relu()"),
        "log:4: 'x.relu' is not an operator\n"
        "    r = x.relu()\n"
        "        ^^^^^^\n"
        "give a graph of operators, as AOTAutograd (aot_*) and Inductor (*_post_grad_graph) print them",
    ),
    "a type that the operator does not give": (
        graph_text('r: "f32[2, 5][5, 1]cpu" = torch.ops.aten.relu.default(x)'),
        "log:4: the operator of r returns f32[2, 4], not the printed type\n"
        '    r: "f32[2, 5][5, 1]cpu" = torch.ops.aten.relu.default(x)\n'
        "    ^\n"
        "print the graph again: it was edited, or printed with another version of the operator",
    ),
    "strides that the operator does not give": (
        graph_text('r: "f32[2, 4][1, 2]cpu" = torch.ops.aten.relu.default(x)'),
        "log:4: the operator of r returns f32[2, 4], not the printed type\n"
        '    r: "f32[2, 4][1, 2]cpu" = torch.ops.aten.relu.default(x)\n'
        "    ^\n"
        "print the graph again: it was edited, or printed with another version of the operator",
    ),
    "a device that the operator does not give": (
        graph_text('r: "f32[2, 4][4, 1]cuda:0" = torch.ops.aten.relu.default(x)'),
        "log:4: the operator of r returns f32[2, 4], not the printed type\n"
        '    r: "f32[2, 4][4, 1]cuda:0" = torch.ops.aten.relu.default(x)\n'
        "    ^\n"
        "print the graph again: it was edited, or printed with another version of the operator",
    ),
    "strides of a view on an accelerator": (
        graph_text('r: "f32[4, 2][2, 1]cuda:0" = torch.ops.aten.t.default(x)', inputs='x: "f32[2, 4][4, 1]cuda:0"'),
        "log:4: the operator of r returns f32[4, 2](device='cuda:0', strides=(1, 4)), not the printed type\n"
        '    r: "f32[4, 2][2, 1]cuda:0" = torch.ops.aten.t.default(x)\n'
        "    ^\n"
        "print the graph again: it was edited, or printed with another version of the operator",
    ),
    "a wrong item": (
        graph_text(
            "s = torch.ops.aten.split.Tensor(x, 2, 1);  x = None", 'r: "f32[2, 2][4, 1]cpu" = s[2];  s = None'
        ),
        "log:5: s has 2 items, so item 2 does not exist\n"
        '    r: "f32[2, 2][4, 1]cpu" = s[2];  s = None\n'
        "                              ^",
    ),
    "a wrong type of an item": (
        graph_text(
            "s = torch.ops.aten.split.Tensor(x, 2, 1);  x = None", 'r: "f32[2, 3][4, 1]cpu" = s[1];  s = None'
        ),
        "log:5: the operator of item 1 of s returns f32[2, 2](strides=(4, 1), offset=2), not the printed type\n"
        '    r: "f32[2, 3][4, 1]cpu" = s[1];  s = None\n'
        "    ^^^^^^^^^^^\n"
        "print the graph again: it was edited, or printed with another version of the operator",
    ),
    "a wrong number": (
        graph_text('r: "Sym(3*s5)" = n * 2', inputs='n: "Sym(s5)"'),
        "log:4: the text says that r is 3*s88, its operator returns 2*s88\n"
        '    r: "Sym(3*s5)" = n * 2\n'
        "    ^",
    ),
    "arguments that the operator refuses": (
        graph_text('r: "f32[2, 4][4, 1]cpu" = torch.ops.aten.mm.default(x, x)'),
        "log:4: mm: a and b must have same reduction dim, but got [2, 4] X [2, 4].\n"
        '    r: "f32[2, 4][4, 1]cpu" = torch.ops.aten.mm.default(x, x)\n'
        "    ^",
    ),
    "a type that is no type": (
        graph_text(RELU, inputs='x: "f32 of size 4"'),
        "log:3: 'f32 of size 4' is not a type\n"
        '    def forward(self, x: "f32 of size 4"):\n'
        "                          ^^^^^^^^^^^^^\n"
        "give a graph of plain tensors, as AOTAutograd (aot_*) and Inductor (*_post_grad_graph) print them",
    ),
    "a type of a subclass": (
        graph_text(RELU, inputs='x: "DTensor(f32[2, 4][4, 1]cpu, S(0))"'),
        "log:3: 'DTensor(f32[2, 4][4, 1]cpu, S(0))' is not a type\n"
        '    def forward(self, x: "DTensor(f32[2, 4][4, 1]cpu, S(0))"):\n'
        "                          ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^\n"
        "give a graph of plain tensors, as AOTAutograd (aot_*) and Inductor (*_post_grad_graph) print them",
    ),
    "an unknown dtype": (
        graph_text(RELU, inputs='x: "f33[2, 4][4, 1]cpu"'),
        "log:3: no dtype is called 'f33'\n"
        '    def forward(self, x: "f33[2, 4][4, 1]cpu"):\n'
        "                          ^^^",
    ),
    "an unknown device": (
        graph_text(RELU, inputs='x: "f32[2, 4][4, 1]gpu:0"'),
        "log:3: 'gpu:0' is not a device\n"
        '    def forward(self, x: "f32[2, 4][4, 1]gpu:0"):\n'
        "                                         ^^^^^",
    ),
    "sizes that are no sizes": (
        graph_text(RELU, inputs='x: "f32[2, x.y][4, 1]cpu"'),
        "log:3: a size is a number or an expression in symbols such as s0\n"
        '    def forward(self, x: "f32[2, x.y][4, 1]cpu"):\n'
        "    ^",
    ),
    "a size that is no symbol": (
        graph_text(RELU, inputs='x: "f32[2, rows][4, 1]cpu"'),
        "log:3: 'rows' is not a size symbol such as s0\n"
        '    def forward(self, x: "f32[2, rows][4, 1]cpu"):\n'
        "                                 ^^^^",
    ),
    "strides of another rank": (
        graph_text(RELU, inputs='x: "f32[2, 4][4]cpu"'),
        "log:3: x is not a possible tensor: dimensionality of sizes (2) must match dimensionality of strides (1)\n"
        '    def forward(self, x: "f32[2, 4][4]cpu"):\n'
        "                      ^",
    ),
    "an annotation that is no string": (
        graph_text(RELU, inputs="x: Tensor"),
        'log:3: expected a type such as "f32[2, 4][4, 1]cpu"\n'
        "    def forward(self, x: Tensor):\n"
        "    ^\n"
        "print the graph with its types",
    ),
    "an undefined name": (
        graph_text("r = torch.ops.aten.relu.default(xx)"),
        "log:4: 'xx' is not defined here\n"
        "    r = torch.ops.aten.relu.default(xx)\n"
        "                                    ^^\n"
        "did you mean 'x'?",
    ),
    "a name that was set to None": (
        graph_text(RELU, "s = torch.ops.aten.relu.default(x)"),
        "log:5: 'x' is not defined here\n"
        "    s = torch.ops.aten.relu.default(x)\n"
        "                                    ^",
    ),
    "a name set to None that is not there": (
        graph_text("y = None", result="(x,)"),
        "log:4: only a defined name can be set to None\n    y = None\n    ^",
    ),
    "a name defined twice": (
        graph_text("r = torch.ops.aten.relu.default(x)", "r = torch.ops.aten.relu.default(r)"),
        "log:5: r is defined twice\n    r = torch.ops.aten.relu.default(r)\n    ^",
    ),
    "a name that no node can have": (
        graph_text("all = torch.ops.aten.relu.default(x)", result="(all,)"),
        "log:4: 'all' cannot be the name of a node\n    all = torch.ops.aten.relu.default(x)\n    ^^^",
    ),
    "a statement": (
        graph_text("if x:", "    pass", result="(x,)"),
        "log:4: expected a line such as `relu = torch.ops.aten.relu.default(x)`\n    if x:\n    ^",
    ),
    "a literal": (
        graph_text("r = 3"),
        "log:4: expected an operator, an item or an attribute of self on the right side\n    r = 3\n    ^",
    ),
    "an attribute that is not shown": (
        graph_text("r = self.weight"),
        "log:4: the text does not define self.weight\n"
        "    r = self.weight\n"
        "             ^^^^^^\n"
        "read nested graphs from the post-grad graphs of a trace log; print constants with their types",
    ),
    "an argument that is none": (
        graph_text("r = torch.ops.aten.relu.default(lambda: x)"),
        "log:4: 'lambda: x' is not an argument\n"
        "    r = torch.ops.aten.relu.default(lambda: x)\n"
        "    ^\n"
        "use numbers, strings, lists, dtypes and names",
    ),
    "a number that is too large": (
        graph_text("r = torch.ops.aten.mul.Tensor(x, 0x" + "f" * 40 + ")"),
        "log:4: a whole number has more than 64 bits\n"
        "    r = torch.ops.aten.mul.Tensor(x, 0x" + "f" * 40 + ")\n"
        "    ^",
    ),
    "inputs that are not plain": (
        graph_text(RELU, inputs="*x"),
        "log:3: expected `def forward(self, ...)` with plain parameters\n"
        "    def forward(self, *x):\n"
        "        ^^^^^^^",
    ),
    "two groups of one name": (
        graph_text(
            "a = torch.ops._c10d_functional.all_gather_into_tensor.default(x, 2, '1')",
            "b = torch.ops._c10d_functional.all_gather_into_tensor.default(x, 4, '1')",
            result="(a, b)",
        ),
        "log:5: group '1' has 4 ranks here and 2 above\n"
        "    b = torch.ops._c10d_functional.all_gather_into_tensor.default(x, 4, '1')\n"
        "                                                                        ^^^",
    ),
    "text that is no Python": (
        graph_text("r = torch.ops.aten.relu.default(x"),
        "log:4: not valid Python: '(' was never closed\n    r = torch.ops.aten.relu.default(x\n    ^",
    ),
    "a wrong indentation": (
        graph_text("  r = torch.ops.aten.relu.default(x)", "y = r"),
        "log:5: not valid Python: unindent does not match any outer indentation level\n    y = r\n    ^",
    ),
    "something beside the class": (
        "class GraphModule(torch.nn.Module):\n    def forward(self):\n        return ()\nimport os\n",
        "log:5: expected one class, as torch prints a graph\n    import os\n    ^",
    ),
    "no forward": (
        "class GraphModule(torch.nn.Module):\n    x = 1\n",
        "log:2: GraphModule has 0 functions called forward, one is needed\n"
        "    class GraphModule(torch.nn.Module):\n"
        "          ^^^^^^^^^^^",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_each_fault_is_told_with_file_line_and_what_to_do(case: str, log: Path):
    text, message = FAULTS[case]
    found = fault(log, text, hints={"s5": 6})
    assert re.sub(r"\bs\d\d\b", "s88", found) == re.sub(r"\bs\d\d\b", "s88", message)


def test_a_group_of_another_size_than_its_launches_say_is_a_fault(log: Path):
    text = graph_text("r = torch.ops._c10d_functional.all_gather_into_tensor.default(x, 2, '1')")
    message = fault(log, text, groups={"1": 4})
    assert message.startswith("log:4: group '1' has 2 ranks in its launches, but 4 were given\n")


# What torch has no kernel for.


def test_a_higher_order_operator_has_the_types_of_its_items(log: Path):
    text = graph_text(
        "h = torch.ops.higher_order.triton_kernel_wrapper_functional(kernel_idx = 0, kwargs = {'a': x});  x = None",
        "r: \"f32[3][1]cpu\" = h['out'];  h = None",
    )
    register_operators("higher_order")
    listing = weft.listing(load(log, text))
    assert "r: f32[3] = h['out']\n" in listing


def test_communication_without_a_row_has_the_type_that_is_written(log: Path):
    text = graph_text(
        "r: \"f32[4, 4][4, 1]cpu\" = torch.ops._dtensor.shard_dim_alltoall.default(x, 0, 1, '7');  x = None"
    )
    assert "r: f32[4, 4] = _dtensor.shard_dim_alltoall.default(x, 0, 1, 'g0')\n" in weft.listing(
        load(log, text, groups={"7": 2})
    )


def test_in_place_foreach_operators_give_what_they_write(log: Path):
    text = graph_text(
        "f = torch.ops.aten._foreach_add_.Scalar([x, y], 1);  x = y = None",
        'r: "f32[3][1]cpu" = f[1];  f = None',
        inputs='x: "f32[2][1]cpu", y: "f32[3][1]cpu"',
    )
    module = load(log, text)
    values = {node.name: ops.value_of(node) for node in module.graph.nodes}
    assert values["r"] is values["y"]


# Inputs in other forms.


def test_inputs_that_are_flattened_from_trees_are_read(log: Path):
    text = (
        "class inner_f(torch.nn.Module):\n"
        "    def forward(\n"
        "        self,\n"
        "        primals,\n"
        "        tangents,\n"
        "    ):\n"
        '        primals_1: "f32[2, 4][4, 1]cpu"  # PlainAOTInput(idx=0)\n'
        '        tangents_1: "f32[2, 4][4, 1]cpu"  # TangentAOTInput(output=PlainAOTOutput(idx=0))\n'
        "        primals_1, tangents_1, = fx_pytree.tree_flatten_spec([primals, tangents], self._in_spec)\n"
        '        r: "f32[2, 4][4, 1]cpu" = torch.ops.aten.mul.Tensor(primals_1, tangents_1)\n'
        "        return pytree.tree_unflatten([\n"
        "            r,  # PlainAOTOutput(idx=0)\n"
        "        ], self._out_spec)\n"
    )
    assert weft.listing(load(log, text)) == (
        "def graph(primals_1: f32[2, 4], tangents_1: f32[2, 4]):\n"
        "    r: f32[2, 4] = mul(primals_1, tangents_1)\n"
        "    return [r]\n"
    )


def test_inputs_that_are_renamed_are_read(log: Path):
    text = graph_text("x_1 = X", 'r: "f32[2, 4][4, 1]cpu" = torch.ops.aten.relu.default(x_1)').replace("x: ", "X: ")
    assert weft.listing(load(log, text)).startswith("def graph(x_1: f32[2, 4]):\n")


def test_every_kind_of_argument_is_read(log: Path):
    text = graph_text(
        "a = torch.ops.aten.full.default([2, 4], inf, dtype = torch.float64, layout = torch.strided, "
        "device = device(type='cpu'))",
        "b = torch.ops.aten.clone.default(a, memory_format = torch.contiguous_format)",
        "c = torch.ops.aten.add.Tensor(b, (1-2j))",
        "d = torch.ops.aten.index.Tensor(x, [None, i])",
        "e = torch.ops.aten.slice.Tensor(d, 0, -1, 9223372036854775807)",
        "f = torch.ops.aten.sum.dim_IntList(e, [0], True)",
        "r = torch.sym_max(3, 4)",
        inputs='x: "f32[2, 4][4, 1]cpu", i: "i64[3][1]cpu"',
        result="{'a': a, 'c': (c, f), 'n': nan}",
    )
    assert weft.listing(load(log, text)).splitlines()[1:-1] == [
        "    a: f64[2, 4] = full([2, 4], inf, dtype=f64, layout=layout.strided, device=device('cpu'))",
        "    b: f64[2, 4] = clone(a, memory_format=memory_format.contiguous_format)",
        "    c: c128[2, 4] = add(b, complex(1.0, -2.0))",
        "    d: f32[2, 3] = index(x, [None, i])",
        "    e: f32[1, 3] = slice(d, 0, -1, 9223372036854775807)",
        "    f: f32[1, 3] = sum.dim_IntList(e, [0], True)",
        "    r: int[4] = torch.sym_max(3, 4)",
    ]
