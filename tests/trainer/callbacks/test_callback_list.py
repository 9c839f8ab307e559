"""The order in which callbacks are called, and what becomes of their errors."""

from typing import Any, cast

import pytest

from frontier_llm.errors import TrainingError
from frontier_llm.trainer.callbacks.callback import Callback
from frontier_llm.trainer.callbacks.callback_list import CallbackList


class Noted(Callback):
    """Appends its name to a list at two moments."""

    def __init__(self, name: str, calls: list[str]) -> None:
        super().__init__(cast(Any, None))
        self.name, self.calls = name, calls

    def on_step_begin(self, step: int) -> None:
        self.calls.append(self.name)

    def close(self) -> None:
        self.calls.append(self.name)


class Failing(Noted):
    error: Exception = TrainingError("the disk is full")

    def on_step_begin(self, step: int) -> None:
        raise self.error

    def on_error(self, error: BaseException) -> None:
        raise self.error

    def close(self) -> None:
        raise self.error


def test_users_callbacks_come_last_and_close_first() -> None:
    calls: list[str] = []
    callbacks = CallbackList([Noted("a", calls), Noted("b", calls)], [Noted("mine", calls)])
    callbacks.call(Callback.on_step_begin, 1)
    callbacks.close()
    assert calls == ["a", "b", "mine", "mine", "b", "a"]


def test_an_error_of_a_built_in_callback_is_unchanged() -> None:
    calls: list[str] = []
    callbacks = CallbackList([Failing("a", calls), Noted("b", calls)])
    with pytest.raises(TrainingError, match=r"^the disk is full$"):
        callbacks.call(Callback.on_step_begin, 1)
    assert calls == [], "callbacks after it are not called"


def test_a_callback_that_cannot_be_closed_leaves_none_open() -> None:
    calls: list[str] = []
    with pytest.raises(TrainingError, match="disk is full"):
        CallbackList([Noted("a", calls), Failing("b", calls), Noted("c", calls)]).close()
    assert calls == ["c", "a"]


def test_a_failure_while_an_error_is_handled_is_only_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    CallbackList([Failing("a", [])]).on_error(ValueError("the cause"))
    assert "Failing failed in on_error: the disk is full" in caplog.text


def test_a_lost_rank_is_not_blamed_on_the_callback_that_met_it() -> None:
    failing = Failing("mine", [])
    failing.error = RuntimeError("Connection closed by peer [127.0.0.1]:1234")
    with pytest.raises(RuntimeError, match=r"^Connection closed by peer"):
        CallbackList([], [failing]).call(Callback.on_step_begin, 1)
