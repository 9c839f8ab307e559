"""Find the tokenizer that weights were trained with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from frontier_llm.checkpoint.discovery import find
from frontier_llm.config.reading import prepared_from
from frontier_llm.config.run import RunConfig
from frontier_llm.data.corpora import open_all, prepare_all
from frontier_llm.data.corpus_build import Progress
from frontier_llm.data.prepare import UnwritableError
from frontier_llm.data.source import NoSourceError
from frontier_llm.data.tokenizer import Tokenizer
from frontier_llm.data.tokenizer_source import check_vocabulary, digest_tokenizer, open_tokenizer
from frontier_llm.errors import ConfigError, DataError
from frontier_llm.saving.changes import SHOWN_DIGITS, tokenizer_of


def open_trained_tokenizer(config: RunConfig, weights: Path) -> Tokenizer:
    """Open the tokenizer that weights were trained with, also if the text of the run has changed.

    `weights` is a checkpoint, or a folder that holds checkpoints. Raises a CheckpointError if there
    is none, and a FrontierError if only another tokenizer is found, or nothing to train it on.
    """
    checkpoint = find(weights)
    meta = checkpoint.manifest.meta
    path = find_tokenizer(config, meta, checkpoint.folder)
    check_trained_with(meta, path)
    tokenizer = open_tokenizer(path, config.data.end_of_document)
    check_vocabulary(config, tokenizer)
    return tokenizer


def find_tokenizer(config: RunConfig, meta: Mapping[str, Any], checkpoint: Path) -> Path:
    """Return the tokenizer of a checkpoint; if it is not found, that of the run's configuration.

    The latter may be trained on the text of the run again. Raises a FrontierError without a text,
    or if nothing shows that this gives the tokenizer of the checkpoint.
    """
    wanted, corpus = meta.get("tokenizer"), meta.get("corpus")
    if wanted and (found := tokenizer_of(checkpoint, meta, config.data.directory)):
        return found
    copying = (
        ", or copy its tokenizer.model, or its tokenizer.json and the settings beside it, to "
        f"{checkpoint.absolute().parents[1]}"
    )
    if given := config.data.known_tokenizer:
        if not Path(given).exists():
            todo = f"restore it{copying if wanted else ''}"
            raise DataError(f"there is no {given}, the tokenizer of the run\n  do: {todo}")
        return Path(given)
    if wanted or corpus:
        folders = prepare_again(config, copying if wanted else "")
        digest = open_all(config.data, folders).manifest.digest  # refuses a damaged tokenizer
        if wanted or digest == corpus:
            return folders[0]
    again = "convert them again from a folder with their tokenizer.json or tokenizer.model"
    raise ConfigError(
        "data.tokenizer",
        f"null, and {checkpoint} does not record its tokenizer",
        "the tokenizer of these weights: to them, the tokens of another one are other texts",
        "restore the text of the run" if corpus else again,
    )


def prepare_again(
    config: RunConfig, otherwise: str = "", on_progress: Progress | None = None
) -> tuple[Path, ...]:
    """Prepare the corpora of a run for a command that takes no keys, such as data.path.

    If there is no text, it cannot be read, or no folder for the corpora can be written, raises a
    DataError that says what to do, or what `otherwise`.
    """
    data, again = config.data, "start the run again with"
    try:
        return prepare_all(data, on_progress)
    except NoSourceError as error:
        reason, todo = error.reason, f"restore it or make it readable{otherwise}"
        absent = [c.path for c in data.sources if c.path and not Path(c.path).exists()]
        if corpus := next(filter(None, (prepared_from(p, data.directory) for p in absent)), None):
            todo += f", or {again} {corpus}, which was prepared from it, as the path"
    except UnwritableError as error:
        reason = error.reason
        todo = f"free space or permit writing there, or {again} another data.directory{otherwise}"
    raise DataError(f"{reason}\n  do: {todo}")


def check_trained_with(meta: Mapping[str, Any], tokenizer: Path) -> None:
    """Refuse another tokenizer than that of a checkpoint, if this says which one it was."""
    wanted, found = meta.get("tokenizer"), digest_tokenizer(tokenizer)
    if wanted not in (None, found):
        raise ConfigError(
            "data.tokenizer",
            f"{tokenizer} (digest {found[:SHOWN_DIGITS]})",
            f"the tokenizer of the checkpoint (digest {str(wanted)[:SHOWN_DIGITS]}): to the model, "
            "the tokens of another one are other texts",
            "run it in the folder where the run was started, or restore its text or its tokenizer",
        )
