"""Node-local checkpoints whose moments are in bf16 or 8 bits; the run directory stays exact."""

import hashlib
import json
import shutil
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frontier_lab.stored_weights import read_tensor
from frontier_llm.checkpoint.discovery import Checkpoint
from frontier_llm.checkpoint.manifest import Manifest, Moments
from frontier_llm.checkpoint.reduced_moments import BLOCK, ReducedWords, decode, encode, words
from frontier_llm.config.rules import check_checkpoint
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.geometry.state_memory import MOMENT_BLOCK_WORDS
from tests.covering import covering
from tests.forked_train import train
from tests.saving.test_drain import direct, events, files, losses, nodes, tiny
from tests.values import tiny_values

FORMATS: tuple[Moments, ...] = ("bf16", "int8")
__all__ = ["direct", "tiny"]  # fixtures


@pytest.mark.parametrize("moments", FORMATS)
@pytest.mark.parametrize("elements", [1, 255, 256, 257, 2000])
def test_decoded_values_are_close_and_encoded_to_the_same_words(
    moments: Moments, elements: int
) -> None:
    values = torch.randn(elements, generator=torch.Generator().manual_seed(elements))
    for signed in (True, False):
        wanted = values if signed else values.square()
        encoded = encode(wanted, moments, signed=signed)
        assert encoded.numel() == words(elements, moments)
        assert encoded.numel() == -(-elements // BLOCK) * MOMENT_BLOCK_WORDS[moments]
        found = decode(encoded, moments, signed=signed)[:elements]
        error = (found - wanted).abs()
        if moments == "bf16":
            assert (error <= wanted.abs() / 256).all()
        else:
            assert (error <= 0.02 * wanted.abs().max()).all()
        again = encode(found, moments, signed=signed)
        assert torch.equal(again.view(torch.int32), encoded.view(torch.int32))


@given(st.sampled_from(FORMATS), st.integers(1, 900), st.data())
def test_any_part_of_the_words_is_that_part_of_all_words(
    moments: Moments, elements: int, data: Any
) -> None:
    values = torch.randn(elements, generator=torch.Generator().manual_seed(elements))
    whole = ReducedWords.of(values, moments, "exp_avg")
    stop = data.draw(st.integers(1, whole.numel()))
    start = data.draw(st.integers(0, stop - 1))
    middle = data.draw(st.integers(start, stop - 1))
    part = whole[start:stop][middle - start :]
    assert part.numel() == stop - middle
    wanted = whole.decode()[middle:stop].view(torch.int32)
    assert torch.equal(part.decode().view(torch.int32), wanted)


def manifest_of(folder: Path) -> Manifest:
    return Checkpoint.open(folder).manifest


def predicted_bytes(manifest: Manifest, moments: Moments) -> int:
    """Return the bytes of all states: 4 per weight, and the words of both moments."""
    ranges = [r for tensor in manifest.tensors.values() for r in tensor.stored_ranges]
    return sum(4 * r.count + 2 * 4 * words(r.count, moments) for r in ranges)


def data_bytes(folder: Path) -> int:
    """Return the bytes of all files without their headers."""
    total = 0
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        total += len(content) - 8 - int.from_bytes(content[:8], "little")
    return total


@pytest.fixture(scope="module", params=covering(FORMATS, ["bf16"]))
def saved(
    request: pytest.FixtureRequest, tiny: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Moments, Path]:
    """Train 7 steps, of which step 4 is drained and 7 is written directly."""
    folder = tmp_path_factory.mktemp(f"saved_{request.param}")
    keys = nodes(folder, f"checkpoint.moments={request.param}", "checkpoint.tiers.local.keep=9")
    ended = train(*tiny, *keys, "trainer.steps=7")
    assert ended.code == 0, ended.text
    return request.param, folder


@pytest.mark.slow
def test_only_checkpoints_that_are_not_copied_are_reduced(
    saved: tuple[Moments, Path], direct: Path
) -> None:
    moments, folder = saved
    for node in (0, 1):
        for step in (1, 2, 3, 4, 5, 6):
            (local,) = (folder / "local").glob(f"*/node_{node:05d}/step_{step:08d}")
            manifest = manifest_of(local)
            assert manifest.moments == (None if step == 4 else moments)
            if step != 4:
                assert data_bytes(local) == predicted_bytes(manifest, moments)
    for step in (4, 7):
        name = Path("checkpoints", f"step_{step:08d}")
        assert manifest_of(folder / "run" / name).moments is None
        if step == 4:
            assert files(folder / "run" / name) == files(direct / name)
            assert "moments" not in json.loads(
                (folder / "run" / name / "manifest.json").read_text()
            )


@pytest.fixture(scope="module")
def exact(tiny: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same steps without reduced moments."""
    folder = tmp_path_factory.mktemp("exact")
    ended = train(*tiny, *nodes(folder, "checkpoint.tiers.local.keep=9"), "trainer.steps=7")
    assert ended.code == 0, ended.text
    return folder


@pytest.mark.slow
def test_weights_are_exact_and_moments_close(saved: tuple[Moments, Path], exact: Path) -> None:
    moments, folder = saved
    compared = 0
    for node in (0, 1):
        name = f"*/node_{node:05d}/step_00000003"
        reduced, wanted = (
            Checkpoint.open(next((place / "local").glob(name))) for place in (folder, exact)
        )
        for tensor, stored in wanted.manifest.tensors.items():
            if sum(r.count for r in stored.stored_ranges) < prod(stored.shape):
                continue  # the other node has the rest
            found, states = read_tensor(reduced, tensor), read_tensor(wanted, tensor)
            assert torch.equal(found["master"], states["master"])
            for state in ("exp_avg", "exp_avg_sq"):
                error = (found[state] - states[state]).abs().max()
                share = 1 / 256 if moments == "bf16" else 0.02
                assert error <= share * states[state].abs().max()
                compared += 1
    assert compared


def resume_from_6(
    saved: tuple[Moments, Path], tiny: tuple[str, ...], tmp_path: Path, *more: str
) -> tuple[str, Path]:
    """Resume a copy of the run of which step 7 is lost; return the log and the run directory."""
    moments, folder = saved
    place = tmp_path / "place"
    shutil.copytree(folder, place)
    shutil.rmtree(place / "run" / "checkpoints" / "step_00000007")
    (old,) = (place / "local").iterdir()
    keys = nodes(place, f"checkpoint.moments={moments}")
    digest = hashlib.sha256(str((place / "run").resolve()).encode()).hexdigest()[:8]
    old.rename(old.with_name(f"run-{digest}"))
    ended = train(*tiny, *keys, "trainer.steps=8", *more)
    assert ended.code == 0, ended.text
    return ended.text, place / "run"


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((), marks=pytest.mark.exhaustive),
        ("launch.ranks=2", "launch.ranks_per_node=1", "parallel.tensor=2", "parallel.pipeline=1"),
    ],
    ids=["the same layout", "another layout"],
)
def test_a_resume_says_that_moments_were_rounded_and_goes_on(
    layout: tuple[str, ...], saved: tuple[Moments, Path], tiny: Any, direct: Path, tmp_path: Path
) -> None:
    text, run = resume_from_6(saved, tiny, tmp_path, *layout)
    assert f"the moments of step 6 were rounded to {saved[0]} when it was saved" in text
    assert events(run, "resume")[-1]["step"] == 6
    assert "step 6 is copied" not in text
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert "step_00000006" not in names, "a checkpoint with rounded moments is never copied"
    assert manifest_of(run / "checkpoints" / "step_00000008").moments is None
    found, wanted = dict(losses(run)), dict(losses(direct))
    assert found[7] == pytest.approx(wanted[7], rel=1e-5), "the weights are exact"
    assert found[8] == pytest.approx(wanted[8], rel=2e-2)


@pytest.mark.parametrize(
    ("keys", "wants"),
    [
        (("optimizer=muon",), "only AdamW"),
        (("checkpoint.tiers.local.path=null",), "a directory on the nodes' disks"),
        (("checkpoint.partner=true",), "copied to the next node are exact"),
        (("checkpoint.every_steps=5",), "local checkpoints that are not copied"),
    ],
)
def test_reduced_moments_are_refused_where_they_do_not_apply(
    keys: tuple[str, ...], wants: str
) -> None:
    base = ("checkpoint.moments=int8", "checkpoint.tiers.local.path=/tmp/x")
    with pytest.raises(ConfigError) as caught:
        check_checkpoint(RunConfig.model_validate(tiny_values(*base, *keys)))
    assert caught.value.key == "checkpoint.moments"
    assert wants in caught.value.wants
    assert "set " in caught.value.todo
    check_checkpoint(RunConfig.model_validate(tiny_values(*base)))
