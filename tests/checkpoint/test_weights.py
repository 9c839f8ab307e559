"""Final weights can be read by any layout, and damage is named."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frontier_llm.checkpoint.weights import load_weights, save_weights
from frontier_llm.errors import DataError
from frontier_llm.parallel.world import World
from tests.model.test_initialise import weights
from tests.ranks import RanksFailedError, run_ranks
from tests.trainer.rig import make_rig
from tests.trainer.test_parity import assemble
from tests.values import tiny_values

MODEL = ("model.activation=swiglu", "model.vocabulary=4099")
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one": (1, []),
    "tensor4": (4, ["parallel.tensor=4"]),
    "pipeline2_chunks2_tensor2_data2": (
        8, ["parallel.tensor=2", "parallel.pipeline=2", "parallel.chunks=2"],
    ),
}  # fmt: skip


def save(world: World, folder: Path, values: dict[str, Any]) -> None:
    rig = make_rig(world, values)
    save_weights(folder, rig.states.parameters(), rig.groups.at.data == 0)


def load(world: World, folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    rig = make_rig(world, values)
    load_weights(folder, rig.model.records)
    found: dict[str, Any] = {}
    for record in rig.model.records:
        for p in record.placements:
            entry = found.setdefault(p.name, (p.global_shape, []))
            piece = p.local_view(record.parameter.detach()).numpy().copy()
            entry[1].append((p.global_start, piece))
    return found


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_any_layout_reads_any_other(source: str, target: str, tmp_path: Path) -> None:
    size, layout = LAYOUTS[source]
    run_ranks(save, size, tmp_path, tiny_values(*MODEL, *layout, "trainer.seed=7"))
    expected = assemble(run_ranks(weights, 1, tiny_values(*MODEL, "trainer.seed=7")))
    size, layout = LAYOUTS[target]
    loaded = assemble(run_ranks(load, size, tmp_path, tiny_values(*MODEL, *layout)))
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(loaded[name], tensor, err_msg=name)


def test_padding_is_not_stored(tmp_path: Path) -> None:
    run_ranks(save, 2, tmp_path, tiny_values(*MODEL, "parallel.tensor=2"))
    entry = json.loads((tmp_path / "manifest.json").read_text())["embedding.tokens.weight"]
    assert entry["shape"] == [4099, 32]
    assert sum(box["shape"][0] for box in entry["boxes"]) == 4099


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    run_ranks(save, 1, tmp_path, tiny_values())
    return tmp_path


def refusal(folder: Path, *overrides: str) -> str:
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(load, 1, folder, tiny_values(*overrides))
    text = str(failed.value)
    assert DataError.__name__ in text
    return text.rpartition("DataError: ")[2]


def test_no_weights(tmp_path: Path) -> None:
    assert "holds no weights" in refusal(tmp_path)


def test_another_model(saved: Path) -> None:
    assert "is it another model?" in refusal(saved, "model.hidden=64")
    assert "layers.4" in refusal(saved, "model.layers=5")


def test_damage(saved: Path) -> None:
    file = saved / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert f"{file} is absent or damaged" in refusal(saved)
    manifest = json.loads((saved / "manifest.json").read_text())
    manifest["final_norm.weight"]["boxes"] = []
    (saved / "manifest.json").write_text(json.dumps(manifest))
    assert "damaged" in refusal(saved)


def test_missing_box(saved: Path) -> None:
    manifest = json.loads((saved / "manifest.json").read_text())
    manifest["embedding.tokens.weight"]["boxes"] = []
    (saved / "manifest.json").write_text(json.dumps(manifest))
    assert "0 of 4096 elements of embedding.tokens.weight are stored" in refusal(saved)


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RanksFailedError, match="the weights cannot be written"):
        run_ranks(save, 2, tmp_path / "file" / "weights", tiny_values())
