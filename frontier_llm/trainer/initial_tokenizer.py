"""Compare the tokenizer of a new run with the one that its initial weights were trained with."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from frontier_llm.checkpoint.discovery import find
from frontier_llm.config.run import RunConfig
from frontier_llm.data.tokenizer_source import digest_tokenizer
from frontier_llm.errors import ConfigError
from frontier_llm.trainer.checkpoint_places import newest_folder

_SHOWN = 12
"""Number of hexadecimal digits of a digest that an error shows."""


def check_initial_tokenizer(config: RunConfig, tokenizer: Path) -> None:
    """Refuse initial weights whose token ids stand for other texts than those of the new corpus.

    Weights that do not say which tokenizer they belong to are accepted.

    Args:
        config: the configuration of the run.
        tokenizer: its tokenizer: a file, or a folder such as that of a prepared corpus.

    Raises:
        ConfigError: the tokenizers differ, and `run.allow_changes` does not name `data.tokenizer`.
        CheckpointError: `run.init_from` has no checkpoint, or it is damaged.
    """
    run, data = config.run, config.data
    if run.init_from is None or {"data", "data.tokenizer"} & set(run.allow_changes):
        return
    if newest_folder(config) is not None:  # the run resumes, and its own weights are loaded
        return
    checkpoint = find(Path(run.init_from))
    meta, found = checkpoint.manifest.meta, digest_tokenizer(tokenizer)
    wanted = meta.get("tokenizer")
    if wanted in (None, found):
        return
    path = tokenizer_of(checkpoint.folder, meta, data.directory)
    named = path or "PATH, the tokenizer that these weights were trained with"
    allowed = ",".join([*run.allow_changes, "data.tokenizer"])
    raise ConfigError(
        "data.tokenizer",
        f"{data.tokenizer or 'null, which trained one on the text'} (digest {found[:_SHOWN]})",
        f"the tokenizer of run.init_from={run.init_from} (digest {str(wanted)[:_SHOWN]}): to the "
        "weights, the tokens of another one are other texts",
        f"set data.tokenizer={named}; to train new embeddings for another tokenizer: "
        f"run.allow_changes=[{allowed}]",
    )


def tokenizer_of(checkpoint: Path, meta: Mapping[str, Any], directory: str) -> Path | None:
    """Return where the tokenizer of a checkpoint is; None if it is not found.

    Args:
        checkpoint: its folder.
        meta: what it stores in addition to the states.
        directory: folder of prepared corpora.
    """
    places = _possible_places(checkpoint, meta, directory)
    return next((path for path in places if _digest(path) == meta["tokenizer"]), None)


def _possible_places(checkpoint: Path, meta: Mapping[str, Any], directory: str) -> Iterator[Path]:
    """Yield where the tokenizer of a checkpoint may be.

    That is its run directory, if it was imported; the file that its run has used; or a corpus.
    """
    data = (meta.get("config") or {}).get("data", {})
    yield from (parent.absolute() for parent in checkpoint.parents[:2])
    if data.get("tokenizer"):
        yield Path(data["tokenizer"])
    for folder in dict.fromkeys((data.get("directory", directory), directory)):
        yield from sorted(Path(folder).glob("[!.]*-*"))


def _digest(path: Path) -> str | None:
    try:
        return digest_tokenizer(path)
    except ConfigError:
        return None
