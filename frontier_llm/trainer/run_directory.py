"""The folder of one run: one job at a time writes there, with the configuration it began with."""

import errno
import fcntl
import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from frontier_llm.errors import ConfigError, FrontierError
from frontier_llm.telemetry.jsonl import METRICS_FILE
from frontier_llm.trainer.ledger import LEDGER

_LOG = logging.getLogger(__name__)

CONFIG = "config.yaml"
FAILURES = "failures"
LOCK = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What file systems say that cannot lock (Lustre mounted without `flock`): we do without."""


def claim(
    path: Path,
    resume: Literal["auto", "required", "never"],
    has_checkpoint: bool,
    *,
    started_again: bool = False,
) -> bool:
    """Take the folder of a run for this process and those it forks, until they end.

    Args:
        path: the folder, made if absent.
        resume: `run.resume`.
        has_checkpoint: whether there is one to go on from.
        started_again: whether Slurm has requeued the job: nobody is there to ask, and a run that
            has saved nothing begins again, its records set aside.

    Returns:
        Whether a run goes on; else a new one begins.

    Raises:
        ConfigError: on run.dir: another run is there, is at work there, or a file is in the way;
            on run.resume: there is nothing to go on from.
        FrontierError: the folder cannot be made or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        _lock(path)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(
            "run.dir", path, "a folder: a file is in the way", "choose another run.dir"
        ) from None
    except OSError as error:
        raise _not_writable(path, error) from None
    if resume == "never" and (path / CONFIG).exists():
        raise _used(path)
    if has_checkpoint:
        if resume == "never":
            raise _used(path)
        return True
    if resume == "required":
        raise ConfigError(
            "run.resume",
            "required",
            f"a checkpoint to go on from: {path} holds none",
            "look at run.dir; run.resume=auto begins a new run where there is none",
        )
    if _has_content(path / METRICS_FILE) and started_again:
        _set_aside(path)
    elif _has_content(path / METRICS_FILE):
        raise ConfigError(
            "run.dir",
            path,
            "a new folder, or a run with a checkpoint: this one has trained and saved nothing to "
            "go on from",
            "choose another run.dir, or remove that folder if nobody needs it; a smaller "
            "checkpoint.every_steps saves sooner",
        )
    return False


def write_config(path: Path, text: str) -> None:
    """Write `config.yaml` and its digest `config.yaml.sha256` (as sha256sum writes it).

    Raises:
        FrontierError: the files cannot be written.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()
    try:
        for name, content in ((CONFIG, text), (f"{CONFIG}.sha256", f"{digest}  {CONFIG}\n")):
            partial = path / f"{name}.partial"
            partial.write_text(content)
            partial.replace(path / name)
    except OSError as error:
        raise _not_writable(path, error) from None


def to_yaml(values: Mapping[str, Any]) -> str:
    """Write composed values as YAML, in the order of `conf/`."""
    text: str = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)
    return text


def from_yaml(text: str) -> dict[str, Any]:
    """Read what `to_yaml` wrote."""
    values: dict[str, Any] = yaml.safe_load(text)
    return values


def _lock(path: Path) -> None:
    """Lock the folder until all processes that hold the lock's file are gone, however they end."""
    file = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise ConfigError(
            "run.dir",
            path,
            "a folder that no other run is writing to: one is at work there",
            "wait until it has ended, stop it, or choose another run.dir",
        ) from None
    except OSError as error:
        os.close(file)
        if error.errno not in _NO_LOCKS:
            raise
        _LOG.warning("%s cannot be locked: see to it that no other job writes there", path)


def _set_aside(path: Path) -> None:
    """Rename the records of a run that left no states.

    Raises:
        FrontierError: they cannot be renamed.
    """
    try:
        for name in (METRICS_FILE, LEDGER):
            number = sum(1 for _ in path.glob(f"{name}.*.void"))
            if (path / name).exists():
                (path / name).rename(path / f"{name}.{number}.void")
    except OSError as error:
        raise _not_writable(path, error) from None
    _LOG.warning(
        "the job was started again before %s had a checkpoint: the run begins again, what it wrote "
        "is kept in *.void (a smaller checkpoint.every_steps saves sooner)",
        path,
    )


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _used(path: Path) -> ConfigError:
    return ConfigError(
        "run.dir",
        path,
        "a new folder, since run.resume=never: this one holds a run already",
        "choose another run.dir, remove that folder if nobody needs it, or set run.resume=auto "
        "to go on with it",
    )


def _not_writable(path: Path, error: OSError) -> FrontierError:
    return FrontierError(
        f"the run directory {path} cannot be written ({error.strerror}): choose another run.dir, "
        "or ask for the permission"
    )
