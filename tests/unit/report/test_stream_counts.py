"""The count of collectives that were streamed: each once, by the last word on it."""

from __future__ import annotations

import json

import weft

LISTING = """group('tp', size=2)

def graph(x: f32[4, 8], p: f32[4, 6], b: f32[8, 6]):
    ag = all_gather(x, 2, 'tp')
    w = wait(ag)
    y = mm(w, b)
    t0 = t(w)
    z = mm(t0, w)
    ag1 = all_gather(y, 2, 'tp')
    w1 = wait(ag1)
    e = sin(w1)
    ag2 = all_gather(p, 2, 'tp')
    w2 = wait(ag2)
    v = mm(w2, e)
    return [z, v]
"""


def test_every_collective_is_counted_once_and_the_report_says_how_many_were_streamed():
    module = weft.parse(LISTING.replace("v = mm(w2, e)", "k = t(e)\n    v = mm(w2, k)"))
    report = weft.optimize(module, pipeline="fuse-all-gather-matmuls{chunks=2 only=activations}").report
    line = "fuse-all-gather-matmuls: streamed 1 of 2 collectives, 1 stay whole (1 not-by-rows); 1 carry something else"
    assert line in str(report).splitlines()
    everything = weft.optimize(module, pipeline="fuse-all-gather-matmuls{chunks=2}").report
    line = "fuse-all-gather-matmuls: streamed 2 of 3 collectives, 1 stay whole (1 not-by-rows)"
    assert line in str(everything).splitlines()
    (found,) = json.loads(everything.to_json())["streams"]
    assert found == {
        "pass_name": "fuse-all-gather-matmuls",
        "num_collectives": 3,
        "streamed": 2,
        "whole": {"not-by-rows": 1},
        "other_role": 0,
    }


def test_a_run_without_such_a_pass_says_nothing():
    report = weft.optimize(weft.parse(LISTING.replace("v = mm(w2, e)", "v = relu(e)")), pipeline="sink-waits").report
    assert report.streams == ()
