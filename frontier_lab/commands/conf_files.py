"""Write files of configuration that a command has found."""

import re
from pathlib import Path

import frontier_llm
from frontier_llm.cli.package_files import CONF_DIR_OPTION, conf_folders
from frontier_llm.errors import ConfigError


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
    if folder.is_relative_to(Path(frontier_llm.__file__).resolve().parent):
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
