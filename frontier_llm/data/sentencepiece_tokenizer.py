"""Read and train sentencepiece models.

A *piece* is the text of one vocabulary entry, as sentencepiece calls it. A model that is trained
here converts text without loss, `decode(encode(text)) == text`: text is not normalised, characters
outside the vocabulary are encoded as bytes, and a line break is always a separate token.
"""

import io
import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import sentencepiece

from frontier_llm.config.data import FIXED_PIECES
from frontier_llm.data.corpus_manifest import TextCounts
from frontier_llm.data.tokenizer import Splitting, Tokenizer, check_unicode
from frontier_llm.errors import ConfigError, DataError

SPACE_MARK = "\u2581"
"""Character by which sentencepiece writes a space in its pieces. A text may contain it as well."""
_ACROSS_RUNS = re.compile("[A-Za-z][^A-Za-z]|[^A-Za-z][A-Za-z]", re.DOTALL)
"""Matches a piece that crosses a border between runs."""
_ACROSS_WORDS = re.compile(f"[^{SPACE_MARK} ][{SPACE_MARK} ]|.\n|\n.", re.DOTALL)
"""Matches a piece that crosses a border between words."""
# SPACE_MARK stands for a blank inside pieces. If a text contains the character itself, the
# character is a word of its own, since sentencepiece treats it like a blank.
_WORDS = Splitting(
    words=re.compile(f" *[^ \n{SPACE_MARK}]+| +|\n|{SPACE_MARK}"),
    ascii_runs=None,
    border=re.compile(f"\n|{SPACE_MARK}|(?<! ) "),
)
"""A word is a series of blanks and the characters after it up to the next blank or line break."""
_RUNS = Splitting(
    words=_WORDS.words,
    ascii_runs=re.compile(r" *(?:[A-Za-z]+|[^ \nA-Za-z]+)| +|\n"),
    border=_WORDS.border,
)
"""A run is a series of blanks and the letters after it, or the digits and signs after it."""
_LOG = logging.getLogger(__name__)
sentencepiece.set_min_log_level(3)  # a broken file is an exception, too
MAX_LINE_CHARACTERS = 1024
"""Longer lines are split for training, because sentencepiece drops lines of more than 4 KiB."""
COVERAGE = 0.9995
"""Fraction of the characters of the training text that get pieces; the others become bytes."""


class SentencePieceTokenizer(Tokenizer):
    """A trained sentencepiece model. Its end-of-sentence piece ends documents by default."""

    def __init__(self, path: Path, end: str | int | None = None) -> None:
        model, problem = path.read_bytes(), "sentencepiece cannot read this file"
        try:
            if not model:  # sentencepiece would accept an empty file as an empty vocabulary
                problem = "the file is empty"
                raise RuntimeError(problem)
            self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise ConfigError(
                "data.tokenizer",
                path,
                f"a sentencepiece model, or a tokenizer.json: {problem}",
                "set data.tokenizer to such a file, or to a folder that holds one",
            ) from error
        self._space_mark_ids = [
            self._pieces.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()
        ]
        end = self._end_of_sentence(path) if end is None else end
        self.eod = end if isinstance(end, int) else self.named_end(path, end)

    @property
    def vocabulary(self) -> int:
        """The number of pieces."""
        return int(self._pieces.vocab_size())

    def id_of(self, token: str) -> int | None:
        """Return the id of a piece, or None if there is no such piece."""
        found = int(self._pieces.piece_to_id(token))
        return None if self._pieces.is_unknown(found) else found

    def token_of(self, token_id: int) -> str:
        """Return the piece that has an id."""
        return str(self._pieces.id_to_piece(token_id))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without an end-of-document token."""
        check_unicode(text)
        # sentencepiece would decode SPACE_MARK as a space, so the mark is encoded by its bytes
        first, *others = text.split(SPACE_MARK)
        ids: list[int] = self._pieces.encode(first)
        for substring in others:
            ids += self._space_mark_ids + self._pieces.encode(substring)
        return ids

    def encode_counting(self, text: str) -> tuple[list[int], TextCounts]:
        """Return the token ids of a text, and the characters that are unknown."""
        ids, unknown = self.encode(text), int(self._pieces.unk_id())
        counts = TextCounts(unknown_tokens=ids.count(unknown))
        if counts.unknown_tokens:
            pieces = zip(
                self._pieces.encode(text), self._pieces.encode(text, out_type=str), strict=True
            )
            unknown_text = "".join(piece for token, piece in pieces if token == unknown)
            counts.unknown = len(unknown_text.replace(SPACE_MARK, ""))
        return ids, counts

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens; invalid UTF-8 becomes U+FFFD."""
        return str(self._pieces.decode(list(ids)))

    @cached_property
    def splitting(self) -> Splitting | None:
        """The splitting whose borders no token crosses in any text.

        It is derived from the pieces. This is valid only for byte-pair encoding of text that is not
        normalised: merges on the two sides of a border are independent there, and a token crosses
        a border only if a piece does.
        """
        try:
            # needs the protobuf package; without it whole texts are encoded, which is slower
            from sentencepiece.sentencepiece_model_pb2 import ModelProto
        except (ImportError, TypeError):
            return None
        model = ModelProto.FromString(self._pieces.serialized_model_proto())
        text, trainer = model.normalizer_spec, model.trainer_spec
        normalises = (
            text.precompiled_charsmap or text.add_dummy_prefix or text.remove_extra_whitespaces
        )
        if normalises or not text.escape_whitespaces or trainer.model_type != trainer.BPE:
            return None
        kinds = model.SentencePiece
        not_text = (kinds.CONTROL, kinds.UNKNOWN, kinds.BYTE)
        pieces = [piece.piece for piece in model.pieces if piece.type not in not_text]
        if any(map(_ACROSS_WORDS.search, pieces)):
            return None
        stripped = (piece.lstrip(SPACE_MARK) for piece in pieces)
        crosses_runs = any(piece.isascii() and _ACROSS_RUNS.search(piece) for piece in stripped)
        return _WORDS if crosses_runs else _RUNS

    def encode_substring(self, substring: str) -> list[int]:
        """Return the token ids of one match of `splitting`."""
        if substring == SPACE_MARK:
            return self._space_mark_ids
        ids: list[int] = self._pieces.encode(substring)
        return ids

    def _end_of_sentence(self, path: Path) -> int:
        if (found := int(self._pieces.eos_id())) < 0:
            raise ConfigError(
                "data.end_of_document",
                "null",
                f"the piece that ends a document: {path} has no end-of-sentence token",
                "set \"data.end_of_document='PIECE'\", or data.tokenizer=null to train "
                "a tokenizer on the corpus",
            )
        return found


def check_size(vocabulary: int) -> None:
    """Refuse a number of tokens that leaves none for text; a ConfigError at data.vocabulary."""
    if vocabulary <= FIXED_PIECES:
        raise ConfigError(
            "data.vocabulary",
            vocabulary,
            f"more than {FIXED_PIECES} tokens: 256 bytes, unknown, end of document and line break",
            f"set data.vocabulary={FIXED_PIECES + 1} or more, such as 4096",
        )


def train_tokenizer(texts: Iterable[str], vocabulary: int, path: Path) -> SentencePieceTokenizer:
    """Train a tokenizer and write it to a file.

    If the texts are too short for `vocabulary` tokens, the vocabulary is as large as possible. If
    they have more different characters than the vocabulary can hold, rare characters are encoded as
    bytes.
    """
    check_size(vocabulary)
    path.write_bytes(_train_largest(list(_lines(texts)), vocabulary))
    tokenizer = SentencePieceTokenizer(path)
    if tokenizer.vocabulary < vocabulary:
        _LOG.warning(
            "the new tokenizer has %d tokens: the text is too small for data.vocabulary=%d",
            tokenizer.vocabulary,
            vocabulary,
        )
    return tokenizer


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
