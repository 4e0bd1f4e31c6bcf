"""From a model to a flat fx graph in which every declaration is a mark.

Two tracers give the same form. `export` is non-strict `torch.export` at static shapes: forward hooks on the declaring
submodules emit mark ops, which survive it. `opaque` makes the root one leaf call and collects what the hooks see; it
takes what does not export. Either way the graph's inputs are the tensor leaves of `(args, kwargs)` in order, its output
is a flat tuple of tensors, and everything else in the output is a constant of the trace.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import inspect
import logging
import sys
import threading
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from spangraph.backends import preserve_generators
from spangraph.declare import Declaration, Span, SpannedOutput, find_declarations, iter_spanned
from spangraph.diagnostics import Diagnostic
from spangraph.errors import DeclarationError, HostReadError, SpangraphError, TraceError
from spangraph.host_state import Change, HostState, preserve_random, storage_key
from spangraph.passes.host_reads import diagnose_read, erase_dead_nodes, host_read_error, read_by
from spangraph.passes.marks import MarkInfo
from spangraph.passes.nodes import is_user_file, placeholders, storage_roots, written, written_values

aten = torch.ops.aten

# torch.export patches global state: parallel traces break each other.
_TRACE_LOCK = threading.Lock()


class _Tracing(threading.local):
    active = False


_tracing = _Tracing()

# Leaves of (args, kwargs) that may be baked into a graph: compared by type and value.
_CONSTANTS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


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
        rebinds: what an opaque forward changes on the host at every call: attributes, rebound buffers, random states.
        writes_inputs: inputs that the forward writes, by index.
        literals: 0-d integer buffers that the graph holds as numbers.
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
    writes_inputs: Sequence[int] = ()
    literals: Sequence[tuple[dict[str, Tensor | None], str, int]] = ()
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
    if isinstance(leaf, slice):
        return all(map(is_constant, (leaf.start, leaf.stop, leaf.step)))
    return isinstance(leaf, (*_CONSTANTS, enum.Enum, range))


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


class _HostStateError(TraceError):
    """A forward changes what no graph sees."""


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
        self._calls: Counter[int] = Counter()
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
            if declaration.names and i not in self._fired:
                raise DeclarationError(
                    f"SG107 {declaration} declares {sorted(declaration.names)} but was not called"
                    f" ({declaration.where}). Hooks fire when a module is called as module(...): for another method say"
                    " spangraph.declare(module, ..., method='decode'); for a walk that does not use it, declare"
                    " nothing."
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
            self._refuse_hidden(declaration, out)
            return
        fqn = declaration.fqn
        call = self._calls[index]
        self._calls[index] += 1
        key = f"{fqn}[{call}]" if call else fqn
        for name, spans in spanned.output_spans.items():
            self._record(key, name, declaration, declaration.spans[name], spanned.outputs[name], spans)
        for name, values in spanned.row_values.items():
            self._record(key, name, declaration, None, values, None)

    def _refuse_hidden(self, declaration: Declaration, out: Any) -> None:
        """Spans inside a tuple or dict that a declaring module returned would be lost on the way."""
        for inner in iter_spanned(out):
            hidden = {
                n for n, spans in inner.output_spans.items() if n in declaration.spans and not self.is_declared(spans)
            }
            if hidden:
                raise DeclarationError(
                    f"SG101 {declaration} returned a {type(out).__name__} that holds a SpannedOutput with spans for"
                    f" {sorted(hidden)}: return the SpannedOutput itself; its outputs may hold more than is spanned."
                )

    def _record(
        self, key: str, name: str, declaration: Declaration, span: Span | None, value: Tensor, spans: Tensor | None
    ) -> None:
        if (key, name) in self.infos:
            raise DeclarationError(
                f"SG108 {declaration}: {name!r} is declared twice for one call; use different names."
            )
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
                f"SG102 the model returned a SpannedOutput with spans for {lost}, but no submodule declares them on"
                " this walk: define spanned_outputs(walk) on the module whose forward returns it."
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


def _holds_tensors(leaf: Any, seen: set[int] | None = None) -> bool:
    seen = set() if seen is None else seen
    if isinstance(leaf, Tensor):
        return True
    if isinstance(leaf, (*_CONSTANTS, type)) or id(leaf) in seen:
        return False
    seen.add(id(leaf))
    if isinstance(leaf, dict | list | tuple | set | frozenset | deque):
        children = [*leaf, *leaf.values()] if isinstance(leaf, dict) else list(leaf)
    else:
        slots = [name for base in type(leaf).__mro__ for name in getattr(base, "__slots__", ())]
        children = [*getattr(leaf, "__dict__", {}).values(), *(getattr(leaf, name, None) for name in slots)]
    return any(_holds_tensors(child, seen) for child in children)


# ---- export --------------------------------------------------------------------------------------------------------


class _Root(nn.Module):
    """Flat tensors in, flat tensors out; structure and marks are left in `notes`."""

    def __init__(
        self, model: nn.Module, call: CallSpec, declarations: Sequence[Declaration], notes: dict[str, Any]
    ) -> None:
        super().__init__()
        self.model = model
        self._call = call
        self._declarations = declarations
        self._notes = notes

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = self._call.build(tensors)
        with _literal_buffers(self.model, self._notes) as calls:
            before = HostState(self.model)
            try:
                with Marking(self._declarations, emit=True).hooked() as marking, calls:
                    out = self.model(*args, **kwargs)
                leaves, template, paths, spec = flatten_output(out)
                changes = [c for c in before.changes() if before.is_buffers(c.box) or c.is_state(calls.used)]
            finally:
                before.restore()
            delivered = [*leaves, *_marked_tensors(marking)]
            self._notes["changed"] = _repeat_rebinds(before, changes, delivered, self._notes)
        check_marked(out, marking)
        self._notes.update(infos=marking.infos, template=template, paths=paths, spec=spec)
        return tuple(leaves)


def _marked_tensors(marking: Marking) -> list[Tensor]:
    return [tensor for pair in marking.values.values() for tensor in pair if tensor is not None]


def _repeat_rebinds(
    before: HostState, changes: Sequence[Change], delivered: Sequence[Tensor], notes: dict[str, Any]
) -> list[str]:
    """Write what a forward has bound to a buffer into the buffer itself, as the graph's last nodes.

    Returns the labels of the other changes, which no node can repeat.
    """
    memory = {storage_key(tensor) for tensor in delivered}
    others = []
    for change in changes:
        old, new = change.old, change.new
        if id(old) in notes["held"]:
            _keep_buffer(notes, id(old))
        elif (
            before.is_buffers(change.box)
            and isinstance(old, Tensor)
            and isinstance(new, Tensor)
            and (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
            and storage_key(old) not in memory  # it would be delivered after the write
        ):
            old.copy_(new)
        else:
            others.append(change.label)
    return others


@contextlib.contextmanager
def _literal_buffers(model: nn.Module, notes: dict[str, Any]) -> Iterator[_Calls]:
    """Give 0-d int buffers literal values inside the trace, so that reads of them are constants of the graph.

    A buffer that the forward writes must stay a buffer: it is noted in `notes["written"]`, and the trace repeated.
    Those that the forward uses are noted in `notes["used"]`.
    """
    held: dict[int, tuple[dict[str, Tensor | None], str, Tensor, Tensor, int]] = {}
    for buffers, name, value in notes["literals"]:
        buffer = buffers[name]
        if notes["identities"][id(buffers), name] not in notes["written"]:
            literal = torch.tensor(value, dtype=buffer.dtype)
            buffers[name] = literal
            held[id(literal)] = (buffers, name, buffer, literal, literal._version)
    notes["held"] = {key: notes["identities"][id(buffers), name] for key, (buffers, name, *_) in held.items()}
    calls = _Calls()
    try:
        yield calls  # to be entered for the forward alone
    finally:
        for key, (buffers, name, buffer, literal, version) in held.items():
            if literal._version != version:
                _keep_buffer(notes, key)
            buffers[name] = buffer
    used = {(id(buffers), name) for key, (buffers, name, *_) in held.items() if key in calls.used}
    notes["used"] = [literal for literal in notes["literals"] if (id(literal[0]), literal[1]) in used]


def _keep_buffer(notes: dict[str, Any], literal: int) -> None:
    notes["written"].add(notes["held"][literal])
    notes["retry"] = True


def _int_buffers(model: nn.Module) -> list[tuple[dict[str, Tensor | None], str, int]]:
    return [
        (module._buffers, name, int(buffer.item()))
        for module in model.modules()
        if isinstance(module._buffers, dict)  # not a ScriptModule's
        for name, buffer in module._buffers.items()
        if buffer is not None
        and buffer.ndim == 0
        and not buffer.is_floating_point()
        and not buffer.is_complex()
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
    notes: dict[str, Any] = {"written": set()}
    # Literals are given only to buffers that hold a Python-readable value; bools are flags that code branches on.
    notes["literals"] = _int_buffers(model)
    # Of the buffers themselves: inside the trace fake ones stand in for them, new ones each time.
    notes["identities"] = {(id(buffers), name): id(buffers[name]) for buffers, name, _ in notes["literals"]}
    for _ in range(len(notes["literals"]) + 1):
        notes["retry"] = False
        root = _Root(model, call, declarations, notes)
        gm = _export(root, tensors, inference)
        if not notes["retry"]:
            break
    if notes["changed"]:
        raise _HostStateError(
            f"the forward changes {', '.join(notes['changed'])} at every call, which a graph would do once, at its"
            " trace: keep such state in registered buffers, and update them in place."
        )
    gm.graph.set_codegen(fx.graph.CodeGen())  # inputs and outputs are flat: no pytree at each call
    gm = erase_dead_nodes(gm)
    gm._forward_pre_hooks.clear()  # shape checks: the caller's signature is one already
    gm.recompile()
    trace = _trace_of(gm, notes["infos"], notes["template"], notes["paths"], notes["spec"], "export", inference)
    trace.literals = notes["used"]
    roots, inputs = storage_roots(gm.graph), placeholders(gm.graph)
    touched = {roots[target] for node in gm.graph.nodes for target in written(node)}
    trace.writes_inputs = [i for i, node in enumerate(inputs) if node in touched]
    return trace


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


def _export(root: _Root, tensors: Sequence[Tensor], inference: bool) -> fx.GraphModule:
    try:
        with run_mode(inference), warnings.catch_warnings(), _quiet(), _refuse_writes(root.model):
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
    """Keep an export that fails from logging, and from printing its half-built graph: the error says enough."""
    thread = threading.get_ident()

    def is_elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != thread

    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addFilter(is_elsewhere)
    try:
        with contextlib.redirect_stderr(_WithoutGraphs(sys.stderr, thread)):
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_elsewhere)


class _WithoutGraphs:
    """Standard error without the graphs that one thread prints."""

    def __init__(self, stream: Any, thread: int) -> None:
        self._stream = stream
        self._thread = thread
        self._dropped = False

    def write(self, text: str) -> int:
        mine = threading.get_ident() == self._thread
        drop = mine and ("def forward(self" in text or (self._dropped and text == "\n"))
        if mine:
            self._dropped = drop
        return len(text) if drop else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _refuse_writes(model: nn.Module) -> Iterator[None]:
    """Refuse an export that writes a tensor which is a plain attribute: export would write it once, for real."""
    state = HostState(model)
    with _AttributeGuard(state.tensors) if state.tensors else contextlib.nullcontext():
        yield


class _AttributeGuard(TorchDispatchMode):
    def __init__(self, attributes: dict[int, str]) -> None:
        super().__init__()
        self._attributes = attributes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _written_by(func, args, kwargs or {}):
            if (label := self._attributes.get(storage_key(tensor))) is not None:
                raise _HostStateError(
                    f"the forward writes {label}, a tensor that is a plain attribute, so a graph would get a copy of"
                    " its own: make it a registered buffer."
                )
        return func(*args, **(kwargs or {}))


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
        leaves, template, paths, spec = flatten_output(out)
        check_marked(out, marking)
        marked = [(tensor.shape, tensor.dtype) for tensor in _marked_tensors(marking)]
        found = {"structure": spec, "spans": list(marking.infos), "spanned shapes": marked, "constants": template}
        if self._expected is None:
            self._expected = found
            self.notes = (marking.infos, template, paths, spec)
        elif changed := [what for what, value in found.items() if value != self._expected[what]]:
            what = changed[0]
            raise TraceError(
                f"the model's output has other {what} than at its first run: {found[what]}, not"
                f" {self._expected[what]}. One signature must always return the same outputs and spans; use another"
                " walk or a constant argument."
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
    generators: Sequence[torch.Generator] = (),
) -> Trace:
    """Trace by running the model once; the run leaves no trace in buffers, other state and generators.

    Raises:
        HostReadError: if the forward reads device values on the host and `verify` is "error".
        DeclarationError, or whatever the forward raises.
    """
    root = OpaqueRoot(model, call, declarations)
    (leaves, watch), rebinds = _settle(model, lambda: _run_watched(model, root, tensors, inference, generators))
    if watch.reads and verify != "off":
        error = host_read_error(watch.reads)
        if verify == "error":
            raise error
        warnings.warn(f"running uncaptured: {error}", stacklevel=2)
    infos, template, paths, spec = root.notes
    num_outputs = sum(not isinstance(leaf, Constant) for leaf in template)
    gm = _opaque_graph(root, tensors, leaves, infos, watch.external | watch.owned, num_outputs=num_outputs)
    trace = _trace_of(gm, infos, template, paths, spec, "opaque", inference)
    trace.captures, trace.rebinds = not watch.reads, rebinds
    trace.writes_inputs = [i for i, tensor in enumerate(tensors) if storage_key(tensor) in watch.written]
    trace.diagnostics.extend(watch.reads)
    return trace


def _run_watched(
    model: nn.Module,
    run: Callable[..., Any],
    tensors: Sequence[Tensor],
    inference: bool,
    generators: Sequence[torch.Generator],
) -> tuple[Any, Watch]:
    watch = Watch(model, tensors)
    device = tensors[0].device if tensors else torch.device("cpu")
    with run_mode(inference), preserve_generators(device, generators), watch:
        return run(*tensors), watch


def _settle(model: nn.Module, run: Callable[[], tuple[Any, Watch]]) -> tuple[tuple[Any, Watch], list[str]]:
    """Run a forward; and where that changed something on the host once more, to see whether each call does so (a
    counter, a cache that grows) or only the first (a table built on first use).

    Returns what the first run returned, and what each call changes; where it does, all is as before, else the table
    stays.
    """
    before = HostState(model)
    first = run()
    if not before.changes():
        return first, []
    between = HostState(model)
    _, watch = run()
    changed = [c.label for c in between.changes() if between.is_buffers(c.box) or c.is_state(watch.used)]
    changed += [label for key, label in between.tensors.items() if key in watch.written and key not in before.tensors]
    if changed:
        before.restore()
    return first, changed


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


def _clone_external(graph: fx.Graph, external: set[int], leaves: Sequence[Tensor], nodes: list[fx.Node]) -> None:
    """Clone outputs in memory that the forward did not make (inputs, weights, caches): the next step may write it."""
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
    view.meta["val"] = node.meta["val"].permute(0, *order, *ones)
    shown = view.meta["val"].view(leaf.shape)
    view = graph.call_function(aten.view.default, (view, list(leaf.shape)))
    view.meta["val"] = shown
    return view


class SavedMemory:
    """Storages as they were before their first write by an operator, to be put back."""

    def __init__(self) -> None:
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def before(self, func: Any, args: Any, kwargs: Any, belongs: Callable[[Tensor], bool]) -> None:
        """Save what `func(*args, **kwargs)` is about to write, of the tensors for which `belongs` holds."""
        for tensor in _written_by(func, args, kwargs):
            if storage_key(tensor) not in self._saved and belongs(tensor):
                storage = tensor.untyped_storage()
                self._saved[storage_key(tensor)] = (storage, storage.clone())

    @property
    def keys(self) -> set[int]:
        """Identities of the memory that was saved, and so written."""
        return set(self._saved)

    def restore(self) -> None:
        """Put everything back."""
        for storage, copy in self._saved.values():
            storage.copy_(copy)


def _written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Tensors that an operator call writes."""
    return [value for value in written_values(func, args, kwargs) if isinstance(value, Tensor)]


class Watch(TorchDispatchMode):
    """Runs forwards without leaving a trace in the model's tensors and generators and in `inputs`; notes host reads.

    Attributes:
        reads: SG401, one per host read.
        external: storages that operators used and did not make.
        owned: storages of the model and the inputs.
        state: the host's state before.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.reads: list[Diagnostic] = []
        self.external: set[int] = set()
        self.state = HostState(model)
        self._made: set[int] = set()
        self._memory = SavedMemory()
        self.owned = {storage_key(tensor) for tensor in [*model.parameters(), *model.buffers(), *inputs]}
        self.owned |= self.state.tensors.keys()
        self._calls = _Calls(self._note)

    @property
    def used(self) -> set[int]:
        """Ids of the tensors that were used."""
        return self._calls.used

    @property
    def written(self) -> set[int]:
        """Identities of the model's and inputs' memory that was written."""
        return self._memory.keys

    def _note(self, what: str) -> None:
        self.reads.append(diagnose_read(what, user_line()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if what := read_by(func, args, kwargs):
            self._note(what)
        self._memory.before(func, args, kwargs, lambda tensor: storage_key(tensor) in self.owned)
        self.external.update(_storages((args, kwargs)) - self._made)
        out = func(*args, **kwargs)
        self._made.update(_storages(out) - self.external)
        return out

    def __enter__(self) -> Self:
        self._generators = [(generator, generator.get_state()) for generator in self.state.generators]
        self._calls.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._calls.__exit__(*exc)
        self._memory.restore()
        for generator, state in self._generators:
            generator.set_state(state)


# Reads that reach no operator on CPU, and another one (a copy) elsewhere.
_HOST_CALLS = {
    Tensor.tolist: "a tensor's values (.tolist())",
    Tensor.numpy: "a tensor's values (.numpy())",
    Tensor.__array__: "a tensor's values (numpy)",
}


class _Calls(TorchFunctionMode):
    """Notes which tensors a forward uses, and host reads that reach no operator."""

    def __init__(self, note: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self.used: set[int] = set()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.used.update(id(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        if self._note is not None and (what := _HOST_CALLS.get(func)):
            self._note(what)
        return func(*args, **(kwargs or {}))


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
    model: nn.Module,
    walk: str,
    call: CallSpec,
    tensors: Sequence[Tensor],
    *,
    tracer: str,
    verify: str,
    generators: Sequence[torch.Generator] = (),
) -> Trace:
    """Trace `model` for one signature.

    Args:
        tracer: `"export"`, `"opaque"`, or `"auto"`: export, and opaquely where that fails, with the reason recorded.
        verify: `"error"`, `"warn"` or `"off"`: what to do about host reads.
        generators: what the model draws from; they are left as they are.

    Raises:
        TraceError, HostReadError, DeclarationError, or what the forward raises.
    """
    refuse_nested()
    with _TRACE_LOCK:
        _tracing.active = True
        try:
            with preserve_random():
                return _trace_model(model, walk, call, tensors, tracer, verify, generators)
        finally:
            _tracing.active = False


def refuse_nested() -> None:
    """Refuse to launch inside a trace: the launch would be traced, or happen once.

    Raises:
        TraceError: if this thread is tracing.
    """
    if _tracing.active:
        raise TraceError(
            "the forward of a compiled model launches another compiled model: call the plain module inside, and compile"
            " the whole, or launch one after the other outside."
        )


def _trace_model(
    model: nn.Module,
    walk: str,
    call: CallSpec,
    tensors: Sequence[Tensor],
    tracer: str,
    verify: str,
    generators: Sequence[torch.Generator],
) -> Trace:
    declarations = find_declarations(model, walk)
    inference = any(t.is_inference() for t in [*model.parameters(), *model.buffers()])
    with run_mode(inference):
        examples = [t.detach().clone() if t.is_inference() and not inference else t.detach() for t in tensors]
    device_type = examples[0].device.type if examples else "cpu"
    autocast = (device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
    reason = ""
    trace: Trace | None = None

    def run(*tensors: Tensor) -> None:
        args, kwargs = call.build(tensors)
        model(*args, **kwargs)

    if tracer != "opaque":
        try:
            try:
                trace = export_model(model, call, examples, declarations, inference=inference)
            except _HostStateError:
                _, changed = _settle(model, lambda: _run_watched(model, run, examples, inference, generators))
                if changed:
                    raise
                trace = export_model(model, call, examples, declarations, inference=inference)
        except HostReadError:
            raise
        except TraceError as error:
            if tracer == "export":
                raise
            reason = str(error)
    if trace is None:
        trace = trace_opaquely(
            model, call, examples, declarations, inference=inference, verify=verify, generators=generators
        )
    trace.reason, trace.autocast = reason, autocast
    return trace


def locate_reads(
    model: nn.Module, walk: str, call: CallSpec, tensors: Sequence[Tensor], found: HostReadError
) -> HostReadError:
    """The same error with the lines that read: an exported graph knows those of forwards, not of what they call."""
    try:
        trace_model(model, walk, call, tensors, tracer="opaque", verify="error")
    except HostReadError as located:
        return located
    except SpangraphError:
        pass  # what else it is will show where the reads are mended
    return found


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
