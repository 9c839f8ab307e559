"""Documents are packed as by the plain algorithm, completely, and the same way each time."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.data import packing
from frontier_llm.data.packing import Packing, open_packing, pack, packing_folder, padding_shares
from frontier_llm.errors import DataError
from tests.patience import count_calls


def plainly(pieces: list[int], length: int) -> list[list[int]]:
    """Best-fit-decreasing, one piece at a time."""
    samples: list[list[int]] = []
    for piece in sorted(pieces, reverse=True):
        fitting = [s for s in samples if sum(s) + piece <= length]
        if not fitting:
            samples.append(fitting := [])
            fitting = [samples[-1]]
        max(fitting, key=sum).append(piece)
    return samples


def cut(documents: list[int], length: int) -> list[tuple[int, int]]:
    """(start, length) of the pieces of all documents."""
    pieces, start = [], 0
    for document in documents:
        for offset in range(0, document, length):
            pieces.append((start + offset, min(length, document - offset)))
        start += document
    return pieces


def samples(packed: Packing) -> list[list[tuple[int, int]]]:
    pieces = list(zip(packed.starts.tolist(), packed.lengths.tolist(), strict=True))
    borders = packed.first_pieces.tolist()
    return [pieces[a:b] for a, b in itertools.pairwise(borders)]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=80), st.integers(1, 25))
def test_samples_are_those_of_the_plain_algorithm(documents: list[int], length: int) -> None:
    packed = pack(np.array(documents), length)
    found = samples(packed)
    wanted = cut(documents, length)
    assert sorted(piece for sample in found for piece in sample) == wanted, "each piece once"
    # a piece may fit as well into several samples, so that their contents can differ
    filled = sorted(sum(size for _, size in sample) for sample in found)
    assert filled == sorted(map(sum, plainly([size for _, size in wanted], length)))
    assert padding_shares([packed]) == [pytest.approx(1 - sum(documents) / (length * len(found)))]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=50))
def test_samples_and_their_pieces_are_in_the_order_of_the_corpus(documents: list[int]) -> None:
    found = samples(pack(np.array(documents), 16))
    assert all(sample == sorted(sample) for sample in found)
    firsts = [sample[0] for sample in found]
    assert firsts == sorted(firsts)


def test_the_work_hardly_grows_with_the_number_of_documents() -> None:
    """Of a million documents too many for each to be handled alone."""
    draw = np.random.default_rng(0)
    documents = np.minimum(draw.lognormal(6, 1.2, 1_000_000), 100_000).astype(np.int64) + 1
    packings: list[Packing] = []
    few, many = (
        count_calls(lambda some=some: packings.append(pack(some, 4096)))
        for some in (documents[:100_000], documents)
    )
    assert many < 2 * few < 500_000
    packed = packings[-1]
    assert padding_shares([packed])[0] < 0.005
    assert packed.lengths.sum(dtype=np.int64) == documents.sum()


def test_a_packing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = np.array([5, 9, 3, 30, 2])
    written = open_packing(tmp_path / "train", documents, 8)
    monkeypatch.setattr(packing, "pack", None)
    again = open_packing(tmp_path / "train", documents, 8)
    assert samples(again) == samples(written) == samples(pack(documents, 8))
    assert [path.name for path in tmp_path.iterdir()] == ["train.best_fit_8"]


def test_two_processes_may_write_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = np.array([5, 9, 3])
    folder = packing_folder(tmp_path / "train", 8)

    def other_is_faster(*_: object) -> Packing:
        monkeypatch.undo()
        open_packing(tmp_path / "train", documents, 8)
        return pack(documents, 8)

    monkeypatch.setattr(packing, "pack", other_is_faster)
    assert len(open_packing(tmp_path / "train", documents, 8)) == 3
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "empty"])
def test_a_damaged_packing_is_packed_again(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    documents = np.array([5, 9, 3, 30, 2])
    wanted = samples(open_packing(tmp_path / "train", documents, 8))
    folder = packing_folder(tmp_path / "train", 8)
    file = folder / "starts.npy"
    content = bytearray(file.read_bytes())
    content[-8] ^= 1
    if damage == "flip":
        file.write_bytes(content)
    elif damage == "cut":
        file.write_bytes(content[:-8])
    elif damage == "remove":
        file.unlink()
    else:
        (folder / "digests.json").unlink()  # as of a version that wrote none
        file.write_bytes(b"")
    assert samples(open_packing(tmp_path / "train", documents, 8)) == wanted
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder} is damaged: the samples are packed again"
    ]
    assert list(tmp_path.iterdir()) == [folder]


def test_a_packing_without_digests_is_read(tmp_path: Path) -> None:
    documents = np.array([5, 9, 3, 30, 2])
    wanted = samples(open_packing(tmp_path / "train", documents, 8))
    (packing_folder(tmp_path / "train", 8) / "digests.json").unlink()
    assert samples(open_packing(tmp_path / "train", documents, 8)) == wanted


def test_a_packing_that_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"best_fit cannot be kept in .*\n  do: "):
        open_packing(tmp_path / "absent" / "train", np.array([5]), 8)
