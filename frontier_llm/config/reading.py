"""Check what a run reads: its corpora, the vocabulary, the objective, paths and callbacks."""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from frontier_llm.config.data import CORPUS_FILES, FIXED_PIECES, CorpusConfig, DataConfig
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError

TEXTS = "a file of text, JSON lines, JSON, CSV or Parquet, or a directory of them"

BLOCK = 1 << 14
"""Number of samples per block of a blend, on which their order depends (data/blend.py)."""
SEVERAL = "several corpora: data=blend 'data.corpora=[{name: a, path: A}, {name: b, path: B}]'"


def check_data(config: RunConfig) -> None:
    """Refuse a corpus without a source, or one that does not suit the model."""
    check_sources(config.data)
    _check_objective(config)
    _check_documents(config.data)
    _check_vocabulary(config)


def check_sources(data: DataConfig) -> None:
    """Refuse corpora without a source, with equal or impossible names, or with wrong weights."""
    names = [corpus.name for corpus in data.sources]
    if not names or len(set(names)) < len(names):
        raise ConfigError(
            "data.corpora",
            ", ".join(names) or "none",
            "at least one corpus, each with a different name",
            "set 'data.corpora=[{name: NAME, path: PATH}, ...]'",
        )
    for corpus in data.sources:
        if not corpus.name or corpus.name.startswith(".") or "/" in corpus.name:
            raise ConfigError(
                "data.corpora" if data.kind == "blend" else "data.name",
                repr(corpus.name),
                "a name for folders: not empty, without slashes, and not hidden by a dot",
                "choose a name such as text",
            )
        if data.kind == "blend" and corpus.kind == "stdlib":
            _refuse_own_keys(corpus)
        if corpus.kind == "text" and not corpus.path:
            key = f"data.corpora ({corpus.name})" if data.kind == "blend" else "data.path"
            raise ConfigError(
                key,
                "null",
                TEXTS,
                "set data.path=FILE" if data.kind != "blend" else "add a path to this corpus",
            )

    weights = {corpus.name: corpus.weight for corpus in data.sources}
    if any(weights.values()):
        corpus_shares(dict.fromkeys(weights, 1), weights, data.blend_alpha)


def corpus_shares(
    tokens: Mapping[str, int], weights: Mapping[str, float | None], alpha: float
) -> dict[str, float]:
    """Return the share of each corpus in the samples.

    All weights are configured, or none. Without weights a share is proportional to tokens^alpha
    (mT5, arXiv:2010.11934, section 3.2, with alpha = 0.3). Raises a ConfigError if only some
    corpora have a weight, or a share is too small.
    """
    configured = [weight for weight in weights.values() if weight is not None]
    if configured and len(configured) < len(weights):
        unweighted = ", ".join(name for name, weight in weights.items() if weight is None)
        raise ConfigError(
            "data.corpora",
            f"no weight for {unweighted}",
            "a weight for every corpus, or for none",
            "add it, or remove all weights: data.blend_alpha then decides",
        )
    relative = {name: weights[name] or float(count) ** alpha for name, count in tokens.items()}
    total = sum(relative.values())
    shares = {name: value / total for name, value in relative.items()}
    smallest = min(shares, key=lambda name: shares[name])
    if shares[smallest] * BLOCK < 1:
        raise ConfigError(
            "data.corpora",
            f"{smallest} with {shares[smallest]:.2g} of all samples",
            f"at least one sample in {BLOCK}",
            "raise its weight, or leave it out",
        )
    return shares


def _refuse_own_keys(corpus: CorpusConfig) -> None:
    """Refuse keys that only an entry with `kind: text` reads."""
    for key in ("path", "format", "text_key"):
        if (value := getattr(corpus, key)) is not None:
            raise ConfigError(
                f"data.corpora ({corpus.name})",
                f"kind: stdlib, {key}: {value}",
                f"no {key}: the sources of Python's standard library are read",
                f"leave {key} out, or leave kind out to read a path",
            )


def check_files(config: RunConfig, *, is_new: bool = True) -> None:
    """Refuse paths that do not exist on this machine; only a new run reads `run.init_from`."""
    data = config.data
    key = "data.corpora ({})" if data.kind == "blend" else "data.path"
    paths = [(key.format(c.name), c.path, TEXTS) for c in data.sources if c.kind == "text"]
    paths += [("data.tokenizer", data.tokenizer, "a file or folder of a tokenizer")]
    if is_new:
        for name in ("init_from", "init_encoder_from"):
            path = getattr(config.run, name)
            paths += [(f"run.{name}", path, "a checkpoint or a run directory")]
    run = Path(config.run.dir).resolve()
    for key, path, wants in paths:
        if wants == TEXTS and path is not None and Path(path).resolve() == run:
            raise ConfigError(
                "run.dir",
                config.run.dir,
                f"another folder than {key}: a run writes files there, which are no text",
                "choose a new folder for run.dir, for example one in the folder of the text",
            )
        if path is not None and not Path(path).exists():
            got, todo = f"{path}, which does not exist", absent_advice(key, str(path))
            if wants == TEXTS and (corpus := prepared_from(str(path), data.directory)):
                todo += f", or write {corpus} instead, which was prepared from it, and leave "
                todo += "out the keys of its preparation (data.tokenizer, data.vocabulary ...)"
            raise ConfigError(key, got, wants, todo)


def prepared_from(path: str, directory: str) -> Path | None:
    """Return the newest corpus in a directory that was prepared from a path; None without one."""
    source, found = str(Path(path).expanduser().absolute()), list[Path]()
    for manifest in Path(directory).glob(f"[!.]*-*/{CORPUS_FILES[0]}"):
        with suppress(OSError, ValueError, LookupError, TypeError):  # it may be damaged
            if json.loads(manifest.read_bytes())["source"] == source:
                found.append(manifest)
    return max(found, key=lambda file: file.stat().st_mtime).parent if found else None


def _search(module: str) -> object:
    """Return what is known of a module, or None, without importing it or a package around it."""
    if module in sys.modules:
        return sys.modules[module]
    parts = module.split(".")
    spec = find_spec(parts[0])
    for count in range(2, len(parts) + 1):
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(".".join(parts[:count]), spec.submodule_search_locations)
    return spec


def find_callbacks(
    names: Sequence[str], load: Callable[[str], Any] = _search
) -> list[tuple[Any, str]]:
    """Return what `load` returns for the module of each user's callback, and the name of its class.

    The names are `MODULE:CLASS`. The current folder is added to the end of Python's import path,
    where the installed program would not look. Raises a ConfigError if a module cannot be loaded;
    by default it is only searched, without torch.
    """
    if names and (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    found = []
    for name in names:
        module, _, class_name = name.partition(":")
        if not module or not class_name:
            todo = "set callbacks=[my_module:MyCallback]"
            raise ConfigError("callbacks", name, "MODULE:CLASS for each callback", todo)
        try:
            if (loaded := load(module)) is None:
                raise ModuleNotFoundError(f"No module named {module!r}")
        except Exception as error:  # a user's module may raise anything
            wants = f"a module that can be imported: {type(error).__name__}: {error}"
            todo = f"start from the folder that holds {module.split('.')[0]}, or set PYTHONPATH"
            raise ConfigError("callbacks", name, wants, todo) from error
        found.append((loaded, class_name))
    return found


def absent_advice(key: str, path: str) -> str:
    """Return what to do about a path that does not exist: a URL, a pattern, or a mistake."""
    if re.match(r"\w+:/+", path):
        return f"download it first, and set {key} to the file or folder: only local files are read"
    here = f"correct {key}; relative paths begin in {Path.cwd()}"
    is_file = path.endswith((".json", ".model"))
    if key == "data.tokenizer" and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) and not is_file:
        files = f"hf download {path} --include '*token*' --include '*.model' --local-dir DIR"
        return f"{here}. One of Hugging Face is downloaded first, `{files}`: then {key}=DIR"
    if key.startswith("run.init") and re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        files = f"hf download {path} --local-dir DIR"
        todo = f"downloaded, `{files}`, and converted, `frontier-llm convert --from hf DIR RUN`"
        return f"{here}. A model of Hugging Face is first {todo}: then {key}=RUN"
    if not key.startswith(("data.path", "data.corpora")):
        return here
    if re.search(r"[*?\[]", path):
        return f"patterns are not read: name the folder, whose files are all read, or use {SEVERAL}"
    if re.search(r"[,;:\s]", path):
        return f"{here}. It is one path: for more use {SEVERAL}"
    return here


def _check_objective(config: RunConfig) -> None:
    is_t5 = config.model.kind == "t5"
    objective = "spans" if is_t5 else "causal"
    if config.data.objective != objective:
        architecture = "an encoder-decoder" if is_t5 else "a decoder without an encoder"
        examples = "data=stdlib_spans or data=text_spans" if is_t5 else "data=stdlib or data=text"
        raise ConfigError(
            "data.objective",
            config.data.objective,
            f"{objective}: model={config.model.name} is {architecture}",
            f"set data.objective={objective} ({examples}), or another model",
        )


def _check_documents(data: DataConfig) -> None:
    if data.objective != "spans":
        return
    if (data.documents == "separate") != (data.packing == "best_fit"):
        is_separate = data.documents == "separate"
        key, other = ("documents", "packing") if is_separate else ("packing", "documents")
        raise ConfigError(
            f"data.{key}",
            f"{getattr(data, key)}, with data.objective=spans data.{other}={getattr(data, other)}",
            "separate with packing=best_fit, whose texts have sentinels of their own, or joined "
            "with packing=stream, whose samples are one text",
            f"set data.{other}={'best_fit' if is_separate else 'separate'} too, or leave both out",
        )
    if data.parts.text == 0:
        limit = "" if data.decoder_length is None else f", {data.decoder_length} in the decoder"
        raise ConfigError(
            "data.sequence_length",
            f"{data.sequence_length}{limit}",
            "enough tokens for a text of 2 tokens, of which one is removed, and the tokens that "
            "mark the place, the mode and the end",
            "set a length that is useful, such as data.sequence_length=512",
        )


def _check_vocabulary(config: RunConfig) -> None:
    if config.data.known_tokenizer is not None:
        return  # data/run_loader.py checks its size
    data = config.data
    reserved_ids = data.sentinels + len(data.modes)
    limit = config.model.vocabulary - reserved_ids
    if data.vocabulary > limit:
        reserved = f" less {data.sentinels} sentinels, one per span" if data.sentinels else ""
        reserved += f" and {len(data.modes)} modes" if data.modes else ""
        raise ConfigError(
            "data.vocabulary",
            data.vocabulary,
            f"at most model.vocabulary ({config.model.vocabulary}){reserved}: every token needs a "
            "row of the embedding",
            f"set model.vocabulary={data.vocabulary + reserved_ids}"
            + (f" or data.vocabulary={limit}" if limit > FIXED_PIECES else ""),
        )
