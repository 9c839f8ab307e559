"""The callbacks of a run, built-in and those of the user, and their order.

A user names callbacks in the configuration: `callbacks=[my_module:MyCallback]`. docs/extending.md
shows how to write one.
"""

import importlib
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Concatenate, ParamSpec

from frontier_llm.config.reading import find_callbacks
from frontier_llm.errors import ConfigError, TrainingError
from frontier_llm.launch.failure import is_lost_contact
from frontier_llm.trainer.callbacks.callback import Callback
from frontier_llm.trainer.callbacks.measurements import (
    KernelTrial,
    PipelineTimeline,
    PlanCheck,
    Tracer,
)
from frontier_llm.trainer.callbacks.records import ConsoleAndTrackers, Ledger, MetricsFile
from frontier_llm.trainer.callbacks.run_checks import (
    CorpusIntegrity,
    Divergence,
    FiniteModel,
    Stragglers,
)
from frontier_llm.trainer.callbacks.run_report import Announcements, RunReport
from frontier_llm.trainer.context import TrainerContext

_LOG = logging.getLogger(__name__)
Arguments = ParamSpec("Arguments")
"""Arguments of one method of a callback."""


class CallbackList:
    """Calls the built-in callbacks and then the callbacks of the user, in the order given.

    The order is the same on all ranks, so that the collectives of callbacks run in the same order.
    Only `close` calls the callbacks in reverse order. An error of a built-in callback is raised
    unchanged. An error of a user's callback becomes a `TrainingError` that names the callback.
    """

    def __init__(self, built_in: Sequence[Callback], users: Sequence[Callback] = ()) -> None:
        self._callbacks, self._users = [*built_in, *users], tuple(users)

    def call(
        self,
        moment: Callable[Concatenate[Callback, Arguments], None],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> None:
        """Call a method of all callbacks, for example `Callback.on_step_begin`."""
        name = moment.__name__
        for callback in self._callbacks:
            try:
                getattr(callback, name)(*args, **kwargs)
            except Exception as error:
                to_raise = self._error_to_raise(callback, name, error)
                if to_raise is error:
                    raise
                raise to_raise from error

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

    def on_error(self, error: BaseException) -> None:
        """Call `on_error` of all callbacks. Their own failures are only logged."""
        for callback in self._callbacks:
            try:
                callback.on_error(error)
            except Exception as failure:
                _LOG.warning("%s failed in on_error: %s", _name_of(type(callback)), failure)

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

    def _error_to_raise(self, callback: Callback, moment: str, error: Exception) -> Exception:
        if callback not in self._users or is_lost_contact(error):
            return error  # if a rank is lost, the callback is not at fault
        return _callback_error(type(callback), moment, error)


def make_callbacks(context: TrainerContext) -> CallbackList:
    """Make the built-in callbacks of a rank, and after them the callbacks of the user.

    The order must be the same on all ranks: if two callbacks run collectives in another order on
    one rank, the run hangs. It is therefore fixed here; callbacks that only rank 0 has run no
    collectives. These are the reasons for it:

    - `PlanCheck` adds the comparison with the plan to the metrics, so it comes before the callbacks
      that write metrics.
    - `MetricsFile` comes before `ConsoleAndTrackers`, so that these show no step that is not
      recorded, or waits for space to be.
    - `PipelineTimeline` logs a line after those of `PlanCheck`, before the console shows the step.
    - The console removes its live line before `Announcements` prints the last lines.
    - `Tracer` ends its trace before `RunReport` samples text, so that the trace has only training.
    - `CorpusIntegrity` and `FiniteModel` end the run before `RunReport` says that all is well, and
      samples text from a model that has none.
    - `Announcements` prints the summary that `RunReport` has written.
    - `CorpusIntegrity`, `FiniteModel` and `Divergence` may end the run, so they come after the
      callbacks that record the step.

    Raises a ConfigError if a callback that the configuration names cannot be imported, and a
    TrainingError if a user's callback cannot be constructed, or metrics.jsonl cannot be opened.
    """
    is_first, report = context.world.rank == 0, RunReport(context)
    built_in: list[Callback] = [
        *([Ledger(context), PlanCheck(context)] if is_first else []),
        PipelineTimeline(context),
        *([MetricsFile(context), ConsoleAndTrackers(context)] if is_first else []),
        KernelTrial(context),
        Stragglers(context),
        Tracer(context),
        CorpusIntegrity(context),
        FiniteModel(context),
        report,
        *([Announcements(context, report)] if is_first else []),
        Divergence(context),
    ]
    users = []
    for callback_class in import_callbacks(context.config.callbacks):
        try:
            users.append(callback_class(context))
        except Exception as error:  # a user's callback may raise anything
            raise _callback_error(callback_class, "__init__", error) from error
    return CallbackList(built_in, users)


def import_callbacks(names: Sequence[str]) -> list[type[Callback]]:
    """Import the classes of a user's callbacks, given as `MODULE:CLASS`.

    Raises a ConfigError if a module cannot be imported, or has no such subclass of `Callback`.
    """
    modules = find_callbacks(names, importlib.import_module)
    return [_class_of(name, *found) for name, found in zip(names, modules, strict=True)]


def _class_of(name: str, module: ModuleType, class_name: str) -> type[Callback]:
    found = getattr(module, class_name, None)
    if isinstance(found, type) and issubclass(found, Callback):
        return found
    raise ConfigError(
        "callbacks",
        name,
        f"a subclass of {Callback.__module__}.{Callback.__name__}: {class_name} in "
        f"{module.__file__} is {'not there' if found is None else 'not a subclass of it'}",
        "correct the name of the class, or let it inherit from Callback",
    )


def _name_of(callback_class: type[Callback]) -> str:
    return f"{callback_class.__module__}:{callback_class.__qualname__}"


def _callback_error(callback_class: type[Callback], moment: str, error: Exception) -> TrainingError:
    """Return the error that ends a run whose callback has raised `error` in a method."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return TrainingError(
        f"the callback {_name_of(callback_class)} failed in {moment}\n"
        f"  got:    {type(error).__name__}: {error} ({place.filename}:{place.lineno})\n"
        f"  wants:  {moment} to return without an error\n"
        "  do:     correct the callback, or remove it from callbacks=[...]"
    )
