"""Notice parameters and buffers that were replaced after the trace.

A graph holds the tensors that the model had when it was traced. In-place updates are followed; a replaced Parameter, a
rebound buffer or `module.to(dtype)` are not, so a replay would silently use the old ones. Checking every tensor at each
launch would cost time that grows with the model; instead, what replaces tensors bumps one process-wide count, and a
launch checks all its tensors only when the count has moved. So does the end of a traced tensor's memory, which is how
`parameter.data = ...` shows. Where somebody keeps the old memory alive it does not: then a captured graph still notices
within a few launches, as each of them checks the next few tensors in turn.

A 0-d integer buffer that the graph holds as a number is compared after a `load_state_dict`; one that is written in
place by hand is not.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from spangraph.errors import StaleGraphError

# Tensors that a launch of a captured graph checks: all of a small model's, at about 0.1 us each.
_NUM_PROBES = 8

_lock = threading.Lock()
_installed = False
_replacements = 0
_loads = 0


def _bump(*_: Any) -> None:
    global _replacements
    _replacements += 1


def _install() -> None:
    """Count what replaces tensors: registration, by `setattr` too, and `Module._apply` (`to`, `half`, `cuda`); and what
    loads their values."""
    global _installed
    with _lock:
        if _installed:
            return
        _installed = True
        nn_module.register_module_parameter_registration_hook(_bump)
        nn_module.register_module_buffer_registration_hook(_bump)
        apply = nn.Module._apply

        @functools.wraps(apply)
        def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            _bump()
            return apply(self, *args, **kwargs)  # type: ignore[no-untyped-call]

        load = nn.Module.load_state_dict

        @functools.wraps(load)
        def counted_load(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            global _loads
            try:
                return load(self, *args, **kwargs)
            finally:
                _loads += 1

        nn.Module._apply = counted  # type: ignore[method-assign]
        nn.Module.load_state_dict = counted_load  # type: ignore[method-assign]


class Weights:
    """The parameters and buffers of a model at its trace.

    Args:
        addresses: whether the graph has their addresses baked in, as a captured one has.
        literals: buffers that the graph holds as numbers: module's buffers, name and number of each.
        probe_all: check all tensors at every launch, at a cost that grows with the model.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        addresses: bool,
        literals: Sequence[tuple[dict[str, Any], str, int]] = (),
        probe_all: bool = False,
    ) -> None:
        _install()
        self._probe_all = probe_all
        self._literals = literals
        self._seen_loads = _loads
        self._addresses = addresses
        self._next_probe = 0
        self._seen = _replacements
        self._held = [
            (f"{fqn}.{name}" if fqn else name, held, name, tensor, tensor.data_ptr(), tensor.dtype, tensor.device)
            for fqn, module in model.named_modules()
            for held in (module._parameters, module._buffers)
            for name, tensor in held.items()
            if tensor is not None
        ]
        # Gone with this object, without a call, or with the memory, with one.
        self._memory = [weakref.ref(tensor.untyped_storage(), _bump) for *_, tensor, _, _, _ in self._held]

    def check(self) -> None:
        """Notice a replaced tensor, in a time that does not grow with the model while nothing was replaced anywhere.

        Raises:
            StaleGraphError: naming what was replaced.
        """
        if self._seen_loads != _loads:
            self._check_literals()
        seen = _replacements
        suspects = self._probes() if self._seen == seen and not self._probe_all else self._held
        stale = [suspect[0] for suspect in suspects if self._is_stale(*suspect[1:])]
        if stale:
            more = f" and {len(stale) - 4} more" if len(stale) > 4 else ""
            raise StaleGraphError(
                f"{', '.join(stale[:4])}{more} was replaced after the trace, so the graph would compute with the old"
                " tensor. Update weights in place (copy_, load_state_dict without assign=True), or compile again."
            )
        self._seen = seen

    def _check_literals(self) -> None:
        seen = _loads
        for buffers, name, number in self._literals:
            tensor = buffers.get(name)
            if tensor is not None and int(tensor.item()) != number:
                raise StaleGraphError(
                    f"buffer {name!r} was {number} at the trace, which the graph holds as a number, and is now"
                    f" {int(tensor.item())}: compile again."
                )
        self._seen_loads = seen

    def _probes(self) -> list[tuple[str, dict[str, Any], str, Tensor, int, Any, Any]]:
        if not self._addresses:
            return []  # it computes with the tensors themselves, wherever their memory is
        first = self._next_probe
        self._next_probe = first + _NUM_PROBES if first + _NUM_PROBES < len(self._held) else 0
        return self._held[first : first + _NUM_PROBES]

    def _is_stale(self, held: dict[str, Any], name: str, tensor: Tensor, address: int, dtype: Any, device: Any) -> bool:
        # Without get(): a ScriptModule's dicts have none.
        if name not in held or held[name] is not tensor or tensor.dtype != dtype or tensor.device != device:
            return True
        return self._addresses and tensor.data_ptr() != address
