"""Convert text to token ids and back: `decode(encode(text)) == text` for every valid text.

The tokenizer is sentencepiece's byte-pair encoding. Text is not normalised, characters outside the
vocabulary are encoded as bytes, and a line break is always a separate token.
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
"""Character that stands for a space in sentencepiece's pieces; texts may contain it as well."""
FIXED_PIECES = 256 + 3
"""Number of pieces in every vocabulary: 256 bytes, unknown, end of document, line break."""
_ACROSS_RUNS = re.compile("[A-Za-z][^A-Za-z]|[^A-Za-z][A-Za-z]", re.DOTALL)
_ACROSS_WORDS = re.compile(f"[^{SPACE_MARK} ][{SPACE_MARK} ]|.\n|\n.", re.DOTALL)
_FIRST_SENTINEL = ("\u2581<extra_id_0>", "<extra_id_0>")
MAX_LINE_CHARACTERS = 1024
COVERAGE = 0.9995


class Tokenizer:
    """A trained sentencepiece model. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Read a sentencepiece model.

        Raises:
            DataError: the file is absent or not a sentencepiece model.
        """
        try:
            model = path.read_bytes()
            if not model:  # sentencepiece accepts it as an empty vocabulary
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
        """Kind of substrings whose borders no token crosses, in any text (see encoder.py).

        Derived from the pieces, which is valid for byte-pair encoding of text that is not
        normalised: a token then crosses a border only if a piece does.
        """
        try:
            # needs the protobuf package; without it whole texts are encoded, which is slower
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
        """Number of token ids, including special tokens."""
        return int(self._pieces.vocab_size())

    @property
    def eod(self) -> int:
        """Token id that ends a document."""
        return int(self._pieces.eos_id())

    @property
    def first_sentinel(self) -> int:
        """Token id of the first sentinel; the other sentinels count down from it.

        T5's models have pieces for sentinels; for other models they are ids after the vocabulary.
        """
        for piece in _FIRST_SENTINEL:
            if not self._pieces.is_unknown(found := self._pieces.piece_to_id(piece)):
                return int(found)
        return self.vocabulary + SENTINELS - 1

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without an end-of-document token."""
        return self.encode_all([text])[0]

    def encode_word(self, word: str) -> list[int]:
        """Return the token ids of a text without SPACE_MARK, or of SPACE_MARK alone."""
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
                # a piece with SPACE_MARK would be decoded to a space; its bytes are decoded exactly
                ids += self._mark + self._pieces.encode(part)
        return encoded

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens; invalid UTF-8 becomes U+FFFD."""
        return str(self._pieces.decode(list(ids)))


def train_tokenizer(texts: Iterable[str], vocabulary: int, path: Path) -> Tokenizer:
    """Train a tokenizer and write it to a file.

    If the texts do not allow `vocabulary` tokens, the vocabulary is as large as possible. If they
    have more different characters than fit, the rarer ones are encoded as bytes.

    Args:
        texts: texts to train on, held in memory.
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
    """Split texts into the sentences of sentencepiece, which drops those of more than 4 KiB."""
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
            if limit := re.search(r"set it to a value <= (\d+)", str(error)):
                vocabulary = int(limit[1])
            elif "smaller than required_chars" in str(error):
                # half of the vocabulary for characters, half for longer pieces
                lines = list(_without_rare(lines, (vocabulary - FIXED_PIECES + 1) // 2))
            else:
                break
    raise DataError(
        f"cannot train a tokenizer of {vocabulary} tokens on {sum(map(len, lines))} characters\n"
        "  do: set data.path to more text, or lower data.vocabulary"
    )


def _without_rare(lines: list[str], characters: int) -> Iterable[str]:
    """Split lines at all characters but the most common ones."""
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
