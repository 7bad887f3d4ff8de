"""Tokens per second and the share of the peak, with their arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.fx import GraphModule

import weft
from weft.cost.device import Device
from weft.errors import ReportError
from weft.frontends import archive
from weft.graph.about import ABOUT_KEY, TOKENS_KEY, tokens_per_step
from weft.graph.listings.text import parse
from weft.report.sweep import sweep
from weft.report.sweep_table import sweep_text
from weft.report.work import Work, flops_share, work_of

# One rank of two: 2 x 1024^3 flops in bf16 and 2 x 512^3 in f32. Its cluster: 1 TFLOP/s of bf16 at an efficiency of 1.
LISTING = """group('dp', size=2)

def graph(x: bf16[1024, 1024], y: f32[512, 512], p: bf16[512, 1024]):
    ag: bf16[1024, 1024] = all_gather(p, 2, 'dp')
    w: bf16[1024, 1024] = wait(ag)
    a: bf16[1024, 1024] = mm(x, w)
    b: f32[512, 512] = mm(y, y)
    return [a, b]
"""
FLOPS = 2 * 1024**3 + 2 * 512**3
CLUSTER = """name = "round"
num_nodes = 1
ranks_per_node = 2

[device]
name = "round"
peak_tflops = { bf16 = 1.0, f32 = 1.0 }
matmul_efficiency = 1.0

[[levels]]
name = "wire"
spans = "node"
latency = "100 us"
bandwidth = "1 GB/s"
"""
DEVICE = Device(peak_tflops=(("bf16", 2.0), ("f32", 1.0)))


@pytest.fixture
def module() -> GraphModule:
    return parse(LISTING)


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "round.toml"
    path.write_text(CLUSTER)
    return path


def test_all_products_count_at_the_peak_of_the_dtype_that_most_flops_have(module: GraphModule):
    # most are bf16: 2 TFLOP/s; 2415919104 / 2e12 = 1.208 ms
    assert flops_share(module.graph.nodes, DEVICE) == FLOPS / 2e12


@pytest.mark.parametrize(
    ("text", "device"),
    [
        (LISTING, Device()),
        (LISTING, Device(peak_tflops=(("f32", 1.0),))),
        ("def graph(x: f32[4]):\n    r: f32[4] = relu(x)\n    return [r]\n", DEVICE),
    ],
    ids=["no peak", "no peak of that dtype", "no product"],
)
def test_the_share_is_not_known(text: str, device: Device):
    assert work_of(parse(text), device) == Work(None, None)


def test_a_product_of_unknown_size_leaves_the_share_unknown(module: GraphModule):
    for node in module.graph.nodes:
        if node.name == "b":
            del node.meta["val"]
    assert flops_share(module.graph.nodes, DEVICE) is None


def test_the_table_the_json_and_the_page_say_both(module: GraphModule, cluster: Path, tmp_path: Path):
    report = weft.optimize(module, cluster, pipeline="none", tokens_per_step=8192).report
    found = json.loads(report.to_json())["simulated"]["before"]
    # Both products take 2415919104 / 1e12 s = 2415.92 us at the peak; the gather is exposed: 100 us and
    # 1048576 B / 1e9 B/s = 1048.58 us. So a step takes 3564.5 us: 67.8 % of the peak, 2298219 tokens a second.
    assert found["step_us"] == pytest.approx(2415.92 + 1148.58, abs=0.02)
    assert found["mfu"] == pytest.approx(0.67777, abs=1e-5)
    assert found["tokens_per_second"] == pytest.approx(2_298_219, abs=10)
    rows = {line.partition("  ")[0]: line.split()[1:] for line in report.summary_lines()}
    assert rows["MFU"][:2] == ["67.8", "%"]
    assert rows["tokens/s"][0] == f"{found['tokens_per_second']:,.0f}"
    report.save_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "MFU" in page
    assert rows["tokens/s"][0] in page


def test_what_is_not_known_has_no_row(module: GraphModule, cluster: Path):
    text = cluster.read_text()
    cluster.write_text(text.replace("peak_tflops = { bf16 = 1.0, f32 = 1.0 }\n", ""))
    names = [line.split("  ")[0] for line in weft.optimize(module, cluster).report.summary_lines()]
    assert "MFU" not in names
    assert "tokens/s" not in names


@pytest.mark.parametrize(
    ("parallel", "mesh", "batch", "tokens"),
    [
        ("fsdp", {"dp": 4}, 3, 3 * 32 * 4),  # three sequences of 32 on each of four ranks
        ("fsdp-tp", {"dp": 2, "tp": 4}, 1, 32 * 2),  # ranks of one tensor group share their tokens
        ("tp", {"tp": 2}, 2, 2 * 32),
        ("none", None, 5, 5 * 32),
    ],
)
def test_the_zoo_knows_its_tokens(parallel: str, mesh: dict[str, int] | None, batch: int, tokens: int):
    module = weft.zoo.load("llama-debug", parallel, mesh=mesh, batch=batch, layers=1)
    assert tokens_per_step(module) == tokens


def test_images_are_no_tokens():
    assert tokens_per_step(weft.zoo.load("vision-debug", "ddp", ranks=2)) is None


def test_an_archive_keeps_them(module: GraphModule, tmp_path: Path):
    module.meta[ABOUT_KEY] = {TOKENS_KEY: 640}
    archive.save(module, tmp_path / "graph.weft")
    assert tokens_per_step(archive.load(tmp_path / "graph.weft")) == 640


@pytest.mark.parametrize("about", [None, [], *({TOKENS_KEY: each} for each in ("8", True, 0, -1, 1.5, None))])
def test_nonsense_in_a_module_is_no_number_of_tokens(module: GraphModule, about: object):
    module.meta[ABOUT_KEY] = about
    assert tokens_per_step(module) is None


def test_fewer_than_one_token_is_refused(module: GraphModule, cluster: Path):
    with pytest.raises(ReportError) as refused:
        weft.optimize(module, cluster, tokens_per_step=0)
    assert str(refused.value) == ("report: tokens_per_step is 0, expected 1 or more\nleave it out if it is not known")


def test_a_sweep_says_them_too(module: GraphModule, cluster: Path):
    module.meta[ABOUT_KEY] = {TOKENS_KEY: 640}
    (own,) = sweep(module, [cluster], ["none"])
    (given,) = sweep(module, [cluster], ["none"], tokens_per_step=1280)
    assert own.after is not None
    assert given.after is not None
    assert own.after.tokens_per_second == pytest.approx(640 / (own.after.step_us / 1e6))
    assert given.after.tokens_per_second == pytest.approx(2 * own.after.tokens_per_second)
    assert own.sweep != given.sweep
    assert sweep_text([own]).splitlines()[0].split()[-2:] == ["MFU", "tokens/s"]
