"""Trace by `torch._dynamo`: its guards say when the model must be traced again.

Dynamo reads the forward's bytecode, and makes a graph and new bytecode around it. Both run inside a non-strict export,
so that what it makes is what every other graph is: flat, of ATen operators, its weights those of the model.
"""

from __future__ import annotations

import builtins
import contextlib
import re
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, fx, nn
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo.convert_frame import CaptureOutput, fullgraph_capture, register_bytecode_hook
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.guards import GuardBuilder, _get_closure_vars
from torch._dynamo.hooks import Hooks
from torch._dynamo.source import AttrSource, GlobalSource, LocalSource, NumpyTensorSource, TypeDictSource, TypeSource
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.utils import dynamo_timed, get_metrics_context
from torch._guards import ChainedSource, GuardsSet, Source
from torch.fx.traceback import preserve_node_meta
from torch.utils._ordered_set import OrderedSet

from spangraph.backends import preserve_generators
from spangraph.declare import Declaration, pick_output
from spangraph.errors import TraceError
from spangraph.export import Forward, export_model
from spangraph.host_state import INTERNAL, HostState
from spangraph.marking import Marking
from spangraph.opaque import OpaqueRoot
from spangraph.passes.host_reads import host_read_error
from spangraph.passes.marks import MarkInfo
from spangraph.passes.nodes import is_user_file
from spangraph.spans import SpannedOutput
from spangraph.structure import CallSpec
from spangraph.trace import Trace, run_mode
from spangraph.watch import settle

# Sizes and numbers are constants of a signature; what is read from a tensor is refused by a pass, with its line.
_SETTINGS: dict[str, Any] = {
    "allow_rnn": True,
    "assume_static_by_default": True,
    "automatic_dynamic_shapes": False,
    "capture_dynamic_output_shape_ops": True,
    "capture_scalar_outputs": True,
    "specialize_float": True,
    "specialize_int": True,
}

_MARKS = (torch.ops.spangraph.mark.default, torch.ops.spangraph.mark_value.default)

# What a guard is not about. Inputs: the signature says what they are. Modes: those of the trace are entered at each
# launch. What is torch's and ours, and what torch keeps in a module, such as hooks. Weights of the model: `weights`
# watches them, at a cost that does not grow.
_OTHER_GUARDS = {
    "AUTOGRAD_SAVED_TENSORS_HOOKS",
    "DETERMINISTIC_ALGORITHMS",
    "DUPLICATE_INPUT",
    "EMPTY_NN_MODULE_HOOKS_DICT",
    "GLOBAL_STATE",
    "GRAD_MODE",
    "SHAPE_ENV",
    "TORCH_FUNCTION_STATE",
}
_OTHER_ROOTS = ("__import_torch_dot_", "__import_spangraph_dot_", "__builtins_dict__")
_OTHER_MEMBERS = INTERNAL - {"training", "_parameters", "_buffers", "_modules"} | {
    "__code__",
    "_all_weights",
    "_compiled_call_impl",
    "_flat_weights_names",
}
_is_watched = re.compile(
    r"L\['self'\](\._modules\['[^']*'\])*\._(modules|non_persistent_buffers_set|(parameters|buffers)(\['[^']*'\])?)"
).fullmatch


class Guard:
    """What a trace by dynamo holds for, beyond its signature: attributes of modules and classes, globals."""

    def __init__(self, check_manager: Any, scope: Mapping[str, Any], held: Sequence[Any]) -> None:
        self._manager = check_manager.guard_manager
        self._scope = dict(scope)
        self._held = held  # else another could have its identity

    def holds(self) -> bool:
        """Whether all is as it was at the trace."""
        return bool(self._manager.check(self._scope))

    def failure(self) -> str:
        """What is not as it was."""
        parts = self._manager.check_verbose(self._scope).verbose_code_parts
        return "; ".join(" ".join(part.split()) for part in parts)


class _GraphMarking(Marking):
    """Hooks that dynamo reads through: they emit marks, and check nothing."""

    @contextlib.contextmanager
    def hooked(self) -> Iterator[Marking]:
        with contextlib.ExitStack() as stack:
            for i, declaration in enumerate(self._declarations):
                stack.callback(self._install(i, declaration))
            yield self

    def _fire(
        self, index: int, declaration: Declaration, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        outputs: Mapping[str, Any] = {}
        spans: Mapping[str, Any] = {}
        values: Mapping[str, Any] = {}
        if (adapter := declaration.adapter) is not None:
            spans = {name: fn(out, *args, **kwargs) for name, fn in adapter.outputs.items()}
            values = {name: fn(out, *args, **kwargs) for name, fn in adapter.row_values.items()}
            outputs = {name: pick_output(declaration, out, name) for name in spans if spans[name] is not None}
        elif isinstance(out, SpannedOutput):
            outputs, spans, values = out.outputs, out.output_spans, out.row_values
        for name, column in spans.items():
            if column is not None:
                torch.ops.spangraph.mark.default(outputs[name], column, declaration.fqn, name)
        for name, column in values.items():
            if column is not None:
                torch.ops.spangraph.mark_value.default(column, declaration.fqn, name)


class _Interpreter(fx.Interpreter):
    """Runs dynamo's graph; collects the tensors of its marks."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.marked: list[Tensor] = []

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in _MARKS:
            self.marked += [arg for arg in args if isinstance(arg, Tensor)]
        if target is torch.ops.higher_order.tag_activation_checkpoint:  # nothing is recomputed without gradients
            inner = _Interpreter(args[0])
            inner.marked = self.marked
            return inner.run(*args[1:])
        return super().call_function(target, args, kwargs)


def trace_by_dynamo(
    model: nn.Module,
    call: CallSpec,
    tensors: Sequence[Tensor],
    declarations: Sequence[Declaration],
    *,
    inference: bool,
    generators: Sequence[torch.Generator] = (),
) -> Trace:
    """Trace by dynamo in one graph. A run before it, which leaves nothing behind, checks what the forward declares.

    Raises:
        TraceError: naming every graph break with its file:line; or what the forward changes on the host.
        HostReadError: if the graph breaks at a host read.
        DeclarationError, or whatever the forward raises.
    """
    root = OpaqueRoot(model, call, declarations)
    _, watch, _ = settle(model, root, tensors, generators)
    infos = root.notes[0]
    args, kwargs = call.build(tensors)
    holder = _holder(model)
    with run_mode(inference), warnings.catch_warnings(), torch._dynamo.config.patch(_SETTINGS):
        warnings.simplefilter("ignore")  # dynamo warns of what breaks a graph
        try:
            with (
                _GraphMarking(declarations, emit=True).hooked(),
                get_metrics_context(),
                dynamo_timed("spangraph"),
            ):
                captured = fullgraph_capture(holder, args, kwargs)
                guard = _build_guards(captured, holder, declarations)
        except Exception as error:
            if not isinstance(error, TorchDynamoException):
                raise TraceError(f"dynamo failed: {type(error).__name__}: {_first_lines(error, 1)}") from error
            place = _place(error)
            if any(read.where == place for read in watch.reads):
                raise host_read_error(watch.reads) from error
            breaks = [_break(error), *_find_breaks(holder, args, kwargs)]
            lines = "\n".join(f"  {line}" for line in dict.fromkeys(breaks))
            raise TraceError(f"dynamo breaks the graph of the forward:\n{lines}") from None
    trace = export_model(model, call, tensors, declarations, inference=inference, forward=_run(captured, holder, infos))
    trace.tracer, trace.guard = "dynamo", guard
    return trace


def _holder(model: nn.Module) -> nn.Module:
    """A module that calls the model: hooks of a root can become graphs of their own. Dynamo keeps what it makes in the
    globals of what it reads, so they are those of this one forward."""

    def forward(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        return self.model(*args, **kwargs)

    own = types.FunctionType(forward.__code__, {"__builtins__": builtins, "__name__": __name__}, "forward")
    holder: nn.Module = type("Holder", (nn.Module,), {"forward": own})()
    holder.add_module("model", model)
    holder.training = model.training
    return holder


def _build_guards(captured: CaptureOutput, holder: nn.Module, declarations: Sequence[Declaration]) -> Guard:
    """Dynamo's own guards; of a tensor, that it is the same one, as the graph holds it."""
    output, code = captured.graph_capture_output, type(holder).forward.__code__
    scope = {**_get_closure_vars(), "L": {"self": holder}, "G": output.output_graph.global_scope}
    wrappers = [vars(d.module)[d.method] for d in declarations if d.method != "forward"]  # for the trace
    kept: list[Any] = []
    held: list[Any] = []
    classes: set[type] = set()

    def match_identity(source: Source, value: Any) -> None:
        held.append(value)
        kept.append(source.make_guard(GuardBuilder.ID_MATCH))

    def keep(entries: Sequence[Any]) -> list[bool]:
        wrapped = {entry.orig_guard.name for entry in entries if any(entry.value is wrapper for wrapper in wrappers)}
        for entry in entries:
            source, value = entry.orig_guard.originating_source, entry.value
            links = list(_links(source))
            if _is_other(links) or any(link.name in wrapped for link in links):
                continue
            if isinstance(source, NumpyTensorSource):
                match_identity(source.base, eval(source.base.name, scope))
            elif isinstance(value, Tensor):
                match_identity(source, value)
            elif entry.guard_type not in _OTHER_GUARDS:
                kept.append(entry.orig_guard)
            # What dynamo reads unguarded.
            if isinstance(value, nn.Module) and type(value) not in classes:
                classes.add(type(value))
                match_identity(AttrSource(TypeSource(source), "forward"), type(value).forward)
            elif isinstance(value, types.FunctionType):
                match_identity(AttrSource(source, "__defaults__"), value.__defaults__)
        return [False] * len(entries)

    output.build_guards(code, hooks=Hooks(guard_filter_fn=keep))
    output.output_graph._guards = GuardsSet(OrderedSet(kept))
    return Guard(output.build_guards(code), {"self": holder, "args": (), "kwargs": {}}, held)


def _links(source: Source) -> Iterator[Source]:
    """What a guard reads, from the value back to what the forward starts from."""
    while True:
        yield source
        if not isinstance(source, ChainedSource):
            return
        source = source.base


def _is_other(links: Sequence[Source]) -> bool:
    """Whether it is not the forward's, or watched already."""
    root = links[-1]
    return bool(
        (isinstance(root, LocalSource) and root.local_name in ("args", "kwargs"))
        or (isinstance(root, GlobalSource) and root.global_name.startswith(_OTHER_ROOTS))
        or any(getattr(link, "member", None) in _OTHER_MEMBERS for link in links)
        or isinstance(links[0], TypeDictSource)
        or _is_watched(links[0].name)
    )


def _run(captured: CaptureOutput, holder: nn.Module, infos: Mapping[tuple[str, str], MarkInfo]) -> Forward:
    """The forward as dynamo has rewritten it, which calls its graph: what it returns, its marks and their tensors.

    Raises:
        TraceError: if its marks are not those of the run before it.
    """
    made = captured.backend_input  # None if the forward does nothing with tensors
    backend_id, gm = ("", fx.GraphModule({}, fx.Graph())) if made is None else (made.backend_id, made.graph_module)
    marks = list(_marks_in(gm))
    found, expected = [node.args[-1] for node in marks], [name for _, name in infos]
    if found != expected:
        raise TraceError(f"dynamo sees marks of {found}, a run of the forward those of {expected}.")
    for node, (key, name) in zip(marks, infos, strict=True):  # a hook does not count its calls
        node.args = (*node.args[:-2], key, name)
    interpreter = _Interpreter(gm)
    runtime = captured.graph_capture_output.get_runtime_env()
    rewritten = runtime.forward_callable(backend_id, interpreter.run, extra_globals=type(holder).forward.__globals__)

    def forward(*args: Any, **kwargs: Any) -> tuple[Any, Mapping[tuple[str, str], MarkInfo], list[Tensor]]:
        interpreter.marked.clear()
        with preserve_node_meta():  # so that nodes keep the user's lines
            return rewritten(holder, *args, **kwargs), infos, list(interpreter.marked)

    return forward


def _marks_in(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """The marks in a graph and the graphs in it, in the order in which they fire."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in _MARKS:
            yield node
        for arg in node.args:
            inner = getattr(gm, str(arg.target), None) if isinstance(arg, fx.Node) and arg.op == "get_attr" else None
            if isinstance(inner, fx.GraphModule):
                yield from _marks_in(inner)


def _place(error: BaseException) -> str:
    """`"file:line"` of the innermost user frame at which a graph breaks."""
    stack = [f for f in getattr(error, "real_stack", None) or [] if is_user_file(f.filename)]
    return f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "unknown line"


def _break(error: BaseException) -> str:
    """Where a graph breaks, and why."""
    return f"{_place(error)}: {_first_lines(getattr(error, 'msg', error), 2)}"


def _first_lines(text: object, count: int) -> str:
    """What went wrong and, in a second line, why."""
    return ": ".join(line.strip().removeprefix("Explanation: ") for line in str(text).strip().splitlines()[:count])


def _find_breaks(holder: nn.Module, args: Any, kwargs: Any) -> list[str]:
    """Run the model as dynamo does that may break the graph, and note where it does.

    `torch._dynamo.explain` forgets all that the process has compiled; this forgets what it has compiled itself. It also
    knows no break that no operator comes before.
    """
    found: list[str] = []
    mine: list[types.CodeType] = []
    thread, log = threading.get_ident(), InstructionTranslatorBase.log_graph_break

    def note(self: Any, code_options: Any, reason: str, exc: Any) -> None:
        if threading.get_ident() == thread:
            found.append(_break(exc))
        log(self, code_options, reason, exc)

    def own(code: types.CodeType, new_code: types.CodeType) -> None:
        if threading.get_ident() == thread and not _debug_get_cache_entry_list(code):
            mine.append(code)

    state = HostState(holder)
    saved = [(tensor, tensor.detach().clone()) for tensor in holder.buffers()]
    hook = register_bytecode_hook(own)
    InstructionTranslatorBase.log_graph_break = note  # type: ignore[method-assign]
    try:
        with preserve_generators(torch.device("cpu")), contextlib.suppress(Exception):
            torch._dynamo.optimize(_run_eagerly)(holder)(*args, **kwargs)
    finally:
        InstructionTranslatorBase.log_graph_break = log  # type: ignore[method-assign]
        hook.remove()
        state.restore()
        for tensor, value in saved:
            tensor.copy_(value)
        for code in mine:
            reset_code(code)
    return found


def _run_eagerly(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    return gm.forward
