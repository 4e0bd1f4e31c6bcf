"""Follow the spans of a marked value through an exported graph.

    conv = convolution(mel)           # not derived: no entry
    audio = tanh(conv)                # the marked value, [bs, 1, T]: rows along 0, spans along 2
    wave = audio.squeeze(1)[:, 40:]   # rows along 0, spans along 1, [s, e) is now [s - 40, e - 40)
    level = audio.amax(-1)            # Unknown: the spanned dim is gone

A table says, per operator, where rows and spanned positions of its input lie in its output. An operator that is not in
the table, or that takes rows or spans apart, gives `Unknown`. The question is only where positions lie, not whether
padding leaks into them: `audio / audio.abs().amax(-1, keepdim=True)` has its spans where `audio` has them. Padding
moves content in every mode, so reflected and wrapped copies beside it count as padding.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import map_arg

from spangraph.passes import span_maps
from spangraph.passes.nodes import aliased, val, written
from spangraph.passes.span_maps import Place, SpanMap


@dataclass(frozen=True)
class Unknown:
    """A node that derives from the marked value in a way that is not known.

    Attributes:
        reason: names the operator and what it does.
        node: the first node whose effect was unknown.
    """

    reason: str
    node: fx.Node


_Shape = tuple[int, ...]
_State = SpanMap | Unknown
_States = dict[fx.Node, _State | tuple[_State | None, ...]]  # a tuple where the node gives several tensors
_DIFFERENT = "its operands hold the spans at different places"
NOT_KNOWN = "its effect on spans is not known"


def packets(names: str) -> frozenset[Any]:
    return frozenset(getattr(torch.ops.aten, name) for name in names.split())


_SAME_VIEWS = packets("alias detach contiguous to type_as")
_SHAPE_VIEWS = packets("view reshape _unsafe_view view_as reshape_as unflatten")
_DIM_VIEWS = packets(
    "transpose permute movedim moveaxis swapaxes swapdims t mT mH adjoint numpy_T matrix_H unsqueeze squeeze flatten"
)
# Only the shape or the dtype of another operand counts, or of any.
_LIKE_OTHER = packets("expand_as view_as reshape_as type_as to")
_SHAPE_ONLY = packets(
    "zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_empty new_full "
    "new_empty_strided size sym_size sym_numel sym_stride"
)
# Elementwise, but at least one overload is without torch.Tag.pointwise.
_ELEMENTWISE = packets(
    "to _to_copy detach alias clone contiguous dropout dropout_ feature_dropout alpha_dropout feature_alpha_dropout "
    "native_dropout where masked_fill masked_fill_ lift_fresh lift_fresh_copy nan_to_num type_as copy copy_ real imag "
    "conj _conj _neg_view resolve_conj resolve_neg complex polar prelu hardswish rsub divide multiply subtract "
    "true_divide absolute negative arctan2 floor_divide __and__ __or__ isclose bernoulli log_sigmoid special_expit "
    "zero zero_ fill fill_"
)
REDUCTIONS = packets(
    "sum nansum mean nanmean prod amax amin max min any all argmax argmin norm linalg_vector_norm logsumexp std var "
    "std_mean var_mean count_nonzero median nanmedian mode kthvalue"
)
_CATS = packets("cat concat concatenate")
_JOINS = _CATS | packets("stack")
RULES: dict[Any, span_maps.Rule] = {
    packet: rule
    for rule, packets in {
        # These may mix positions, or take statistics over rows; positions stay.
        span_maps.keep_rule: packets(
            "layer_norm group_norm instance_norm batch_norm rms_norm tril triu "
            "index_put index_fill scatter slice_scatter select_scatter masked_scatter"
        ),
        span_maps.mix_along_rule: packets(
            "softmax log_softmax _softmax _log_softmax cumsum cumprod logcumsumexp cummax cummin"
        ),
        span_maps.elsewhere_rule: packets("sort topk glu index_select"),
        span_maps.before_last_rule: packets("linear"),
        span_maps.drop_dim_rule: packets("select unbind"),
        span_maps.land_rule: _DIM_VIEWS | REDUCTIONS | packets("view_as_real"),
        span_maps.seat_rule: _SHAPE_VIEWS,
        span_maps.align_rule: packets("expand expand_as broadcast_to repeat tile"),
        span_maps.slice_rule: packets("slice narrow"),
        span_maps.split_rule: packets(
            "chunk split split_with_sizes tensor_split unsafe_chunk unsafe_split unsafe_split_with_sizes"
        ),
        span_maps.pad_rule: packets(
            "pad constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d "
            "replication_pad2d replication_pad3d"
        ),
        span_maps.flip_rule: packets("flip"),
        span_maps.repeat_interleave_rule: packets("repeat_interleave"),
        span_maps.pixel_shuffle_rule: packets("pixel_shuffle"),
        span_maps.upsample_rule: packets(
            "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
            "_upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d "
            "upsample_trilinear3d upsample_bicubic2d"
        ),
        span_maps.cat_rule: _CATS,
        span_maps.stack_rule: packets("stack"),
    }.items()
    for packet in packets
}


def propagate_spans(graph: fx.Graph, value: fx.Node, dims: Sequence[int]) -> dict[fx.Node, SpanMap | Unknown]:
    """Find how the spans of `value` lie in every node that is, or derives from, the same value.

    Nodes that `value` is a view of carry its spans too, and what derives from them. But where that leads to an input, a
    parameter or a buffer, only the very same tensor counts: else the whole model would.

    Args:
        graph: an exported graph with static shapes and fake values in `meta["val"]`.
        value: the marked value, rows along dim 0.
        dims: its spanned dims, in declaration order, may be negative.

    Returns:
        An entry per tensor node; a node without one does not derive. A node that gives several tensors has none
        itself, its getitem nodes have.
    """
    spans = SpanMap.identity(len(shape_of(value)), dims)
    if _is_given(value):
        return dict.fromkeys(_same_tensors(graph, value), spans)
    states: _States = {value: spans}
    last_write = _mark_views_above(value, states)
    # What was computed before the tensor's last write has nothing of the marked value, unless it is a view.
    is_written = last_write is None
    bases: dict[fx.Node, fx.Node] = {}
    views: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        is_written = is_written or node is last_write
        origin = aliased(node)
        bases[node] = bases[origin] if origin is not None else node
        views[bases[node]].append(node)
        if node in states or node.op in ("placeholder", "get_attr", "output"):
            continue
        if not (is_written or origin in states) or not any(source in states for source in node.all_input_nodes):
            continue
        state = _state_of(node, states)
        if state is not None:
            states[node] = state
        for target in written(node):
            _mark_written(node, target, views[bases[target]], states)
    return {node: state for node, state in states.items() if isinstance(state, (SpanMap, Unknown))}


def _state_of(node: fx.Node, states: _States) -> _State | tuple[_State | None, ...] | None:
    """The state of a node with at least one derived input; None if nothing of the input's values is in it."""
    target = node.target
    if target is operator.getitem:
        parts, item = states[node.args[0]], node.args[1]  # type: ignore[index]
        if isinstance(parts, tuple) and isinstance(item, int):
            return parts[item]
    if not isinstance(target, OpOverload):
        return _first_unknown(node.all_input_nodes, states) or _unknown(node, NOT_KNOWN)
    operation = Operation(node, target, lambda source: source in states)
    operands = list(dict.fromkeys(source for _, source in operation.operands))
    if not target._schema.returns or not operands:
        return None
    if operation.is_elementwise:
        found = tuple(_combine(node, operands, states, out) for out in operation.outs)
    elif (target_of := overwritten(node)) in states and torch.Tag.inplace_view not in target.tags:
        return states[target_of]
    elif unknown := _first_unknown(operands, states):
        return unknown
    else:
        spans, *others = (states[source] for source in operands)
        if reason := _refusal(operation, operands):
            return _unknown(node, reason)
        if not isinstance(spans, SpanMap) or any(other != spans for other in others):
            return _unknown(node, _DIFFERENT)
        found = tuple(_ask(operation, spans, index) for index in range(len(operation.outs)))
    return found if operation.gives_several else found[0]


def _refusal(operation: Operation, operands: list[fx.Node]) -> str:
    """Why the table cannot be asked; empty if it can."""
    if not operation.is_static:
        return "a size is only known when it runs"
    if operation.packet not in RULES:
        return NOT_KNOWN
    if operation.packet not in _JOINS and operands != [next(iter(operation.args.values()))]:
        return "its effect on the spans of another operand than the first is not known"
    return ""


def _ask(operation: Operation, spans: SpanMap, index: int) -> _State:
    call = operation.call(*operation.operands[0], index)
    try:
        found = spans.mapped(partial(RULES[operation.packet], call))
    except span_maps.NotStaticError:
        found = "an amount is only known when it runs"
    return _unknown(operation.node, found) if isinstance(found, str) else found


class Operation:
    """An operator call in a graph, some of whose operands derive from a source.

    Attributes:
        packet: the operator, whatever its overload.
        args: its arguments by schema name, defaults filled in, without those of which only shape or dtype counts.
        operands: the derived tensors among them, with the argument that each is in.
        outs: shape of each output.
        gives_several: whether it gives a list or tuple.
    """

    def __init__(self, node: fx.Node, target: OpOverload, is_derived: Callable[[fx.Node], bool]) -> None:
        self.node = node
        self.packet = target.overloadpacket
        arguments = target._schema.arguments
        self.args: dict[str, Any] = {argument.name: argument.default_value for argument in arguments}
        self.args.update(zip(self.args, node.args, strict=False))
        self.args.update(node.kwargs)
        self.operands: list[tuple[str, fx.Node]] = []
        if self.packet in _LIKE_OTHER:
            self.args.pop("other", None)
        if self.packet not in _SHAPE_ONLY:
            self.operands = [(name, n) for name, given in self.args.items() for n in _nodes_in(given) if is_derived(n)]
        if self.packet in _CATS:
            self.args["ahead"] = self._ahead()
        result = val(node)
        self.gives_several = isinstance(result, (list, tuple))
        self.outs = tuple(shape_of_result(out) for out in (result if self.gives_several else [result]))
        self.is_elementwise = torch.Tag.pointwise in target.tags or self.packet in _ELEMENTWISE

    @property
    def is_static(self) -> bool:
        """Whether all sizes are numbers."""
        shapes = (*self.outs, *(shape_of(source) for _, source in self.operands))
        return all(isinstance(size, int) for shape in shapes for size in shape)

    def call(self, name: str, source: fx.Node, index: int) -> span_maps.Call:
        """One of the operands and the index-th output, for the rules."""
        land = partial(_landing, self.node, index=index)
        return span_maps.Call(str(self.node.target), self.args, name, shape_of(source), self.outs, index, land)

    def _ahead(self) -> int | None:
        """How many positions a `cat` puts before its derived operand; None where several operands are derived."""
        tensors, dim = self.args["tensors"], self.args["dim"]
        derived = {source for _, source in self.operands}
        if sum(tensor in derived for tensor in tensors) != 1 or not isinstance(dim, int):
            return None
        before = itertools.takewhile(lambda tensor: tensor not in derived, tensors)
        return sum(shape[dim] for tensor in before if (shape := shape_of(tensor)) != (0,))  # an empty cache has one dim


def _combine(node: fx.Node, operands: list[fx.Node], states: _States, out: _Shape) -> _State:
    """Broadcast all derived operands. One of unknown effect does no harm if all positions of the spanned dims see the
    same of it, as a gain computed from the padded row.
    """
    maps: list[SpanMap] = []
    others: list[tuple[_Shape, Unknown]] = []
    for operand in operands:
        state, shape = states[operand], shape_of(operand)
        if isinstance(state, Unknown):
            others.append((shape, state))
        elif isinstance(state, SpanMap) and (aligned := state.mapped(partial(Place.aligned, shape=shape, out=out))):
            maps.append(aligned)
        else:
            others.append((shape, _unknown(node, "it broadcasts a span or row")))
    if not maps:
        return others[0][1]
    if any(spans != maps[0] for spans in maps):
        return _unknown(node, _DIFFERENT)
    for shape, unknown in others:
        padded = (1,) * (len(out) - len(shape)) + shape
        if any(padded[place.dim] != 1 or out[place.dim] == 1 for place in maps[0].places[1:]):
            return unknown
    return maps[0]


def _mark_views_above(value: fx.Node, states: _States) -> fx.Node | None:
    """Give the tensors that `value` is a view of their states. Returns the last node that wrote to them, if any."""
    last_write: fx.Node | None = None
    node = value
    while True:
        source = viewed(node)
        if source is None and (source := overwritten(node)) is not None:
            last_write = last_write or node
        if source is None:
            return last_write
        state = states[node]
        if isinstance(state, SpanMap):
            seen: SpanMap | None = state.mapped(partial(seen_from, node, source))
            state = seen or _unknown(node, "what it is a view of does not hold rows and spans along dims of their own")
        states[source] = state
        node = source


def seen_from(view: fx.Node, source: fx.Node, place: Place) -> Place | None:
    """A place in `source`, given that in a view of it."""
    packet = getattr(view.target, "overloadpacket", None)
    if packet in _SHAPE_VIEWS:
        return place.reseated(shape_of(view), shape_of(source))
    if packet in _DIM_VIEWS:
        dims = [dim for dim in range(len(shape_of(source))) if _landing(view, dim) == place.dim]
        return place.at(dims[-1]) if dims else None
    return place


def _landing(node: fx.Node, dim: int, index: int = 0) -> int | None:
    """Which dim of an output a dim of the first argument becomes, read off the operator itself: it is run on a meta
    tensor in which only that dim has a size that occurs nowhere else.
    """
    source, *others = node.all_input_nodes
    if others or node.args[0] is not source:
        raise span_maps.NotStaticError
    result = val(node)
    out = shape_of_result(result[index] if isinstance(result, (list, tuple)) else result)
    kwargs = tuple(node.kwargs.items())
    return _probed(node.target, node.args[1:], kwargs, val(source).dtype, shape_of(source), out, dim, index)


@lru_cache(maxsize=4096)  # layers repeat
def _probed(
    target: Any, args: Any, kwargs: Any, dtype: torch.dtype, shape: _Shape, out: _Shape, dim: int, index: int
) -> int | None:
    if target is torch.ops.aten.numpy_T.default:  # warns unless 2-D
        return len(out) - 1 - dim
    size = 1 + max((*shape, *out))
    probe = torch.empty((*shape[:dim], size, *shape[dim + 1 :]), dtype=dtype, device="meta")
    probed = target(probe, *args, **dict(kwargs))
    landed = tuple((probed if isinstance(probed, torch.Tensor) else probed[index]).shape)
    return landed.index(size) if size in landed and len(landed) == len(out) else None


def _mark_written(node: fx.Node, target: fx.Node, views: list[fx.Node], states: _States) -> None:
    """Note that `node` has written something derived into `target`: it and its views derive from now on."""
    state = states.get(node)
    if torch.Tag.inplace_view in getattr(node.target, "tags", ()) and state is not None:
        states[target] = state
    elif target not in states:  # else its bytes change, and not where its spans lie
        for view in views:
            if view not in states:
                states[view] = _unknown(node, f"it writes the marked value into the memory of {view}")
        if isinstance(state, SpanMap):
            states[target] = state


def overwritten(node: fx.Node) -> fx.Node | None:
    """The tensor that an in-place operator writes and returns."""
    target = aliased(node) if isinstance(node.target, OpOverload) else None
    return target if target in written(node) else None


def viewed(node: fx.Node) -> fx.Node | None:
    """What the node is a view of, if it shows all of it."""
    packet, source = getattr(node.target, "overloadpacket", None), node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or packet not in _SHAPE_VIEWS | _DIM_VIEWS | _SAME_VIEWS:
        return None
    seen, shown = val(source), val(node)
    return source if (seen.dtype, seen.device) == (shown.dtype, shown.device) else None


def _is_given(node: fx.Node) -> bool:
    """Whether the node is an input, a parameter or a buffer, or a view of one, as the caller gave it."""
    while overwritten(node) is None and (source := aliased(node)) is not None:
        node = source
    return node.op in ("placeholder", "get_attr")


def _same_tensors(graph: fx.Graph, value: fx.Node) -> set[fx.Node]:
    """The node and all second names of its very tensor."""
    renaming = {torch.ops.aten.alias.default, torch.ops.aten.detach.default}
    while value.target in renaming:
        value = value.args[0]  # type: ignore[assignment]
    same = {value}
    for node in graph.nodes:
        if node.target in renaming and node.args[0] in same:
            same.add(node)
    return same


def _nodes_in(argument: Any) -> Iterable[fx.Node]:
    """All different nodes in an argument, in order."""
    found: dict[fx.Node, None] = {}
    if isinstance(argument, (fx.Node, list, tuple)):
        map_arg(argument, lambda node: found.setdefault(node))
    return found


def _first_unknown(nodes: Iterable[fx.Node], states: _States) -> Unknown | None:
    return next((state for node in nodes if isinstance(state := states.get(node), Unknown)), None)


def _unknown(node: fx.Node, reason: str) -> Unknown:
    return Unknown(f"{node.target}: {reason}", node)


def shape_of(node: fx.Node) -> _Shape:
    return shape_of_result(val(node))


def shape_of_result(result: object) -> _Shape:
    return tuple(result.shape) if isinstance(result, torch.Tensor) else ()
