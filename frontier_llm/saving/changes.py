"""Compares the configuration of a resumed run with the configuration in its checkpoint.

Some keys determine the model, the data or the update rule. A resumed run may change them only if
`run.allow_changes` names them. All other keys may change, for example keys of the layout, the
hardware and the precision, because checkpoints do not depend on them.
"""

import functools
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from frontier_llm.checkpoint.discovery import Checkpoint, find
from frontier_llm.config.decode import defaults, leaves
from frontier_llm.config.model import SIZES, ModelConfig
from frontier_llm.config.needed import unused
from frontier_llm.config.optimizer import ENDING
from frontier_llm.config.run import RunConfig
from frontier_llm.data.corpus_manifest import Manifest
from frontier_llm.data.tokenizer_source import digest_tokenizer
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.inventory import model_shapes
from frontier_llm.saving.adaptation import alone, check_copies
from frontier_llm.saving.tiers import newest_folder

_GUARDED = ("model", "data", "optimizer", "trainer.seed", "trainer.steps")
"""Sections and keys that determine the losses. They may change only if `run.allow_changes` names
them."""
_FREE = (
    "model.name", "data.name", "data.path", "data.directory", "data.micro_batch", "data.workers",
    "data.prefetch",
)  # fmt: skip
"""Keys in the guarded sections that may change, because they do not change the losses."""
_IRRELEVANT = ("run", "callbacks")
"""Sections that are not compared."""
OF_CORPUS = {
    "data.kind", "data.format", "data.text_key", "data.tokenizer", "data.end_of_document",
    "data.vocabulary", "data.validation_percent", "data.broken", "data.unique",
}  # fmt: skip
"""Keys that change how a text becomes a corpus."""
_OF_TOKENS = {"data.tokenizer", "data.end_of_document", "data.vocabulary"}
"""Keys that are changed to get other tokens."""
OF_ORDER = {"trainer.seed", "data.packing", "data.documents", "data.objective"}
"""Other keys that change which samples a corpus has, or their order."""
_OF_TRAINING = {"model.name", "model.init_std", "model.dropout", "model.attention_dropout"}
"""Keys that do not change what a trained model computes."""
_OF_HEADS = "heads", "kv_heads", "head_dim"
_LENGTH = "data.sequence_length"
_PAIR_LENGTHS = "data.decoder_length", "data.denoisers"
_WITHOUT_WEIGHTS = "start a new run without these weights: run.dir=NEW_RUN"
_NEW_RUN = "start a new run from the weights: run.init_from=RUN run.dir=NEW_RUN"

SHOWN = 10
"""Number of changes that an error names."""

Changes = dict[str, tuple[Any, Any]]
"""(saved value, value in the resumed run) by key."""


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """Return (saved value, current value) of every key that differs.

    A key that is absent, because an older version has saved the configuration, has its default.
    """
    old, new = (defaults() | dict(leaves(values)) for values in (before, now))
    ordered = {**dict(leaves(now)), **old, **new}
    keys = [key for key in ordered if not is_within(key, _IRRELEVANT)]
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


class Initial(NamedTuple):
    """Weights that a new run begins with."""

    source: str
    """The setting that names them, such as run.init_from=PATH."""
    is_encoder: bool = False
    """Whether they are for the encoder of an encoder-decoder only, whose sizes have own keys."""

    def name(self, key: str) -> str:
        """Return the key of the run that a key of these weights stands for."""
        of_encoder = self.is_encoder and key.removeprefix("model.") in SIZES
        return key.replace("model.", "model.encoder_") if of_encoder else key


class _Impossible(NamedTuple):
    """Changes that no run can make."""

    keys: Sequence[str]
    detail: str
    """What the error adds to the value of the first key."""
    reason: str
    otherwise: str
    """What a run that resumes can do instead of undoing them."""


def refuse(found: Changes, config: RunConfig, initial: Initial | None = None) -> None:
    """Refuse changes to the data, the model or the update rule, unless they are allowed by name.

    Changes of keys without effect are not refused. Changes that no run can make are refused even if
    they are allowed: other shapes of parameters, other heads, an optimizer whose states the
    checkpoint does not hold, another length of packed samples, and one corpus instead of a blend.
    For `initial` weights only keys count that change what a trained model computes. One ConfigError
    names all refused changes, the first SHOWN with their values, and says how to undo and how to
    allow them.
    """
    now, name = config.model_dump(mode="json"), initial.name if initial else str
    of_data = [_other_lengths(found, config), _single_corpus(found)]
    resumed = [_other_heads(found), _absent_states(found, now), *of_data] if not initial else []
    impossible = [entry for entry in (_other_shapes(found, now), *resumed) if entry is not None]
    fixed = list(dict.fromkeys(key for entry in impossible for key in entry.keys))
    guarded = [
        key
        for key in found
        if key not in fixed and not is_within(name(key), config.run.allow_changes)
        if (_changes_outputs(key) if initial else _is_guarded(key, now))
    ]
    idle = {key for key, _ in unused(config)}
    refused = [key for key in guarded if key not in idle]
    if not fixed and not refused:
        return
    (first, (before, after)), *more = [(key, found[key]) for key in (*fixed, *refused)]
    others = [f"; {name(key)}={_text(new)}, not {_text(old)}" for key, (old, new) in more]
    if len(others) >= SHOWN:
        others[SHOWN - 1 :] = [f"; and {len(others) - SHOWN + 1} more"]
    # a key without effect now may have one again when the others are set back
    idle = {key for key, _ in unused(_undone(config, {k: found[k] for k in (*fixed, *guarded)}))}

    def settings(keys: Iterable[str]) -> str:
        kept = (key for key in keys if key not in idle)
        words = {key: "data" if key == "data.kind" else name(key) for key in kept}  # its file
        return " ".join(shlex.quote(f"{words[key]}={_text(found[key][0])}") for key in words)

    # the text at another path may be the same; if it is not, it has to be allowed as well
    path = ["data.path"] if "data.path" in found and initial is None else []
    is_other_kind = "data.kind" in guarded  # whose tokenizer is trained on other text
    allowing = _allowing(config, *map(name, refused), *path, *["data.tokenizer"] * is_other_kind)
    if is_other_kind:
        own_name = found.get("data.name", ("",))[0] not in ("", found["data.kind"][0])
        guarded += [*path, *["data.name"] * own_name]
    todo = f"set {settings(guarded)}, or allow the change: {allowing}"
    if impossible:
        otherwise = f"leave out {initial.source.partition('=')[0]}" if initial else None
        todo = f"set {settings(fixed if refused else [*fixed, *guarded])}"
        todo += f", and either {settings(guarded)} or {allowing};" if refused else ","
        todo += f" or {otherwise or impossible[0].otherwise}"
    weights = f"weights of {initial.source}" if initial else "checkpoint that the run resumes from"
    raise ConfigError(
        name(first),
        f"{_text(after)}{impossible[0].detail if impossible else ''}{''.join(others)}",
        f"{_text(before)}, as in the {weights}{impossible[0].reason if impossible else ''}",
        todo,
    )


def _undone(config: RunConfig, found: Changes) -> RunConfig:
    """Return the configuration without some changes, or with them if it would be illegal."""
    values = config.model_dump(mode="json")
    for key in found.keys() & dict(leaves(values)):
        *sections, last = key.split(".")
        functools.reduce(dict.__getitem__, sections, values)[last] = found[key][0]
    try:
        return RunConfig.model_validate(values)
    except (ValidationError, ConfigError):  # of another version, or of one side of a model
        return config


def check_corpus(
    found: Changes, config: RunConfig, corpus: Manifest, meta: Mapping[str, Any], checkpoint: Path
) -> str | None:
    """Refuse a corpus that differs from the checkpoint's, unless an allowed change explains it.

    A blend may get more corpora with the same tokenizer, if its corpora may change. Another
    tokenizer has to be allowed itself: it is often trained on the text by itself, and changes the
    meaning of all tokens; then a warning is returned. `corpus` is the manifest of the corpora that
    the run reads, `meta` what the checkpoint stores besides the states.
    """
    if meta["corpus"] == corpus.digest:
        return None
    data, stored = config.data, meta.get("tokenizer", "")
    is_same = stored == corpus.tokenizer_sha256
    key = "data.path" if is_same or data.tokenizer is None else "data.tokenizer"
    of_text = {"data.path", *(OF_CORPUS & found.keys())}
    if data.kind == "blend":
        of_text.add("data.corpora")
    elif "data.path" in found:  # no other key explains another text
        of_text = {"data.path"}
    of_tokens = {"data.tokenizer", *(_OF_TOKENS & found.keys())}
    reasons = [of_text] if is_same or not stored else [of_text | of_tokens, of_tokens]
    allowed = config.run.allow_changes
    if not all(any(is_within(key, allowed) for key in keys) for keys in reasons):
        other = "" if is_same or not stored else f", and its tokenizer {stored[:12]}"
        own = f" and tokenizer {corpus.tokenizer_sha256[:12]}" if other else ""
        place = data.tokenizer if key == "data.tokenizer" else data.path or data.name
        same = "use the same text, in files of the same names, and tokenizer"
        todo = f"{same}, or allow it: {_allowing(config, key)}"
        if other:
            todo = _keep_tokens(config, meta, checkpoint)
        # which older versions did not divide
        if corpus.account and corpus.account.marked_files and "data.path" not in found:
            todo += f"; or keep <|endoftext|> in the text: {_allowing(config, 'data.format')}"
            todo += " data.format=text"
        raise ConfigError(
            key,
            f"{place}, which gives a corpus with digest {corpus.digest}{own}",
            f"the corpus that the run has read so far, with digest {meta['corpus']}{other}",
            todo,
        )
    if is_same or not stored:
        return None
    return (
        "the tokenizer is not the one of the checkpoint: ids of tokens have changed their meaning, "
        "and the model has to learn them anew"
    )


def _keep_tokens(config: RunConfig, meta: Mapping[str, Any], checkpoint: Path) -> str:
    """Say how a run goes on with other text and the tokenizer that its checkpoint names."""
    found = tokenizer_of(checkpoint, meta, config.data.directory)
    allowing = _allowing(config, "data.path", "data.tokenizer")
    return (
        "use the same text, in files of the same names; or go on with other text and the same "
        f"tokens: {allowing} "
        f"data.tokenizer={found or 'PATH, the tokenizer until now'} (without data.vocabulary); "
        f"with {allowing} alone the model has to learn other tokens"
    )


def _other_shapes(found: Changes, now: Mapping[str, Any]) -> _Impossible | None:
    old = {key: found[key][0] for key in found if key == _LENGTH or is_within(key, ("model",))}
    saved, current = _shapes(now, old), _shapes(now, {})
    if saved is None or current is None or saved == current:
        return None
    # each of these keys changes the shapes if it alone is changed
    blamed = [
        key
        for key in old
        if _shapes(now, {other: old[other] for other in old if other != key}) != saved
    ] or list(old)
    name = min(name for name in saved | current if saved.get(name) != current.get(name))
    shapes = [list(of[name]) if name in of else "absent" for of in (saved, current)]
    has_table = blamed == [_LENGTH]
    rotary = " model.positions=rotary (such a run may change its length later)"
    return _Impossible(
        blamed,
        " with model.positions=learned" if has_table else "",
        f", because shapes of parameters depend on it ({name} is {shapes[0]}, and would be "
        f"{shapes[1]})",
        f"{_WITHOUT_WEIGHTS}{rotary if has_table else ''}",
    )


def _other_heads(found: Changes) -> _Impossible | None:
    """Return changes of heads that leave all shapes as they are: rows get another meaning."""
    sides = (f"model.{side}{key}" for side in ("", "encoder_") for key in _OF_HEADS)
    keys = [key for key in sides if key in found and None not in found[key]]
    reason = ", because the rows of queries, keys and values are ordered by heads"
    return _Impossible(keys, "", reason, _WITHOUT_WEIGHTS) if keys else None


def _absent_states(found: Changes, now: Mapping[str, Any]) -> _Impossible | None:
    """Return changes to an optimizer that needs states which that of the checkpoint has not."""
    keys = [key for key in ("optimizer.name", "optimizer.beta1") if key in found]
    saved, current = {**now["optimizer"]}, now["optimizer"]
    saved.update({key.removeprefix("optimizer."): found[key][0] for key in keys})
    absent = " and ".join(sorted(_states(current) - _states(saved)))
    return _Impossible(keys, "", f", which does not hold {absent}", _NEW_RUN) if absent else None


def _other_lengths(found: Changes, config: RunConfig) -> _Impossible | None:
    lengths = [_LENGTH, *_PAIR_LENGTHS] if config.data.objective == "spans" else [_LENGTH]
    changed = [key for key in lengths if key in found]
    if not changed or config.data.packing != "best_fit":
        return None
    return _Impossible(
        changed,
        " with data.packing=best_fit",
        ": best_fit packs all documents anew for each length, so the run would read again what it "
        "has read",
        _NEW_RUN,
    )


def _single_corpus(found: Changes) -> _Impossible | None:
    if found.get("data.kind", ("",))[0] != "blend":
        return None
    reason = ": only a blend knows how many samples of each of its corpora the run has read"
    return _Impossible(["data.kind"], "", reason, _NEW_RUN)


def _text(value: Any) -> str:
    """Return a value as the command line reads it, for example null for None."""
    if isinstance(value, str):
        return value
    return re.sub(r'"(\w+)":', r"\1:", json.dumps(value))  # hydra reads no keys in quotes


def _states(optimizer: Mapping[str, Any]) -> set[str]:
    if optimizer["name"] == "adafactor":
        return {"sums over rows and columns"} | (
            {"Adafactor's momentum"} if optimizer["beta1"] else set()
        )
    matrices = set() if optimizer["name"] == "muon" else {"second moments of matrices"}
    return {"first moments", "second moments of norms and tables"} | matrices


def _shapes(now: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes of all parameters with other values of some keys; None if illegal."""
    flat = {**dict(leaves(now)), **others}
    try:
        fields = {name: flat[f"model.{name}"] for name in now["model"]}
        return model_shapes(ModelConfig.model_validate(fields), flat[_LENGTH])
    except (ValidationError, ZeroDivisionError):  # of a version whose keys had other values
        return None


def _allowing(config: RunConfig, *keys: str) -> str:
    names = dict.fromkeys([*config.run.allow_changes, *keys])
    return f"'run.allow_changes=[{','.join(names)}]'"  # zsh reads brackets without quotes


def _is_guarded(key: str, now: Mapping[str, Any]) -> bool:
    optimizer = now["optimizer"]
    if key == "trainer.steps":  # schedules that end depend on it unless decay_steps is set
        return optimizer["schedule"] in ENDING and optimizer["decay_steps"] is None
    return is_within(key, _GUARDED) and not is_within(key, _FREE)


def _changes_outputs(key: str) -> bool:
    return is_within(key, ("model",)) and key not in _OF_TRAINING


def is_within(key: str, names: Sequence[str]) -> bool:
    """Whether a key, or a section that contains it, is among some names."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


SHOWN_DIGITS = 12
"""Number of hexadecimal digits of a digest that an error shows."""


def _initial_weights(config: RunConfig) -> Iterator[tuple[str, Checkpoint]]:
    """Open the checkpoints that a run begins with, by key; none if it has begun already."""
    names = ("init_from", "init_encoder_from")
    paths = {name: path for name in names if (path := getattr(config.run, name)) is not None}
    if not paths or newest_folder(config) is not None:
        return
    for name, path in paths.items():
        yield f"run.{name}", find(Path(path))


def check_initial_model(config: RunConfig) -> None:
    """Refuse initial weights of another kind of model, or of other shapes.

    An encoder-decoder may begin with a decoder, if each side can be a copy of it, or with one for
    each side. Raises a ConfigError, or a CheckpointError if there is no checkpoint.
    """
    for key, checkpoint in _initial_weights(config):
        _check_weights(config, key, checkpoint)


def _check_weights(config: RunConfig, key: str, checkpoint: Checkpoint) -> None:
    model, path = config.model, getattr(config.run, key.removeprefix("run."))
    source, has_two = f"{key}={path}", config.run.init_encoder_from is not None
    stored = {name: tensor.shape for name, tensor in checkpoint.manifest.weights.items()}
    kind = "t5" if "encoder_norm.weight" in stored else "gpt"
    before = checkpoint.manifest.meta.get("config")
    side = "encoder" if key == "run.init_encoder_from" else "decoder" if has_two else "both"
    if (model.kind, kind) == ("t5", "gpt"):
        check_copies(model, stored, source, side)
        model = alone(model.encoder if side == "encoder" else model, side)
        config = config.model_copy(update={"model": model})
    elif has_two:
        wanted = "a decoder: the encoder begins with one, and the decoder with another"
        todo = "name two decoders, or leave out run.init_encoder_from"
        raise ConfigError(key, f"{path}, an encoder-decoder", wanted, todo)
    elif model.kind != kind:
        named = f" (theirs is model={before['model']['name']})" if before else ""
        raise ConfigError(
            "model.kind",
            f"{model.kind}, of model={model.name}",
            f"{kind}, the kind of the weights of {source}",
            f"choose a model of this kind{named}, or leave out run.init_from",
        )
    if before:
        found = changes(before, config.model_dump(mode="json"))
        refuse(found, config, Initial(source, is_encoder=side == "encoder"))
    shapes = model_shapes(model, config.data.sequence_length)
    for name in sorted(shapes | stored):
        if shapes.get(name) != stored.get(name):
            own, theirs = (list(of[name]) if name in of else "absent" for of in (shapes, stored))
            raise ConfigError(
                "model",
                f"{model.name}, in which {name} is {own}",
                f"the model of the weights of {source}, in which {name} is {theirs}",
                f"set the keys that frontier-llm convert has printed, or leave out {key}",
            )


def check_initial_tokenizer(config: RunConfig, tokenizer: str | Path | None) -> None:
    """Refuse initial weights whose token ids stand for other texts than those of the new corpus.

    `tokenizer` is a file, or a folder such as that of a prepared corpus; None if it is still to be
    trained on the text. Weights that do not record their tokenizer are accepted with a given one.
    Raises a ConfigError unless the tokenizers are equal or `run.allow_changes` names
    `data.tokenizer`, and a CheckpointError if there is no checkpoint.
    """
    run, data = config.run, config.data
    if {"data", "data.tokenizer"} & set(run.allow_changes):
        return
    found = None if tokenizer is None else digest_tokenizer(Path(tokenizer))
    for key, checkpoint in _initial_weights(config):
        meta = checkpoint.manifest.meta
        wanted = meta.get("tokenizer")
        is_own = found in (wanted, None) if wanted else found is not None
        if is_own:
            continue
        path = wanted and tokenizer_of(checkpoint.folder, meta, data.directory)
        named = path or "PATH, the tokenizer that these weights were trained with"
        allowed = ",".join([*run.allow_changes, "data.tokenizer"])
        given = found and f" (digest {found[:SHOWN_DIGITS]})"
        recorded = f"digest {str(wanted)[:SHOWN_DIGITS]}" if wanted else "which they do not record"
        raise ConfigError(
            "data.tokenizer",
            f"{data.known_tokenizer or 'null, which trains one on the text'}{given or ''}",
            f"the tokenizer of {key}={getattr(run, key[4:])} ({recorded}): to the weights, the "
            "tokens of another one are other texts",
            f"set data.tokenizer={named} (without data.vocabulary); to train new embeddings for "
            f"another tokenizer: 'run.allow_changes=[{allowed}]'",
        )


def tokenizer_of(checkpoint: Path, meta: Mapping[str, Any], directory: str) -> Path | None:
    """Return where the tokenizer of a checkpoint is; None if it is not found."""
    for path in _possible_places(checkpoint, meta, directory):
        with suppress(ConfigError):
            if digest_tokenizer(path) == meta["tokenizer"]:
                return path
    return None


def _possible_places(checkpoint: Path, meta: Mapping[str, Any], directory: str) -> Iterator[Path]:
    """Yield its run directory, if it was imported; the file that its run has used; or corpora."""
    data = (meta.get("config") or {}).get("data", {})
    yield from checkpoint.absolute().parents[:2]
    if data.get("tokenizer"):
        yield Path(data["tokenizer"])
    for folder in dict.fromkeys((data.get("directory", directory), directory)):
        yield from sorted(Path(folder).glob("[!.]*-*"))
