"""Copy the tokenizer that belongs to a converted model.

"Ours" is frontier_llm, and "theirs" is Hugging Face. Both read the same files: a sentencepiece
model, or a tokenizer.json with its settings files.
"""

import json
import logging
from pathlib import Path
from typing import Any

from frontier_llm.config import RunConfig
from frontier_llm.convert.theirs import read_config
from frontier_llm.data.corpora import prepare_all
from frontier_llm.data.tokenizer import Tokenizer
from frontier_llm.data.tokenizer_source import (
    JSON_FILE,
    MODEL_FILE,
    copy_tokenizer,
    digest_tokenizer,
    open_tokenizer,
)
from frontier_llm.errors import ConfigError, DataError, FrontierError

SAMPLE_TEXT = "def main(x):\n    return  x + 1\n\n\tNaïve — 雪 42.\n"
"""A text that both tokenizers must encode equally. Many tokenizers normalise its characters."""
_SETTINGS_FILE = "tokenizer_config.json"

_LOG = logging.getLogger(__name__)


def write_theirs(config: RunConfig, out: Path, trained_with: str | None) -> dict[str, Any]:
    """Copy the tokenizer of a run to a Hugging Face folder.

    A tokenizer that was trained on the run's corpus is taken from the prepared corpus. If the
    tokenizer is missing, or the corpus neither exists nor can be prepared, none is written.

    Args:
        config: the configuration of the run.
        out: the Hugging Face folder.
        trained_with: digest of the tokenizer in the checkpoint; None: the checkpoint has none.

    Returns:
        Token ids for config.json; empty if no tokenizer is written.

    Raises:
        DataError: the tokenizer has changed since the training.
    """
    try:
        configured = config.data.tokenizer
        source = Path(configured) if configured else prepare_all(config.data)[0]
        tokenizer = open_tokenizer(source, config.data.end_of_document)
    except FrontierError as error:
        _LOG.warning("no tokenizer is written: %s", error)
        return {}
    copy_tokenizer(source, out)
    if trained_with not in (None, found := digest_tokenizer(out)):
        raise DataError(
            f"the tokenizer {source} has the digest {found}; the model was trained with another, "
            f"of digest {trained_with}\n  do: restore the files that the run was started with"
        )
    _write_settings(tokenizer, out)
    return {"eos_token_id": tokenizer.eod, "bos_token_id": None}


def _write_settings(tokenizer: Tokenizer, out: Path) -> None:
    """Write tokenizer_config.json, unless it is there and names the token that ends documents."""
    path, end = out / _SETTINGS_FILE, tokenizer.token_of(tokenizer.eod)
    if (out / MODEL_FILE).exists():
        settings = {
            # used for T5 as well, because T5Tokenizer would drop blanks
            "tokenizer_class": "LlamaTokenizer",
            "unk_token": "<unk>",
            # LlamaTokenizer would add a token beyond the vocabulary for its default, "<s>"
            "bos_token": None if tokenizer.id_of("<s>") is None else "<s>",
            "add_bos_token": False,
            "add_prefix_space": False,
            "legacy": False,
        }
    elif path.exists():
        settings = json.loads(path.read_bytes())
        named = settings.get("eos_token")
        if end in (named, named.get("content") if isinstance(named, dict) else None):
            return
    else:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings = {"clean_up_tokenization_spaces": False, **settings, "eos_token": end}
    path.write_text(json.dumps(settings, indent=2) + "\n")


def check_theirs(out: Path) -> None:
    """Refuse a Hugging Face folder if transformers encodes text differently with its tokenizer.

    Raises:
        DataError: the tokens or the token that ends a document differ, or transformers cannot load
            the tokenizer.
    """
    if not ((out / JSON_FILE).exists() or (out / MODEL_FILE).exists()):
        return
    from transformers import AutoTokenizer

    try:
        theirs = AutoTokenizer.from_pretrained(out)
        found = theirs.encode(SAMPLE_TEXT, add_special_tokens=False)
    except Exception as error:
        raise DataError(f"transformers cannot load the tokenizer of {out}: {error}") from error
    ours = open_tokenizer(out, read_config(out)["eos_token_id"])
    wanted = ours.encode(SAMPLE_TEXT)
    if (found, theirs.eos_token_id) != (wanted, ours.eod):
        raise DataError(
            f"transformers reads the tokenizer differently: it gives {found[:9]}... and ends "
            f"documents by {theirs.eos_token_id}, this project {wanted[:9]}... and {ours.eod}\n"
            "  do: convert with --no-check, and remove the tokenizer from the folder"
        )


def copy_to_ours(folder: Path, out: Path) -> Path | None:
    """Copy the tokenizer of a Hugging Face folder to a run directory.

    Returns:
        The copy of the model or the tokenizer.json; None if the folder has neither.
    """
    try:
        return copy_tokenizer(folder, out)
    except ConfigError as error:
        _LOG.warning("the tokenizer is not converted: %s", error)
        return None
