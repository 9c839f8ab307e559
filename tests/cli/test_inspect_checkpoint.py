"""The command that looks into checkpoints: its answers, and its exit codes."""

import re
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file

from frontier_lab.commands.inspect_checkpoint import main
from frontier_lab.commands.state_statistics import Spread, spreads
from frontier_llm.checkpoint.commit_barrier import Ranks
from frontier_llm.checkpoint.discovery import find
from frontier_llm.checkpoint.manager import CheckpointManager
from frontier_llm.checkpoint.manifest import File, Manifest, StoredRange, Tensor
from frontier_llm.checkpoint.range_reader import RangeReader, Unreadable
from frontier_llm.checkpoint.writer import Options
from frontier_llm.cli import console
from frontier_llm.cli.compose import compose
from frontier_llm.config import decode
from frontier_llm.errors import CheckpointError
from frontier_llm.geometry.inventory import model_shapes
from tests.checkpoint.crew import PATIENCE, run_crew
from tests.checkpoint.states import MODEL, STATES, States, value


def save(rank: int, size: int, store: Any, folder: Path, cut: tuple[int, int], step: int) -> None:
    states = States(*cut, rank)
    states.advance(step)
    if step == 6:  # one element of one tensor
        states.advance(5)
        states.shards[0].states["exp_avg"][3] += 0.5
    if step == 7 and rank == 0:
        states.shards[0].states["exp_avg"][3] = float("nan")
        states.shards[0].states["exp_avg"][9] = float("-inf")
    options = Options(chunk_bytes=4096)
    manager = CheckpointManager(folder, Ranks(rank, size, store, PATIENCE), "blocking", 1, options)
    manager.begin(step, states.shards, {"samples": 480})


def make(folder: Path, cut: tuple[int, int], step: int = 5) -> Path:
    outcomes = run_crew(save, cut[0] * cut[1], folder, cut, step)
    assert not [outcome.error for outcome in outcomes if outcome.error]
    return folder


def test_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "checkpoints", (2, 3))
    assert main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "step 5, " in text.replace("\n", " ")
    lines = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.split()}
    assert lines["layers.*.ffn.up.weight"] == ["2", "48", "x", "24", "2", "3", "13.50", "KiB"]
    assert lines["final_norm.weight"] == ["1", "24", "1", "3", "288", "B"]
    assert lines["samples"] == ["480"]


def test_a_narrow_terminal_keeps_names_and_layers_share_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "WIDTH", 60)
    make(tmp_path, (1, 5))  # the ranks' borders cut some layers more often than others
    assert main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "…" not in text
    rows = re.findall(r"^ ([a-z_*.]+) +\d+ ", text, re.M)
    names = {re.sub(r"\d+", "*", name) for name in find(tmp_path).manifest.tensors}
    assert len(rows) == len(names)


def _checkpoint(tmp_path: Path, meta: dict[str, Any]) -> Path:
    """Write the manifest of a checkpoint whose tensors are in the order of their sizes."""
    shapes = model_shapes(CONFIG.model, CONFIG.data.sequence_length)
    names = sorted(shapes, key=lambda name: -np.prod(shapes[name]))
    tensors, end = {}, 8  # a file begins with the length of its header
    for name in names:
        shape = shapes[name]
        whole = StoredRange(
            file="a", start=(0,) * len(shape), shape=shape, first=0, count=prod(shape),
            keys={"master": name}, bytes_at={"master": end},
        )  # fmt: skip
        tensors[name] = Tensor(shape=shape, pieces=(whole,))
        end += 4 * prod(shape)
    files = {"a": File(size=end, chunks=("0" * 32,) * -(-end // 4096))}
    folder = tmp_path / "step_00000007"
    folder.mkdir()
    with (folder / "a").open("wb") as stream:
        stream.truncate(end)
    manifest = Manifest(step=7, world=4, chunk_bytes=4096, files=files, tensors=tensors, meta=meta)
    (folder / "manifest.json").write_bytes(manifest.to_bytes())
    return folder


CONFIG = decode(compose(["model.layers=2", "sharding=zero2", "trainer.steps=90"]))
META = {
    "progress": {"samples": 64},
    "loss_scale": {"value": 1024.0, "good_steps": 3},
    "corpus": "c0ffee",
    "blend": None,
    "lengths": [{"first_sample": 0, "tokens": 256, "keeps_all": True}],
    "start": "feed",
    "config": CONFIG.model_dump(mode="json"),
}


def test_a_run_is_described_in_words_and_in_model_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _checkpoint(tmp_path, META)
    assert main([str(folder)]) == 0
    text = capsys.readouterr().out
    for pattern in (
        r"step +7\b", r"samples +64\b", r"tokens +16.38k\b", r"loss scale +1024",
        r"model +gpt_tiny, 2 layers", r"corpus +c0ffee", r"data +stdlib, 16 samples of 256 tokens",
        r"layout +4 ranks, tensor 1 x pipeline 2; sharding=zero2",
    ):  # fmt: skip
        assert re.search(pattern, text), pattern
    assert not re.search(r"[{}]|None|good_steps|feed|lengths", text), "no inner objects"
    expected = dict.fromkeys(
        re.sub(r"layers\.\d+", "layers.*", name)
        for name in model_shapes(CONFIG.model, CONFIG.data.sequence_length)
    )
    listed = re.findall(r"^ +([a-z_*.]+\.(?:weight|bias)) ", text, re.M)
    assert listed == list(expected)
    assert main([str(folder), "--config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == META["config"]


@pytest.mark.parametrize(
    "changes",
    [
        {"config": None}, {"config": 3}, {"config": {"model": 5}}, {"config": {"model": {}}},
        {"progress": 4}, {"progress": {"samples": "many"}}, {"loss_scale": []}, {"blend": [7]},
        {"corpus": "\x1b[31mred"}, {"more": {"a": [1, {}]}},
        {"config": META["config"] | {"model": META["config"]["model"] | {"layers": 10**12}}},
    ],
)  # fmt: skip
def test_values_of_other_kinds_are_no_obstacle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    folder = _checkpoint(tmp_path, META | changes)
    assert main([str(folder)]) == 0
    text = capsys.readouterr().out
    assert "ffn.down.weight" in text
    assert "\x1b" not in text


def test_a_folder_without_a_checkpoint_says_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(CheckpointError, match=r"frontier-llm convert --from hf"):
        find(tmp_path)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(CheckpointError, match="has saved no checkpoint yet"):
        find(tmp_path)


def test_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, (1, 2))
    folder = tmp_path / "step_00000005"
    assert main([str(folder), "--verify"]) == 0
    assert "all bytes match their digests" in capsys.readouterr().out
    file = folder / "rank_00001.safetensors"
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    content[9000] ^= 1
    file.write_bytes(content)
    assert main([str(folder), "--verify"]) == 1
    text = capsys.readouterr().out.replace("\n", "")
    assert f"{file} is damaged: bytes 0 to 4096" in text
    assert f"{file} is damaged: bytes 8192 to 12288" in text
    assert "2 chunks damaged  do: move this checkpoint away" in text


def test_a_file_that_cannot_be_read_is_not_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, (1, 2))

    def refuse(self: object, path: Path) -> int:
        raise Unreadable(f"{path} cannot be read: Permission denied")

    monkeypatch.setattr(RangeReader, "_open", refuse)
    assert main([str(tmp_path), "--verify"]) == 1
    text = capsys.readouterr().out.replace("\n", "")
    assert "rank_00001.safetensors cannot be read: Permission denied" in text
    assert "0 chunks damaged; 2 files not verified" in text


def test_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = make(tmp_path / "one", (2, 2)), make(tmp_path / "other", (1, 3))
    assert main([str(one), "--diff", str(other)]) == 0
    assert "equal: all 6 tensors" in capsys.readouterr().out
    make(tmp_path / "changed", (1, 1), step=6)
    assert main([str(one), "--diff", str(tmp_path / "changed")]) == 1
    text = capsys.readouterr().out
    assert "exp_avg" in text
    assert "1 of 2424" in text
    assert "0.5" in text
    assert "exp_avg_sq" not in text


def test_statistics_are_those_of_the_whole_tensors(tmp_path: Path) -> None:
    make(tmp_path, (2, 3))
    read: list[int] = []
    checkpoint = find(tmp_path)
    found = spreads(checkpoint, str, read.append)
    assert len(found) == len(MODEL) * len(STATES)
    for (name, state), spread in found.items():
        whole = value(name, state, 5).astype(np.float64)
        assert (spread.elements, spread.not_finite) == (whole.size, 0)
        assert (spread.smallest, spread.largest) == (whole.min(), whole.max())
        assert spread.mean == pytest.approx(whole.mean(), rel=1e-12)
        assert spread.deviation == pytest.approx(whole.std(), rel=1e-9)
    assert sum(read) == checkpoint.manifest.size


def test_statistics_show_what_is_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    make(tmp_path / "sound", (1, 2))
    assert main([str(tmp_path / "sound"), "--statistics"]) == 0
    text = capsys.readouterr().out
    assert "layers.*.ffn.up.weight" in text
    make(tmp_path / "sick", (1, 2), step=7)
    assert main([str(tmp_path / "sick"), "--statistics", "--each"]) == 1
    text = capsys.readouterr().out
    assert "layers.1.ffn.up.weight" in text
    assert text.count("2 of 2424") == 1
    bad = spreads(find(tmp_path / "sick"), str, lambda _: None)[
        "embedding.tokens.weight", "exp_avg"
    ]
    rest = np.delete(value("embedding.tokens.weight", "exp_avg", 7).astype(np.float64), [3, 9])
    assert bad.not_finite == 2
    assert bad.mean == pytest.approx(rest.mean(), rel=1e-12)
    assert bad.largest == rest.max()


def test_a_spread_does_not_depend_on_how_values_are_cut() -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(1)) * 1e-3 + 1e3
    spread = Spread()
    for part in values.split([1, 0, 7, 4000, 92, 5900]):
        spread.add(part)
    exact = values.double()
    assert spread.mean == pytest.approx(float(exact.mean()), rel=1e-13)
    assert spread.deviation == pytest.approx(float(exact.std(correction=0)), rel=1e-9)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_exported_weights_are_plain_safetensors(dtype: str, tmp_path: Path) -> None:
    make(tmp_path / "run", (2, 2))
    file = tmp_path / "weights.safetensors"
    assert main([str(tmp_path / "run"), "--export", str(file), "--dtype", dtype]) == 0
    weights = load_file(file)
    assert weights.keys() == MODEL.keys()
    for name, tensor in weights.items():
        wanted = torch.from_numpy(value(name, "master", 5))
        assert torch.equal(tensor, wanted if dtype == "fp32" else wanted.bfloat16())
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["step"] == "5"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "weights.safetensors"]


def test_export_that_fails_leaves_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "run", (1, 1))
    damaged = tmp_path / "run" / "step_00000005" / "rank_00000.safetensors"
    content = bytearray(damaged.read_bytes())
    content[12_345] ^= 1
    damaged.write_bytes(content)
    file = tmp_path / "weights.safetensors"
    assert main([str(tmp_path / "run"), "--export", str(file)]) == 1
    said = capsys.readouterr().err
    assert f"{damaged} is damaged: bytes 12288 to 16384" in said
    assert "\n  do: move this checkpoint away, and use another one or a copy of it\n" in said
    assert not file.exists()
    file.write_text("an older one")
    assert main([str(tmp_path / "run"), "--export", str(file)]) == 2
    assert "wants:  a new file" in capsys.readouterr().err
    assert file.read_text() == "an older one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "weights.safetensors"]
    nowhere = Path("/proc/nowhere/weights.safetensors")
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "run"), "--export", str(nowhere)])
    assert "wants:  a file that can be written" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_run_as_a_file_on_nothing(tmp_path: Path) -> None:
    tool = Path(__file__).parents[2] / "tools" / "inspect_checkpoint.py"
    done = subprocess.run(
        [sys.executable, str(tool), str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert f"got:    {tmp_path}\n" in done.stderr
