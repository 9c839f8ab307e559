"""Encode texts to the bytes of a token file, with a cache of recurring substrings.

If no token of the vocabulary crosses a border, byte-pair merges on its two sides are independent. A
text's tokens are then the tokens of its substrings between borders, and substrings that recur can
be cached. Two kinds of substrings are used:

- *words*, in any text: blanks and the characters after them up to the next blank or line break.
- *runs*, in ASCII text: letters, or digits and signs, with the blanks before them. Words of source
  code seldom recur, but their runs do.

`Tokenizer.borders` tells which kind the vocabulary allows; if none, whole texts are encoded.
"""

import re
from collections.abc import Callable

import numpy as np

from frontier_llm.data.tokenizer import SPACE_MARK, Tokenizer
from frontier_llm.units import MIB

_WORD = re.compile(f" *[^ \n{SPACE_MARK}]+| +|\n|{SPACE_MARK}")
_RUN = re.compile(r" *(?:[A-Za-z]+|[^ \nA-Za-z]+)| +|\n")
_BORDER = re.compile(f"\n|{SPACE_MARK}|(?<! ) ")
BLOCK_CHARACTERS = MIB
"""Characters split per call. The list of substrings takes ten times the memory of the text."""
CACHE_ENTRIES = 1 << 18
CACHED_CHARACTERS = 40
"""Length of the longest cached substring in characters; longer ones seldom recur."""


class Encoder:
    """Encodes texts to the bytes of a token file. Not thread-safe."""

    def __init__(self, tokenizer: Tokenizer, dtype: type[np.generic]) -> None:
        """Initialise an empty cache.

        Args:
            tokenizer: tokenizer to encode with.
            dtype: dtype of a stored token, large enough for the vocabulary.
        """
        self._tokenizer, self._dtype = tokenizer, dtype
        self._cache = _TokenCache(self._encode_substring)
        self.eod = self._pack([tokenizer.eod])

    def encode(self, text: str) -> bytes:
        """Return the tokens of a text of valid Unicode, without an end-of-document token."""
        if self._tokenizer.borders == "none":
            return self._pack(self._tokenizer.encode(text))
        pattern = _RUN if self._has_runs(text) else _WORD
        blocks, start = [], 0
        while start < len(text):
            border = _BORDER.search(text, start + BLOCK_CHARACTERS)
            end = border.start() if border else len(text)
            substrings = pattern.findall(text, start, end)
            blocks.append(b"".join(map(self._cache.__getitem__, substrings)))
            start = end
        return b"".join(blocks)

    def _has_runs(self, text: str) -> bool:
        return self._tokenizer.borders == "runs" and text.isascii()

    def _encode_substring(self, text: str) -> bytes:
        if self._has_runs(text) and len(runs := _RUN.findall(text)) > 1:
            return b"".join(map(self._cache.__getitem__, runs))
        return self._pack(self._tokenizer.encode_word(text))

    def _pack(self, ids: list[int]) -> bytes:
        return np.array(ids, dtype=self._dtype).tobytes()


class _TokenCache(dict[str, bytes]):
    """The encoded tokens of recent substrings. The cache is cleared when it is full."""

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
