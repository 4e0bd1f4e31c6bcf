"""Captures on the simulated device: they execute nothing, refuse host reads, and keep the memory of their time."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import spangraph
from spangraph import CaptureError, SpannedOutput, StaleGraphError, from_lengths
from spangraph.testing import SimulatedDevice
from spangraph.weights import Weights

from .rig import Batch, Engine, assert_rows, captured


def test_a_capture_executes_nothing() -> None:
    """Not in what it makes, not in memory from outside, be it through a view, and not in the generator."""
    device = SimulatedDevice()
    x, state, cache = torch.ones(3), torch.zeros(3), torch.zeros(2, 3)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    graph = device.new_graph()
    with device.graph(graph):
        y = x * 2
        state.add_(1).mul_(2)
        cache[1].copy_(y)
        noise = torch.rand(3)
    assert y.isnan().all()
    assert noise.isnan().all()
    assert state.tolist() == [0, 0, 0]
    assert not cache.any()
    assert torch.equal(torch.get_rng_state(), before)

    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    graph.replay()
    device.synchronize()
    assert y.tolist() == [2, 2, 2]
    assert state.tolist() == [2, 2, 2]
    assert cache.tolist() == [[0, 0, 0], [2, 2, 2]]
    assert torch.equal(noise, expected)


def test_a_capture_undoes_no_staging_of_other_graphs() -> None:
    """What a capture touches is put back; the cursor of a ring that other threads launch on must not be."""
    engine = Engine(depth=2)
    device, batch = engine.device, Batch.random()
    graph = device.new_graph()
    with device.graph(graph):
        engine.stager.stage(SpannedOutput(row_values={"token": batch.token * 1}))
        step = []
        launcher = threading.Thread(target=lambda: step.append(engine.launch(batch).wait()))
        launcher.start()
        launcher.join()
    assert engine.ring.cursor.item() == 1
    assert_rows(step[0].rows(), batch.rows())
    batch = Batch.random()
    assert_rows(engine.launch(batch).rows(), batch.rows())


# Every way to read a tensor's values on the host. The first group are operators; the second read CPU memory directly,
# as no CUDA tensor can be read.
READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda y: y[0].item(),
    "float": lambda y: float(y[0]),
    "if": lambda y: 1 if y.sum() > 0 else 2,
    "iteration": lambda y: [int(v) for v in y],
    "mask": lambda y: y[y > 0],
    "nonzero": lambda y: y.nonzero(),
    "equal": lambda y: torch.equal(y, y + 1),
    "masked_select": lambda y: torch.masked_select(y, y > 0),
    "tolist": lambda y: y.tolist(),
    "numpy": lambda y: y.numpy(),
    "asarray": lambda y: np.asarray(y),
    "cpu": lambda y: y.cpu(),
    "print": lambda y: f"{y}",
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_a_host_read_cannot_be_captured(read: Callable[[Tensor], Any]) -> None:
    device, x = SimulatedDevice(), torch.ones(3)

    def forward() -> Tensor:
        y = x * 2
        read(y)
        return y

    with pytest.raises(CaptureError, match=r"when stream is capturing: .*test_simulated_capture\.py.*: SG401"):
        captured(device, forward)
    read(x)  # elsewhere it is nobody's business
    graph, y = captured(device, lambda: x * 3)
    graph.replay()
    device.synchronize()
    assert y.tolist() == [3, 3, 3]


def test_work_that_reads_nothing_on_the_host_can_be_captured() -> None:
    """The mirrored cases: masks that fill, reads of shapes, scalars that are Python's own."""
    device, x = SimulatedDevice(), torch.tensor([1.0, -2.0, 3.0])

    def forward() -> Tensor:
        y = x * len(x) + x.shape[0]
        y[y < 0] = 0.0
        return torch.where(y > 5, y, -y)

    graph, y = captured(device, forward)
    graph.replay()
    device.synchronize()
    assert y.tolist() == [6, -0.0, 12]


def test_an_empty_graph_cannot_be_replayed() -> None:
    device = SimulatedDevice()
    with pytest.raises(CaptureError, match="replay of a graph that was never captured"):
        device.new_graph().replay()


def test_a_graph_holds_the_memory_of_its_capture() -> None:
    """K28: as on CUDA, `parameter.data = ...` leads elsewhere; updates in place are followed."""
    device, weight = SimulatedDevice(), nn.Parameter(torch.ones(2))
    graph, y = captured(device, lambda: weight * 2)
    with torch.no_grad():
        weight.add_(1)
    graph.replay()
    device.synchronize()
    assert y.tolist() == [4, 4]
    weight.data = torch.zeros(2)
    graph.replay()
    device.synchronize()
    assert y.tolist() == [4, 4]


class Deep(nn.Module):
    """With more tensors than a launch checks in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(9)])

    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return ("y",)

    def forward(self, x: Tensor, n: Tensor) -> SpannedOutput:
        return SpannedOutput({"y": self.layers(x)}, {"y": from_lengths(n)})


def test_a_swapped_storage_is_noticed_within_a_few_launches() -> None:
    """K28: weights replaced after capture: old addresses replayed. The simulated graph keeps the old memory, so that
    only the launches' checks in turn can notice."""
    model, inputs = Deep(), (torch.randn(2, 4), torch.tensor([3, 4]))
    compiled = spangraph.compile(model, backend=SimulatedDevice())
    for _ in range(4):  # and nothing is noticed where nothing happened
        assert torch.equal(compiled(*inputs).outputs["y"][1], model(*inputs).outputs["y"][1])
    with torch.no_grad():
        model.layers[8].bias.add_(1)
    assert torch.equal(compiled(*inputs).outputs["y"][1], model(*inputs).outputs["y"][1])
    model.layers[8].bias.data = torch.zeros(4)

    def launch_a_few() -> None:
        for _ in range(4):
            compiled(*inputs)

    with pytest.raises(StaleGraphError, match=r"layers\.8\.bias was replaced after the trace"):
        launch_a_few()


@pytest.mark.parametrize("addresses", [True, False], ids=["captured", "inline"])
def test_freed_memory_is_noticed_at_once(addresses: bool) -> None:
    """K28 where nobody keeps the old memory, as a CUDA graph does not: it is what the next replay would read."""
    model = Deep()
    weights = Weights(model, addresses=addresses)
    for _ in range(9):
        weights.check()
    model.layers[8].bias.data = torch.zeros(4)
    if addresses:
        for _ in range(2):
            with pytest.raises(StaleGraphError, match=r"layers\.8\.bias was replaced"):
                weights.check()
    else:  # an inline graph computes with the parameter, wherever its memory is
        for _ in range(9):
            weights.check()
