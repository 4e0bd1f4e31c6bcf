"""`torch.compile` backends by name: they compile a graph up to its tail, which a capture records behind it."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spangraph
from spangraph import CudaBackend, InlineBackend, InputError, TraceError
from spangraph.tape import STAGE
from spangraph.testing import SimulatedDevice

from .compiler_rig import Recorder, recorded
from .fake_cuda import FakeCuda
from .toys import Spanned, Toy, batch, cut, plain, spanned, values
from .traced_models import CASES, assert_delivers, inputs

ON = pytest.mark.parametrize("on", ["inline", "simulated"])


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with recorded() as made:
        yield made


def backend(on: str, compiler: str) -> Any:
    return compiler if on == "inline" else SimulatedDevice(compiler=compiler)


class Cached(Spanned):
    """Keeps what it has seen in a cache, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("cache", torch.zeros(2, 4, 5))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor, n: Tensor) -> Any:
        self.cache.index_copy_(1, self.position, x[:, None])
        self.position.add_(1)
        return self.spanned(self.cache.sum(1) * self.weight, n, cache=self.cache)


# ---- the same rows ---------------------------------------------------------------------------------------------------


@ON
@pytest.mark.parametrize("case", CASES)
def test_rows_are_those_of_the_eager_output(case: str, on: str) -> None:
    model = CASES[case].make().eval()
    with spangraph.compile(model, backend=backend(on, "aot_eager"), depth=2) as run:
        first, second = inputs(), inputs()
        steps = run.launch(*first), run.launch(*second)
        for step, given in zip(steps, (first, second), strict=True):
            assert_delivers(step, CASES[case].expected(model, *given))
            step.release()
        assert "trace: export, compiled by aot_eager" in run.explain()


@ON
def test_derived_outputs_row_values_and_copies(on: str) -> None:
    def forward(self: Any, x: Tensor, n: Tensor) -> Any:
        out = self.spanned(x * 3, n, tail=(x * 3)[:, 1:])
        out.row_values = {"token": n * 10}
        return out

    run = spangraph.compile(spanned(forward), backend=backend(on, "aot_eager"), copies={"audio": "host"}, depth=2)
    x, n = batch((3, 5))
    for _ in range(3):
        x = x + 1
        with run.launch(x, n) as step:
            assert values(step.rows("audio")) == cut(x * 3, [3, 5])
            assert step.row_values("token").tolist() == [30, 50]
    assert run(x, n)["tail"].tolist() == (x * 3)[:, 1:].tolist()


@ON
def test_buffers_and_weights_are_the_models_own(on: str) -> None:
    """Each step counts once: neither the trace nor the compiler nor a warm-up counts."""
    model, twin = Cached(), Cached()
    run = spangraph.compile(model, backend=backend(on, "aot_eager"), depth=2)
    for i in range(4):
        x, n = batch((3, 5))
        expected = twin(x, n)
        out = run(x, n)
        assert values(out["audio"]) == cut(expected["audio"].detach(), [3, 5])
        assert out["cache"].equal(expected["cache"])
        assert model.position.item() == i + 1
        for weight in (model.weight, twin.weight):
            weight.data.add_(1)
    assert model.cache.equal(twin.cache)


def test_a_model_traced_by_dynamo_is_compiled_for_each_version(recorder: Recorder) -> None:
    model = spanned(lambda self, x, n: self.spanned(x * self.factor, n))
    run = spangraph.compile(model, trace="dynamo", backend=recorder.name)
    for factor in (2, 3, 2, 3):
        model.factor = factor
        x, n = batch((3, 5))
        assert values(run(x, n)["audio"]) == cut(x * factor, [3, 5])
    assert len(recorder.graphs) == 2


def test_autocast_and_inference_tensors() -> None:
    model, (x, n) = spanned(lambda self, x, n: self.spanned(self.linear(x), n)), batch((3, 5))
    model.linear = nn.Linear(5, 5)
    with torch.autocast("cpu"):
        expected = model(x, n)["audio"]
        assert values(spangraph.compile(model, backend="aot_eager")(x, n)["audio"]) == cut(expected, [3, 5])
    with torch.inference_mode():
        made = Toy()
    assert values(spangraph.compile(made, backend="aot_eager")(x, n)["audio"]) == cut(x * 2 + 1, [3, 5])


def test_inputs_of_other_strides() -> None:
    """Compiled code is made for the strides of its examples."""
    run, n = spangraph.compile(Toy(), backend="aot_eager"), torch.tensor([3, 5])
    for x in (torch.ones(1, 5).expand(2, 5), torch.randn(2, 5), torch.randn(5, 2).T, torch.randn(2, 10)[:, ::2]):
        assert values(run(x, n)["audio"]) == cut(x * 2 + 1, [3, 5])


# ---- what is compiled ------------------------------------------------------------------------------------------------


def _operators(recorder: Recorder) -> set[str]:
    return {str(node.target) for gm in recorder.graphs for node in gm.graph.nodes if node.op != "placeholder"}


def test_the_compiled_region_holds_all_but_the_tail(recorder: Recorder) -> None:
    device = SimulatedDevice(compiler=recorder.name)
    run = spangraph.compile(CASES["two submodules"].make(), backend=device, depth=3, copies={"talker.audio": "host"})
    for _ in range(4):
        run(*inputs())
    assert len(recorder.graphs) == 1  # for all instances
    assert not any("spangraph" in name for name in _operators(recorder))
    assert "aten.mul.Tensor" in _operators(recorder)
    (signature,) = run._by_key.values()
    for instance in signature.instances:
        outside = [str(node.target) for node in instance.gm.graph.nodes if node.op not in ("placeholder", "get_attr")]
        assert outside[0] == "body"
        assert not any("aten" in name for name in outside)
        assert outside[-2:] == ["spangraph.stage.default", "output"]


def test_a_tensor_is_given_to_the_compiler_once(recorder: Recorder) -> None:
    """One that two modules share, which the forward also writes."""
    model = plain(lambda self, x: (self.a.state.add_(1), x * self.b.state))
    model.a, model.b = nn.Module(), nn.Module()
    model.a.register_buffer("state", torch.zeros(2))
    model.b.register_buffer("state", model.a.state)
    run = spangraph.compile(model, backend=recorder.name)
    assert [run(torch.ones(2))[1].tolist() for _ in range(2)] == [[1, 1], [2, 2]]
    assert [len(given) for given, _ in recorder.calls] == [2, 2]


def test_staging_is_captured_behind_the_compiled_code(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, with fakes of its calls: what runs during the capture, in order."""
    cuda = FakeCuda()
    cuda.patch_tensors(monkeypatch)
    model = Cached()
    recorder.on_call = lambda: cuda.note("compiled code")
    run = spangraph.compile(model, backend=CudaBackend("cpu", cuda=cuda, compiler=recorder.name))
    twin = Cached()
    for i in range(3):
        x, n = batch((3, 5))
        assert values(run(x, n)["audio"]) == cut(twin(x, n)["audio"].detach(), [3, 5])
        assert model.position.item() == i + 1
    calls = [call[0] for call in cuda.calls("capture", "compiled code", "captured", "replay")]
    assert calls == ["compiled code", "capture", "compiled code", "captured", "replay", "replay", "replay"]
    (instance,) = next(iter(run._by_key.values())).instances
    captured = [op.func for op in instance.graph.captured._ops]  # type: ignore[union-attr]
    assert captured[-1] is STAGE
    assert torch.ops.aten.index_copy_.default in captured[:-1]
    assert "trace: export, compiled by" in run.explain()
    assert ", captured" in run.explain()


# ---- what is refused -------------------------------------------------------------------------------------------------


MAKERS = pytest.mark.parametrize(
    "make",
    [
        lambda name: spangraph.compile(Toy(), backend=name),
        lambda name: InlineBackend(compiler=name),
        lambda name: SimulatedDevice(compiler=name),
        lambda name: CudaBackend("cpu", cuda=FakeCuda(), compiler=name),
    ],
    ids=["compile", "inline", "simulated", "cuda"],
)


@MAKERS
def test_backends_that_capture_cuda_graphs_are_refused(make: Any) -> None:
    with pytest.raises(InputError, match="backend 'cudagraphs': it captures CUDA graphs itself, and would leave the"):
        make("cudagraphs")
    import torch._inductor.config

    with (
        torch._inductor.config.patch({"triton.cudagraphs": True}),
        pytest.raises(
            InputError, match=r"backend 'inductor': .* while torch\._inductor\.config\.triton\.cudagraphs is on"
        ),
    ):
        make("inductor")
    assert make("inductor") is not None


def test_a_backend_that_is_tagged_so_is_refused(recorder: Recorder) -> None:
    recorder._tags = ("cudagraphs",)  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="captures CUDA graphs itself"):
        spangraph.compile(Toy(), backend=recorder.name)


def test_inductors_setting_counts_when_it_compiles() -> None:
    import torch._inductor.config

    run = spangraph.compile(Toy(), backend="inductor")
    with (
        torch._inductor.config.patch({"triton.cudagraphs": True}),
        pytest.raises(InputError, match="captures CUDA graphs itself"),
    ):
        run.launch(*batch())


@MAKERS
def test_unknown_names_are_refused(make: Any) -> None:
    with pytest.raises(
        InputError, match=r"'induktor' is neither a device \(cpu, cuda\) nor .*torch\.compile.*inductor"
    ):
        make("induktor")


def test_a_stager_takes_no_compiler() -> None:
    """It has no graph to compile."""
    with pytest.raises(InputError, match="'eager' is none that torch knows"):
        spangraph.SpanStager(["audio"], max_rows=2, device="eager")


def test_an_opaque_trace_cannot_be_compiled() -> None:
    with pytest.raises(InputError, match="trace='opaque' and backend 'eager': an opaque trace is the model itself"):
        spangraph.compile(Toy(), trace="opaque", backend="eager")


def test_a_fall_back_to_an_opaque_trace_warns(recorder: Recorder) -> None:
    def forward(self: Any, x: Tensor, n: Tensor) -> Any:
        return self.spanned(torch.from_numpy(x.numpy() * 2), n)

    run = spangraph.compile(spanned(forward), backend=recorder.name, verify="off")
    x, n = batch((3, 5))
    with pytest.warns(UserWarning, match=r"runs uncompiled\. It is opaque because: "):
        assert values(run(x, n)["audio"]) == cut(x * 2, [3, 5])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(x, n)
    assert not recorder.graphs
    assert "compiled by" not in run.explain()


def test_a_compiler_that_fails_says_so_and_may_be_tried_again(recorder: Recorder) -> None:
    run = spangraph.compile(Toy(), backend=recorder.name)
    recorder.on_compile = lambda: 1 // 0
    x, n = batch((3, 5))
    with pytest.raises(TraceError, match=rf"backend '{recorder.name}' failed: ZeroDivisionError: integer division"):
        run.launch(x, n)
    recorder.on_compile = bool
    assert values(run(x, n)["audio"]) == cut(x * 2 + 1, [3, 5])


def test_a_forward_that_writes_its_inputs_is_refused() -> None:
    with pytest.raises(TraceError, match=r"writes its tensor inputs \[0\] in place, but compiled code has copies"):
        spangraph.compile(plain(lambda self, x: x.add_(1)), backend="eager").launch(torch.ones(2))
