"""What once went wrong around copied rows: races with a release, rows that reach too far, odd models."""

from __future__ import annotations

import gc
import io
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spangraph
import spangraph.rows
from spangraph import Copy, DeclarationError, RingFullError, SpannedOutput, SpanStager, StaleStepError, from_lengths
from spangraph.testing import SimulatedDevice

from .toys import Toy, batch, compiled, cut, plain, values

BACKENDS = pytest.mark.parametrize("on", ["inline", "simulated"])
LIFETIMES = pytest.mark.parametrize("lifetime", ["view", "device", "host"])
COPIED = pytest.mark.parametrize("lifetime", ["device", "host"])


@BACKENDS
@LIFETIMES
@pytest.mark.parametrize("read", ["own", "result"])
def test_a_release_while_rows_are_copied(on: str, lifetime: str, read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later step may have written what was being copied: an error, and not its rows."""
    run = compiled(Toy(), on, copies={"audio": lifetime})
    x, n = batch((3, 5))
    run(x, n)
    step = run.launch(x, n)
    rows = step.rows()
    name = "gather" if lifetime == "view" else "clone_each"
    copy = getattr(spangraph.rows, name)

    def release_meanwhile(*args: Any) -> Any:
        monkeypatch.setattr(spangraph.rows, name, copy)

        def other() -> None:
            step.release()
            run(torch.full_like(x, 9), n)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return copy(*args)

    monkeypatch.setattr(spangraph.rows, name, release_meanwhile)
    with pytest.raises(StaleStepError):
        rows.own() if read == "own" else step._result(own=True)


@COPIED
def test_a_row_is_withheld_while_it_is_copied(lifetime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = compiled(Toy(), copies={"audio": lifetime})
    x, n = batch((3, 5))
    step = run.launch(x, n)
    rows, crops = step.rows(), spangraph.Rows._crops

    def withholding(*args: Any) -> Any:
        step.withhold(1)
        return crops(*args)

    monkeypatch.setattr(spangraph.Rows, "_crops", withholding)
    assert values(rows.own()) == cut(x[:1] * 2 + 1, [3])


@BACKENDS
def test_a_host_row_takes_nothing_along(on: str) -> None:
    """Saving it saves its bytes, not the ring with other requests' rows; sharing it does not move the ring."""
    run = compiled(Toy(), on, depth=2, copies={"audio": "host"})
    x, n = torch.randn(2, 20_000), torch.tensor([1, 20_000])
    with run.launch(x, n) as step:
        row = step.rows()[0]
        file = io.BytesIO()
        torch.save(row, file)
        assert len(file.getvalue()) < 4_000
        assert row.untyped_storage().nbytes() == 4
        (signature,) = run._by_key.values()
        copies = signature.tails[0].copies
        assert copies is not None
        address = copies._memory[0].host.data_ptr()
        step.rows()[1].share_memory_()
        assert copies._memory[0].host.data_ptr() == address
        assert step.rows()[1].equal(x[1] * 2 + 1)
    assert values(run(x, n).outputs["audio"]) == cut(x * 2 + 1, [1, 20_000])


@COPIED
def test_a_row_outlives_the_ring_in_safety(lifetime: str) -> None:
    """Its bytes are nobody's any more, but they are there."""
    run = compiled(Toy(), "inline", copies={"audio": lifetime})
    x, n = batch((3, 5))
    step = run.launch(x, n)
    row = step.rows()[1]
    expected = row.clone()
    run.close()
    del run
    gc.collect()
    assert row.equal(expected)
    step.release()


@BACKENDS
@LIFETIMES
def test_owned_rows_keep_nothing_of_the_ring(on: str, lifetime: str) -> None:
    """K19: neither the ring nor the graph's outputs."""
    run = compiled(Toy(), on, copies={"audio": lifetime})
    x, n = batch((3, 5))
    rows = run(x, n).outputs["audio"]
    ring = weakref.ref(run._ring)
    (signature,) = run._by_key.values()
    gone = [ring, *(weakref.ref(tail) for tail in signature.tails)]
    run.close()
    del run, signature
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)
    assert values(rows) == cut(x * 2 + 1, [3, 5])
    assert rows.spans(0) == (((0, 3),),)


@COPIED
def test_gradients_through_a_leased_row(lifetime: str) -> None:
    """Other steps write other slots of one ring; that is no change of this row."""
    run = compiled(Toy().requires_grad_(False), "inline", depth=2, copies={"audio": lifetime})
    gain = torch.ones((), requires_grad=True)
    (x, n), other = batch((3, 5)), batch((3, 5))
    step = run.launch(x, n)
    loss = (step.rows()[1] * gain).sum()
    run.launch(*other).rows()
    loss.backward()
    assert gain.grad is not None
    assert gain.grad.equal((x[1] * 2 + 1).sum())


@BACKENDS
@COPIED
def test_a_batch_of_no_rows(on: str, lifetime: str) -> None:
    model = plain(lambda self, x, n: self.toy(x, n)["audio"].flip(-1)[..., 1:], toy=Toy())
    run = compiled(model, on, copies={"audio": lifetime})
    assert values(run(torch.rand(0, 5), torch.zeros(0, dtype=torch.int64))) == {}
    x, n = batch((3, 5))
    assert values(run(x, n))[1] == (x * 2 + 1)[1].flip(-1)[1:].tolist()


def test_a_view_beside_a_small_copy_is_refused_at_once() -> None:
    """The view leases the graph whether the copy fits or not: there is nothing to wait for."""
    device = SimulatedDevice()
    copies = {"a": Copy("host", capacity=16)}
    stager = SpanStager(["a", "b"], max_rows=2, depth=2, copies=copies, device=device)
    x, n, graph = torch.randn(2, 64), torch.tensor([50, 20]), device.new_graph()
    with device.graph(graph):
        spans = from_lengths(n)
        tail = stager.stage(SpannedOutput({"a": x * 2, "b": x * 3}, {"a": spans, "b": spans.clone()}))
    device.hold()
    with tail.step() as step:
        graph.replay()
    with pytest.raises(RingFullError), tail.step():
        pass
    device.resume()
    assert step.rows("a")[0].equal(x[0, :50] * 2)
    assert step.rows("b")[1].equal(x[1, :20] * 3)


def test_what_is_computed_from_the_audio_is_not_cast() -> None:
    """A mask, or levels, which PCM would clip; parts and copies of it are."""

    class Voiced(nn.Module):
        def spanned_outputs(self, walk: str) -> tuple[str, ...]:
            return ("audio",)

        def forward(self, x: Tensor, n: Tensor) -> SpannedOutput:
            y = x * 2
            outputs = {"audio": y, "voiced": y > 0, "level": y.abs().log(), "part": y[:, ::2], "copy": y.clone()}
            return SpannedOutput(outputs, {"audio": from_lengths(n)})

    run = compiled(Voiced(), "simulated", "export", copies={"audio": Copy("host", dtype=torch.int16)})
    x, n = batch((3, 5))
    with run.launch(x, n) as step:
        out = step.result().outputs
        assert {name for name in out if out[name][1].dtype is torch.int16} == {"audio", "part", "copy"}
        assert out["voiced"][1].equal(x[1] > 0)
        assert out["level"][1].equal((x[1] * 2).abs().log())
        assert out["part"][1].equal(out["audio"][1][::2])


def test_names_and_keys_of_copies() -> None:
    twice = plain(lambda self, x, n: (self.dec(x, n), self.dec(x + 1, n)), dec=Toy())
    run = compiled(twice, "simulated", copies={"dec[1].audio": "host"})
    run(*batch())
    assert run.explain().count("copied to the host") == 1
    for key in (1, None):
        for build in (
            lambda key=key: spangraph.compile(Toy(), copies={key: "host"}),
            lambda key=key: SpanStager(["audio"], max_rows=1, copies={key: "host"}),
        ):
            with pytest.raises(DeclarationError, match=r"copies has the key .*expected names of spanned outputs"):
                build()
    for given in ("host", ["audio"]):
        with pytest.raises(DeclarationError, match=r'expected a mapping such as \{"audio": "host"\}'):
            spangraph.compile(Toy(), copies=given)  # type: ignore[arg-type]


@pytest.mark.parametrize("end", ["release", "cancel", "collect"])
def test_each_end_of_a_lease_reports_held_rows(end: str, caplog: pytest.LogCaptureFixture) -> None:
    device = SimulatedDevice()
    run = spangraph.compile(Toy(), backend=device, copies={"audio": "host"})
    x, n = batch((3, 5))
    step = run.launch(x, n)
    row = step.rows()[1]
    ends: dict[str, Callable[[], None]] = {"release": step.release, "cancel": step.cancel, "collect": lambda: None}
    with caplog.at_level(logging.WARNING, "spangraph"):
        ends[end]()
        del step, ends
        gc.collect()
        run(x, n)
    device.synchronize()
    assert len([r for r in caplog.records if "1 of its rows are still held" in r.getMessage()]) == 1
    assert row.isnan().all()


def test_copies_made_for_the_reader_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    """A row that did not fit is cast on its way to the host: it is the caller's."""
    run = compiled(Toy(), "simulated", copies={"audio": Copy("host", dtype=torch.int16, capacity=16)})
    x, n = torch.randn(2, 50), torch.tensor([50, 50])
    with run.launch(x, n) as step:
        row = step.rows()[1]
    assert not caplog.records
    assert row.equal(spangraph.kernels.compact.pcm16(x[1] * 2 + 1))


def test_steps_in_flight_are_done_before_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace changes torch's settings for a while, which kernels of a device on a host thread would see."""
    device = SimulatedDevice()
    run = spangraph.compile(Toy(), backend=device, depth=2)
    step = run.launch(*batch((3, 5)))
    seen = []
    trace = spangraph.builder.trace_model

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(step.is_done)
        return trace(*args, **kwargs)

    monkeypatch.setattr(spangraph.builder, "trace_model", watched)
    run.launch(*batch((3, 5), width=9))
    assert seen == [True]
