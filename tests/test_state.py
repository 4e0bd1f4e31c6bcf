"""Models with state across steps, KV caches above all, equal the eager model step by step; warm-up leaves no trace."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import spangraph
from spangraph.testing import SimulatedDevice

from .decoders import BS, EOS, Decoder, eager, ids_of, read, restarts, run
from .toys import compiled, tracer_of

TRACES = pytest.mark.parametrize("trace", ["export", "opaque"])
BACKENDS = pytest.mark.parametrize("on", ["inline", "simulated"])

pytestmark = pytest.mark.usefixtures("one_thread")


def _state(model: torch.nn.Module) -> dict[str, Any]:
    return {name: buffer.tolist() for name, buffer in model.named_buffers()}


@TRACES
@BACKENDS
@pytest.mark.parametrize("lifetime", ["view", "host"])
def test_a_decoder_runs_as_eager_does(lifetime: str, on: str, trace: str) -> None:
    """200 steps at depth 2, each read while the next one runs: rows, row values, and the buffers at the end."""
    torch.manual_seed(11)  # how many rows end is up to the weights
    model = Decoder()
    reference = copy.deepcopy(model)
    inputs = restarts(200)
    expected = eager(reference, inputs)
    tokens = torch.tensor([step.values["token"] for step in expected])
    assert (tokens == EOS).sum() > 50  # rows that had ended, and emitted nothing
    assert len(tokens.unique()) > 40
    with compiled(model, on, trace, depth=2, copies={"audio": lifetime}) as run_:
        assert run(run_, inputs) == expected
        assert tracer_of(run_) == trace
    assert _state(model) == _state(reference)


@TRACES
@BACKENDS
def test_a_decoder_that_draws_from_torch_draws_as_eager_does(on: str, trace: str) -> None:
    """Dropout and sampling, with the same seed; the trace, warm-up and capture draw nothing."""
    model = Decoder(draws=True)
    reference = copy.deepcopy(model)
    inputs = restarts(60)
    torch.manual_seed(11)
    expected = eager(reference, inputs)
    after = torch.get_rng_state()
    torch.manual_seed(11)
    with compiled(model, on, trace, depth=2) as run_:
        assert run(run_, inputs) == expected
    assert torch.get_rng_state().equal(after)
    assert _state(model) == _state(reference)


@TRACES
def test_state_is_reset_in_stream_order(trace: str) -> None:
    """While earlier steps are still running: the reset takes effect after them and before the next."""
    model = Decoder()
    reference = copy.deepcopy(model)
    keep = torch.zeros(BS, dtype=torch.bool)
    device = SimulatedDevice()
    expected = eager(reference, [keep] * 3 + [reference.reset] + [keep] * 3)
    address = model.keys.data_ptr()
    with spangraph.compile(model, backend=device, trace=trace, depth=3) as run_:
        found = run(run_, [keep])
        device.hold()
        steps = [run_.launch(keep, rows=ids_of(i)) for i in (1, 2)]
        device.launch(model.reset)  # on CUDA: model.reset(), on the stream that launches
        steps.append(run_.launch(keep, rows=ids_of(3)))
        assert model.keys.any()  # not yet
        device.resume()
        found += [read(step) for step in steps]
        found += run(run_, [keep] * 2, first=4)
    assert found == expected
    assert expected[3].values["position"] == [0] * BS
    assert model.keys.data_ptr() == address
    assert _state(model) == _state(reference)


@TRACES
@BACKENDS
def test_state_is_reset_after_a_wait(on: str, trace: str) -> None:
    """Where nothing is open it may be changed at once, and everywhere: inline, a launch is done when it returns."""
    model = Decoder()
    reference = copy.deepcopy(model)
    keep = torch.zeros(BS, dtype=torch.bool)
    expected = eager(reference, [keep] * 3 + [reference.reset] + [keep] * 3)
    with compiled(model, on, trace, depth=2) as run_:
        found = run(run_, [keep] * 3)
        model.reset()
        assert found + run(run_, [keep] * 3, first=3) == expected
    assert _state(model) == _state(reference)


# ---- a first launch leaves no trace but its step ---------------------------------------------------------------------


class _FailsAt(SimulatedDevice):
    """Refuses one of its captures."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.num_captures = 0

    def capture(self, *args: Any, **options: Any) -> Any:
        self.num_captures += 1
        if self.num_captures == self.at:
            self.fail_next("capture")
        return super().capture(*args, **options)


class OwnGenerator(Decoder):
    """Draws from a generator of its own as well."""

    def __init__(self) -> None:
        super().__init__(draws=True)
        self.generator = torch.Generator().manual_seed(3)

    def _uniform(self) -> Tensor:
        return (super()._uniform() + torch.rand(1, generator=self.generator)) / 2


def _all_state(model: OwnGenerator) -> tuple[Any, ...]:
    return _state(model), torch.get_rng_state().tolist(), model.generator.get_state().tolist()


@pytest.mark.parametrize("at", [0, 1, 2], ids=["no failure", "first capture fails", "second capture fails"])
@pytest.mark.parametrize("trace", ["auto", "opaque"])  # not every torch exports a generator
def test_the_first_launch_is_as_if_warm_up_had_not_been(trace: str, at: int) -> None:
    """K42: counters, caches and generators; nor had a launch that failed been."""
    model = OwnGenerator()
    model.generator.manual_seed(3)
    reference = copy.deepcopy(model)
    reference.generator = torch.Generator().manual_seed(3)
    inputs = restarts(3)
    torch.manual_seed(11)
    expected = eager(reference, inputs)
    expected_state = _all_state(reference)
    torch.manual_seed(11)
    before = _all_state(model)
    device = _FailsAt(at)
    with spangraph.compile(model, backend=device, trace=trace, depth=2) as run_:
        if at:
            with pytest.raises(RuntimeError, match="simulated capture failure"):
                run_.launch(inputs[0], rows=ids_of(0))
            assert _all_state(model) == before
        assert run(run_, inputs) == expected
    assert device.num_captures == at + 2
    assert _all_state(model) == expected_state
