"""Convert text to token ids and back without loss: `decode(encode(text)) == text`.

The tokenizer is sentencepiece's byte-pair encoding. Text is not normalised, characters outside the
vocabulary are encoded as bytes, and a line break is always a separate token. A *piece* is the text
of one vocabulary entry, as sentencepiece calls it.
"""

import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

import sentencepiece

from frontier_llm.config.reading import SENTINELS
from frontier_llm.errors import DataError

SPACE_MARK = "\u2581"
"""Character by which sentencepiece writes a space in its pieces. A text may contain it as well."""
FIXED_PIECES = 256 + 3
"""Number of pieces in every vocabulary: 256 bytes, unknown, end of document, line break."""
_ACROSS_RUNS = re.compile("[A-Za-z][^A-Za-z]|[^A-Za-z][A-Za-z]", re.DOTALL)
"""Matches a piece that crosses a border between runs (see encoder.py)."""
_ACROSS_WORDS = re.compile(f"[^{SPACE_MARK} ][{SPACE_MARK} ]|.\n|\n.", re.DOTALL)
"""Matches a piece that crosses a border between words (see encoder.py)."""
_FIRST_SENTINEL = ("\u2581<extra_id_0>", "<extra_id_0>")
"""Pieces of the first sentinel in the models of mT5 and T5."""
MAX_LINE_CHARACTERS = 1024
"""Longer lines are split for training, because sentencepiece drops lines of more than 4 KiB."""
COVERAGE = 0.9995
"""Fraction of the characters of the training text that get pieces; the others become bytes."""


class Tokenizer:
    """A trained sentencepiece model. The class is thread-safe."""

    def __init__(self, path: Path) -> None:
        """Read a sentencepiece model.

        Raises:
            DataError: the file is absent or not a sentencepiece model.
        """
        try:
            model = path.read_bytes()
            if not model:  # sentencepiece would accept an empty file as an empty vocabulary
                raise RuntimeError("the file is empty")
            self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (OSError, RuntimeError) as error:
            raise DataError(
                f"cannot read the tokenizer {path}: {error}\n"
                f"  do: delete the folder {path.parent}; it is prepared again"
            ) from error
        self._space_mark_ids = [
            self._pieces.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()
        ]

    @cached_property
    def borders(self) -> Literal["none", "words", "runs"]:
        """Kind of substrings whose borders no token crosses in any text.

        encoder.py defines words and runs and uses this property. It is derived from the pieces of
        the vocabulary. This is valid only for byte-pair encoding of text that is not normalised,
        where a token crosses a border only if a piece does.
        """
        try:
            # needs the protobuf package; without it whole texts are encoded, which is slower
            from sentencepiece.sentencepiece_model_pb2 import ModelProto
        except (ImportError, TypeError):
            return "none"
        model = ModelProto.FromString(self._pieces.serialized_model_proto())
        text, trainer = model.normalizer_spec, model.trainer_spec
        normalises = (
            text.precompiled_charsmap or text.add_dummy_prefix or text.remove_extra_whitespaces
        )
        if normalises or not text.escape_whitespaces or trainer.model_type != trainer.BPE:
            return "none"
        kinds = model.SentencePiece
        not_text = (kinds.CONTROL, kinds.UNKNOWN, kinds.BYTE)
        pieces = [piece.piece for piece in model.pieces if piece.type not in not_text]
        if any(map(_ACROSS_WORDS.search, pieces)):
            return "none"
        stripped = (piece.lstrip(SPACE_MARK) for piece in pieces)
        crosses_runs = any(piece.isascii() and _ACROSS_RUNS.search(piece) for piece in stripped)
        return "words" if crosses_runs else "runs"

    @property
    def vocabulary(self) -> int:
        """Number of token ids, including special tokens."""
        return int(self._pieces.vocab_size())

    @property
    def eod(self) -> int:
        """Token id that ends a document."""
        return int(self._pieces.eos_id())

    @property
    def first_sentinel(self) -> int:
        """Token id of the first sentinel, by which span corruption replaces the first span.

        Further sentinels have the ids below it. The models of T5 have pieces for sentinels; with
        other models the sentinels are ids after the vocabulary.
        """
        for piece in _FIRST_SENTINEL:
            if not self._pieces.is_unknown(found := self._pieces.piece_to_id(piece)):
                return int(found)
        return self.vocabulary + SENTINELS - 1

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without an end-of-document token."""
        return self.encode_all([text])[0]

    def encode_word(self, word: str) -> list[int]:
        """Return the token ids of a text that does not contain SPACE_MARK, or of SPACE_MARK alone.

        This is faster than `encode`, which handles any text.
        """
        if word == SPACE_MARK:
            return self._space_mark_ids
        ids: list[int] = self._pieces.encode(word)
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode several texts at once, on all cores.

        Raises:
            DataError: a text is not valid Unicode: it has half a surrogate pair.
        """
        try:
            for text in texts:
                text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"cannot encode a text that is not valid Unicode: {error}") from error
        # sentencepiece would decode SPACE_MARK as a space, so the mark is encoded by its bytes
        split_texts = [text.split(SPACE_MARK) for text in texts]
        encoded: list[list[int]] = self._pieces.encode([first for first, *_ in split_texts])
        for ids, (_, *others) in zip(encoded, split_texts, strict=True):
            for substring in others:
                ids += self._space_mark_ids + self._pieces.encode(substring)
        return encoded

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens; invalid UTF-8 becomes U+FFFD."""
        return str(self._pieces.decode(list(ids)))


def train_tokenizer(texts: Iterable[str], vocabulary: int, path: Path) -> Tokenizer:
    """Train a tokenizer and write it to a file.

    If the texts are too short for `vocabulary` tokens, the vocabulary is as large as possible. If
    they have more different characters than the vocabulary can hold, rare characters are encoded as
    bytes.

    Args:
        texts: texts to train on, which are held in memory.
        vocabulary: number of tokens, at least 260.
        path: path of the file to write.

    Raises:
        DataError: `vocabulary` is too small, or there is no text.
    """
    if vocabulary <= FIXED_PIECES:
        raise DataError(
            f"data.vocabulary={vocabulary} is too small: 256 bytes, unknown, end of document and "
            f"line break need {FIXED_PIECES} tokens\n"
            f"  do: set data.vocabulary to {FIXED_PIECES + 1} or more"
        )
    path.write_bytes(_train_largest(list(_lines(texts)), vocabulary))
    return Tokenizer(path)


def _lines(texts: Iterable[str]) -> Iterable[str]:
    """Split texts into lines of at most MAX_LINE_CHARACTERS, the units of sentencepiece."""
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), MAX_LINE_CHARACTERS):
                yield line[start : start + MAX_LINE_CHARACTERS]


def _train_largest(lines: list[str], vocabulary: int) -> bytes:
    """Train with the largest vocabulary that the lines allow, at most `vocabulary`."""
    for _ in range(3):
        try:
            return _train(lines, vocabulary)
        except RuntimeError as error:
            # sentencepiece's messages are the only way to learn what the lines allow
            if limit := re.search(r"set it to a value <= (\d+)", str(error)):
                vocabulary = int(limit[1])
            elif "smaller than required_chars" in str(error):
                # half of the vocabulary for characters, half for longer pieces
                characters = (vocabulary - FIXED_PIECES + 1) // 2
                lines = list(_without_rare_characters(lines, characters))
            else:
                break
    raise DataError(
        f"cannot train a tokenizer of {vocabulary} tokens on {sum(map(len, lines))} characters\n"
        "  do: set data.path to more text, or lower data.vocabulary"
    )


def _without_rare_characters(lines: list[str], characters: int) -> Iterable[str]:
    """Remove all but the `characters` most common characters, and split lines where one was."""
    counts = Counter("".join(lines))
    common = {character for character, _ in counts.most_common(characters)}
    breaks = {ord(character): "\n" for character in counts if character not in common}
    for line in lines:
        yield from line.translate(breaks).split("\n")


def _train(lines: list[str], vocabulary: int) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocabulary,
        character_coverage=COVERAGE,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        allow_whitespace_only_pieces=True,  # an indentation is one token
        user_defined_symbols=["\n"],
        unk_id=0,
        eos_id=1,
        bos_id=-1,
        pad_id=-1,
        minloglevel=2,
    )
    return model.getvalue()
