"""Memory of captured graphs on CUDA, by the calls that `CudaBackend` makes: pools, their streams, and poison."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import spangraph
from spangraph import CudaBackend

from .fake_cuda import FakeCuda, FakeNvtx
from .toys import Toy, batch


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda()
    cuda.patch_tensors(monkeypatch)
    return cuda


@pytest.fixture
def backend(cuda: FakeCuda) -> CudaBackend:
    backend = CudaBackend("cpu", cuda=cuda)
    backend.is_host = lambda value: True  # type: ignore[method-assign]
    return backend


def test_captures_in_one_pool_share_a_stream(cuda: FakeCuda, backend: CudaBackend) -> None:
    """The allocator gives a pool's memory again on the stream that freed it, and on no other."""
    pool = backend.new_pool()
    for _ in range(2):
        backend.capture(lambda: torch.ones(2), pool=pool)
    backend.capture(lambda: torch.ones(2))
    streams = [call[1] for call in cuda.calls("capture")]
    assert streams[0] == streams[1] != streams[2]


def test_a_failed_capture_leaves_its_pool_usable(cuda: FakeCuda, backend: CudaBackend) -> None:
    """K27: a stream whose capture failed stays invalid."""
    pool = backend.new_pool()
    failing = [True, False]

    def fn() -> Tensor:
        if cuda.capturing and failing.pop(0):
            raise ZeroDivisionError
        return torch.ones(2) * 3

    with pytest.raises(ZeroDivisionError):
        backend.capture(fn, pool=pool)
    graph, y = backend.capture(fn, pool=pool)
    graph.replay()
    backend.synchronize()
    assert y.tolist() == [3, 3]
    first, second = [call[1] for call in cuda.calls("capture")]
    assert first != second


def test_pinned_memory_comes_before_the_first_capture(cuda: FakeCuda, backend: CudaBackend) -> None:
    """K21: and nothing is pinned while a stream captures, which CUDA refuses."""
    run = spangraph.compile(Toy(), backend=backend, depth=2, copies={"audio": "host"})
    x, n = batch((3, 5))
    run(x, n)
    order = [call[0] for call in cuda.calls("pin_memory", "capture")]
    assert order.index("capture") >= 3
    assert set(order[: order.index("capture")]) == {"pin_memory"}


def test_what_dies_is_poisoned_behind_its_readers(cuda: FakeCuda, backend: CudaBackend) -> None:
    """On the stream that releases, after an event of each other stream that read; rings as well as outputs."""
    for lifetime in ("view", "device", "host"):
        run = spangraph.compile(Toy(), backend=backend, copies={"audio": lifetime})
        x, n = batch((3, 5))
        run(x, n)
        step = run.launch(x, n)
        reader = cuda.Stream(torch.device("cpu"))
        with cuda.stream(reader):
            row = step.rows()[1]
        assert row.equal((x * 2 + 1)[1])
        cuda.log.clear()
        step.release()
        names = [call[0] for call in cuda.log]
        assert names.index("wait_event") < names.index("copy")
        backend.synchronize()
        assert row.isnan().all()


def test_nothing_is_poisoned_without_debugging(
    cuda: FakeCuda, backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPANGRAPH_DEBUG", "0")
    backend = CudaBackend("cpu", cuda=cuda)
    run = spangraph.compile(Toy(), backend=backend, copies={"audio": "host"})
    x, n = batch((3, 5))
    run(x, n)
    step = run.launch(x, n)
    step.wait()
    cuda.log.clear()
    step.release()
    assert not cuda.calls("copy")


def test_bytes_of_pools(backend: CudaBackend) -> None:
    for lifetime, num_pools in (("view", 2), ("host", 1)):
        run = spangraph.compile(Toy(), backend=backend, depth=2, copies={"audio": lifetime})
        for width in (5, 9):
            run(*batch((3, 5), width=width))
        pools = [use.pool for use in run.memory().uses if use.part == "(graph pool)"]
        assert len(pools) == num_pools * (2 if lifetime == "view" else 1)
        assert (sum(pools) > 0) == (lifetime == "view")


def test_the_pool_of_a_tensor_is_that_of_its_segment() -> None:
    """By its address, as a capture by hand does not say where it allocates."""
    x = torch.ones(4)
    inside = {"address": x.data_ptr() - 64, "total_size": 128}
    before = {"address": x.data_ptr() - 512, "total_size": 512, "segment_pool_id": (0, 9)}

    def pool_of(*segments: dict[str, object]) -> object:
        return CudaBackend("cpu", cuda=SimpleNamespace(memory_snapshot=lambda: segments, nvtx=FakeNvtx())).pool_of(x)

    assert pool_of(before, {**inside, "segment_pool_id": (0, 3)}) == (0, 3)
    assert pool_of(before, {**inside, "segment_pool_id": (0, 0)}) is None  # ordinary memory
    assert pool_of(before) is None
