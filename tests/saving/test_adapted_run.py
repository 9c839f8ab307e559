"""Runs that begin with the weights of a decoder: what is refused, and how they resume."""

import json
import re
import shutil
from pathlib import Path

import pytest

from frontier_llm.cli.compose import configured
from frontier_llm.config.rules import check_optimizer
from frontier_llm.errors import ConfigError
from frontier_llm.saving.changes import check_initial_model
from tests.forked_train import TINY, train
from tests.texts import prose
from tests.trainer.test_resume import learned, same_states

pytestmark = pytest.mark.slow

SIZES = ("model.kv_heads=2", "model.head_dim=16", "model.ffn=64", "model.vocabulary=500")
SIDES = ("model=t5gemma_tiny", "data=text_spans", "model.layers=4")
ALONE = ("optimizer.cross_attention_steps=3", "optimizer.schedule=constant", "trainer.steps=6")
ONE = "parallel.pipeline=1"
LAYOUT = ("launch.ranks=4", "parallel.tensor=2", "parallel.pipeline=2", "sharding=zero1")


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The overrides of an encoder-decoder that begins with a decoder that was trained a step."""
    folder = tmp_path_factory.mktemp("decoder")
    (folder / "text.txt").write_text(prose(40))
    data = (f"data.path={folder}/text.txt", f"data.directory={folder}/prepared")
    keys = (*TINY, *data, *SIZES)
    ended = train(*keys, "model=gemma2_tiny", "trainer.steps=1", f"run.dir={folder}/run")
    assert ended.code == 0, ended.text
    return (*keys, *SIDES, f"run.init_from={folder}/run", ONE)


@pytest.fixture(scope="module")
def pair(begun: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The overrides of an encoder-decoder whose encoder begins with a wider decoder."""
    folder = tmp_path_factory.mktemp("wide")
    data = [word for word in begun if word.startswith(("data.path", "data.directory"))]
    wide = ("model=gemma2_tiny", "model.layers=1", "model.hidden=48", "model.ffn=80", ONE)
    ended = train(*TINY, *data, *SIZES, *wide, "trainer.steps=1", f"run.dir={folder}/run")
    assert ended.code == 0, ended.text
    sides = ("model.layers=3", "model.encoder_layers=1", "model.encoder_hidden=48")
    return (*begun, *sides, "model.encoder_ffn=80", f"run.init_encoder_from={folder}/run")


REFUSED_PAIRS = {
    ("model.encoder_hidden=null",): ("model.encoder_hidden", r"set model\.encoder_hidden=48"),
    ("model.encoder_ffn=96",): ("model.encoder_ffn", r"set model\.encoder_ffn=80"),
    ("model.layers=4",): ("model.layers", r"set model\.layers=3 model\.encoder_layers=1"),
    ("model.layers=4", "model.encoder_layers=2"): (
        "model.layers", r"set model\.layers=3 model\.encoder_layers=1",
    ),
    ("model.hidden=64",): ("model.hidden", r"set model\.hidden=32"),
    ("model.window=32",): ("model.window", r"run\.allow_changes=\[model\.window\]"),
    ("model.encoder_heads=1", "model.encoder_kv_heads=1", "model.encoder_head_dim=32"): (
        "model.encoder_heads",
        r"run\.allow_changes=\[model\.encoder_heads,model\.encoder_kv_heads,model\.encoder_head_d",
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED_PAIRS, ids=" ".join)
def test_each_side_has_the_shapes_of_its_decoder(
    words: tuple[str, ...], pair: tuple[str, ...]
) -> None:
    key, todo = REFUSED_PAIRS[words]
    with pytest.raises(ConfigError, match=todo) as caught:
        check_initial_model(configured([*pair, *words, "run.dir=new"]).config)
    assert caught.value.key == key
    if "allow_changes" in todo:
        (allowed,) = re.findall(r"'(run\.allow_changes=\S+)'", caught.value.todo)
        check_initial_model(configured([*pair, *words, "run.dir=new", allowed]).config)


def test_a_run_begins_with_two_decoders(pair: tuple[str, ...], tmp_path: Path) -> None:
    alone = ("optimizer.cross_attention_steps=3", "trainer.steps=4")
    ended = train(*pair, *LAYOUT, *alone, f"run.dir={tmp_path}/run")
    assert ended.code == 0, ended.text
    encoder_decoder = f"run.init_from={tmp_path}/run"
    with pytest.raises(ConfigError, match="name two decoders") as caught:
        check_initial_model(configured([*pair, encoder_decoder, "run.dir=new"]).config)
    assert caught.value.key == "run.init_from"
    with pytest.raises(ConfigError, match="only the sides of an encoder-decoder") as caught:
        configured(["model=gemma2_tiny", "run.init_encoder_from=runs/wide", "run.dir=new"])
    assert caught.value.key == "run.init_encoder_from"


REFUSED = {
    ("model.layers=2",): ("model.layers", r"set model\.layers=4 model\.encoder_layers=2"),
    ("model.encoder_layers=1",): ("model.layers", r"set model\.layers=4 model\.encoder_layers=2"),
    ("model.encoder_ffn=16",): ("model.encoder_ffn", r"set model\.encoder_ffn=null"),
    ("model.hidden=64",): ("model.hidden", r"set model\.hidden=32"),
    ("model.vocabulary=600",): ("model.vocabulary", r"set model\.vocabulary=500"),
    ("model.tied=false",): ("model.tied", r"set model\.tied=true"),
    ("model.scaled_embedding=false",): ("model.tied", r"model\.scaled_embedding=true"),
    ("model.window=32",): ("model.window", r"run\.allow_changes=\[model\.window\]"),
    ("model.attention_softcap=null",): (
        "model.attention_softcap",
        r"set model\.attention_softcap=50",
    ),
    ("model.zero_centred_norms=false",): (
        "model.zero_centred_norms",
        r"set model\.zero_cen\w*=true",
    ),
}


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_sides_that_are_no_copies_are_refused(
    words: tuple[str, ...], begun: tuple[str, ...]
) -> None:
    key, todo = REFUSED[words]
    with pytest.raises(ConfigError, match=todo) as caught:
        check_initial_model(configured([*begun, *words, "run.dir=new"]).config)
    assert caught.value.key == key


def test_what_does_not_concern_the_copies_may_differ(begun: tuple[str, ...]) -> None:
    words = ("model.dropout=0.1", "model.encoder_window=9", "model.start_token=1", "model.name=new")
    check_initial_model(configured([*begun, *words, "run.dir=new"]).config)
    words = ("model.window=32", "run.allow_changes=[model.window]")
    check_initial_model(configured([*begun, *words, "run.dir=new"]).config)


@pytest.mark.parametrize(
    "other", ["optimizer=muon", "optimizer=adafactor", "model=gpt_tiny data=text"]
)
def test_cross_attention_trains_alone_only_where_it_can(other: str) -> None:
    words = ("model=t5gemma_tiny", "data=stdlib_spans", "optimizer.cross_attention_steps=2")
    check_optimizer(configured(words).config)
    with pytest.raises(ConfigError) as caught:
        check_optimizer(configured([*words, *other.split()]).config)
    assert caught.value.key == "optimizer.cross_attention_steps"


@pytest.mark.exhaustive
def test_a_run_resumes_while_cross_attention_trains_alone_and_later(
    begun: tuple[str, ...], tmp_path: Path
) -> None:
    keys = (*begun, *ALONE, *LAYOUT, "checkpoint.every_steps=1", "checkpoint.keep=9")
    alone, run = tmp_path / "alone", tmp_path / "run"
    ended = train(*keys, f"run.dir={alone}")
    assert ended.code == 0, ended.text
    for step in (2, 4):
        shutil.copytree(alone, run)
        for later in range(step + 1, 7):
            shutil.rmtree(run / "checkpoints" / f"step_{later:08}")
        ended = train(*keys, f"run.dir={run}", "run.resume=required")
        assert ended.code == 0, ended.text
        assert same_states(run, alone), step
        assert learned(run)[-(6 - step) :] == learned(alone)[step:]
        shutil.rmtree(run)
    manifest = json.loads((alone / "checkpoints/step_00000006/manifest.json").read_text())
    progress = manifest["meta"]["progress"]
    assert (progress["updates"], progress["cross_attention_updates"]) == (6, 3)
