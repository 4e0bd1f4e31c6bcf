"""Host reads: constants are folded, assertions erased, and what is left is refused with the line that reads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

import spangraph
from spangraph import HostReadError, TraceError, from_lengths
from spangraph.passes.host_reads import erase_assertions, find_host_reads, read_by, refuse_host_reads

from .toys import Spanned, Toy, batch, compiled, cut, line_of, plain, tracer_of, values

TRACES = pytest.mark.parametrize("trace", ["auto", "opaque"])
BACKENDS = pytest.mark.parametrize("on", ["inline", "simulated"])
aten = torch.ops.aten


# ---- constants -------------------------------------------------------------------------------------------------------


class Codec(Spanned):
    """As in codecs: paddings, kernel sizes and strides are 0-d buffers, which amounts are computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 4, stride=2)
        self.register_buffer("stride", torch.tensor(2))
        self.register_buffer("kernel", torch.tensor(4))
        self.register_buffer("padding", self.kernel - self.stride, persistent=False)

    def forward(self, x: Tensor, n: Tensor) -> Any:
        num_frames = torch.ceil((x.shape[-1] - self.kernel + self.padding) / self.stride + 1).to(torch.int64) - 1
        ideal = num_frames * self.stride + (self.kernel - self.padding)
        extra = ideal - x.shape[-1]
        y = self.conv(F.pad(x[:, None], (self.padding, extra)))
        if extra > 0:  # a guard at trace time
            y = y[..., : y.shape[-1] - int(self.stride)]
        return self.spanned(y[:, 0], n)


@BACKENDS
@pytest.mark.parametrize("width", [9, 10])
def test_amounts_from_constant_buffers_are_numbers_of_the_graph(width: int, on: str) -> None:
    """Reads of them, and a guard on one, stop the export; folded, the graph has static shapes and no read."""
    model = Codec()
    x, n = torch.randn(2, width), torch.tensor([1, 3])
    padded = model(x, n)["audio"].detach()
    run = compiled(model, on, "export")
    rows = run(x, n)["audio"]
    assert values(rows) == cut(padded, [1, 3])
    (signature,) = run._by_key.values()
    assert not find_host_reads(signature.prepared.gm)
    assert all(isinstance(size, int) for node in signature.prepared.results for size in node.meta["val"].shape)
    assert (model.stride.item(), model.kernel.item(), model.padding.item()) == (2, 4, 2)


@BACKENDS
def test_a_buffer_that_the_forward_writes_is_not_folded(on: str) -> None:
    """Its value is that of the step, through every name that it has."""

    def forward(self: Any, x: Tensor) -> Any:
        before = self.at * 1
        self.at.add_(self.by)
        return x + before, self.twin.at * 1, self.by * 1

    model = plain(forward, twin=nn.Module())
    model.register_buffer("at", torch.tensor(3))
    model.twin.register_buffer("at", model.at)
    model.register_buffer("by", torch.tensor(2))
    run = compiled(model, on, "export")
    for step in range(3):
        out, after, by = run(torch.zeros(1))
        assert (out.item(), after.item(), by.item()) == (3 + 2 * step, 5 + 2 * step, 2)


def test_a_read_of_a_buffer_that_is_written_stays_a_read() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.at.add_(1)
        return x[: self.at.item()]  # reads

    model = plain(forward)
    model.register_buffer("at", torch.tensor(0))
    with pytest.raises(HostReadError, match="SG401") as caught:
        compiled(model).launch(torch.ones(5))
    assert caught.value.diagnostics[0].where == line_of(forward, "# reads")
    assert model.at.item() == 0


def test_float_and_bool_buffers_are_not_folded() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.where(self.flag, x * self.gain, x)

    model = plain(forward)
    model.register_buffer("gain", torch.tensor(2.0))
    model.register_buffer("flag", torch.tensor(True))
    run = compiled(model, trace="export")
    assert run(torch.ones(2)).tolist() == [2, 2]
    model.gain.fill_(3.0)
    assert run(torch.ones(2)).tolist() == [3, 3]
    model.flag.fill_(False)
    assert run(torch.ones(2)).tolist() == [1, 1]


# ---- assertions ------------------------------------------------------------------------------------------------------


def _checked(self: Any, x: Tensor, n: Tensor) -> Any:
    torch._check(n.max().item() <= 5)
    torch._check((x * 1 == x).all().item())
    torch._check_tensor_all(x * 1 == x)
    return self.toy(x, n)["audio"] * 1


def test_reads_for_assertions_alone_are_erased() -> None:
    x, n = batch((3, 5))
    run = compiled(plain(_checked, toy=Toy()), "simulated", "export")
    assert values(run(x, n)) == cut(x * 2 + 1, [3, 5])
    (signature,) = run._by_key.values()
    names = {str(node.target) for node in signature.prepared.gm.graph.nodes}
    assert not any(name in "".join(names) for name in ("_assert", "item", "max", "eq.", "sym_"))


def test_a_read_that_also_feeds_an_assertion_is_left() -> None:
    """The mirrored case: here the value is used."""

    def forward(self: Any, x: Tensor) -> Tensor:
        size = x.sum().to(torch.int64).item()  # reads
        torch._check(size >= 0)
        torch._check(size <= 5)
        return torch.zeros(5) + size

    with pytest.raises(HostReadError) as caught:
        compiled(plain(forward)).launch(torch.ones(5))
    assert caught.value.diagnostics[0].where == line_of(forward, "# reads")


def test_erasing_nothing_returns_the_same_graph() -> None:
    gm = torch.export.export(plain(lambda self, x: torch.relu(x)), (torch.ones(2),)).module(check_guards=False)
    before = str(gm.graph)
    assert refuse_host_reads(erase_assertions(gm)) is gm
    assert str(gm.graph) == before


def test_erasing_keeps_what_others_depend_on() -> None:
    """Writes, draws from a generator, marks, and what their arguments need; all else goes with its assertion."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    used = graph.call_function(aten.mul.Tensor, (x, 2))
    written = graph.call_function(aten.neg.default, (x,))
    graph.call_function(aten.add_.Tensor, (written, used))
    graph.call_function(aten.rand_like.default, (x,))
    graph.call_function(aten.batch_norm.default, (x, None, None, x, x, True, 0.1, 1e-5, False))
    graph.call_function(aten.batch_norm.default, (x, None, None, x, x, False, 0.1, 1e-5, False))
    graph.call_function(torch.ops.spangraph.mark_value.default, (used, "", "v"))
    item = graph.call_function(aten.item.default, (graph.call_function(aten.sum.default, (x,)),))
    graph.call_function(aten._assert_scalar.default, (item, "message"))
    graph.output((used,))
    gm = erase_assertions(fx.GraphModule(nn.Module(), graph))
    targets = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert targets == [
        aten.mul.Tensor,
        aten.neg.default,
        aten.add_.Tensor,
        aten.rand_like.default,
        aten.batch_norm.default,
        torch.ops.spangraph.mark_value.default,
    ]


def test_graphs_that_the_user_brings_are_left_alone() -> None:
    """An opaque graph holds the model, and the model may hold graphs: their assertions were erased."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    item = graph.call_function(aten.item.default, (graph.call_function(aten.sum.default, (x,)),))
    graph.call_function(aten._assert_scalar.default, (item, "message"))
    graph.output(graph.call_function(aten.mul.Tensor, (x, 2)))
    own = fx.GraphModule(nn.Module(), graph)
    before = str(own.graph)
    run = compiled(plain(lambda self, x: self.own(x) + 1, own=own), trace="opaque", verify="off")
    assert run(torch.ones(2)).tolist() == [3, 3]
    assert str(own.graph) == before


# ---- what is refused -------------------------------------------------------------------------------------------------


def _mask(x: Tensor) -> Any:
    return x[x > 0]  # reads


def _masked_assignment(x: Tensor) -> Any:
    y = x.clone()
    y[x > 0] = x[0, 0] + x.new_zeros(int((x > 0).shape[0]))[:1].expand(3)  # reads
    return y


def _branch(x: Tensor) -> Any:
    return x * 2 if x.max() > 0 else x  # reads


def _truth(x: Tensor) -> Any:
    return x + 1 if torch.isnan(x).any() else x  # reads


def _item(x: Tensor) -> Any:
    return x[:, : int(x[0, 0].item())]  # reads


def _tolist(x: Tensor) -> Any:
    return x + x[0].tolist()[0]  # reads


def _numpy(x: Tensor) -> Any:
    return torch.from_numpy(x.numpy() * 2)  # reads


def _nonzero(x: Tensor) -> Any:
    return x.nonzero()  # reads


def _argwhere(x: Tensor) -> Any:
    return torch.argwhere(x > 0)  # reads


def _where(x: Tensor) -> Any:
    return torch.where(x > 0)[1]  # reads


def _unique(x: Tensor) -> Any:
    return torch.unique(x)  # reads


def _consecutive(x: Tensor) -> Any:
    return torch.unique_consecutive(x)  # reads


def _selected(x: Tensor) -> Any:
    return torch.masked_select(x, x > 0)  # reads


def _repeated(x: Tensor) -> Any:
    return torch.repeat_interleave(x[0], x[0].long())  # reads


def _repeats(x: Tensor) -> Any:
    return torch.repeat_interleave(x[0].long())  # reads


def _equal(x: Tensor) -> Any:
    return x + float(torch.equal(x, x * 1))  # reads


def _close(x: Tensor) -> Any:
    return x + float(torch.allclose(x, x * 1))  # reads


def _counted(x: Tensor) -> Any:
    return torch.bincount(x.long().flatten())  # reads


def _one_hot(x: Tensor) -> Any:
    return F.one_hot(x.long())  # reads


def _indexed(x: Tensor) -> Any:
    return x[0][x[0, 0].long()]  # reads


def _ranged(x: Tensor) -> Any:
    return torch.arange(x[0, 0].long())  # reads


def _spaced(x: Tensor) -> Any:
    return torch.linspace(0, x[0, 0], 3)  # reads


def _histogram(x: Tensor) -> Any:
    return torch.histc(x, 4)  # reads


def _drawn(x: Tensor) -> Any:
    return torch.normal(x, x.abs())  # reads


def _inverse(x: Tensor) -> Any:
    return torch.linalg.inv(x @ x.T + torch.eye(1))  # reads


def _istft(x: Tensor) -> Any:
    spectrum = torch.stft(x.repeat(1, 8), 8, window=torch.ones(8), return_complex=True)
    return torch.istft(spectrum, 8, window=torch.ones(8))  # reads


def _cond(x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x + 1, (x,))  # reads


READS = [
    _mask, _masked_assignment, _branch, _truth, _item, _tolist, _numpy, _nonzero, _argwhere, _where, _unique,
    _consecutive, _selected, _repeated, _repeats, _equal, _close, _counted, _one_hot, _indexed, _ranged, _spaced,
    _histogram, _drawn, _inverse, _istft, _cond,
]  # fmt: skip


@TRACES
@BACKENDS
@pytest.mark.parametrize("read", READS, ids=lambda read: read.__name__)
def test_a_read_is_refused_with_its_line(read: Callable[[Tensor], Any], trace: str, on: str) -> None:
    """K26: before anything is captured, and with the line that reads, in whatever function it is called from: an
    exported graph knows the lines of forwards alone."""
    with pytest.raises(HostReadError, match="SG401") as caught:
        compiled(plain(lambda self, x: read(x)), on, trace).launch(torch.tensor([[1.0, 2.0, 3.0]]))
    places = {diagnostic.where for diagnostic in caught.value.diagnostics}
    assert line_of(read, "# reads") in places
    assert all(diagnostic.rule == "SG401" for diagnostic in caught.value.diagnostics)
    assert line_of(read, "# reads") in str(caught.value)
    assert "verify='warn'" in str(caught.value)


def _fill(x: Tensor) -> Any:
    y = x.clone()
    y[~(x > 1)] = 0
    y[x > 2] = torch.tensor(7.0)
    return y


# The mirrored cases: masks as fills and choices, counts that are given, reductions that stay on the device.
KEPT = [
    _fill,
    lambda x: x.masked_fill(x > 1, 0),
    lambda x: torch.where(x > 1, x, 0),
    lambda x: x.masked_scatter(x > 1, x * 2),
    lambda x: torch.nonzero_static(x > 1, size=2),
    lambda x: torch.repeat_interleave(x, 2, dim=1),
    lambda x: torch.repeat_interleave(x[0], torch.tensor([1, 0, 2]), output_size=3),
    lambda x: torch.histc(x, 4, 0, 3),
    lambda x: torch.linspace(0, 3, 3) + x,
    lambda x: torch.normal(x, 1.0) * 0 + x,
    lambda x: x.clamp(x.min(), x.amax()),
    lambda x: x[:, [0, 2]],
    lambda x: x[:, torch.tensor([2, 0])],
    lambda x: x.index_select(1, x[0].argsort()),
    lambda x: x[: len(x), : x.shape[1] - 1],
    lambda x: torch.sort(x)[0].cumsum(1),
    lambda x: x.isnan().any().logical_not() * x,
]


@pytest.mark.parametrize("trace", ["export", "opaque"])
@pytest.mark.parametrize("keep", KEPT, ids=range(len(KEPT)))
def test_what_stays_on_the_device_is_no_read(keep: Callable[[Tensor], Any], trace: str) -> None:
    x = torch.tensor([[1.0, 2.0, 3.0]])
    run = compiled(plain(lambda self, x: keep(x)), "simulated", trace)
    assert run(x).equal(keep(x))
    assert run(x + 1).equal(keep(x + 1))


def test_all_reads_are_named_and_those_of_one_line_counted() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + x.max().item()  # first
        return x[x > 0]  # second

    with pytest.raises(HostReadError) as caught:
        compiled(plain(forward)).launch(torch.ones(2))
    message = str(caught.value)
    assert sum(diagnostic.count for diagnostic in caught.value.diagnostics) == 4
    assert message.index(line_of(forward, "# first")) < message.index(line_of(forward, "# second"))
    assert "(3x)" in message


def test_reads_inside_blocks_are_found() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x.float()[x[0] > 0]  # reads

    with pytest.raises(HostReadError) as caught:
        compiled(plain(forward), trace="export").launch(torch.ones(2, 2))
    assert caught.value.diagnostics[0].where == line_of(forward, "# reads")


def test_reads_by_spans_functions_are_reads_too() -> None:
    def spans(out: Tensor, x: Tensor) -> Tensor:
        return from_lengths(torch.full((2,), x.max().item()).long())  # reads

    model = spangraph.declare(nn.Linear(5, 5), audio=spans)
    with pytest.raises(HostReadError) as caught:
        compiled(model).launch(torch.ones(2, 5))
    assert line_of(spans, "# reads") in {diagnostic.where for diagnostic in caught.value.diagnostics}


# A mask may hide in every form of indexing; numbers and long tensors do not count anything.
@pytest.mark.parametrize(
    ("target", "args", "is_read"),
    [
        (aten.index.Tensor, (torch.ones(2), [torch.tensor([True, False])]), True),
        (aten.index.Tensor, (torch.ones(2), [None, torch.tensor([1, 0], dtype=torch.uint8)]), True),
        (aten.index.Tensor, (torch.ones(2), [torch.tensor([1, 0])]), False),
        (aten.index_put.default, (torch.ones(2), [torch.ones(2) > 0], torch.tensor(1.0)), False),
        (aten.index_put_.default, (torch.ones(2), [torch.ones(2) > 0], torch.ones(2)), True),
        (aten.index_put.default, (torch.ones(2), [torch.tensor([0])], torch.ones(1)), False),
        (aten.where.self, (torch.ones(2) > 0, torch.ones(2), torch.ones(2)), False),
        (aten.where.default, (torch.ones(2) > 0,), True),
        (aten.repeat_interleave.Tensor, (torch.tensor([1, 2]),), True),
        (aten.repeat_interleave.Tensor, (torch.tensor([1, 2]), 3), False),
        (aten.repeat_interleave.self_Tensor, (torch.ones(2), torch.tensor([1, 2]), 0), True),
        (aten.repeat_interleave.self_int, (torch.ones(2), 2), False),
        (aten.histc.default, (torch.ones(2), 4, 0, 0), True),
        (aten.histc.default, (torch.ones(2), 4, 0, 1), False),
        (aten.normal.Tensor_Tensor, (torch.ones(2), torch.ones(2)), True),
        (aten.normal.Tensor_float, (torch.ones(2), 1.0), False),
        (len, ([],), False),
    ],
)
def test_read_by(target: Any, args: Any, is_read: bool) -> None:
    assert (read_by(target, args, {}) is not None) is is_read


def test_copies_off_the_device_are_reads() -> None:
    """`.cpu()` is no operator of its own. On fake device tensors: a copy to the CPU waits, one to pinned memory that
    does not block is what staging does."""
    with FakeTensorMode():
        x, host = torch.empty(2, device="cuda"), torch.empty(2)
        cpu = torch.device("cpu")
        assert read_by(aten._to_copy.default, (x,), {"device": cpu})
        assert read_by(aten.to.device, (x, cpu, torch.float32), {})
        assert read_by(aten.to.other, (x, host), {})
        assert read_by(aten.copy_.default, (host, x), {})
        assert not read_by(aten.copy_.default, (host, x, True), {})
        assert not read_by(aten.copy_.default, (x, host), {})
        assert not read_by(aten._to_copy.default, (x,), {"dtype": torch.float64})
        assert not read_by(aten.to.device, (host, cpu, torch.float32), {})


# ---- verify="warn" and "off" -----------------------------------------------------------------------------------------


class Reading(Spanned):
    """Reads a value on the host, and makes its output by it."""

    def forward(self, x: Tensor, n: Tensor) -> Any:
        gain = x.abs().max().item()  # reads
        return self.spanned(x * gain, n)


@TRACES
@BACKENDS
def test_warn_runs_it_uncaptured_with_right_rows(trace: str, on: str) -> None:
    run = compiled(Reading(), on, trace, verify="warn", depth=2)
    with pytest.warns(UserWarning, match=r"running uncaptured: SG401") as caught:
        run.launch(*batch()).release()
    assert any(line_of(Reading, "# reads") in str(warning.message) for warning in caught)
    steps = []
    for lengths in ([3, 5], [1, 0]):
        x, n = batch(lengths)
        steps.append((run.launch(x, n), cut(x * x.abs().max(), lengths)))
    for step, expected in steps:
        assert values(step.rows("audio")) == expected
        step.release()
    assert tracer_of(run) == "opaque"
    assert line_of(Reading, "# reads") in run.explain()
    if on == "simulated":
        assert "uncaptured" in run.explain()


@TRACES
@BACKENDS
def test_off_runs_it_uncaptured_silently(trace: str, on: str) -> None:
    run = compiled(Reading(), on, trace, verify="off")
    for lengths in ([3, 5], [1, 0]):
        x, n = batch(lengths)
        assert values(run(x, n)["audio"]) == cut(x * x.abs().max(), lengths)


@BACKENDS
def test_an_output_whose_shape_depends_on_values(on: str) -> None:
    """Inline it is delivered as it is. A static output cannot hold it: a row of one value was broadcast over it."""
    run = compiled(plain(lambda self, x: x[x > 0]), on, verify="off")
    assert run(torch.tensor([1.0, -1.0, 2.0])).tolist() == [1, 2]
    if on == "inline":
        assert run(torch.tensor([-1.0, -1.0, 3.0])).tolist() == [3]
    else:
        with pytest.raises(TraceError, match=r"an output has shape \[1\], and had \[2\] at the trace"):
            run(torch.tensor([-1.0, -1.0, 3.0]))
    assert run(torch.tensor([1.0, 5.0, -2.0])).tolist() == [1, 5]


def test_verify_makes_no_difference_without_reads() -> None:
    x, n = batch((3, 5))
    for verify in ("error", "warn", "off"):
        run = compiled(Toy(), "simulated", verify=verify)
        assert values(run(x, n)["audio"]) == cut(x * 2 + 1, [3, 5])
        assert tracer_of(run) == "export"
        assert ", captured" in run.explain()
