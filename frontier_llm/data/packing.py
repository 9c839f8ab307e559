"""Pack documents into samples of equal length by best-fit-decreasing.

Documents longer than a sample of L tokens are cut into pieces of L tokens and a rest. Pieces are
placed in decreasing order of length. Each is added to the sample with the least free space that it
fits into; if it fits into none, a new sample begins.

Pieces of one length and samples with one number of free tokens are handled together. If the fullest
samples that a length n fits into have r free tokens, each of them takes r // n pieces, because it
stays the fullest one until less than n tokens are free. The number of such groups depends on L and
hardly on the number of documents.

Paper: Ding et al., Fewer Truncations Improve Language Modeling, arXiv:2404.10830, section 3. It
finds the sample of each document by a tree.
"""

import logging
import shutil
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from frontier_llm.atomic_files import publish_folder
from frontier_llm.config.data import DataConfig
from frontier_llm.data.corpus_manifest import DIGESTS_FILE, find_damage, is_verified, write_digests
from frontier_llm.data.pair_packing import Pairs
from frontier_llm.errors import DataError

if TYPE_CHECKING:  # it imports torch, which a login node may lack
    from frontier_llm.data.prepared_corpus import TokenStream

Numbers = npt.NDArray[np.int64]
Report = Callable[[float], None]  # of the share of documents that are packed
_LOG = logging.getLogger(__name__)
_ARRAYS = ("starts", "lengths", "first_pieces", "pairs")


@dataclass(frozen=True)
class Packing:
    """The samples of a split that consist of whole documents.

    Samples are ordered by the first token that they read, and so are the pieces of a sample.
    """

    length: int
    starts: Numbers
    """[pieces] int64, the first token of each piece in the split, sample after sample."""
    lengths: npt.NDArray[np.int32]
    first_pieces: Numbers
    """[samples + 1] int64, the index of each sample's first piece; last the number of pieces."""
    pairs: npt.NDArray[np.int32] | None = None
    """[pieces, 3], in an encoder-decoder the number of a piece's denoiser, and the tokens that the
    encoder reads and that the decoder predicts."""

    def __len__(self) -> int:
        return len(self.first_pieces) - 1


def padding_shares(packings: Sequence[Packing], pairs: Pairs | None = None) -> list[float]:
    """Return the share of the tokens of samples that is padding, for the encoder first."""
    limits = [packings[0].length] if pairs is None else [pairs.inputs, pairs.targets]
    samples, filled = sum(map(len, packings)), np.zeros(len(limits))
    for packing in packings:
        sizes = packing.lengths[:, None] if packing.pairs is None else packing.pairs[:, 1:]
        filled += sizes.sum(0, dtype=np.int64)
    return (1 - filled / limits / samples).tolist()


def describe_padding(packings: Sequence[Packing], data: DataConfig) -> str:
    """Return the share of padding, in an encoder-decoder that of both sides."""
    pairs = Pairs.of(data)
    shares = [f"{share:.2%}" for share in padding_shares(packings, pairs)]
    if pairs is None:
        return f"{shares[0]} padding"
    return f"{shares[0]} padding in the encoder, {shares[1]} in the decoder"


def pack(
    document_lengths: npt.NDArray[np.integer],
    length: int,
    pairs: Pairs | None = None,
    report: Report = lambda share: None,
) -> Packing:
    """Pack documents into samples; their lengths are in the order of the split."""
    documents, divided = document_lengths.astype(np.int64), None
    if pairs is None:
        starts, lengths = _cut(documents, length)
        sample_of = _Samples(length).place_all(lengths)
    else:
        starts, lengths = pairs.cut(documents)
        divided = pairs.divide(lengths)
        sample_of = pairs.place(divided[:, 1:], report)
    # number the samples by their first pieces, which are in the order of the split
    _, first = np.unique(sample_of, return_index=True)
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    order = np.argsort(number[sample_of], kind="stable")
    counts = np.bincount(sample_of)[np.argsort(first)]
    first_pieces = np.concatenate([[0], np.cumsum(counts)])
    divided = None if divided is None else divided[order]
    return Packing(length, starts[order], lengths[order].astype(np.int32), first_pieces, divided)


def _cut(documents: Numbers, length: int) -> tuple[Numbers, Numbers]:
    """Cut documents into pieces of at most `length` tokens; return their starts and lengths."""
    document_starts = np.cumsum(documents) - documents
    counts = -(-documents // length)
    document = np.repeat(np.arange(len(documents)), counts)
    in_document = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = in_document * length
    return document_starts[document] + offsets, np.minimum(documents[document] - offsets, length)


class _Samples:
    """Samples that are being filled, by their free tokens."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._count = 0
        self._by_space: dict[int, list[Numbers]] = {}
        self._spaces = 0  # bit r is set if a sample has r free tokens

    def place_all(self, lengths: Numbers) -> Numbers:
        """Return the sample of each piece, [pieces]; pieces of equal length in their order."""
        sample_of = np.empty(len(lengths), np.int64)
        by_length = np.argsort(-lengths, kind="stable")
        sizes, counts = np.unique(-lengths, return_counts=True)
        stops = np.cumsum(counts)
        for size, count, stop in zip((-sizes).tolist(), counts.tolist(), stops, strict=True):
            sample_of[by_length[stop - count : stop]] = self._place(size, count)
        return sample_of

    def _place(self, size: int, count: int) -> Numbers:
        """Place `count` pieces of one size; return the sample of each."""
        placed = []
        while count:
            space, samples = self._fullest(size, count)
            each = space // size
            full, rest = divmod(count, each)
            if full >= len(samples):
                full, rest = len(samples), 0
            placed.append(np.repeat(samples[:full], each))
            self._add(space - each * size, samples[:full])
            if rest:
                placed.append(np.repeat(samples[full], rest))
                self._add(space - rest * size, samples[full : full + 1])
            self._add(space, samples[full + bool(rest) :])
            count -= full * each + rest
        return np.concatenate(placed)

    def _fullest(self, size: int, count: int) -> tuple[int, Numbers]:
        """Take samples with the least space of at least `size` tokens; return that space and them.

        If there are none, as many new samples are begun as `count` pieces need.
        """
        fitting = self._spaces >> size << size
        if not fitting:
            new = -(-count // (self._length // size))
            self._count += new
            return self._length, np.arange(self._count - new, self._count)
        space = (fitting & -fitting).bit_length() - 1
        groups = self._by_space[space]
        samples = groups.pop()
        if not groups:
            self._spaces &= ~(1 << space)
        return space, samples

    def _add(self, space: int, samples: Numbers) -> None:
        if space and len(samples):
            self._by_space.setdefault(space, []).append(samples)
            self._spaces |= 1 << space


def packing_folder(prefix: Path, length: int, pairs: Pairs | None = None) -> Path:
    """Return the folder of the packing of a split, whose token file is `prefix`.bin."""
    name = length if pairs is None else pairs.name
    return prefix.with_name(f"{prefix.name}.best_fit_{name}")


def packing_of(
    stream: "TokenStream", data: DataConfig, report: Report = lambda share: None
) -> Packing:
    """Return the packing of a split, as `open_packing`."""
    lengths = stream.document_lengths()
    return open_packing(stream.prefix, lengths, data.sequence_length, Pairs.of(data), report)


def open_packing(
    prefix: Path,
    document_lengths: npt.NDArray[np.integer],
    length: int,
    pairs: Pairs | None = None,
    report: Report = lambda share: None,
) -> Packing:
    """Read the packing of the split `prefix`.bin; compute and write it if there is none.

    The files are mapped into memory. The folder gets its name by one rename when its files are
    complete. If several processes write it at the same time, their contents are equal.
    """
    folder = packing_folder(prefix, length, pairs)
    draft = folder.with_name(f".{folder.name}-{uuid.uuid4().hex[:12]}")
    files = [f"{name}.npy" for name in _ARRAYS[: 3 if pairs is None else 4]]
    try:
        if folder.exists() and not _is_whole(folder, files):
            _LOG.warning("%s is damaged: the samples are packed again", folder)
            with suppress(FileNotFoundError):  # another process was faster
                shutil.rmtree(folder.rename(draft), ignore_errors=True)
        if not folder.exists():
            _write(draft, folder, files, pack(document_lengths, length, pairs, report))
        arrays = [np.load(folder / name, mmap_mode="r") for name in files]
    except (OSError, ValueError) as error:
        raise DataError(
            f"the samples of data.packing=best_fit cannot be kept in {folder}: {error}\n"
            "  do: make its parent folder writable and delete it, or set data.packing=stream"
        ) from error
    return Packing(length, *arrays)


def _is_whole(folder: Path, files: Sequence[str]) -> bool:
    with suppress(OSError):  # a file is missing
        if not (folder / DIGESTS_FILE).exists():  # of a version that wrote none
            return all((folder / file).stat().st_size for file in files)
        return is_verified(folder, files) or find_damage(folder, files=files) is None
    return False


def _write(draft: Path, folder: Path, files: Sequence[str], packing: Packing) -> None:
    draft.mkdir()
    try:
        for file in files:
            np.save(draft / file, getattr(packing, file.removesuffix(".npy")))
        write_digests(draft, files)
        publish_folder(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
