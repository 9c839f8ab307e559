"""Measure the memory that passes hold, by following every tensor from its creation to its end."""

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class HeldBytes(TorchDispatchMode):
    """Counts the storages that operators allocate while this mode is on.

    Storages that existed before do not count. Memory that a kernel allocates for itself is not
    seen.

    Attributes:
        current: bytes of the storages that were allocated and live now.
        peak: largest value of `current` so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = 0
        self._living: set[int] = set()  # addresses of C++ objects

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and count the storages of its results that no argument has."""
        kwargs = kwargs or {}
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **kwargs)
        for storage in _storages(result):
            if storage._cdata not in given | self._living:
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._living.add(key)
        self.current += size
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._remove, key, size).atexit = False

    def _remove(self, key: int, size: int) -> None:
        self._living.discard(key)
        self.current -= size


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    """Return the storages of all tensors in nested lists, tuples and dictionaries."""
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
