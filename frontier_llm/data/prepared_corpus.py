"""Open a prepared corpus, and read the samples of a run.

Sample i of a run is a pure function of the prepared corpus, the seed and i. It depends neither on
the number of replicas nor on the size of a micro-batch, so a run can resume in another layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from megatron.core.datasets.indexed_dataset import IndexedDataset

from frontier_llm.data.corpus_manifest import (
    MANIFEST_FILE,
    Manifest,
    Split,
    damaged,
    find_damage,
)
from frontier_llm.data.permutation import make_key
from frontier_llm.data.sample_counts import too_short
from frontier_llm.data.sample_order import Kept, LengthSegment, SampleOrder
from frontier_llm.data.tokenizer import Tokenizer
from frontier_llm.data.tokenizer_source import digest_tokenizer, open_tokenizer
from frontier_llm.errors import ConfigError, DataError
from frontier_llm.units import counted


class TokenStream:
    """All tokens of one split, concatenated and mapped into memory.

    The class is thread-safe.
    """

    def __init__(self, prefix: Path, manifest: Manifest, split: Split) -> None:
        manifest.check_split(prefix, split)
        self.prefix = prefix
        self._tokens = split.tokens
        self._dtype = np.dtype(manifest.token_type)
        self._vocabulary = manifest.pieces
        try:
            self._files = IndexedDataset(str(prefix))
        except (AssertionError, OSError, ValueError) as error:
            raise damaged(prefix.with_suffix(".idx"), f"it cannot be opened: {error}") from error

    @property
    def item_bytes(self) -> int:
        """Size of a stored token in bytes."""
        return int(self._dtype.itemsize)

    def __len__(self) -> int:
        return self._tokens

    def read(self, start: int, count: int) -> npt.NDArray[np.generic]:
        """Return the tokens from index `start` on in their stored type: [count], read-only."""
        if not 0 <= start <= self._tokens - count:
            raise damaged(self.prefix.with_suffix(".idx"))
        # Python integers do not overflow for streams of 2^31 tokens and more
        offset = int(start) * self._dtype.itemsize
        tokens: npt.NDArray[np.generic]
        tokens = self._files.bin_reader.read(self._dtype, count=count, offset=offset)
        # an unsigned view makes negative numbers large
        unsigned = tokens.view(f"u{self._dtype.itemsize}")
        if unsigned.max(initial=0) >= self._vocabulary:
            index = int(np.argmax(unsigned >= self._vocabulary))
            byte, document = offset + index * self._dtype.itemsize, self.document_at(start + index)
            why = (
                f"token {tokens[index]} at byte {byte} (document {document}) is not one of the "
                f"tokenizer's {self._vocabulary} tokens"
            )
            raise damaged(self.prefix.with_suffix(".bin"), why)
        return tokens

    def document_at(self, token: int) -> int:
        """Return the index of the document that contains a token."""
        starts = self._files.index.sequence_pointers
        return int(np.searchsorted(starts, int(token) * self._dtype.itemsize, side="right")) - 1

    def documents_within(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Return the first tokens of the documents that begin in a range of tokens, ascending."""
        starts = self._files.index.sequence_pointers
        limits = np.array([start, start + count]) * self._dtype.itemsize
        first, stop = np.searchsorted(starts, limits)
        within: npt.NDArray[np.int64] = starts[first:stop] // self._dtype.itemsize
        return within

    def document_lengths(self) -> npt.NDArray[np.int32]:
        """Return the number of tokens of each document."""
        lengths: npt.NDArray[np.int32] = self._files.index.sequence_lengths
        return lengths

    def document_starts(self) -> npt.NDArray[np.int64]:
        """Return the index of the first token of each document."""
        starts: npt.NDArray[np.int64] = self._files.index.sequence_pointers
        return starts // self._dtype.itemsize

    def document_start(self, document: int) -> int:
        """Return the index of a document's first token."""
        return int(self._files.index.sequence_pointers[document]) // self._dtype.itemsize


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus that is open for reading."""

    manifest: Manifest
    tokenizer: Tokenizer
    train: TokenStream
    validation: TokenStream


def open_corpus(folder: Path, *, verify: bool = False) -> Corpus:
    """Open the folder that `prepare` returned; `verify` compares digests of all files, too."""
    manifest = Manifest.load(folder / MANIFEST_FILE)
    manifest.check_files(folder)
    check_tokenizer(folder, manifest)
    if verify and (damage := find_damage(folder)):
        raise DataError(str(damage))
    return Corpus(manifest, open_tokenizer(folder, manifest.eod), *streams(folder, manifest))


def streams(folder: Path, manifest: Manifest | None = None) -> tuple[TokenStream, TokenStream]:
    """Open the token files of both splits of a prepared corpus: training and validation."""
    manifest = manifest or Manifest.load(folder / MANIFEST_FILE)
    return (
        TokenStream(folder / "train", manifest, manifest.train),
        TokenStream(folder / "validation", manifest, manifest.validation),
    )


class Samples:
    """The samples of a run in the order in which the run reads them, epoch after epoch.

    An epoch reads every window of a token stream once. Window w begins at token wL, where L is the
    sequence length, and holds L + `overlap` tokens. Its last `overlap` tokens are also the first
    tokens of window w + 1. With an overlap of 1 the shared token is the last label of one window
    and the first input of the next. If documents are separate, windows are left out in which each
    token ends a document, because they predict nothing.

    The order of each epoch follows from the seed and the digest of the corpus (`Manifest.digest`).
    Without `shuffle` it is that of the stream. Without `reads` all tokens are zeros. Raises a
    DataError if the stream is shorter than one window, or no window predicts a token.
    """

    def __init__(
        self,
        stream: TokenStream,
        sequence_length: int,
        seed: int,
        digest: str,
        *,
        shuffle: bool = True,
        overlap: int = 1,
        separate: bool = False,
        reads: bool = True,
    ) -> None:
        self.stream, self.sequence_length = stream, sequence_length
        self._overlap, self._separate, self._reads = overlap, separate, reads
        key = lru_cache(maxsize=4)(lambda epoch: make_key(digest, seed, epoch))
        self._key = key if shuffle else None
        self._windows = lru_cache(maxsize=None)(self._find_windows)
        self._order = SampleOrder(sequence_length, self._windows, self._key)
        if self.left_out and not len(self):
            raise DataError(
                f"{stream.prefix}.bin has {counted(len(stream), 'token')}, which are documents of "
                "one token: no sample predicts a token\n"
                "  do: add longer documents, or set data.documents=joined"
            )
        if not len(self):
            raise too_short(stream.prefix, len(stream), sequence_length, overlap)

    def _find_windows(self, length: int) -> Kept:
        count = max(0, (len(self.stream) - self._overlap) // length)
        left_out = np.zeros(0, np.int64)
        starts = self.stream.document_starts() if self._separate else left_out
        if len(starts) >= length:
            # a window predicts nothing if documents begin at each of its labels
            first, last = starts[: len(starts) - length + 1], starts[length - 1 :]
            left_out = first[(last - first == length - 1) & (first % length == 1 % length)]
            left_out = (left_out[left_out > 0] - 1) // length
        return Kept(count, left_out[left_out < count])

    def set_lengths(self, segments: Sequence[LengthSegment]) -> None:
        """Set the lengths of the samples over the run; the last one must be that of this object."""
        first, *others = segments
        if first.keeps_all:
            self._separate = False
            self._windows.cache_clear()
        self._order = SampleOrder(first.tokens, self._windows, self._key)
        for segment in others:
            self._order.change(segment.first_sample, segment.tokens)

    @property
    def left_out(self) -> int:
        """Number of windows that are left out because they predict nothing."""
        return self._windows(self.sequence_length).left_out

    def __len__(self) -> int:
        """Return the number of samples per epoch. Larger indices are samples of later epochs."""
        return len(self._windows(self.sequence_length))

    def window(self, index: int) -> int:
        """Return the window in which sample `index` of the run begins."""
        return self.ranges(index)[0][0] // self.sequence_length

    def epoch(self, index: int) -> int:
        """Return the epoch of a sample, counted from 0."""
        return self._order.locate(index)[0]

    def __getitem__(self, index: int) -> Any:
        return self.read(index)

    def read(self, index: int) -> npt.NDArray[np.int64]:
        """Return the tokens of sample `index` of the run: [L + overlap] int64."""
        if not self._reads:
            return np.zeros(self.sequence_length + self._overlap, np.int64)
        read = [self.stream.read(*tokens) for tokens in self.ranges(index)]
        return np.concatenate(read).astype(np.int64)

    def ranges(self, index: int) -> list[tuple[int, int]]:
        """Return (first token, number of tokens) of each range that sample `index` reads."""
        *others, (start, count) = self._order.locate(index)[1]
        return [*others, (start, count + self._overlap)]


def check_tokenizer(folder: Path, manifest: Manifest) -> None:
    """Refuse a prepared corpus whose tokenizer is missing or has changed.

    Raises a DataError if a file is missing or has changed.
    """
    try:
        found = digest_tokenizer(folder)
    except ConfigError:
        why = "it is absent or cannot be read"
        raise damaged(folder / "tokenizer.*", why) from None
    if found != manifest.tokenizer_sha256:
        raise damaged(folder / "tokenizer.*")
