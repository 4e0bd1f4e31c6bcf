"""Hooks on the declaring submodules, which see what a forward marks."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spangraph.declare import Declaration
from spangraph.errors import DeclarationError
from spangraph.passes.marks import MarkInfo
from spangraph.spans import Span, iter_spanned
from spangraph.structure import register_dataclasses


class Marking:
    """Hooks on the declaring submodules, for the time of one forward.

    Each firing checks what the module returned, and records its values, spans and row values under the key
    `fqn` (`fqn[k]` for the k-th further call). With `emit` it also puts mark ops into the graph being traced. What does
    not fit is given to `refuse`, which raises it unless told otherwise.
    """

    def __init__(
        self,
        declarations: Sequence[Declaration],
        *,
        emit: bool,
        refuse: Callable[[DeclarationError], None] | None = None,
    ) -> None:
        self.infos: dict[tuple[str, str], MarkInfo] = {}
        self.values: dict[tuple[str, str], tuple[Tensor, Tensor | None]] = {}
        self._declarations = declarations
        self._emit = emit
        self.returned: list[tuple[Declaration, str, Tensor]] = []  # spans as the modules returned them
        self._refuse = refuse or _raise
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
                error = DeclarationError(
                    f"SG109 {info.name!r} of {info.fqn or 'the root module'} ({info.where}) is overwritten after its"
                    " submodule returned it: its rows would hold the later values. Return a clone()."
                )
                self._refuse_at(info.where, error)
        for i, declaration in enumerate(self._declarations):
            if declaration.names and i not in self._fired:
                error = DeclarationError(
                    f"SG107 {declaration} declares {sorted(declaration.names)} but was not called"
                    f" ({declaration.where}). Hooks fire when a module is called as module(...): for another method say"
                    " spangraph.declare(module, ..., method='decode'); for a walk that does not use it, declare"
                    " nothing."
                )
                self._refuse_at(declaration.where, error)

    def _refuse_at(self, where: str, error: DeclarationError) -> None:
        error.where = error.where or where
        self._refuse(error)

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
        try:
            self._read(index, declaration, out, args, kwargs)
        except DeclarationError as error:
            self._refuse_at(declaration.where, error)

    def _read(
        self, index: int, declaration: Declaration, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
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
                f"SG108 {declaration}: {name!r} is declared twice for one call; use different names. (declare() changes"
                " the module itself: call it once.)"
            )
        self.infos[key, name] = MarkInfo(key, declaration.fqn, name, span, declaration.where)
        if spans is not None:
            self.returned.append((declaration, name, spans))
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
        return any(seen is spans for _, _, seen in self.returned)


def _raise(error: DeclarationError) -> None:
    raise error


def check_marked(out: Any, marking: Marking) -> None:
    """Refuse spans that no declaration announced.

    Raises:
        DeclarationError: if the model's output holds a `SpannedOutput` with spans whose module declares nothing.
    """
    register_dataclasses(out)  # else it cannot be looked into
    for spanned in iter_spanned(out):
        if lost := sorted(name for name, spans in spanned.output_spans.items() if not marking.is_declared(spans)):
            raise DeclarationError(
                f"SG102 the model returned a SpannedOutput with spans for {lost}, but no submodule declares them on"
                " this walk: define spanned_outputs(walk) on the module whose forward returns it."
            )


def marked_tensors(marking: Marking) -> list[Tensor]:
    return [tensor for pair in marking.values.values() for tensor in pair if tensor is not None]
