"""Layers that the program divides: recorded, kept by a resumed run, and the same training."""

import json
from pathlib import Path

import pytest
import yaml

from frontier_llm.cli.train import configure
from frontier_llm.config import decode
from frontier_llm.planner.choice import choose, format_layers
from tests.forked_train import TINY, train
from tests.trainer.test_parity import compare
from tests.trainer.test_t5_parity import MODEL
from tests.values import T5GEMMA, T5GEMMA2, tiny_values

XL = ("experiment=mt5_xl", "parallel.pipeline=4", "plan=dry_run")
ENDS = ["parallel.pipeline=2", "parallel.chunks=3", "parallel.layers_per_stage=[0,1,1,1,1,0]"]
DEEP = ["model.layers=12", "model.encoder_layers=6", "data.global_batch=8"]


def _configured(run: Path, *overrides: str) -> tuple[tuple[int, ...] | str | None, str]:
    config, text = configure([*XL, f"run.dir={run}", *overrides])
    return config.parallel.layers_per_stage, text


def _recorded(text: str) -> list[int] | None:
    layers: list[int] | None = yaml.safe_load(text)["parallel"]["layers_per_stage"]
    return layers


def test_a_new_run_records_its_layers_and_keeps_them(tmp_path: Path) -> None:
    chosen, text = _configured(tmp_path)
    assert isinstance(chosen, tuple)
    assert _recorded(text) == list(chosen)
    values = yaml.safe_load(text)
    values["parallel"]["layers_per_stage"] = [10, 10, 14, 14]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    assert _configured(tmp_path)[0] == (10, 10, 14, 14)
    assert _recorded(_configured(tmp_path)[1]) == [10, 10, 14, 14]
    assert _configured(tmp_path, "parallel.layers_per_stage=null")[0] is None


def test_a_run_with_even_layers_stays_even(tmp_path: Path) -> None:
    _, text = _configured(tmp_path, "parallel.layers_per_stage=null")
    assert _recorded(text) is None
    (tmp_path / "config.yaml").write_text(text)
    assert _configured(tmp_path)[0] is None


@pytest.mark.parametrize("change", ["parallel.pipeline=2", "parallel.chunks=2"])
def test_layers_are_chosen_anew_for_another_pipeline(tmp_path: Path, change: str) -> None:
    (tmp_path / "config.yaml").write_text(_configured(tmp_path)[1])
    again, _ = _configured(tmp_path, change)
    assert again == _configured(tmp_path / "new", change)[0]
    assert isinstance(again, tuple)
    assert len(again) in (2, 8)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 3])
def test_chosen_layers_train_like_one_process(stages: int) -> None:
    overrides = [f"parallel.pipeline={stages}", *DEEP[2:]]
    values = tiny_values(*MODEL, *DEEP, *overrides, "parallel.layers_per_stage=auto")
    values["data"]["vocabulary"] = 28
    layers = choose(decode(values), stages, stages).parallel.layers_per_stage
    assert isinstance(layers, tuple)
    assert layers != (12 // stages,) * stages
    split = f"parallel.layers_per_stage={format_layers(layers)}"
    compare(stages, [*overrides, split], [*MODEL, *DEEP[:2]], 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        (["model.layers=4"], [*ENDS, "sharding=zero3"]),
        (["model.layers=4", "model.tied=false"], [*ENDS, "recompute=full"]),
        ([*MODEL, "model.layers=4", "model.encoder_layers=2"], [*ENDS, "parallel.tensor=2"]),
        ([*T5GEMMA, "model.layers=4"], [*ENDS, "recompute=full"]),
        ([*T5GEMMA2, "model.layers=4"], ["parallel.pipeline=2", "parallel.layers_per_stage=[0,4]"]),
        ([*T5GEMMA2, "model.layers=4"], ["parallel.pipeline=2", "parallel.layers_per_stage=[4,0]"]),
    ],
)
def test_chunks_of_the_embedding_and_head_alone_train_alike(model, overrides) -> None:
    """As in Llama 3 405B, arXiv:2407.21783, section 3.3.2: the ends have one layer less."""
    compare(4, overrides, model, 3)


@pytest.mark.slow
def test_a_run_from_before_resumes_with_its_even_layers(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(str(number) for number in range(20_000)))
    run = tmp_path / "run"
    tiny = (
        *TINY, f"data.path={tmp_path}/text.txt", f"data.directory={tmp_path}/prepared",
        f"run.dir={run}", "model.layers=8", "launch.ranks=2", "parallel.pipeline=2",
        "optimizer.decay_steps=6", "model.vocabulary=32000",
    )  # fmt: skip
    split = "parallel.layers_per_stage="
    assert train(*tiny, "trainer.steps=2", f"{split}null").code == 0
    ended = train(*tiny, "trainer.steps=3", f"{split}auto")
    assert ended.code == 0, ended.text
    assert _recorded((run / "config.yaml").read_text()) is None
    chosen = tmp_path / "chosen"
    ended = train(*tiny, "trainer.steps=3", f"{split}auto", f"run.dir={chosen}")
    assert ended.code == 0, ended.text
    layers = _recorded((chosen / "config.yaml").read_text())
    assert layers is not None
    assert layers != [4, 4]
    resumed, direct = (
        [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (run, chosen)
    )
    assert len(resumed) == 3
    assert resumed == pytest.approx(direct, rel=1e-5)
