"""`SPANGRAPH_DEBUG=1`: what is dead looks dead, and what is held too long or has moved is reported."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spangraph
from spangraph import InlineBackend, Span, SpannedOutput, SpanStager, StaleGraphError, from_lengths
from spangraph.backends import poison_of
from spangraph.testing import SimulatedDevice

from .toys import Toy, batch, compiled, cut, line_of, values

BACKENDS = pytest.mark.parametrize("on", ["inline", "simulated"])
LIFETIMES = pytest.mark.parametrize("lifetime", ["view", "device", "host"])


def held_too_long(run: spangraph.Compiled) -> Any:
    x, n = batch((3, 5))
    with run.launch(x, n) as step:
        kept = step.rows()[1]  # taken here
        gone = step.rows()[0]
        del gone
    return kept


@BACKENDS
@LIFETIMES
def test_rows_that_are_held_past_the_release_are_reported(
    on: str, lifetime: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = compiled(Toy(), on, copies={"audio": lifetime})
    with caplog.at_level(logging.WARNING, "spangraph"):
        kept = held_too_long(run)
    (record,) = caplog.records
    text = record.getMessage()
    assert "step 1 (released, graph 1) was released while 1 of its rows are still held" in text
    assert f"taken at {line_of(held_too_long, 'taken here')}:" in text
    assert "rows.own()" in text
    del kept


@BACKENDS
def test_owned_and_dropped_rows_are_not_reported(on: str, caplog: pytest.LogCaptureFixture) -> None:
    run = compiled(Toy(), on, copies={"audio": "host"})
    x, n = batch((3, 5))
    with run.launch(x, n) as step:
        owned = list(step.rows().own().values())
        assert [len(row) for row in step.rows().values()] == [3, 5]
    assert not caplog.records
    del owned


def test_nothing_is_reported_or_poisoned_without_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SPANGRAPH_DEBUG", "0")
    x, n = batch((3, 5))
    for lifetime in ("view", "host"):
        run = compiled(Toy(), "inline", copies={"audio": lifetime})
        with run.launch(x, n) as step:
            kept = step.rows()[1]
        assert kept.equal((x * 2 + 1)[1])
    assert not caplog.records


@pytest.mark.parametrize("value", ["2", "true", " 1"])
def test_a_bad_value_names_the_variable(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPANGRAPH_DEBUG", value)
    for build in (
        lambda: spangraph.compile(Toy()),
        lambda: SpanStager(["audio"], max_rows=1, device=SimulatedDevice()),
        lambda: SpanStager(["audio"], max_rows=1, device="cpu"),
    ):
        with pytest.raises(ValueError, match=f"SPANGRAPH_DEBUG='{value}': expected 0 or 1"):
            build()


def test_poison_is_nan_in_bytes_too() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        assert poison_of(dtype) != poison_of(dtype)
    assert poison_of(torch.int16) == -(2**15)
    assert poison_of(torch.bool) is True
    memory = torch.full((8,), poison_of(torch.uint8), dtype=torch.uint8)
    assert all(memory.view(dtype).isnan().all() for dtype in (torch.float16, torch.float32, torch.float64))


# ---- where inputs are --------------------------------------------------------------------------------------------


class Lane:
    """A graph captured by hand, with its static inputs."""

    def __init__(self, device: SimulatedDevice, *, alias: bool = False) -> None:
        self.device = device
        self.x, self.spans = torch.randn(2, 4), torch.tensor([[0, 3], [1, 4]])
        self.extra = torch.zeros(2)  # the simulated device's graph does not keep it
        self.stager = SpanStager({"audio": Span()}, max_rows=2, device=device)
        self.graph = device.new_graph()
        with device.graph(self.graph):
            out = SpannedOutput({"audio": self.x if alias else self.x + 1}, {"audio": self.spans})
            self.tail = self.stager.stage(out, inputs=[self.x[:1], self.spans, self.extra])

    def run(self) -> dict[Any, Any]:
        with self.tail.step() as step:
            self.graph.replay()
        with step:
            return values(step.rows())


def test_an_input_that_has_moved_or_is_gone() -> None:
    """A replay would read the old memory, whoever has it now."""
    lane = Lane(SimulatedDevice())
    assert lane.run() == {0: (lane.x + 1)[0, :3].tolist(), 1: (lane.x + 1)[1, 1:].tolist()}
    lane.x.mul_(2)  # in place
    assert lane.run()[0] == (lane.x + 1)[0, :3].tolist()
    kept = lane.spans.data
    lane.spans.data = lane.spans.clone()
    with pytest.raises(StaleGraphError, match=r"input 1 of graph 1 was at 0x.* at the capture, and is at 0x.* now"):
        lane.run()
    lane.spans.data = kept
    assert lane.run()[0] == (lane.x + 1)[0, :3].tolist()  # x was given as a slice, which is gone: its memory is not
    del lane.extra
    with pytest.raises(StaleGraphError, match=r"input 2 of graph 1 .* and is gone now.*Keep static inputs alive"):
        lane.run()


def test_a_compiled_graph_s_own_inputs_are_checked() -> None:
    run = compiled(Toy(), "simulated")
    x, n = batch((3, 5))
    run(x, n)
    (signature,) = run._by_key.values()
    static = signature.instances[0].inputs[0]
    static.data = static.clone()
    with pytest.raises(StaleGraphError, match="input 0 of graph 1"):
        run(x, n)


def test_an_output_in_memory_of_an_input_is_not_poisoned() -> None:
    """It is the engine's: the next step reads it."""
    lane = Lane(SimulatedDevice(), alias=True)
    before = lane.x.clone()
    for _ in range(2):
        assert lane.run() == {0: before[0, :3].tolist(), 1: before[1, 1:].tolist()}
    backend = InlineBackend()
    stager = SpanStager({"audio": Span()}, max_rows=2, device=backend)
    x, spans = torch.randn(2, 4), torch.tensor([[0, 3], [1, 4]])
    graph, tail = backend.capture(
        lambda: stager.stage(SpannedOutput({"audio": x}, {"audio": spans}), inputs=[x, spans])
    )
    for _ in range(2):
        with tail.step() as step:
            graph.replay()
        with step:
            assert step.rows()[0].equal(x[0, :3])
    assert not x.isnan().any()


def test_every_weight_is_checked_at_every_launch() -> None:
    """Without debugging a captured graph looks at eight tensors a launch, in turn."""

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gains = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(40))

        def spanned_outputs(self, walk: str) -> tuple[str, ...]:
            return ("audio",)

        def forward(self, x: Tensor, n: Tensor) -> SpannedOutput:
            return SpannedOutput({"audio": x * sum(self.gains)}, {"audio": from_lengths(n)})

    model = Many().requires_grad_(False)
    run = compiled(model, "simulated")
    x, n = batch((3, 5))
    assert values(run(x, n).outputs["audio"]) == cut(x * 40, [3, 5])
    old = model.gains[35].data  # kept alive, so that its end is no hint
    model.gains[35].data = old * 2
    with pytest.raises(StaleGraphError, match=r"gains\.35 was replaced"):
        run(x, n)
