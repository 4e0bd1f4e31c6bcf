"""Model state that the forward reaches or binds outside its registered buffers."""

import pytest
import torch
from torch import Tensor, nn

import spangraph
from spangraph import SpannedOutput, from_lengths
from spangraph.testing import SimulatedDevice


class _Box:
    cache: Tensor


class Boxed(nn.Module):
    """A buffer that the forward writes through an object which holds it too, as static caches do."""

    def __init__(self) -> None:
        super().__init__()
        self.box = _Box()
        self.box.cache = torch.zeros(1)
        self.register_buffer("cache", self.box.cache)

    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return ("y",)

    def forward(self, x: Tensor, n: Tensor) -> SpannedOutput:
        self.box.cache.add_(1)
        return SpannedOutput({"y": x * self.box.cache}, {"y": from_lengths(n)})


class Bound(nn.Module):
    """Delivers what it has just bound as its new state, and updates it in place at the next call."""

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        if buffer:
            self.register_buffer("state", torch.zeros(2, 4))
        else:
            self.state = torch.zeros(2, 4)

    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return ("y",)

    def forward(self, x: Tensor, n: Tensor) -> SpannedOutput:
        self.state.mul_(0.5)
        self.state = self.state + x
        return SpannedOutput({"y": self.state}, {"y": from_lengths(n)})


@pytest.mark.parametrize("device", [lambda: "cpu", SimulatedDevice], ids=["inline", "simulated"])
def test_a_buffer_written_through_an_object_counts_every_call_once(device: object) -> None:
    """K42: export wrote the real buffer at the trace, so every row was off by one, and by more with each signature."""
    x, n = torch.ones(1, 2), torch.tensor([2])
    with spangraph.compile(Boxed(), backend=device()) as compiled:  # type: ignore[operator]
        found = [compiled(x, n)["y"][0].tolist() for _ in range(3)]
    assert found == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


@pytest.mark.parametrize("buffer", [True, False])
@pytest.mark.parametrize("trace", ["auto", "opaque"])
def test_state_that_is_delivered_is_not_the_models(trace: str, buffer: bool) -> None:
    """The rows were views of the model's own state: the next call changed them, their release poisoned the model."""
    x, n = torch.ones(2, 4), torch.tensor([4, 4])
    with spangraph.compile(Bound(buffer=buffer), trace=trace, depth=2) as compiled:
        steps = [compiled.launch(x, n), compiled.launch(2 * x, n)]
        found = [step.rows("y")[1][0].item() for step in steps]
        for step in steps:
            step.release()
        third = compiled(4 * x, n)["y"][0][0].item()
    assert [*found, third] == [1.0, 2.5, 5.25]


@pytest.mark.parametrize("trace", ["export", "opaque"])
def test_outputs_whose_elements_share_memory(trace: str) -> None:
    """Writing to an expanded static output raised, at capture and at every replay."""

    class Expanded(nn.Module):
        def spanned_outputs(self, walk: str) -> tuple[str, ...]:
            return ("y",)

        def forward(self, x: Tensor, n: Tensor) -> SpannedOutput:
            y = x.sum(0, keepdim=True).expand(3, 5)
            return SpannedOutput({"y": y, "mask": torch.ones(5).expand(3, 5)}, {"y": from_lengths(n)})

    with spangraph.compile(Expanded(), trace=trace, backend=SimulatedDevice()) as compiled:
        for _ in range(2):
            x = torch.randn(3, 5)
            result = compiled(x, torch.tensor([1, 5, 0]))
            assert torch.equal(result["y"][0], x.sum(0)[:1])
            assert torch.equal(result["y"][1], x.sum(0))
            assert torch.equal(result["mask"], torch.ones(3, 5))
