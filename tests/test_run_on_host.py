"""Graphs as they run on the calling thread, and how a launch finds its own by the kinds of its inputs."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import spangraph
from spangraph import SpannedOutput
from spangraph.passes.run_on_host import host_method

from .toys import backend

STAGE = torch.ops.spangraph.stage.default


class Ops(TorchDispatchMode):
    """Notes operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Voice(nn.Module):
    """Parameters at several depths, a buffer, spans and a row value."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6))])
        self.register_buffer("gain", torch.rand(6))

    def spanned_outputs(self, walk: str) -> tuple[str, ...]:
        return ("audio",)

    def forward(self, x: Tensor, lengths: Tensor) -> SpannedOutput:
        for layer in self.layers:
            x = layer(x)
        return SpannedOutput(
            {"audio": x * self.gain}, {"audio": spangraph.from_lengths(lengths)}, {"token": lengths + 1}
        )


def launch(compiled: spangraph.Compiled, *inputs: Any) -> tuple[list[Tensor], list[int]]:
    with torch.no_grad(), compiled.launch(*inputs) as step:
        return list(step.rows("audio").own().values()), step.row_values("token").tolist()


@pytest.mark.parametrize("staging", ["kernel", "copy"])
def test_steps_on_the_host_call_no_staging_operator(staging: str) -> None:
    """But where the slot is baked in; and they stage what the graph with the operator does."""
    model, x = Voice().eval(), torch.randn(3, 6)
    compiled = spangraph.compile(model, staging=staging)
    launch(compiled, x, torch.tensor([1, 2, 3]))
    (instance,) = compiled._by_key.values()[0].instances
    assert len(instance.gm.graph.find_nodes(op="call_function", target=STAGE)) == 1, "captures and reports need it"
    with Ops() as ops:
        rows, tokens = launch(compiled, x, torch.tensor([6, 0, 4]))
    assert (STAGE in ops.seen) is (staging == "copy")
    assert tokens == [7, 1, 5]
    with torch.no_grad():
        expected = model(x, torch.tensor([6, 0, 4]))["audio"]
    torch.testing.assert_close(rows, [expected[0], expected[2, :4]], rtol=0, atol=0)


def test_the_operator_and_the_function_stage_alike() -> None:
    compiled = spangraph.compile(Voice().eval(), depth=2)
    x = torch.randn(3, 6)
    launch(compiled, x, torch.tensor([1, 2, 3]))
    instance = compiled._by_key.values()[0].instances[0]
    with torch.no_grad():
        by_operator = spangraph.compile(Voice().eval())
        launch(by_operator, x, torch.tensor([1, 2, 3]))
        signature = by_operator._by_key.values()[0]
        signature.instances[0].forward = signature.instances[0].gm.forward
        for lengths in ([6, 0, 4], [1, 1, 1]):
            assert launch(by_operator, x, torch.tensor(lengths))[1] == launch(compiled, x, torch.tensor(lengths))[1]
    assert compiled._ring.cursor.item() == by_operator._ring.cursor.item() == 3
    instance.gm(x, torch.tensor([1, 2, 3]))
    assert compiled._ring.cursor.item() == 3, "a bare call is a dry run"


def test_what_a_graph_names_is_bound_once() -> None:
    """At any depth; a module that is called may hold what the graph reads, too, before or after."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    root = nn.Module()
    root.block = nn.ModuleDict({"0": Inner()})
    for called_first in (False, True):
        graph = fx.Graph()
        x = graph.placeholder("x")
        called = graph.call_module("block.0", (x,)) if called_first else None
        weight = graph.get_attr("block.0.weight")
        called = called or graph.call_module("block.0", (x,))
        graph.output((graph.call_function(torch.add, (called, weight)),))
        gm = fx.GraphModule(root, graph)
        before = dict(root.named_parameters())
        (out,) = host_method(gm)(torch.ones(3))
        assert torch.equal(out, 2 * root.block["0"].weight)
        assert all(value is before[name] for name, value in root.named_parameters())


def test_updates_in_place_are_followed() -> None:
    model, x, lengths = Voice().eval(), torch.randn(2, 6), torch.tensor([6, 6])
    compiled = spangraph.compile(model)
    launch(compiled, x, lengths)
    with torch.no_grad():
        model.layers[0].weight.mul_(2)
        model.gain.add_(1)
        rows, _ = launch(compiled, x, lengths)
        torch.testing.assert_close(torch.stack(rows), model(x, lengths)["audio"], rtol=0, atol=0)


# ---- kinds of inputs -------------------------------------------------------------------------------------------------


class Sub(Tensor):
    """A tensor that is none to a guard."""


class Double(nn.Module):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return x * 2 if y is None else x * 2 + y


OTHERS = {
    "shape": lambda: (torch.arange(12.0).view(3, 4),),
    "strides": lambda: (torch.arange(6.0).view(3, 2).t(),),
    "dtype": lambda: (torch.arange(6).view(2, 3),),
    "class": lambda: (torch.arange(6.0).view(2, 3).as_subclass(Sub),),
    "parameter": lambda: (nn.Parameter(torch.arange(6.0).view(2, 3)),),
    "grad": lambda: (torch.arange(6.0).view(2, 3).requires_grad_(),),
    "negative bit": lambda: (torch.view_as_complex(torch.arange(12.0).view(2, 3, 2)).conj().imag,),
    "conjugate bit": lambda: (torch.view_as_complex(torch.arange(12.0).view(2, 3, 2)).conj(),),
    "more": lambda: (torch.arange(6.0).view(2, 3), torch.ones(3)),
    "dims": lambda: (torch.tensor(2.0),),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_each_kind_of_input_finds_its_own_graph(other: str, mode: Any) -> None:
    """Also after many of one kind, which are then found without looking it up."""
    compiled, usual = spangraph.compile(Double()), torch.arange(6.0).view(2, 3)
    for _ in range(3):
        with mode():
            for _ in range(4):
                assert torch.equal(compiled(usual), usual * 2)
        inputs = OTHERS[other]()
        assert torch.equal(compiled(*inputs), Double()(*inputs).detach())
        assert torch.equal(compiled(x=usual, y=usual), usual * 3)
    assert compiled.counts.launches == 18
    assert compiled.counts.elements >= 3 * (4 + 2) * 6, "each launch counts its own"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("launches", [1, 4])
def test_a_nested_tensor_is_refused(launches: int) -> None:
    """Also where guards would look at it: theirs is an exception in C++ that ends the process."""
    compiled, usual = spangraph.compile(Double()), torch.ones(2, 3)
    for _ in range(launches):
        compiled(usual)
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=layout)
        with pytest.raises(spangraph.InputError, match="an input is nested or quantized"):
            compiled(nested)
    with pytest.raises(spangraph.InputError, match="an input is nested or quantized"):
        compiled(torch.quantize_per_tensor(usual, 0.1, 0, torch.qint8))
    assert torch.equal(compiled(usual), 2 * usual)


def test_vmap_reaches_owned_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPANGRAPH_DEBUG", "0")  # which looks at the memory of outputs
    compiled, lengths = spangraph.compile(Voice().eval()), torch.tensor([1, 2])

    def rows(x: Tensor) -> Tensor:
        return compiled(x, lengths).outputs["audio"][1]

    x = torch.randn(3, 2, 6)
    assert torch.equal(torch.vmap(rows)(x), torch.stack([rows(each) for each in x]))


@pytest.mark.parametrize("on", ["inline", "simulated"])
@pytest.mark.parametrize("where", ["view", "host", "device"])
def test_the_default_device_does_not_matter(on: str, where: str) -> None:
    """`torch.set_default_device("cuda")`: what the host reads is on the host."""
    model, x, lengths = Voice().eval(), torch.randn(3, 6), torch.tensor([1, 2, 3])
    rows: list[Tensor] = []
    with torch.device("meta"):
        compiled = spangraph.compile(model, backend=backend(on), copies={"audio": where})
        for _ in range(2):
            with torch.no_grad(), compiled.launch(x, lengths) as step:
                tokens, result = step.row_values("token"), step.result()
                rows = list(step.rows("audio").own().values())
                assert tokens.tolist() == result.row_values["token"].tolist() == [2, 3, 4]
                assert result.output_spans["audio"].tolist() == [[0, 1], [0, 2], [0, 3]]
    with torch.no_grad():
        expected = model(x, lengths)["audio"]
    assert [row.tolist() for row in rows] == [expected[i, : i + 1].tolist() for i in range(3)]


def test_a_model_without_inputs_finds_its_graph() -> None:
    class Constant(nn.Module):
        def forward(self) -> Tensor:
            return torch.ones(2)

    compiled = spangraph.compile(Constant())
    for _ in range(4):
        assert torch.equal(compiled(), torch.ones(2))
    assert (compiled.counts.hits, compiled.counts.misses) == (3, 1)


def test_a_dropped_graph_is_not_found_again() -> None:
    """By what remembers the last kind of inputs: evicted, closed."""
    compiled = spangraph.compile(Double(), max_graphs=1)
    narrow, wide = torch.ones(2, 3), torch.ones(2, 4)
    for _ in range(2):
        for x in (narrow, narrow, narrow, wide):
            assert torch.equal(compiled(x), x * 2)
    assert compiled.counts.evictions == 3
    compiled.close()
    with pytest.raises(spangraph.ClosedError):
        compiled(wide)
