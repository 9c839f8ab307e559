"""Which of many failures is the cause, and the message about it."""

from pathlib import Path

import pytest
from torch.distributed import DistBackendError, DistStoreError

from frontier_llm.errors import ConfigError, DataError, RankFailure, StopRequested
from frontier_llm.launch import failure
from frontier_llm.launch.rendezvous import RankZeroLostError

PEER_LOST = RuntimeError(
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer "
    "[127.0.0.1]:5034"
)
TIMEOUT = RuntimeError("[.../unbound_buffer.cc:78] Timed out waiting 1000ms for recv operation")


def _caught(rank, error):
    try:
        raise error
    except BaseException as caught:
        return failure.from_exception(rank, caught)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (DataError("no corpus"), "user"),
        (ConfigError("key", 1, 2, "do"), "user"),
        (ValueError("a bug"), "error"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "error"),
        (FileNotFoundError("gone"), "error"),
        (PEER_LOST, "lost_contact"),
        (ConnectionResetError("[Errno 104] Connection reset by peer"), "lost_contact"),
        (RankFailure("rank 1 failed"), "lost_contact"),
        (RankZeroLostError("rank 0's store is gone"), "lost_contact"),
        (
            DistBackendError("NCCL error: remote process exited or there was a network error"),
            "lost_contact",
        ),
        (DistStoreError("failed to recv, got 0 bytes"), "lost_contact"),
        (TIMEOUT, "timeout"),
        (StopRequested("stopped"), "stopped"),
    ],
)
def test_kinds(error, kind):
    assert _caught(0, error).kind == kind


def test_a_user_error_explains_all_others():
    found = [
        _caught(0, PEER_LOST),
        _caught(1, ValueError("a bug")),
        _caught(2, DataError("no corpus")),
        failure.died(3, -9, 0.0),
    ]
    assert failure.cause(found).rank == 2


def test_the_earlier_of_a_bug_and_a_death_is_the_cause():
    bug = _caught(0, ValueError("a bug"))
    assert failure.cause([bug, failure.died(1, -9, bug.seconds - 1)]).rank == 1
    assert failure.cause([failure.died(1, -6, bug.seconds + 1), bug]).rank == 0


def test_losing_a_peer_is_never_the_cause_when_there_is_another():
    lost, stop = _caught(0, PEER_LOST), _caught(2, StopRequested("stopped"))
    assert failure.cause([lost, failure.died(1, 7, lost.seconds + 1)]).rank == 1
    assert failure.cause([stop, lost]).rank == 0


def test_rank_zero_explains_a_request_to_stop():
    later = _caught(1, StopRequested("another rank was asked"))
    assert failure.cause([later, _caught(0, StopRequested("file STOP"))]).rank == 0


def test_exit_codes_are_those_of_the_errors():
    assert _caught(0, ConfigError("key", 1, 2, "do")).exit_code == 2
    assert _caught(0, StopRequested("stopped")).exit_code == 3
    assert _caught(0, ValueError("a bug")).exit_code == 1


def test_ranks_that_all_waited_were_at_different_collectives():
    found = [_caught(rank, TIMEOUT) for rank in range(3)]
    text = failure.explain(failure.cause(found), found, 3, Path("failures"))
    assert "ranks 0, 1, 2 waited, every rank waited" in text
    assert "launch.timeout_seconds" in text


def test_a_rank_without_a_failure_is_named_by_the_others():
    found = [_caught(rank, PEER_LOST) for rank in (0, 1, 3)]
    text = failure.explain(failure.cause(found), found, 4, Path("failures"))
    assert text.startswith("ranks 0, 1, 3 lost contact with rank 2, which left no error message")


def test_tracebacks_are_named_only_if_there_are_any():
    killed = failure.died(1, -9, 0.0)
    assert "tracebacks" not in failure.explain(killed, [killed], 2, Path("failures"))
    text = failure.explain(killed, [killed, _caught(0, PEER_LOST)], 2, Path("failures"))
    assert "(tracebacks of all ranks: failures)" in text


def test_files_are_read_back_as_they_were_written(tmp_path):
    found = [_caught(1, ValueError("a bug")), _caught(0, PEER_LOST)]
    for failed in found:
        failure.write(failed, tmp_path)
    assert failure.read_all(tmp_path) == found[::-1]
    assert "a bug" in found[0].traceback
    failure.clear(tmp_path)
    assert failure.read_all(tmp_path) == []


def test_only_one_rank_prints_the_full_report(tmp_path):
    assert failure.claim_report(3, tmp_path)
    assert not failure.claim_report(1, tmp_path)


def test_a_consequence_does_not_replace_the_cause(tmp_path: Path) -> None:
    """The watchdog's thread writes the cause; then the main thread loses contact."""
    stall, lost = _caught(1, DataError("stall: late: rank 3")), _caught(1, PEER_LOST)
    failure.write(stall, tmp_path)
    failure.write(lost, tmp_path)
    assert failure.read_all(tmp_path) == [stall]
    failure.write(_caught(2, PEER_LOST), tmp_path)
    bug = _caught(2, ValueError("a bug"))
    failure.write(bug, tmp_path)
    assert failure.read_all(tmp_path) == [stall, bug]
