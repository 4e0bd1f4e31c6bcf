"""`spangraph.compile` itself: options, signatures, inputs, errors on the way, and the end of a compiled object."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spangraph
from spangraph import (
    CaptureError,
    ClosedError,
    Compiled,
    DeclarationError,
    InputError,
    RingFullError,
    TraceError,
)
from spangraph.testing import SimulatedDevice

from .toys import Spanned, Toy, batch, compiled, cut, line_of, plain, spanned, tracer_of, values

TRACES = pytest.mark.parametrize("trace", ["export", "opaque"])
BACKENDS = pytest.mark.parametrize("on", ["inline", "simulated"])


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"trace": "fx"}, InputError, r"trace='fx': expected one of \['auto', 'export', 'dynamo', 'opaque'\]"),
        ({"verify": "no"}, InputError, r"verify='no': expected one of \['error', 'warn', 'off'\]"),
        ({"staging": "dma"}, InputError, "staging='dma': expected 'kernel' or 'copy'"),
        ({"wait": "poll"}, InputError, "wait='poll': expected 'block', 'spin' or 'header'"),
        ({"depth": 0}, InputError, "depth=0: expected an int of at least 1"),
        ({"depth": 1.5}, InputError, "depth=1.5"),
        ({"staging": "copy", "wait": "header"}, InputError, "wait='header' needs staging='kernel'"),
        ({"backend": "meta"}, InputError, "no backend for device meta"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        spangraph.compile(Toy(), **options)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(InputError, match=r"compile\(\) got function: expected an nn\.Module"):
        spangraph.compile(lambda x: x)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("forward", "name"),
    [
        (lambda self, x, rows=None: x, "rows"),
        (lambda self, x, *, num_rows: x, "num_rows"),
        (lambda self, wait: wait, "wait"),
        (lambda self, x, timeout=3: x, "timeout"),
    ],
)
def test_a_parameter_called_like_an_option_is_refused(forward: Any, name: str) -> None:
    with pytest.raises(InputError, match=rf"forward has parameters \['{name}'\], which launch\(\) takes itself"):
        spangraph.compile(plain(forward))


def test_the_backend_is_that_of_the_parameters() -> None:
    assert "inline" in repr(spangraph.compile(Toy()))
    with pytest.raises(InputError, match="no backend for device meta"):
        spangraph.compile(nn.Linear(2, 2, device="meta"))
    assert "inline" in repr(spangraph.compile(plain(lambda self, x: x)))


# ---- signatures ------------------------------------------------------------------------------------------------------


class Counted(Spanned):
    """Counts how often it is traced or run."""

    runs = 0

    def forward(self, x: Tensor, n: Tensor, scale: float = 2.0, *, shift: int = 0) -> Any:
        type(self).runs += 1
        return self.spanned(x * scale + shift, n)


@pytest.fixture
def counted() -> type[Counted]:
    return type("Counted", (Counted,), {"runs": 0})


@BACKENDS
def test_signatures_are_traced_when_they_are_first_launched(on: str, counted: type[Counted]) -> None:
    run = compiled(counted(), on, "export")
    assert counted.runs == 0
    assert "nothing launched yet" in run.explain()
    for lengths, width in [((3, 5), 5), ((1, 2), 5), ((1,), 5), ((3, 5), 6)]:
        x, n = batch(lengths, width)
        assert values(run(x, n)["audio"]) == cut(x * 2, lengths)
    assert counted.runs == 3
    x, n = batch((3, 5))
    assert values(run(x, n)["audio"]) == cut(x * 2, [3, 5])
    assert counted.runs == 3


def test_dtypes_make_signatures_too(counted: type[Counted]) -> None:
    run = compiled(counted(), trace="export")
    for dtype in (torch.float32, torch.float64, torch.float32):
        x = torch.ones(1, 2, dtype=dtype)
        assert run(x, torch.tensor([2]))["audio"][0].dtype is dtype
    assert counted.runs == 2


def test_calls_are_normalised(counted: type[Counted]) -> None:
    """`f(x, 3.0)` and `f(x=x, scale=3.0)` share a graph; another constant has its own."""
    run = compiled(counted(), trace="export")
    x, n = batch((3, 5))
    for call in (
        lambda: run(x, n, 3.0, shift=1),
        lambda: run(x, n=n, scale=3.0, shift=1),
        lambda: run(shift=1, scale=3.0, n=n, x=x),
    ):
        assert values(call()["audio"]) == cut(x * 3 + 1, [3, 5])
    assert counted.runs == 1
    assert values(run(x, n, 3.0, shift=2)["audio"]) == cut(x * 3 + 2, [3, 5])
    assert counted.runs == 2


def test_a_call_that_does_not_fit_the_forward_says_so() -> None:
    run = compiled(Toy())
    with pytest.raises(TypeError, match=r"the model's forward\(x.*lengths.*cannot be called like this: missing"):
        run.launch(torch.ones(2, 3))
    with pytest.raises(TypeError, match="unexpected keyword argument 'speed'"):
        run.launch(*batch(), speed=3)


@BACKENDS
def test_inputs_of_other_strides_and_kinds(on: str) -> None:
    """Strides, parameters and tensors that require grad are one signature; values are what counts."""
    run = compiled(Toy(), on)
    n = torch.tensor([3, 5])
    x = torch.randn(2, 5)
    for given in (x, x.T.contiguous().T, torch.randn(2, 10)[:, ::2], nn.Parameter(x), x.clone().requires_grad_()):
        assert values(run(given, n)["audio"]) == cut(given.detach() * 2 + 1, [3, 5])


@BACKENDS
@pytest.mark.parametrize("trace", ["export", "dynamo", "opaque"])
@pytest.mark.parametrize("buckets", [None, {"batch": (2,)}])
def test_a_graph_that_relies_on_strides_gets_those(on: str, trace: str, buckets: Any) -> None:
    """Export leaves out a contiguous() that does nothing; then view() failed for an input that needs it."""
    model = spanned(lambda self, x, n: self.spanned(x.contiguous().view(x.shape[0], -1) + 0, n))
    run = compiled(model, on, trace, buckets=buckets)
    dense, n = torch.randn(2, 3, 4), torch.tensor([12, 5])
    for x in (dense, torch.randn(2, 4, 3).transpose(1, 2), dense[:, :, :1].expand(2, 3, 4), dense):
        assert values(run(x, n)["audio"]) == cut(x.reshape(2, 12), [12, 5])
    first = compiled(model, on, trace, buckets=buckets)
    for x in (dense[:, :, :1].expand(2, 3, 4), dense):
        assert values(first(x, n)["audio"]) == cut(x.reshape(2, 12), [12, 5])


@BACKENDS
def test_inputs_may_be_overwritten_after_the_launch(on: str) -> None:
    """K41: host tensors go through a buffer of ours."""
    device = SimulatedDevice() if on == "simulated" else None
    run = spangraph.compile(Toy(), backend=device, depth=2)
    n = torch.tensor([3, 5])
    run(torch.zeros(2, 5), n)
    if device is not None:
        device.hold()
    x = torch.full((2, 5), 3.0)
    first = run.launch(x, n)
    x.fill_(4.0)
    second = run.launch(x, n)
    x.fill_(5.0)
    if device is not None:
        device.resume()
    assert first.rows()[0].tolist() == [7, 7, 7]
    assert second.rows()[0].tolist() == [9, 9, 9]


@pytest.mark.parametrize("known", [False, True])
def test_inputs_that_no_graph_can_take_are_refused(known: bool) -> None:
    """With a known signature a sparse tensor of its shape was taken for it."""
    run = compiled(plain(lambda self, x: x + 1))
    if known:
        run.launch(torch.ones(2, 3)).release()
    with pytest.raises(InputError, match=r"an input is on meta, the model runs on cpu: move it there"):
        run.launch(torch.ones(2, 3, device="meta"))
    with pytest.raises(InputError, match=r"layout torch.sparse_coo: expected a strided"):
        run.launch(torch.ones(2, 3).to_sparse())
    with pytest.raises(InputError, match="an input of type object can be neither copied in nor baked"):
        run.launch(object())
    assert run(torch.ones(2, 3)).eq(2).all()


def test_an_input_of_another_layout_is_refused_after_a_dense_one() -> None:
    """It has the strides, the type and the shape of the dense one, which was remembered."""
    run = compiled(plain(lambda self, audio, scale: audio * scale.sum()))
    scale = torch.ones(3)
    run(torch.ones(2, 4), scale)
    run(torch.ones(2, 4), scale)
    with pytest.raises(InputError, match=r"layout torch._mkldnn: expected a strided"):
        run(torch.ones(2, 4), scale.to_mkldnn())


# ---- models without spans, and explain() -----------------------------------------------------------------------------


@TRACES
@BACKENDS
def test_a_model_without_spans(trace: str, on: str) -> None:
    run = compiled(plain(lambda self, x: {"y": x + 1, "n": 3}), on, trace)
    x = torch.randn(2, 3)
    with run.launch(x, rows=["a", "b"]) as step:
        assert step.result()["y"].equal(x + 1)
        assert step.result()["n"] == 3
        assert step.row_ids == ("a", "b")
        with pytest.raises(KeyError, match="no spanned output"):
            step.rows()
    assert run(x)["y"].equal(x + 1)
    assert "no spans: nothing is staged" in run.explain()


@BACKENDS
def test_outputs_without_rows_and_models_without_inputs(on: str) -> None:
    model = plain(lambda self: (self.weight.sum(), self.weight * 2))
    model.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    run = compiled(model, on)
    total, doubled = run()
    assert total.item() == 3
    assert doubled.tolist() == [2, 4]
    with torch.no_grad():
        model.weight.mul_(2)
    assert run()[0].item() == 6


def test_explain_says_what_is_cut_by_whom() -> None:
    def forward(self: Any, x: Tensor, n: Tensor) -> Any:
        y = self.toy(x, n)["audio"]
        return {"wave": y[:, None], "raw": x + 1, "sorted": y.sort(1).values}

    run = compiled(plain(forward, toy=Toy()), "simulated", depth=2)
    run(*batch((3, 5)))
    run(*batch((3,)))
    text = run.explain()
    head, *lines = text.splitlines()
    assert head == "Plain, walk 'forward', backend simulated, depth 2"
    assert [line.strip() for line in lines if "signature" in line] == [
        "signature (float32[2, 5], int64[2])",
        "signature (float32[1, 5], int64[1])",
    ]
    assert "trace: export, captured" in text
    assert "2 instance(s)" in text
    assert f"audio: spanned (-1,), declared by toy ({line_of(Toy, 'def forward')})" in text
    assert "output wave: [2, 1, 5], cut by 'audio'" in text
    assert "output raw: [2, 5], delivered whole" in text
    assert f"{line_of(forward, 'sorted')}: SG203 output 'sorted' derives from 'toy.audio'" in text


# ---- errors on the way -----------------------------------------------------------------------------------------------


class Failing(Spanned):
    """Raises when it is told to."""

    fail = False

    def forward(self, x: Tensor, n: Tensor) -> Any:
        if self.fail:
            raise ValueError("no voice")
        return self.spanned(x * 2, n)


@TRACES
@BACKENDS
def test_a_forward_that_raises_at_its_first_launch_may_work_at_the_next(trace: str, on: str) -> None:
    """K27: nothing of the failed launch stays."""
    model = Failing()
    run = compiled(model, on, "auto" if trace == "export" else trace)
    x, n = batch((3, 5))
    model.fail = True
    for _ in range(2):
        with pytest.raises(ValueError, match="no voice"):
            run.launch(x, n)
    model.fail = False
    assert values(run(x, n)["audio"]) == cut(x * 2, [3, 5])
    assert tracer_of(run) == trace


def test_a_failing_export_names_the_forwards_error() -> None:
    model = Failing()
    model.fail = True
    with pytest.raises(TraceError, match=r"torch\.export failed: ValueError: no voice"):
        compiled(model, trace="export").launch(*batch())


@pytest.mark.parametrize("depth", [1, 3])
def test_a_forward_that_raises_in_a_step_leaves_later_steps_right(depth: int) -> None:
    """K43: inline and opaque the model itself runs at each step. Its error is the caller's; no row is shifted."""
    model = Failing()
    run = compiled(model, trace="opaque", depth=depth)
    x, n = batch((3, 5))
    assert values(run(x, n)["audio"]) == cut(x * 2, [3, 5])
    for lengths in ([1, 2], [0, 4], [5, 5]):
        model.fail = True
        with pytest.raises(ValueError, match="no voice"):
            run.launch(*batch(lengths), rows=["lost", "too"])
        model.fail = False
        x, n = batch(lengths)
        assert values(run(x, n)["audio"]) == cut(x * 2, lengths)


@TRACES
def test_a_failed_capture_may_be_tried_again(trace: str) -> None:
    device = SimulatedDevice()
    run = spangraph.compile(Toy(), backend=device, trace=trace, depth=2)
    device.fail_next("capture", CaptureError("not now"))
    x, n = batch((3, 5))
    with pytest.raises(CaptureError, match="not now"):
        run.launch(x, n)
    assert values(run(x, n)["audio"]) == cut(x * 2 + 1, [3, 5])


def test_a_declaration_error_in_one_step_leaves_later_steps_right() -> None:
    class Sometimes(Spanned):
        dtype = torch.int64

        def forward(self, x: Tensor, n: Tensor) -> Any:
            out = self.spanned(x * 2, n)
            out.output_spans = {"audio": out.output_spans["audio"].to(self.dtype)}
            return out

    model = Sometimes()
    run = compiled(model, trace="opaque")
    x, n = batch((3, 5))
    run(x, n)
    model.dtype = torch.int32
    with pytest.raises(DeclarationError, match="SG104"):
        run.launch(x, n)
    model.dtype = torch.int64
    assert values(run(x, n)["audio"]) == cut(x * 2, [3, 5])


# ---- the end ---------------------------------------------------------------------------------------------------------


@BACKENDS
def test_a_closed_object_refuses_launches_and_keeps_steps(on: str) -> None:
    x, n = batch((3, 5))
    with compiled(Toy(), on, depth=2) as run:
        assert isinstance(run, Compiled)
        step = run.launch(x, n)
    assert values(step.rows()) == cut(x * 2 + 1, [3, 5])
    step.release()
    for launch in (run.launch, run):
        with pytest.raises(ClosedError, match="compile the model again"):
            launch(x, n)
    run.close()
    with pytest.raises(ClosedError), run:
        run.launch(x, n)


def test_an_error_in_the_block_is_passed_on_and_closes() -> None:
    run = compiled(Toy())
    with pytest.raises(ZeroDivisionError), run:
        1 / 0  # noqa: B018
    with pytest.raises(ClosedError):
        run.launch(*batch())


@BACKENDS
def test_a_dropped_object_lets_go_of_its_model(on: str) -> None:
    """K19: no registry keeps models, graphs or rings alive."""
    model = Toy()
    gone = weakref.ref(model)
    run = compiled(model, on)
    rows = run(*batch((3, 5)))["audio"]
    del run, model
    gc.collect()
    assert gone() is None
    assert len(rows[0]) == 3


def test_a_full_ring_refuses_names_and_recovers() -> None:
    run = compiled(Toy(), "simulated", depth=2)
    x, n = batch((3, 5))
    first, second = run.launch(x, n, rows=["a", "b"]), run.launch(x + 1, n)
    with pytest.raises(RingFullError, match=r"depth=2 and 2 steps are open or leased: .*rows \['a', 'b'\]"):
        run.launch(x, n)
    with pytest.raises(RingFullError):
        run(x, n)
    first.release()
    assert values(run(x + 2, n)["audio"]) == cut((x + 2) * 2 + 1, [3, 5])
    assert values(second.rows()) == cut((x + 1) * 2 + 1, [3, 5])


def test_a_name_per_row_that_the_step_does_not_know() -> None:
    run = compiled(spanned(lambda self, x, n: self.spanned(x * 2, n)))
    with run.launch(*batch((3, 5))) as step:
        with pytest.raises(KeyError, match=r"no spanned output for 'audi'; this step has \['audio'\]"):
            step.rows("audi")
        with pytest.raises(KeyError, match=r"no row value 'token'; this step has \[\]"):
            step.row_values("token")
        with pytest.raises(KeyError, match=r"no row 7 in this step; its rows are \[0, 1\]"):
            step.rows()[7]
