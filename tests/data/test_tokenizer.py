import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.config.data import FIXED_PIECES
from frontier_llm.data.prepare import find_prepared
from frontier_llm.data.sentencepiece_tokenizer import (
    SPACE_MARK,
    SentencePieceTokenizer,
    train_tokenizer,
)
from frontier_llm.data.tokenizer import Tokenizer
from frontier_llm.errors import ConfigError, DataError
from tests.data.conftest import config
from tests.properties import examples

TEXT = "def walk(tree):\n    for leaf in tree:\n        yield leaf\n\n" * 20


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_tokenizer([TEXT], 300, tmp_path_factory.mktemp("tokenizer") / "t.model")


ANY_TEXT = st.one_of(
    st.text(),
    st.text(alphabet=f" \t\n\r\0a.{SPACE_MARK}"),
    st.lists(st.sampled_from(["<s>", "</s>", "<unk>", "<0x0A>", SPACE_MARK, "\u200d", "👩"])).map(
        "".join
    ),
)


@examples(200)
@given(ANY_TEXT)
def test_any_text_comes_back_exactly(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.vocabulary for token in ids)
    assert tokenizer.eod not in ids


def test_real_text_is_shortened_and_lines_end_in_one_token(tokenizer: Tokenizer):
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert len(ids) < len(TEXT) / 2
    (line_break,) = tokenizer.encode("\n")
    assert ids.count(line_break) == TEXT.count("\n")


def test_end_of_document_has_no_text(tokenizer: Tokenizer):
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.eod]) == "a"


def test_invalid_utf8_is_decoded_to_replacement_characters(tokenizer: Tokenizer):
    first_byte_of_two = tokenizer.encode("é")[0]
    assert tokenizer.decode([first_byte_of_two]) == "\ufffd"


def test_vocabulary_is_as_configured(tokenizer: Tokenizer):
    assert tokenizer.vocabulary == 300


def test_small_corpus_gives_the_largest_vocabulary_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    tokenizer = train_tokenizer(["hello world"], 4096, tmp_path / "t.model")
    assert f"has {tokenizer.vocabulary} tokens: the text is too small" in caplog.text
    assert FIXED_PIECES < tokenizer.vocabulary < 4096
    assert tokenizer.decode(tokenizer.encode("hello wörld")) == "hello wörld"


@pytest.mark.parametrize("pieces", [FIXED_PIECES + 1, 300, 1000])
def test_characters_that_do_not_fit_are_encoded_as_bytes(tmp_path: Path, pieces: int):
    draw = random.Random(0)
    letters = [chr(code) for code in range(0x4E00, 0x4E00 + 2000)]
    text = "\n".join("".join(draw.choices(letters, k=50)) for _ in range(200))
    tokenizer = train_tokenizer([text], pieces, tmp_path / "t.model")
    assert tokenizer.vocabulary <= pieces
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_long_line_is_learnt_from(tmp_path: Path):
    tokenizer = train_tokenizer(["lantern " * 5000], 270, tmp_path / "t.model")
    assert len(tokenizer.encode("lantern lantern")) < 10


def test_a_too_small_vocabulary_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"set data.vocabulary=260 or more"):
        train_tokenizer([TEXT], FIXED_PIECES, tmp_path / "t.model")
    (tmp_path / "text.txt").write_text(TEXT)
    with pytest.raises(ConfigError, match=r"set data.vocabulary=260 or more"):
        find_prepared(config(tmp_path / "c", tmp_path / "text.txt", vocabulary=FIXED_PIECES))


@pytest.mark.parametrize("texts", [[], [""], ["\n\n"]])
def test_no_text_is_refused(tmp_path: Path, texts: list[str]):
    with pytest.raises(DataError, match="on 0 characters"):
        train_tokenizer(texts, 300, tmp_path / "t.model")


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer):
    with pytest.raises(DataError, match="not valid Unicode"):
        tokenizer.encode("a\ud800b")


@pytest.mark.parametrize("content", [b"", b"no model"])
def test_a_file_that_is_not_a_tokenizer_is_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"data\.tokenizer(.|\n)*wants:  a sentencepiece model"):
        SentencePieceTokenizer(path)
