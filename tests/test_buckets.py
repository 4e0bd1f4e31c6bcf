"""Buckets: which one a launch takes, what its padding holds, and that none of it surfaces."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import spangraph
from spangraph import Compiled, DeclarationError, InputError, SpannedOutput, TraceError
from spangraph.testing import SimulatedDevice

from .toys import Spanned, Toy, backend, plain, spanned, values

BACKENDS = pytest.mark.parametrize("on", ["inline", "simulated"])
TRACES = pytest.mark.parametrize("trace", ["export", "opaque"])
SIZES = {"batch": (1, 2, 4), "frames": (5, 10)}
DIMS = {"mel": {0: "batch", 2: "frames"}, "lengths": {0: "batch"}}


class Vocoder(Spanned):
    """`audio` has `hop` samples a frame; `loud` derives from it; `energy` [bs] and `spans` are delivered whole."""

    hop = 3

    def forward(self, mel: Tensor, lengths: Tensor) -> SpannedOutput:
        audio = mel.mean(1).repeat_interleave(self.hop, -1)
        return self.spanned(audio, lengths * self.hop, loud=audio * 2, energy=lengths * 2)


class Voiced(Spanned):
    """Computes its spans: from the first to the last frame above 0."""

    def forward(self, mel: Tensor) -> SpannedOutput:
        y = mel.sum(1)
        return SpannedOutput({"audio": y}, {"audio": spangraph.from_mask(mel[:, 0] > 0)})


def bucketed(model: nn.Module, on: str = "inline", **options: Any) -> Compiled:
    return spangraph.compile(model, backend=backend(on), **{"buckets": SIZES, "dims": DIMS, **options})


def mels(bs: int, frames: int) -> tuple[Tensor, Tensor]:
    return torch.randn(bs, 2, frames), torch.randint(1, frames + 1, (bs,))


def buckets_of(run: Compiled) -> dict[str, int]:
    """Bucket -> launches, of those that were launched."""
    return {bucket: counts.launches for (_, bucket), counts in run.statistics().items() if counts.launches}


# ---- which bucket, and what comes back -------------------------------------------------------------------------------

# One row and all sizes of a bucket; at a bucket's edge, one below and one above it, in either dim.
LAUNCHES = [(1, 1), (1, 5), (2, 6), (2, 5), (3, 10), (4, 9), (4, 4), (3, 1)]


@BACKENDS
@TRACES
@pytest.mark.parametrize("copies", ["view", "host"])
def test_rows_of_the_smallest_bucket_that_fits(on: str, trace: str, copies: str) -> None:
    with bucketed(Vocoder(), on, trace=trace, depth=2, copies={"audio": copies}) as run:
        for bs, frames in LAUNCHES:
            mel, lengths = mels(bs, frames)
            ids = [f"request-{i}" for i in range(bs)]
            expected = Vocoder()(mel, lengths)
            with run.launch(mel, lengths, rows=ids) as step:
                result = step.result()
                ends = [3 * n for n in lengths.tolist()]
                cut = {i: row[:n].tolist() for i, row, n in zip(ids, expected["audio"], ends, strict=True)}
                assert values(step.rows()) == values(result["audio"]) == cut
                assert list(step.rows()) == ids
                assert torch.equal(result["energy"], expected["energy"])  # no row of the bucket's
                assert torch.equal(result.output_spans["audio"], expected.output_spans["audio"])
        named = [(next(b for b in SIZES["batch"] if b >= bs), 5 if frames <= 5 else 10) for bs, frames in LAUNCHES]
        assert set(buckets_of(run)) == {f"batch={b}, frames={f}" for b, f in named}


@BACKENDS
def test_spans_that_the_model_computes(on: str) -> None:
    run = bucketed(Voiced(), on, dims={"mel": {0: "batch", 2: "frames"}})
    mel = torch.tensor([[[-1.0, 2.0, 3.0, -1.0]], [[-1.0, -1.0, -1.0, -1.0]], [[5.0, 6.0, 7.0, 8.0]]])
    assert values(run(mel).outputs["audio"]) == {0: [2.0, 3.0], 2: [5.0, 6.0, 7.0, 8.0]}


@BACKENDS
def test_padding_holds_what_it_should(on: str) -> None:
    """The model sees a value per input, zeros by default, in every launch: also after one that filled more."""

    def forward(self: Spanned, x: Tensor, ids: Tensor, n: Tensor) -> SpannedOutput:
        sums = torch.stack([x.sum(), ids.sum()]).to(torch.int64)
        return SpannedOutput(
            {"audio": x}, {"audio": spangraph.from_lengths(n)}, {"sums": sums.expand(x.shape[0], 2).contiguous()}
        )

    run = spangraph.compile(
        spanned(forward),
        backend=backend(on),
        buckets={"batch": (4,), "width": (8,)},
        dims={"x": {0: "batch", 1: "width"}, "ids": {0: "batch", 1: "width"}, "n": {0: "batch"}},
        pad_values={"ids": -100},
    )
    for bs, width in [(4, 8), (1, 1), (3, 5), (2, 8), (4, 2)]:
        x, ids = torch.ones(bs, width), torch.full((bs, width), 7)
        with run.launch(x, ids, torch.full((bs,), width)) as step:
            filled = bs * width
            assert step.row_values("sums").tolist() == [[filled, 7 * filled - 100 * (32 - filled)]] * bs


@BACKENDS
def test_padding_rows_never_surface(on: str) -> None:
    """K7: stale padding rows; K8: padding metadata counted as real: real 1 in a bucket of 4, after a full one."""
    run = spangraph.compile(
        Toy(), backend=backend(on), buckets={"batch": (4,)}, pad_values={"lengths": 5, "x": math.nan}
    )
    x = torch.randn(4, 5)
    assert len(run(x, torch.tensor([5, 5, 5, 5])).outputs["audio"]) == 4
    with run.launch(x[:1], torch.tensor([3]), rows=["only"]) as step:
        assert values(step.rows()) == {"only": (x * 2 + 1)[0, :3].tolist()}
        assert step.rows().row_ids == ("only",)
        assert step.result().output_spans["audio"].tolist() == [[0, 3]]


@BACKENDS
def test_rows_of_the_callers_own_padding(on: str) -> None:
    run = bucketed(Vocoder(), on)
    mel, lengths = mels(3, 5)
    with run.launch(mel, lengths, rows=["a", "b"], num_rows=2) as step:
        assert list(step.rows()) == ["a", "b"]
        assert step.result()["energy"].shape == (2,)
    with pytest.raises(InputError, match=r"2 row ids for 3 real rows.*batch's 3 rows"):
        run.launch(mel, lengths, rows=["a", "b"])
    with pytest.raises(InputError, match="num_rows=4 of a batch of 3 rows"):
        run.launch(mel, lengths, num_rows=4)


@BACKENDS
def test_an_empty_batch(on: str) -> None:
    run = bucketed(Vocoder(), on)
    with run.launch(torch.randn(0, 2, 4), torch.zeros(0, dtype=torch.int64), rows=[]) as step:
        assert dict(step.rows()) == {}
        assert step.result()["energy"].shape == (0,)


def test_inputs_that_are_not_named_are_taken_as_they_are() -> None:
    """A table beside the batch; and inputs in a structure, by their paths."""

    def forward(self: Spanned, batch: dict[str, Tensor], table: Tensor) -> SpannedOutput:
        return self.spanned(batch["x"] @ table, batch["n"])

    dims = {"batch.x": {0: "batch"}, "batch.n": {0: "batch"}}
    run = spangraph.compile(spanned(forward), buckets={"batch": (2, 4)}, dims=dims)
    x, table = torch.randn(3, 5), torch.randn(5, 6)
    rows = run({"x": x, "n": torch.tensor([6, 2, 1])}, table).outputs["audio"]
    padded = torch.cat([x, torch.zeros(1, 5)]) @ table
    assert values(rows) == {0: padded[0].tolist(), 1: padded[1, :2].tolist(), 2: padded[2, :1].tolist()}


class Pair:
    """Registered without keys."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first, self.second = first, second


def test_inputs_in_a_class_without_keys_are_counted() -> None:
    pytree.register_pytree_node(Pair, lambda p: ([p.first, p.second], None), lambda tensors, _: Pair(*tensors))
    model = spanned(lambda self, pair, n: self.spanned(pair.first + pair.second, n))
    for dims in (None, {"pair[0]": {0: "batch"}, "pair[1]": {0: "batch"}, "n": {0: "batch"}}):
        run = spangraph.compile(model, buckets={"batch": (4,)}, dims=dims)
        x = torch.randn(2, 3)
        assert values(run(Pair(x, x), torch.tensor([3, 1])).outputs["audio"]) == values({0: x[0] * 2, 1: x[1, :1] * 2})


@BACKENDS
def test_a_table_of_as_many_rows_as_the_bucket_is_not_cut(on: str) -> None:
    """Where a graph shows that it depends on no input. The mirrored case: rows that are written into a buffer."""

    class Tables(Spanned):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(12.0).view(4, 3))
            self.register_buffer("cache", torch.zeros(4))

        def forward(self, mel: Tensor, lengths: Tensor) -> SpannedOutput:
            if len(mel) == 4:
                self.cache.copy_(mel.sum((1, 2)))
            outputs = {"table": self.table * 2, "constant": self.table, "cache": self.cache}
            return self.spanned(mel.mean(1), lengths, **outputs)

    run = bucketed(Tables(), on, trace="export")
    for bs in (3, 4):
        mel, lengths = mels(bs, 10)
        with run.launch(mel, lengths) as step:
            result = step.result().outputs
            assert [len(result[name]) for name in ("table", "constant", "cache")] == [4, 4, bs]
            assert torch.allclose(result["cache"], mel.sum((1, 2)))
            assert torch.equal(result["constant"] * 2, result["table"])


def test_a_whole_output_of_another_size_is_not_cut() -> None:
    def forward(self: Spanned, x: Tensor, n: Tensor) -> SpannedOutput:
        return self.spanned(x, n, table=x.sum(0), rows=x.sum(1))

    run = spangraph.compile(spanned(forward), buckets={"batch": (4,)})
    x = torch.ones(3, 7)
    out = run(x, torch.tensor([1, 1, 1]))
    assert out["table"].tolist() == [3.0] * 7
    assert out["rows"].tolist() == [7.0] * 3


def test_device_inputs_are_padded_in_stream_order() -> None:
    """What a replay has returned is on the device: it goes into the next launch's inputs without a host buffer."""
    device = SimulatedDevice()
    run = spangraph.compile(
        Toy(),
        backend=device,
        depth=2,
        buckets={"batch": (2, 4), "width": (6,)},
        dims={"x": {0: "batch", 1: "width"}, "lengths": {0: "batch"}},
    )
    graph = device.new_graph()
    source = torch.randn(3, 5)
    with device.graph(graph):
        x = source + 1
    run.warmup((source, torch.tensor([5, 5, 5])), progress=False)
    device.hold()
    graph.replay()
    step = run.launch(x, torch.tensor([5, 2, 1]))
    device.resume()
    rows = (source + 1) * 2 + 1
    assert values(step.rows()) == {0: rows[0].tolist(), 1: rows[1, :2].tolist(), 2: rows[2, :1].tolist()}


# ---- no bucket fits --------------------------------------------------------------------------------------------------


@BACKENDS
@TRACES
@pytest.mark.parametrize("copies", ["view", "host"])
def test_a_launch_that_fits_no_bucket_runs_eagerly(on: str, trace: str, copies: str) -> None:
    """With identical results: what derives from a spanned output is cut as in a graph."""
    model = Vocoder()
    with bucketed(model, on, trace=trace, depth=2, copies={"audio": copies}) as run:
        run(*mels(2, 5))
        for bs, frames in [(5, 5), (2, 11), (7, 13), (2, 11)]:
            mel, lengths = mels(bs, frames)
            expected = model(mel, lengths)
            with run.launch(mel, lengths, rows=[(i, "id") for i in range(bs)]) as step:
                result = step.result()
                for name in ("audio", "loud") if trace == "export" else ("audio",):
                    cut = {(i, "id"): expected[name][i, : 3 * n].tolist() for i, n in enumerate(lengths.tolist())}
                    assert values(result[name]) == cut
                assert torch.equal(result["energy"], expected["energy"])
        assert run.counts.reasons == {"not captured": 1, "batch above 4": 2, "frames above 10": 2}
        assert run.counts.misses == 5
        assert run.counts.captures == 1


# Where spans lie in `other` depends on the shape, so that no graph of another shape can say it: reversed; cropped and
# padded back to its width; one way or another as the number of rows says.
OTHERS: dict[str, Any] = {
    "flipped": lambda y: y.flip(-1),
    "cropped": lambda y: nn.functional.pad(y[..., :-1], (0, 1)),
    "cropped at 4": lambda y: nn.functional.pad(y[..., :4], (0, max(y.shape[-1] - 4, 0))),
    "by rows": lambda y: y.flip(-1) if y.shape[0] > 2 else y + 0,
}


@BACKENDS
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("launched_before", [True, False])
def test_what_derives_is_cut_in_an_eager_launch_as_in_a_graph_of_that_shape(
    on: str, other: str, launched_before: bool
) -> None:
    """Taken over from a graph of another shape, the places of spans were wrong here."""

    def forward(self: Spanned, x: Tensor, lengths: Tensor) -> SpannedOutput:
        y = x + 1
        return self.spanned(y, lengths, other=OTHERS[other](y))

    dims = {"x": {0: "batch", 1: "width"}, "lengths": {0: "batch"}}
    run = spangraph.compile(spanned(forward), backend=backend(on), buckets={"batch": (2,), "width": (4,)}, dims=dims)
    if launched_before:
        run(torch.randn(2, 4), torch.tensor([4, 4]))
    for bs, width in ((2, 7), (3, 4), (3, 7)):
        x, lengths = torch.randn(bs, width), torch.randint(1, width + 1, (bs,))
        exact = spangraph.compile(spanned(forward))(x, lengths).outputs["other"]
        assert values(run(x, lengths).outputs["other"]) == values(exact)
        assert len(exact) > 0


@BACKENDS
@pytest.mark.parametrize("captured_first", [True, False])
def test_models_of_other_rows_than_the_batch_are_refused_in_eager_launches_too(on: str, captured_first: bool) -> None:
    """More rows were lost, and fewer raised an IndexError."""
    for forward in (
        lambda self, x, n: self.spanned(torch.cat([x, x]), torch.cat([n, n])),
        lambda self, x, n: self.spanned(x[::2], n[::2]),
    ):
        run = spangraph.compile(spanned(forward), backend=backend(on), buckets={"batch": (2,)})
        for bs in (2, 4) if captured_first else (4,):
            with pytest.raises(DeclarationError, match=f"SG103 a batch of {bs} rows, but spans and row values of"):
                run(torch.randn(bs, 3), torch.ones(bs, dtype=torch.int64))


def test_padding_is_counted_where_nothing_is_staged() -> None:
    run = spangraph.compile(plain(lambda self, x: {"loss": x.sum(), "h": x.t() * 1}), buckets={"batch": (4,)})
    run(torch.randn(3, 50))
    assert (run.counts.rows, run.counts.padding_rows) == (3, 1)


@BACKENDS
def test_the_callers_padding_rows_leave_whole_outputs_in_eager_launches_too(on: str) -> None:
    run = bucketed(Vocoder(), on)
    for bs in (3, 6):
        mel, lengths = mels(bs, 5)
        with run.launch(mel, lengths, num_rows=2) as step:
            assert torch.equal(step.result()["energy"], lengths[:2] * 2)


@BACKENDS
@TRACES
def test_an_eager_launch_may_return_expanded_outputs(on: str, trace: str) -> None:
    """Memory for them was expanded, too, so that nothing could be copied into it."""

    def forward(self: Any, x: Tensor, n: Tensor) -> SpannedOutput:
        return self.spanned(x[:, None].expand(-1, 3, -1), n, more=(x + 1)[:, None].expand(-1, 2, -1))

    run = spangraph.compile(spanned(forward), backend=backend(on), trace=trace, buckets={"batch": (1,)})
    x, n = torch.randn(2, 4), torch.tensor([4, 2])
    for _ in range(2):
        x = x + 1
        outputs = run(x, n).outputs
        assert values(outputs["audio"]) == {i: x[i, :w].expand(3, -1).tolist() for i, w in enumerate([4, 2])}
        more = outputs["more"]
        assert (more if isinstance(more, Tensor) else more[0][None])[0].equal((x[0] + 1).expand(2, -1))


def test_the_first_launch_of_all_may_be_eager() -> None:
    run = bucketed(Vocoder(), "simulated")
    mel, lengths = mels(5, 3)
    rows = run(mel, lengths).outputs["loud"]
    loud = Vocoder()(mel, lengths)["loud"]
    assert values(rows) == {i: loud[i, : 3 * n].tolist() for i, n in enumerate(lengths.tolist())}


def test_eager_launches_share_the_models_state() -> None:
    """A counter goes on through hits and misses; and a first eager run, which is watched, counts once."""

    def forward(self: Any, x: Tensor, n: Tensor) -> SpannedOutput:
        self.count += 1
        return self.spanned(x + self.count, n)

    for on in ("inline", "simulated"):
        model = spanned(forward, count=torch.zeros(()))
        run = spangraph.compile(model, backend=backend(on), buckets={"batch": (2,)})
        found = [
            run(torch.zeros(bs, 1), torch.ones(bs, dtype=torch.int64)).outputs["audio"][0] for bs in (1, 3, 2, 3, 4, 1)
        ]
        assert [row.item() for row in found] == [1, 2, 3, 4, 5, 6]


@BACKENDS
@pytest.mark.parametrize("depth", [1, 3])
def test_an_eager_launch_runs_the_forward_once(on: str, depth: int) -> None:
    """Counted on the host, where nothing is put back but by the watch: it ran once per graph in flight, too."""

    def forward(self: Any, x: Tensor, n: Tensor) -> SpannedOutput:
        self.calls = getattr(self, "calls", 0) + 1
        return self.spanned(x + self.calls, n)

    run = spangraph.compile(spanned(forward), backend=backend(on), depth=depth, buckets={"batch": (1,)})
    for number in range(1, 4):
        rows = run(torch.zeros(2, 1), torch.tensor([1, 1])).outputs["audio"]
        assert values(rows) == {0: [number], 1: [number]}


def test_eager_memory_stays_flat() -> None:
    """K35: sizes above the largest bucket, each another one."""
    run = spangraph.compile(Toy(), backend=SimulatedDevice(), buckets={"batch": (1,)})
    for bs in range(2, 40):
        run(torch.randn(bs, 3), torch.ones(bs, dtype=torch.int64))
    (graphs,) = set(run._walks.values())
    assert len(graphs._eager) <= 8
    assert run.statistics()["forward", "(eager)"].evictions == 38 - 8


@BACKENDS
def test_a_launch_that_fits_no_bucket_can_be_refused(on: str) -> None:
    run = bucketed(Vocoder(), on, on_miss="error")
    with pytest.raises(InputError, match="frames 11 is above 10, the largest bucket: add a larger one, or compile"):
        run(*mels(2, 11))
    assert run.counts.launches == 0
    run(*mels(2, 10))


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_random_lengths_leave_memory_flat() -> None:
    """K35: pinned buffers cached by exact shape grow without end: 1,000 steps of random lengths."""
    run = bucketed(Vocoder(), "simulated", depth=2)
    run.warmup(mels(1, 1), progress=False)
    pinned = set()
    for _ in range(1000):
        bs, frames = torch.randint(1, 5, ()).item(), torch.randint(1, 11, ()).item()
        run(*mels(int(bs), int(frames)))
        pinned.add(run.memory().pinned)
    assert max(pinned) - min(pinned) <= 6 * 2 * 4 * (10 * 2 + 1) * 8  # a host buffer per graph
    assert run.counts.hits == 1000
    (graphs,) = set(run._walks.values())
    assert len(graphs._known) <= 40


def test_known_shapes_are_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spangraph.walks._MAX_KNOWN_SHAPES", 3)
    run = bucketed(Vocoder())
    (graphs,) = set(run._walks.values())
    for bs, frames in itertools.product((1, 2, 3, 4), (1, 2, 3)):
        run(*mels(bs, frames))
        assert len(graphs._known) <= 3


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buckets": {}}, r"buckets=\{\}: expected a mapping such as"),
        ({"buckets": {"batch": ()}}, r"buckets\['batch'\]=\(\): expected different ints of at least 1"),
        ({"buckets": {"batch": (0, 1)}}, "expected different ints of at least 1"),
        ({"buckets": {"batch": (2, 2)}}, "expected different ints of at least 1"),
        ({"buckets": {"batch": 4}}, r"buckets\['batch'\]=4"),
        ({"buckets": {"batch": (True,)}}, "expected different ints"),
        ({"dims": None}, r"buckets of \['frames'\], but no dims="),
        ({"dims": {"mel": {0: "batch"}}}, r"buckets of \['frames'\], but no input has such a dim"),
        (
            {"dims": {"mel": {0: "rows"}}},
            r"has 0: 'rows': expected a dim from 0 up, and one of the buckets",
        ),
        ({"dims": {"mel": {-1: "frames"}}}, "has -1: 'frames': expected a dim from 0 up"),
        ({"buckets": None}, "dims= and pad_values= say how inputs are padded to buckets: pass buckets="),
        ({"on_miss": "pad"}, r"on_miss='pad': expected one of \['eager', 'error'\]"),
        ({"max_graphs": 0}, "max_graphs=0: expected an int of at least 1"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        bucketed(Vocoder(), **options)


def test_inputs_that_cannot_be() -> None:
    run = bucketed(Vocoder())
    with pytest.raises(InputError, match="'batch' is 2 in 'mel' and 3 in 'lengths': inputs of one"):
        run(torch.randn(2, 2, 5), torch.tensor([1, 1, 1]))
    with pytest.raises(InputError, match=r"dims\['mel'\] names dim 2 of a tensor of shape \[2, 5\]"):
        run(torch.randn(2, 5), torch.tensor([1, 1]))
    odd = spangraph.compile(Toy(), buckets={"batch": (2,)}, pad_values={"y": 1})
    with pytest.raises(InputError, match=r"pad_values= names \['y'\]: the forward was given the tensors"):
        odd(torch.randn(2, 5), torch.tensor([1, 1]))
    for value in (2.5, 2**70, True + 1j, "0"):
        wrong = spangraph.compile(Toy(), buckets={"batch": (2,)}, pad_values={"lengths": value})
        with pytest.raises(InputError, match=r"pad_values\['lengths'\]=.* is no value of torch.int64"):
            wrong(torch.randn(1, 5), torch.tensor([1]))
    assert run.counts.launches == odd.counts.launches == 0


def test_spans_of_other_rows_than_the_batch() -> None:
    def forward(self: Spanned, x: Tensor, n: Tensor) -> SpannedOutput:
        return self.spanned(torch.cat([x, x]), torch.cat([n, n]))

    run = spangraph.compile(spanned(forward), buckets={"batch": (4,)})
    with pytest.raises(DeclarationError, match="SG103 a batch of 4 rows, but spans and row values of 8"):
        run(torch.randn(3, 2), torch.tensor([1, 1, 1]))


def test_an_input_that_was_forgotten_is_named() -> None:
    run = spangraph.compile(Toy(), buckets={"batch": (4,)}, dims={"x": {0: "batch"}})
    with pytest.raises(
        DeclarationError, match=r"SG103 .*Inputs that dims= does not name are not padded: \['lengths'\]"
    ):
        run(torch.randn(2, 3), torch.tensor([1, 1]))


def test_a_model_without_spans() -> None:
    run = spangraph.compile(plain(lambda self, x: x + 1), buckets={"batch": (4,)})
    assert run(torch.zeros(3, 2)).tolist() == [[1.0, 1.0]] * 3


@BACKENDS
@TRACES
def test_a_model_that_writes_its_inputs_is_refused(on: str, trace: str) -> None:
    """Inline it wrote the caller's tensor where that fitted a bucket exactly, and a copy where it was padded."""
    run = spangraph.compile(
        spanned(lambda self, x, n: self.spanned(x.add_(1) * 2, n)),
        backend=backend(on),
        trace=trace,
        buckets={"batch": (2,)},
    )
    for bs in (1, 2, 3):
        with pytest.raises(TraceError, match=r"writes its tensor inputs \[0\] in place, but a (replay|padded launch)"):
            run(torch.zeros(bs, 3), torch.ones(bs, dtype=torch.int64))
