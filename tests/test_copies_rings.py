"""The rings of copied rows: leases, what may not fit, casts and memory, inline and simulated."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spangraph
from spangraph import (
    Copy,
    DeclarationError,
    RingFullError,
    RowLookupError,
    Span,
    SpanError,
    SpannedOutput,
    StagingError,
    StaleStepError,
)
from spangraph.kernels.compact import pcm16
from spangraph.testing import SimulatedDevice

from .toys import Spans, Toy, batch, compiled, cut, num_instances, plain, spanned, values

BACKENDS = pytest.mark.parametrize("on", ["inline", "simulated"])
LIFETIMES = pytest.mark.parametrize("lifetime", ["view", "device", "host"])
COPIED = pytest.mark.parametrize("lifetime", ["device", "host"])


# ---- leases ------------------------------------------------------------------------------------------------------


@BACKENDS
@COPIED
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_ring_as_deep_as_the_steps_in_flight(on: str, lifetime: str, depth: int) -> None:
    """K17: one step more is refused, and a released one does not answer."""
    run = compiled(Toy(), on, depth=depth, copies={"audio": lifetime})
    batches = [batch((3, 5)) for _ in range(depth)]
    steps = [run.launch(x, n) for x, n in batches]
    with pytest.raises(RingFullError, match=rf"depth={depth} and {depth} steps are open or leased: step 1"):
        run.launch(*batches[0])
    for step, (x, _) in zip(steps, batches, strict=True):
        assert values(step.rows()) == cut(x * 2 + 1, [3, 5])
    kept = steps[0].rows()
    steps[0].release()
    run.launch(*batches[0]).wait()
    for read in (steps[0].rows, lambda: kept[0], kept.own, lambda: kept.at(1)):
        with pytest.raises(StaleStepError, match=r"rows.own\(\), or raise depth"):
            read()
    assert num_instances(run) == 1  # nothing is leased but the ring


@BACKENDS
@COPIED
def test_copied_rows_die_with_their_step(on: str, lifetime: str) -> None:
    run = compiled(Toy(), on, copies={"audio": lifetime})
    x, n = batch((3, 5))
    step = run.launch(x, n)
    kept = step.rows()[0]
    assert kept.tolist() == (x * 2 + 1)[0, :3].tolist()
    step.release()
    run(x * 0, n)
    assert kept.tolist() != (x * 2 + 1)[0, :3].tolist()


@BACKENDS
@LIFETIMES
def test_owned_crops_keep_nothing_else_alive(on: str, lifetime: str) -> None:
    """K19: crops of one sample, kept for a thousand steps of large rows; and what a lease retains is reported."""
    width = 50_000
    run = compiled(Spans(), on, copies={"audio": lifetime})
    x, spans = torch.randn(2, width), torch.tensor([[7, 8], [0, width]])
    kept = []
    for _ in range(1000 if on == "inline" else 100):
        with run.launch(x, spans) as step:
            if not kept:
                assert run.memory().leased >= 2 * width * 4
            kept.append(step.rows().own()[0])
    assert run.memory().leased == 0
    assert sum({c.untyped_storage().data_ptr(): c.untyped_storage().nbytes() for c in kept}.values()) <= 64 * len(kept)
    assert all(crop.equal(x[0, 7:8]) for crop in kept)


@BACKENDS
def test_pinned_memory_stays_flat(on: str) -> None:
    """K35: a thousand steps of random lengths."""
    run = compiled(Toy(), on, depth=2, copies={"audio": "host"})
    seen = set()
    for i in range(1000):
        x, n = torch.randn(3, 8), torch.randint(0, 9, (3,))
        run(x, n)
        if i >= 2:
            seen.add(run.memory().pinned)
    assert len(seen) == 1


@BACKENDS
@COPIED
def test_compiled_in_inference_mode_and_launched_outside(on: str, lifetime: str) -> None:
    """K29: and the reverse."""
    x, n = batch((3, 5))
    for compile_inside in (True, False):
        with torch.inference_mode(compile_inside):
            run = compiled(Toy(), on, copies={"audio": lifetime})
            first = values(run(x, n).outputs["audio"])
        with torch.inference_mode(not compile_inside):
            assert values(run(x, n).outputs["audio"]) == first == cut(x * 2 + 1, [3, 5])


@COPIED
def test_steps_of_one_graph_in_flight_keep_their_inputs(lifetime: str) -> None:
    """K41: the device is held while three steps of one graph are launched with different inputs."""
    device = SimulatedDevice()
    run = spangraph.compile(Toy(), backend=device, depth=3, copies={"audio": lifetime})
    run(*batch((3, 5)))
    batches = [batch((3, 5)) for _ in range(3)]
    device.hold()
    steps = [run.launch(x, n) for x, n in batches]
    for x, _ in batches:
        x_now = x.clone()
        x.zero_()  # the caller's again
        x.copy_(x_now)
    device.resume()
    for step, (x, _) in zip(steps, batches, strict=True):
        assert values(step.rows()) == cut(x * 2 + 1, [3, 5])
    assert num_instances(run) == 1


def test_graphs_of_copied_rows_share_a_pool_and_views_do_not() -> None:
    """K38: launch A, launch B, read A."""
    for copies, shared in ({"audio": "device"}, True), ({"audio": "host"}, True), ({}, False):
        run = compiled(Toy(), "simulated", depth=2, copies=copies)
        first, second = batch((3, 5)), batch((3, 5, 2), width=7)
        a, b = run.launch(*first), run.launch(*second)
        assert values(a.rows()) == cut(first[0] * 2 + 1, [3, 5])
        assert values(b.rows()) == cut(second[0] * 2 + 1, [3, 5, 2])
        pools = {id(i.graph.pool) for s in run._by_key.values() for i in s.instances}  # type: ignore[union-attr]
        assert len(pools) == (1 if shared else 4)


@BACKENDS
@COPIED
def test_padding_withheld_and_bad_rows(on: str, lifetime: str) -> None:
    run = compiled(Spans(), on, copies={"audio": lifetime})
    x = torch.randn(6, 5)
    spans = torch.tensor([[0, 3], [2, 2], [4, 1], [1, 5], [0, 5], [0, 5]])
    ids = ["a", "b", "c", "d", "e"]
    with run.launch(x, spans, rows=ids, num_rows=5) as step:
        step.withhold("e")
        rows = step.rows()
        assert rows["a"].equal(x[0, :3])
        assert rows["d"].equal(x[3, 1:])
        assert len(rows) == 2
        for row_id, error in (("b", RowLookupError), ("c", SpanError), ("e", RowLookupError), ("f", RowLookupError)):
            with pytest.raises(error):
                rows[row_id]
        owned = rows.own()
    assert owned["d"].equal(x[3, 1:])
    assert values(run(x, spans, num_rows=0).outputs["audio"]) == {}


def test_a_copy_that_is_missing_from_the_graph() -> None:
    """The spans were staged, the rows were not."""
    device = SimulatedDevice()
    run = spangraph.compile(Toy(), backend=device, copies={"audio": "host"})
    x, n = batch((3, 5))
    run(x, n)
    device.fail_next("compaction")
    step = run.launch(x, n)
    with pytest.raises(StagingError, match="its record of copies holds generation 1 instead of generation 2"):
        step.rows()
    assert values(run(x, n).outputs["audio"]) == cut(x * 2 + 1, [3, 5])


# ---- rings that are smaller than the worst case ------------------------------------------------------------------


@BACKENDS
@COPIED
def test_a_step_that_does_not_fit_is_cut_from_the_padded_output(on: str, lifetime: str) -> None:
    run = compiled(Toy(), on, depth=3, copies={"audio": Copy(lifetime, capacity=48)})
    fits, full = batch((4, 8), width=8), batch((5, 8), width=8)
    for x, n in (fits, full, fits, full, full):
        with run.launch(x, n) as step:
            owned = step.rows().own()
            for rows in (step.rows(), owned):
                assert values(rows) == cut(x * 2 + 1, n.tolist())
        assert values(owned) == cut(x * 2 + 1, n.tolist())
    assert run.counts.overflows == 3
    moved = run.counts.host_bytes if lifetime == "host" else run.counts.device_bytes
    assert moved == 2 * 48


@COPIED
def test_a_step_that_did_not_fit_holds_the_next_launch_back(lifetime: str) -> None:
    """Its rows lie in the graph's output. A launch waits until it is known that the one before has fitted."""
    device = SimulatedDevice()
    run = spangraph.compile(Toy(), backend=device, depth=3, copies={"audio": Copy(lifetime, capacity=48)})
    fits, full = batch((4, 8), width=8), batch((5, 8), width=8)
    a = run.launch(*fits)
    b = run.launch(*full)  # waits for a, but not for its release
    with pytest.raises(RingFullError, match=r"the copies of step 2 .* did not fit.*own.*more capacity"):
        run.launch(*fits)
    assert values(a.rows()) == cut(fits[0] * 2 + 1, [4, 8])
    assert values(b.rows()) == cut(full[0] * 2 + 1, [5, 8])
    a.release()
    b.release()
    c = run.launch(*fits)
    assert values(c.rows()) == cut(fits[0] * 2 + 1, [4, 8])
    device.hold()
    d = run.launch(*fits)
    with pytest.raises(spangraph.StepTimeoutError, match="no room for a launch within"):
        run.launch(*fits, timeout=0.05)
    device.resume()
    assert values(d.rows()) == cut(fits[0] * 2 + 1, [4, 8])


@pytest.mark.parametrize("fault", ["wait", "staging"])
def test_a_failed_wait_that_a_launch_found_keeps_no_step_of_its_caller(fault: str) -> None:
    """The ring held the error, whose traceback led to the frames of whoever launched: a step there was not collected
    when they were done with it."""
    device = SimulatedDevice()
    run = spangraph.compile(Toy(), backend=device, depth=2, copies={"audio": Copy("host", capacity=16)})
    x, n = batch()
    run(x, n)
    if fault == "staging":
        device.fail_next("staging")
    lost = run.launch(x, n)

    def fail() -> None:
        raise RuntimeError("failed wait")  # a new error each time, as a device's

    if fault == "wait":
        lost._launch.event.query = fail  # type: ignore[union-attr,method-assign,assignment]

    def serve() -> None:
        step = run.launch(x, n, timeout=60)
        assert values(step.rows()) == cut(x * 2 + 1, n.tolist())

    for _ in range(3):
        serve()
    with pytest.raises(RuntimeError, match=r"failed wait|instead of generation 2"):
        lost.rows()


def test_graphs_that_may_overflow_have_memory_of_their_own() -> None:
    run = compiled(Toy(), "simulated", depth=2, copies={"audio": Copy("device", capacity=16)})
    first, second = batch((5, 5)), batch((4, 5, 3))
    a, b = run.launch(*first), run.launch(*second)
    assert values(a.rows()) == cut(first[0] * 2 + 1, [5, 5])
    assert values(b.rows()) == cut(second[0] * 2 + 1, [4, 5, 3])
    assert run.counts.overflows == 2


@pytest.mark.parametrize("fill", [0.5, 0.1])
def test_only_valid_bytes_cross(fill: float) -> None:
    """Counted by the library, and here by what changed in the host's ring."""
    bs, width = 16, 1000
    run = compiled(Spans(), "simulated", copies={"audio": "host"})
    lengths = torch.randint(1, int(2 * fill * width), (bs,))
    starts = (torch.rand(bs) * (width - lengths)).long()
    x, spans = torch.randn(bs, width), torch.stack([starts, starts + lengths], 1)
    run(x, spans)
    (signature,) = run._by_key.values()
    copies = signature.tails[0].copies
    assert copies is not None
    for memory in copies._memory:
        memory.host.fill_(-1)
        memory.device.fill_(-1)
    before = run.counts.host_bytes
    step = run.launch(x, spans)
    rows = step.rows()
    assert all(rows[i].equal(x[i, s:e]) for i, (s, e) in enumerate(spans.tolist()))
    changed = int((copies._memory[0].host.view(torch.int32) != -1).sum()) * 4
    valid = int(lengths.sum()) * 4
    aligned = int(((lengths * 4 + 15) // 16).sum()) * 16
    assert run.counts.host_bytes - before == aligned
    assert valid <= changed <= aligned < valid + 16 * bs


# ---- casts -------------------------------------------------------------------------------------------------------


@BACKENDS
@COPIED
@pytest.mark.parametrize("capacity", [None, 16])
def test_pcm_saturates_and_counts_nans(on: str, lifetime: str, capacity: int | None) -> None:
    run = compiled(Spans(), on, copies={"audio": Copy(lifetime, dtype=torch.int16, capacity=capacity)})
    x = torch.tensor([[0.5, 2, -3, float("inf"), float("nan"), 1.5 / 32767], [float("nan")] * 6, [0.1] * 6])
    spans = torch.tensor([[0, 6], [2, 4], [0, 1]])
    with run.launch(x, spans) as step:
        rows = step.rows()
        assert rows[0].tolist() == [16384, 32767, -32767, 32767, 0, 2]
        assert rows[1].tolist() == [0, 0]
        assert rows[2].equal(pcm16(x[2, :1]))
        assert [rows.nans(i) for i in range(3)] == [1, 2, 0]
        assert {row.dtype for row in rows.own().values()} == {torch.int16}
        assert step.result().outputs["audio"][0].dtype is torch.int16
    assert run.counts.overflows == (0 if capacity is None else 1)
    assert run.counts.nans == (3 if capacity is None else 0)


def test_only_floats_become_pcm() -> None:
    run = compiled(Spans(), "inline", copies={"audio": Copy("host", dtype=torch.int16)})
    with pytest.raises(DeclarationError, match=r"copies\['audio'\] casts torch.int32 to torch.int16"):
        run(torch.ones(1, 4, dtype=torch.int32), torch.tensor([[0, 4]]))
    kept = run(torch.ones(1, 4, dtype=torch.int16), torch.tensor([[0, 4]]))  # they are int16 already
    assert kept.outputs["audio"][0].tolist() == [1] * 4


# ---- memory ------------------------------------------------------------------------------------------------------


def test_memory_says_what_is_held_where() -> None:
    run = compiled(Toy(), "simulated", depth=2, copies={"audio": "host"})
    x, n = batch((3, 5), width=8)
    step = run.launch(x, n)
    memory = run.memory()
    use = {(u.graph, u.part): u for u in memory.uses}
    graph = "float32[2, 8], int64[2]"
    assert use[graph, "audio"].pinned == 2 * 2 * 32  # depth, rows, bytes of a row
    assert use[graph, "(inputs)"].device == x.nbytes + n.nbytes
    assert memory.leased == 2 * 32
    assert memory.pinned == sum(u.pinned for u in memory.uses)
    table = str(memory)
    assert "retained by open leases: 64" in table
    assert "(graph pool)" in table
    step.release()
    del step
    assert run.memory().leased == 0
    views = compiled(Toy(), "simulated", depth=2)
    leased = views.launch(x, n)
    pool = [u.pool for u in views.memory().uses if u.part == "(graph pool)"]
    assert len(pool) == 2
    assert min(pool) >= x.nbytes
    assert views.memory().leased >= x.nbytes
    leased.release()
    assert views.memory().leased == 0


def test_closing_frees_what_was_held() -> None:
    device = SimulatedDevice()
    run = spangraph.compile(Toy(), backend=device, copies={"audio": "host"})
    run(*batch())
    assert device._landings
    run.close()
    del run
    gc.collect()
    device.launch(lambda: None)
    device.synchronize()
    other = spangraph.compile(Toy(), backend=device, copies={"audio": "host"})
    other(*batch())
    assert len([1 for landing in device._landings if landing.host() is not None]) == 2


@BACKENDS
def test_a_consumer_that_raises_half_way(on: str) -> None:
    run = compiled(Toy(), on, copies={"audio": "host"})
    x, n = batch((3, 5))
    step = run.launch(x, n)
    with contextlib.suppress(ZeroDivisionError), step:
        for _ in step.rows().values():
            raise ZeroDivisionError
    assert step.is_released
    assert values(run(x, n).outputs["audio"]) == cut(x * 2 + 1, [3, 5])


def test_a_whole_output_is_leased_and_takes_a_graph_per_step() -> None:
    """It lives as long as rows that are views, so a replay must not overwrite it."""
    model = plain(lambda self, x, n: (self.toy(x, n)["audio"], x.sum(1)), toy=Toy())
    run = compiled(model, "simulated", depth=2, copies={"audio": "host"})
    first, second = batch((3, 5)), batch((3, 5))
    a, b = run.launch(*first), run.launch(*second)
    assert num_instances(run) == 2
    for step, (x, _) in ((a, first), (b, second)):
        rows, total = step.result()
        assert values(rows) == cut(x * 2 + 1, [3, 5])
        assert total.equal(x.sum(1))


def test_an_image_and_its_upsampled_twin() -> None:
    span = Span(dims=(-2, -1))

    class Image(nn.Module):
        def spanned_outputs(self, walk: str) -> dict[str, Span]:
            return {"image": span}

        def forward(self, x: Tensor, spans: Tensor) -> Any:
            y = x + 1
            twice = F.interpolate(y, scale_factor=2.0, mode="nearest")
            return SpannedOutput({"image": y, "twice": twice}, {"image": spans * 1})

    run = compiled(Image(), "simulated", "export", copies={"image": "host"})
    x = torch.randn(2, 3, 4, 6)
    spans = torch.tensor([[[1, 3], [2, 6]], [[0, 4], [5, 5]]])
    with run.launch(x, spans) as step:
        out = step.result().outputs
        assert list(out["image"]) == list(out["twice"]) == [0]
        assert out["image"][0].equal(x[0, :, 1:3, 2:6] + 1)
        assert out["twice"][0].equal(F.interpolate(x + 1, scale_factor=2.0)[0, :, 2:6, 4:12])


def test_unused_spanned_helpers_stay_importable() -> None:
    """`spanned` modules without spans stage nothing: copies of what they declare do nothing either."""
    run = compiled(spanned(lambda self, x: SpannedOutput({"audio": x + 1})), "simulated", copies={"audio": "host"})
    x = torch.randn(2, 3)
    assert run(x).outputs["audio"].equal(x + 1)
