"""Stands in for `megatron.core.jit`, so that importing megatron-core does not load a compiler.

megatron decorates small functions with `jit_fuser`, which is `torch.compile`. This loads torch's
compiler at import, which takes longer than importing torch, and most processes call none of these
functions. Here a function is handed to `torch.compile` at its first call.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

_Function = Callable[..., Any]


def stand_in() -> None:
    """Make megatron import this module in place of its own, unless that is imported already."""
    sys.modules.setdefault("megatron.core.jit", sys.modules[__name__])


def jit_fuser(function: _Function) -> _Function:
    """Return a function that is compiled when it is called first.

    In code that is being compiled it is part of that code, as a compiled function would be.
    """
    import torch

    compiled: _Function | None = None

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal compiled
        if torch.compiler.is_compiling():
            return function(*arguments, **options)
        if compiled is None:
            compiled = torch.compile(function)
        return compiled(*arguments, **options)

    return call
