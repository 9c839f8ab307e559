"""Train a sentencepiece tokenizer that converts text to token ids and back without loss.

Text is not normalised, characters outside the vocabulary are encoded as bytes, and a line break is
always a separate token.
"""

import io
import logging
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import sentencepiece

from frontier_llm.data.sentencepiece_tokenizer import SentencePieceTokenizer
from frontier_llm.errors import DataError

_LOG = logging.getLogger(__name__)
FIXED_PIECES = 256 + 3
"""Number of pieces in every vocabulary: 256 bytes, unknown, end of document, line break."""
MAX_LINE_CHARACTERS = 1024
"""Longer lines are split for training, because sentencepiece drops lines of more than 4 KiB."""
COVERAGE = 0.9995
"""Fraction of the characters of the training text that get pieces; the others become bytes."""


def train_tokenizer(texts: Iterable[str], vocabulary: int, path: Path) -> SentencePieceTokenizer:
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
