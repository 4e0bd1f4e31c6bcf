"""From a model to a flat fx graph in which every declaration is a mark.

Two tracers give the same form. `export` is non-strict `torch.export` at static shapes: forward hooks on the declaring
submodules emit mark ops, which survive it. `opaque` makes the root one leaf call and collects what the hooks see; it
takes what does not export. Either way the graph's inputs are the tensor leaves of `(args, kwargs)` in order, its output
is a flat tuple of tensors, and everything else in the output is a constant of the trace.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from spangraph.backends import preserve_generators
from spangraph.declare import Declaration, Span, SpannedOutput, find_declarations, iter_spanned
from spangraph.diagnostics import Diagnostic
from spangraph.errors import DeclarationError, HostReadError, SpangraphError, TraceError
from spangraph.passes.host_reads import diagnose_read, host_read_error, read_by
from spangraph.passes.marks import MarkInfo
from spangraph.passes.nodes import is_user_file

aten = torch.ops.aten

# torch.export patches global state: parallel traces break each other.
_TRACE_LOCK = threading.Lock()

# Leaves of (args, kwargs) that may be baked into a graph: compared by type and value.
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass
class Trace:
    """A traced model.

    Attributes:
        gm: the flat graph, with marks.
        infos: what each mark and row value means, by key and name.
        out_spec, out_leaves: the model's output structure: for each leaf an index into the graph's outputs, or a
            constant wrapped in `Constant`.
        leaf_names: last path key of each graph output, for telling names on one tensor apart.
        tracer: `"export"` or `"opaque"`.
        reason: why the trace is opaque, if export was tried.
        inference: whether the graph must run in inference mode, as some of its weights were made in it.
        autocast: device type, whether autocast was on at the trace, and its dtype.
        rebinds: buffers that an opaque forward replaces instead of updating in place.
        paths: key path of each output leaf.
        captures: whether the graph may be captured (false for forwards with host reads under `verify="warn"`).
        diagnostics: what was found on the way.
    """

    gm: fx.GraphModule
    infos: dict[tuple[str, str], MarkInfo]
    out_spec: pytree.TreeSpec
    out_leaves: list[Any]
    leaf_names: list[str]
    tracer: str
    reason: str = ""
    inference: bool = False
    autocast: tuple[str, bool, torch.dtype] = ("cpu", False, torch.bfloat16)
    captures: bool = True
    rebinds: Sequence[str] = ()
    paths: Sequence[Any] = ()
    diagnostics: list[Diagnostic] = field(default_factory=list)

    def unflatten(self, leaves: list[Any]) -> Any:
        """The model's output structure with these leaves."""
        # A Hugging Face ModelOutput of one field iterates over that field when it is built, and takes pairs for items:
        # it gets its leaves afterwards.
        late = self._model_output_leaves
        if not late:
            return self._build(leaves)
        early = list(leaves)
        for i in late:
            early[i] = torch.empty(0)
        out = self._build(early)
        for i in late:
            parent = out
            for key in self.paths[i][:-1]:
                parent = key.get(parent)
            parent[self.paths[i][-1].key] = leaves[i]
        return out

    @functools.cached_property
    def _build(self) -> Callable[[list[Any]], Any]:
        return _unflattener(self.out_spec, 0)[0]

    @functools.cached_property
    def _model_output_leaves(self) -> list[int]:
        out = pytree.tree_unflatten([torch.empty(0)] * len(self.out_leaves), self.out_spec)
        found = []
        for i, path in enumerate(self.paths):
            parent = out
            for key in path[:-1]:
                parent = key.get(parent)
            if path and isinstance(parent, dict) and dataclasses.is_dataclass(parent):
                found.append(i)
        return found

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """The grad mode and autocast that the graph was traced under, whatever the caller's are."""
        device_type, enabled, dtype = self.autocast
        with run_mode(self.inference):
            if torch.is_autocast_enabled(device_type) == enabled and not enabled:
                yield
            else:
                with torch.autocast(device_type, dtype=dtype, enabled=enabled):
                    yield


@dataclass(frozen=True)
class Constant:
    """An output leaf that is not a tensor."""

    value: Any


@contextlib.contextmanager
def run_mode(inference: bool) -> Iterator[None]:
    """Inference mode, or plain no-grad mode even inside the caller's inference mode."""
    if inference:
        with torch.inference_mode():
            yield
    else:
        with torch.inference_mode(False), torch.no_grad():
            yield


def normalise_call(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`(args, kwargs)` in one canonical form, so that `f(x, 1)` and `f(x, n=1)` share a graph."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"the model's forward{signature} cannot be called like this: {error}") from None
    return bound.args, bound.kwargs


def is_constant(leaf: Any) -> bool:
    """Whether a leaf of the inputs may be baked into a graph."""
    return isinstance(leaf, _CONSTANTS) or type(leaf).__module__ == "enum" or isinstance(leaf, slice | range)


@dataclass(frozen=True)
class CallSpec:
    """How to rebuild `(args, kwargs)` from the tensor leaves."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]  # a Constant, or an index into the tensors

    def build(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments."""
        leaves = [leaf.value if isinstance(leaf, Constant) else tensors[leaf] for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


# ---- hooks -------------------------------------------------------------------------------------------------------


class Marking:
    """Hooks on the declaring submodules, for the time of one forward.

    Each firing checks what the module returned, and records its values, spans and row values under the key
    `fqn` (`fqn[k]` for the k-th further call). With `emit` it also puts mark ops into the graph being traced.
    """

    def __init__(self, declarations: Sequence[Declaration], *, emit: bool) -> None:
        self.infos: dict[tuple[str, str], MarkInfo] = {}
        self.values: dict[tuple[str, str], tuple[Tensor, Tensor | None]] = {}
        self._declarations = declarations
        self._emit = emit
        self._seen: list[Tensor] = []  # spans as the modules returned them
        self._versions: list[tuple[MarkInfo, Tensor, int]] = []
        self._calls: Counter[str] = Counter()
        self._fired: set[int] = set()
        self._thread = threading.get_ident()

    @contextlib.contextmanager
    def hooked(self) -> Iterator[Marking]:
        """Install the hooks; on leaving without an error check that every declaring module ran.

        Raises:
            DeclarationError: for a declared output whose module or method was not called (hooks fire only through
                `module(...)`, not through `module.forward(...)` or another method).
        """
        with contextlib.ExitStack() as stack:
            for i, declaration in enumerate(self._declarations):
                stack.callback(self._install(i, declaration))
            yield self
        for info, value, version in self._versions:
            if value._version != version:
                raise DeclarationError(
                    f"SG109 {info.name!r} of {info.fqn or 'the root module'} ({info.where}) is overwritten after its"
                    " submodule returned it: its rows would hold the later values. Return a clone()."
                )
        for i, declaration in enumerate(self._declarations):
            if declaration.spans and i not in self._fired:
                raise DeclarationError(
                    f"SG107 {declaration} declares {sorted(declaration.spans)} but was not called ({declaration.where})."
                    " Hooks fire when a module is called as module(...): for another method say"
                    " spangraph.declare(module, ..., method='decode'); for a walk that does not use it, declare nothing."
                )

    def _install(self, index: int, declaration: Declaration) -> Any:
        if declaration.method == "forward":

            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
                self._fire(index, declaration, out, args, kwargs)

            return declaration.module.register_forward_hook(hook, with_kwargs=True).remove

        method = getattr(declaration.module, declaration.method)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            out = method(*args, **kwargs)
            self._fire(index, declaration, out, args, kwargs)
            return out

        attributes = declaration.module.__dict__
        shadowed = attributes.get(declaration.method)
        attributes[declaration.method] = wrapped

        def restore() -> None:
            if shadowed is None:
                del attributes[declaration.method]
            else:
                attributes[declaration.method] = shadowed

        return restore

    def _fire(
        self, index: int, declaration: Declaration, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if threading.get_ident() != self._thread:
            return  # the model also runs elsewhere: not our forward
        self._fired.add(index)
        spanned = declaration.read(out, args, kwargs)
        if not spanned.output_spans and not spanned.row_values:
            return
        fqn = declaration.fqn
        call = self._calls[fqn]
        self._calls[fqn] += 1
        key = f"{fqn}[{call}]" if call else fqn
        for name, spans in spanned.output_spans.items():
            self._record(key, name, declaration, declaration.spans[name], spanned.outputs[name], spans)
        for name, values in spanned.row_values.items():
            self._record(key, name, declaration, None, values, None)

    def _record(
        self, key: str, name: str, declaration: Declaration, span: Span | None, value: Tensor, spans: Tensor | None
    ) -> None:
        if (key, name) in self.infos:
            raise DeclarationError(f"SG108 {declaration}: {name!r} is declared twice for one call; use different names.")
        self.infos[key, name] = MarkInfo(key, declaration.fqn, name, span, declaration.where)
        if spans is not None:
            self._seen.append(spans)
        if not self._emit:
            # No pass sees what is written later: snapshot what is staged, and watch the value.
            if spans is None:
                value = value.clone()
            else:
                spans = spans.clone()
                if not value.is_inference():
                    self._versions.append((self.infos[key, name], value, value._version))
        elif spans is not None:
            torch.ops.spangraph.mark.default(value, spans, key, name)
        else:
            torch.ops.spangraph.mark_value.default(value, key, name)
        self.values[key, name] = (value, spans)

    def is_declared(self, spans: Tensor) -> bool:
        """Whether a declaring submodule returned these spans."""
        return any(seen is spans for seen in self._seen)


def check_marked(out: Any, marking: Marking) -> None:
    """Refuse spans that no declaration announced.

    Raises:
        DeclarationError: if the model's output holds a `SpannedOutput` with spans whose module declares nothing.
    """
    for spanned in iter_spanned(out):
        if lost := sorted(name for name, spans in spanned.output_spans.items() if not marking.is_declared(spans)):
            raise DeclarationError(
                f"SG102 the model returned a SpannedOutput with spans for {lost}, but no submodule declares them on this"
                " walk: define spanned_outputs(walk) on the module whose forward returns it."
            )


# ---- the output's structure ----------------------------------------------------------------------------------------


def flatten_output(out: Any) -> tuple[list[Tensor], list[Any], list[Any], pytree.TreeSpec]:
    """Tensors of an output, its template (index or Constant per leaf), the key path per leaf, and the spec.

    Raises:
        TraceError: if a leaf holds tensors in a class that pytree does not know.
    """
    _register_dataclasses(out)
    paths, spec = pytree.tree_flatten_with_path(out)
    tensors: list[Tensor] = []
    template: list[Any] = []
    for _, leaf in paths:
        if isinstance(leaf, Tensor):
            template.append(len(tensors))
            tensors.append(leaf)
        elif _holds_tensors(leaf):
            raise TraceError(
                f"the model returned a {type(leaf).__name__}, whose tensors cannot be reached: make it a dataclass, or"
                " register it with torch.utils._pytree.register_pytree_node."
            )
        else:
            template.append(Constant(leaf))
    return tensors, template, [path for path, _ in paths], spec


def _unflattener(spec: pytree.TreeSpec, first: int) -> tuple[Callable[[list[Any]], Any], int]:
    """A function from leaves to the structure of `spec`, and the index after its last leaf.

    `pytree.tree_unflatten` walks the spec at every call; a step's result has the same one each time.
    """
    if spec.is_leaf():
        return (lambda leaves: leaves[first]), first + 1
    unflatten = pytree.SUPPORTED_NODES[spec.type].unflatten_fn
    children = []
    for child in spec.children():
        build, first = _unflattener(child, first)
        children.append(build)
    context = spec.context
    if spec.type is dict:  # the usual containers, without the detour
        items = list(zip(context, children, strict=True))
        return (lambda leaves: {key: build(leaves) for key, build in items}), first
    if spec.type is SpannedOutput:
        outputs, spans, values = children
        return (lambda leaves: SpannedOutput(outputs(leaves), spans(leaves), values(leaves), context)), first
    return (lambda leaves: unflatten([build(leaves) for build in children], context)), first


def _leaf_name(path: Any) -> str:
    key = path[-1] if path else None
    return str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", ""))))


def _register_dataclasses(out: Any) -> None:
    """Let pytree look into dataclass outputs that nobody registered."""
    pending = [out]
    while pending:
        node = pending.pop()
        if dataclasses.is_dataclass(node) and not isinstance(node, type) and type(node) not in pytree.SUPPORTED_NODES:
            torch.export.register_dataclass(type(node))
        if not pytree.tree_is_leaf(node):
            pending.extend(pytree.tree_leaves(node, is_leaf=lambda child, parent=node: child is not parent))  # type: ignore[misc]


def _holds_tensors(leaf: Any) -> bool:
    return hasattr(leaf, "__dict__") and any(isinstance(value, Tensor) for value in vars(leaf).values())


# ---- export --------------------------------------------------------------------------------------------------------


class _Root(nn.Module):
    """Flat tensors in, flat tensors out; structure and marks are left in `notes`."""

    def __init__(self, model: nn.Module, call: CallSpec, declarations: Sequence[Declaration], notes: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self._call = call
        self._declarations = declarations
        self._notes = notes

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = self._call.build(tensors)
        with _literal_buffers(self.model, self._notes), Marking(self._declarations, emit=True).hooked() as marking:
            out = self.model(*args, **kwargs)
        check_marked(out, marking)
        leaves, template, paths, spec = flatten_output(out)
        self._notes.update(infos=marking.infos, template=template, paths=paths, spec=spec)
        return tuple(leaves)


@contextlib.contextmanager
def _literal_buffers(model: nn.Module, notes: dict[str, Any]) -> Iterator[None]:
    """Give 0-d int buffers literal values inside the trace, so that reads of them are constants of the graph.

    A buffer that the forward writes must stay a buffer: it is noted in `notes["written"]`, and the trace repeated.
    """
    held: list[tuple[dict[str, Tensor | None], str, Tensor, Tensor]] = []
    written: set[int] = notes.setdefault("written", set())
    for buffers, name, value in notes["literals"]:
        buffer = buffers[name]
        if id(buffer) not in written:
            literal = torch.tensor(value, dtype=buffer.dtype)
            buffers[name] = literal
            held.append((buffers, name, buffer, literal))
    versions = [literal._version for *_, literal in held]
    try:
        yield
    finally:
        for (buffers, name, buffer, literal), version in zip(held, versions, strict=True):
            if buffers[name] is not literal or literal._version != version:
                written.add(id(buffer))
                notes["retry"] = True
            buffers[name] = buffer


def _int_buffers(model: nn.Module) -> list[tuple[dict[str, Tensor | None], str, int]]:
    return [
        (module._buffers, name, int(buffer.item()))
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.ndim == 0 and not buffer.is_floating_point() and not buffer.is_complex()
        and buffer.dtype is not torch.bool
    ]


def export_model(
    model: nn.Module, call: CallSpec, tensors: Sequence[Tensor], declarations: Sequence[Declaration], *, inference: bool
) -> Trace:
    """Trace by non-strict `torch.export` at static shapes.

    Raises:
        TraceError: if the model does not export; the message says why.
        DeclarationError: as raised by the hooks.
    """
    notes: dict[str, Any] = {}
    # Literals are given only to buffers that hold a Python-readable value; bools are flags that code branches on.
    notes["literals"] = _int_buffers(model)
    for _ in range(len(notes["literals"]) + 1):
        notes["retry"] = False
        root = _Root(model, call, declarations, notes)
        gm = _export(root, tensors, inference)
        if not notes["retry"]:
            break
    gm.graph.set_codegen(fx.graph.CodeGen())  # inputs and outputs are flat: no pytree at each call
    gm.graph.eliminate_dead_code()
    gm._forward_pre_hooks.clear()  # shape checks: the caller's signature is one already
    gm.recompile()
    return _trace_of(gm, notes["infos"], notes["template"], notes["paths"], notes["spec"], "export", inference)


def _trace_of(
    gm: fx.GraphModule,
    infos: dict[tuple[str, str], MarkInfo],
    template: list[Any],
    paths: list[Any],
    spec: pytree.TreeSpec,
    tracer: str,
    inference: bool,
) -> Trace:
    names = [_leaf_name(path) for path, leaf in zip(paths, template, strict=True) if not isinstance(leaf, Constant)]
    return Trace(gm, infos, spec, template, names, tracer, inference=inference, paths=paths)


def _export(root: nn.Module, tensors: Sequence[Tensor], inference: bool) -> fx.GraphModule:
    try:
        with run_mode(inference), warnings.catch_warnings(), _quiet():
            warnings.simplefilter("ignore")  # export warns of its own internals
            exported = torch.export.export(root, tuple(tensors), strict=False)
            if "check_guards" in inspect.signature(exported.module).parameters:
                return exported.module(check_guards=False)
            return exported.module()  # type: ignore[no-any-return]
    except SpangraphError:
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:  # export wraps what forward raised
            if isinstance(cause, SpangraphError):
                raise cause from None
            cause = cause.__cause__ or cause.__context__
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise TraceError(f"torch.export failed: {type(error).__name__}: {first}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Export prints half-built graphs through the root logger's handlers when it fails; the error says enough."""
    logger = logging.getLogger("torch")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


# ---- opaque --------------------------------------------------------------------------------------------------------


class OpaqueRoot(nn.Module):
    """The whole model as one leaf: flat tensors in; outputs, then values and spans of every mark, out."""

    def __init__(self, model: nn.Module, call: CallSpec, declarations: Sequence[Declaration]) -> None:
        super().__init__()
        self.model = model
        self._call = call
        self._declarations = declarations
        self._expected: Any = None

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        """Run the model.

        Raises:
            TraceError: if the outputs' structure or the marks are not those of the first run.
        """
        args, kwargs = self._call.build(tensors)
        with Marking(self._declarations, emit=False).hooked() as marking:
            out = self.model(*args, **kwargs)
        check_marked(out, marking)
        leaves, template, paths, spec = flatten_output(out)
        shape = (template, spec, list(marking.infos))
        if self._expected is None:
            self._expected = shape
            self.notes = (marking.infos, template, paths, spec)
        elif self._expected != shape:
            raise TraceError(
                f"the model returned another structure than at its first run: {len(leaves)} tensors and spans for"
                f" {[name for _, name in marking.infos]}, then {[name for _, name in self._expected[2]]}. One signature"
                " must always return the same outputs and spans; use another walk or a constant argument."
            )
        for value, spans in marking.values.values():
            leaves.append(value)
            if spans is not None:
                leaves.append(spans)
        return leaves


def trace_opaquely(
    model: nn.Module,
    call: CallSpec,
    tensors: Sequence[Tensor],
    declarations: Sequence[Declaration],
    *,
    inference: bool,
    verify: str,
) -> Trace:
    """Trace by running the model once; the run leaves no trace in buffers and generators.

    Raises:
        HostReadError: if the forward reads device values on the host and `verify` is "error".
        DeclarationError, or whatever the forward raises.
    """
    root = OpaqueRoot(model, call, declarations)
    watch = Watch(model)
    device = tensors[0].device if tensors else torch.device("cpu")
    bound = [(fqn, module._buffers, dict(module._buffers)) for fqn, module in model.named_modules()]
    with run_mode(inference), preserve_generators(device), watch:
        leaves = root(*tensors)
    rebinds = []
    for fqn, buffers, before in bound:
        rebinds += [f"{fqn}.{n}".lstrip(".") for n, b in before.items() if buffers.get(n) is not b]
        buffers.update(before)
    if watch.reads and verify != "off":
        error = host_read_error(watch.reads)
        if verify == "error":
            raise error
        warnings.warn(f"running uncaptured: {error}", stacklevel=2)
    infos, template, paths, spec = root.notes
    num_outputs = sum(not isinstance(leaf, Constant) for leaf in template)
    gm = _opaque_graph(root, tensors, leaves, infos, watch.external, num_outputs=num_outputs)
    trace = _trace_of(gm, infos, template, paths, spec, "opaque", inference)
    trace.captures, trace.rebinds = not watch.reads, rebinds
    trace.diagnostics.extend(watch.reads)
    return trace


def _opaque_graph(
    root: OpaqueRoot,
    inputs: Sequence[Tensor],
    leaves: Sequence[Tensor],
    infos: dict[tuple[str, str], MarkInfo],
    external: set[int],
    *,
    num_outputs: int,
) -> fx.GraphModule:
    holder = nn.Module()
    holder.add_module("root", root)
    graph = fx.Graph(holder)
    placeholders = []
    for i, tensor in enumerate(inputs):
        placeholders.append(graph.placeholder(f"x{i}"))
        placeholders[-1].meta["val"] = _example(tensor)
    call = graph.call_module("root", tuple(placeholders))
    nodes: list[fx.Node] = []
    known = {id(tensor): node for tensor, node in zip(inputs, placeholders, strict=True)}
    for i, leaf in enumerate(leaves):
        if id(leaf) not in known:
            known[id(leaf)] = graph.call_function(_getitem, (call, i))
            known[id(leaf)].meta["val"] = _example(leaf)
        nodes.append(known[id(leaf)])
    _clone_external(graph, external | {storage_key(tensor) for tensor in inputs}, leaves, nodes)
    outputs = list(nodes[:num_outputs])
    marked = iter(zip(leaves[num_outputs:], nodes[num_outputs:], strict=True))
    for (key, name), info in infos.items():
        value, node = next(marked)
        if info.span is None:
            graph.call_function(torch.ops.spangraph.mark_value.default, (node, key, name))
            continue
        _, spans = next(marked)
        graph.call_function(torch.ops.spangraph.mark.default, (node, spans, key, name))
        for i, leaf in enumerate(leaves[:num_outputs]):
            if leaf is not value and (view := _as_view_of(graph, leaf, value, node)) is not None:
                outputs[i] = view
    graph.output(tuple(outputs))
    return fx.GraphModule(holder, graph)


def _getitem(leaves: Sequence[Tensor], index: int) -> Tensor:
    return leaves[index]


def _example(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def storage_key(tensor: Tensor) -> int:
    """Identity of a tensor's memory."""
    return tensor.untyped_storage()._cdata


def _clone_external(graph: fx.Graph, external: set[int], leaves: Sequence[Tensor], nodes: list[fx.Node]) -> None:
    """Clone outputs in memory that the forward did not make (inputs, weights, caches): the next step may overwrite it."""
    clones: dict[fx.Node, fx.Node] = {}
    for i, leaf in enumerate(leaves):
        if storage_key(leaf) in external:
            node = nodes[i]
            if node not in clones:
                clones[node] = graph.call_function(aten.clone.default, (node,))
                clones[node].meta["val"] = _example(leaf)
            nodes[i] = clones[node]


def _as_view_of(graph: fx.Graph, leaf: Tensor, value: Tensor, node: fx.Node) -> fx.Node | None:
    """`leaf` as a view of `value`, where both are the same elements in another order of dims; else None."""
    if leaf.dtype is not value.dtype or leaf.data_ptr() != value.data_ptr() or storage_key(leaf) != storage_key(value):
        return None
    if leaf.ndim == 0 or leaf.shape[0] != value.shape[0] or leaf.numel() != value.numel():
        return None
    free = [d for d in range(1, value.ndim) if value.shape[d] != 1]
    order = []
    for d in range(1, leaf.ndim):
        if leaf.shape[d] == 1:
            continue
        match = [v for v in free if value.shape[v] == leaf.shape[d] and value.stride(v) == leaf.stride(d)]
        if not match:
            return None
        order.append(match[0])
        free.remove(match[0])
    if free:
        return None
    ones = [d for d in range(1, value.ndim) if value.shape[d] == 1]
    view = graph.call_function(aten.permute.default, (node, [0, *order, *ones]))
    view.meta["val"] = _example(value.permute(0, *order, *ones))
    view = graph.call_function(aten.view.default, (view, list(leaf.shape)))
    view.meta["val"] = _example(leaf)
    return view


class SavedMemory:
    """Storages as they were before their first write by an operator, to be put back."""

    def __init__(self) -> None:
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def before(self, func: Any, args: Any, kwargs: Any, belongs: Callable[[Tensor], bool]) -> None:
        """Save what `func(*args, **kwargs)` is about to write, of the tensors for which `belongs` holds."""
        if not func._schema.is_mutable:
            return
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if isinstance(tensor, Tensor) and storage_key(tensor) not in self._saved and belongs(tensor):
                    storage = tensor.untyped_storage()
                    self._saved[storage_key(tensor)] = (storage, storage.clone())

    def restore(self) -> None:
        """Put everything back."""
        for storage, copy in self._saved.values():
            storage.copy_(copy)


class Watch(TorchDispatchMode):
    """Runs forwards without leaving a trace in the model's parameters and buffers, and notes host reads."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.reads: list[Diagnostic] = []
        self.external: set[int] = set()  # storages that operators used and did not make
        self._made: set[int] = set()
        self._memory = SavedMemory()
        self._owned = {storage_key(tensor) for tensor in [*model.parameters(), *model.buffers()]}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if what := read_by(func, args, kwargs):
            self.reads.append(diagnose_read(what, user_line()))
        self._memory.before(func, args, kwargs, lambda tensor: storage_key(tensor) in self._owned)
        self.external.update(_storages((args, kwargs)) - self._made)
        out = func(*args, **kwargs)
        self._made.update(_storages(out) - self.external)
        return out

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._memory.restore()


def _storages(tree: Any) -> set[int]:
    return {storage_key(leaf) for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)}


def user_line() -> str:
    """`"file:line"` of the innermost frame of the calling thread that is neither torch's nor ours."""
    for frame in reversed(traceback.extract_stack()):
        if is_user_file(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return ""


# ---- the tracer ----------------------------------------------------------------------------------------------------


def trace_model(
    model: nn.Module, walk: str, call: CallSpec, tensors: Sequence[Tensor], *, tracer: str, verify: str
) -> Trace:
    """Trace `model` for one signature.

    Args:
        tracer: `"export"`, `"opaque"`, or `"auto"`: export, and opaquely where that fails, with the reason recorded.
        verify: `"error"`, `"warn"` or `"off"`: what to do about host reads.

    Raises:
        TraceError, HostReadError, DeclarationError, or what the forward raises.
    """
    with _TRACE_LOCK:
        declarations = find_declarations(model, walk)
        inference = any(t.is_inference() for t in [*model.parameters(), *model.buffers()])
        with run_mode(inference):
            examples = [t.detach().clone() if t.is_inference() and not inference else t.detach() for t in tensors]
        device_type = examples[0].device.type if examples else "cpu"
        autocast = (device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
        reason = ""
        trace: Trace | None = None
        if tracer != "opaque":
            try:
                trace = export_model(model, call, examples, declarations, inference=inference)
            except HostReadError:
                raise
            except TraceError as error:
                if tracer == "export":
                    raise
                reason = str(error)
        if trace is None:
            trace = trace_opaquely(model, call, examples, declarations, inference=inference, verify=verify)
        trace.reason, trace.autocast = reason, autocast
        return trace


def retrace_uncaptured(
    model: nn.Module, walk: str, call: CallSpec, tensors: Sequence[Tensor], found: HostReadError, *, warn: bool
) -> Trace:
    """For a graph that reads device values, where that is not refused: run the model opaquely and uncaptured."""
    if warn:
        warnings.warn(f"running uncaptured: {found}", stacklevel=2)
    trace = trace_model(model, walk, call, tensors, tracer="opaque", verify="off")
    trace.captures = False
    trace.reason = "host reads in the exported graph"
    trace.diagnostics.extend(found.diagnostics)
    return trace
