"""Parameters that must not be read now: their memory is freed, or their update is under way.

A read of such a parameter by any operation of torch calls a function first, which makes the values
available or raises an error. So nobody reads freed memory, or values before their update.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

_METADATA = frozenset(
    [
        *(
            getattr(torch.Tensor, name).__get__
            for name in (
                "shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad", "ndim",
                "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "_version", "grad_fn",
                "itemsize",
            )
        ),
        *(getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad")),
        *(
            getattr(torch.Tensor, name)
            for name in (
                "size", "stride", "numel", "nelement", "dim", "ndimension", "element_size",
                "is_contiguous", "is_floating_point", "is_complex", "storage_offset", "__hash__",
                "requires_grad_", "register_hook", "register_post_accumulate_grad_hook",
            )
        ),
    ]
)  # fmt: skip
"""Functions that read no values."""


class Guarded(nn.Parameter):
    """A parameter that calls `before_read` before any operation reads its values."""

    before_read: Callable[[], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _METADATA:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Guarded):
                    value.before_read()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.before_read()  # from here on this is an ordinary parameter
        return nn.Parameter.__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.before_read()
        return nn.Parameter.__reduce_ex__(self, protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Parameter of shape {tuple(self.shape)} whose values are not available now"

    def __format__(self, spec: str) -> str:
        return nn.Parameter.__format__(self, spec) if spec else repr(self)


def guard(parameter: nn.Parameter, before_read: Callable[[], None]) -> None:
    """Call a function before a parameter is read, until `unguard`; it must call that, or raise."""
    if type(parameter) in (nn.Parameter, Guarded):
        parameter.__class__ = Guarded
        parameter.before_read = before_read  # type: ignore[attr-defined]


def unguard(parameter: nn.Parameter) -> None:
    """Make a guarded parameter an ordinary one."""
    if type(parameter) is Guarded:
        del parameter.before_read
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def in_backward() -> bool:
    """Return whether autograd runs. A forward pass inside it recomputes activations."""
    return torch._C._current_graph_task_id() != -1
