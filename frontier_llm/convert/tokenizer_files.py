"""Copy the tokenizer that belongs to a converted model.

Both frontier_llm ("ours") and Hugging Face ("theirs") must use a sentencepiece model.
"""

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

THEIR_FILES = ("spiece.model", "tokenizer.model")
"""Names of the sentencepiece model in their folders: of T5 and mT5, and of Llama."""
SAMPLE_TEXT = "def main(x):\n    return  x + 1\n\n\tNaïve — 雪 42.\n"
"""A text that both tokenizers must encode equally. Many tokenizers normalise its characters."""

_LOG = logging.getLogger(__name__)


def write_theirs(config: RunConfig, out: Path) -> dict[str, Any]:
    """Copy the tokenizer of a run to a Hugging Face folder.

    A tokenizer that was trained on the run's corpus is taken from the prepared corpus. If the
    corpus neither exists nor can be prepared, no tokenizer is written.

    Args:
        config: the configuration of the run.
        out: the Hugging Face folder.

    Returns:
        Token ids for config.json; empty if no tokenizer is written.
    """
    try:
        configured = config.data.tokenizer
        source = Path(configured) if configured else prepare_all(config.data)[0] / TOKENIZER_FILE
        tokenizer = Tokenizer(source)
    except FrontierError as error:
        _LOG.warning("no tokenizer is written: %s", error)
        return {}
    shutil.copyfile(source, out / TOKENIZER_FILE)
    settings = {
        # used for T5 as well, because T5Tokenizer would drop blanks
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
    """Refuse a Hugging Face folder if transformers encodes text differently with its tokenizer.

    Raises:
        DataError: the tokens differ, or transformers cannot load the tokenizer.
    """
    if not (out / TOKENIZER_FILE).exists():
        return
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(out).encode(SAMPLE_TEXT, add_special_tokens=False)
    except Exception as error:
        raise DataError(f"transformers cannot load the tokenizer of {out}: {error}") from error
    wanted = Tokenizer(out / TOKENIZER_FILE).encode(SAMPLE_TEXT)
    if found != wanted:
        raise DataError(
            f"transformers reads {TOKENIZER_FILE} differently: it gives {found[:9]}..., this "
            f"project {wanted[:9]}...\n"
            "  do: convert with --no-check, and remove the tokenizer from the folder"
        )


def copy_to_ours(folder: Path, out: Path) -> Path | None:
    """Copy their sentencepiece model; return the path of the copy, or None if there is none.

    Tokenizers of other kinds, such as the merge table of GPT-2, are not supported.
    """
    for name in THEIR_FILES:
        if (folder / name).is_file():
            return Path(shutil.copyfile(folder / name, out / TOKENIZER_FILE))
    return None
