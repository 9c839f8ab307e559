"""Callbacks that a user names in the configuration: `callbacks=[my_module:MyCallback]`."""

import importlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from frontier_llm.errors import ConfigError, TrainingError
from frontier_llm.trainer.callbacks.callback import Callback
from frontier_llm.trainer.context import TrainerContext

_KEY = "callbacks"


def import_callbacks(names: Sequence[str]) -> list[type[Callback]]:
    """Import the classes of a user's callbacks.

    The current folder is added to the end of the import path, because a program that is installed
    (`frontier-llm`) does not look there.

    Args:
        names: `MODULE:CLASS`, one per callback.

    Raises:
        ConfigError: a module cannot be imported, or holds no such subclass of `Callback`.
    """
    if names and (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    return [_class(name) for name in names]


def make_user_callbacks(context: TrainerContext) -> list[Callback]:
    """Make the user's callbacks of a rank, in the order of the configuration.

    Raises:
        ConfigError: a class cannot be imported.
        TrainingError: a constructor raised an error; names the callback.
    """
    made = []
    for kind in import_callbacks(context.config.callbacks):
        try:
            made.append(kind(context))
        except Exception as error:  # a user's callback may raise anything
            raise callback_error(kind, "__init__", error) from error
    return made


def name_of(kind: type[Callback]) -> str:
    """Return the name of a callback as the configuration has it: `MODULE:CLASS`."""
    return f"{kind.__module__}:{kind.__qualname__}"


def callback_error(kind: type[Callback], moment: str, error: Exception) -> TrainingError:
    """Return the error that ends a run whose callback has raised `error`."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return TrainingError(
        f"the callback {name_of(kind)} failed in {moment}\n"
        f"  got:    {type(error).__name__}: {error} ({place.filename}:{place.lineno})\n"
        f"  wants:  {moment} to return without an error\n"
        "  do:     correct the callback, or remove it from callbacks=[...]"
    )


def _class(name: str) -> type[Callback]:
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        raise ConfigError(
            _KEY, name, "MODULE:CLASS for each callback", "set callbacks=[my_module:MyCallback]"
        )
    module = _module(name, module_name)
    found = getattr(module, class_name, None)
    if isinstance(found, type) and issubclass(found, Callback):
        return found
    raise ConfigError(
        _KEY,
        name,
        f"a subclass of {Callback.__module__}.{Callback.__name__}: {class_name} in "
        f"{module.__file__} is {'not there' if found is None else 'not a subclass of it'}",
        "correct the name of the class, or let it inherit from Callback",
    )


def _module(name: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(
            _KEY,
            name,
            f"a module that can be imported: {type(error).__name__}: {error}",
            f"start from the folder that holds {module_name.partition('.')[0]}, or set PYTHONPATH",
        ) from error
