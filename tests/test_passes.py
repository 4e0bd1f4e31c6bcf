"""Each pass on small graphs: what it changes, and that it returns the very same graph where it changes nothing."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import spangraph
from spangraph import DeclarationError, Span
from spangraph.passes.host_reads import erase_dead_nodes
from spangraph.passes.insert_staging import erase_marks, insert_staging_node
from spangraph.passes.marks import Mark, MarkInfo, find_marks, hoist_marks, public_names
from spangraph.passes.memory import isolate_outputs, snapshot_spans
from spangraph.passes.nodes import is_user_file, result_nodes, storage_roots, where, where_in, written
from spangraph.passes.plan_cuts import PlannedCut, deliver_values, plan_cuts
from spangraph.passes.prepare import prepare_graph

from .toys import line_of

ops, aten = torch.ops.spangraph, torch.ops.aten


class _Calls(nn.Module):
    """Runs a function with a buffer `state`."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn
        self.register_buffer("state", torch.zeros(2, 2, dtype=torch.int64))

    def forward(self, x: Tensor, s: Tensor) -> Any:
        return self.fn(x, s, self.state)


def export(fn: Callable[..., Any], width: int = 5) -> fx.GraphModule:
    """The flat graph of `fn(x [2, width], spans [2, 2], state [2, 2])`, run under no_grad as the tracer does it."""
    with torch.no_grad():
        exported = torch.export.export(_Calls(fn), (torch.randn(2, width), torch.ones(2, 2, dtype=torch.int64)))
        gm = exported.module(check_guards=False)
    gm.graph.set_codegen(fx.graph.CodeGen())
    gm.recompile()
    return erase_dead_nodes(gm)


def infos_of(gm: fx.GraphModule, **where: str) -> dict[tuple[str, str], MarkInfo]:
    """A MarkInfo for each mark, nested graphs included."""
    found = {}
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if node.target in (ops.mark.default, ops.mark_value.default):
                key, name = node.args[-2:]
                span = Span() if node.target is ops.mark.default else None
                found[key, name] = MarkInfo(key, key.split("[")[0], name, span, "model.py:7")
    return found


def marks_of(gm: fx.GraphModule) -> list[Mark]:
    return find_marks(gm, infos_of(gm))


def targets(graph: fx.Graph) -> list[str]:
    """Names of what is called, in order."""
    return [str(getattr(n.target, "__name__", n.target)).split(".")[0] for n in graph.nodes if n.op == "call_function"]


# ---- marks -----------------------------------------------------------------------------------------------------------


def test_marks_are_found_in_the_order_in_which_they_fire() -> None:
    def fn(x: Tensor, s: Tensor, state: Tensor) -> Any:
        y = x * 2
        ops.mark(y, s, "b", "audio")
        ops.mark_value(s[:, 1], "b", "token")
        z = y + 1
        ops.mark(z, s, "a", "audio")
        return z

    gm = export(fn)
    marks = marks_of(gm)
    assert [mark.full_name for mark in marks] == ["b.audio", "b.token", "a.audio"]
    assert public_names(marks) == ["b.audio", "token", "a.audio"]
    assert [mark.value.name for mark in marks] == ["mul", "select", "add"]
    assert [mark.staged.name for mark in marks] == ["s", "select", "s"]
    assert marks[1].spans is None


def test_hoisting_nothing_returns_the_same_graph() -> None:
    def fn(x: Tensor, s: Tensor, state: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ x.T
        ops.mark(y, s, "", "audio")
        return y

    gm = export(fn)
    before = str(gm.graph)
    assert hoist_marks(gm) is gm
    assert str(gm.graph) == before


def test_a_hoisted_mark_uses_what_the_block_returns_already() -> None:
    """With an output of its own, the model's output would look unspanned."""

    def fn(x: Tensor, s: Tensor, state: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x * 2
            t = s + 1
            ops.mark(y, t, "", "audio")
            ops.mark(y, s, "", "of_an_input")
        return y + 0

    gm = export(fn)
    assert not marks_of(gm)
    assert hoist_marks(gm) is gm
    own, of_an_input = marks_of(gm)
    (block,) = [node for node in gm.graph.nodes if "autocast" in str(node.target)]
    assert own.value.args == (block, 0)
    assert own.spans is not None
    assert own.spans.args == (block, 1)
    assert of_an_input.spans in gm.graph.nodes
    assert of_an_input.spans is not None
    assert of_an_input.spans.op == "placeholder"
    (add,) = [node for node in gm.graph.nodes if node.target is aten.add.Tensor]
    assert add.args[0] is own.value
    x, s = torch.randn(2, 5), torch.ones(2, 2, dtype=torch.int64)
    assert gm(x, s)[0].equal(x * 2)


def test_marks_leave_several_levels_of_blocks() -> None:
    def fn(x: Tensor, s: Tensor, state: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            a = x * 2
            ops.mark(a, s, "a", "audio")
            with torch.enable_grad():
                b = a * 3
                ops.mark(b, s, "b", "audio")
        return a.sum()

    gm = hoist_marks(export(fn))
    marks = marks_of(gm)
    assert [mark.full_name for mark in marks] == ["a.audio", "b.audio"]
    gm = deliver_values(gm, marks)
    gm.recompile()
    x, s = torch.randn(2, 5), torch.ones(2, 2, dtype=torch.int64)
    assert gm(x, s)[1].equal(x * 2)
    assert gm(x, s)[2].equal(x * 2 * 3)


# ---- memory ----------------------------------------------------------------------------------------------------------


def _written_between(x: Tensor, s: Tensor, state: Tensor) -> Any:
    state.copy_(s)
    ops.mark(x * 2, state, "a", "audio")
    state.copy_(s + 1)
    ops.mark(x * 3, state, "a[1]", "audio")
    return x + 1


def test_spans_are_cloned_at_the_mark_that_a_write_follows() -> None:
    gm = export(_written_between)
    first, second = marks_of(gm)
    same, (snapshot, kept) = snapshot_spans(gm, [first, second])
    assert same is gm
    assert kept is second
    assert snapshot.spans is not None
    assert snapshot.spans.target is aten.clone.default
    assert snapshot.spans.next is snapshot.node
    order = list(gm.graph.nodes)
    writes = [node for node in order if node.target is aten.copy_.default]
    assert order.index(writes[0]) < order.index(snapshot.spans) < order.index(writes[1])
    assert storage_roots(gm.graph)[snapshot.spans] is snapshot.spans  # memory of its own


def test_without_a_later_write_nothing_is_cloned() -> None:
    def fn(x: Tensor, s: Tensor, state: Tensor) -> Any:
        state.copy_(s)
        y = x * 2
        ops.mark(y, state, "", "audio")
        ops.mark_value(state[:, 0], "", "token")
        return y

    gm = export(fn)
    before, marks = str(gm.graph), marks_of(gm)
    same, kept = snapshot_spans(gm, marks)
    assert same is gm
    assert all(one is other for one, other in zip(kept, marks, strict=True))
    assert str(gm.graph) == before


def test_a_value_that_is_overwritten_is_refused_with_both_places() -> None:
    def fn(x: Tensor, s: Tensor, state: Tensor) -> Any:
        y = x * 2
        ops.mark(y, s, "net", "audio")
        return y.add_(1)

    gm = export(fn)
    message = r"SG109 'net.audio' \(model.py:7\) is overwritten .* by aten.add_.Tensor at .*test_passes.py:\d+"
    with pytest.raises(DeclarationError, match=message):
        snapshot_spans(gm, marks_of(gm))


def test_outputs_in_memory_of_others_are_cloned_once() -> None:
    def fn(x: Tensor, s: Tensor, state: Tensor) -> Any:
        state.add_(s)
        return state, x, x[:1], x * 2, x, state.t()

    gm = export(fn)
    before = result_nodes(gm.graph)
    assert isolate_outputs(gm) is gm
    after = result_nodes(gm.graph)
    assert [new.args[0] if new is not old else None for new, old in zip(after, before, strict=True)] == [
        before[0], before[1], before[2], None, before[1], before[5],
    ]  # fmt: skip
    assert after[1] is after[4]
    x, s = torch.randn(2, 5), torch.ones(2, 2, dtype=torch.int64)
    assert gm(x, s)[0].equal(s)
    assert [str(node) for node in result_nodes(isolate_outputs(gm).graph)] == [str(node) for node in after]


def test_isolating_nothing_changes_nothing() -> None:
    gm = export(lambda x, s, state: (x * 2, (s + 1).view(-1), x.to(torch.float64)))
    before = str(gm.graph)
    assert isolate_outputs(gm) is gm
    assert str(gm.graph) == before


# Views by schema, and what returns its input itself or a view without saying so.
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.view(-1), lambda x: x[:, 1:], lambda x: x.T, lambda x: x.chunk(2)[1], lambda x: x.unbind(0)[0],
        lambda x: x.contiguous(), lambda x: x.to(x.dtype), lambda x: x.type_as(x), lambda x: x.detach(),
        lambda x: torch.einsum("ij->ji", x), lambda x: torch.atleast_1d(x), lambda x: torch.broadcast_tensors(x, x)[1],
        lambda x: F.dropout(x, training=False), lambda x: F.feature_alpha_dropout(x, training=False),
        lambda x: x.reshape(5, 2), lambda x: x.expand(3, 2, 5), lambda x: x.movedim(0, 1).unsqueeze(0),
    ],
)  # fmt: skip
def test_views_lie_in_their_roots_memory(view: Callable[[Tensor], Tensor]) -> None:
    gm = export(lambda x, s, state: view(x * 2))
    (mul,) = [node for node in gm.graph.nodes if node.target is aten.mul.Tensor]
    assert storage_roots(gm.graph)[result_nodes(gm.graph)[0]] is mul


# Their schema says that they may be views, and they are none.
@pytest.mark.parametrize(
    "copy",
    [
        lambda x: x.double(), lambda x: x.T.reshape(-1), lambda x: x.T.contiguous(), lambda x: x.clone(),
        lambda x: x.max(1)[1],
    ],
)  # fmt: skip
def test_copies_are_their_own_root(copy: Callable[[Tensor], Tensor]) -> None:
    gm = export(lambda x, s, state: copy(x * 2))
    (result,) = result_nodes(gm.graph)
    assert storage_roots(gm.graph)[result] is result


def test_without_example_values_the_schema_counts() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    view = graph.call_function(aten.view.default, (x, [-1]))
    cast = graph.call_function(aten.to.dtype, (x, torch.float64))
    total = graph.call_function(aten.sum.default, (x,))
    graph.output((view, cast, total))
    roots = storage_roots(graph)
    assert [roots[node] for node in (view, cast, total)] == [x, x, total]


def test_writes_are_seen_through_blocks_keywords_and_statistics() -> None:
    def fn(x: Tensor, s: Tensor, state: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x * 2
            state.add_(1)
        torch.add(s, 1, out=s)
        return y

    gm = export(fn)
    names = {str(node): [str(target) for target in written(node)] for node in gm.graph.nodes}
    assert sorted(target for found in names.values() for target in found) == ["s", "state"]
    graph = fx.Graph()
    x, mean, var = (graph.placeholder(name) for name in ("x", "mean", "var"))
    trains = graph.call_function(aten.batch_norm.default, (x, None, None, mean, var, True, 0.1, 1e-5, False))
    rests = graph.call_function(aten.batch_norm.default, (x, None, None, mean, var, False, 0.1, 1e-5, False))
    assert written(trains) == [mean, var]
    assert written(rests) == []


# ---- cuts ------------------------------------------------------------------------------------------------------------


def plan(fn: Callable[..., Any], names: Sequence[str] = ()) -> tuple[list[PlannedCut], list[str]]:
    gm = export(fn)
    marks = marks_of(gm)
    gm = deliver_values(gm, marks)
    cuts, diagnostics = plan_cuts(gm, marks, names)
    return cuts, [str(diagnostic) for diagnostic in diagnostics]


def test_delivering_nothing_returns_the_same_graph() -> None:
    def fn(x: Tensor, s: Tensor, state: Tensor) -> Any:
        y = x * 2
        ops.mark(y, s, "", "audio")
        ops.mark_value(s[:, 0], "", "token")
        return y

    gm = export(fn)
    before = str(gm.graph)
    assert deliver_values(gm, marks_of(gm)) is gm
    assert str(gm.graph) == before


def test_a_hidden_value_becomes_an_output_once() -> None:
    def fn(x: Tensor, s: Tensor, state: Tensor) -> Any:
        y = x * 2
        ops.mark(y, s, "a", "audio")
        ops.mark(y, s + 1, "b", "audio")
        return x + 1

    gm = export(fn)
    deliver_values(gm, marks_of(gm))
    assert [node.name for node in result_nodes(gm.graph)] == ["add_1", "mul"]


def test_the_nearest_of_several_marks_wins() -> None:
    def fn(x: Tensor, s: Tensor, state: Tensor) -> Any:
        y = x * 2
        ops.mark(y, s, "far", "audio")
        z = y + 1
        ops.mark(z, s + 1, "near", "audio")
        return z * 2, y * 2

    cuts, diagnostics = plan(fn)
    assert [(cut.output, cut.mark) for cut in cuts] == [(0, 1), (1, 0), (2, 0), (3, 1)]
    assert not diagnostics


@pytest.mark.parametrize("inner_first", [True, False])
def test_of_marks_on_one_value_the_outermost_wins(inner_first: bool) -> None:
    def fn(x: Tensor, s: Tensor, state: Tensor) -> Any:
        y = x * 2
        for key in ("a.b.c", "a.b", "a") if inner_first else ("a", "a.b", "a.b.c"):
            ops.mark(y, s + len(key), key, "audio")
        return y

    cuts, _ = plan(fn)
    assert [(cut.output, cut.mark) for cut in cuts] == [(0, 2 if inner_first else 0)]


def test_a_common_prefix_is_not_inside() -> None:
    """`ab` is not a part of `a`."""

    def fn(x: Tensor, s: Tensor, state: Tensor) -> Any:
        y = x * 2
        ops.mark(y, s, "a", "audio")
        ops.mark(y, s + 1, "ab", "audio")
        return y

    with pytest.raises(
        DeclarationError, match=r"SG109 output 0 is one tensor under the names 'a.audio' and 'ab.audio'"
    ):
        plan(fn)


def _two_names(x: Tensor, s: Tensor, state: Tensor) -> Any:
    y = x * 2
    ops.mark(y, s, "", "head")
    ops.mark(y, s + 1, "", "tail")
    return y, y


def test_two_names_on_one_tensor_need_an_output_that_bears_one() -> None:
    cuts, _ = plan(_two_names, ["tail", "head"])
    assert [(cut.output, cut.mark) for cut in cuts] == [(0, 1), (1, 0)]
    with pytest.raises(DeclarationError, match="SG109 output 'other' is one tensor under the names 'head' and 'tail'"):
        plan(_two_names, ["tail", "other"])


def test_two_names_with_the_same_spans_are_no_question() -> None:
    """The mirrored case."""

    def fn(x: Tensor, s: Tensor, state: Tensor) -> Any:
        y = x * 2
        ops.mark(y, s, "", "head")
        ops.mark(y, s, "", "tail")
        return y

    cuts, _ = plan(fn, ["other"])
    assert [cut.output for cut in cuts] == [0]


def test_an_unknown_effect_is_delivered_whole_with_its_line() -> None:
    def fn(x: Tensor, s: Tensor, state: Tensor) -> Any:
        y = x * 2
        ops.mark(y, s, "net", "audio")
        z = y.sort(1)[0]  # of unknown effect
        return z + 1, y

    cuts, (diagnostic,) = plan(fn, ["sorted", "y"])
    assert [cut.output for cut in cuts] == [1]
    assert "SG203 output 'sorted' derives from 'net.audio' through aten.sort" in diagnostic
    assert "Fix: declare the output itself" in diagnostic


def test_outputs_that_do_not_derive_are_not_mentioned() -> None:
    def fn(x: Tensor, s: Tensor, state: Tensor) -> Any:
        ops.mark(x * 2, s, "", "audio")
        return x + 1, s * 2, x.sort(1)[0]

    cuts, diagnostics = plan(fn)
    assert [cut.output for cut in cuts] == [3]
    assert not diagnostics


# ---- the staging node ------------------------------------------------------------------------------------------------


def _stage_args(columns: Sequence[Any]) -> tuple[Any, ...]:
    ring = [torch.zeros(size, dtype=torch.int64) for size in ((1,), (3, 40), (3, 5))]
    return *ring, list(columns), [2 + 8 * i for i in range(len(columns))], 5, None, 0


def test_one_node_at_the_tail_whatever_the_number_of_marks() -> None:
    def fn(x: Tensor, s: Tensor, state: Tensor) -> Any:
        for i in range(4):
            ops.mark(x * i, s + i, f"n{i}", "audio")
        ops.mark_value(s[:, 0], "", "token")
        return x + 1

    gm = export(fn)
    prepared = prepare_graph(gm, infos_of(gm), ["out"])
    staged = list(dict.fromkeys(mark.staged for mark in prepared.marks))
    result = insert_staging_node(prepared.gm, staged, _stage_args)
    assert result is not prepared.gm
    (stage,) = [node for node in result.graph.nodes if node.target is ops.stage.default]
    assert stage.next.op == "output"
    assert len(stage.args[3]) == 5
    assert "mark" not in " ".join(targets(result.graph))
    assert "stage" not in " ".join(targets(prepared.gm.graph))
    assert not list(result.named_buffers())[1:]  # the model's own alone: the ring belongs to no module
    x, s = torch.randn(2, 5), torch.ones(2, 2, dtype=torch.int64)
    assert result(x, s)[0].equal(x + 1)


def test_nothing_to_stage_returns_the_same_graph() -> None:
    gm = export(lambda x, s, state: x + 1)
    assert insert_staging_node(gm, [], _stage_args) is gm
    before = str(gm.graph)
    prepared = prepare_graph(gm, {}, ["out"])
    assert prepared.gm is gm
    assert erase_marks(gm, []) is gm
    assert str(gm.graph) == before
    assert (prepared.marks, prepared.cuts, prepared.value_outputs, prepared.diagnostics) == ([], [], [], [])


def test_a_prepared_graph_says_which_output_each_value_is() -> None:
    def fn(x: Tensor, s: Tensor, state: Tensor) -> Any:
        y = x * 2
        ops.mark(y, s, "a", "audio")
        ops.mark_value(s[:, 0], "a", "token")
        ops.mark(x * 3, s, "b", "audio")
        return x + 1, y

    gm = export(fn)
    prepared = prepare_graph(gm, infos_of(gm), ["one", "audio"])
    assert prepared.value_outputs == [1, -1, 2]
    assert [(cut.output, cut.mark) for cut in prepared.cuts] == [(1, 0), (2, 2)]
    assert targets(prepared.gm.graph) == ["mul", "select", "mul", "add"]


# ---- places ----------------------------------------------------------------------------------------------------------


def test_a_place_is_the_innermost_line_of_the_user() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return F.layer_norm(x, (5,))  # here

    model = type("Model", (nn.Module,), {"forward": forward})()
    graph = torch.export.export(model, (torch.ones(2, 5),)).graph
    (node,) = [node for node in graph.nodes if node.op == "call_function"]
    assert where(node) == line_of(forward, "# here")
    assert where(fx.Graph().placeholder("x")) == ""


def test_frames_of_torch_and_of_ours_are_not_the_users() -> None:
    """Prefixes without their separator took in their neighbours; and in an editable install, where our folders lie side
    by side in the repository, its tests and examples."""
    ours = os.path.dirname(spangraph.passes.__file__)
    for module in (torch.nn.functional, spangraph.watch, spangraph.passes.marks, spangraph.kernels.stage):
        assert not is_user_file(module.__file__)
    assert not is_user_file("<eval_with_key>.3")
    assert is_user_file(__file__)
    assert is_user_file(os.path.dirname(torch.__file__) + "audio/functional.py")
    assert is_user_file(os.path.dirname(spangraph.errors.__file__) + "_user/model.py")
    assert is_user_file(ours + "_of_mine.py")
    trace = f'File "/me/model.py", line 3, in forward\n  x\nFile "{torch.__file__}", line 9, in linear\n'
    assert where_in(trace) == "/me/model.py:3"
