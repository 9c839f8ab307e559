"""A prepared corpus, opened, and the samples of a run.

Sample i of a run is a pure function of (what was prepared, seed, i): neither the number of
replicas nor the micro-batch changes it, so a run can go on in another layout.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from megatron.core.datasets.indexed_dataset import IndexedDataset

from frontier_llm.data.formats import sha256_of
from frontier_llm.data.manifest import MANIFEST_FILE, TOKENIZER_FILE, Manifest, Split
from frontier_llm.data.permutation import make_key, permute
from frontier_llm.data.tokenizer import Tokenizer
from frontier_llm.errors import DataError


class TokenStream:
    """All tokens of one split as one long run, mapped into memory. Threads may share it."""

    def __init__(self, prefix: Path, manifest: Manifest, split: Split) -> None:
        """Open `prefix`.bin and `prefix`.idx.

        Raises:
            DataError: one of them is missing, short or damaged.
        """
        manifest.check_split(prefix, split)
        self.prefix = prefix
        self._tokens = split.tokens
        self._dtype = np.dtype(manifest.token_type)
        try:
            self._files = IndexedDataset(str(prefix))
        except (AssertionError, OSError, ValueError) as error:
            raise DataError(
                f"cannot open {prefix}.bin and .idx: {error}\n"
                f"  do: delete the folder {prefix.parent}; it is prepared again at the next start"
            ) from error

    def __len__(self) -> int:
        return self._tokens

    def read(self, start: int, count: int) -> npt.NDArray[np.generic]:
        """Return tokens [start, start + count), as they are stored: [count], read only."""
        assert 0 <= start <= self._tokens - count, f"{count} tokens from {start} on are not there"
        # Python integers: 2^31 tokens and more are no special case
        offset = int(start) * self._dtype.itemsize
        tokens: npt.NDArray[np.generic]
        tokens = self._files.bin_reader.read(self._dtype, count=count, offset=offset)
        return tokens

    def document_at(self, token: int) -> int:
        """Return which document a token is in."""
        starts = self._files.index.sequence_pointers
        return int(np.searchsorted(starts, int(token) * self._dtype.itemsize, side="right")) - 1

    def document_start(self, document: int) -> int:
        """Return the first token of a document."""
        return int(self._files.index.sequence_pointers[document]) // self._dtype.itemsize


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus."""

    manifest: Manifest
    tokenizer: Tokenizer
    train: TokenStream
    validation: TokenStream


def open_corpus(folder: Path, *, verify: bool = False) -> Corpus:
    """Open what `prepare` made.

    Args:
        folder: what it returned.
        verify: read all of it and compare digests, not only sizes.

    Raises:
        DataError: a file is missing, short or damaged.
    """
    manifest = Manifest.load(folder / MANIFEST_FILE)
    manifest.check_files(folder)
    _check_digest(folder / TOKENIZER_FILE, manifest.tokenizer_sha256)
    if verify:
        _check_digest(folder / "train.bin", manifest.train.bin_sha256)
        _check_digest(folder / "validation.bin", manifest.validation.bin_sha256)
    return Corpus(
        manifest,
        Tokenizer(folder / TOKENIZER_FILE),
        TokenStream(folder / "train", manifest, manifest.train),
        TokenStream(folder / "validation", manifest, manifest.validation),
    )


class Samples:
    """The samples of a run, in the order in which it reads them, epoch after epoch.

    An epoch reads every window of the stream once: window w is the L tokens from wL on. With an
    overlap of 1 it has the one after them too, so that neighbours share the token which is the
    last label of one and the first input of the other.
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
    ) -> None:
        """Cut a stream into windows.

        Args:
            stream: the tokens.
            sequence_length: L, tokens a sample.
            seed: chooses the order of each epoch, together with `digest`.
            digest: of the corpus (`Manifest.digest`).
            shuffle: whether to read the windows in another order each epoch.
            overlap: tokens that a window shares with the next.

        Raises:
            DataError: the stream has no whole window.
        """
        self._windows = (len(stream) - overlap) // sequence_length
        if self._windows < 1:
            raise DataError(
                f"{stream.prefix}.bin has {len(stream)} tokens, fewer than one sample of "
                f"data.sequence_length={sequence_length} reads ({sequence_length + overlap})\n"
                "  do: add text (for validation: or raise data.validation_percent), or lower "
                "data.sequence_length"
            )
        self._stream, self.sequence_length = stream, sequence_length
        self._shuffle, self._overlap = shuffle, overlap
        self._key = lru_cache(maxsize=4)(lambda epoch: make_key(digest, seed, epoch))

    def __len__(self) -> int:
        """Samples an epoch; an index may be any number of epochs beyond."""
        return self._windows

    def window(self, index: int) -> int:
        """Return the window that sample `index` (from 0 on, without end) reads."""
        epoch, place = divmod(index, self._windows)
        return permute(place, self._windows, self._key(epoch)) if self._shuffle else place

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Return the tokens of sample `index`: [L + overlap] int64."""
        return self._stream.read(*self.place(index)).astype(np.int64)

    def place(self, index: int) -> tuple[int, int]:
        """Return which tokens of the stream sample `index` reads: the first, and how many."""
        return self.window(index) * self.sequence_length, self.sequence_length + self._overlap


def _check_digest(path: Path, wanted: str) -> None:
    if sha256_of(path) != wanted:
        raise DataError(
            f"{path} is damaged: it is not what was prepared\n"
            f"  do: delete the folder {path.parent}; it is prepared again at the next start"
        )
