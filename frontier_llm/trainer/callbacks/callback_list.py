"""Passes each moment of a run to all callbacks of a rank."""

import logging
from collections.abc import Callable, Sequence

from frontier_llm.launch.failure import is_lost_contact
from frontier_llm.trainer.callbacks.callback import Callback, Rewind, StepEnd
from frontier_llm.trainer.callbacks.user_callbacks import callback_error, name_of
from frontier_llm.trainer.checkpoint_listener import CommittedCheckpoint
from frontier_llm.trainer.resume import Resumed
from frontier_llm.trainer.step_result import StepResult

_LOG = logging.getLogger(__name__)


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
