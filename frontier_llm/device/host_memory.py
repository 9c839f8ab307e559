"""How a rank that computes on a CPU gets its memory."""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of glibc's mallopt(3)."""
_KEPT_BYTES = 2**31 - 1
"""At the top of the heap: the most that mallopt takes."""
_LARGEST_BYTES = 32 * 2**20
"""Of one allocation that comes from the heap: the most that mallopt takes."""


def keep_freed_memory() -> bool:
    """Have malloc keep what is freed for the next request, instead of giving it to the kernel.

    Activations and gathered parameters come and go in every step in the same sizes. What the
    kernel takes back it must clear and map again, page by page.

    Returns:
        Whether this system's malloc can.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES) and mallopt(_TRIM_THRESHOLD, _KEPT_BYTES))
