"""The programme for a GPU is rehearsed with tiny sizes on this machine."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from docs.generate.measured_tables import gpu_section
from frontier_llm.errors import TrainingError

pytestmark = pytest.mark.slow


@pytest.mark.exhaustive
def test_a_rehearsal_runs_the_code_of_the_slices(tmp_path: Path) -> None:
    """Without the slices that other tests of this suite run as well."""
    names = ["device", "checkpoints", "kernels"]
    assert gpu.main(["--rehearse", "--folder", str(tmp_path), "--only", *names]) == 0
    results = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in names}
    assert all(result["rehearsal"] and result["error"] is None for result in results.values())
    names_of_rows = {row["what"] for result in results.values() for row in result["rows"]}
    assert {"device", "digests of both checkpoints", "copy, float32"} <= names_of_rows
    assert any("int4: dequantise" in what for what in names_of_rows)
    page = (tmp_path / "gpu.md").read_text()
    assert "by `python -m benchmarks.gpu --rehearse`" in page
    assert f"Measured on a CPU, {results['device']['date']}" in page or torch.cuda.is_available()
    assert "| checkpoints | digests of both checkpoints | equal |" in page
    assert "Nothing on this page" not in page


def test_a_slice_that_fails_ends_the_program_and_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = []

    def make(name: str, fails: int) -> gpu.Slice:
        def run(_: gpu.Scale, __: Path) -> gpu.Rows:
            runs.append(name)
            yield {"what": name, "value": 1}
            if runs.count(name) <= fails:
                raise TrainingError(f"{name} is wrong")

        return run

    slices = {"good": make("good", 0), "bad": make("bad", 1), "last": make("last", 0)}
    monkeypatch.setattr(gpu, "SLICES", slices)
    arguments = ["--rehearse", "--folder", str(tmp_path)]
    assert gpu.main(arguments) == 1
    assert runs == ["good", "bad"]
    assert "bad is wrong" in capsys.readouterr().out
    page = (tmp_path / "gpu.md").read_text()
    assert "| bad | bad | failed: bad is wrong |" in page
    assert "| last |" not in page
    assert gpu.main(arguments) == 0
    assert runs == ["good", "bad", "bad", "last"]
    assert "| bad | bad | passed |" in (tmp_path / "gpu.md").read_text()


def test_without_results_the_page_says_that_nothing_was_measured() -> None:
    for results in (None, {"slices": {}}):
        assert next(gpu_section(results)).startswith("**Nothing on this page has been measured")


@pytest.mark.parametrize(
    ("losses", "error"),
    [
        ([1.0, 2.5], "differ from"),
        ([1.0], "the first has 1 and the second 2"),
        ([1.0, float("nan")], "differ from"),
    ],
)
def test_losses_that_differ_are_an_error(losses: list[float], error: str) -> None:
    with pytest.raises(TrainingError, match=error):
        gpu._compared("a and b", losses, [1.0, 2.0], 1e-2)


def test_losses_that_are_near_are_a_row() -> None:
    row = gpu._compared("a and b", [1.0, 2.001], [1.0, 2.0], 1e-2)
    assert row["value"] == "5.0e-04"
