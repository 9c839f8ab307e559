"""The rules of what is read: which text, by which tokens, for which kind of model."""

from frontier_llm.config.data import DataConfig
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError

SENTINELS = 100
"""Tokens that stand for what was taken out of a text (T5's and mT5's number)."""


def check_reading(config: RunConfig) -> None:
    """Refuse a corpus that names no text, or that the model cannot learn from.

    Raises:
        ConfigError: naming the key to change.
    """
    check_sources(config.data)
    _check_objective(config)
    _check_vocabulary(config)


def check_sources(data: DataConfig) -> None:
    """Refuse corpora that name no text, or share a name.

    Raises:
        ConfigError: naming the key to change.
    """
    names = [corpus.name for corpus in data.sources]
    if not names or len(set(names)) < len(names):
        raise ConfigError(
            "data.corpora",
            ", ".join(names) or "none",
            "at least one corpus, each with a name of its own",
            "set 'data.corpora=[{name: NAME, path: PATH}, ...]'",
        )
    for corpus in data.sources:
        if corpus.kind == "text" and not corpus.path:
            key = f"data.corpora ({corpus.name})" if data.kind == "blend" else "data.path"
            raise ConfigError(
                key,
                "null",
                "a text, JSONL or Parquet file, or a folder of them",
                "set data.path=FILE" if data.kind != "blend" else "give it a path",
            )


def _check_objective(config: RunConfig) -> None:
    wanted = "spans" if config.model.kind == "t5" else "causal"
    if config.data.objective != wanted:
        what = "an encoder-decoder" if wanted == "spans" else "a decoder alone"
        similar = "data=stdlib_spans or data=text_spans" if wanted == "spans" else "data=stdlib"
        raise ConfigError(
            "data.objective",
            config.data.objective,
            f"{wanted}: model={config.model.name} is {what}",
            f"set data.objective={wanted} ({similar}), or another model",
        )


def _check_vocabulary(config: RunConfig) -> None:
    if config.data.tokenizer is not None:
        return  # how many tokens it has is seen when it is opened
    sentinels = SENTINELS if config.data.objective == "spans" else 0
    room = config.model.vocabulary - sentinels
    if config.data.pieces > room:
        beside = f" less {sentinels} sentinels" if sentinels else ""
        raise ConfigError(
            "data.pieces",
            config.data.pieces,
            f"at most model.vocabulary ({config.model.vocabulary}){beside}: every token needs a "
            "row of the embedding",
            f"set data.pieces={room}",
        )
