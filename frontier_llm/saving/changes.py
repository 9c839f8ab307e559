"""Compares the configuration of a resumed run with the configuration in its checkpoint.

Some keys determine the model, the data or the update rule. A resumed run may change them only if
`run.allow_changes` names them. All other keys may change, for example keys of the layout, the
hardware and the precision, because checkpoints do not depend on them.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from frontier_llm.config.decode import defaults, leaves
from frontier_llm.config.model import SIZES, ModelConfig
from frontier_llm.config.needed import unused
from frontier_llm.config.optimizer import ENDING
from frontier_llm.config.run import RunConfig
from frontier_llm.data.tokenizer_source import check_vocabulary, digest_tokenizer, open_tokenizer
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.inventory import model_shapes
from frontier_llm.saving.tiers import newest_folder

if TYPE_CHECKING:
    from frontier_llm.checkpoint.discovery import Checkpoint
    from frontier_llm.data.corpus_manifest import Manifest
    from frontier_llm.data.tokenizer import Tokenizer

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
_OF_TRAINING = {"model.name", "model.init_std", "model.dropout", "model.attention_dropout"}
"""Keys that do not change what a trained model computes."""
_LENGTH = "data.sequence_length"
_PAIR_LENGTHS = "data.decoder_length", "data.denoisers"
_RESUMED = "as in the checkpoint that the run resumes from"

SHOWN = 10
"""Number of changes that an error names."""

Changes = dict[str, tuple[Any, Any]]
"""(saved value, value in the resumed run) by key."""


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """Return (saved value, current value) of every key that differs.

    A key that is absent, because an older version has saved the configuration, has its default.
    """
    old, new = (defaults() | dict(leaves(values)) for values in (before, now))
    keys = [key for key in {**old, **new} if not _is_within(key, _IRRELEVANT)]
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def refuse(found: Changes, config: RunConfig, wanted: str = _RESUMED) -> None:
    """Refuse changes to the data, the model or the update rule, unless they are allowed by name.

    Changes of keys without effect are not refused. Changes that no run can make are refused even if
    they are allowed: other shapes of parameters, an optimizer whose states the checkpoint does not
    hold, and another length of packed samples. The ConfigError names the first SHOWN refused
    changes, and says how to allow all of them.
    """
    now, allowed = config.model_dump(mode="json"), config.run.allow_changes
    _refuse_other_shapes(found, now)
    _refuse_absent_states(found, now)
    lengths = [_LENGTH, *_PAIR_LENGTHS] if config.data.objective == "spans" else [_LENGTH]
    changed = [key for key in lengths if key in found]
    if changed and config.data.packing == "best_fit":
        before, after = found[changed[0]]
        raise ConfigError(
            changed[0],
            f"{after} with data.packing=best_fit",
            f"{before}, as in the checkpoint: best_fit packs all documents anew for each length, "
            "so the run would read again what it has read",
            "set it back, or start a new run from the weights: run.init_from=RUN run.dir=NEW_RUN",
        )
    idle = {key for key, _ in unused(config)}
    refused = [
        key
        for key in found
        if key not in idle and _is_guarded(key, now) and not _is_within(key, allowed)
    ]
    if not refused:
        return
    shown = {key: ["null" if v is None else v for v in found[key]] for key in refused[:SHOWN]}
    (first, (before, after)), *more = shown.items()
    others = "".join(f"; {key}={new}, not {old}" for key, (old, new) in more)
    if len(refused) > SHOWN:
        others += f"; and {len(refused) - SHOWN} more"
    back = f"repeat the command of the run (its settings are in {config.run.dir}/config.yaml)"
    back = back if others else "set it back"
    back = back if wanted == _RESUMED else f"set {_settings(refused, found)}"
    # the text at another path may be the same; if it is not, it has to be allowed as well
    names = _allowing(config, *refused, *({"data.path"} & found.keys()))
    raise ConfigError(
        first,
        f"{after}{others}",
        f"{before}, {wanted}",
        f"{back}, or allow the change: {names}",
    )


def check_corpus(
    found: Changes, config: RunConfig, corpus: "Manifest", meta: Mapping[str, Any], checkpoint: Path
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
    reasons = {"data.path", *(OF_CORPUS & found.keys())}
    if data.kind == "blend":
        reasons.add("data.corpora")
    if stored and not is_same:
        reasons = {"data.tokenizer", *(OF_CORPUS & found.keys())}
    if not any(_is_within(reason, config.run.allow_changes) for reason in reasons):
        other = "" if is_same or not stored else f", and its tokenizer {stored[:12]}"
        own = f" and tokenizer {corpus.tokenizer_sha256[:12]}" if other else ""
        place = data.tokenizer if key == "data.tokenizer" else data.path or data.name
        todo = f"use the same text and tokenizer, or allow it: {_allowing(config, key)}"
        if other:
            todo = _keep_tokens(config, meta, checkpoint)
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
        f"use the same text; or go on with other text and the same tokens: {allowing} "
        f"data.tokenizer={found or 'PATH, the tokenizer until now'} (without data.vocabulary); "
        f"with {allowing} alone the model has to learn other tokens"
    )


def _refuse_other_shapes(
    found: Changes,
    now: Mapping[str, Any],
    wanted: str = _RESUMED,
    otherwise: str = "start a new run without these weights: run.dir=NEW_RUN",
) -> None:
    old = {key: found[key][0] for key in found if key == _LENGTH or _is_within(key, ("model",))}
    saved, current = _shapes(now, old), _shapes(now, {})
    if saved is None or current is None or saved == current:
        return
    # each of these keys changes the shapes if it alone is changed
    blamed = [
        key
        for key in old
        if _shapes(now, {other: old[other] for other in old if other != key}) != saved
    ] or list(old)
    name = min(name for name in saved | current if saved.get(name) != current.get(name))
    shapes = [list(of[name]) if name in of else "absent" for of in (saved, current)]
    before, after = found[blamed[0]]
    allowed = [_LENGTH, *_OF_TRAINING, *blamed, *now["run"]["allow_changes"]]
    kept = [key for key in old if not _is_within(key, allowed)]
    back = _settings([*blamed, *kept], found)
    has_table = blamed == [_LENGTH]
    rotary = " model.positions=rotary (such a run may change its length later)"
    raise ConfigError(
        blamed[0],
        f"{after}{' with model.positions=learned' if has_table else ''}",
        f"{before}, {wanted}, because shapes of parameters depend on it ({name} is {shapes[0]}, "
        f"and would be {shapes[1]})",
        f"set {back}, or {otherwise}{rotary if has_table else ''}",
    )


def _settings(keys: Sequence[str], found: Changes) -> str:
    """Return the settings that give keys their saved values."""
    return " ".join(f"{key}={'null' if found[key][0] is None else found[key][0]}" for key in keys)


def _refuse_absent_states(found: Changes, now: Mapping[str, Any]) -> None:
    """Refuse an optimizer that needs states which the optimizer of the checkpoint does not have."""
    keys = [key for key in ("optimizer.name", "optimizer.beta1") if key in found]
    saved, current = {**now["optimizer"]}, now["optimizer"]
    saved.update({key.removeprefix("optimizer."): found[key][0] for key in keys})
    absent = _states(current) - _states(saved)
    if absent:
        before, after = found[keys[0]]
        raise ConfigError(
            keys[0],
            after,
            f"{before}, as in the checkpoint that the run resumes from, which does not hold "
            + " and ".join(sorted(absent)),
            "set it back, or start a new run from the weights: run.init_from=RUN run.dir=NEW_RUN",
        )


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
    return _is_within(key, _GUARDED) and not _is_within(key, _FREE)


def _is_within(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


_SHOWN = 12
"""Number of hexadecimal digits of a digest that an error shows."""


def _initial_weights(config: RunConfig) -> "Iterator[tuple[str, Checkpoint]]":
    """Open the checkpoints that a run begins with, by key; none if it has begun already."""
    names = ("init_from", "init_encoder_from")
    paths = {name: path for name in names if (path := getattr(config.run, name)) is not None}
    if not paths or newest_folder(config) is not None:
        return
    # imports torch, which the command line does not wait for
    from frontier_llm.checkpoint.discovery import find

    for name, path in paths.items():
        yield f"run.{name}", find(Path(path))


def check_initial_model(config: RunConfig) -> None:
    """Refuse initial weights of another kind of model, or of other shapes.

    An encoder-decoder may begin with a decoder, if each side can be a copy of it, or with one for
    each side. Raises a ConfigError, or a CheckpointError if there is no checkpoint.
    """
    for key, checkpoint in _initial_weights(config):
        try:
            _check_weights(config, key, checkpoint)
        except ConfigError as error:
            if key != "run.init_encoder_from":
                raise
            parts = error.key, str(error.got), error.wants, error.todo
            sizes = rf"model\.({'|'.join(SIZES)})\b"
            raise ConfigError(
                *(re.sub(sizes, r"model.encoder_\1", part) for part in parts)
            ) from None


def _check_weights(config: RunConfig, key: str, checkpoint: "Checkpoint") -> None:
    model, path = config.model, getattr(config.run, key.removeprefix("run."))
    source, has_two = f"{key}={path}", config.run.init_encoder_from is not None
    stored = {name: tensor.shape for name, tensor in checkpoint.manifest.weights.items()}
    kind = "t5" if "encoder_norm.weight" in stored else "gpt"
    before = checkpoint.manifest.meta.get("config")
    is_copied = (model.kind, kind) == ("t5", "gpt")
    if is_copied:
        side = ("encoder" if key == "run.init_encoder_from" else "decoder") if has_two else "both"
        _check_copies(model, stored, source, side)
        model = _alone(model.encoder if side == "encoder" else model, side)
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
    now = config.model_dump(mode="json")
    if before:
        found, wanted = changes(before, now), f"as in the weights of {source}"
        _refuse_other_shapes(found, now, wanted, f"leave out {key}")
        of_model = [key for key in found if _is_within(key, ("model",)) and key not in _OF_TRAINING]
        refuse({key: found[key] for key in of_model}, config, wanted)
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


def _alone(model: ModelConfig, side: str) -> ModelConfig:
    """Return a decoder with the layers of a side; `both` sides have as many."""
    of_decoder = model.layers - model.encoder_layers
    changed: dict[str, Any] = {"kind": "gpt", "encoder_layers": 0, "encoder_window": None}
    changed |= {"layers": of_decoder if side == "decoder" else model.encoder_layers}
    changed |= {"encoder_embedding": False, "encoder_window_after": None, "start_token": 0}
    changed |= {"cross_attention": "separate"} | {f"encoder_{size}": None for size in SIZES}
    return model.model_copy(update=changed)


def _check_copies(model: ModelConfig, stored: Collection[str], source: str, side: str) -> None:
    for size in SIZES if side == "both" else ():
        if (own := getattr(model.encoder, size)) != getattr(model, size):
            raise ConfigError(
                f"model.encoder_{size}",
                own,
                f"{getattr(model, size)} or null: both sides copy the layers of {source}",
                f"set model.encoder_{size}=null, or run.init_encoder_from to another decoder",
            )
    layers = len({name.split(".")[1] for name in stored if name.startswith("layers.")})
    own = model.encoder_layers, model.layers - model.encoder_layers
    wanted = {"both": (layers, layers), "encoder": (layers, own[1]), "decoder": (own[0], layers)}
    if own != wanted[side]:
        encoder, decoder = wanted[side]
        copied = "both sides copy" if side == "both" else f"the {side} copies"
        raise ConfigError(
            "model.layers",
            f"{model.layers}, of which {own[0]} are the encoder's",
            f"{encoder + decoder}, of which {encoder} are the encoder's: {copied} the {layers} "
            f"layers of {source}",
            f"set model.layers={encoder + decoder} model.encoder_layers={encoder}",
        )
    if model.head_factor != 1 and side != "encoder":
        raise ConfigError(
            "model.tied",
            "true, with model.scaled_embedding=false",
            f"false: a tied encoder-decoder scales its logits, unlike the decoder of {source}",
            "choose a decoder with model.tied=false or model.scaled_embedding=true",
        )


def check_initial_tokenizer(config: RunConfig, tokenizer: Path) -> None:
    """Refuse initial weights whose token ids stand for other texts than those of the new corpus.

    Weights that do not say which tokenizer they belong to are accepted. `tokenizer` is a file, or
    a folder such as that of a prepared corpus. Raises a ConfigError unless the tokenizers are equal
    or `run.allow_changes` names `data.tokenizer`, and a CheckpointError if there is no checkpoint.
    """
    run, data = config.run, config.data
    if {"data", "data.tokenizer"} & set(run.allow_changes):
        return
    found = digest_tokenizer(tokenizer)
    for key, checkpoint in _initial_weights(config):
        meta = checkpoint.manifest.meta
        wanted = meta.get("tokenizer")
        if wanted in (None, found):
            continue
        path = tokenizer_of(checkpoint.folder, meta, data.directory)
        named = path or "PATH, the tokenizer that these weights were trained with"
        allowed = ",".join([*run.allow_changes, "data.tokenizer"])
        raise ConfigError(
            "data.tokenizer",
            f"{data.tokenizer or 'null, which trained one on the text'} (digest {found[:_SHOWN]})",
            f"the tokenizer of {key}={getattr(run, key[4:])} (digest {str(wanted)[:_SHOWN]}): to "
            "the weights, the tokens of another one are other texts",
            f"set data.tokenizer={named} (without data.vocabulary); to train new embeddings for "
            f"another tokenizer: 'run.allow_changes=[{allowed}]'",
        )


def open_trained_tokenizer(config: RunConfig, weights: Path) -> "Tokenizer":
    """Open the tokenizer that weights were trained with, also if the text of the run has changed.

    `weights` is a checkpoint, or a folder that holds checkpoints. Raises a CheckpointError if there
    is none, and a FrontierError if only another tokenizer is found, or nothing to train it on.
    """
    from frontier_llm.checkpoint.discovery import find

    checkpoint = find(weights)
    meta = checkpoint.manifest.meta
    path = find_tokenizer(config, meta, checkpoint.folder)
    check_trained_with(meta, path)
    tokenizer = open_tokenizer(path, config.data.end_of_document)
    check_vocabulary(config, tokenizer)
    return tokenizer


def find_tokenizer(config: RunConfig, meta: Mapping[str, Any], checkpoint: Path) -> Path:
    """Return the tokenizer of a checkpoint; if it is not found, that of the run's configuration.

    The latter may be trained on the text of the run again. Raises a FrontierError without a text.
    """
    from frontier_llm.data.corpora import prepare_all

    if meta.get("tokenizer") and (found := tokenizer_of(checkpoint, meta, config.data.directory)):
        return found
    given = config.data.tokenizer
    return Path(given) if given else prepare_all(config.data)[0]


def check_trained_with(meta: Mapping[str, Any], tokenizer: Path) -> None:
    """Refuse another tokenizer than that of a checkpoint, if this says which one it was."""
    wanted, found = meta.get("tokenizer"), digest_tokenizer(tokenizer)
    if wanted not in (None, found):
        raise ConfigError(
            "data.tokenizer",
            f"{tokenizer} (digest {found[:_SHOWN]})",
            f"the tokenizer of the checkpoint (digest {str(wanted)[:_SHOWN]}): to the model, the "
            "tokens of another one are other texts",
            "run it in the folder where the run was started, or restore its text or its tokenizer",
        )


def tokenizer_of(checkpoint: Path, meta: Mapping[str, Any], directory: str) -> Path | None:
    """Return where the tokenizer of a checkpoint is; None if it is not found."""
    places = _possible_places(checkpoint, meta, directory)
    return next((path for path in places if _digest(path) == meta["tokenizer"]), None)


def _possible_places(checkpoint: Path, meta: Mapping[str, Any], directory: str) -> Iterator[Path]:
    """Yield its run directory, if it was imported; the file that its run has used; or corpora."""
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
