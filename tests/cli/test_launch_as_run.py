"""What a run refuses at its start, launch refuses before the job waits in a queue."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from frontier_lab.jobs.launch import main
from frontier_llm.cli.compose import compose
from frontier_llm.config import RunConfig, decode
from frontier_llm.data.run_loader import prepare_for_model
from frontier_llm.errors import ConfigError, DataError
from tests.forked_train import TINY, train
from tests.texts import prose

pytestmark = pytest.mark.slow

JOB = ("cluster=frontier_mi250x", "launch.nodes=1", "precision=bf16", "parallel.pipeline=1")
OF_TINY = tuple(word for word in TINY if not word.startswith(("launch.", "precision=")))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with a text and a table, which are not prepared."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "some.txt").write_text(prose(20))
    (tmp_path / "other.txt").write_text(prose(20, 200))
    (tmp_path / "short.txt").write_text("few words\n")
    (tmp_path / "table.csv").write_text("title,body\na,some words\n")
    return tmp_path


def words_of(*words: str, text: str = "some.txt") -> list[str]:
    return [*JOB, *OF_TINY, "data.global_batch=8", f"data.path={text}", *words]


def decoded(words: list[str]) -> RunConfig:
    return decode(compose(words))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["callbacks=[nomod:X]"], r"callbacks\n.*nomod:X\n.*No module named 'nomod'"),
        (["callbacks=[xml.nomod:X]"], "No module named 'xml.nomod'"),
        (["callbacks=[x]"], "MODULE:CLASS"),
        (["run.init_from=nowhere"], r"run\.init_from\n.*which does not exist"),
        (["data.text_key=body"], r"data\.text_key\n.*body\n.*plain text"),
        (["data.path=table.csv"], "no column 'text'"),
        (["data.path=short.txt"], "both need some"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("folder")
def test_a_job_is_refused_as_its_run_would_be(words: list[str], named: str) -> None:
    with pytest.raises((ConfigError, DataError), match=named):
        main(words_of(*words))


def test_a_module_of_the_working_folder_is_found_but_not_imported(folder: Path) -> None:
    (folder / "my_job_callbacks.py").write_text("1 / 0\n")
    (folder / "my_package").mkdir()
    for name in ("__init__", "of_jobs"):
        (folder / "my_package" / f"{name}.py").write_text("1 / 0\n")
    for module in ("my_job_callbacks", "my_package.of_jobs", "__main__"):
        assert main(words_of(f"callbacks=[{module}:Mine]")) == 0
    with pytest.raises(ConfigError, match=r"No module named 'my_package\.absent'"):
        main(words_of("callbacks=[my_package.absent:Mine]"))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "words",
    [
        ("data.global_batch=4096",), ("data.sequence_length=4096", "data.micro_batch=1"),
        ("data.global_batch=2048", "data.documents=separate"),
    ],
    ids=str,
)  # fmt: skip
def test_a_corpus_that_is_too_small_has_the_message_of_the_run(words: tuple[str, ...]) -> None:
    prepare_for_model(decoded(words_of()))
    with pytest.raises(DataError) as of_run:
        prepare_for_model(decoded(words_of(*words)), ranks=8)
    with pytest.raises(DataError) as of_job:
        main(words_of(*words))
    assert str(of_job.value) == str(of_run.value)
    assert "would read some of them twice" in str(of_run.value) or "fewer than" in str(of_run.value)


@pytest.mark.usefixtures("folder")
def test_rows_that_no_token_uses_are_named_before_the_job(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The standard vocabulary of a text is much smaller than that of large models."""
    for rows in (300, 512, 1024):
        words = words_of("data.vocabulary=300", f"model.vocabulary={rows}")
        for prepared in (False, True):
            if prepared:
                prepare_for_model(decoded(words))
            assert main(words) == 0
            warns = f"300 tokens, the embedding {rows:,} rows" in capsys.readouterr().out
            assert warns == (rows == 1024), (rows, prepared)


def test_initial_weights_of_another_model_or_tokenizer_are_refused(folder: Path) -> None:
    words = ("data.path=some.txt", "trainer.steps=1", "optimizer.decay_steps=2", "run.dir=first")
    assert train(*TINY, *words, "launch.ranks=1", "parallel.pipeline=1").code == 0
    assert main(words_of("run.init_from=first")) == 0
    with pytest.raises(ConfigError, match=r"at model\.layers\n.*3"):
        main(words_of("run.init_from=first", "model.layers=3"))
    other = words_of("run.init_from=first", text="other.txt")
    prepare_for_model(decoded(other))
    with pytest.raises(ConfigError, match=r"at data\.tokenizer"):
        main(other)

    code = (
        "import sys; from frontier_lab.jobs.launch import main; "
        f"main({words_of('run.init_from=first')!r}); sys.exit('torch' in sys.modules)"
    )
    root = {"PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run([sys.executable, "-c", code], check=False, env=os.environ | root)
    assert ended.returncode == 0, "the checks import torch"
