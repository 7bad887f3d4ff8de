"""Runnables of Inductor: inputs with types and storages, groups, constants; and a clear word about every fault."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

import weft
from weft.compat import storage_key
from weft.errors import ReadError
from weft.frontends.printed.runnable import read_runnable
from weft.frontends.trace_log import read_log
from weft.graph import ops
from weft.graph.about import ABOUT_KEY
from weft.graph.groups import TABLE_KEY

DATA = Path(__file__).parents[2] / "data"


def script(
    *lines: str,
    inputs: str = "x",
    loads: tuple[str, ...] = ("buf0 = reader.storage(None, 32)", "reader.tensor(buf0, (2, 4), is_leaf=True)  # x"),
    initial: tuple[str, ...] = (),
    top: str = "",
    groups: str = "",
    result: str = "(r,)",
) -> str:
    """A runnable as torch writes it, cut to what matters."""
    return "\n".join(
        [
            top,
            "import torch",
            "from torch import tensor, device",
            "torch._inductor.config.deterministic = False",
            "# torch version: 2.13.0+cpu",
            "from torch.nn import *",
            "class Repro(torch.nn.Module):",
            "    def __init__(self) -> None:",
            "        super().__init__()",
            *(f"        {line}" for line in initial),
            f"    def forward(self, {inputs}):",
            *(f"        {line}" for line in lines),
            f"        return {result}",
            "",
            "def load_args(reader):",
            *(f"    {line}" for line in loads),
            "load_args._version = 0",
            "mod = Repro()",
            "if __name__ == '__main__':",
            "    from torch._dynamo.repro.after_aot import run_repro",
            f"    {groups or 'pass'}",
            "    with torch.no_grad():",
            "        run_repro(mod, load_args)",
            "",
        ]
    )


def fault(text: str, **options: object) -> str:
    with pytest.raises(ReadError) as error:
        read_runnable(text, **options)  # type: ignore[arg-type]
    return str(error.value)


RELU = "r = torch.ops.aten.relu.default(x);  x = None"


def test_a_real_runnable_reads_as_the_graph_that_the_log_prints():
    graphs = [g for g in read_log(DATA / "train_inductor.log") if g.compile_id == "1/0" and g.part == "forward"]
    (runnable,) = [g for g in graphs if g.kind == "fx_graph_runnable"]
    (printed,) = [g for g in graphs if g.kind == "inductor_post_grad_graph"]
    # Behind it Inductor has only made the reduction work in place.
    expected = weft.listing(printed.load()).replace("all_reduce_(", "all_reduce(")
    assert weft.listing(read_runnable(runnable.text())) == expected


@pytest.mark.parametrize("file", ["train_inductor.log", "conv_attention_cuda_2.11.log.gz"])
def test_every_real_runnable_is_read_and_its_listing_reads_back(file: str):
    graphs = [g for g in read_log(DATA / file) if g.kind == "fx_graph_runnable"]
    assert len(graphs) >= 2
    for graph in graphs:
        text = weft.listing(read_runnable(graph.text(), groups={"2": 2}))
        assert weft.listing(weft.parse(text)) == text


def test_a_file_a_packed_file_and_a_text_give_the_same(tmp_path: Path):
    text = script(RELU)
    plain, packed = tmp_path / "a.py", tmp_path / "b.py.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    listings = {weft.listing(read_runnable(source)) for source in (text, plain, str(plain), packed)}
    assert listings == {"def graph(x: f32[2, 4]):\n    r: f32[2, 4] = relu(x)\n    return (r,)\n"}


def test_what_the_script_says_of_itself_is_kept():
    assert read_runnable(script(RELU)).meta[ABOUT_KEY] == {"source": "runnable", "torch": "2.13.0+cpu"}


def test_inputs_have_dtypes_strides_offsets_and_devices():
    text = script(
        "r = torch.ops.aten.relu.default(a)",
        inputs="a, b, c",
        loads=(
            "buf0 = reader.storage(None, 64, device=device(type='cuda', index=0), dtype_hint=torch.bfloat16)",
            "reader.tensor(buf0, (4, 8), (1, 4), dtype=torch.bfloat16, requires_grad=True, is_leaf=True)  # a",
            "buf1 = reader.storage(None, 80, dtype_hint=torch.int64)",
            "reader.tensor(buf1, (2, 3), dtype=torch.int64, storage_offset=4, is_leaf=True)  # b",
            "reader.const('c')  # c, filtered out during compilation",
        ),
    )
    assert weft.listing(read_runnable(text)).splitlines()[:3] == [
        "device('cuda:0')",
        "",
        "def graph(a: bf16[4, 8](strides=(1, 4)), b: i64[2, 3](device='cpu', offset=4), c):",
    ]


def test_inputs_that_share_a_storage_share_it():
    text = script(
        "r = torch.ops.aten.add.Tensor(a, b)",
        inputs="a, b, c",
        loads=(
            "buf0 = reader.storage(None, 64)",
            "reader.tensor(buf0, (4,))  # a",
            "reader.tensor(buf0, (4,), storage_offset=8)  # b",
            "reader.tensor(buf0, (2,), dtype=torch.int64)  # c",
        ),
    )
    module = read_runnable(text)
    values = [ops.value_of(node) for node in module.graph.nodes if node.op == "placeholder"]
    assert len({storage_key(value) for value in values}) == 1
    assert "b: f32[4](offset=8, base='a')" in weft.listing(module)


def test_symbolic_sizes_have_their_hints():
    text = script(
        "r = torch.ops.aten.view.default(x, [m]);  x = m = None",
        inputs="n, m, x",
        top="s77 = 8",
        loads=(
            "reader.symint(8, expr='s77')  # n",
            "reader.symint(64, expr='8*s77')  # m",
            "buf0 = reader.storage(None, 32*s77)",
            "reader.tensor(buf0, (s77, 8))  # x",
        ),
    )
    assert weft.listing(read_runnable(text)) == (
        "symbol('s0', hint=8)\n"
        "\n"
        "def graph(n: int[s0], m: int[8*s0], x: f32[s0, 8]):\n"
        "    r: f32[8*s0] = view(x, [m])\n"
        "    return (r,)\n"
    )
    assert weft.listing(read_runnable(text, hints={"s77": 5})).startswith("symbol('s0', hint=5)\n")


def test_numbers_without_their_symbols_make_all_sizes_numbers():
    text = script(
        "r = torch.ops.aten.view.default(x, [m]);  x = m = None",
        inputs="m, x",
        top="s77 = 8",
        loads=(
            "reader.symint(64)  # m",
            "buf0 = reader.storage(None, 32*s77)",
            "reader.tensor(buf0, (s77, 8))  # x",
        ),
    )
    assert "def graph(m: int[64], x: f32[8, 8]):\n    r: f32[64] = view(x, [m])\n" in weft.listing(read_runnable(text))


def test_groups_have_the_sizes_that_the_script_sets_up():
    text = script(
        "a = torch.ops._c10d_functional.all_reduce.default(x, 'sum', '7');  x = None",
        "r = torch.ops._c10d_functional.wait_tensor.default(a);  a = None",
        groups="setup_fake_process_groups({'7': {'size': 16, 'rank': 3}})",
    )
    module = read_runnable(text)
    assert weft.listing(module).startswith("group('g0', size=16)\n")
    assert module.meta[TABLE_KEY].runtime == {"g0": "7"}


def test_a_group_that_is_not_set_up_must_be_given():
    text = script(
        "a = torch.ops._c10d_functional.all_reduce.default(x, 'sum', '7');  x = None",
        "r = torch.ops._c10d_functional.wait_tensor.default(a);  a = None",
        groups='dist.init_process_group(backend="fake", rank=0, world_size=2, store=FakeStore())',
    )
    assert fault(text).startswith("runnable:11: the text does not say how many ranks group '7' has\n")
    assert weft.listing(read_runnable(text, groups={"7": 4})).startswith("group('g0', size=4)\n")


@pytest.mark.parametrize(
    ("value", "type_"),
    [
        ("tensor([1., 2.])", "f32[2]"),
        ("tensor([[-1, 2], [3, 4]])", "i64[2, 2]"),
        ("tensor([True, False])", "b8[2]"),
        ("tensor(3, dtype=torch.int32)", "i32[()]"),
        ("tensor(2.5000, dtype=torch.float64)", "f64[()]"),
        ("tensor([], size=(0, 4))", "f32[0, 4]"),
        ("torch.randn([64, 8], dtype=torch.bfloat16)", "bf16[64, 8]"),
        ('torch.randint(1, size=[100], dtype=torch.int64).to("cuda:0")', "i64[100](device='cuda:0')"),
        ("tensor([1.], device='cuda:0', dtype=torch.float16)", "f16[1](device='cuda:0')"),
    ],
)
def test_constants_have_types_and_no_values(value: str, type_: str):
    text = script("r = self.c", initial=(f"self.register_buffer('c', {value})",))
    module = read_runnable(text)
    assert f"    r: {type_} = attribute('c')\n" in weft.listing(module)
    assert module.c.device.type == "meta"


def test_parameters_are_constants_too():
    text = script(
        "r = self.weight", initial=("self.weight = torch.nn.Parameter(torch.randn([3, 4], dtype=torch.float32))",)
    )
    assert "    r: f32[3, 4] = attribute('weight')\n" in weft.listing(read_runnable(text))


def test_a_list_of_inputs_that_is_emptied_first_is_read():
    text = script(
        "args_iter = iter(args_list)",
        "x = next(args_iter)",
        "args_list.clear()",
        RELU,
        inputs="args_list",
    )
    assert "def graph(x: f32[2, 4]):\n    r: f32[2, 4] = relu(x)\n" in weft.listing(read_runnable(text))


def test_lines_that_mend_values_of_inputs_are_passed_over():
    loads = (
        "buf0 = reader.storage(None, 32)",
        "reader.tensor(buf0, (2, 4))  # x",
        "if hasattr(reader, 'args'):",
        "    reader.args[0].fill_(3)",
    )
    assert "relu(x)" in weft.listing(read_runnable(script(RELU, loads=loads)))


FAULTS: dict[str, tuple[str, str]] = {
    "no script": (
        "import torch\nx = 1\n",
        "runnable:1: it is not a runnable: it has no class Repro\n"
        "    import torch\n"
        "    ^\n"
        "give an fx_graph_runnable text of Inductor",
    ),
    "a script that was cut": (
        script(RELU)[: script(RELU).index("def load_args")],
        "runnable:1: it is not a runnable: it has no function load_args\n"
        "give an fx_graph_runnable text of Inductor",
    ),
    "an attribute that is not defined": (
        script("g = self.true_graph_0", initial=("self.true_graph_0 = Linear(2, 4)",)),
        "runnable:12: the text does not define self.true_graph_0\n"
        "    g = self.true_graph_0\n"
        "             ^^^^^^^^^^^^\n"
        "read nested graphs from the post-grad graphs of a trace log; print constants with their types",
    ),
    "too few inputs": (
        script(RELU, loads=('"""nothing"""',)),
        "runnable:14: load_args reads 0 inputs, forward takes 1\n"
        "    def load_args(reader):\n"
        "        ^^^^^^^^^\n"
        "is the text complete?",
    ),
    "an unknown method": (
        script(RELU, loads=("reader.tensr(buf0, (2, 4))",)),
        "runnable:15: the reader has no method 'tensr'\n"
        "    reader.tensr(buf0, (2, 4))\n"
        "           ^^^^^",
    ),
    "another statement": (
        script(RELU, loads=("import os",)),
        "runnable:15: expected a line such as `reader.tensor(buf0, (4, 4))`\n    import os\n    ^",
    ),
    "an unknown storage": (
        script(RELU, loads=("reader.tensor(buf7, (2, 4))",)),
        "runnable:15: expected a line such as `reader.tensor(buf0, (4, 4))`\n"
        "    reader.tensor(buf7, (2, 4))\n"
        "                  ^^^^",
    ),
    "a storage that is too small": (
        script(RELU, loads=("buf0 = reader.storage(None, 16)", "reader.tensor(buf0, (2, 4))")),
        "runnable:16: x needs 8 elements of its storage, which has 4\n"
        "    reader.tensor(buf0, (2, 4))\n"
        "                  ^^^^",
    ),
    "a dtype that is none": (
        script(RELU, loads=("buf0 = reader.storage(None, 32)", "reader.tensor(buf0, (2, 4), dtype=3)")),
        "runnable:16: x has no dtype\n"
        "    reader.tensor(buf0, (2, 4), dtype=3)\n"
        "                                ^^^^^",
    ),
    "an expression that is none": (
        script(RELU, loads=("reader.symint(8, expr='open(1)')",)),
        "runnable:15: 'open(1)' is not a supported expression\n"
        "    reader.symint(8, expr='open(1)')\n"
        "                           ^^^^^^^",
    ),
    "an unknown operator": (
        script("r = torch.ops.aten.rellu.default(x)"),
        "runnable:11: no operator is called 'aten.rellu.default'\n"
        "    r = torch.ops.aten.rellu.default(x)\n"
        "                  ^^^^^^^^^^^^^^^^^^\n"
        "did you mean 'aten.relu.default'?\n"
        "import the library that registers it, if it is not part of torch",
    ),
    "an operator that refuses its arguments": (
        script("r = torch.ops.aten.mm.default(x, x)"),
        "runnable:11: mm: a and b must have same reduction dim, but got [2, 4] X [2, 4].\n"
        "    r = torch.ops.aten.mm.default(x, x)\n"
        "    ^",
    ),
    "text that is no Python": (
        script("r = = x"),
        "runnable:11: not valid Python: invalid syntax\n    r = = x\n    ^",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_each_fault_is_told_with_its_line_and_what_to_do(case: str):
    text, message = FAULTS[case]
    assert fault(text) == message


def test_files_that_cannot_be_read_are_told(tmp_path: Path):
    with pytest.raises(ReadError, match=r"nowhere\.py: it cannot be read: .*No such file"):
        read_runnable(tmp_path / "nowhere.py")
    (tmp_path / "bytes.py").write_bytes(b"\xff\xfe\n")
    with pytest.raises(ReadError, match=r"bytes\.py: it cannot be read: 'utf-8' codec"):
        read_runnable(tmp_path / "bytes.py")
    content = bytearray(gzip.compress(script(RELU).encode()))
    content[40:60] = bytes(20)
    (tmp_path / "damaged.py.gz").write_bytes(content)
    with pytest.raises(ReadError, match=r"damaged\.py\.gz: it cannot be read: "):
        read_runnable(tmp_path / "damaged.py.gz")


def test_nothing_in_the_script_is_run(tmp_path: Path):
    made = tmp_path / "made"
    for line in (f"open({str(made)!r}, 'w')", f"__import__('os').system('touch {made}')"):
        around = script(RELU, top=f"{line}\nimport os\nos.environ['X'] = 'y'", groups=line, initial=(line,))
        assert "relu(x)" in weft.listing(read_runnable(around))
        assert fault(script(RELU, loads=(line,))).startswith("runnable:15: expected a line such as")
        assert "is not an operator" in fault(script(f"r = {line}"))
    assert not made.exists()
