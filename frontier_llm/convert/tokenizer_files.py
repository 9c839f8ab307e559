"""Copy the tokenizer of a model, which must be a sentencepiece model on both sides."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from frontier_llm.config import RunConfig
from frontier_llm.data.corpora import prepare_all
from frontier_llm.data.corpus_manifest import TOKENIZER_FILE
from frontier_llm.data.tokenizer import Tokenizer
from frontier_llm.errors import DataError, FrontierError

THEIRS = ("spiece.model", "tokenizer.model")
"""Names of the file in Hugging Face folders: of T5 and mT5, and of Llama."""


SAMPLE = "def main(x):\n    return  x + 1\n\n\tNaïve — 雪 42.\n"
"""A text with characters that tokenizers often normalize."""

_LOG = logging.getLogger(__name__)


def write_theirs(config: RunConfig, out: Path) -> dict[str, Any]:
    """Copy the tokenizer of a run, and return the settings of config.json that belong to it.

    A tokenizer that was trained with the corpus is taken from the corpus. If the corpus does not
    exist and cannot be prepared, no tokenizer is written.

    Args:
        config: the configuration of the run.
        out: the Hugging Face folder.
    """
    try:
        given = config.data.tokenizer
        source = Path(given) if given else prepare_all(config.data)[0] / TOKENIZER_FILE
        tokenizer = Tokenizer(source)
    except FrontierError as error:
        _LOG.warning("no tokenizer is written: %s", error)
        return {}
    shutil.copyfile(source, out / TOKENIZER_FILE)
    settings = {
        # Also for T5: T5Tokenizer would drop blanks.
        "tokenizer_class": "LlamaTokenizer",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": False,
        "add_prefix_space": False,
        "legacy": False,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return {"eos_token_id": tokenizer.eod, "bos_token_id": None}


def check_theirs(out: Path) -> None:
    """Refuse a folder whose tokenizer splits text differently when transformers loads it.

    Raises:
        DataError: the tokens differ, or transformers cannot load the tokenizer.
    """
    if not (out / TOKENIZER_FILE).exists():
        return
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(out).encode(SAMPLE, add_special_tokens=False)
    except Exception as error:
        raise DataError(f"transformers cannot load the tokenizer of {out}: {error}") from error
    wanted = Tokenizer(out / TOKENIZER_FILE).encode(SAMPLE)
    if found != wanted:
        raise DataError(
            f"transformers reads {TOKENIZER_FILE} differently: it gives {found[:9]}..., this "
            f"project {wanted[:9]}...\n"
            "  do: convert with --no-check, and remove the tokenizer from the folder"
        )


def copy_to_ours(folder: Path, out: Path) -> Path | None:
    """Copy their sentencepiece model; return the path of the copy, or None if there is none.

    Other tokenizers, such as GPT-2's merges, are not supported.
    """
    for name in THEIRS:
        if (folder / name).is_file():
            return Path(shutil.copyfile(folder / name, out / TOKENIZER_FILE))
    return None
