"""The token files of one split, while they are written."""

import hashlib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from frontier_llm.data.corpus import Document
from frontier_llm.data.manifest import Split
from frontier_llm.data.tokenizer import Tokenizer
from frontier_llm.units import MIB

BLOCK_CHARACTERS = MIB


@dataclass
class SplitWriter:
    """Tokenises documents block by block into `prefix`.bin and .idx; a context manager.

    One sequence of the index is one document with its end-of-document token.
    """

    prefix: Path
    tokenizer: Tokenizer
    dtype: type
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    block: list[str] = field(default_factory=list)
    characters: int = 0

    def __enter__(self) -> "SplitWriter":
        self.hasher = hashlib.sha256()
        self.builder = IndexedDatasetBuilder(f"{self.prefix}.bin", dtype=self.dtype)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(OSError):  # on a full disk this fails again
            self.builder.data_file.close()

    def add(self, document: Document) -> None:
        """Write a document, now or with the next block."""
        self.block.append(document.text)
        self.characters += len(document.text)
        if self.characters >= BLOCK_CHARACTERS:
            self._write_block()

    def finish(self) -> Split:
        """Write what is left and the index."""
        self._write_block()
        self.builder.finalize(f"{self.prefix}.idx")
        return Split(
            documents=self.documents,
            tokens=self.tokens,
            text_bytes=self.text_bytes,
            bin_sha256=self.hasher.hexdigest(),
        )

    def _write_block(self) -> None:
        for text, ids in zip(self.block, self.tokenizer.encode_all(self.block), strict=True):
            tokens: npt.NDArray[np.generic] = np.array([*ids, self.tokenizer.eod], dtype=self.dtype)
            self.builder.add_document(tokens, [len(tokens)])
            self.hasher.update(tokens.tobytes())
            self.documents += 1
            self.tokens += len(tokens)
            self.text_bytes += len(text.encode())
        self.block, self.characters = [], 0
