"""Run a forward without leaving a trace in the model, and note what it reads on the host and changes there."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from spangraph.backends import preserve_generators
from spangraph.diagnostics import Diagnostic
from spangraph.host_state import HostState, storage_key
from spangraph.passes.host_reads import diagnose_read, read_by
from spangraph.passes.nodes import is_user_file, written_values
from spangraph.trace import run_mode


class SavedMemory:
    """Storages as they were before their first write by an operator, to be put back."""

    def __init__(self) -> None:
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def before(self, func: Any, args: Any, kwargs: Any, belongs: Callable[[Tensor], bool]) -> None:
        """Save what `func(*args, **kwargs)` is about to write, of the tensors for which `belongs` holds."""
        for tensor in written_by(func, args, kwargs):
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


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
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

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, inputs: Sequence[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads: list[Diagnostic] = []
        self.external: set[int] = set()
        self.state = HostState(model)
        self._made: set[int] = set()
        self._memory = SavedMemory()
        self.owned = {storage_key(tensor) for tensor in [*model.parameters(), *model.buffers(), *inputs]}
        self.owned |= self.state.tensors.keys()
        self._calls = Calls(self._note)

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

    def _check(self, func: Any, args: Any, kwargs: Any) -> None:
        if what := read_by(func, args, kwargs):
            self._note(what)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._check(func, args, kwargs)
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        self._memory.before(func, args, kwargs, lambda tensor: storage_key(tensor) in self.owned)
        self.external.update(_storages((args, kwargs)) - self._made)
        out = func(*args, **kwargs)
        self._made.update(_storages(out) - self.external)
        return out

    def __enter__(self) -> Self:
        self._generators = [(generator, generator.get_state()) for generator in self.state.generators]
        self._calls.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._calls.__exit__(*exc)  # type: ignore[no-untyped-call]
        self._memory.restore()
        for generator, state in self._generators:
            generator.set_state(state)


# Reads that reach no operator on CPU, and another one (a copy) elsewhere.
HOST_CALLS = {
    Tensor.tolist: "a tensor's values (.tolist())",
    Tensor.numpy: "a tensor's values (.numpy())",
    Tensor.__array__: "a tensor's values (numpy)",
}


class Calls(TorchFunctionMode):
    """Notes which tensors a forward uses, and host reads that reach no operator."""

    def __init__(self, note: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self.used: set[int] = set()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():  # a branch of torch.cond, or a nested torch.compile
            return func(*args, **(kwargs or {}))
        self.used.update(map(id, tensors_in((args, kwargs))))
        if self._note is not None and (what := HOST_CALLS.get(func)):
            self._note(what)
        return func(*args, **(kwargs or {}))


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors among the leaves."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storages(tree: Any) -> set[int]:
    return {storage_key(tensor) for tensor in tensors_in(tree) if tensor.layout is torch.strided}


def user_line() -> str:
    """`"file:line"` of the innermost frame of the calling thread that is neither torch's nor ours."""
    for frame, line in traceback.walk_stack(None):
        if is_user_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{line}"
    return ""


def is_for_inference(model: nn.Module) -> bool:
    """Whether some of the model's tensors were made in inference mode: then it must run in it."""
    return any(tensor.is_inference() for tensor in [*model.parameters(), *model.buffers()])


def run_watched(
    model: nn.Module,
    run: Callable[..., Any],
    tensors: Sequence[Tensor],
    generators: Sequence[torch.Generator] = (),
    kind: type[Watch] = Watch,
) -> tuple[Any, Watch]:
    watch = kind(model, tensors)
    device = tensors[0].device if tensors else torch.device("cpu")
    with run_mode(is_for_inference(model)), preserve_generators(device, generators), watch:
        out = run(*tensors)
    # What the forward has bound in the model is the model's from now on, though the forward made it.
    watch.external |= HostState(model).tensors.keys() | {storage_key(buffer) for buffer in model.buffers()}
    return out, watch


def settle(
    model: nn.Module,
    run: Callable[..., Any],
    tensors: Sequence[Tensor],
    generators: Sequence[torch.Generator] = (),
    kind: type[Watch] = Watch,
) -> tuple[Any, Watch, list[str]]:
    """Run a forward under a watch; and where that changed something on the host once more, to see whether each call
    does so (a counter, a cache that grows) or only the first (a table built on first use).

    Returns what the first run returned, its watch, and what each call changes; where it does, all is as before, else
    the table stays.
    """
    before = HostState(model)
    try:
        out, first = run_watched(model, run, tensors, generators, kind)
    except BaseException:
        before.restore()
        raise
    if not before.changes():
        return out, first, []
    between = HostState(model)
    _, watch = run_watched(model, run, tensors, generators, kind)
    changed = [c.label for c in between.changes() if between.is_buffers(c.box) or c.is_state(watch.used)]
    changed += [label for key, label in between.tensors.items() if key in watch.written and key not in before.tensors]
    if changed:
        before.restore()
    return out, first, changed
