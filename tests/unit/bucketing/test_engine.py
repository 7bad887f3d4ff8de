"""Buckets: one decision for every collective, the same in every run."""

from __future__ import annotations

from torch.fx import GraphModule

import weft
from tests.unit.plan.listings import buckets, decisions, gathers, graph, merges, run
from weft.plan.decision import Reason

AG = "bucket-all-gathers"


def outcomes(module: GraphModule, pipeline: str) -> list[tuple[Reason, tuple[str, ...], str | None]]:
    """The reason, the nodes and the blocking node of each decision."""
    return [(d.reason, d.nodes, d.blocking) for d in decisions(module, pipeline)]


def test_a_merge_names_its_launches_and_the_nodes_of_the_bucket():
    (decision,) = decisions(gathers(3), AG)
    assert decision.reason is Reason.APPLIED
    assert decision.nodes == ("ag0", "ag1", "ag2", "ag0_bucket", "ag0_done")


def test_a_second_run_changes_nothing():
    done = run(gathers(2), AG).module
    assert outcomes(done, AG) == [(Reason.ALREADY_DONE, ("ag0_bucket",), None)]


def test_a_bucket_never_exceeds_its_limit():
    assert outcomes(gathers(2), AG + "{max-bytes=48}") == [
        (Reason.FULL, ("ag0",), "ag1"),
        (Reason.FULL, ("ag1",), "ag0"),
    ]


def test_a_gather_that_reaches_the_limit_stays_alone():
    assert outcomes(gathers(2), AG + "{max-bytes=32}") == [
        (Reason.FULL, ("ag0",), "ag0"),
        (Reason.FULL, ("ag1",), "ag1"),
    ]


def test_a_gather_too_far_away_does_not_join():
    lines = ["ag0 = all_gather(a, 2, 'dp')", "w0 = wait(ag0)", "n = slice(w0, 0, 0, 2)"]
    lines += ["ag1 = all_gather(n, 2, 'dp')", "w1 = wait(ag1)", "ag2 = all_gather(b, 2, 'dp')", "w2 = wait(ag2)"]
    lines += ["ag3 = all_gather(c, 2, 'dp')", "w3 = wait(ag3)"]
    module = graph("a: f32[2], b: f32[2], c: f32[2]", *lines, returns="w1, w2, w3")
    assert buckets(module, AG + "{max-bytes=48}") == [("ag0", "ag2", "ag3")]
    large = graph("a: f32[2], b: f32[64], c: f32[2]", *lines, returns="w1, w2, w3")
    assert buckets(large, AG + "{max-bytes=64}") == [("ag0", "ag3")]


def test_two_gathers_of_one_shard_do_not_share_a_bucket():
    lines = ("ag0 = all_gather(p, 2, 'dp')", "w0 = wait(ag0)", "ag1 = all_gather(p, 2, 'dp')", "w1 = wait(ag1)")
    module = graph("p: f32[4]", *lines, returns="w0, w1")
    assert outcomes(module, AG) == [
        (Reason.HOLDS_MEMORY, ("ag0",), "ag1"),
        (Reason.HOLDS_MEMORY, ("ag1",), "ag0"),
    ]


def test_the_same_shard_is_seen_through_casts_and_views():
    lines = ("c0 = _to_copy(p, dtype=bf16)", "ag0 = all_gather(c0, 2, 'dp')", "w0 = wait(ag0)")
    lines += ("c1 = _to_copy(p, dtype=bf16)", "ag1 = all_gather(c1, 2, 'dp')", "w1 = wait(ag1)")
    assert buckets(graph("p: f32[4]", *lines, returns="w0, w1"), AG) == []


def test_a_write_between_the_launches_has_them_brought_together():
    lines = ("ag0 = all_gather(p, 2, 'dp')", "w0 = wait(ag0)", "z = zero_(p)", "m = mm(q, q)")
    lines += ("ag1 = all_gather(m, 2, 'dp')", "w1 = wait(ag1)")
    module = graph("p: f32[2, 2], q: f32[2, 2]", *lines, returns="w0, w1")
    (merge,) = merges(module, AG)
    assert merge.together
    without = graph("p: f32[2, 2], q: f32[2, 2]", *(line for line in lines if "zero_" not in line), returns="w0, w1")
    (merge,) = merges(without, AG)
    assert not merge.together


def test_a_dependency_names_the_other_gather():
    lines = ("ag0 = all_gather(p, 2, 'dp')", "w0 = wait(ag0)", "ag1 = all_gather(w0, 2, 'dp')", "w1 = wait(ag1)")
    assert outcomes(graph("p: f32[4]", *lines, returns="w1"), AG) == [
        (Reason.DEPENDENCY, ("ag0",), "ag1"),
        (Reason.DEPENDENCY, ("ag1",), "ag0"),
    ]


def test_a_gather_of_activations_is_left_alone_if_only_parameters_are_wanted():
    lines = ("a = mm(x, x)", "ag = all_gather(a, 2, 'dp')", "w = wait(ag)", "r = mm(w, x)")
    module = graph("x: f32[2, 2]", *lines, returns="r")
    ((reason, nodes, _),) = outcomes(module, AG + "{only=parameters}")
    assert (reason, nodes) == (Reason.OTHER_ROLE, ("ag",))


def test_launches_that_send_nothing_are_not_merged():
    assert outcomes(gathers(2, size=0), AG) == [
        (Reason.ALONE, ("ag0",), None),
        (Reason.ALONE, ("ag1",), None),
    ]


def test_launches_of_several_dtypes_stay_alone_and_the_sentence_names_the_strategy_that_merges_them():
    def sentences(launch: str, pipeline: str) -> set[str]:
        lines = (f"c0 = {launch.format('p')}", f"c1 = {launch.format('q')}", "w0 = wait(c0)", "w1 = wait(c1)")
        module = graph("p: f32[4], q: bf16[4]", *lines, returns="w0, w1")
        return {d.sentence.partition(": ")[2] for d in decisions(module, pipeline) if d.reason is Reason.ALONE}

    moved = "the broadcasts like it in group 'dp' have other dtypes, and only strategy=pack merges several"
    assert sentences("broadcast({}, 0, 'dp')", "bucket-transfers") == {moved}
    assert sentences("broadcast({}, 0, 'dp')", "bucket-transfers{strategy=pack}") == set()
    reduced = "the all-reduces like it in group 'dp' have other dtypes"
    for strategy in ("concat", "pack"):
        assert sentences("all_reduce({}, 'sum', 'dp')", f"bucket-all-reduces{{strategy={strategy}}}") == {reduced}


def test_every_collective_of_the_kind_is_decided_once():
    lines = ["ag0 = all_gather(p, 2, 'dp')", "ag1 = all_gather(q, 2, 'dp')", "ag2 = all_gather(p, 2, 'dp')"]
    lines += ["ar = all_reduce(p, 'sum', 'dp')", *(f"w{i} = wait(ag{i})" for i in range(3)), "w3 = wait(ar)"]
    module = graph("p: f32[4], q: bf16[4]", *lines, returns="w0, w1, w2, w3")
    assert [decision.nodes[0] for decision in decisions(module, AG)] == ["ag0", "ag1", "ag2"]


def test_what_is_returned_or_written_to_is_owned():
    lines = ("ar0 = all_reduce(x, 'sum', 'dp')", "ar1 = all_reduce(y, 'sum', 'dp')", "ar2 = all_reduce(z, 'sum', 'dp')")
    lines += ("w0 = wait(ar0)", "w1 = wait(ar1)", "w2 = wait(ar2)", "k = zero_(w1)", "r = neg(w2)")
    module = graph("x: f32[4], y: f32[4], z: f32[4]", *lines, returns="w0, r")
    assert [merge.owned for merge in merges(module, "bucket-all-reduces")] == [(0, 1)]
    assert [merge.owned for merge in merges(module, "bucket-all-reduces{alias-outputs=true}")] == [(1,)]


def test_an_in_place_result_is_not_owned_since_it_is_copied_to_its_memory():
    lines = (
        "ar0 = all_reduce_(x, 'sum', 'dp')",
        "ar1 = all_reduce_(y, 'sum', 'dp')",
        "w0 = wait(ar0)",
        "w1 = wait(ar1)",
    )
    module = graph("x: f32[4], y: f32[4]", *lines, returns="w0, w1")
    assert [merge.owned for merge in merges(module, "bucket-all-reduces")] == [()]


def test_buckets_that_each_need_the_one_before_take_little_time():
    """Two groups in turn, a bucket of two in each: a question about the last one leads through all of them."""
    lines: list[str] = []
    for i in range(600):
        group, source = ("dp", "tp")[i % 2], f"wp{i - 1}" if i else "x"
        lines += [f"p{i} = all_reduce(x, 'sum', '{group}')", f"wp{i} = wait(p{i})"]
        lines += [f"q{i} = all_reduce({source}, 'sum', '{group}')", f"wq{i} = wait(q{i})"]
    text = "\n".join(
        ["group('dp', size=2, stride=2)", "group('tp', size=2)", "", "def graph(x: f32[2]):"]
        + [f"    {line}" for line in lines]
        + [f"    return [{', '.join(f'wq{i}' for i in range(600))}]", ""]
    )
    done = run(weft.parse(text), "bucket-all-reduces{max-bytes=32}")
    assert done.log[0].seconds < 10  # 1 s on an idle machine; it was a minute when blocks were followed one by one


def test_long_chains_of_additions_are_folded():
    lines = ["w0 = wait(r0)", *(f"s{i} = add({f's{i - 1}' if i > 1 else 'w0'}, w{i})" for i in range(1, 1500))]
    launches = ["r0 = reduce_scatter(x, 'sum', 2, 'dp')"]
    for i in range(1, 1500):
        launches += [f"r{i} = reduce_scatter(x, 'sum', 2, 'dp')", f"w{i} = wait(r{i})"]
    module = graph("x: f32[4]", *launches, *lines, returns="s1499")
    done = run(module, "dedupe-reduce-scatters").module
    assert weft.listing(done).count("reduce_scatter(") == 1
