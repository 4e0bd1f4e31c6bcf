"""The backends against their contract, and CUDA's control flow in detail, by its calls."""

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import spangraph
from spangraph import CaptureError, CudaBackend, InlineBackend, InputError, Span, SpannedOutput, SpanStager, Tail
from spangraph.backends import Graph, debug_enabled, resolve_backend
from spangraph.testing import SimulatedDevice

from .backend_contract import BackendContract, Counting, Failing, Rig, check, inputs
from .fake_cuda import FakeCuda, Slow

# ---- the contract --------------------------------------------------------------------------------------------------


class InlineRig(Rig):
    is_async = False

    def __init__(self) -> None:
        super().__init__(InlineBackend())


class SimulatedRig(Rig):
    def __init__(self, device: SimulatedDevice | None = None) -> None:
        self.device = device or SimulatedDevice()
        super().__init__(self.device)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        self.device.hold()
        try:
            yield
        finally:
            self.device.resume()

    def new_stream(self) -> Any:
        return self.device.new_stream()

    def use_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return self.device.use_stream(stream)


class FakeCudaRig(SimulatedRig):
    """CudaBackend on recording fakes. They have one kind of memory, so all that a caller gives counts as the host's."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__(cuda.simulated)
        self.cuda = cuda
        self.backend = CudaBackend("cpu", cuda=cuda)
        self.backend.is_host = lambda value: True  # type: ignore[method-assign]


class CudaRig(Rig):
    def __init__(self) -> None:
        super().__init__(CudaBackend())

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        torch.cuda._sleep(500_000_000)  # cycles: some tenths of a second
        yield

    def new_stream(self) -> Any:
        return torch.cuda.Stream()

    def use_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(stream)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.patch_tensors(monkeypatch)
    return fake


@pytest.fixture
def fake(cuda: FakeCuda) -> FakeCudaRig:
    return FakeCudaRig(cuda)


class TestInline(BackendContract):
    @pytest.fixture
    def rig(self) -> Rig:
        return InlineRig()


class TestSimulated(BackendContract):
    @pytest.fixture
    def rig(self) -> Rig:
        return SimulatedRig()


class TestCudaCalls(BackendContract):
    @pytest.fixture
    def rig(self, fake: FakeCudaRig) -> Rig:
        return fake


@pytest.mark.gpu
class TestCuda(BackendContract):
    @pytest.fixture
    def rig(self) -> Rig:
        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")
        return CudaRig()


# ---- capture, by its calls -----------------------------------------------------------------------------------------


def stream_names(cuda: FakeCuda) -> tuple[Any, list[str]]:
    """A function that notes the stream it is called on, and the list it notes them in."""
    seen: list[str] = []

    def noting() -> Tensor:
        seen.append(cuda.current_stream().name)
        return torch.ones(2) * 2

    return noting, seen


def test_warm_up_and_capture_share_a_stream_of_their_own(fake: FakeCudaRig) -> None:
    """K24: workspace allocated in the middle of capture. The stream comes after the caller's work, and before what the
    caller does next; a thread-local capture leaves other threads' calls alone."""
    noting, seen = stream_names(fake.cuda)
    fake.backend.capture(noting)
    assert seen == ["stream 1", "stream 1"]
    assert fake.cuda.calls("wait_stream", "synchronize_stream", "capture", "captured") == [
        ("wait_stream", "stream 1", "default"),
        ("synchronize_stream", "stream 1"),
        ("capture", "stream 1", "thread_local"),
        ("captured",),
        ("wait_stream", "default", "stream 1"),
    ]


@pytest.mark.parametrize("index", [0, 1])
def test_a_capture_happens_on_the_backend_s_device(cuda: FakeCuda, index: int) -> None:
    """K23: capture on the wrong device records an empty graph: model on device 1, current device 0."""
    backend, seen = CudaBackend(f"cuda:{index}", cuda=cuda), []
    with cuda.device(torch.device("cuda", 1 - index)):
        backend.capture(lambda: seen.append(cuda.current_device()))
        assert cuda.current_device() == 1 - index
    assert seen == [index, index]


def test_a_launch_happens_on_the_backend_s_device(fake: FakeCudaRig) -> None:
    """K25: device guard missing around a kernel launch: staging for device 1 while 0 is current."""
    stager, _, graph, tail = hand_captured(fake)
    device = fake.backend.device
    assert not fake.cuda.is_current(device)
    with tail.step() as step:
        assert fake.cuda.is_current(device)
        graph.replay()
    assert not fake.cuda.is_current(device)
    step.wait()
    stager.close()


def hand_captured(rig: Rig) -> tuple[SpanStager, Tensor, Graph, Tail]:
    stager = SpanStager({"audio": Span()}, max_rows=2, device=rig.backend)
    x = torch.zeros(2, 3)
    spans = torch.tensor([[0, 3], [1, 2]])
    graph, tail = rig.backend.capture(lambda: stager.stage(SpannedOutput({"audio": x * 2}, {"audio": spans})))
    return stager, x, graph, tail


@pytest.mark.parametrize("at", [1, 2], ids=["in warm-up", "in capture"])
@pytest.mark.parametrize("error", [ValueError("no"), RuntimeError("no"), CaptureError("no"), KeyboardInterrupt()])
def test_a_failed_capture_is_reset(fake: FakeCudaRig, error: BaseException, at: int) -> None:
    """K27: the half-captured graph would keep its pool. What the forward raised is passed on as it is."""
    with pytest.raises(type(error)) as raised:
        fake.backend.capture(Failing(at, error, torch.ones(2)))
    assert raised.value is error
    assert fake.cuda.log[-2:] == [("reset",), ("wait_stream", "default", "stream 1")]


def test_what_the_device_refuses_is_a_capture_error(fake: FakeCudaRig) -> None:
    error = RuntimeError("CUDA error: operation not permitted when stream is capturing")
    with pytest.raises(
        CaptureError, match="the step cannot be captured: CUDA error: operation not permitted"
    ) as raised:
        fake.backend.capture(Failing(2, error, torch.ones(2)))
    assert raised.value.__cause__ is error


def test_generators_are_registered_with_the_graph(fake: FakeCudaRig) -> None:
    generators = [torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)]
    fake.backend.capture(lambda: None, generators=generators)
    assert fake.cuda.log[:3] == [("new_graph",), ("register_generator", "3"), ("register_generator", "4")]


def test_cpu_generators_are_refused_before_anything_runs(cuda: FakeCuda) -> None:
    """Their state lives on the host: every replay would draw the same numbers."""
    backend, called = CudaBackend("cuda:0", cuda=cuda), []
    with pytest.raises(InputError, match=r"generator on cpu: a captured step cannot draw.*torch\.Generator\('cuda'\)"):
        backend.capture(lambda: called.append(1), generators=[torch.Generator()])
    assert called == []
    assert cuda.log == []


def test_no_garbage_is_collected_during_a_capture(fake: FakeCudaRig) -> None:
    """A finaliser that touches the device breaks the capture; before and after it may."""
    seen: list[bool] = []
    fake.backend.capture(lambda: seen.append(gc.isenabled()))
    assert seen == [True, False]
    assert gc.isenabled()
    with pytest.raises(ValueError, match="no"):
        fake.backend.capture(Failing(2, ValueError("no"), torch.ones(2)))
    assert gc.isenabled()


def test_memory_is_pinned_before_the_first_capture(fake: FakeCudaRig) -> None:
    """K20, K21: capture as the very first call of the process: all pinned memory is there by then, and is pinned."""
    model = Counting()
    run = spangraph.compile(model, backend=fake.backend)
    x, n = inputs()
    check(run(x, n).outputs["audio"], model, x, n)
    calls = [call[0] for call in fake.cuda.calls("pin_memory", "capture")]
    assert calls[:3] == ["pin_memory", "pin_memory", "capture"]  # control records and slots
    assert calls[3:] == ["pin_memory", "pin_memory"]  # at the launch: a buffer per input


def test_a_capture_that_pins_memory_is_refused(fake: FakeCudaRig) -> None:
    """K21 as the fake sees it: building a stager inside a capture does not work."""
    with pytest.raises(CaptureError, match="operation not permitted when stream is capturing"):
        fake.backend.capture(lambda: SpanStager({"audio": Span()}, max_rows=1, device=fake.backend) and None)
    hand_captured(fake)


# ---- launches, by their calls --------------------------------------------------------------------------------------


def test_inputs_go_through_pinned_buffers_of_the_launch(fake: FakeCudaRig) -> None:
    """K41: a copy from pageable memory reads it late; a buffer that is still being read must not be reused, and one
    that is not must be."""
    run = spangraph.compile(Counting(), backend=fake.backend)
    run(*inputs())
    first = len(fake.cuda.calls("pin_memory"))
    for _ in range(5):
        run(*inputs())
    assert len(fake.cuda.calls("pin_memory")) == first
    for _ in range(2):
        with fake.busy():
            run.launch(*inputs()).release()
            run.launch(*inputs()).release()
        fake.backend.synchronize()
    assert len(fake.cuda.calls("pin_memory")) == first + 2


def test_input_copies_are_ordered_with_the_caller_s_work(fake: FakeCudaRig) -> None:
    """Device inputs: the allocator must know of the stream that reads them, before the copy; then copies, replay and
    the step's event follow on the current stream."""
    run = spangraph.compile(Counting(), backend=fake.backend)
    fake.backend.is_host = lambda value: False  # type: ignore[method-assign]
    x, n = inputs()
    run(x, n)
    del fake.cuda.log[:]
    stream = fake.backend.stream()
    run.launch(x, n).wait()
    assert fake.cuda.log == [
        ("record_stream", stream.name),
        ("copy", stream.name),
        ("record_stream", stream.name),
        ("copy", stream.name),
        ("replay", stream.name),
        ("record", fake.cuda.calls("record")[0][1], stream.name),
    ]


def test_a_launch_on_another_stream_waits_for_the_last_step_first(fake: FakeCudaRig) -> None:
    """K40 and the launch order: the last step's event and the releasing stream's, before the first copy."""
    run = spangraph.compile(Counting(), backend=fake.backend)
    run(*inputs())
    step = run.launch(*inputs())
    step.wait()
    last = fake.cuda.calls("record")[-1][1]
    consumer, other = (fake.cuda.Stream(torch.device("cpu")) for _ in range(2))
    with fake.cuda.stream(consumer):
        step.release()
    released = fake.cuda.calls("record")[-1]
    assert released[2] == consumer.name
    del fake.cuda.log[:]
    with fake.cuda.stream(other):
        run.launch(*inputs()).wait()
    calls = fake.cuda.calls("wait_event", "copy", "replay", "record")
    assert calls[:2] == [("wait_event", other.name, last), ("wait_event", other.name, released[1])]
    assert [call[0] for call in calls[2:]] == ["copy", "copy", "replay", "record"]
    del fake.cuda.log[:]
    with fake.cuda.stream(other):
        run.launch(*inputs(), wait=True, timeout=60)
    assert fake.cuda.calls("wait_event") == []  # the mirrored case: the same stream is in order by itself


def test_each_step_has_an_event_of_its_own(fake: FakeCudaRig) -> None:
    """K13."""
    run = spangraph.compile(Counting(), backend=fake.backend, depth=3)
    run(*inputs())
    del fake.cuda.log[:]
    steps = [run.launch(*inputs()) for _ in range(3)]
    events = [call[1] for call in fake.cuda.calls("record")]
    assert len(set(events)) == 3
    for step in steps:
        step.wait()


# ---- captures and other threads ------------------------------------------------------------------------------------


# Long enough for a waiter that polls every millisecond at most, or a launch of microseconds, to come through.
A_WHILE = 0.05


@pytest.mark.parametrize("timeout", [60, None], ids=["polled", "blocked"])
def test_no_event_is_queried_during_a_capture(fake: FakeCudaRig, timeout: float | None) -> None:
    """An event query breaks a capture, even by another thread and of another compiled object."""
    model, (x, n) = Counting(), inputs()
    run = spangraph.compile(model, backend=fake.backend)
    step = run.launch(x, n)
    other, slow = CudaBackend("cpu", cuda=fake.cuda), Slow(fake.cuda)
    with ThreadPoolExecutor(2) as pool:
        capture = pool.submit(other.capture, slow)
        assert slow.entered.wait(60)
        read = pool.submit(step.wait, timeout)
        time.sleep(A_WHILE)
        assert not read.done()
        slow.may_end.set()
        capture.result()
        check(read.result().rows(), model, x, n)


def test_launches_are_held_off_during_a_capture_and_captures_during_a_launch(fake: FakeCudaRig) -> None:
    stager, _, graph, tail = hand_captured(fake)
    other, slow = CudaBackend("cpu", cuda=fake.cuda), Slow(fake.cuda)

    def launch() -> None:
        with tail.step() as step:
            graph.replay()
        step.wait().release()

    with ThreadPoolExecutor(2) as pool:
        capture = pool.submit(other.capture, slow)
        assert slow.entered.wait(60)
        launched = pool.submit(launch)
        time.sleep(A_WHILE)
        assert not launched.done()
        assert fake.cuda.calls("replay") == []
        slow.may_end.set()
        capture.result()
        launched.result()

        slow.entered.clear()
        with tail.step() as step:
            capture = pool.submit(other.capture, slow)
            assert not slow.entered.wait(A_WHILE)
            graph.replay()
        capture.result()
        assert slow.entered.is_set()
    step.wait().release()
    stager.close()


def test_a_graph_may_have_tails_of_two_stagers(fake: FakeCudaRig) -> None:
    """Launches overlap: one that excluded the others hung with a thread that launched on the inner stager alone."""
    first, _, graph, tail = hand_captured(fake)
    second, _, other_graph, other_tail = hand_captured(fake)
    inside, go_on = threading.Event(), threading.Event()

    def launch_alone() -> None:
        with other_tail.step() as step:
            inside.set()
            assert go_on.wait(60)
            other_graph.replay()
        step.wait().release()

    with ThreadPoolExecutor(1) as pool:
        with tail.step() as step:
            alone = pool.submit(launch_alone)
            assert inside.wait(60)
            go_on.set()
            with other_tail.step(wait=True, timeout=60) as other_step:
                other_graph.replay()
            graph.replay()
        alone.result()
    step.wait()
    other_step.wait()
    first.close()
    second.close()


# ---- ends ----------------------------------------------------------------------------------------------------------


def test_a_ring_is_drained_before_its_memory_is_freed(fake: FakeCudaRig) -> None:
    """Kernels in flight write to pinned memory, and the allocator does not know."""
    cuda = fake.cuda
    stager, x, graph, tail = hand_captured(fake)
    with tail.step() as step:
        graph.replay()
    step.wait().release()
    weakref.finalize(stager._buffer.memory.host, cuda.note, "freed slots")
    weakref.finalize(stager._core.ring.control.host, cuda.note, "freed control")
    del cuda.log[:]
    del stager, x, graph, tail, step
    calls = [call[0] for call in cuda.calls("synchronize", "freed slots", "freed control")]
    assert calls[::2] == ["synchronize", "synchronize"]
    assert sorted(calls[1::2]) == ["freed control", "freed slots"]


def test_memory_that_is_collected_during_a_capture_is_freed_after_it(fake: FakeCudaRig) -> None:
    """A drain would break the capture. One in another thread would wait for it, which hung where the capture, in turn,
    waited for that thread."""
    cuda = fake.cuda
    kept = [hand_captured(fake) for _ in range(2)]
    for i in range(2):
        weakref.finalize(kept[i][0]._buffer.memory.host, cuda.note, "freed")
    del cuda.log[:]

    def forward() -> Tensor:
        if cuda.capturing:
            kept.pop()
            other = threading.Thread(target=kept.pop)
            other.start()
            other.join(60)
            assert not other.is_alive()
        return torch.ones(2) * 2

    fake.backend.capture(forward)
    calls = [call[0] for call in cuda.calls("captured", "synchronize", "freed")]
    assert calls[:2] == ["captured", "synchronize"]
    assert calls.count("freed") == 2


def test_the_default_device_is_the_current_one(cuda: FakeCuda) -> None:
    with cuda.device(torch.device("cuda", 1)):
        assert CudaBackend(cuda=cuda).device == torch.device("cuda", 1)
    backend = CudaBackend("cuda:0", cuda=cuda)
    assert backend.device == torch.device("cuda", 0)
    assert backend.is_host(torch.zeros(1))  # host memory, unlike a tensor on the device itself
    assert not CudaBackend("cpu", cuda=cuda).is_host(torch.zeros(1))


def test_devices_without_a_backend_are_refused() -> None:
    assert isinstance(resolve_backend(None), InlineBackend)
    assert isinstance(resolve_backend("cpu"), InlineBackend)
    device = SimulatedDevice()
    assert resolve_backend(device) is device
    with pytest.raises(InputError, match="no backend for device mps: expected cpu, cuda or a spangraph Backend"):
        resolve_backend("mps")


# ---- inline and SPANGRAPH_DEBUG ------------------------------------------------------------------------------------


def test_inline_outputs_are_fresh_where_debugging_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a view outlives its release, at no cost; the suite itself runs with SPANGRAPH_DEBUG=1, where it must not."""
    assert debug_enabled()
    monkeypatch.setenv("SPANGRAPH_DEBUG", "0")
    model = Counting()
    run = spangraph.compile(model)
    x, n = torch.randn(3, 5), torch.tensor([5, 4, 3])
    step = run.launch(x, n)
    view = step.rows().at(0)
    step.release()
    run(*inputs())
    assert isinstance(view, Tensor)
    assert torch.equal(view, x[0] * model.gain.detach())


# Off in two ways, on in one; whatever else somebody writes is an error and not a guess.
@pytest.mark.parametrize(("value", "expected"), [("", False), ("0", False), ("1", True)])
def test_the_environment_says_whether_to_debug(monkeypatch: pytest.MonkeyPatch, value: str, expected: bool) -> None:
    monkeypatch.setenv("SPANGRAPH_DEBUG", value)
    assert debug_enabled() is expected
    monkeypatch.setenv("SPANGRAPH_DEBUG", "yes")
    with pytest.raises(ValueError, match="SPANGRAPH_DEBUG='yes': expected 0 or 1"):
        InlineBackend()
