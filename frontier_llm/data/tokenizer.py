"""Convert text to token ids and back: what all kinds of tokenizers have in common.

`tokenizer_source.open_tokenizer` opens a tokenizer. There are two kinds: sentencepiece models
(sentencepiece_tokenizer.py) and tokenizer.json files of Hugging Face (json_tokenizer.py). An
`Encoder` encodes texts to the bytes of a token file, with a cache of recurring substrings: words,
or, in ASCII text, runs. If a text cannot be split (`Tokenizer.splitting`), it is encoded as a
whole.
"""

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

import numpy as np

from frontier_llm.config.denoisers import SENTINELS
from frontier_llm.data.corpus_manifest import TextCounts
from frontier_llm.data.source_format import END_MARKS
from frontier_llm.errors import ConfigError, DataError
from frontier_llm.units import MIB

SENTINEL = "<extra_id_{}>"
"""Name of a sentinel in a prompt and in what a model writes, by number, as in T5."""
_SENTINELS = (f"\u2581{SENTINEL}", SENTINEL)
"""Names of the sentinels in the tokenizers of mT5 and T5, by number."""
_SENTINEL_TEXT = re.compile(r"<extra_id_(0|[1-9]\d{0,5})>", re.ASCII)
BLOCK_CHARACTERS = MIB
"""Number of characters that are split into substrings at a time. This limits the memory, because
the list of substrings takes ten times the memory of the text."""
MIXED_BLOCK_CHARACTERS = 512
"""The same in texts with characters that are not ASCII, most of which have few of them: the blocks
without any are split into runs."""
CACHE_ENTRIES = 1 << 18
"""Number of cached substrings at which the cache is cleared."""
_PROBE = "a  b\n\n  c\td \u00a0\u2002\uff21\ufb01.\n"
"""Blanks, line breaks, and letters that compatibility normalisation (NFKC) replaces."""
CACHED_CHARACTERS = 40
"""Length of the longest cached substring in characters; longer ones seldom recur."""


@dataclass(frozen=True)
class Splitting:
    """Regular expressions that split a text into substrings that can be encoded separately.

    A *border* is a position in a text that no token crosses, and where encoding the text before
    and the text after separately gives the same tokens. The tokens of recurring substrings between
    borders can therefore be cached.
    """

    words: re.Pattern[str]
    """Matches the substrings of any text, one after the other without gaps."""
    ascii_runs: re.Pattern[str] | None
    """Matches shorter substrings of ASCII text. In source code they recur more often than words.
    None: ASCII text is split into words as well."""
    border: re.Pattern[str]
    """Finds a border of words and runs, the start of the match. It need not find all borders."""
    whole: tuple[str, ...] = ()
    """A text that contains one of these strings is not split, but encoded as a whole."""


class Tokenizer(ABC):
    """A tokenizer. Special tokens are never read from a text: their names are encoded as text.

    All methods are thread-safe.
    """

    eod: int
    """Token id that ends a document."""

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """The largest token id plus 1, special tokens included."""

    @abstractmethod
    def id_of(self, token: str) -> int | None:
        """Return the id of an entry of the vocabulary, or None if there is no such entry."""

    @abstractmethod
    def token_of(self, token_id: int) -> str:
        """Return the entry of the vocabulary that has an id, the inverse of `id_of`."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without an end-of-document token.

        Raises a DataError if the text is not valid Unicode: it has half a surrogate pair.
        """

    def byte_name(self, byte: int) -> str | None:
        """Return the entry of the vocabulary for a byte; None if bytes never have tokens."""
        return f"<0x{byte:02X}>"

    @cached_property
    def byte_ids(self) -> dict[int, int]:
        """Token ids of single bytes, by byte, as far as the vocabulary has them."""
        names = {byte: self.byte_name(byte) for byte in range(256)}
        found = {byte: None if name is None else self.id_of(name) for byte, name in names.items()}
        return {byte: token for byte, token in found.items() if token is not None}

    @property
    def covers_all_text(self) -> bool:
        """Whether tokens other than the unknown token stand for every text: those of all bytes."""
        return len(self.byte_ids) == 256

    @cached_property
    def keeps_text(self) -> bool:
        """Whether decoding gives back a text with blanks, line breaks and unusual letters."""
        return not _absent(_PROBE, self.decode(self.encode(_PROBE)))

    def count(self, text: str) -> tuple[list[int], TextCounts]:
        """Return what `encode_counting` returns, and count what normalisation changes."""
        ids, counts = self.encode_counting(text)
        if not self.keeps_text:
            absent = _absent(text, self.decode(ids))
            counts.changed = max(0, absent.total() - counts.lost - counts.unknown)
            for character, number in absent.items() if counts.changed else ():
                counts.changed_by[_kind(character)] += number
        return ids, counts

    @abstractmethod
    def encode_counting(self, text: str) -> tuple[list[int], TextCounts]:
        """Return what `encode` returns, and the characters that are lost or unknown."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens; invalid UTF-8 becomes U+FFFD."""

    @property
    @abstractmethod
    def splitting(self) -> Splitting | None:
        """How to split texts, or None if only whole texts may be encoded."""

    @abstractmethod
    def encode_substring(self, substring: str) -> list[int]:
        """Return the token ids of one match of `splitting`, faster than `encode`.

        An ASCII substring must be a match of `ascii_runs`, unless this is None.
        """

    def sentinels(self, count: int) -> list[int]:
        """Return the token ids of sentinels, by which span corruption replaces spans in order.

        The tokenizers of T5 and mT5 have tokens for 100 sentinels. Without them the first 100 are
        the ids after the vocabulary, the highest first as in T5. Further sentinels follow these
        ids: no sentinel is a token of text, and none changes if another length needs more.
        """
        highest = self.vocabulary + SENTINELS - 1
        found = self._named_sentinels(count) or [highest - k for k in range(SENTINELS)][:count]
        after = max([self.vocabulary, *(token + 1 for token in found)])
        return [*found, *range(after, after + count - len(found))]

    def _named_sentinels(self, count: int) -> list[int]:
        """Return the ids of the first `count` sentinels that are tokens of this tokenizer."""
        for names in _SENTINELS:
            found = list[int]()
            for number in range(count):
                token = self.id_of(names.format(number))
                if token is None:
                    break
                found.append(token)
            if found:
                return found
        return []

    def named_end(self, path: Path, token: str) -> int:
        """Return the id of `token`, the value of data.end_of_document."""
        if (found := self.id_of(token)) is None:
            raise ConfigError(
                "data.end_of_document",
                repr(token),
                f"a token of the {self.vocabulary} tokens of {path}",
                "name another token, or set data.end_of_document=null to use the token that the "
                "tokenizer itself names",
            )
        return found


def encode_marked(tokenizer: Tokenizer, text: str, sentinels: Sequence[int]) -> list[int]:
    """Return the token ids of a text in which `<extra_id_2>` stands for `sentinels[2]`."""
    ids, start = list[int](), 0
    for match in _SENTINEL_TEXT.finditer(text):
        if int(match[1]) < len(sentinels):
            ids += [*tokenizer.encode(text[start : match.start()]), sentinels[int(match[1])]]
            start = match.end()
    return ids + tokenizer.encode(text[start:])


def decode_marked(tokenizer: Tokenizer, ids: Sequence[int], sentinels: Sequence[int]) -> str:
    """Return the text of token ids, with `<extra_id_2>` for `sentinels[2]`."""
    names = {token: SENTINEL.format(number) for number, token in enumerate(sentinels)}
    parts = list[str]()
    for is_text, group in groupby(ids, lambda token: token not in names):
        tokens = list(group)
        parts += [tokenizer.decode(tokens)] if is_text else [names[token] for token in tokens]
    return "".join(parts)


def _absent(text: str, decoded: str) -> Counter[str]:
    """Return the characters that a decoded text lacks; a later one may stand for one."""
    return Counter(text) - Counter(decoded)


def _kind(character: str) -> str:
    if character.isspace():
        return "line breaks" if character in "\n\r" else "blanks"
    return "capital letters" if character.isupper() else "other characters"


def check_unicode(text: str) -> None:
    """Refuse a text with half a surrogate pair, which has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"cannot encode a text that is not valid Unicode: {error}\n  do: repair the text"
        ) from error


class Encoder:
    """Encodes texts to token bytes in a dtype that holds the vocabulary. Not thread-safe."""

    def __init__(self, tokenizer: Tokenizer, dtype: type[np.generic]) -> None:
        self._tokenizer, self._dtype = tokenizer, dtype
        self._splitting = tokenizer.splitting
        self._cache = _TokenCache(self._encode_substring)
        # by token id: whether it stands for a byte of a character with several bytes
        self._is_byte = np.zeros(tokenizer.vocabulary, dtype=np.bool_)
        self._is_byte[[token for byte, token in tokenizer.byte_ids.items() if byte >= 0x80]] = True
        self.end = tokenizer.token_of(tokenizer.eod)
        self.eod = self._pack([tokenizer.eod])

    def encode(self, text: str, counts: TextCounts | None = None) -> bytes:
        """Return the bytes of a text's tokens, without an end-of-document token.

        The text must have no unpaired surrogates. The counts of its characters are added to
        `counts`.
        """
        if counts is None:
            return self._encode(text)
        counts.characters += len(text)
        counts.bytes += len(text.encode())
        counts.end_marks += sum(map(text.count, END_MARKS))
        if self._tokenizer.covers_all_text and self._tokenizer.keeps_text:
            tokens = self._encode(text)
        else:
            ids, missing = self._tokenizer.count(text)
            counts.add(missing)
            tokens = self._pack(ids)
        array = np.frombuffer(tokens, self._dtype)
        counts.byte_tokens += int(self._is_byte[array].sum())
        counts.ends += int(np.count_nonzero(array == self._tokenizer.eod))
        return tokens

    def _encode(self, text: str) -> bytes:
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
