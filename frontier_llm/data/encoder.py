"""Encode texts to the bytes of a token file, with a cache of recurring substrings.

`Tokenizer.splitting` returns how a text can be split into substrings that are encoded separately:
into words, or, in ASCII text, into runs. If a text cannot be split, it is encoded as a whole.
"""

from collections.abc import Callable

import numpy as np

from frontier_llm.data.corpus_account import TextCounts
from frontier_llm.data.tokenizer import Tokenizer
from frontier_llm.units import MIB

BLOCK_CHARACTERS = MIB
"""Number of characters that are split into substrings at a time. This limits the memory, because
the list of substrings takes ten times the memory of the text."""
MIXED_BLOCK_CHARACTERS = 512
"""The same in texts with characters that are not ASCII, most of which have few of them: the blocks
without any are split into runs."""
CACHE_ENTRIES = 1 << 18
"""Number of cached substrings at which the cache is cleared."""
CACHED_CHARACTERS = 40
"""Length of the longest cached substring in characters; longer ones seldom recur."""


class Encoder:
    """Encodes texts to the bytes of a token file, in a dtype that holds the vocabulary.

    Not thread-safe.
    """

    def __init__(self, tokenizer: Tokenizer, dtype: type[np.generic]) -> None:
        self._tokenizer, self._dtype = tokenizer, dtype
        self._splitting = tokenizer.splitting
        self._cache = _TokenCache(self._encode_substring)
        self.eod = self._pack([tokenizer.eod])

    def encode(self, text: str, counts: TextCounts | None = None) -> bytes:
        """Return the bytes of a text's tokens, without an end-of-document token.

        The text must have no unpaired surrogates. The counts of its characters are added to
        `counts`.
        """
        if counts is not None:
            counts.characters += len(text)
            if not self._tokenizer.covers_all_text:
                ids, missing = self._tokenizer.encode_counting(text)
                counts.add(missing)
                return self._pack(ids)
        splitting = self._splitting
        if splitting is None or any(string in text for string in splitting.whole):
            return self._pack(self._tokenizer.encode(text))
        size = BLOCK_CHARACTERS if text.isascii() else MIXED_BLOCK_CHARACTERS
        blocks, start = [], 0
        while start < len(text):
            border = splitting.border.search(text, start + size)
            end = border.start() if border else len(text)
            block = text[start:end]
            runs = splitting.ascii_runs if block.isascii() else None
            substrings = (runs or splitting.words).findall(block)
            blocks.append(b"".join(map(self._cache.__getitem__, substrings)))
            start = end
        return b"".join(blocks)

    def _encode_substring(self, text: str) -> bytes:
        # an ASCII word of a text that has other characters elsewhere can still be split into runs
        runs = self._splitting.ascii_runs if self._splitting and text.isascii() else None
        if runs and len(found := runs.findall(text)) > 1:
            return b"".join(map(self._cache.__getitem__, found))
        return self._pack(self._tokenizer.encode_substring(text))

    def _pack(self, ids: list[int]) -> bytes:
        return np.array(ids, dtype=self._dtype).tobytes()


class _TokenCache(dict[str, bytes]):
    """Maps recent substrings to the bytes of their tokens. It is cleared when it is full."""

    def __init__(self, encode: Callable[[str], bytes]) -> None:
        super().__init__()
        self._encode = encode

    def __missing__(self, text: str) -> bytes:
        tokens = self._encode(text)
        if len(text) <= CACHED_CHARACTERS:
            if len(self) >= CACHE_ENTRIES:
                self.clear()
            self[text] = tokens
        return tokens
