"""Models with state across steps, KV caches above all, equal the eager model step by step; warm-up leaves no trace."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from spangraph import CaptureError
from spangraph.testing import SimulatedDevice

from .decoders import BS, EOS, Decoder, Spoken, eager, ids_of, restarts, run
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
