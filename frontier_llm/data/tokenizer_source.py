"""Find, open, copy and identify the tokenizer at a path, which is `data.tokenizer`.

The path is a sentencepiece model, a tokenizer.json, or a folder that holds one of them, as Hugging
Face publishes it. A tokenizer.json is used together with the settings files in the same folder.
"""

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from frontier_llm.config.data import DataConfig
from frontier_llm.config.run import RunConfig
from frontier_llm.data.json_tokenizer import SETTINGS_FILES, JsonTokenizer
from frontier_llm.data.sentencepiece_tokenizer import SentencePieceTokenizer
from frontier_llm.data.source_format import sha256_of
from frontier_llm.data.tokenizer import Tokenizer
from frontier_llm.errors import ConfigError

MODEL_FILE = "tokenizer.model"
"""Name of a sentencepiece model in a prepared corpus, a run directory and an exported folder."""
JSON_FILE = "tokenizer.json"
"""Name of a tokenizer.json in the same folders."""
_MAIN_FILES = (JSON_FILE, MODEL_FILE, "spiece.model")
"""Files of a folder, one of which is the tokenizer: the first that exists. T5 has the last."""


def tokenizer_files(path: Path) -> dict[str, Path]:
    """Return the files of a tokenizer, by the names of their copies; the main one is first.

    Raises a ConfigError if there is no tokenizer at the path.
    """
    main = path
    if path.is_dir():
        main = next((path / name for name in _MAIN_FILES if (path / name).is_file()), path)
    if not main.is_file():
        raise ConfigError(
            "data.tokenizer",
            path,
            "a sentencepiece model, a tokenizer.json, or a folder with one of "
            f"{', '.join(_MAIN_FILES)}",
            "set data.tokenizer to such a file or folder. AutoTokenizer.from_pretrained(FOLDER)"
            ".save_pretrained(NEW) of transformers turns other files, such as merges.txt, into one",
        )
    if main.suffix != ".json":
        return {MODEL_FILE: main}
    settings = {name: main.with_name(name) for name in SETTINGS_FILES}
    return {JSON_FILE: main} | {name: file for name, file in settings.items() if file.is_file()}


def open_tokenizer(path: Path, end: str | int | None = None) -> Tokenizer:
    """Open the tokenizer at a path; `end`, or the token that it names, ends a document.

    Raises a ConfigError if the tokenizer cannot be used, or names no token that ends a document.
    """
    main = next(iter(tokenizer_files(path).values()))
    kind = JsonTokenizer if main.suffix == ".json" else SentencePieceTokenizer
    try:
        return kind(main, end)
    except OSError as error:
        raise _unreadable(main, error) from error


def tokens_before_text(data: DataConfig, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that a model of a run reads before a text that begins a document.

    If a GPT's documents were joined, a text follows the end of another document. If they were
    separate, nothing precedes it, and nothing precedes the input of an encoder.
    """
    follows = data.documents == "joined" and data.objective == "causal"
    return [tokenizer.eod] if follows else []


def check_given_tokenizer(config: RunConfig) -> None:
    """Refuse a configured tokenizer that cannot be used, or is too large for the model."""
    if (given := config.data.tokenizer) is not None:
        check_vocabulary(config, open_tokenizer(Path(given), config.data.end_of_document))


def check_vocabulary(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that has more tokens than the model's embedding has rows."""
    count, modes = config.data.sentinels, len(config.data.modes)
    ids = max([tokenizer.vocabulary, *(token + 1 for token in tokenizer.sentinels(count))])
    ids += modes
    if ids > config.model.vocabulary:
        raise ConfigError(
            "model.vocabulary",
            config.model.vocabulary,
            f"at least {ids}: the tokenizer's {tokenizer.vocabulary} tokens"
            + (f" and {count} sentinels, one per removed span" if count else "")
            + (f" and {modes} modes" if modes else ""),
            f"set model.vocabulary={ids}, or use another tokenizer",
        )


def unused_rows(config: RunConfig, tokens: int) -> Iterator[str]:
    """Yield a warning if a tokenizer with so many tokens leaves most of the embedding unused."""
    rows, asked = config.model.vocabulary, config.data.vocabulary
    if 2 * tokens >= rows:
        return
    smaller = f"model.vocabulary={tokens + config.data.sentinels + len(config.data.modes)}"
    todo = "set data.vocabulary to more tokens"
    if config.data.known_tokenizer is not None:
        todo = "use a tokenizer with more tokens (data.tokenizer)"
    elif tokens < asked:
        todo = f"the text yields no more of data.vocabulary={asked}, so add text"
        smaller += f" data.vocabulary={tokens}"
    yield (
        f"the tokenizer has {tokens:,} tokens, the embedding {rows:,} rows, most of which are "
        f"never used: {todo}, or set {smaller}"
    )


def mode_tokens(config: RunConfig) -> dict[str, int]:
    """Return the token ids of the modes of denoisers: the last rows of the embedding.

    They depend on nothing else, so that they are the same at another length.
    """
    last = config.model.vocabulary - 1
    return {mode: last - number for number, mode in enumerate(config.data.modes)}


def copy_tokenizer(path: Path, folder: Path) -> Path:
    """Copy the files of a tokenizer to a folder; return the copy of the model or tokenizer.json."""
    copies = [shutil.copyfile(file, folder / name) for name, file in tokenizer_files(path).items()]
    return Path(copies[0])


def digest_tokenizer(path: Path) -> str:
    """Return the digest of a tokenizer's files: of their content and the names of their copies.

    The digest of a sentencepiece model is the SHA-256 of its file.
    """
    try:
        digests = {name: sha256_of(file) for name, file in tokenizer_files(path).items()}
    except OSError as error:
        raise _unreadable(path, error) from error
    if MODEL_FILE in digests:
        return digests[MODEL_FILE]
    lines = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
    return hashlib.sha256(lines.encode()).hexdigest()


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        "data.tokenizer",
        path,
        f"a file or folder that can be read: {error.strerror or error}",
        "permit reading it, or set data.tokenizer to another tokenizer",
    )
