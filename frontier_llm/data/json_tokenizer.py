"""Read the tokenizer.json files of Hugging Face with the library `tokenizers`.

The ids are those of the library without the special tokens that a post-processor adds. Truncation
and padding, which a file may ask for, are switched off. The names of special tokens in a text are
encoded as text, so that a document cannot contain the token that ends documents.

No method uses the threads of the library, because preprocessing forks one process per core.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from frontier_llm.data.corpus_manifest import TextCounts
from frontier_llm.data.tokenizer import Splitting, Tokenizer, check_unicode
from frontier_llm.errors import ConfigError, install_command

SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json")
"""Files beside a tokenizer.json. The first of them that has an `eos_token` names the token that
ends a document."""
USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Special tokens that end a document in the published tokenizers that have them."""

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_GPT_2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_LLAMA_3 = (
    rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
"""The regular expressions by which the tokenizers of these families split a text. No token crosses
the border of a match. None of them looks behind a position, and only `(?!\\S)` looks ahead."""
_WHITE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_WHITE_IN_LINE = _WHITE.replace("\t-\r", "\t\x0b\x0c")
_BORDER = re.compile(f"(?<=[^{_WHITE}]) ")


def _llama_runs(digits: str) -> "re.Pattern[str]":
    """Return the matches of _LLAMA_3 or _QWEN_2 in ASCII text; `digits` matches their numbers."""
    return re.compile(
        r"[^\r\n'A-Za-z0-9]?[A-Za-z]+|'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])|'[A-Za-z]+"
        rf"|{digits}| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        re.ASCII,
    )


# A match never has white space after another character, except line breaks after signs in Llama.
# A word therefore ends before white space, and in Llama after the last line break in it.
_LLAMA_WORDS = re.compile(
    rf"[{_WHITE_IN_LINE}]*[^{_WHITE}]+(?:[{_WHITE}]*[\r\n])?"
    rf"|[{_WHITE}]*[\r\n]|[{_WHITE_IN_LINE}]+"
)
_SPLITTINGS = {
    _GPT_2: Splitting(
        words=re.compile(f"[{_WHITE}]*[^{_WHITE}]+|[{_WHITE}]+"),
        ascii_runs=re.compile(
            " ?[A-Za-z]+|'(?:[stmd]|re|ve|ll)"
            r"| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+",
            re.ASCII,
        ),
        border=_BORDER,
    ),
    _LLAMA_3: Splitting(_LLAMA_WORDS, _llama_runs("[0-9]{1,3}"), _BORDER),
    _QWEN_2: Splitting(_LLAMA_WORDS, _llama_runs("[0-9]"), _BORDER),
}
"""How to split texts, by the regular expression of the tokenizer. A run is one match of it."""
_UNSEEN = (*range(33), *range(127, 161), 173)
_LETTERS = {byte: 256 + number for number, byte in enumerate(_UNSEEN)}
"""How a byte-level tokenizer writes bytes in its tokens: those of control characters and blanks are
replaced by letters, all others stand for the characters of Latin-1."""
_NORMALIZERS = (None, {"type": "NFC"})
"""Normalizers that change no ASCII and combine no character with white space before it."""


class JsonTokenizer(Tokenizer):
    """A tokenizer of the library `tokenizers`.

    The end of a document is a token, an id, or, if it is None, the `eos_token` of a settings file
    in the same folder, or the only special token whose name is usual for this. Raises a ConfigError
    if the file is not a tokenizer, its encoding is random, no token is known to end documents, or
    the library is not installed, and an OSError if the file cannot be read.
    """

    def __init__(self, path: Path, end: str | int | None = None) -> None:
        serialized = path.read_bytes()
        content = _parse(path, serialized)
        self._tokenizer = _load(path, content, serialized)
        self._model = self._tokenizer.model
        self._splitting = _splitting(content)
        self._falls_back = content["model"].get("byte_fallback") is True
        pre_tokenizer = json.dumps(content.get("pre_tokenizer"))
        is_bpe = content["model"].get("type") == "BPE"
        self._is_byte_level = is_bpe and '"ByteLevel"' in pre_tokenizer
        self._has_tokens: dict[str, bool] = {}
        unknown = content["model"].get("unk_token")
        if isinstance(content["model"].get("unk_id"), int):  # a unigram model has an id
            self._unknown: int | None = content["model"]["unk_id"]
        else:
            self._unknown = None if unknown is None else self.id_of(unknown)
        end = _find_end(path, content) if end is None else end
        self.eod = end if isinstance(end, int) else self.named_end(path, end)

    @cached_property
    def vocabulary(self) -> int:
        """The largest token id plus 1."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def id_of(self, token: str) -> int | None:
        """Return the id of an entry of the vocabulary, or None if there is no such entry."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def token_of(self, token_id: int) -> str:
        """Return the entry of the vocabulary that has an id."""
        return str(self._tokenizer.id_to_token(token_id))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without an end-of-document token."""
        check_unicode(text)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def byte_name(self, byte: int) -> str | None:
        """Return the entry of the vocabulary for a byte; None if the tokenizer never uses bytes."""
        if self._falls_back:
            return super().byte_name(byte)
        return chr(_LETTERS.get(byte, byte)) if self._is_byte_level else None

    def encode_counting(self, text: str) -> tuple[list[int], TextCounts]:
        """Return the token ids of a text, and the characters that are lost or unknown."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        counts, end = TextCounts(), 0
        for token, (start, token_end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token == self._unknown:
                counts.unknown_tokens += 1
                counts.unknown += max(0, token_end - max(start, end))
            end = max(end, token_end)
        # the library's offsets are wrong after a character that a BPE model drops
        counts.lost = sum(text.count(character) for character in set(text) - self._kept(text))
        return encoding.ids, counts

    def _kept(self, text: str) -> set[str]:
        """Return the characters of a text that alone have tokens, and white space."""
        for character in set(text).difference(self._has_tokens):
            ids = self._tokenizer.encode(character, add_special_tokens=False).ids
            self._has_tokens[character] = bool(ids) or character.isspace()
        return {character for character in set(text) if self._has_tokens[character]}

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens; invalid UTF-8 becomes U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    @property
    def splitting(self) -> Splitting | None:
        """How to split texts, if this is a byte-level tokenizer of GPT-2, Llama 3 or Qwen 2."""
        return self._splitting

    def encode_substring(self, substring: str) -> list[int]:
        """Return the token ids of one match of `splitting`."""
        if substring.isascii():
            # the match is one word of the model, and no normalization changes ASCII
            tokens = self._model.tokenize(substring.translate(_LETTERS))
            return [token.id for token in tokens]
        ids: list[int] = self._tokenizer.encode(substring, add_special_tokens=False).ids
        return ids


def _parse(path: Path, serialized: bytes) -> dict[str, Any]:
    """Return the content of a JSON file that holds an object."""
    try:
        content = json.loads(serialized)
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__} instead of an object")
    except (ValueError, RecursionError) as error:
        raise _unusable(path, f"a JSON file as Hugging Face publishes it: {error}") from error
    return content


def _load(path: Path, content: Mapping[str, Any], serialized: bytes) -> Any:
    try:
        from tokenizers import Tokenizer as LibraryTokenizer
    except ImportError as error:
        raise ConfigError(
            "data.tokenizer",
            path,
            "the library tokenizers, which reads tokenizer.json files and is not installed",
            f"{install_command('tokenizers')}, or name a sentencepiece model",
        ) from error
    if not isinstance(content.get("model"), dict):
        raise _unusable(path, "a tokenizer.json: this file describes no model")
    if dropout := content["model"].get("dropout"):
        raise _unusable(path, f"a tokenizer whose tokens are not random: it has dropout {dropout}")
    try:
        tokenizer = LibraryTokenizer.from_buffer(serialized)
    except Exception as error:  # the library raises no narrower class
        raise _unusable(path, f"a tokenizer.json that tokenizers can read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _unusable(path: Path, wants: str) -> ConfigError:
    return ConfigError(
        "data.tokenizer", path, wants,
        "set data.tokenizer to a tokenizer.json, a sentencepiece model or a folder that holds one",
    )  # fmt: skip


def _splitting(content: Mapping[str, Any]) -> Splitting | None:
    """Return how the tokenizer with this content can split texts."""
    normalizer = content.get("normalizer")
    known = _SPLITTINGS.get(_split_regex(content.get("pre_tokenizer")) or "")
    if known is None or content["model"].get("type") != "BPE" or normalizer not in _NORMALIZERS:
        return None
    found_in_text = [token for token in content.get("added_tokens", ()) if not token["special"]]
    if normalizer and any(token["normalized"] for token in found_in_text):
        return None  # such a token may appear in a text only after the normalization
    return replace(known, whole=tuple(token["content"] for token in found_in_text))


def _split_regex(pre_tokenizer: Any) -> str | None:
    """Return the only regular expression that splits text before a byte-level step, if it is so."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return _GPT_2
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(regex)},
                 "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:  # fmt: skip
            return regex
    return None


def _find_end(path: Path, content: Mapping[str, Any]) -> str:
    """Return the token that ends a document."""
    if token := _eos_token(path.parent):
        return token
    specials = [token["content"] for token in content.get("added_tokens", ()) if token["special"]]
    usual = [token for token in USUAL_ENDS if token in specials]
    if len(usual) == 1:
        return usual[0]
    raise ConfigError(
        "data.end_of_document",
        "null",
        f"the token that ends a document: neither {' nor '.join(SETTINGS_FILES)} beside {path} "
        f"has an eos_token. The special tokens are: {' '.join(specials) or 'none'}",
        "name a token of the vocabulary that no text has, with these quotes: "
        "\"data.end_of_document='TOKEN'\"",
    )


def _eos_token(folder: Path) -> str | None:
    """Return the end-of-sentence token that a settings file in the folder names."""
    for name in SETTINGS_FILES:
        if not (folder / name).is_file():
            continue
        match _parse(folder / name, (folder / name).read_bytes()).get("eos_token"):
            case str(token) | {"content": str(token)}:
                return token
    return None
