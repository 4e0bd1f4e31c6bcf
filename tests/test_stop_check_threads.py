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
    Span,
    SpannedOutput,
    SpanStager,
    StaleStepError,
    Step,
    StepStateError,
    StepTimeoutError,
    StopCheck,
    from_lengths,
)
from spangraph.ring import Ring
from spangraph.testing import SimulatedDevice

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
    return len(ring.stop_checks._waiters)


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
def test_a_check_may_read_other_steps(on: str) -> None:
    """A step in flight, whose check then runs inside this one."""
    steps: list[Step] = []
    order: list[Any] = []

    def check(rows: Mapping[Any, Mapping[str, Any]]) -> StopCheck:
        (row,) = rows
        before = sum(steps[i].row_values("token").item() for i in range(row))
        order.append((row, before))
        return StopCheck([row])

    run = compiled_counter(on, check, depth=3)
    steps += [run.launch(torch.full((1, 2), 5.0 + i), rows=[i]) for i in range(3)]
    assert steps[2].stops == {2}
    assert order == [(0, 0), (1, 5), (2, 11)]


def test_a_check_waits_for_a_slow_step_though_others_wait_for_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold nothing that the check needs, so that it is late, but stuck nowhere."""
    monkeypatch.setattr("spangraph.stops._POLL", 1e-3)
    device, steps, entered = SimulatedDevice(), [], threading.Event()

    def check(rows: Mapping[Any, Mapping[str, Any]]) -> StopCheck:
        if "first" in rows:
            entered.set()
            return StopCheck(["first"] if steps[1].row_values("token").tolist() == [0] else [])
        return StopCheck()

    run = spangraph.compile(Counter(), backend=device, trace="opaque", depth=2, stop_check=check)
    run(X[:1])
    steps.append(run.launch(X[:1], rows=["first"]))
    device.synchronize()
    device.hold()
    steps.append(run.launch(X[:1], rows=["second"]))
    readers = [started(lambda: steps[0].stops) for _ in range(2)]
    assert entered.wait(PATIENCE)
    until(lambda: waiters(run._ring) == 1)
    time.sleep(0.05)  # many polls
    assert not any(reader.done() for reader in readers)
    device.resume()
    assert [reader.result(PATIENCE) for reader in readers] == [{"first"}] * 2


@BACKENDS
def test_a_check_that_reads_its_own_step_is_told_so(on: str) -> None:
    steps: list[Step] = []
    reads = [lambda: steps[0].rows(), lambda: steps[0].stops]

    def check(rows: Mapping[Any, Mapping[str, Any]]) -> StopCheck:
        if reads:
            reads.pop()()
        return StopCheck(["a"])

    steps.append(compiled_counter(on, check).launch(X, rows=["a", "b"]))
    for _ in range(2):
        with pytest.raises(StepStateError, match="reads a step that waits for this very check"):
            steps[0].wait()
    assert steps[0].stops == {"a"}


def test_checks_that_wait_for_each_other_are_told_so() -> None:
    """Two threads, each in the check of the step that the other's check reads."""
    steps: list[Step] = []
    both = threading.Barrier(2, timeout=PATIENCE)
    met: set[int] = set()

    def check(rows: Mapping[Any, Mapping[str, Any]]) -> StopCheck:
        (row,) = rows
        if row not in met:
            met.add(row)
            both.wait()
            steps[1 - row].wait()
        return StopCheck()

    run = compiled_counter("simulated", check)
    steps += [run.launch(X[:1], rows=[i]) for i in range(2)]
    ends = [started(step.wait) for step in steps]
    errors = [end.exception(PATIENCE) for end in ends]
    assert sorted(type(error).__name__ for error in errors) == ["NoneType", "StepStateError"]
    for step in steps:
        step.wait()


class Lanes:
    """Three graphs of one stager, and steps 1 and 2 in flight; the check of step 1 reads step 2 once it is let."""

    def __init__(self) -> None:
        self.checked: list[Any] = []
        self.entered = threading.Event()
        device = SimulatedDevice()
        stager = SpanStager(
            {"audio": Span()}, max_rows=1, row_values=["token"], depth=3, device=device, stop_check=self.check
        )
        self.ring = stager._core.ring
        self.lanes = [self.captured(device, stager, token) for token in range(3)]
        self.steps = [self.launch(i) for i in range(2)]

    def captured(self, device: SimulatedDevice, stager: SpanStager, token: int) -> tuple[Any, spangraph.Tail]:
        graph, x = device.new_graph(), torch.full((1, 2), token)
        with device.graph(graph):
            out = SpannedOutput({"audio": x * 2}, {"audio": from_lengths(x[:, 0])}, {"token": x[:, 0] + 0})
            return graph, stager.stage(out)

    def launch(self, i: int, inside: Callable[[], object] = lambda: None) -> Step:
        graph, tail = self.lanes[i]
        with tail.step([i]) as step:
            inside()
            graph.replay()
        return step

    def check(self, rows: Mapping[Any, Mapping[str, Any]]) -> StopCheck:
        (row,) = rows
        if row == 0:
            if not self.entered.is_set():
                self.entered.set()
                until(lambda: waiters(self.ring) == 1)
            assert self.steps[1].row_values("token").tolist() == [1]
        self.checked.append(row)
        return StopCheck([row])


def test_a_check_does_not_wait_for_a_launch_that_waits_for_it() -> None:
    """Whoever launches holds the ring, and reads a step whose check reads another one, for which it needs the ring."""
    lanes = Lanes()
    reader = started(lanes.steps[0].wait)
    assert lanes.entered.wait(PATIENCE)
    launched = started(lambda: lanes.launch(2, lanes.steps[0].wait))
    with pytest.raises(StepStateError, match="while a launch that holds the ring waits for that check"):
        reader.result(PATIENCE)
    assert launched.result(PATIENCE).stops == {2}
    assert lanes.checked == [1, 0, 2]
    assert lanes.steps[0].stops == {0}


def test_a_check_that_needs_no_ring_goes_on_while_a_launch_waits_for_it() -> None:
    """The mirrored case: what it reads was read before."""
    lanes = Lanes()
    lanes.steps[1].wait()
    reader = started(lanes.steps[0].wait)
    assert lanes.entered.wait(PATIENCE)
    launched = started(lambda: lanes.launch(2, lanes.steps[0].wait))
    assert reader.result(PATIENCE) is lanes.steps[0]
    assert launched.result(PATIENCE).stops == {2}
    assert lanes.checked == [1, 0, 2]
