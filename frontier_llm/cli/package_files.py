"""Locate the folders `conf/` and `scripts/`, in a checkout and in an installation.

A checkout has both folders next to the package. An installed wheel has them inside the package.
"""

import os
import shlex
from pathlib import Path

import frontier_llm

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
