"""The run directory: a lock that admits one job at a time, the configuration, and a restart."""

import errno
import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from frontier_llm.atomic_files import replace_text
from frontier_llm.checkpoint.folders import committed
from frontier_llm.config.decode import leaves
from frontier_llm.config.paths import at_home
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError, advise_to_write, print_error
from frontier_llm.saving.changes import is_within
from frontier_llm.saving.tiers import local_root, newest_folder, tiers_of
from frontier_llm.telemetry.jsonl import LEDGER, METRICS_FILE, lines_from_end, parse

_LOG = logging.getLogger(__name__)

_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # ten times as fast, if it was built
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
CONFIG = "config.yaml"
"""File with the composed configuration of the run."""
FAILURES = "failures"
"""Folder in which each failing rank writes its error."""
LOCK = ".lock"
"""Empty file that is locked while a job uses the directory."""
_WRITTEN = (CONFIG, METRICS_FILE, LEDGER, "run.log", "summary.json", "report.html")
"""Files that a run writes."""
_SPLIT = (("parallel", "pipeline"), ("parallel", "chunks"), ("model", "layers"))
"""Keys that a list of layers per stage fits."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems without locks (Lustre mounted without `flock`)."""
_END_SECONDS = 5.0
"""The longest time in which the processes of a killed run end."""


def lock_run_dir(
    path: Path,
    resume: Literal["auto", "required", "never"],
    has_checkpoint: bool,
    *,
    started_again: bool = False,
    nodes_may_have: bool = False,
    lock: bool = True,
) -> bool:
    """Lock the run directory, which is made if absent, and check that the run may start in it.

    The lock ends when this process and all processes forked from it have ended. If not `lock`, only
    the content is checked. Returns whether the run resumes from a known checkpoint.

    If Slurm has requeued the job (`started_again`), and it has trained without saving a checkpoint,
    it starts from the beginning, and its metrics and ledger are renamed. If disks of other nodes
    may hold a checkpoint (`nodes_may_have`), the ranks look for it, and call `check_new` if they
    find none. Raises a ConfigError if the folder holds another run, another run is writing to it,
    it cannot be written, or `run.resume` requires a checkpoint and there is none.
    """
    try:
        if lock:
            path.mkdir(parents=True, exist_ok=True)
            _lock(path)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(
            "run.dir", path, "a folder: a file is in the way", "choose another run.dir"
        ) from None
    except OSError as error:
        raise _not_writable(path, error) from None
    is_new = {"auto": False, "required": False, "never": True}[resume]
    if is_new and (has_checkpoint or (path / CONFIG).exists()):
        raise ConfigError(
            "run.dir",
            path,
            "a new folder, because run.resume=never: this one already holds a run",
            "choose another run.dir, remove this one if it is not needed, or set run.resume=auto "
            "to resume it",
        )
    if has_checkpoint:
        return True
    if not nodes_may_have:
        check_new(path, resume, started_again=started_again)
    return False


def check_new(
    path: Path, resume: Literal["auto", "required", "never"], *, started_again: bool
) -> None:
    """Check that a run that has no checkpoint may start (see `lock_run_dir`).

    Raises a ConfigError if the folder holds a run that has trained, `run.resume` requires a
    checkpoint, or a file cannot be renamed.
    """
    if resume == "required":
        raise ConfigError(
            "run.resume",
            "required",
            f"a checkpoint to resume from: {path} holds none",
            "check run.dir, or set run.resume=auto, which starts a new run if there is none",
        )
    metrics = path / METRICS_FILE
    has_trained = metrics.exists() and metrics.stat().st_size > 0
    if has_trained and started_again:
        _set_aside(path)
    elif has_trained:
        raise ConfigError(
            "run.dir",
            path,
            "a new folder, or a run with a checkpoint: this run has trained and saved nothing to "
            "resume from",
            "choose another run.dir, or remove this one if it is not needed; a smaller "
            "checkpoint.every_steps saves sooner (with checkpoint=off nothing is saved)",
        )
    _check_others(path)


def _check_others(path: Path) -> None:
    """Refuse a folder with files that a run would replace, and warn of other files in it."""
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    if f"{CONFIG}.sha256" in names:  # a run has written it
        return
    others = sorted(name for name in names - {LOCK, FAILURES} if not name.startswith("."))
    if taken := [name for name in others if name in _WRITTEN]:
        raise ConfigError(
            "run.dir",
            path,
            f"a folder without files of these names, which a run replaces: {', '.join(taken)}",
            "choose a new folder for run.dir",
        )
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        print_error(
            f"warning: run.dir={path} has other files, {others[0]}{more}: a run adds its own"
        )


def write_config(path: Path, text: str) -> None:
    """Write `config.yaml` and its digest in the format of sha256sum, or raise a ConfigError."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    try:
        for name, content in ((CONFIG, text), (f"{CONFIG}.sha256", f"{digest}  {CONFIG}\n")):
            replace_text(path / name, content)
    except OSError as error:
        raise _not_writable(path, error) from None


def kept_layers(config: RunConfig) -> RunConfig:
    """Return the configuration with the layers per stage of an earlier start of the run, if `auto`.

    An even split is null there, also in runs of versions without `auto`. With another pipeline or
    another model, nothing is kept.
    """
    if config.parallel.layers_per_stage != "auto":
        return config
    now, before = config.model_dump(mode="json"), last_values(Path(config.run.dir))
    try:
        layers = before["parallel"]["layers_per_stage"]
        is_other = any(before[section][key] != now[section][key] for section, key in _SPLIT)
        if is_other or isinstance(layers, str):  # a folder of a converted model has `auto`
            return config
    except (KeyError, TypeError):  # a new run
        return config
    kept = None if layers is None else tuple(layers)
    return config.changed("parallel", layers_per_stage=kept)


def refuse_other_place(config: RunConfig) -> None:
    """Refuse another place of checkpoints on the nodes, if that of the last start has later steps.

    If this node lacks the place, a later recorded step is a warning. Raises a ConfigError unless
    `run.allow_changes` names the key.
    """
    run, allowed = Path(config.run.dir), config.run.allow_changes
    old = dict(leaves(last_values(run)))
    in_memory = old.get("recovery.partner_copies") is True
    key = "recovery.copies_path" if in_memory else "checkpoint.tiers.local.path"
    place = old.get(key)
    root = local_root(config, at_home(place)) if isinstance(place, str) and place else None
    if root is None or root == local_root(config) or is_within(key, allowed):
        return
    newest = max([0, *(step for t in tiers_of(config) for step, _ in committed(t.folder))])
    steps = [step for folder in root.glob("*") for step, _ in committed(folder)]
    last = max(steps, default=recorded_steps(run))
    if last <= newest or config.run.resume == "never":
        return
    error = ConfigError(
        key,
        f"{config.checkpoint.tiers.local.path or 'null'} for checkpoints on the nodes",
        f"{place}, as in the last start: {root} {'has' if steps else 'may have'} steps up to "
        f"{last}, and without them the run goes on from step {newest}",
        f"set {'recovery.partner_copies=true ' if in_memory else ''}{key}={place}, or train these "
        f"steps again: 'run.allow_changes=[{','.join([*allowed, key])}]'",
    )
    if steps:
        raise error
    print_error(f"warning: {error}")


def last_values(path: Path) -> dict[str, Any]:
    """Return the composed values of the last start of a run; none of a new run."""
    try:
        values = from_yaml((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def to_yaml(values: Mapping[str, Any]) -> str:
    """Return composed values as YAML; keys keep the order that they have in `conf/`."""
    text: str = yaml.dump(dict(values), Dumper=_DUMPER, sort_keys=False, allow_unicode=True)
    return text


def from_yaml(text: str) -> dict[str, Any]:
    """Return the values of a text that `to_yaml` returned."""
    values: dict[str, Any] = yaml.load(text, Loader=_LOADER)
    return values


def _lock(path: Path) -> None:
    """Lock the folder. The system unlocks it when all processes that hold the file have ended."""
    file = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _wait_for_lock(file)
    except BlockingIOError:
        os.close(file)
        raise ConfigError(
            "run.dir",
            path,
            "a folder that no other run is writing to: another run is writing to this one",
            "wait until that run has ended, stop it, or choose another run.dir",
        ) from None
    except OSError as error:
        os.close(file)
        if error.errno not in _NO_LOCKS:
            raise
        _LOG.warning("%s cannot be locked: make sure that no other job writes to it", path)


def _wait_for_lock(file: int) -> None:
    """Lock a file; after a kill, the processes of the run before hold it for a moment."""
    deadline = time.monotonic() + _END_SECONDS
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def _set_aside(path: Path) -> None:
    try:
        for name in (METRICS_FILE, LEDGER):
            number = sum(1 for _ in path.glob(f"{name}.*.void"))
            if (path / name).exists():
                (path / name).rename(path / f"{name}.{number}.void")
    except OSError as error:
        raise _not_writable(path, error) from None
    _LOG.warning(
        "the run was interrupted before %s had a checkpoint: it starts again, its records are "
        "kept as *.void (a smaller checkpoint.every_steps saves sooner)",
        path,
    )


def _not_writable(path: Path, error: OSError) -> ConfigError:
    wants = f"a folder that can be written ({error.strerror})"
    return ConfigError("run.dir", path, wants, advise_to_write("run.dir", error))


def prepare_restart(config: RunConfig) -> RunConfig:
    """Prepare the run directory of a run that failed, and return the configuration of the restart.

    The restart resumes from the newest checkpoint. If the run has saved nothing, its records are
    set aside, and it starts from the beginning. Raises a FrontierError if a file cannot be renamed.
    """
    has_node_tier = config.checkpoint.tiers.local.path is not None
    if newest_folder(config) is None and not has_node_tier:
        check_new(Path(config.run.dir), "auto", started_again=True)
    return config.changed("run", resume="auto")


def recorded_steps(run: Path) -> int:
    """Return the last recorded step, or 0."""
    rows = map(parse, lines_from_end(run / METRICS_FILE))
    return next((int(row["step"]) for row in rows if row is not None), 0)
