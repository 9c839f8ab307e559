import threading
from contextlib import closing

import numpy as np
import pytest
import torch

from frontier_llm.data.batch import Batch
from frontier_llm.data.loader import BatchLoader, Reading
from frontier_llm.data.prepared_corpus import Corpus, Samples
from tests.patience import patient

GLOBAL_BATCH = 24


@pytest.fixture
def samples(corpus: Corpus) -> Samples:
    return Samples(corpus.train, 16, seed=1, digest=corpus.manifest.digest)


def rows(batches: list[Batch]) -> set[bytes]:
    return {row.numpy().tobytes() for batch in batches for row in batch.tokens}


def load(samples: Samples, step: int, micro_batch: int, data_size: int) -> list[list[Batch]]:
    """Return the micro-batches of each replica."""
    result = []
    for rank in range(data_size):
        with closing(BatchLoader(samples, GLOBAL_BATCH, micro_batch, rank, data_size)) as loader:
            result.append(loader.micro_batches(step * GLOBAL_BATCH))
    return result


@pytest.mark.parametrize(("micro_batch", "data_size"), [(1, 1), (2, 3), (3, 8), (24, 1), (4, 2)])
def test_a_step_reads_the_same_samples_in_any_layout(
    samples: Samples, micro_batch: int, data_size: int
):
    for step in (0, 5):
        replicas = load(samples, step, micro_batch, data_size)
        micro_batches = GLOBAL_BATCH // micro_batch // data_size
        assert [len(batches) for batches in replicas] == [micro_batches] * data_size
        # in the order of micro-batches and, within one, of replicas, they are the plain sequence
        seen = [batch.tokens for batches in zip(*replicas, strict=True) for batch in batches]
        wanted = [samples[step * GLOBAL_BATCH + i][:-1] for i in range(GLOBAL_BATCH)]
        assert np.array_equal(torch.cat(seen).numpy(), np.stack(wanted))


def test_replicas_share_no_sample(samples: Samples):
    replicas = [rows(batches) for batches in load(samples, 3, 2, 4)]
    assert sum(map(len, replicas)) == len(set.union(*replicas)) == GLOBAL_BATCH


def test_labels_are_the_next_tokens(samples: Samples):
    (batches,) = load(samples, 0, 4, 1)
    for number, batch in enumerate(batches):
        assert batch.samples == 4
        assert batch.tokens.shape == batch.labels.shape == batch.positions.shape == (4, 16)
        assert {batch.tokens.dtype, batch.labels.dtype, batch.positions.dtype} == {torch.int64}
        assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
        assert batch.labels[2, -1] == samples[number * 4 + 2][-1]
        assert batch.positions[3].tolist() == list(range(16))


def test_a_batch_is_copied_to_a_device(samples: Samples):
    (batches,) = load(samples, 0, 4, 1)
    copied = batches[0].to(torch.device("meta"))
    assert {copied.tokens.device.type, copied.labels.device.type, copied.positions.device.type} == {
        "meta"
    }
    assert copied.samples == 4


def test_a_step_may_cross_the_end_of_an_epoch(samples: Samples):
    step = len(samples) // GLOBAL_BATCH
    assert len(samples) % GLOBAL_BATCH
    (batches,) = load(samples, step, 4, 1)
    wanted = [samples[step * GLOBAL_BATCH + i][:-1] for i in range(GLOBAL_BATCH)]
    tokens = torch.cat([batch.tokens for batch in batches])
    assert np.array_equal(tokens.numpy(), np.stack(wanted))


def test_any_step_may_follow_any_other(samples: Samples):
    with closing(BatchLoader(samples, GLOBAL_BATCH, 4, 0, 2)) as loader:
        for step in (0, 1, 2, 7, 8, 0, 0):
            fresh = load(samples, step, 4, 2)[0]
            for batch, wanted in zip(loader.micro_batches(step * GLOBAL_BATCH), fresh, strict=True):
                assert torch.equal(batch.tokens, wanted.tokens)


class RecordingSamples:
    """Samples that record which thread read them, and fail at one index."""

    def __init__(self, samples: Samples, broken: int | None = None) -> None:
        self.samples, self.broken = samples, broken
        self.read: dict[int, str] = {}
        self.next_step_read = threading.Event()

    def __getitem__(self, index: int) -> np.ndarray:
        if index == self.broken:
            raise OSError("the disk is gone")
        self.read[index] = threading.current_thread().name
        if index == 2 * GLOBAL_BATCH - 1:
            self.next_step_read.set()
        return self.samples[index]


def test_the_next_step_is_read_ahead_in_a_thread_that_close_ends(samples: Samples):
    recorded = RecordingSamples(samples)
    loader = BatchLoader(recorded, GLOBAL_BATCH, 4, 0, 1)
    loader.micro_batches(0)
    assert recorded.next_step_read.wait(patient(10))
    assert recorded.read[0] == threading.current_thread().name
    thread = recorded.read[2 * GLOBAL_BATCH - 1]
    assert thread.startswith("batches")
    recorded.read.clear()
    loader.micro_batches(GLOBAL_BATCH)
    loader.close()
    assert not set(recorded.read) & set(range(GLOBAL_BATCH, 2 * GLOBAL_BATCH))
    assert thread not in {alive.name for alive in threading.enumerate()}


@pytest.mark.parametrize("next_step", [1, 9])
def test_a_failure_ahead_is_raised_by_the_next_call(samples: Samples, next_step: int):
    recorded = RecordingSamples(samples, broken=GLOBAL_BATCH + 5)
    with closing(BatchLoader(recorded, GLOBAL_BATCH, 4, 0, 1)) as loader:
        assert len(loader.micro_batches(0)) == 6
        with pytest.raises(OSError, match="the disk is gone"):
            loader.micro_batches(next_step * GLOBAL_BATCH)
        recorded.broken = None
        assert len(loader.micro_batches(GLOBAL_BATCH)) == 6


def test_a_global_batch_that_does_not_divide_is_an_assertion_error(samples: Samples):
    with pytest.raises(AssertionError):
        BatchLoader(samples, 10, 4, 0, 1)


@pytest.mark.parametrize(("workers", "steps"), [(1, 0), (1, 3), (4, 1), (3, 2), (9, 2)])
def test_threads_change_neither_the_samples_nor_their_order(
    samples: Samples, workers: int, steps: int
):
    reading = Reading(workers=workers, steps=steps)
    with (
        closing(BatchLoader(samples, GLOBAL_BATCH, 4, 0, 1, reading=reading)) as loader,
        closing(BatchLoader(samples, GLOBAL_BATCH, 4, 0, 1)) as plain,
    ):
        for step in (0, 1, 2, 3, 9, 10, 3, 5):  # jumps forwards and back
            found = loader.read_step(step * GLOBAL_BATCH)
            wanted = plain.read_step(step * GLOBAL_BATCH)
            assert found.digest == wanted.digest
            for one, other in zip(found.micro_batches, wanted.micro_batches, strict=True):
                assert torch.equal(one.tokens, other.tokens)


def test_several_threads_read_several_steps_ahead(samples: Samples):
    barrier = threading.Barrier(3, timeout=patient(10))

    class Meeting(RecordingSamples):
        """Samples whose readers of the following step wait for each other."""

        def __getitem__(self, index: int) -> np.ndarray:
            if index in (GLOBAL_BATCH, GLOBAL_BATCH + 4, GLOBAL_BATCH + 8):
                barrier.wait()
            return super().__getitem__(index)

    recorded = Meeting(samples)
    reading = Reading(workers=3, steps=2)
    with closing(BatchLoader(recorded, GLOBAL_BATCH, 4, 0, 1, reading=reading)) as loader:
        loader.read_step(0)
        for futures in loader._ahead.values():
            for future in futures:
                future.result(patient(10))
        assert set(recorded.read) == set(range(3 * GLOBAL_BATCH))
        recorded.read.clear()
        loader.read_step(GLOBAL_BATCH)
        loader.read_step(2 * GLOBAL_BATCH)
        assert not set(recorded.read) & set(range(3 * GLOBAL_BATCH))
