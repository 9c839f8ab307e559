"""Locate the folders `conf/` and `scripts/`, in a checkout and in an installation.

A checkout has both folders next to the package. An installed wheel has them inside the package.
"""

import os
import re
import shlex
from pathlib import Path

import frontier_llm
from frontier_llm.errors import ConfigError

CONF_DIR_OPTION = "--conf-dir"
CONF_DIR_VARIABLE = "FRONTIER_LLM_CONF_DIR"
"""Environment variable with the directory of `--conf-dir`, which child processes and Slurm jobs
inherit."""
_PACKAGE = Path(frontier_llm.__file__).resolve().parent


def package_folder(name: str) -> Path:
    """Return the folder `conf` or `scripts` that belongs to this package."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


CONF = package_folder("conf")
SCRIPTS = package_folder("scripts")


def conf_folders() -> list[Path]:
    """Return the folders with configuration files: first that of `--conf-dir`, then `conf/`."""
    of_user = os.environ.get(CONF_DIR_VARIABLE)
    return [*([Path(of_user)] if of_user else []), CONF]


def conf_dir_option() -> str:
    """Return the option `--conf-dir` with which the program finds the file; empty for `conf/`."""
    of_user = conf_folders()[:-1]
    return shlex.quote(f"{CONF_DIR_OPTION}={of_user[0]}") + " " if of_user else ""


def conf_file(group: str, name: str) -> Path:
    """Return the file GROUP/NAME.yaml of the first folder that has it."""
    files = [folder / group / f"{name}.yaml" for folder in conf_folders()]
    return next((file for file in files if file.exists()), files[-1])


def new_conf_file(group: str, name: str, option: str, mark: str, wants: str) -> Path:
    """Return the path under which a command writes a configuration file; make its folder.

    Args:
        option: option of the command that asks for the file; the error message names it.
        mark: words of the files that the command has written and may replace.
        wants: names that are accepted.

    Raises:
        ConfigError: the name is not valid or belongs to another file. Or the program is installed
            without `--conf-dir`: an upgrade would remove what was written into the installation.
    """
    if not re.fullmatch(r"\w[\w-]*", name):
        raise ConfigError(option, name, wants, "choose another name")
    folder = conf_folders()[0]
    if folder.is_relative_to(_PACKAGE):
        wants = "a configuration directory of yours: this program is installed, not a checkout"
        todo = f"write frontier-llm {CONF_DIR_OPTION} DIR ..., where DIR is an existing directory"
        raise ConfigError(option, f"{name}, without {CONF_DIR_OPTION}", wants, todo)
    path = folder / group / f"{name}.yaml"
    try:
        if path.exists() and mark not in path.read_text():
            raise ConfigError(option, name, wants, "choose another name")
        path.parent.mkdir(exist_ok=True)
        if not path.exists():  # tried before the work, of which it has the result
            path.touch()
            path.unlink()
    except OSError as error:
        wants = f"a file that can be written: {path} is none ({error.strerror})"
        todo = f"choose another name, or {CONF_DIR_OPTION}"
        raise ConfigError(option, name, wants, todo) from None
    return path
