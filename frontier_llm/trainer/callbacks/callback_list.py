"""The callbacks of a run, built-in and those of the user, and their order."""

import importlib
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from frontier_llm.errors import ConfigError, TrainingError
from frontier_llm.launch.failure import is_lost_contact
from frontier_llm.trainer.callbacks.callback import Callback, Rewind, StepEnd
from frontier_llm.trainer.callbacks.measurements import (
    KernelTrial,
    PipelineTimeline,
    PlanCheck,
    Tracer,
)
from frontier_llm.trainer.callbacks.records import (
    Ledger,
    MetricsFile,
    ProgressBar,
    TensorBoard,
    WeightsAndBiases,
)
from frontier_llm.trainer.callbacks.run_checks import CorpusIntegrity, Divergence, Stragglers
from frontier_llm.trainer.callbacks.run_report import Announcements, RunReport
from frontier_llm.trainer.checkpoints import CommittedCheckpoint
from frontier_llm.trainer.context import TrainerContext
from frontier_llm.trainer.resume import Resumed
from frontier_llm.trainer.step_result import StepResult

_LOG = logging.getLogger(__name__)

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


class CallbackList(Callback):
    """Calls the built-in callbacks and then the callbacks of the user, in the order given.

    The order is the same on all ranks, so that the collectives of callbacks run in the same order.
    Only `close` calls the callbacks in reverse order. An error of a built-in callback is raised
    unchanged. An error of a user's callback becomes a `TrainingError` that names the callback.
    """

    def __init__(self, built_in: Sequence[Callback], users: Sequence[Callback] = ()) -> None:
        self._callbacks, self._users = [*built_in, *users], tuple(users)

    def on_start(self, validation_loss: float, resumed: Resumed | None) -> None:
        """Call `on_start` of all callbacks."""
        self._call("on_start", lambda callback: callback.on_start(validation_loss, resumed))

    def on_replacement(self, last_step: int) -> None:
        """Call `on_replacement` of all callbacks."""
        self._call("on_replacement", lambda callback: callback.on_replacement(last_step))

    def on_step_begin(self, step: int) -> None:
        """Call `on_step_begin` of all callbacks."""
        self._call("on_step_begin", lambda callback: callback.on_step_begin(step))

    def on_update(self, step: int, first_sample: int, result: StepResult) -> None:
        """Call `on_update` of all callbacks."""
        self._call("on_update", lambda callback: callback.on_update(step, first_sample, result))

    def on_evaluation(self, step: int, validation_loss: float) -> None:
        """Call `on_evaluation` of all callbacks."""
        self._call("on_evaluation", lambda callback: callback.on_evaluation(step, validation_loss))

    def on_step_end(self, end: StepEnd) -> None:
        """Call `on_step_end` of all callbacks."""
        self._call("on_step_end", lambda callback: callback.on_step_end(end))

    def on_checkpoint_begin(self, step: int) -> None:
        """Call `on_checkpoint_begin` of all callbacks."""
        self._call("on_checkpoint_begin", lambda callback: callback.on_checkpoint_begin(step))

    def on_checkpoint_committed(self, checkpoint: CommittedCheckpoint) -> None:
        """Call `on_checkpoint_committed` of all callbacks."""
        self._call(
            "on_checkpoint_committed", lambda callback: callback.on_checkpoint_committed(checkpoint)
        )

    def on_rewind(self, rewind: Rewind) -> None:
        """Call `on_rewind` of all callbacks."""
        self._call("on_rewind", lambda callback: callback.on_rewind(rewind))

    def on_stop(self, *, is_early: bool) -> None:
        """Call `on_stop` of all callbacks."""
        self._call("on_stop", lambda callback: callback.on_stop(is_early=is_early))

    def on_error(self, error: BaseException) -> None:
        """Call `on_error` of all callbacks. Their own failures are only logged."""
        for callback in self._callbacks:
            try:
                callback.on_error(error)
            except Exception as failure:
                _LOG.warning("%s failed in on_error: %s", name_of(type(callback)), failure)

    @contextmanager
    def ending(self, outlives: Callable[[BaseException], bool]) -> Iterator[None]:
        """Close all callbacks at the end; before, tell them of an error that ends the process."""
        try:
            yield
        except BaseException as error:
            if not outlives(error):
                self.on_error(error)
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Close all callbacks, even if some of them fail; then raise the first failure."""
        failures: list[Exception] = []
        for callback in reversed(self._callbacks):
            try:
                callback.close()
            except Exception as error:
                failures.append(self._error_to_raise(callback, "close", error))
        if failures:
            raise failures[0]

    def _call(self, moment: str, action: Callable[[Callback], None]) -> None:
        for callback in self._callbacks:
            try:
                action(callback)
            except Exception as error:
                to_raise = self._error_to_raise(callback, moment, error)
                if to_raise is error:
                    raise
                raise to_raise from error

    def _error_to_raise(self, callback: Callback, moment: str, error: Exception) -> Exception:
        """Return the error that ends the run when a callback raises `error`."""
        if callback not in self._users or is_lost_contact(error):
            return error  # if a rank is lost, the callback is not at fault
        return callback_error(type(callback), moment, error)


def make_callbacks(context: TrainerContext) -> CallbackList:
    """Make the built-in callbacks of a rank, and after them the callbacks of the user.

    Raises:
        ConfigError: a callback that the configuration names cannot be imported.
        TrainingError: a user's callback cannot be constructed, or metrics.jsonl cannot be opened.
    """
    report = RunReport(context)
    built_in: list[Callback] = [
        Ledger(context),
        PlanCheck(context),
        PipelineTimeline(context),
        MetricsFile(context),
        ProgressBar(context),
        WeightsAndBiases(context),
        TensorBoard(context),
        KernelTrial(context),
        Stragglers(context),
        Tracer(context),
        report,
        Announcements(context, report),
        CorpusIntegrity(context),
        Divergence(context),
    ]
    return CallbackList(built_in, make_user_callbacks(context))
