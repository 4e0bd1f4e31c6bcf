"""Stop checks of steps that several threads read, give up, or look at from inside other checks."""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spangraph
from spangraph import (
    SpannedOutput,
    StaleStepError,
    Step,
    StepStateError,
    StepTimeoutError,
    StopCheck,
    from_lengths,
)
from spangraph.ring import Ring

from .toys import compiled

BACKENDS = pytest.mark.parametrize("on", ["inline", "simulated"])

# Seconds until a thread that hangs fails the test.
PATIENCE = 30

Check = Callable[[Mapping[Any, Mapping[str, Any]]], StopCheck]


class Counter(nn.Module):
    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return ("audio",)

    def forward(self, x: Tensor) -> SpannedOutput:
        n = torch.full((x.shape[0],), x.shape[1], device=x.device)
        return SpannedOutput({"audio": x * 2}, {"audio": from_lengths(n)}, {"token": x[:, 0].long()})


def started(fn: Callable[[], Any]) -> Future[Any]:
    """`fn()` on a thread that no hang can keep the process alive for."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(fn())
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(1e-4)


def waiters(ring: Ring) -> int:
    """How many threads wait for a check that another one runs."""
    assert ring.stop_checks is not None
    return len(ring.stop_checks._changed._waiters)


class Gated:
    """A check that withholds and stops row "b", once the test opens it."""

    def __init__(self) -> None:
        self.calls = 0
        self.entered = threading.Event()
        self.gate = threading.Event()

    def __call__(self, rows: Mapping[Any, Mapping[str, Any]]) -> StopCheck:
        self.calls += 1
        self.entered.set()
        assert self.gate.wait(PATIENCE)
        return StopCheck(["b"], ["b"]) if "b" in rows else StopCheck()


def compiled_counter(on: str, check: Check, depth: int = 2) -> spangraph.Compiled:
    return compiled(Counter(), on, "opaque", depth=depth, stop_check=check)


X = torch.arange(6.0).view(2, 3)


@BACKENDS
def test_two_readers_get_one_check_and_launches_go_on_meanwhile(on: str) -> None:
    """Nobody is delivered anything before the check has run, and no lock of the ring is held meanwhile."""
    check = Gated()
    run = compiled_counter(on, check)
    step = run.launch(X, rows=["a", "b"])
    readers = [started(lambda: (list(step.rows()), step.stops)) for _ in range(3)]
    assert check.entered.wait(PATIENCE)
    until(lambda: waiters(run._ring) == 2)
    other = started(lambda: run.launch(X, rows=["c", "d"])).result(PATIENCE)
    assert not any(reader.done() for reader in readers)
    check.gate.set()
    assert [reader.result(PATIENCE) for reader in readers] == [(["a"], {"b"})] * 3
    assert check.calls == 1
    assert list(other.rows()) == ["c", "d"]
    assert check.calls == 2


@BACKENDS
def test_a_reader_that_waited_for_a_check_that_raised_runs_it_again(on: str) -> None:
    gated = Gated()

    def check(rows: Mapping[Any, Mapping[str, Any]]) -> StopCheck:
        found = gated(rows)
        if gated.calls == 1:
            raise ZeroDivisionError
        return found

    run = compiled_counter(on, check)
    step = run.launch(X, rows=["a", "b"])
    first = started(step.wait)
    assert gated.entered.wait(PATIENCE)
    second = started(lambda: list(step.rows()))
    until(lambda: waiters(run._ring) == 1)
    gated.gate.set()
    with pytest.raises(ZeroDivisionError):
        first.result(PATIENCE)
    assert second.result(PATIENCE) == ["a"]
    assert gated.calls == 2


@BACKENDS
@pytest.mark.parametrize("end", [Step.cancel, Step.release])
def test_a_step_may_be_given_up_while_its_check_runs(on: str, end: Callable[[Step], None]) -> None:
    check = Gated()
    run = compiled_counter(on, check, depth=1)
    step = run.launch(X, rows=["a", "b"])
    readers = [started(step.wait), started(step.result)]
    assert check.entered.wait(PATIENCE)
    until(lambda: waiters(run._ring) == 1)
    end(step)
    check.gate.set()
    for reader in readers:
        with pytest.raises(StaleStepError, match=r"was given up|was released"):
            reader.result(PATIENCE)
    assert check.calls == 1
    assert list(run(X, rows=["a", "b"])["audio"]) == ["a"]


def test_a_check_that_raised_is_not_run_again_for_a_step_that_was_given_up() -> None:
    gated = Gated()

    def check(rows: Mapping[Any, Mapping[str, Any]]) -> StopCheck:
        gated(rows)
        raise ZeroDivisionError

    run = compiled_counter("simulated", check)
    step = run.launch(X, rows=["a", "b"])
    first = started(step.wait)
    assert gated.entered.wait(PATIENCE)
    second = started(step.wait)
    until(lambda: waiters(run._ring) == 1)
    step.cancel()
    gated.gate.set()
    with pytest.raises(ZeroDivisionError):
        first.result(PATIENCE)
    with pytest.raises(StaleStepError, match="was given up"):
        second.result(PATIENCE)
    assert gated.calls == 1


@BACKENDS
def test_a_row_may_be_aborted_while_the_check_runs(on: str) -> None:
    """K30: `withhold` never waits, and neither undoes the other."""
    check = Gated()
    run = compiled_counter(on, check)
    step = run.launch(X, rows=["a", "b"])
    reader = started(lambda: list(step.rows()))
    assert check.entered.wait(PATIENCE)
    step.withhold("a")
    check.gate.set()
    assert reader.result(PATIENCE) == []


@pytest.mark.parametrize("timeout", [0.0, 0.02])
def test_a_timeout_covers_the_check_of_another_thread(timeout: float) -> None:
    check = Gated()
    run = compiled_counter("simulated", check)
    step = run.launch(X, rows=["a", "b"])
    reader = started(step.wait)
    assert check.entered.wait(PATIENCE)
    with pytest.raises(StepTimeoutError, match="its stop check, which another thread runs, was not done within"):
        step.wait(timeout)
    patient = started(lambda: step.wait(float("inf")))
    check.gate.set()
    assert patient.result(PATIENCE) is reader.result(PATIENCE) is step
    assert check.calls == 1


# ---- checks that read steps ----------------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("which", [0, 1])
def test_a_check_that_reads_a_step_is_told_so(on: str, which: int) -> None:
    """Its own, or another one, whose check might wait for this one's. It is run again, as one that raised is."""
    steps: list[Step] = []
    reads = [lambda: steps[which].rows(), lambda: steps[which].stops]

    def check(rows: Mapping[Any, Mapping[str, Any]]) -> StopCheck:
        if reads:
            reads.pop()()
        return StopCheck(["a"])

    run = compiled_counter(on, check)
    steps += [run.launch(X, rows=["a", "b"]) for _ in range(2)]
    for _ in range(2):
        with pytest.raises(StepStateError, match="a stop check reads step"):
            steps[0].wait()
    assert steps[0].stops == {"a"}
