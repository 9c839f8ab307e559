"""Compare the values of a manifest with each other, before anything is read according to them.

The time and memory of the checks depend on the size of the manifest, not on the numbers in it.
"""

from collections import Counter
from collections.abc import Container, Iterator
from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING

from frontier_llm.geometry.state_memory import MOMENT_BLOCK_ELEMENTS, MOMENT_BLOCK_WORDS

if TYPE_CHECKING:
    from frontier_llm.checkpoint.manifest import Manifest, StoredRange, Tensor


def problems(manifest: "Manifest") -> Iterator[str]:
    """Yield what is wrong: the entry, a colon, and the reason."""
    occupied: dict[str, list[tuple[int, int, str]]] = {}
    for name, file in manifest.files.items():
        chunks = -(-file.size // manifest.chunk_bytes)
        if len(file.chunks) != chunks:
            yield f"files.{name}.chunks: it has {len(file.chunks)} digests for {chunks} chunks"
        # eight bytes give the length of a file's header
        occupied[name] = [(0, 8, "the header"), (file.size, file.size, f"files.{name}.size")]
    for name, tensor in manifest.tensors.items():
        for number, stored in enumerate(tensor.stored_ranges):
            where = f"tensors.{name}.pieces.{number}"
            if problem := _range_problem(stored, tensor, occupied.keys()):
                yield f"{where}.{problem}"
                return
            occupied[stored.file] += (
                (begin, begin + stored_bytes(manifest, stored, state), f"{where}.bytes_at.{state}")
                for state, begin in stored.bytes_at.items()
            )
        if not manifest.repeats and not _is_stored_once(tensor):
            yield f"tensors.{name}.pieces: they do not store every element exactly once"
    yield from (
        f"{second}: {first} takes byte {begin} of {name}, too"
        for name, ranges in occupied.items()
        for (_, end, first), (begin, _, second) in pairwise(sorted(ranges))
        if begin < end
    )


def stored_bytes(manifest: "Manifest", stored: "StoredRange", state: str) -> int:
    """Return the size of a state of a stored range in bytes."""
    if manifest.moments is None or state not in ("exp_avg", "exp_avg_sq"):
        return 4 * stored.count
    return 4 * -(-stored.count // MOMENT_BLOCK_ELEMENTS) * MOMENT_BLOCK_WORDS[manifest.moments]


def _range_problem(stored: "StoredRange", tensor: "Tensor", files: Container[str]) -> str:
    """Return the field of a range that is wrong, and why; empty if none is."""
    if stored.file not in files:
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
    whole = (0,) * len(tensor.shape), tensor.shape
    for (start, shape), sign in [*((box, 1) for box in boxes), (whole, -1)]:
        edges = [((a, 1), (a + size, -1)) for a, size in zip(start, shape, strict=True)]
        for corner in product(*edges):
            corners[tuple(at for at, _ in corner)] += sign * prod(s for _, s in corner)
    return not any(corners.values()) and all(
        end == begin
        for (_, shape), ranges in boxes.items()
        for (_, end), (begin, _) in pairwise(sorted([(0, 0), *ranges, (prod(shape),) * 2]))
    )
