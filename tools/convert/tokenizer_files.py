"""The tokenizer that goes with a model: a sentencepiece model on both sides, or none."""

import json
import shutil
from pathlib import Path
from typing import Any

from frontier_llm.config import RunConfig
from frontier_llm.data.corpora import prepare_all
from frontier_llm.data.manifest import TOKENIZER_FILE
from frontier_llm.data.tokenizer import Tokenizer
from frontier_llm.errors import DataError, FrontierError

THEIRS = ("spiece.model", "tokenizer.model")
"""What Hugging Face's folders call it: T5's and mT5's, Llama's."""


SAMPLE = "def main(x):\n    return  x + 1\n\n\tNaïve — 雪 42.\n"
"""With what tokenizers like to change."""


def write_theirs(config: RunConfig, out: Path) -> dict[str, Any]:
    """Copy a run's tokenizer; return the settings of config.json that come with it.

    One that was made with the corpus is taken from there; without the corpus, or the means to
    prepare it, there are none.

    Args:
        config: of the run.
        out: the folder of theirs.
    """
    try:
        given = config.data.tokenizer
        source = Path(given) if given else prepare_all(config.data)[0] / TOKENIZER_FILE
        tokenizer = Tokenizer(source)
    except FrontierError as error:
        print(f"no tokenizer is written: {error}")
        return {}
    shutil.copyfile(source, out / TOKENIZER_FILE)
    settings = {
        # of all families, T5's too: T5Tokenizer would drop blanks
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
    """Refuse a folder whose tokenizer, as transformers builds it, splits text in another way.

    Raises:
        DataError: it does, or cannot be built.
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
            f"transformers builds another tokenizer of {TOKENIZER_FILE}: it gives {found[:9]}..., "
            f"ours {wanted[:9]}...\n  do: convert without it (--no-check), and remove the file"
        )


def copy_to_ours(folder: Path, out: Path) -> Path | None:
    """Copy a sentencepiece model of theirs; return where it is, None if there is none.

    Other tokenizers (GPT-2's merges) have no place in ours: the text must be tokenised elsewhere.
    """
    for name in THEIRS:
        if (folder / name).is_file():
            return Path(shutil.copyfile(folder / name, out / TOKENIZER_FILE))
    return None
