"""Measure the memory that tensors hold, by following every tensor from its creation to its end."""

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class HeldBytes(TorchDispatchMode):
    """Counts the storages that operators allocate while this mode is on.

    Storages that existed before do not count. A storage that is resized counts with its new size.
    Memory that a kernel allocates for itself is not seen.

    Attributes:
        current: bytes of the storages that were allocated and live now.
        peak: largest value of `current` so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = 0
        self._living: dict[int, int] = {}  # bytes by the address of the C++ object

    def __enter__(self) -> Self:
        """Start to count."""

        # `UntypedStorage.resize_` is no operator, so a dispatch mode does not see it
        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            return self._resize(storage, size)

        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment,method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop to count."""
        super().__exit__(*error)
        del torch.UntypedStorage.resize_  # the method of the base class is visible again

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
            if storage._cdata not in given | self._living.keys():
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        self._living[storage._cdata] = 0
        self._set_size(storage)
        weakref.finalize(storage, self._remove, storage._cdata).atexit = False

    def _remove(self, key: int) -> None:
        self.current -= self._living.pop(key)

    def _resize(self, storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        """Resize a storage, as `UntypedStorage.resize_`."""
        torch._C.StorageBase.resize_(storage, size)  # type: ignore[attr-defined]
        if storage._cdata in self._living:
            self._set_size(storage)
        return storage

    def _set_size(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self.current += size - self._living[storage._cdata]
        self.peak = max(self.peak, self.current)
        self._living[storage._cdata] = size


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    """Return the storages of all tensors in nested lists, tuples and dictionaries."""
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
