"""An exported folder has the tokenizer of the run, and transformers reads it alike."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from frontier_lab.convert.tokenizer_files import (
    SAMPLE_TEXT,
    check_theirs,
    copy_to_ours,
    write_theirs,
)
from frontier_llm.config import decode
from frontier_llm.data.sentencepiece_tokenizer import train_tokenizer
from frontier_llm.data.tokenizer import decode_marked, encode_marked
from frontier_llm.data.tokenizer_source import (
    digest_tokenizer,
    open_tokenizer,
    tokens_before_text,
)
from frontier_llm.errors import ConfigError, DataError
from tests.data.tokenizer_families import train_family
from tests.values import tiny_values

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

pytestmark = pytest.mark.forked

TEXTS = ["def main(x):\n    return  x + 1\n\n\tNaïve — 雪 42.\n"] * 30


def write_tokenizer(kind: str, folder: Path) -> Path:
    """Write a tokenizer of a kind to a folder; return its path."""
    if kind == "sentencepiece":
        train_tokenizer(TEXTS, 290, folder / "own.model")
        return folder / "own.model"
    train_family("qwen2", TEXTS, 290, folder)
    settings = folder / "tokenizer_config.json"
    if kind == "tokenizer.json alone":
        settings.unlink()
        return folder / "tokenizer.json"
    if kind == "end as an object":
        values = json.loads(settings.read_text())
        values["eos_token"] = {"content": values["eos_token"], "__type": "AddedToken",
                               "lstrip": False, "normalized": False, "rstrip": False,
                               "single_word": False}  # fmt: skip
        settings.write_text(json.dumps(values))
    return folder


def export(
    source: Path, out: Path, end: str | None, trained_with: str | None = None, *overrides: str
) -> int:
    """Write a tokenizer as an export does; return the id that ends a document."""
    values = tiny_values(f"data.tokenizer={source}", *overrides)
    values["data"]["end_of_document"] = end
    out.mkdir()
    ids: dict[str, Any] = write_theirs(decode(values), out, {"tokenizer": trained_with}, out)
    (out / "config.json").write_text(json.dumps({"model_type": "gpt2", **ids}))
    return ids["eos_token_id"]


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize(
    "kind", ["a folder", "end as an object", "tokenizer.json alone", "sentencepiece"]
)
def test_transformers_reads_what_is_exported(tmp_path: Path, kind: str, chosen: bool):
    source = write_tokenizer(kind, tmp_path)
    end = None
    if chosen:  # not the token that the tokenizer itself names
        end = "<0x00>" if kind == "sentencepiece" else "<|im_end|>"
    tokenizer = open_tokenizer(source, end)
    assert export(source, tmp_path / "out", end, digest_tokenizer(source)) == tokenizer.eod
    check_theirs(tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert max(theirs.get_vocab().values()) < tokenizer.vocabulary, "no token is added"
    assert theirs.encode(TEXTS[0]) == [tokenizer.eod, *tokenizer.encode(TEXTS[0])]
    (tmp_path / "back").mkdir()
    again = copy_to_ours(tmp_path / "out", tmp_path / "back")
    assert again is not None
    assert again.name == ("tokenizer.model" if kind == "sentencepiece" else "tokenizer.json")
    if kind != "sentencepiece":
        assert open_tokenizer(again).eod == tokenizer.eod


MODELS = {
    "as trained by default": {},
    "unigram without normalisation": {"normalization_rule_name": "identity"},
    "unigram with bytes": {"byte_fallback": True, "add_dummy_prefix": False},
    "byte pairs": {"model_type": "bpe"},
    "as Llama 2": {"model_type": "bpe", "byte_fallback": True,
                   "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "with pieces of a user": {"model_type": "bpe", "byte_fallback": True,
                              "user_defined_symbols": ["\n", "<code>"],
                              "normalization_rule_name": "identity",
                              "remove_extra_whitespaces": False},
    "lower case, digits apart": {"model_type": "bpe", "byte_fallback": True, "split_digits": True,
                                 "normalization_rule_name": "nfkc_cf"},
}  # fmt: skip
"""Options of sentencepiece's trainer."""
PROSE = ["Ein schöner Tag, Überraschung!", "Привет, как дела?", "日本語のテキスト 42"]


@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_sentencepiece_models_of_others(tmp_path: Path, name: str):
    lines = [*(line for text in TEXTS for line in text.splitlines()), *PROSE * 20]
    model = tmp_path / "own.model"
    with model.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines * 5), model_writer=file, vocab_size=400,
            minloglevel=2, hard_vocab_limit=False, **MODELS[name],
        )  # fmt: skip
    tokenizer = open_tokenizer(model)
    export(model, tmp_path / "out", None, digest_tokenizer(model))
    check_theirs(tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    texts = [*TEXTS, *PROSE, " x", "x  ", "", "  ", "a  b\tc\n\nd", "ﬁn ½ ™", "x <code>\n y"]
    for text in texts:
        found = theirs.encode(text, add_special_tokens=False)
        assert found == tokenizer.encode(text), text
        decoded = theirs.decode(found).replace("<unk>", " ⁇ ")
        assert decoded == tokenizer.decode(found), text
    assert theirs.encode("x")[0] == tokenizer.eod


@pytest.mark.parametrize("documents", ["joined", "separate"])
@pytest.mark.parametrize("kind", ["sentencepiece", "qwen2", "llama3", "llama3 with a map"])
def test_transformers_begins_a_text_as_the_run(tmp_path: Path, kind: str, documents: str):
    """Also if the tokenizer itself begins texts by a token, as that of Llama 3."""
    source = tmp_path
    if kind == "sentencepiece":
        source = write_tokenizer(kind, tmp_path)
    else:
        train_family(kind.split()[0], TEXTS, 300, tmp_path)
        if kind.endswith("map"):
            names = {"bos_token": "<|begin_of_text|>"}
            (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    tokenizer = open_tokenizer(source)
    export(source, tmp_path / "out", None, None, f"data.documents={documents}")
    check_theirs(tmp_path / "out")
    before = tokens_before_text(decode(tiny_values(f"data.documents={documents}")).data, tokenizer)
    assert before == ([tokenizer.eod] if documents == "joined" else [])
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in (TEXTS[0], "a", " b\n"):
        assert theirs.encode(text) == [*before, *tokenizer.encode(text)]


@pytest.mark.parametrize("kind", ["a folder", "tokenizer.json alone", "sentencepiece", "unigram"])
def test_an_encoder_reads_ends_and_sentinels_as_in_training(tmp_path: Path, kind: str):
    if kind == "unigram":  # is exported as a tokenizer.json
        with (tmp_path / "own.model").open("wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(TEXTS * 5), model_writer=file, vocab_size=60,
                minloglevel=2, hard_vocab_limit=False,
            )  # fmt: skip
        source = tmp_path / "own.model"
    else:
        source = write_tokenizer(kind, tmp_path)
    end = "<|im_end|>" if kind == "tokenizer.json alone" else None
    tokenizer = open_tokenizer(source, end)
    export(source, tmp_path / "out", end, None, "model=mt5_tiny", "data=stdlib_spans",
           f"data.tokenizer={source}")  # fmt: skip
    check_theirs(tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.encode(TEXTS[0]) == [*tokenizer.encode(TEXTS[0]), tokenizer.eod]
    sentinels = tokenizer.sentinels(100)
    names = [f"<extra_id_{number}>" for number in range(100)]
    assert theirs.convert_tokens_to_ids(names) == sentinels
    assert theirs.convert_ids_to_tokens(sentinels) == names
    marked = "def <extra_id_0>(x)<extra_id_99>:"
    ids = encode_marked(tokenizer, marked, sentinels)
    assert ids == [*tokenizer.encode("def "), sentinels[0], *tokenizer.encode("(x)"),
                   sentinels[99], *tokenizer.encode(":")]  # fmt: skip
    assert theirs.encode(marked) == [*ids, tokenizer.eod]
    decoded = theirs.decode(ids).replace("<unk>", " ⁇ ")
    found = decode_marked(tokenizer, ids, sentinels)
    assert decoded.replace(" ", "") == found.replace(" ", "")
    assert kind == "unigram" or found == marked
    assert len(theirs) == tokenizer.vocabulary + 100
    assert encode_marked(tokenizer, marked, []) == tokenizer.encode(marked)


def test_another_token_before_texts_is_found(tmp_path: Path):
    source = write_tokenizer("sentencepiece", tmp_path)
    export(source, tmp_path / "out", None)
    settings = tmp_path / "out" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "add_bos_token": False}))
    with pytest.raises(DataError, match=r"transformers begins a text with .* this project with"):
        check_theirs(tmp_path / "out")


def test_a_difference_is_found(tmp_path: Path):
    source = write_tokenizer("a folder", tmp_path)
    export(source, tmp_path / "out", None)
    settings = tmp_path / "out" / "tokenizer_config.json"
    check_theirs(tmp_path / "out")
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token": "x"}))
    with pytest.raises(DataError, match=r"differently, as Qwen2Tokenizer: after 'def main'"):
        check_theirs(tmp_path / "out")


def test_the_first_difference_names_the_class_and_what_keeps_the_tokenizer(tmp_path: Path):
    """The class of a Qwen2 model splits texts by Qwen's rule, whatever tokenizer.json says."""
    train_family("gpt2", [*TEXTS, "aaa  bbb 1234"], 290, tmp_path)
    ids = export(tmp_path, tmp_path / "out", None)
    values = {"model_type": "qwen2", "eos_token_id": ids}
    (tmp_path / "out" / "config.json").write_text(json.dumps(values))
    with pytest.raises(DataError) as raised:
        check_theirs(tmp_path / "out")
    found = re.search(
        r"as Qwen2Tokenizer: after '(.*)' it gives token (\d+) \('(.*)'\), "
        r"this project token (\d+) \('(.*)'\)\n  do: .*(PreTrainedTokenizerFast\(.*\)) instead",
        str(raised.value),
    )
    assert found, str(raised.value)
    text, their_id, _, our_id, our_name, advice = found.groups()
    ours, text = open_tokenizer(tmp_path), text.encode().decode("unicode_escape")
    assert SAMPLE_TEXT.startswith(text)
    assert ours.encode(SAMPLE_TEXT)[len(ours.encode(text)) :][:1] == [int(our_id)]
    assert ours.id_of(our_name) == int(our_id) != int(their_id)
    kept = eval(advice, {"PreTrainedTokenizerFast": PreTrainedTokenizerFast})
    assert kept.encode(SAMPLE_TEXT, add_special_tokens=False) == ours.encode(SAMPLE_TEXT)
    assert kept.eos_token_id == ours.eod


def test_a_tokenizer_that_changed_since_the_training_is_refused(tmp_path: Path):
    source = write_tokenizer("a folder", tmp_path)
    with pytest.raises(ConfigError, match=r"the tokenizer of the checkpoint \(digest abc\)"):
        export(source, tmp_path / "out", None, "abc")


def test_a_folder_without_a_tokenizer_is_converted_without(tmp_path: Path, caplog):
    (tmp_path / "merges.txt").write_text("a b")
    assert copy_to_ours(tmp_path, tmp_path) is None
    assert "the tokenizer is not converted" in caplog.text
