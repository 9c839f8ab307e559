"""Calls all callbacks of a rank, one moment after the other."""

import logging
from collections.abc import Callable, Sequence

from frontier_llm.launch.failure import is_lost_contact
from frontier_llm.trainer.callbacks.callback import Callback, Rewind, StepEnd
from frontier_llm.trainer.callbacks.user_callbacks import callback_error, name_of
from frontier_llm.trainer.checkpoints import CommittedCheckpoint
from frontier_llm.trainer.resume import Resumed
from frontier_llm.trainer.step import StepResult

_LOG = logging.getLogger(__name__)


class CallbackList(Callback):
    """Calls the built-in callbacks and then the user's, in the order given.

    The order is the same on all ranks, because collectives of two callbacks must not be swapped on
    one rank. `close` runs in reverse order. An error of a built-in callback leaves unchanged; an
    error of a user's callback becomes a `TrainingError` that names the callback.
    """

    def __init__(self, built_in: Sequence[Callback], users: Sequence[Callback] = ()) -> None:
        self._callbacks, self._users = [*built_in, *users], tuple(users)

    def on_start(self, validation_loss: float, resumed: Resumed | None) -> None:
        """Call `on_start` of all callbacks."""
        self._call("on_start", lambda each: each.on_start(validation_loss, resumed))

    def on_step_begin(self, step: int) -> None:
        """Call `on_step_begin` of all callbacks."""
        self._call("on_step_begin", lambda each: each.on_step_begin(step))

    def on_update(self, step: int, first_sample: int, result: StepResult) -> None:
        """Call `on_update` of all callbacks."""
        self._call("on_update", lambda each: each.on_update(step, first_sample, result))

    def on_evaluation(self, step: int, validation_loss: float) -> None:
        """Call `on_evaluation` of all callbacks."""
        self._call("on_evaluation", lambda each: each.on_evaluation(step, validation_loss))

    def on_step_end(self, end: StepEnd) -> None:
        """Call `on_step_end` of all callbacks."""
        self._call("on_step_end", lambda each: each.on_step_end(end))

    def on_checkpoint_begin(self, step: int) -> None:
        """Call `on_checkpoint_begin` of all callbacks."""
        self._call("on_checkpoint_begin", lambda each: each.on_checkpoint_begin(step))

    def on_checkpoint_committed(self, checkpoint: CommittedCheckpoint) -> None:
        """Call `on_checkpoint_committed` of all callbacks."""
        self._call("on_checkpoint_committed", lambda each: each.on_checkpoint_committed(checkpoint))

    def on_rewind(self, rewind: Rewind) -> None:
        """Call `on_rewind` of all callbacks."""
        self._call("on_rewind", lambda each: each.on_rewind(rewind))

    def on_stop(self, *, is_early: bool) -> None:
        """Call `on_stop` of all callbacks."""
        self._call("on_stop", lambda each: each.on_stop(is_early=is_early))

    def on_error(self, error: BaseException) -> None:
        """Call `on_error` of all callbacks; their failures are logged, so that `error` is shown."""
        for callback in self._callbacks:
            try:
                callback.on_error(error)
            except Exception as failure:
                _LOG.warning("%s failed in on_error: %s", name_of(type(callback)), failure)

    def close(self) -> None:
        """Close all callbacks, also those after one that fails; then raise the first failure."""
        failures: list[Exception] = []
        for callback in reversed(self._callbacks):
            try:
                callback.close()
            except Exception as error:
                failures.append(self._named(callback, "close", error))
        if failures:
            raise failures[0]

    def _call(self, moment: str, action: Callable[[Callback], None]) -> None:
        for callback in self._callbacks:
            try:
                action(callback)
            except Exception as error:
                named = self._named(callback, moment, error)
                if named is error:
                    raise
                raise named from error

    def _named(self, callback: Callback, moment: str, error: Exception) -> Exception:
        """Return the error that ends the run when a callback raises `error`."""
        if callback not in self._users or is_lost_contact(error):
            return error  # after a lost rank, the error of that rank is the one to show
        return callback_error(type(callback), moment, error)
