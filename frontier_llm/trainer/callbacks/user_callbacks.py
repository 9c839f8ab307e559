"""Imports the callbacks that a user names in the configuration: `callbacks=[my_module:MyCallback]`.

docs/extending.md shows how to write a callback.
"""

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

    The current folder is added to the end of Python's import path. Otherwise the installed program
    (`frontier-llm`) would not find modules there.

    Args:
        names: `MODULE:CLASS` of each callback.

    Raises:
        ConfigError: a module cannot be imported, or has no subclass of `Callback` of this name.
    """
    if names and (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    return [_import_class(name) for name in names]


def make_user_callbacks(context: TrainerContext) -> list[Callback]:
    """Make the user's callbacks of a rank, in the order of the configuration.

    Raises:
        ConfigError: a class cannot be imported.
        TrainingError: a constructor raised an error. The message names the callback.
    """
    callbacks = []
    for callback_class in import_callbacks(context.config.callbacks):
        try:
            callbacks.append(callback_class(context))
        except Exception as error:  # a user's callback may raise anything
            raise callback_error(callback_class, "__init__", error) from error
    return callbacks


def name_of(callback_class: type[Callback]) -> str:
    """Return the name of a callback in the format of the configuration: `MODULE:CLASS`."""
    return f"{callback_class.__module__}:{callback_class.__qualname__}"


def callback_error(callback_class: type[Callback], moment: str, error: Exception) -> TrainingError:
    """Return the error that ends a run whose callback has raised `error`.

    Args:
        callback_class: class of the callback.
        moment: name of the method that raised the error.
        error: the error.
    """
    place = traceback.extract_tb(error.__traceback__)[-1]
    return TrainingError(
        f"the callback {name_of(callback_class)} failed in {moment}\n"
        f"  got:    {type(error).__name__}: {error} ({place.filename}:{place.lineno})\n"
        f"  wants:  {moment} to return without an error\n"
        "  do:     correct the callback, or remove it from callbacks=[...]"
    )


def _import_class(name: str) -> type[Callback]:
    """Import one class, given as `MODULE:CLASS`."""
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        raise ConfigError(
            _KEY, name, "MODULE:CLASS for each callback", "set callbacks=[my_module:MyCallback]"
        )
    module = _import_module(name, module_name)
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


def _import_module(name: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(
            _KEY,
            name,
            f"a module that can be imported: {type(error).__name__}: {error}",
            f"start from the folder that holds {module_name.partition('.')[0]}, or set PYTHONPATH",
        ) from error
