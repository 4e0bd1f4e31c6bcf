"""What every backend must do: one suite for the inline backend, the simulated device, CUDA's control flow and CUDA.

`test_backend_contract.py` runs it; a backend of one's own is checked by a subclass with a `rig` fixture.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spangraph
from spangraph import Backend, Compiled, Copy, Rows, Span, SpannedOutput, SpanStager, StepTimeoutError, from_lengths
from spangraph.kernels.compact import pcm16

from .toys import Toy, cut, values


class Rig:
    """A backend, and how to keep it busy.

    Attributes:
        is_async: whether work may still run after a launch has returned.
        poisons: whether outputs are overwritten once they may die.
    """

    is_async = True
    poisons = True

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Inside the block the device makes no progress with what is enqueued (where it is asynchronous)."""
        yield

    def new_stream(self) -> Any:
        """A further stream."""
        raise NotImplementedError

    def use_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Make it the current one."""
        raise NotImplementedError


class Counting(nn.Module):
    """Spans, a row value, and state that warm-up must not advance: `calls`, and a `cache` that keeps the last input."""

    calls: Tensor
    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(1))
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(3, 5))

    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return ("audio",)

    def forward(self, x: Tensor, n: Tensor) -> SpannedOutput:
        self.calls.add_(1)
        last = self.cache * 1
        self.cache.copy_(x)
        return SpannedOutput(
            {"audio": x * self.gain, "last": last}, {"audio": from_lengths(n)}, {"calls": self.calls.expand(len(x)) * 1}
        )


def inputs() -> tuple[Tensor, Tensor]:
    """A batch of three rows of up to five samples, in host memory."""
    return torch.randn(3, 5), torch.randint(0, 6, (3,))


def check(rows: Rows, model: Counting, x: Tensor, n: Tensor) -> None:
    """The rows of `Counting` for these inputs."""
    expected = x.to(model.gain.device) * model.gain.detach()
    assert list(rows) == [i for i, length in enumerate(n.tolist()) if length]
    for i, row in rows.items():
        assert isinstance(row, Tensor)
        assert torch.equal(row, expected[i, : int(n[i])])


class Failing:
    """A function that raises at one of its calls: the warm-up, or the capture where there is a warm-up before it."""

    def __init__(self, at: int, error: BaseException, x: Tensor) -> None:
        self.at, self.error, self.x = at, error, x
        self.num_calls = 0

    def __call__(self) -> Tensor:
        self.num_calls += 1
        y = self.x * 2
        if self.num_calls == self.at:
            raise self.error
        return y


class BackendContract:
    """Subclass it with a fixture `rig`."""

    @pytest.fixture
    def compiled(self, rig: Rig) -> Iterator[tuple[Compiled, Counting]]:
        model = Counting().to(rig.backend.device)
        with spangraph.compile(model, backend=rig.backend, depth=2) as compiled:
            yield compiled, model

    # ---- values --------------------------------------------------------------------------------------------------

    def test_steps_are_right(self, compiled: tuple[Compiled, Counting]) -> None:
        run, model = compiled
        for call in range(1, 10):
            x, n = inputs()
            with run.launch(x, n) as step:
                check(step.rows("audio"), model, x, n)
                assert step.row_values("calls").tolist() == [call] * 3

    @pytest.mark.parametrize("staging", ["kernel", "copy"])
    def test_as_many_steps_in_flight_as_depth_says(self, rig: Rig, staging: str) -> None:
        """The plain copy had one slot on the inline backend, whatever the depth."""
        model = Counting().to(rig.backend.device)
        with spangraph.compile(model, backend=rig.backend, depth=3, staging=staging) as run:
            run(*inputs())
            for first in range(2, 10, 3):
                batches = [inputs() for _ in range(3)]
                with rig.busy():
                    steps = [run.launch(x, n) for x, n in batches]
                for call, (step, (x, n)) in reversed(list(enumerate(zip(steps, batches, strict=True), first))):
                    with step:
                        check(step.rows(), model, x, n)
                        assert step.row_values("calls").tolist() == [call] * 3

    def test_padding_rows_never_surface(self, compiled: tuple[Compiled, Counting]) -> None:
        """K7: one real row in a bucket of three after a batch of three."""
        run, model = compiled
        x, _ = inputs()
        run(x, torch.tensor([5, 5, 5]))
        with run.launch(x, torch.tensor([2, 4, 9]), rows=["a"], num_rows=1) as step:
            assert list(step.rows()) == ["a"]
            assert torch.equal(step.rows().own()["a"].cpu(), x[0, :2] * model.gain.detach().cpu())  # type: ignore[union-attr]

    def test_plain_calls_are_safe(self, compiled: tuple[Compiled, Counting]) -> None:
        """K39: plain calls look safe on CPU and are wrong on CUDA."""
        run, model = compiled
        batches = [inputs() for _ in range(6)]
        results = [run(x, n) for x, n in batches]
        for (x, n), result in zip(batches, results, strict=True):
            check(result.outputs["audio"], model, x, n)
        for (x, _), result in zip(batches, results[1:], strict=False):
            assert torch.equal(result.outputs["last"].cpu(), x)

    def test_warm_up_leaves_no_trace(self, compiled: tuple[Compiled, Counting]) -> None:
        """K42: model state advanced by warm-up: as if it had not been."""
        run, model = compiled
        x, n = inputs()
        state = torch.get_rng_state()
        result = run(x, n)
        assert not result.outputs["last"].any()
        assert torch.equal(torch.get_rng_state(), state)
        assert model.calls.tolist() == [1]
        assert torch.equal(model.cache.cpu(), x)

    @pytest.mark.parametrize("first", [True, False])
    def test_inference_mode_may_change_between_launches(self, rig: Rig, first: bool) -> None:
        """K29: inference-mode tensors updated outside it: compiled under it, launched outside, and the reverse."""
        with torch.inference_mode(first):
            model = Counting().to(rig.backend.device)
            run = spangraph.compile(model, backend=rig.backend)
            x, n = inputs()
            run(x, n)
        for mode in (not first, first, not first):
            with torch.inference_mode(mode):
                x, n = inputs()
                with run.launch(x, n) as step:
                    check(step.rows(), model, x, n)
        assert model.calls.tolist() == [4]
        run.close()

    # ---- time ----------------------------------------------------------------------------------------------------

    def test_a_launch_does_not_wait_for_the_device(self, rig: Rig, compiled: tuple[Compiled, Counting]) -> None:
        run, model = compiled
        run(*inputs())
        run(*inputs())
        x, n = inputs()
        with rig.busy():
            step = run.launch(x, n)
            assert step.is_done is not rig.is_async
            if rig.is_async:
                with pytest.raises(StepTimeoutError, match="was not done within"):
                    step.wait(timeout=0.01)
        check(step.rows(), model, x, n)

    def test_inputs_are_the_caller_s_again_after_the_launch(
        self, rig: Rig, compiled: tuple[Compiled, Counting]
    ) -> None:
        """K41: input buffer overwritten while the previous replay still reads it: launch twice, device busy."""
        run, model = compiled
        run(*inputs())
        run(*inputs())
        x, n = inputs()
        kept, steps = [], []
        with rig.busy():
            for _ in range(2):
                kept.append((x.clone(), n.clone()))
                steps.append(run.launch(x, n))
                x.normal_()
                n.copy_(torch.randint(0, 6, (3,)))
        for step, (old_x, old_n) in zip(steps, kept, strict=True):
            check(step.rows(), model, old_x, old_n)

    def test_a_launch_can_wait_for_a_reader_in_another_thread(self, compiled: tuple[Compiled, Counting]) -> None:
        """Whatever a launch holds while it waits for room, the reader's wait must not need it."""
        run, model = compiled
        batches = [inputs() for _ in range(12)]

        def read(step: spangraph.Step, x: Tensor, n: Tensor) -> None:
            with step.wait(timeout=60):
                check(step.rows(), model, x, n)

        with ThreadPoolExecutor(1) as reader:
            reads = [reader.submit(read, run.launch(x, n, wait=True, timeout=60), x, n) for x, n in batches]
            for done in reads:
                done.result()

    @pytest.mark.parametrize("wait", ["block", "spin", "header"])
    def test_kinds_of_wait(self, rig: Rig, wait: str) -> None:
        if wait == "header" and not rig.backend.ordered_header:
            pytest.skip("this backend's header is not ordered")
        model = Counting().to(rig.backend.device)
        with spangraph.compile(model, backend=rig.backend, wait=wait) as run:
            for _ in range(4):
                x, n = inputs()
                with run.launch(x, n) as step:
                    check(step.wait(timeout=60).rows(), model, x, n)

    def test_closing_drains(self, rig: Rig, compiled: tuple[Compiled, Counting]) -> None:
        run, model = compiled
        run(*inputs())
        run(*inputs())
        x, n = inputs()
        with rig.busy():
            step = run.launch(x, n)
            closer = threading.Thread(target=run.close)
            closer.start()
        closer.join()
        assert step.is_done
        check(step.rows(), model, x, n)

    # ---- copies --------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("copy", [Copy("device"), Copy("host"), Copy("host", dtype=torch.int16)], ids=str)
    def test_copied_rows(self, rig: Rig, copy: Copy) -> None:
        """One graph for all steps in flight, in a pool with other signatures' graphs."""
        model = Toy().to(rig.backend.device)
        with spangraph.compile(model, backend=rig.backend, depth=3, copies={"audio": copy}) as run:
            for width in (5, 9, 5):
                batches = [(torch.randn(3, width), torch.randint(0, 6, (3,))) for _ in range(3)]
                run(*batches[0])
                with rig.busy():
                    steps = [run.launch(x, n) for x, n in batches]
                for step, (x, n) in reversed(list(zip(steps, batches, strict=True))):
                    padded = pcm16(x * 2 + 1) if copy.dtype else x * 2 + 1
                    with step:
                        owned = step.rows().own()
                        for rows in (step.rows(), owned):
                            assert {row.device.type for row in rows.values()} <= {
                                "cpu" if copy.to == "host" else rig.backend.device.type
                            }
                            assert values(rows) == cut(padded, n.tolist())
                        step.release()
                        assert values(owned) == cut(padded, n.tolist())
            pools = [use for use in run.memory().uses if use.part == "(graph pool)"]
            assert len(pools) == rig.backend.static
            assert run.memory().leased == 0

    @pytest.mark.parametrize("to", ["device", "host"])
    def test_copies_that_do_not_fit(self, rig: Rig, to: str) -> None:
        copies = {"audio": Copy(to, capacity=48)}
        with spangraph.compile(Toy().to(rig.backend.device), backend=rig.backend, depth=2, copies=copies) as run:
            for lengths in ([4, 8], [5, 8], [5, 8], [0, 8], [8, 8]):
                x = torch.randn(2, 8)
                with run.launch(x, torch.tensor(lengths)) as step:
                    owned = step.rows().own()
                    assert values(step.rows()) == cut(x * 2 + 1, lengths)
                assert values(owned) == cut(x * 2 + 1, lengths)
            assert run.counts.overflows == 3

    @pytest.mark.parametrize("to", ["device", "host"])
    def test_released_copies_die(self, rig: Rig, to: str) -> None:
        if not rig.poisons:
            pytest.skip("this backend does not poison")
        with spangraph.compile(Toy().to(rig.backend.device), backend=rig.backend, copies={"audio": to}) as run:
            step = run.launch(torch.randn(3, 5), torch.tensor([5, 5, 5]))
            row = step.rows()[0]
            step.release()
            rig.backend.synchronize()
            assert row.isnan().all()

    # ---- memory --------------------------------------------------------------------------------------------------

    def test_released_views_die(self, rig: Rig, compiled: tuple[Compiled, Counting]) -> None:
        """A program that keeps views past their release is wrong on CUDA, so it must be wrong everywhere."""
        if not rig.poisons:
            pytest.skip("this backend does not poison")
        run, _ = compiled
        x, n = torch.randn(3, 5), torch.tensor([5, 5, 5])
        step = run.launch(x, n)
        view = step.rows().at(0)
        step.release()
        rig.backend.synchronize()
        assert isinstance(view, Tensor)
        assert view.isnan().all()

    def test_memory_for_the_ring(self, rig: Rig) -> None:
        for writer in ("host", "device"):
            with torch.inference_mode():
                memory = rig.backend.pinned(3, 4, writer=writer)
            for tensor in (memory.host, memory.device):
                assert tensor.shape == (3, 4)
                assert tensor.dtype is torch.int64
                assert tensor.device.type == "cpu"
                assert not tensor.any()
                assert not tensor.is_inference()
        like = torch.randn(4, 3, device=rig.backend.device).t()
        buffer = rig.backend.host_buffer(like)
        assert (buffer.shape, buffer.dtype, buffer.device.type) == (like.shape, like.dtype, "cpu")

    # ---- capture and replay by hand --------------------------------------------------------------------------------

    def test_a_stager_with_captures_of_one_s_own(self, rig: Rig) -> None:
        """K12 on the way: warm-up and a replay that nobody reserved are dry runs that write nothing."""
        backend = rig.backend
        model = Counting().to(backend.device)
        stager = SpanStager({"audio": Span()}, max_rows=3, row_values=["calls"], device=backend)
        x = torch.zeros(3, 5, device=backend.device)
        n = torch.zeros(3, dtype=torch.int64, device=backend.device)
        graph, tail = backend.capture(lambda: stager.stage(model(x, n)))
        graph.replay()
        backend.synchronize()
        assert not stager._buffer.memory.host.any()
        for _ in range(5):
            new_x, new_n = inputs()
            backend.copy_in(x, new_x.to(backend.device))
            backend.copy_in(n, new_n.to(backend.device))
            with tail.step() as step:
                graph.replay()
            with step:
                check(step.rows(), model, new_x, new_n)

    # What may come out of a captured forward: the device's refusal, ours, the user's own, and an interrupt.
    @pytest.mark.parametrize(
        "error",
        [RuntimeError("cudaErrorStreamCaptureUnsupported"), spangraph.CaptureError("no"), ValueError("no"),
         KeyboardInterrupt()],
        ids=lambda error: type(error).__name__,
    )  # fmt: skip
    @pytest.mark.parametrize("at", [1, 2], ids=["in warm-up", "in capture"])
    def test_a_failed_capture_leaves_the_backend_usable(self, rig: Rig, at: int, error: BaseException) -> None:
        """K27: exception during capture leaves pool and stream stuck: the next one captures."""
        backend = rig.backend
        x = torch.ones(3, device=backend.device)
        failing = Failing(at if backend.static else 1, error, x)
        with pytest.raises((type(error), spangraph.CaptureError)):
            backend.capture(failing)
        values: list[Tensor] = []
        graph, y = backend.capture(lambda: values.append(y := x * 3) or y)  # type: ignore[func-returns-value]
        graph.replay()
        backend.synchronize()
        assert (y if backend.static else values[-1]).tolist() == [3, 3, 3]

    # ---- streams and events --------------------------------------------------------------------------------------

    def test_an_event_is_done_when_the_work_before_it_is(self, rig: Rig) -> None:
        static = torch.zeros(3, device=rig.backend.device)
        value = torch.randn(3, device=rig.backend.device)
        with rig.busy():
            rig.backend.copy_in(static, value)
            event = rig.backend.record()
            assert event.query() is not rig.is_async
        event.synchronize()
        assert event.query()
        assert torch.equal(static, value)

    def test_released_rows_are_waited_for_on_the_device(self, rig: Rig, compiled: tuple[Compiled, Counting]) -> None:
        """K40: output re-used while a consumer's kernel on another stream still reads it: release, launch at once."""
        if not rig.is_async:
            pytest.skip("one thread, one stream")
        run, model = compiled
        x, n = torch.randn(3, 5), torch.tensor([5, 5, 5])
        run(x, n)
        run(x, n)
        consumer = rig.new_stream()
        for _ in range(4):
            x = torch.randn(3, 5)
            step, copy = run.launch(x, n), torch.zeros(5, device=rig.backend.device)
            step.wait()
            with rig.use_stream(consumer), step, rig.busy():
                row = step.rows()[1]
                assert isinstance(row, Tensor)
                rig.backend.copy_in(copy, row)
                step.release()
                with rig.use_stream(rig.new_stream()):
                    later = run.launch(torch.zeros(3, 5), n)
            later.wait(timeout=60).release()
            rig.backend.synchronize()
            assert torch.equal(copy.cpu(), x[1] * model.gain.detach().cpu())

    def test_launches_from_several_streams_keep_their_order(
        self, rig: Rig, compiled: tuple[Compiled, Counting]
    ) -> None:
        if not rig.is_async:
            pytest.skip("one thread, one stream")
        run, model = compiled
        for _ in range(6):
            launched = []
            for _ in range(2):
                with rig.use_stream(rig.new_stream()):
                    x, n = inputs()
                    launched.append((run.launch(x, n), x, n))
            for step, x, n in reversed(launched):
                with step:
                    check(step.rows(), model, x, n)
        assert model.calls.tolist() == [12]

    def test_the_device_is_current_inside_its_guard(self, rig: Rig) -> None:
        with rig.backend.guard():
            assert torch.zeros(1, device=rig.backend.device).device == rig.backend.device
