"""The operators of `torch.ops.spangraph`: dispatch, tracing, dead-code elimination; and the checks at build time."""

import importlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spangraph.kernels.ops
from spangraph.errors import InputError
from spangraph.kernels.stage import CONTROL_WORDS, HEADER_WORDS, check_stage_args, stage_copy, stage_ref

ops = torch.ops.spangraph


def _ints(*shape: int, device: str = "cpu") -> Tensor:
    return torch.zeros(*shape, dtype=torch.int64, device=device)


def _ring(*, num_slots: int = 3, words: int = 32, num_records: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    cursor = torch.zeros(1, dtype=torch.int64)
    slots = torch.randint(-9, 0, (num_slots, words))
    control = torch.zeros(num_records, CONTROL_WORDS, dtype=torch.int64)
    return cursor, slots, control


class Marked(nn.Module):
    """Returns nothing that depends on the marks, so that only their side effects keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        y = self.proj(x)
        spans = torch.stack([torch.zeros_like(lengths), lengths], dim=1)
        ops.mark(y, spans, "proj", "audio")
        ops.mark_value(lengths, "proj", "length")
        doubled: Tensor = y * 2
        return doubled


def _marked_inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 4), torch.tensor([1, 4, 2])


def _marks(graph: torch.fx.Graph) -> list[str]:
    """Names of the mark operators in order. Dynamo's graphs hold the packet, exported graphs its overload."""
    names = [str(node.target) for node in graph.nodes if str(node.target).startswith("spangraph.")]
    return [name.removeprefix("spangraph.").removesuffix(".default") for name in names]


def test_the_stage_operator_stages_a_record_and_ignores_its_absence() -> None:
    cursor, slots, control = _ring()
    columns = [torch.tensor([[1, 5], [0, 7], [9, 9]]), torch.tensor([40, 50, 60])]
    before = slots.clone()

    ops.stage(cursor, slots, control, columns, [2, 10], 6)
    assert torch.equal(slots, before)
    assert cursor.tolist() == [0]

    control[0] = torch.tensor([1, 2, 2, 6, -1])
    ops.stage(cursor, slots, control, columns, [2, 10], 6)
    assert slots[2].tolist() == [1, before[2, 1], 1, 5, 0, 7, 0, 0, *before[2, 8:10], 40, 50, 0, *before[2, 13:]]
    assert torch.equal(slots[:2], before[:2])
    assert cursor.tolist() == [1]


def test_the_stage_operator_with_a_mirror_copies_the_whole_slot() -> None:
    cursor, slots, control = _ring()
    mirror = slots[1].clone()
    slots[1, 31] = 12345  # not in the mirror: shows that it is the mirror that is copied
    control[0] = torch.tensor([1, 1, 1, 0, -1])

    ops.stage(cursor, slots, control, [torch.tensor([[1, 5], [0, 7]])], [2], 0, mirror, 1)
    assert slots[1].tolist() == [1, mirror[1], 1, 5, 0, 0, *mirror[6:]]
    assert slots[1, 31] != 12345
    assert cursor.tolist() == [1]


@pytest.mark.parametrize("with_mirror", [False, True])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_staging_works_in_every_grad_mode(context: Callable[[], torch.no_grad], with_mirror: bool) -> None:
    """K29: the ring is allocated outside inference mode and written inside, and the reverse is the next launch."""
    cursor, slots, control = _ring()
    control[0] = torch.tensor([1, 0, 3, 0, -1])
    control[1] = torch.tensor([2, 0, 3, 0, -1])
    mirror = slots[0].clone() if with_mirror else None
    with context():
        column = torch.tensor([7, 8, 9])
        ops.stage(cursor, slots, control, [column], [2], 0, mirror, 0)
    assert slots[0, [0, 2, 3, 4]].tolist() == [1, 7, 8, 9]
    ops.stage(cursor, slots, control, [column + 1], [2], 0, mirror, 0)
    assert slots[0, [0, 2, 3, 4]].tolist() == [2, 8, 9, 10]


def test_staging_under_fake_tensors_touches_no_memory() -> None:
    """A composite implementation ran under fake tensors, and failed on the first host read."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    cursor, slots, control = _ring()
    control[0] = torch.tensor([1, 0, 3, 0, -1])
    before = slots.clone()
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in (cursor, slots, control)]
        ops.stage(*fakes, [mode.from_tensor(torch.ones(3, 2, dtype=torch.int64))], [2], 0)
    assert torch.equal(slots, before)
    assert cursor.tolist() == [0]


def test_the_plain_copy_reads_nothing_on_the_host() -> None:
    """A host read breaks a capture. Tensors without data refuse one, as the reference shows."""
    cursor, slots, control = (tensor.to("meta") for tensor in _ring(words=32))
    columns = [_ints(3, 2, device="meta"), _ints(3, device="meta")]
    stage_copy(cursor, slots, control, columns, [2, 8], 5, _ints(32, device="meta"), 1)
    with pytest.raises(RuntimeError, match="meta tensors"):
        stage_ref(cursor, slots, control, columns, [2, 8], 5)


def test_staging_survives_a_trace_and_runs_once_per_call() -> None:
    """A traced graph holds one staging node, with the ring as constants, and dead-code elimination keeps it."""
    cursor, slots, control = _ring()
    control[:2] = torch.tensor([[1, 0, 3, 9, -1], [2, 1, 3, 9, -1]])

    class Tail(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            ops.stage(cursor, slots, control, [x + 1], [2], 9)
            return x * 2

    graph_module = torch.fx.symbolic_trace(Tail())
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    for generation, slot in ((1, 0), (2, 1)):
        x = torch.randint(100, (3,))
        assert torch.equal(graph_module(x), x * 2)
        assert slots[slot, [0, 2, 3, 4]].tolist() == [generation, *(x + 1).tolist()]
    assert cursor.tolist() == [2]


# One device that computes and one that does not; gradients on and off; the modes that change a tensor's dispatch keys.
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_marks_do_nothing(context: Callable[[], torch.no_grad], requires_grad: bool, device: str) -> None:
    with context():
        value = torch.randn(3, 4, device=device, requires_grad=requires_grad)
        spans = torch.zeros(3, 2, dtype=torch.int64)
        assert ops.mark(value, spans, "decoder", "audio") is None
        assert ops.mark(value * 2, spans.to(device), "decoder", "audio") is None
        assert ops.mark_value(value.to(torch.int64), "decoder", "token") is None


def test_a_marked_value_still_has_its_gradient() -> None:
    model, (x, lengths) = Marked(), _marked_inputs()
    model(x, lengths).sum().backward()
    assert model.proj.weight.grad is not None
    assert torch.allclose(model.proj.weight.grad, 2 * x.sum(0).expand(4, 4))


def test_marks_stay_in_an_exported_graph() -> None:
    model, inputs = Marked(), _marked_inputs()
    exported = torch.export.export(model, inputs, strict=False)
    assert _marks(exported.graph) == ["mark", "mark_value"]
    module = exported.module()
    assert isinstance(module, torch.fx.GraphModule)
    assert _marks(module.graph) == ["mark", "mark_value"]
    assert torch.equal(module(*inputs), model(*inputs))


# torch 2.13 copies pytree specs in a way that it deprecates itself.
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_marks_survive_decompositions_and_dead_code_elimination() -> None:
    """Functionalization and decompositions re-trace the graph, and each ends with dead-code elimination."""
    exported = torch.export.export(Marked(), _marked_inputs(), strict=False).run_decompositions()
    module = exported.module()
    assert isinstance(module, torch.fx.GraphModule)
    module.graph.eliminate_dead_code()
    assert _marks(module.graph) == ["mark", "mark_value"]


def test_a_mark_keeps_what_it_names_in_the_exported_graph() -> None:
    """The mark's arguments are the value that is delivered and the spans that were computed for it."""
    graph = torch.export.export(Marked(), _marked_inputs(), strict=False).graph
    mark = next(node for node in graph.nodes if str(node.target) == "spangraph.mark.default")
    value, spans, key, name = mark.args
    assert str(value.target) == "aten.linear.default"
    assert str(spans.target) == "aten.stack.default"
    assert (key, name) == ("proj", "audio")


# "eager" hands dynamo's graph over as it is; "aot_eager" functionalizes it first.
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_marks_pass_through_torch_compile(backend: str) -> None:
    from torch._dynamo.backends.registry import lookup_backend

    seen: list[str] = []

    def spy(graph_module: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., object]:
        graph_module.graph.eliminate_dead_code()
        seen.extend(_marks(graph_module.graph))
        compiled: Callable[..., object] = lookup_backend(backend)(graph_module, example_inputs)
        return compiled

    torch.compiler.reset()
    model, inputs = Marked(), _marked_inputs()
    compiled = torch.compile(model, backend=spy, fullgraph=True)
    assert torch.equal(compiled(*inputs), model(*inputs))
    assert seen == ["mark", "mark_value"]


# What torch itself demands of an operator: a schema that tells the truth about mutation, a fake that agrees, and a
# functionalized run with the same result.
@pytest.mark.parametrize("with_mirror", [False, True])
def test_torch_accepts_the_stage_operator(with_mirror: bool) -> None:
    cursor, slots, control = _ring()
    control[0] = torch.tensor([1, 0, 2, 5, -1])
    mirror = slots[0].clone() if with_mirror else None
    columns = [torch.tensor([[1, 5], [0, 7], [9, 9]]), torch.tensor([40, 50, 60])]
    torch.library.opcheck(ops.stage.default, (cursor, slots, control, columns, [2, 10], 5, mirror, 0))


def test_torch_accepts_the_marks() -> None:
    value, spans = torch.randn(3, 4), torch.zeros(3, 2, dtype=torch.int64)
    torch.library.opcheck(ops.mark.default, (value, spans, "decoder", "audio"))
    torch.library.opcheck(ops.mark_value.default, (spans, "decoder", "token"))


def test_a_second_import_registers_nothing_twice() -> None:
    cursor, slots, control = _ring()
    control[0] = torch.tensor([1, 0, 1, 0, -1])
    importlib.reload(spangraph.kernels.ops)
    ops.stage(cursor, slots, control, [torch.tensor([4])], [2], 0)
    assert slots[0, [0, 2]].tolist() == [1, 4]


def test_importing_leaves_triton_alone_and_works_without_it() -> None:
    code = """if True:
        import sys, torch
        import spangraph.kernels
        from spangraph.errors import StagingError
        from spangraph.kernels.stage import has_triton, stage
        assert not any(name.split(".")[0] == "triton" for name in sys.modules), "imported"

        sys.modules["triton"] = None
        has_triton.cache_clear()
        assert not has_triton()
        zeros = torch.zeros(2, 5, dtype=torch.int64)
        torch.ops.spangraph.stage(zeros[0, :1], zeros, zeros, [zeros[0]], [2], 0)
        try:
            stage(zeros[0, :1], zeros, zeros, [zeros[0]], [2], 0)
        except StagingError as error:
            assert "pip install spangraph[triton]" in str(error), error
        else:
            raise AssertionError("no error")
    """
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _check(**changes: Any) -> None:
    """Checks good arguments with `changes` made to them."""
    cursor, slots, control = _ring(num_slots=3, words=32)
    arguments: dict[str, Any] = {"cursor": cursor, "slots": slots, "control": control}
    arguments |= {"columns": [_ints(4, 2), _ints(4)], "offsets": [HEADER_WORDS, 10]}
    check_stage_args(**arguments | changes)


# As it is; the plain copy; columns in another order, up to the last word of a slot; not contiguous; and an empty batch.
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mirror": _ints(32), "slot": 2},
        {"offsets": [24, 2]},
        {"columns": [_ints(2, 4).t()], "offsets": [2]},
        {"columns": [_ints(0, 2), _ints(0)], "offsets": [2, 2]},
    ],
    ids=["plain", "mirror", "order", "strided", "empty"],
)
def test_good_arguments_pass_the_check(changes: dict[str, Any]) -> None:
    _check(**changes)


# One wrong thing each; every one of them would be misread in silence, or write out of bounds.
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cursor": torch.zeros(1, dtype=torch.int32)}, r"cursor is torch.int32, staging takes torch.int64"),
        ({"columns": [_ints(4, 2), torch.zeros(4)]}, r"columns\[1\] is torch.float32"),
        ({"cursor": _ints(2)}, r"cursor has shape \(2,\), expected \(1,\)"),
        ({"control": _ints(4, 3)}, r"control has shape \(4, 3\)"),
        ({"control": _ints(0, 4)}, r"control has shape \(0, 4\)"),
        ({"control": _ints(4, 8)[:, ::2]}, r"control is not contiguous"),
        ({"slots": _ints(32)}, r"slots has shape \(32,\)"),
        ({"slots": _ints(3, 64)[:, ::2]}, r"slots is not contiguous"),
        ({"slots": _ints(3, 32, device="meta")}, r"slots is on meta, expected host memory"),
        ({"columns": [_ints(4, 2), _ints(4, device="meta")]}, r"columns\[1\] is on meta, the cursor is on cpu"),
        ({"columns": [_ints(4, 2), _ints(3)]}, r"columns\[1\] has shape \(3,\), columns\[0\] has \(4, 2\)"),
        ({"columns": [_ints(4, 2), _ints(4)[0]]}, r"columns\[1\] has shape \(\)"),
        ({"columns": [], "offsets": []}, r"0 columns and 0 offsets"),
        ({"offsets": [2]}, r"2 columns and 1 offsets"),
        ({"offsets": [1, 10]}, r"columns\[0\] starts at word 1, inside the header, which ends at word 2"),
        ({"offsets": [2, 9]}, r"columns\[1\] starts at word 9, inside columns\[0\], which ends at word 10"),
        ({"offsets": [25, 2]}, r"columns\[0\] ends at word 33, a slot has 32 words"),
        ({"mirror": _ints(31)}, r"mirror has shape \(31,\), expected one slot's: \(32,\)"),
        ({"mirror": _ints(32, device="meta")}, r"mirror is on meta, the cursor is on cpu"),
        ({"mirror": _ints(32), "slot": 3}, r"slot is 3, the ring has slots 0 to 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_arguments_are_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _check(**wrong)


@pytest.mark.gpu
def test_pageable_host_memory_is_refused_beside_a_gpu() -> None:
    """K20: a copy into pageable memory is captured without an error, and lands as garbage."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    on_device: dict[str, Any] = {"cursor": _ints(1, device="cuda"), "columns": [_ints(4, 2, device="cuda")]}
    on_device["offsets"] = [2]
    with pytest.raises(InputError, match="slots is not pinned"):
        _check(**on_device)
    _check(**on_device, slots=_ints(3, 32).pin_memory(), control=_ints(4, CONTROL_WORDS).pin_memory())
