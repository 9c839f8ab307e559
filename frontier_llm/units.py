"""Sizes, times and counts as people read them. Everything else in the package is in base units."""

import math
from collections.abc import Sequence

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB


def format_bytes(count: float) -> str:
    """Write a number of bytes with a binary prefix: `format_bytes(3 * GIB) == "3.00 GiB"`."""
    for size, suffix in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(count) >= size:
            return f"{count / size:.2f} {suffix}"
    return f"{count:.0f} B"


def format_count(count: float, digits: int | None = None) -> str:
    """Write a number with a decimal prefix: `format_count(22.06e9) == "22.06B"`.

    Args:
        count: the number.
        digits: significant digits; None: two digits after the point.
    """
    if digits is not None:
        count = float(f"{count:.{digits}g}")
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= size:
            number = f"{count / size:.2f}" if digits is None else f"{count / size:.10g}"
            return f"{number}{suffix}"
    return f"{count:.0f}"


def counted(number: int, noun: str, separator: str = "") -> str:
    """Write a number with a noun in singular or plural: `1 rank`, `2 ranks`, `2 batches`.

    The separator `,` of thousands is for numbers that may be large: `1,024 files`.
    """
    plural = "" if number == 1 else "es" if noun.endswith(("ch", "s", "x")) else "s"
    return f"{number:{separator}} {noun}{plural}"


def name_ranks(ranks: Sequence[int], most: int = 16) -> str:
    """Write numbers of ranks: `rank 3`, `ranks 1, 3`, `ranks 0, 1 and 7 more` (`most` is 2)."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return "ranks " + ", ".join(map(str, ranks[:most])) + more


def format_figure(value: float, digits: int = 2) -> str:
    """Write a number with so many significant digits: `210`, `2.0`, `0.030`; zero is `0`."""
    rounded = float(f"{value:.{digits}g}")
    before_point = math.floor(math.log10(abs(rounded))) + 1 if rounded else digits
    return f"{rounded:.{max(0, digits - before_point)}f}"


def format_seconds(seconds: float) -> str:
    """Write a duration: `2 h 05 min`, `3 min 20 s`, `4.2 s`, `12 ms`."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:.0f} ms"
