"""Text that a tokenizer cannot represent is counted, and refused above a limit."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_lab.commands.preprocess import account_rows
from frontier_llm.data.corpora import open_all
from frontier_llm.data.corpus_manifest import MANIFEST_FILE, Manifest, TextCounts
from frontier_llm.data.json_tokenizer import JsonTokenizer
from frontier_llm.data.prepare import prepare
from frontier_llm.data.prepared_corpus import Samples
from frontier_llm.data.sentencepiece_tokenizer import SentencePieceTokenizer
from frontier_llm.data.tokenizer import Encoder
from frontier_llm.errors import DataError
from tests.data.conftest import config

tokenizers = pytest.importorskip("tokenizers")
LETTERS = "abcdefgh "


def make(folder: Path, kind: str) -> Path:
    """Write a tokenizer that knows LETTERS alone."""
    models, splits = tokenizers.models, tokenizers.pre_tokenizers
    vocabulary = {token: n for n, token in enumerate(["</s>", "[UNK]", *LETTERS])}
    unknown = None if kind in ("bpe", "byte_level") else "[UNK]"
    if kind == "words":
        words = {"abc": 20, "def": 21}
        model = models.WordLevel(vocabulary | words, unk_token="[UNK]")
    elif kind == "wordpiece":
        more = {f"##{letter}": 30 + n for n, letter in enumerate(LETTERS)}
        model = models.WordPiece(vocabulary | more, unk_token="[UNK]")
    elif kind == "unigram":
        model = models.Unigram([(token, -1.0) for token in vocabulary], unk_id=1)
    else:
        model = models.BPE(vocabulary, [], unk_token=unknown, fuse_unk=kind == "fused")
    tokenizer = tokenizers.Tokenizer(model)
    if kind in ("bpe", "words", "wordpiece"):
        tokenizer.pre_tokenizer = splits.Whitespace()
    elif kind == "byte_level":
        tokenizer.pre_tokenizer = splits.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["</s>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


KINDS = ["bpe", "unknown", "fused", "words", "wordpiece", "unigram", "byte_level"]


def texts(path: Path, letters: str) -> Path:
    draw = random.Random(1)
    words = ["abc", "def", "abc def"] if letters == LETTERS else [letters, letters[::-1]]
    lines = (json.dumps({"text": " ".join(draw.choices(words, k=9))}) for _ in range(90))
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("letters", ["привет", "你好世界", "XYZ"])
def test_a_text_in_another_script_is_refused_or_counted(tmp_path: Path, kind: str, letters: str):
    path, model = texts(tmp_path / "a.jsonl", letters), make(tmp_path / "model", kind)
    values = {"tokenizer": str(model), "end_of_document": "</s>", "validation_percent": 30.0}
    with pytest.raises(
        DataError, match=r"cannot represent \d+\.\d% of the .*\n  do: set data\.tok"
    ):
        prepare(config(tmp_path / "c", path, **values))
    folder = prepare(config(tmp_path / "c", path, broken="skip", **values))
    text = Manifest.load(folder / MANIFEST_FILE).account.text
    written = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    letters_in_text = sum(len(part.replace(" ", "")) for part in written)
    assert letters_in_text <= text.lost + text.unknown <= text.characters
    assert text.characters == sum(map(len, written))
    share = (text.lost + text.unknown + text.changed) / text.characters
    assert text.bits_note == (
        f" (too low: the tokenizer drops or replaces {share:.1%} of the characters)"
    )
    known = texts(tmp_path / "b.jsonl", LETTERS)
    if kind != "byte_level":
        prepare(config(tmp_path / "c", known, **values))


@pytest.mark.parametrize("kind", ["words", "bpe", "unigram"])
def test_a_token_of_the_text_does_not_end_documents(tmp_path: Path, kind: str):
    path, model = texts(tmp_path / "a.jsonl", LETTERS), make(tmp_path / "model", kind)
    end = "abc" if kind == "words" else "a"
    with path.open("a") as stream:
        stream.writelines(f'\n{{"text": "{end} b {end}"}}' for _ in range(3))
    values = {"tokenizer": str(model), "end_of_document": end, "validation_percent": 30.0}
    with pytest.raises(DataError, match=rf"a\.jsonl:\d+: '{end}', the token that ends .*\n  do: "):
        prepare(config(tmp_path / "c", path, **values))
    folder = prepare(config(tmp_path / "c", path, broken="skip", **values))
    manifest = Manifest.load(folder / MANIFEST_FILE)
    found = sum(
        int(np.count_nonzero(np.fromfile(folder / f"{split}.bin", manifest.dtype) == manifest.eod))
        for split in ("train", "validation")
    )
    assert found == manifest.account.text.ends + 93
    assert manifest.account.text.ends >= 6
    assert any("data.end_of_document" in warning for warning in manifest.account.warnings)
    prepare(config(tmp_path / "d", path, **values | {"end_of_document": "</s>"}))


def test_a_corpus_without_a_predicted_token_is_refused(tmp_path: Path):
    path, model = texts(tmp_path / "a.jsonl", "привет"), make(tmp_path / "model", "bpe")
    settings = config(
        tmp_path / "c", path, tokenizer=str(model), end_of_document="</s>", broken="skip",
        documents="separate", validation_percent=30.0,
    )  # fmt: skip
    (corpus,) = open_all(settings, [prepare(settings)]).corpora
    with pytest.raises(
        DataError, match=r"no sample predicts a token\n  do: add longer documents, or set data"
    ):
        Samples(corpus.validation, 1, 0, "", separate=True)


@given(text=st.text(alphabet=st.sampled_from(LETTERS + "яйZ\n☃"), max_size=40))
@pytest.mark.parametrize("kind", ["bpe", "unknown"])
def test_the_characters_without_a_token_are_those_outside_the_alphabet(
    tmp_path_factory: pytest.TempPathFactory, kind: str, text: str
):
    if not (folder := tmp_path_factory.getbasetemp() / f"alphabet-{kind}").exists():
        make(folder, kind)
    tokenizer = JsonTokenizer(folder / "tokenizer.json", "</s>")
    counts = TextCounts()
    Encoder(tokenizer, np.uint16).encode(text, counts)
    outside = sum(character not in LETTERS for character in text)
    if kind == "unknown":
        assert (counts.lost, counts.unknown, counts.unknown_tokens) == (0, outside, outside)
    else:
        assert (counts.lost, counts.unknown) == (outside - text.count("\n"), 0)


def test_a_trained_tokenizer_covers_all_text(folder: Path):
    assert SentencePieceTokenizer(folder / "tokenizer.model").covers_all_text


@pytest.mark.parametrize("letters", ["привет", "你好世界", LETTERS, "naïve"])
def test_text_that_falls_back_to_bytes_is_counted(tmp_path: Path, folder: Path, letters: str):
    model = folder / "tokenizer.model"  # it has tokens for ï and 雪
    path = texts(tmp_path / "a.jsonl", letters)
    settings = config(tmp_path / "c", path, tokenizer=str(model), validation_percent=30.0)
    (corpus,) = (corpora := open_all(settings, [prepare(settings)])).corpora
    account = corpus.manifest.account
    written = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    missing = sum(ord(c) >= 0x80 and c != "ï" for c in "".join(written))
    bytes_each = len("п".encode()) if letters == "привет" else len("你".encode())
    assert account.text.byte_tokens == missing * bytes_each
    assert account.text.bytes == sum(len(text.encode()) for text in written)
    share = f"{missing * bytes_each / account.text.bytes:.0%} of the text"
    warns = letters in ("привет", "你好世界")
    assert account.summary() == "nothing left out" + f", {share} encoded as single bytes" * warns
    assert [name for name, _ in corpora.warnings] == ["tiny"] * warns
    rows = list(account_rows(corpus.manifest, 30.0))
    assert [what for amount, what in rows if amount == "warning"] == [
        text for _, text in corpora.warnings
    ]
    stored = json.loads((tmp_path / "c" / corpus.train.prefix.parent / MANIFEST_FILE).read_text())
    for name in ("bytes", "byte_tokens"):
        del stored["account"]["text"][name]  # as an earlier version writes it
    earlier = Manifest.model_validate(stored)
    assert earlier.digest == corpus.manifest.digest
    assert earlier.account.warning is None


def test_bytes_of_a_byte_level_tokenizer_have_the_names_of_its_library(tmp_path: Path):
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {letter: number for number, letter in enumerate(sorted(alphabet))}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary | {"Ã©": 256}, [("Ã", "©")]))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(["</s>"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = JsonTokenizer(tmp_path / "tokenizer.json", "</s>")
    assert tokenizer.covers_all_text
    for text in ("aé\n", "яя z", "\x7f\xad\u3000"):
        named = {byte: tokenizer.byte_ids[byte] for byte in text.encode()}
        assert {named[byte] for byte in text.encode()} >= set(tokenizer.encode(text)) - {256}
    counts = TextCounts()
    Encoder(tokenizer, np.uint16).encode("aéèя\n", counts)
    assert (counts.bytes, counts.byte_tokens) == (8, 4), "é is one token of two bytes"


def test_unknown_pieces_of_sentencepiece_are_counted(tmp_path: Path):
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["abc def abc"] * 90), model_prefix=str(tmp_path / "m"),
        vocab_size=12, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    tokenizer = SentencePieceTokenizer(tmp_path / "m.model")
    assert not tokenizer.covers_all_text
    ids, counts = tokenizer.encode_counting("abc привет def мир")
    assert ids == tokenizer.encode("abc привет def мир")
    assert (counts.unknown, counts.unknown_tokens, counts.lost) == (9, 2, 0)


@pytest.mark.parametrize("normalises", [True, False])
def test_text_that_normalisation_changes_is_counted(tmp_path: Path, normalises: bool):
    """The defaults of sentencepiece's trainer drop line breaks and repeated blanks."""
    sentencepiece = pytest.importorskip("sentencepiece")
    identity = dict(normalization_rule_name="identity", remove_extra_whitespaces=False,
                    user_defined_symbols=["\n"])  # fmt: skip
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["abc def abc"] * 90), model_prefix=str(tmp_path / "m"),
        vocab_size=290, minloglevel=2, hard_vocab_limit=False, byte_fallback=True,
        **({} if normalises else identity),
    )  # fmt: skip
    tokenizer = SentencePieceTokenizer(tmp_path / "m.model")
    assert tokenizer.covers_all_text
    assert tokenizer.keeps_text != normalises
    counts = TextCounts()
    Encoder(tokenizer, np.uint16).encode("abc\n\n   def \uff21 \ufb01\n", counts)
    assert (counts.lost, counts.unknown) == (0, 0)
    # three line breaks, two blanks (one of three before def stays), and two letters
    assert counts.changed == (7 if normalises else 0)
    kinds = {"line breaks": 3, "blanks": 2, "capital letters": 1, "other characters": 1}
    assert counts.changed_by == (kinds if normalises else {})
    text = tmp_path / "a.txt"
    text.write_text("\n\n".join(f"abc\n   def {number}" for number in range(200)))
    settings = config(tmp_path / "c", text, tokenizer=str(tmp_path / "m.model"),
                      validation_percent=30.0)  # fmt: skip
    account = Manifest.load(prepare(settings) / MANIFEST_FILE).account
    assert ("drops or replaces" in account.summary()) == normalises
    # two blanks, and the three line breaks between two texts
    found = re.search(r"drops or replaces (\d+\.\d)% of the characters, mostly line breaks: ",
                      "".join(account.warnings))  # fmt: skip
    assert (found is not None) == normalises
    note = open_all(settings, [prepare(settings)]).bits_note
    if found is not None:
        share = account.text.changed / account.text.characters
        assert float(found[1]) == pytest.approx(100 * share, abs=0.05)
        assert f"(too low: the tokenizer drops or replaces {found[1]}% of the characters)" in note
    else:
        assert note == ""
