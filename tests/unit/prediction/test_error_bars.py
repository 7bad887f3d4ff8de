"""Error bars: the closest set of residuals that is large enough, and wider where nothing was validated."""

from __future__ import annotations

import pytest

from weft.prediction import error_bars
from weft.prediction.error_bars import BORROWED_FACTOR, OTHER_DEVICE_FACTOR, PLAIN, StepKind, StepResidual, quantile

KIND = StepKind("H100", "fsdp", "blocks")


def residuals(kind: StepKind, *errors: float) -> list[StepResidual]:
    return [StepResidual(kind, error, None) for error in errors]


def bars(monkeypatch: pytest.MonkeyPatch, known: list[StepResidual], kind: StepKind = KIND):
    monkeypatch.setattr(error_bars, "residuals", lambda: tuple(known))
    return error_bars.error_bars(kind)


def test_four_of_five_further_steps_lie_inside():
    assert quantile([0.01, 0.02, 0.03]) is None
    assert quantile([0.04, 0.01, 0.03, 0.02]) == 0.04
    assert quantile([0.09, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08]) == 0.08


def test_the_same_kind_of_step_counts_if_it_was_validated_often_enough(monkeypatch: pytest.MonkeyPatch):
    known = residuals(KIND, 0.01, -0.02, 0.03, -0.04) + residuals(StepKind("H100", "fsdp", "eager"), 0.5)
    step, _ = bars(monkeypatch, known)
    assert step.share == 0.04
    assert step.text == "± 4.0 %"


def test_a_rare_kind_takes_the_next_wider_set(monkeypatch: pytest.MonkeyPatch):
    known = residuals(KIND, 0.01) + residuals(StepKind("H100", "fsdp", "eager"), 0.02, 0.03, 0.05)
    known += residuals(StepKind("H100", "tp", "eager"), 0.9, 0.9)
    assert bars(monkeypatch, known)[0].share == 0.05 * BORROWED_FACTOR
    assert bars(monkeypatch, known, StepKind("H100", "ddp", "eager"))[0].share == 0.9 * BORROWED_FACTOR


def test_another_device_doubles_the_bar_and_says_so(monkeypatch: pytest.MonkeyPatch):
    known = residuals(StepKind("A100", "fsdp", "blocks"), 0.01, 0.02, 0.03, 0.05)
    step, _ = bars(monkeypatch, known)
    assert step.share == 0.05 * OTHER_DEVICE_FACTOR
    assert "not validated on this device" in step.basis


def test_without_residuals_there_is_no_bar(monkeypatch: pytest.MonkeyPatch):
    step, peak = bars(monkeypatch, residuals(KIND, 0.01, 0.02, 0.03, 0.05))
    assert step.share is not None
    assert (peak.share, peak.text, peak.basis) == (None, "", "not validated on this device")


def test_the_recorded_residuals_can_be_read():
    for residual in error_bars.residuals():
        assert residual.step is None or abs(residual.step) < 1
        assert residual.kind.device


def test_a_borrowed_bar_is_wider_than_that_of_every_kind_that_lends_it(monkeypatch: pytest.MonkeyPatch):
    eager, compiled = StepKind("H100", "fsdp", "eager"), StepKind("H100", "fsdp", "compiled")
    known = residuals(eager, 0.1, 0.2, 0.2, 0.2) + residuals(compiled, *[0.01] * 30)
    assert bars(monkeypatch, known, eager)[0].share == 0.2
    assert bars(monkeypatch, known, compiled)[0].share == 0.01
    for borrower in (StepKind("H100", "fsdp", "blocks"), StepKind("H100", "tp", "blocks"), StepKind("A100", "tp", "")):
        borrowed = bars(monkeypatch, known, borrower)[0].share
        assert borrowed is not None
        assert borrowed > 0.2


def test_a_borrowed_bar_covers_the_few_errors_of_its_own_kind(monkeypatch: pytest.MonkeyPatch):
    known = residuals(KIND, 0.4) + residuals(StepKind("H100", "fsdp", "eager"), *[0.01] * 8)
    assert bars(monkeypatch, known)[0].share == 0.4


def test_steps_bound_by_the_host_lend_their_errors_only_to_each_other(monkeypatch: pytest.MonkeyPatch):
    bound = StepKind("H200", "single", "eager", is_host_bound=True)
    known = residuals(bound, 0.04, 0.48) + residuals(StepKind("H200", "single", "eager"), 0.01, 0.01, 0.01, 0.01)
    assert bars(monkeypatch, known, bound)[0].share == 0.48 * OTHER_DEVICE_FACTOR
    assert bars(monkeypatch, known, StepKind("H100", "fsdp", "eager", True))[0].share == 0.48 * OTHER_DEVICE_FACTOR
    assert bars(monkeypatch, known, StepKind("H200", "single", "eager"))[0].share == 0.01


def test_memory_does_not_depend_on_the_host(monkeypatch: pytest.MonkeyPatch):
    free = StepKind("H200", "single", "eager")
    known = [StepResidual(free, 0.01, 0.02)] * 4
    assert bars(monkeypatch, known, StepKind("H200", "single", "eager", True))[1].share == 0.02


def test_a_simulation_without_an_execution_takes_the_errors_of_such_simulations(monkeypatch: pytest.MonkeyPatch):
    plain = StepKind("H100", "fsdp", PLAIN)
    executed = residuals(KIND, 0.01, 0.02, 0.03, 0.04)
    step, _ = bars(monkeypatch, executed + residuals(plain, 0.1, 0.2, 0.3, 0.4), plain)
    assert (step.share, step.basis) == (0.4, "4 fsdp steps, on H100, simulated without an execution")
    assert bars(monkeypatch, executed + residuals(plain, *[0.9] * 9))[0].share == 0.04  # and lends them to no other
    elsewhere = StepKind("A100", "tp", PLAIN)
    assert bars(monkeypatch, executed + residuals(elsewhere, *[0.2] * 4), plain)[0].share == 0.2 * OTHER_DEVICE_FACTOR


def test_without_such_simulations_it_borrows_a_wider_bar_and_says_so(monkeypatch: pytest.MonkeyPatch):
    known = residuals(KIND, *[0.04] * 4) + residuals(StepKind("H100", "fsdp", "eager"), *[0.1] * 4)
    step, peak = bars(monkeypatch, known, StepKind("H100", "fsdp", PLAIN))
    assert step.share == 0.1 * BORROWED_FACTOR
    assert "simulated without an execution" in step.basis
    assert peak.share is None
