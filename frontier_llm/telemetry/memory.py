"""Memory of this process."""

import psutil


def resident_bytes() -> int:
    """Return the bytes of main memory that this process holds now."""
    return int(psutil.Process().memory_info().rss)
