"""Notice parameters and buffers that were replaced after the trace.

A graph holds the tensors that the model had when it was traced. In-place updates are followed; a replaced Parameter, a
rebound buffer or `module.to(dtype)` are not, so a replay would silently use the old ones. Checking every tensor at each
launch would cost time that grows with the model; instead, what replaces tensors bumps one process-wide count, and a
launch checks its tensors only when the count has moved. Assigning `tensor.data` or writing `module._buffers` directly
is not seen.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from spangraph.errors import StaleGraphError

_lock = threading.Lock()
_installed = False
_replacements = 0


def _bump(*_: Any) -> None:
    global _replacements
    _replacements += 1


def _install() -> None:
    """Count what replaces tensors: registration, by `setattr` too, and `Module._apply` (`to`, `half`, `cuda`)."""
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
            return apply(self, *args, **kwargs)

        nn.Module._apply = counted  # type: ignore[method-assign]


class Weights:
    """The parameters and buffers of a model at its trace.

    Args:
        addresses: whether the graph has their addresses baked in, as a captured one has.
    """

    def __init__(self, model: nn.Module, *, addresses: bool) -> None:
        _install()
        self._addresses = addresses
        self._seen = _replacements
        self._held = [
            (f"{fqn}.{name}" if fqn else name, held, name, tensor, tensor.data_ptr(), tensor.dtype, tensor.device)
            for fqn, module in model.named_modules()
            for held in (module._parameters, module._buffers)
            for name, tensor in held.items()
            if tensor is not None
        ]

    def check(self) -> None:
        """Constant time while nothing was replaced anywhere.

        Raises:
            StaleGraphError: naming what was replaced.
        """
        if self._seen == _replacements:
            return
        seen = _replacements
        stale = [fqn for fqn, *held in self._held if self._is_stale(*held)]
        if stale:
            more = f" and {len(stale) - 4} more" if len(stale) > 4 else ""
            raise StaleGraphError(
                f"{', '.join(stale[:4])}{more} was replaced after the trace, so the graph would compute with the old"
                " tensor. Update weights in place (copy_, load_state_dict without assign=True), or compile again."
            )
        self._seen = seen

    def _is_stale(self, held: dict[str, Any], name: str, tensor: Tensor, address: int, dtype: Any, device: Any) -> bool:
        if held.get(name) is not tensor or tensor.dtype != dtype or tensor.device != device:
            return True
        return self._addresses and tensor.data_ptr() != address
