"""Texts to the bytes of a token file, part by part.

Where no piece of the vocabulary reaches over a border, byte-pair merges on one side do not touch
the other, so a text's tokens are those of its parts in a row, and a part that was met before need
not be encoded again. *Words* are parts of any text: blanks and what follows them up to the next
blank, or a line break. Words of source code seldom come back as they are, but *runs* do: letters,
or digits and signs, with the blanks before them; of runs consists what is ASCII alone.
`Tokenizer.borders` says what holds; where nothing does, whole texts are encoded.
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
"""Of a longer text so much is split at once: its parts take ten times the room."""
PARTS_KEPT = 1 << 18
LONGEST_KEPT = 40
"""Characters; longer parts seldom come back."""


class Encoder:
    """Encodes texts as they are stored. For one thread."""

    def __init__(self, tokenizer: Tokenizer, dtype: type[np.generic]) -> None:
        """Prepare to encode.

        Args:
            tokenizer: the vocabulary.
            dtype: of a stored token, large enough for it.
        """
        self._tokenizer, self._dtype = tokenizer, dtype
        self._known = _Known(self._encode_part)
        self.eod = self._pack([tokenizer.eod])

    def encode(self, text: str) -> bytes:
        """Return the tokens of a text, which must be valid Unicode, without an end of document."""
        if self._tokenizer.borders == "none":
            return self._pack(self._tokenizer.encode(text))
        part = _RUN if self._has_runs(text) else _WORD
        blocks, start = [], 0
        while start < len(text):
            border = _BORDER.search(text, start + BLOCK_CHARACTERS)
            end = border.start() if border else len(text)
            parts = part.findall(text, start, end)
            blocks.append(b"".join(map(self._known.__getitem__, parts)))
            start = end
        return b"".join(blocks)

    def _has_runs(self, text: str) -> bool:
        return self._tokenizer.borders == "runs" and text.isascii()

    def _encode_part(self, part: str) -> bytes:
        if self._has_runs(part) and len(runs := _RUN.findall(part)) > 1:
            return b"".join(map(self._known.__getitem__, runs))
        return self._pack(self._tokenizer.encode_word(part))

    def _pack(self, ids: list[int]) -> bytes:
        return np.array(ids, dtype=self._dtype).tobytes()


class _Known(dict[str, bytes]):
    """The tokens of what was met before; forgets all when there is too much."""

    def __init__(self, encode: Callable[[str], bytes]) -> None:
        super().__init__()
        self._encode = encode

    def __missing__(self, text: str) -> bytes:
        tokens = self._encode(text)
        if len(text) <= LONGEST_KEPT:
            if len(self) >= PARTS_KEPT:
                self.clear()
            self[text] = tokens
        return tokens
