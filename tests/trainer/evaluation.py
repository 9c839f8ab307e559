"""An evaluation of a rig without files."""

from types import SimpleNamespace
from typing import Any

from frontier_llm.data.batch import Batch
from frontier_llm.trainer.evaluate import Evaluation
from tests.trainer.rig import Rig


class EvaluationLoader:
    """Reads the batches of the rig instead of text."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig

    def micro_batches(self, first: int) -> list[Batch]:
        return self.rig.batches(first)

    def sample_indices(self, first: int) -> list[list[int]]:
        return [[first] * batch.samples for batch in self.rig.batches(first)]


class Windows:
    """The validation samples of one corpus."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def corpus(self, index: int) -> int:
        return 0


def fake_corpora(*bytes_per_token: float) -> Any:
    """Corpora of equal shares whose tokens have these mean lengths."""
    names = tuple("abcdef"[: len(bytes_per_token)])
    splits = [SimpleNamespace(text_bytes_per_token=size) for size in bytes_per_token]
    return SimpleNamespace(
        names=names,
        weights=dict.fromkeys(names, 1 / len(names)),
        corpora=[SimpleNamespace(manifest=SimpleNamespace(validation=s)) for s in splits],
        tokenizer=SimpleNamespace(eod=0),
    )


def evaluation(rig: Rig, loader: Any, corpora: Any = None, windows: Any = None) -> Evaluation:
    """Return an evaluation, by default of the samples of one step."""
    windows = windows or Windows(rig.config.data.global_batch)
    corpora = corpora or fake_corpora(2.0)
    return Evaluation(rig.model, rig.groups, rig.config, loader, corpora, windows)
