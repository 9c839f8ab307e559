"""Copy the tokenizer that belongs to a converted model.

Both sides read the same files: a sentencepiece model, or a tokenizer.json with its settings files.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any

from frontier_lab.convert.sentencepiece_json import needs_json, write_json
from frontier_lab.convert.theirs import read_config
from frontier_lab.trained_tokenizer import check_trained_with, find_tokenizer
from frontier_llm.config import RunConfig
from frontier_llm.data.tokenizer import SENTINEL, Tokenizer
from frontier_llm.data.tokenizer_source import (
    JSON_FILE,
    MODEL_FILE,
    copy_tokenizer,
    open_tokenizer,
    tokens_before_text,
)
from frontier_llm.errors import ConfigError, DataError, FrontierError

SAMPLE_TEXT = "def main(x):\n    return  x + 1\n\n\tNaïve — 雪 42.\n"
"""A text that both tokenizers must encode equally. Many tokenizers normalise its characters."""
_SETTINGS_FILE = "tokenizer_config.json"

_LOG = logging.getLogger(__name__)


def write_theirs(
    config: RunConfig, out: Path, meta: Mapping[str, Any], checkpoint: Path
) -> dict[str, Any]:
    """Copy the tokenizer of a checkpoint to a Hugging Face folder; return ids for config.json.

    `meta` is what the checkpoint stores besides the states. No tokenizer is written if it is
    missing and the text that it was trained on as well. Raises a ConfigError for another tokenizer.
    """
    try:
        source = find_tokenizer(config, meta, checkpoint)
        tokenizer = open_tokenizer(source, config.data.end_of_document)
    except FrontierError as error:
        _LOG.warning("no tokenizer is written: %s", error)
        return {}
    check_trained_with(meta, source)
    copy_tokenizer(source, out)
    if (out / MODEL_FILE).exists() and needs_json(out / MODEL_FILE):
        write_json(out / MODEL_FILE, out / JSON_FILE)
    before = tokens_before_text(config.data, tokenizer)
    count = config.data.sentinels
    names = {token: SENTINEL.format(k) for k, token in enumerate(tokenizer.sentinels(count))}
    names = {token: name for token, name in sorted(names.items()) if token >= tokenizer.vocabulary}
    _write_settings(tokenizer, out, before, names, ends=config.model.kind == "t5")
    return {"eos_token_id": tokenizer.eod, "bos_token_id": before[0] if before else None}


def _write_settings(
    tokenizer: Tokenizer, out: Path, before: Sequence[int], names: Mapping[int, str], *, ends: bool
) -> None:
    """Write settings, so that transformers adds to a text the tokens that the model has read.

    With a sentencepiece model these are the settings of tokenizer_config.json. In a tokenizer.json
    it is the post-processor: transformers ignores the settings beside it. The tokens `before`
    precede a text; if it `ends`, the end-of-document token follows. The tokens `names` are added,
    which are the sentinels after the vocabulary.
    """
    path, end = out / _SETTINGS_FILE, tokenizer.token_of(tokenizer.eod)
    if (out / MODEL_FILE).exists() and not (out / JSON_FILE).exists():
        settings = {
            # used for T5 as well, because T5Tokenizer would drop blanks
            "tokenizer_class": "LlamaTokenizer",
            "unk_token": "<unk>",
            # LlamaTokenizer would add a token beyond the vocabulary for its default, "<s>"
            "bos_token": None if tokenizer.id_of("<s>") is None else "<s>",
            "add_prefix_space": False,
            "legacy": False,
        }
    elif path.exists():
        settings = json.loads(path.read_bytes())
    else:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    named = settings.get("eos_token")
    if end not in (named, named.get("content") if isinstance(named, dict) else None):
        settings["eos_token"] = end
    if before:
        settings["bos_token"] = settings["eos_token"]
    added: dict[str, Any] = {"add_bos_token": bool(before), "add_eos_token": ends}
    if names and not (out / JSON_FILE).exists():
        added["added_tokens_decoder"] = {
            str(token): {"content": name, "special": True} for token, name in names.items()
        }
    settings = {"clean_up_tokenization_spaces": False, **settings, **added}
    path.write_text(json.dumps(settings, indent=2) + "\n")
    if (out / JSON_FILE).exists():
        content = json.loads((out / JSON_FILE).read_bytes())
        content["added_tokens"] = content.get("added_tokens", []) + [
            {"id": token, "content": name, "special": True, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            for token, name in names.items()
        ]
        start, after = [end] * bool(before), [end] * ends
        if _change_post_processor(content, start, after, [tokenizer.eod]) or names:
            text = json.dumps(content, ensure_ascii=False, indent=2)
            (out / JSON_FILE).write_text(text, encoding="utf-8")


def _change_post_processor(
    content: dict[str, Any], start: list[str], end: list[str], ids: list[int]
) -> bool:
    """Let a tokenizer.json add only these special tokens to a text; return whether it changed."""
    found = content.get("post_processor") or {"type": "Sequence", "processors": []}
    processors = found["processors"] if found["type"] == "Sequence" else [found]
    # other kinds than these two add tokens
    kept = [one for one in processors if one["type"] in ("ByteLevel", "Sequence")]

    def part(text: str, number: int) -> list[dict[str, Any]]:
        first, last = (
            [{"SpecialToken": {"id": token, "type_id": number}} for token in tokens]
            for tokens in (start, end)
        )
        return [*first, {"Sequence": {"id": text, "type_id": number}}, *last]

    names = {token: {"id": token, "ids": ids, "tokens": [token]} for token in [*start, *end]}
    if names:
        single = part("A", 0)
        kept.append({"type": "TemplateProcessing", "single": single,
                     "pair": single + part("B", 1), "special_tokens": names})  # fmt: skip
    if changed := kept != processors:
        content["post_processor"] = {"type": "Sequence", "processors": kept}
    return changed


def check_theirs(out: Path) -> None:
    """Refuse a Hugging Face folder if transformers encodes text differently with its tokenizer."""
    if not ((out / JSON_FILE).exists() or (out / MODEL_FILE).exists()):
        return
    from transformers import AutoTokenizer

    try:
        theirs = AutoTokenizer.from_pretrained(out)
        found = theirs.encode(SAMPLE_TEXT, add_special_tokens=False)
        whole = theirs.encode(SAMPLE_TEXT)
    except Exception as error:
        raise DataError(
            f"transformers cannot load the tokenizer of {out}: {error}\n"
            "  do: update transformers, or convert with --no-check"
        ) from error
    settings = read_config(out)
    is_model = (out / MODEL_FILE).exists()
    ours = open_tokenizer(out / MODEL_FILE if is_model else out, settings["eos_token_id"])
    wanted = ours.encode(SAMPLE_TEXT)
    if (found, theirs.eos_token_id) != (wanted, ours.eod):
        todo = "convert with --no-check, and "
        if (out / JSON_FILE).exists():
            todo += (
                f"load this file unchanged: PreTrainedTokenizerFast(tokenizer_file='"
                f"{out / JSON_FILE}', eos_token='{ours.token_of(ours.eod)}') instead of "
                "AutoTokenizer"
            )
        else:
            todo += "remove the tokenizer from the folder"
        raise DataError(
            f"transformers reads the tokenizer differently, as {type(theirs).__name__}: "
            f"{_first_difference(theirs, found, ours, wanted)}\n  do: {todo}"
        )
    before = [token for token in [settings.get("bos_token_id")] if token is not None]
    if whole[: len(before) + len(wanted)] != before + wanted:
        raise DataError(
            f"transformers begins a text with {whole[:9]}..., this project with "
            f"{[*before, *wanted][:9]}...\n"
            "  do: convert with --no-check, and encode texts with add_special_tokens=False"
        )


def _first_difference(
    theirs: Any, found: Sequence[int], ours: Tokenizer, wanted: Sequence[int]
) -> str:
    """Say where the tokens of transformers begin to differ from ours, or how documents end."""
    if found == wanted:
        return f"it ends documents by token {theirs.eos_token_id}, this project by {ours.eod}"
    equal = sum(1 for _ in takewhile(bool, map(eq, found, wanted)))
    names = (
        f"token {ids[equal]} ({name(ids[equal])!r})" if equal < len(ids) else "nothing"
        for ids, name in ((found, theirs.convert_ids_to_tokens), (wanted, ours.token_of))
    )
    their_next, our_next = names
    return f"after {ours.decode(wanted[:equal])!r} it gives {their_next}, this project {our_next}"


def copy_to_ours(folder: Path, out: Path) -> Path | None:
    """Copy the tokenizer of a Hugging Face folder to a run directory; None if it has none."""
    try:
        return copy_tokenizer(folder, out)
    except ConfigError as error:
        _LOG.warning("the tokenizer is not converted: %s", error.reason)
        return None
