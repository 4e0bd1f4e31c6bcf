"""`SpanStager` with captures of one's own: buckets, pools, threads, and what it refuses."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spangraph
from spangraph import (
    DeclarationError,
    InlineBackend,
    InputError,
    RingFullError,
    Span,
    SpannedOutput,
    SpanStager,
    Tail,
    from_lengths,
)
from spangraph.testing import Pool, SimulatedDevice, SimulatedGraph

from .rig import Batch, Engine, assert_rows


class Vocoder(nn.Module):
    """Three samples per frame; the token is what the step adds to the request's state."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(1))

    def forward(self, mel: Tensor, frames: Tensor) -> SpannedOutput:
        audio = (mel * self.gain).repeat_interleave(3, -1)
        return SpannedOutput({"audio": audio}, {"audio": from_lengths(frames * 3)}, {"token": frames * 7})


class Runner:
    """An engine's model runner: one graph per bucket, the largest captured first, into one pool if given."""

    def __init__(self, device: SimulatedDevice, *, depth: int = 1, pool: Pool | None = None, width: int = 4) -> None:
        self.device, self.model = device, Vocoder()
        self.stager = SpanStager({"audio": Span()}, max_rows=8, row_values=["token"], depth=depth, device=device)
        self.mel, self.frames = torch.zeros(8, width), torch.zeros(8, dtype=torch.int64)
        self.graphs: dict[int, tuple[SimulatedGraph, Tail]] = {}
        for bs in (8, 4, 2, 1):
            graph = device.new_graph()
            with device.graph(graph, pool=pool):
                tail = self.stager.stage(self.model(self.mel[:bs], self.frames[:bs]))
            self.graphs[bs] = graph, tail

    def launch(self, mel: Tensor, frames: Tensor, ids: Any = None) -> spangraph.Step:
        num_rows = len(mel)
        graph, tail = self.graphs[next(bs for bs in (1, 2, 4, 8) if bs >= num_rows)]

        def feed() -> None:
            self.mel[:num_rows].copy_(mel)
            self.frames[:num_rows].copy_(frames)

        with tail.step(ids, num_rows=num_rows) as step:
            self.device.launch(feed)
            graph.replay()
        return step

    def expected(self, mel: Tensor, frames: Tensor, ids: Any = None) -> dict[Any, Tensor]:
        audio = (mel * self.model.gain.detach()).repeat_interleave(3, -1)
        names = range(len(mel)) if ids is None else ids
        return {name: audio[i, : 3 * int(n)] for i, (name, n) in enumerate(zip(names, frames, strict=True)) if n}


def test_buckets_share_one_stager() -> None:
    """Real batches of every size up to the largest bucket, in any order; padding rows hold the last batch's values."""
    runner = Runner(SimulatedDevice())
    for num_rows in [8, 1, 5, 3, 2, 8, 4, 7, 6, 1]:
        mel, frames = torch.randn(num_rows, 4), torch.randint(0, 5, (num_rows,))
        ids = [f"req-{i}" for i in range(num_rows)]
        with runner.launch(mel, frames, ids) as step:
            assert_rows(step.rows("audio"), runner.expected(mel, frames, ids))
            assert torch.equal(step.row_values("token"), frames * 7)


def test_steps_of_two_buckets_in_flight() -> None:
    runner = Runner(SimulatedDevice(), depth=2)
    small, large = (torch.randn(1, 4), torch.tensor([3])), (torch.randn(6, 4), torch.tensor([1, 0, 4, 2, 2, 3]))
    runner.device.hold()
    steps = runner.launch(*large), runner.launch(*small)
    runner.device.resume()
    assert_rows(steps[1].rows(), runner.expected(*small))
    assert_rows(steps[0].rows(), runner.expected(*large))


def test_memory_of_its_own_keeps_a_graph_s_rows() -> None:
    """K38: capture A, capture B, launch A, launch B, read A as views: without a shared pool A's rows are intact."""
    runner = Runner(SimulatedDevice(), depth=2)
    first, second = (torch.randn(4, 4), torch.tensor([4, 1, 2, 3])), (torch.randn(8, 4), torch.full((8,), 4))
    step = runner.launch(*first)
    later = runner.launch(*second)
    later.wait()
    assert_rows(step.rows(), runner.expected(*first))


def test_a_shared_pool_needs_one_step_at_a_time() -> None:
    """K38, the mirrored case: in one pool the second launch would overwrite the first one's views: it is refused."""
    runner = Runner(SimulatedDevice(), depth=2, pool=Pool())
    first, second = (torch.randn(4, 4), torch.tensor([4, 1, 2, 3])), (torch.randn(8, 4), torch.full((8,), 4))
    step = runner.launch(*first)
    with pytest.raises(RingFullError, match="a graph in the same memory pool are still leased by step 1"):
        runner.launch(*second)
    view, owned = step.rows()[0], step.rows().own()
    assert_rows(step.rows(), runner.expected(*first))
    step.release()
    assert_rows(runner.launch(*second).rows(), runner.expected(*second))
    assert_rows(owned, runner.expected(*first))
    assert isinstance(view, Tensor)
    assert view.isnan().all()  # the simulated device is as hostile as a pool whose graphs do overlap


def test_two_runners_on_threads_share_a_device() -> None:
    device = SimulatedDevice()
    runners = Runner(device), Runner(device)
    ready = threading.Barrier(2)

    def serve(runner: Runner) -> None:
        ready.wait()
        with device.use_stream(device.new_stream()):
            for _ in range(25):
                num_rows = int(torch.randint(1, 9, ()))
                mel, frames = torch.randn(num_rows, 4), torch.randint(0, 5, (num_rows,))
                with runner.launch(mel, frames) as step:
                    assert_rows(step.rows(), runner.expected(mel, frames))

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(serve, runner) for runner in runners]:
            future.result()


def test_a_stager_on_the_inline_backend() -> None:
    """The same code without a device: a replay calls the captured function again, and it finds its tail."""
    backend = InlineBackend()
    stager = SpanStager({"audio": Span()}, max_rows=4, row_values=["token"], device=backend)
    model, mel, frames = Vocoder(), torch.zeros(4, 5), torch.zeros(4, dtype=torch.int64)
    graph, tail = backend.capture(lambda: stager.stage(model(mel, frames)))
    other, other_tail = backend.capture(lambda: stager.stage(model(mel[:1], frames[:1])))
    for _ in range(6):
        mel.copy_(torch.randn(4, 5))
        frames.copy_(torch.randint(0, 6, (4,)))
        audio = (mel * model.gain.detach()).repeat_interleave(3, -1)
        expected = {i: audio[i, : 3 * n] for i, n in enumerate(frames.tolist()) if n}
        with tail.step() as step:
            graph.replay()
        with step:
            assert_rows(step.rows(), expected)
            assert torch.equal(step.row_values("token"), frames * 7)
        with other_tail.step(["one"]) as step:
            other.replay()
        with step:
            assert_rows(step.rows(), {"one": expected[0]} if 0 in expected else {})


def test_the_host_writes_nothing_into_a_slot() -> None:
    """K14: a reset of a slot during an in-flight copy: a slot has one writer, the device."""
    engine = Engine(depth=1)
    memory = engine.stager._buffer.memory
    engine.device.hold_copies()
    step = engine.launch(batch := Batch.random())
    memory.host[:, 1].fill_(-5)  # the reserved word, which nobody writes
    before = memory.host.clone()
    step.release()
    second = engine.launch(Batch.random())
    second.release()
    engine.ring._reap()
    assert torch.equal(memory.host, before)
    engine.device.land_copies()
    with engine.launch(batch) as step:
        assert_rows(step.rows(), batch.rows())


# ---- one graph per slot --------------------------------------------------------------------------------------------


def test_the_plain_copy_takes_one_graph_per_slot() -> None:
    with pytest.raises(InputError, match=r"depth 2 bakes the slot into the graph.*stage\(slot=0\.\.1\), got None"):
        Engine(depth=2, staging="copy").stager.stage(output())
    with pytest.raises(InputError, match=r"stage\(slot=0\.\.1\), got 2"):
        Engine(depth=2, staging="copy").stager.stage(output(), slot=2)
    with pytest.raises(InputError, match="slot= is for staging='copy': the kernel's slot is chosen at each launch"):
        Engine().stager.stage(output(), slot=0)
    with pytest.raises(InputError, match="staging='memcpy': expected 'kernel' or 'copy'"):
        Engine(staging="memcpy")
    Engine(depth=1, staging="copy").stager.stage(output())  # depth 1 has one slot: nothing to say


def test_the_plain_copy_s_slot_is_taken_with_its_graph() -> None:
    engine = Engine(depth=2, staging="copy")
    batch = Batch.random()
    step = engine.launch(batch, lane=1)
    with pytest.raises(RingFullError, match="still leased by step 1"):
        engine.launch(Batch.random(), lane=1)
    second = Batch.random()
    assert_rows(engine.launch(second, lane=0).rows(), second.rows())
    assert_rows(step.rows(), batch.rows())


# ---- what is refused -----------------------------------------------------------------------------------------------


def output(**changes: Any) -> SpannedOutput:
    """What `Engine`'s stager takes, with some fields replaced."""
    fields: dict[str, Any] = {
        "outputs": {"audio": torch.zeros(4, 6)},
        "output_spans": {"audio": torch.zeros(4, 2, dtype=torch.int64)},
        "row_values": {"token": torch.zeros(4, dtype=torch.int64)},
    }
    return SpannedOutput(**{**fields, **changes})


SPANS = torch.zeros(4, 2, dtype=torch.int64)
# One entry per check: names, shapes, dtypes, devices, numbers of rows.
REFUSED: list[tuple[str, Callable[[], Any], str]] = [
    ("an undeclared output", lambda: output(output_spans={"audio": SPANS, "video": SPANS}), "SG102 .*'video'"),
    ("spans without an output", lambda: output(outputs={}), "SG101 .*spans were given, but outputs holds NoneType"),
    ("spans of another shape", lambda: output(output_spans={"audio": SPANS[:, :1]}), r"SG103 .*expected \[4, 2\]"),
    ("spans of another dtype", lambda: output(output_spans={"audio": SPANS.int()}), "SG104 .*torch.int32"),
    ("spans on the host", lambda: output(output_spans={"audio": [[0, 1]] * 4}), "SG105 .*host list"),
    ("an undeclared row value", lambda: output(row_values={"stop": SPANS[:, 0]}), r"row values \['stop'\] are not"),
    ("a row value too wide", lambda: output(row_values={"token": SPANS}), r"shape \[4, 2\]: declared 1 per row"),
    ("a row value of no words", lambda: output(row_values={"token": SPANS[:, :0]}), r"shape \[4, 0\]: declared 1"),
    ("row values of fewer rows", lambda: output(row_values={"token": SPANS[:2, 0]}), "SG103 .*numbers of rows"),
    ("nothing at all", lambda: SpannedOutput(), "neither spans nor row values"),
    ("another class", lambda: {"audio": torch.zeros(4, 6)}, "got dict: expected a SpannedOutput"),
]


@pytest.mark.parametrize(("make", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_does_not_fit_the_declaration_is_refused(make: Callable[[], Any], message: str) -> None:
    engine = Engine()
    with pytest.raises(DeclarationError, match=message):
        engine.stager.stage(make())
    batch = Batch.random()
    assert_rows(engine.launch(batch).rows(), batch.rows())


def test_a_batch_larger_than_max_rows_is_refused() -> None:
    with pytest.raises(DeclarationError, match=r"a batch of 4 rows, but the stager has room for 3: raise\s+max_rows"):
        Engine(bs=3).stager.stage(output())


# Numbers of rows and words per row that nobody can mean, and a span that is no Span.
BAD_STAGERS: list[tuple[dict[str, Any], str]] = [
    ({"max_rows": 0}, "max_rows=0: expected the rows of the largest batch"),
    ({"max_rows": 2.0}, r"max_rows=2\.0"),
    ({"spans": {"audio": (-1,)}}, r"spans\['audio'\] is \(-1,\): expected a Span"),
    ({"row_values": {"token": 0}}, r"row_values\['token'\]=0: expected the int64 words of a row"),
    ({"row_values": ["audio"]}, r"\['audio'\] name both spanned outputs and row values"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_STAGERS)
def test_a_bad_declaration_of_a_stager_is_refused(changes: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"spans": {"audio": Span()}, "max_rows": 2, "device": SimulatedDevice(), **changes}
    with pytest.raises(InputError if "max_rows" in changes else DeclarationError, match=message):
        SpanStager(options.pop("spans"), **options)


def test_names_alone_declare_spans_along_the_last_dim() -> None:
    device, audio = SimulatedDevice(), torch.randn(2, 3)
    stager = SpanStager(["audio"], max_rows=2, device=device)
    graph = device.new_graph()
    with device.graph(graph):
        tail = stager.stage(SpannedOutput({"audio": audio * 1}, {"audio": torch.tensor([[0, 2], [1, 3]])}))
    with tail.step() as step:
        graph.replay()
    assert_rows(step.rows(), {0: audio[0, :2], 1: audio[1, 1:]})


def test_a_graph_may_stage_some_of_the_declared_outputs() -> None:
    device = SimulatedDevice()
    stager = SpanStager({"audio": Span(), "image": Span(dims=(-2, -1))}, max_rows=2, device=device)
    audio, image = torch.randn(2, 3), torch.randn(2, 3, 4)
    spans = {"audio": torch.tensor([[0, 2], [1, 3]]), "image": torch.tensor([[[0, 3], [1, 2]], [[1, 2], [0, 4]]])}
    graph = device.new_graph()
    with device.graph(graph):
        tail = stager.stage(SpannedOutput({"image": image * 1}, {"image": spans["image"]}), names=["image"])
        with pytest.raises(DeclarationError, match=r"SG101 .*returned spans for"):
            stager.stage(SpannedOutput({"image": image}, {"image": spans["image"]}))
        with pytest.raises(DeclarationError, match=r"names=\['video'\] are not declared"):
            stager.stage(SpannedOutput({"image": image}, {"image": spans["image"]}), names=["video"])
    with tail.step() as step:
        graph.replay()
    assert_rows(step.rows(), {0: image[0, :3, 1:2], 1: image[1, 1:2]})

    graph = device.new_graph()
    with device.graph(graph):
        tail = stager.stage(SpannedOutput({"audio": audio * 1, "image": image * 1}, spans))
    step.release()
    with tail.step() as step:
        graph.replay()
    assert_rows(step.rows("audio"), {0: audio[0, :2], 1: audio[1, 1:]})
    assert_rows(step.rows("image"), {0: image[0, :3, 1:2], 1: image[1, 1:2]})
    with pytest.raises(spangraph.RowLookupError, match=r"several spanned outputs: name one of \['audio', 'im"):
        step.rows()
