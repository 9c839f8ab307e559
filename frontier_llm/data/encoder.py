"""Encode texts to the bytes of a token file, with a cache of recurring substrings.

A *border* is a position in a text that no token of the vocabulary can cross. Byte-pair merges on
the two sides of a border are independent, so a text can be encoded substring by substring, and the
tokens of recurring substrings can be cached. There are two kinds of substrings:

- A *word* is a series of blanks and the characters after it up to the next blank or line break.
- A *run* is a series of blanks and the letters after it, or the digits and signs after it. Runs are
  used only in ASCII text. In source code they recur more often than words.

`Tokenizer.borders` returns the kind that the vocabulary allows. If it allows neither, whole texts
are encoded.
"""

import re
from collections.abc import Callable

import numpy as np

from frontier_llm.data.tokenizer import SPACE_MARK, Tokenizer
from frontier_llm.units import MIB

# SPACE_MARK (U+2581) stands for a blank inside tokens. If a text contains the character itself, the
# character is a word of its own, since the tokenizer treats it like a blank.
_WORD = re.compile(f" *[^ \n{SPACE_MARK}]+| +|\n|{SPACE_MARK}")
_RUN = re.compile(r" *(?:[A-Za-z]+|[^ \nA-Za-z]+)| +|\n")
_BORDER = re.compile(f"\n|{SPACE_MARK}|(?<! ) ")
BLOCK_CHARACTERS = MIB
"""Number of characters that are split into substrings at a time. This limits the memory, because
the list of substrings takes ten times the memory of the text."""
CACHE_ENTRIES = 1 << 18
"""Number of cached substrings at which the cache is cleared."""
CACHED_CHARACTERS = 40
"""Length of the longest cached substring in characters; longer ones seldom recur."""


class Encoder:
    """Encodes texts to the bytes of a token file. Not thread-safe."""

    def __init__(self, tokenizer: Tokenizer, dtype: type[np.generic]) -> None:
        """Initialise an empty cache.

        Args:
            tokenizer: tokenizer to encode with.
            dtype: integer type in which a token is stored, large enough for the vocabulary.
        """
        self._tokenizer, self._dtype = tokenizer, dtype
        self._cache = _TokenCache(self._encode_substring)
        self.eod = self._pack([tokenizer.eod])

    def encode(self, text: str) -> bytes:
        """Return the bytes of a text's tokens, without an end-of-document token.

        Args:
            text: text of valid Unicode, that is, without unpaired surrogates.
        """
        if self._tokenizer.borders == "none":
            return self._pack(self._tokenizer.encode(text))
        pattern = _RUN if self._can_use_runs(text) else _WORD
        blocks, start = [], 0
        while start < len(text):
            border = _BORDER.search(text, start + BLOCK_CHARACTERS)
            end = border.start() if border else len(text)
            substrings = pattern.findall(text, start, end)
            blocks.append(b"".join(map(self._cache.__getitem__, substrings)))
            start = end
        return b"".join(blocks)

    def _can_use_runs(self, text: str) -> bool:
        return self._tokenizer.borders == "runs" and text.isascii()

    def _encode_substring(self, text: str) -> bytes:
        # an ASCII word of a text that has other characters elsewhere can still be split into runs
        if self._can_use_runs(text) and len(runs := _RUN.findall(text)) > 1:
            return b"".join(map(self._cache.__getitem__, runs))
        return self._pack(self._tokenizer.encode_word(text))

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
