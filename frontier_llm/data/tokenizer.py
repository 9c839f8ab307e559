"""Text to token ids and back, exactly: `decode(encode(text)) == text` for every valid text.

Byte-pair encoding by sentencepiece. Nothing is normalised, what has no piece of its own is spelt
in bytes, and a line break is always one token of its own.
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
"""How sentencepiece writes a space inside a piece; in a text it is a character like another."""
FIXED_PIECES = 256 + 3
"""Pieces of every vocabulary: one a byte, unknown, end of document, line break."""
_ACROSS_RUNS = re.compile("[A-Za-z][^A-Za-z]|[^A-Za-z][A-Za-z]", re.DOTALL)
_ACROSS_WORDS = re.compile(f"[^{SPACE_MARK} ][{SPACE_MARK} ]|.\n|\n.", re.DOTALL)
_FIRST_SENTINEL = ("\u2581<extra_id_0>", "<extra_id_0>")
MAX_LINE_CHARACTERS = 1024
COVERAGE = 0.9995


class Tokenizer:
    """A trained vocabulary, read from a file. Threads may share it."""

    def __init__(self, path: Path) -> None:
        """Read a sentencepiece model.

        Raises:
            DataError: the file is absent or is no such model.
        """
        try:
            model = path.read_bytes()
            if not model:  # sentencepiece would take it for a vocabulary of nothing
                raise RuntimeError("the file is empty")
            self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (OSError, RuntimeError) as error:
            raise DataError(
                f"cannot read the tokenizer {path}: {error}\n"
                f"  do: delete the folder {path.parent}; it is prepared again"
            ) from error
        self._mark = [self._pieces.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]

    @cached_property
    def borders(self) -> Literal["none", "words", "runs"]:
        """Between what parts of any text no token reaches (see encoder.py).

        Known for byte-pair encoding if a text reaches it as it is: tokens then reach over a border
        only if a piece does.
        """
        try:
            # needs protobuf's runtime: without it texts are encoded whole, which is only slower
            from sentencepiece.sentencepiece_model_pb2 import ModelProto
        except (ImportError, TypeError):
            return "none"
        model = ModelProto.FromString(self._pieces.serialized_model_proto())
        text, trainer = model.normalizer_spec, model.trainer_spec
        changed = (
            text.precompiled_charsmap or text.add_dummy_prefix or text.remove_extra_whitespaces
        )
        if changed or not text.escape_whitespaces or trainer.model_type != trainer.BPE:
            return "none"
        named = (model.SentencePiece.CONTROL, model.SentencePiece.UNKNOWN, model.SentencePiece.BYTE)
        pieces = [piece.piece for piece in model.pieces if piece.type not in named]
        if any(map(_ACROSS_WORDS.search, pieces)):
            return "none"
        bare = (piece.lstrip(SPACE_MARK) for piece in pieces)
        mixed = any(piece.isascii() and _ACROSS_RUNS.search(piece) for piece in bare)
        return "words" if mixed else "runs"

    @property
    def vocabulary(self) -> int:
        """Number of token ids, specials included."""
        return int(self._pieces.vocab_size())

    @property
    def eod(self) -> int:
        """The token that ends a document."""
        return int(self._pieces.eos_id())

    @property
    def first_sentinel(self) -> int:
        """The first sentinel; the others are counted down from it.

        T5's models have pieces for them; otherwise they are the ids behind the vocabulary.
        """
        for piece in _FIRST_SENTINEL:
            if not self._pieces.is_unknown(found := self._pieces.piece_to_id(piece)):
                return int(found)
        return self.vocabulary + SENTINELS - 1

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without an end-of-document token."""
        return self.encode_all([text])[0]

    def encode_word(self, word: str) -> list[int]:
        """Return the token ids of a text that holds no SPACE_MARK, or nothing else."""
        if word == SPACE_MARK:
            return self._mark
        ids: list[int] = self._pieces.encode(word)
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode several texts at once, on all cores.

        Raises:
            DataError: a text is not valid Unicode (half a surrogate pair).
        """
        try:
            for text in texts:
                text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"cannot encode a text that is not valid Unicode: {error}") from error
        parts = [text.split(SPACE_MARK) for text in texts]
        encoded: list[list[int]] = self._pieces.encode([first for first, *_ in parts])
        for ids, (_, *others) in zip(encoded, parts, strict=True):
            for part in others:
                # a piece would come back as a space; its bytes come back as they are
                ids += self._mark + self._pieces.encode(part)
        return encoded

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; specials have none, broken UTF-8 becomes U+FFFD."""
        return str(self._pieces.decode(list(ids)))


def train_tokenizer(texts: Iterable[str], pieces: int, path: Path) -> Tokenizer:
    """Train a vocabulary and write it.

    A corpus with too little variety for `pieces` pieces gets as many as it has; one with more
    different characters than fit has the rarer ones spelt in bytes.

    Args:
        texts: what to train on; held in memory.
        pieces: size of the vocabulary, at least 260.
        path: the file to write.

    Raises:
        DataError: `pieces` is too few even for the bytes, or there is no text.
    """
    if pieces <= FIXED_PIECES:
        raise DataError(
            f"data.pieces={pieces} is too few: 256 bytes, unknown, end of document and line break "
            f"come first\n  do: set data.pieces to {FIXED_PIECES + 1} or more"
        )
    path.write_bytes(_train_what_fits(list(_lines(texts)), pieces))
    return Tokenizer(path)


def _lines(texts: Iterable[str]) -> Iterable[str]:
    """Cut texts into what sentencepiece calls sentences: it drops those of over 4 KiB."""
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), MAX_LINE_CHARACTERS):
                yield line[start : start + MAX_LINE_CHARACTERS]


def _train_what_fits(lines: list[str], pieces: int) -> bytes:
    for _ in range(3):
        try:
            return _train(lines, pieces)
        except RuntimeError as error:
            if limit := re.search(r"set it to a value <= (\d+)", str(error)):
                pieces = int(limit[1])
            elif "smaller than required_chars" in str(error):
                # half of the room for characters, half for what they make up
                lines = list(_without_rare(lines, (pieces - FIXED_PIECES + 1) // 2))
            else:
                break
    raise DataError(
        f"cannot train a tokenizer of {pieces} pieces on {sum(map(len, lines))} characters\n"
        "  do: set data.path to more text, or lower data.pieces"
    )


def _without_rare(lines: list[str], characters: int) -> Iterable[str]:
    """Cut lines where they hold another than the commonest characters."""
    counts = Counter("".join(lines))
    common = {character for character, _ in counts.most_common(characters)}
    breaks = {ord(character): "\n" for character in counts if character not in common}
    for line in lines:
        yield from line.translate(breaks).split("\n")


def _train(lines: list[str], pieces: int) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=pieces,
        character_coverage=COVERAGE,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        allow_whitespace_only_pieces=True,  # one token for an indentation
        user_defined_symbols=["\n"],
        unk_id=0,
        eos_id=1,
        bos_id=-1,
        pad_id=-1,
        minloglevel=2,
    )
    return model.getvalue()
