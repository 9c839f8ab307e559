"""Compare the values of a manifest with each other, before anything is read according to them.

The time and memory of the checks depend on the size of the manifest, not on the numbers in it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING

from frontier_llm.geometry.state_memory import MOMENT_BLOCK_ELEMENTS, MOMENT_BLOCK_WORDS

if TYPE_CHECKING:
    from frontier_llm.checkpoint.manifest import Manifest, Moments, StoredRange, Tensor


def problems(manifest: "Manifest") -> Iterator[str]:
    """Yield what is wrong: the entry, a colon, and the reason."""
    for name, file in manifest.files.items():
        chunks = -(-file.size // manifest.chunk_bytes)
        if len(file.chunks) != chunks:
            yield f"files.{name}.chunks: it has {len(file.chunks)} digests for {chunks} chunks"
    sizes = {name: file.size for name, file in manifest.files.items()}
    yield from range_problems(manifest.tensors, sizes, manifest.moments)
    if manifest.repeats:
        return
    for name, tensor in manifest.tensors.items():
        if not _is_stored_once(tensor):
            yield f"tensors.{name}.pieces: they do not store every element exactly once"


def range_problems(
    tensors: "Mapping[str, Tensor]", sizes: Mapping[str, int], moments: "Moments | None"
) -> Iterator[str]:
    """Yield what is wrong with the stored ranges of tensors, each by itself and in its file.

    Args:
        tensors: global tensors by name.
        sizes: sizes of the files in bytes, by name.
        moments: format of reduced moments; None: all states are fp32.
    """
    occupied: dict[str, list[tuple[int, int, str]]] = {name: [] for name in sizes}
    for name, tensor in tensors.items():
        for number, stored in enumerate(tensor.stored_ranges):
            where = f"tensors.{name}.pieces.{number}"
            if problem := _range_problem(stored, tensor, sizes):
                yield f"{where}.{problem}"
                return
            for state, begin in stored.bytes_at.items():
                end = begin + stored_bytes(stored, state, moments)
                occupied[stored.file].append((begin, end, f"{where}.bytes_at.{state}"))
    for file, ranges in occupied.items():
        ranges.sort()
        for (_, end, _), (begin, _, where) in pairwise([(0, 8, ""), *ranges]):
            if begin < end:
                yield f"{where}: byte {begin} of {file} stores something else"
        if ranges and ranges[-1][1] > sizes[file]:
            yield f"{ranges[-1][2]}: {file} ends at byte {sizes[file]}"


def stored_bytes(stored: "StoredRange", state: str, moments: "Moments | None") -> int:
    """Return the size of a state of a stored range in bytes."""
    if moments is None or state not in ("exp_avg", "exp_avg_sq"):
        return 4 * stored.count
    return 4 * -(-stored.count // MOMENT_BLOCK_ELEMENTS) * MOMENT_BLOCK_WORDS[moments]


def _range_problem(stored: "StoredRange", tensor: "Tensor", sizes: Mapping[str, int]) -> str:
    """Return the field of a range that is wrong, and why; empty if none is."""
    if stored.file not in sizes:
        return f"file: {stored.file} is not one of the checkpoint's files"
    states = tensor.stored_ranges[0].keys.keys()
    if not states or not states == stored.keys.keys() == stored.bytes_at.keys():
        return "keys: not the same states as in bytes_at and in other ranges"
    if not len(stored.start) == len(stored.shape) == len(tensor.shape):
        return "shape: not as many dims as the tensor"
    for start, size, whole in zip(stored.start, stored.shape, tensor.shape, strict=True):
        if start + size > whole:
            return f"start: the box ends outside of the tensor, at {start + size} of {whole}"
    if stored.first + stored.count > prod(stored.shape):
        return "count: the range ends outside of its box"
    return ""


def _is_stored_once(tensor: "Tensor") -> bool:
    """Return whether the ranges of each box cover it once, and the boxes cover the tensor once.

    A set of boxes covers a larger box once if and only if their corners, counted with the sign of
    the corner, add up to those of the larger box. This takes linear time.
    """
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]] = {}
    for stored in tensor.stored_ranges:
        ranges = boxes.setdefault((stored.start, stored.shape), [])
        ranges.append((stored.first, stored.first + stored.count))
    corners = Counter[tuple[int, ...]]()
    for (start, shape), ranges in boxes.items():
        elements = prod(shape)
        ends = sorted([(0, 0), *ranges, (elements, elements)])
        if any(end != begin for (_, end), (begin, _) in pairwise(ends)):
            return False
        _add_corners(corners, start, shape, 1)
    _add_corners(corners, (0,) * len(tensor.shape), tensor.shape, -1)
    return not any(corners.values())


def _add_corners(
    corners: "Counter[tuple[int, ...]]", start: tuple[int, ...], shape: tuple[int, ...], sign: int
) -> None:
    edges = [((a, 1), (a + size, -1)) for a, size in zip(start, shape, strict=True)]
    for corner in product(*edges):
        corners[tuple(at for at, _ in corner)] += sign * prod(s for _, s in corner)
