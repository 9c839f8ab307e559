import random
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import example, given
from hypothesis import strategies as st

from frontier_llm.data import tokenizer as module
from frontier_llm.data.sentencepiece_tokenizer import (
    SPACE_MARK,
    SentencePieceTokenizer,
    train_tokenizer,
)
from frontier_llm.data.tokenizer import Encoder, Tokenizer
from tests.properties import examples

CODE = "def walk(tree, *args):\n    for leaf in tree[1:-1]:\n        yield leaf.x_1 + 10\n\n" * 20
PROSE = "Der Fluß — naïve »Laternen« und 雪, 3 Stück; don't.\n  Noch  einmal.\n" * 20


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_tokenizer([CODE, PROSE], 500, tmp_path_factory.mktemp("t") / "t.model")


def tokens(encoder: Encoder, text: str) -> list[int]:
    return np.frombuffer(encoder.encode(text), dtype=np.uint16).tolist()


ANY_TEXT = st.one_of(
    st.text(),
    st.text(alphabet=f" \t\n\r\0a1._éß雪{SPACE_MARK}"),
    st.lists(st.sampled_from([*CODE[:80].split(" "), *PROSE[:60].split(" "), " ", "\n"])).map(
        " ".join
    ),
)


@examples(150)
@given(st.lists(ANY_TEXT, max_size=4))
@example([CODE, PROSE, CODE + PROSE])
def test_encoding_substrings_gives_the_tokens_of_the_whole_text(
    tokenizer: Tokenizer, texts: list[str]
):
    encoder = Encoder(tokenizer, np.uint16)
    for text in texts:
        assert tokens(encoder, text) == tokenizer.encode(text)


def test_trained_tokenizers_allow_runs(tokenizer: Tokenizer):
    assert tokenizer.splitting is not None
    assert tokenizer.splitting.ascii_runs is not None


def test_a_long_text_is_split_between_tokens(tokenizer: Tokenizer, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_CHARACTERS", 7)
    monkeypatch.setattr(module, "MIXED_BLOCK_CHARACTERS", 7)
    encoder = Encoder(tokenizer, np.uint16)
    for text in (CODE, PROSE, "x" * 1000, " " * 1000, f"a{SPACE_MARK}b" * 99, "leaf " * 99):
        assert tokens(encoder, text) == tokenizer.encode(text)


def test_a_small_cache_changes_no_token(tokenizer: Tokenizer, monkeypatch):
    monkeypatch.setattr(module, "CACHE_ENTRIES", 3)
    encoder = Encoder(tokenizer, np.uint16)
    assert tokens(encoder, CODE + PROSE) == tokenizer.encode(CODE + PROSE)
    assert len(encoder._cache) <= 3


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "unigram"},
        {"add_dummy_prefix": True},
        {"remove_extra_whitespaces": True},
        {"normalization_rule_name": "nfkc"},
        {"split_by_whitespace": False},
        {"user_defined_symbols": ["leaf in"]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_tokenizers_encode_whole_texts(tmp_path: Path, options: dict):
    draw = random.Random(0)
    words = ["leaf", "in", "tree", "ab", "ba", "of  the"]
    text = [" ".join(draw.choices(words, k=9)) for _ in range(300)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text),
        model_prefix=str(tmp_path / "m"),
        minloglevel=2,
        **{
            "model_type": "bpe", "vocab_size": 300, "byte_fallback": True,
            "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
            "add_dummy_prefix": False, "hard_vocab_limit": False, "eos_id": 1, "unk_id": 0,
            "bos_id": -1, **options,
        },
    )  # fmt: skip
    tokenizer = SentencePieceTokenizer(tmp_path / "m.model")
    assert tokenizer.splitting is None
    line = "leaf in  tree\nab"
    assert tokens(Encoder(tokenizer, np.uint16), line) == tokenizer.encode(line)


def test_tokens_beyond_16_bits(tokenizer: Tokenizer):
    encoded = Encoder(tokenizer, np.int32).encode(CODE)
    assert np.frombuffer(encoded, dtype=np.int32).tolist() == tokenizer.encode(CODE)
