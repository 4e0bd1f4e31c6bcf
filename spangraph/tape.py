"""What a capture on the simulated device records: the operators that ran, and the host reads that it refuses."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from spangraph.errors import CaptureError
from spangraph.host_state import storage_key
from spangraph.passes.host_reads import diagnose_read, read_by
from spangraph.watch import SavedMemory, user_line

STAGE = torch.ops.spangraph.stage.default
COMPACT = torch.ops.spangraph.compact.default


@dataclass
class Op:
    func: Any
    spec: pytree.TreeSpec
    leaves: list[Any]  # arguments: Ref or a value; external tensors as they are
    results: list[int | None]


@dataclass(frozen=True)
class Ref:
    index: int


class Tape(TorchDispatchMode):
    """Records operators during a capture. What it runs to learn shapes leaves no trace in memory from outside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Op] = []
        self._indices: dict[int, int] = {}
        self._made: list[Tensor] = []  # keeps ids unique until the end of the capture
        self._memory = SavedMemory()
        self._external: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if what := read_by(func, args, kwargs):
            raise CaptureError(f"operation not permitted when stream is capturing: {diagnose_read(what, user_line())}")
        leaves, spec = pytree.tree_flatten((args, kwargs))
        recorded = [self._argument(leaf) for leaf in leaves]
        if func in (STAGE, COMPACT):  # have no result; and other graphs may write there, which an undo would undo
            self.ops.append(Op(func, spec, recorded, [None]))
            return None
        self._memory.before(func, args, kwargs, lambda tensor: storage_key(tensor) in self._external)
        with torch._C.DisableTorchFunction():  # a host read inside an operator is the operator's own
            out = func(*args, **kwargs)
        self.ops.append(Op(func, spec, recorded, [self._result(leaf) for leaf in pytree.tree_leaves(out)]))
        return out

    def _argument(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in self._indices:
            return Ref(self._indices[id(leaf)])
        self._external.add(storage_key(leaf))
        return leaf.detach()  # the memory of now, as in a captured graph: `parameter.data = ...` leads elsewhere

    def _result(self, leaf: Any) -> int | None:
        if not isinstance(leaf, Tensor):
            return None
        if id(leaf) not in self._indices:
            self._indices[id(leaf)] = len(self._made)
            self._made.append(leaf)
        return self._indices[id(leaf)]

    def makes(self, tensor: Tensor) -> bool:
        """Whether the tensor was made in the capture."""
        return id(tensor) in self._indices

    def finish(self) -> dict[int, Tensor]:
        """Undo what ran; returns the results that somebody still holds: the graph's static memory."""
        self._memory.restore()
        references = [weakref.ref(tensor) for tensor in self._made]
        self._made.clear()
        alive = {i: tensor for i, ref in enumerate(references) if (tensor := ref()) is not None}
        return {i: tensor for i, tensor in alive.items() if storage_key(tensor) not in self._external}


class HostReads(TorchFunctionMode):
    """Refuses what reads a CPU tensor without an operator that the tape would see."""

    _READS: ClassVar = {
        Tensor.tolist: ".tolist()",
        Tensor.numpy: ".numpy()",
        Tensor.__array__: "numpy",
        Tensor.cpu: ".cpu()",
        Tensor.__repr__: "print, repr",
        Tensor.__format__: "print, format",
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._READS:
            read = diagnose_read(f"a tensor's values ({self._READS[func]})", user_line())
            raise CaptureError(f"operation not permitted when stream is capturing: {read}")
        return func(*args, **(kwargs or {}))
