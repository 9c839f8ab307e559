"""Tokenizers of Hugging Face give the ids of the library, however a text is split and cached."""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.data import tokenizer as module
from frontier_llm.data.json_tokenizer import JsonTokenizer
from frontier_llm.data.tokenizer import Encoder
from frontier_llm.errors import ConfigError, DataError
from tests.data.tokenizer_families import FAMILIES, TokenizerFamily, train_family
from tests.properties import examples

pytestmark = pytest.mark.slow

library = pytest.importorskip("tokenizers")

SIGNS = [
    *" \t\n\r\x0b\x0c\x1c\x85\u00a0\u180e\u2003\u2028\u3000\ufeff\0\x7f", "\r\n", "  ", "\n\n",
    *"aAsStTrReEdDmMlLvVzZ01279.,;_()-/\\\"#<|>'", "'s", "'LL", "the", " of",
    *"é\u0301ß雪\u0661½\u017f\u212a\u037e\ud7a3\u1100\u1161\u11a8\u2019", "👩\u200d🚀",
]  # fmt: skip
"""Characters that the regular expressions of the families treat differently, and some words."""


def random_texts(seed: int, count: int) -> Iterator[str]:
    """Yield texts of SIGNS; in every second text all characters are ASCII."""
    draw = random.Random(seed)
    ascii_signs = [sign for sign in SIGNS if sign.isascii()]
    for number in range(count):
        yield "".join(draw.choices(ascii_signs if number % 2 else SIGNS, k=draw.randint(0, 30)))


@pytest.fixture(scope="module", params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def family(name: str) -> TokenizerFamily:
    return FAMILIES[name]


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer trained on random texts, so that it merges whatever its family may merge."""
    return train_family(name, random_texts(0, 20_000), 3000, tmp_path_factory.mktemp(name))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> JsonTokenizer:
    return JsonTokenizer(folder / "tokenizer.json")


@pytest.fixture(scope="module")
def wanted(folder: Path) -> Any:
    """Return the function that gives the ids of the library itself."""
    theirs = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: theirs.encode(text, add_special_tokens=False).ids


def tokens(encoder: Encoder, text: str) -> list[int]:
    return np.frombuffer(encoder.encode(text), dtype=np.uint16).tolist()


@examples(300)
@given(st.one_of(st.text(), st.lists(st.sampled_from(SIGNS)).map("".join)))
def test_any_text_has_the_ids_of_the_library(tokenizer: JsonTokenizer, wanted: Any, text: str):
    assert tokenizer.splitting is not None
    assert tokens(Encoder(tokenizer, np.uint16), text) == tokenizer.encode(text) == wanted(text)


def test_many_texts_with_one_cache(tokenizer: JsonTokenizer, wanted: Any, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_CHARACTERS", 7)
    monkeypatch.setattr(module, "MIXED_BLOCK_CHARACTERS", 7)
    monkeypatch.setattr(module, "CACHE_ENTRIES", 3000)
    encoder = Encoder(tokenizer, np.uint16)
    for text in random_texts(1, 10_000):
        assert tokens(encoder, text) == wanted(text), repr(text)


def all_characters(step: int) -> Iterator[str]:
    for code in range(0, sys.maxunicode + 1, step):
        if not 0xD800 <= code < 0xE000:
            yield chr(code)


@pytest.mark.parametrize(
    "step", [pytest.param(1, marks=pytest.mark.exhaustive), 199], ids=["all", "some"]
)
def test_every_character_between_words_and_lines(tokenizer: JsonTokenizer, wanted: Any, step: int):
    encoder = Encoder(tokenizer, np.uint16)
    for character in (*map(chr, range(0x3100)), *all_characters(step)):
        text = f"a{character} b é. {character}\n{character} .é{character}\n1'{character}s"
        assert tokens(encoder, text) == wanted(text), hex(ord(character))


def test_text_comes_back(tokenizer: JsonTokenizer, family: TokenizerFamily):
    for text in random_texts(2, 200):
        if family.nfc and not text.isascii():
            continue  # such text is changed to the form NFC
        assert tokenizer.decode([*tokenizer.encode(text), tokenizer.eod]) == text


def test_special_tokens_in_a_text_are_text(tokenizer: JsonTokenizer, family: TokenizerFamily):
    text = f"one {family.end}\ntwo{''.join(family.other_specials)}"
    ids = tokenizer.encode(text)
    assert tokenizer.eod == tokenizer.id_of(family.end)
    assert tokenizer.token_of(tokenizer.eod) == family.end
    assert not {tokenizer.id_of(token) for token in (family.end, *family.other_specials)} & {*ids}
    assert tokenizer.decode(ids) == text
    assert tokens(Encoder(tokenizer, np.uint16), text) == ids


def test_added_tokens_that_are_not_special_are_found(tokenizer: JsonTokenizer, wanted: Any):
    text = "call <tool_call>the of</tool_call> 's"
    ids = tokens(Encoder(tokenizer, np.uint16), text)
    assert ids == wanted(text)
    found = tokenizer.id_of("<tool_call>")
    assert found in ids if found is not None else len(ids) > 6


def test_half_a_surrogate_pair_is_refused(tokenizer: JsonTokenizer):
    with pytest.raises(DataError, match="not valid Unicode"):
        tokenizer.encode("a\ud800b")


def changed(folder: Path, to: Path, **changes: Any) -> Path:
    """Write a tokenizer.json with other values of some keys; a key of the model has a dot."""
    content = json.loads((folder / "tokenizer.json").read_text())
    for key, value in changes.items():
        part = content["model"] if key.startswith("model_") else content
        part[key.removeprefix("model_")] = value
    path = to / "tokenizer.json"
    path.write_text(json.dumps(content))
    return path


def test_truncation_and_padding_are_switched_off(folder: Path, tmp_path: Path, wanted: Any):
    path = changed(
        folder, tmp_path,
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        padding={"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None,
                 "pad_id": 0, "pad_type_id": 0, "pad_token": "the"},
    )  # fmt: skip
    assert JsonTokenizer(path).encode("the of the of the") == wanted("the of the of the")


def test_the_vocabulary_counts_gaps_between_ids(folder: Path, tmp_path: Path):
    entries = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    last = max(entries, key=entries.get)
    path = changed(folder, tmp_path, added_tokens=[], model_vocab={**entries, last: 5000})
    assert JsonTokenizer(path, "the").vocabulary == 5001 > len(entries)


OTHERS = {
    "another expression": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": r"[^\n]+|\n"}, "behavior": "Isolated",
                 "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                 "use_regex": False},
            ],
        }
    },
    "a blank before a text": {
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                          "use_regex": True}
    },
    "no splitting": {
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                          "use_regex": False}
    },
    "other normalizer": {"normalizer": {"type": "Lowercase"}},
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_tokenizers_built_otherwise_encode_whole_texts(folder: Path, tmp_path: Path, kind: str):
    path = changed(folder, tmp_path, **OTHERS[kind])
    tokenizer = JsonTokenizer(path)
    theirs = library.Tokenizer.from_file(str(path))
    assert tokenizer.splitting is None
    for text in random_texts(3, 200):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert tokens(Encoder(tokenizer, np.uint16), text) == ids


def test_other_kinds_of_models_encode_whole_texts(tmp_path: Path):
    vocabulary = [
        ("<unk>", 0.0),
        ("</s>", 0.0),
        ("▁", -2.0),
        ("▁the", -3.0),
        ("o", -4.0),
        ("f", -4.0),
    ]
    theirs = library.Tokenizer(library.models.Unigram(vocabulary, unk_id=0, byte_fallback=False))
    theirs.pre_tokenizer = library.pre_tokenizers.Metaspace()
    theirs.add_special_tokens(["</s>"])
    theirs.save(str(tmp_path / "tokenizer.json"))
    tokenizer = JsonTokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.splitting is None
    assert tokenizer.eod == 1
    text = "the of the"
    assert tokens(Encoder(tokenizer, np.uint16), text) == theirs.encode(text).ids


def test_ends_are_found_in_the_settings(folder: Path, tmp_path: Path, family: TokenizerFamily):
    path = changed(folder, tmp_path)
    assert JsonTokenizer(path).eod == JsonTokenizer(path).id_of(family.end), "by its usual name"
    for name, eos in (
        ("special_tokens_map.json", {"content": "the", "lstrip": False}),
        ("tokenizer_config.json", "'"),
    ):
        (tmp_path / name).write_text(json.dumps({"eos_token": eos}))
        tokenizer = JsonTokenizer(path)
        assert tokenizer.token_of(tokenizer.eod) == (eos if isinstance(eos, str) else "the")
    named = JsonTokenizer(path, family.end)
    assert named.eod == named.id_of(family.end)
    assert JsonTokenizer(path, 7).eod == 7


def test_an_unknown_end_is_refused(folder: Path, tmp_path: Path):
    path = changed(folder, tmp_path, added_tokens=[])
    with pytest.raises(
        ConfigError, match=r"data\.end_of_document\n(.|\n)*special tokens are: none"
    ):
        JsonTokenizer(path)
    with pytest.raises(ConfigError, match=r"got:    '<end>'\n  wants:  a token of the \d+ tokens"):
        JsonTokenizer(path, "<end>")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with pytest.raises(ConfigError, match=r"got:    '<end>'"):
        JsonTokenizer(path)
    (tmp_path / "tokenizer_config.json").write_text("no JSON")
    with pytest.raises(ConfigError, match=r"tokenizer_config.json\n  wants:  a JSON file"):
        JsonTokenizer(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "a JSON file as Hugging Face publishes it: Expecting value"),
        ("[1]", "it holds a list instead of an object"),
        ("{}", "this file describes no model"),
        ('{"model": {"type": "BPE"}}', "a tokenizer.json that tokenizers can read: "),
        ('{"model": {"type": "BPE", "dropout": 0.1}}', "not random: it has dropout 0.1"),
    ],
)
def test_a_file_that_is_not_a_tokenizer_is_refused(tmp_path: Path, content: str, message: str):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"data\.tokenizer") as raised:
        JsonTokenizer(path)
    assert raised.value.got == path
    assert message in raised.value.wants
    assert "set data.tokenizer to " in raised.value.todo


def test_a_missing_library_is_named(folder: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"the library tokenizers(.|\n)*pip install"):
        JsonTokenizer(folder / "tokenizer.json")
