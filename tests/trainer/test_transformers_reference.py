"""Training against models and a loop in which no code of this project runs.

The reference is a model of transformers in a loop of plain PyTorch: AdamW and the clipping of
torch, the schedule of transformers, fp32. From this program it takes nothing but token ids. It
derives labels, masks, documents and the inputs of decoders by itself. This program starts from the
converted weights (`frontier-llm convert`, `run.init_from`) and is run as by a user.
"""

import functools
import io
import json
import shlex
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from frontier_lab.commands import convert
from frontier_lab.single_process_model import read_config
from frontier_llm.data.batch import Batch
from frontier_llm.data.corpora import open_all, prepare_all
from frontier_llm.data.run_loader import make_loader
from tests.convert.test_convert import GEMMA_SIZES, LLAMA, LLAMA3, THEIRS, random_model
from tests.convert.test_gemma import tensors_of
from tests.covering import covering
from tests.forked_train import train
from tests.texts import prose

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Detected call of `lr_sch")]

STEPS, WARMUP, SAMPLES = 20, 5, 8
PEAK, LOWEST, DECAY, CLIP = 3e-3, 3e-4, 0.1, 1.0
"""Some steps of the decoder-only models are clipped, and others are not. If all were, AdamW would
hide a wrong limit."""
EPSILON = 1e-6
"""AdamW divides each gradient by its size. With 1e-8, gradients that are rounding errors move the
weights of T5Gemma 2 as far as others do: if one bit of its first weights changes, its losses differ
by up to 3e-6."""
LIMITS = {"losses": 1e-6, "norms": 1e-5, "rates": 1e-6, "weights": 1.5e-4}
"""Relative differences: the largest one of the losses and of the rates, the median of the norms of
gradients, and that of all weights in relation to their update."""
MODEL = {"vocab_size": 503, "max_position_embeddings": 64}
"""The number of tokens is odd, so that tensor parallelism pads the table."""
DECODER = {**LLAMA, **MODEL}
MODELS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("LlamaForCausalLM", {**DECODER, "rope_parameters": LLAMA3}, ("data=text",)),
    "qwen3": (
        "Qwen3ForCausalLM",
        {**DECODER, "head_dim": 24, "tie_word_embeddings": True},
        ("data=text", "data.documents=separate", "data.loss_mean=tokens"),
    ),
    "t5gemma": (
        "T5GemmaForConditionalGeneration",
        {
            "encoder": {**GEMMA_SIZES, **MODEL, "num_hidden_layers": 2},
            "decoder": {**GEMMA_SIZES, **MODEL, "num_hidden_layers": 4},
            "vocab_size": 503,
        },
        ("data=text_spans", "data.sequence_length=40"),
    ),
    "t5gemma2": (
        "T5Gemma2ForConditionalGeneration",
        {
            "encoder": {
                **THEIRS["t5gemma2"][1]["encoder"],
                "text_config": {**GEMMA_SIZES, **MODEL, "num_hidden_layers": 2},
            },
            "decoder": {**GEMMA_SIZES, **MODEL, "num_hidden_layers": 4},
        },
        ("data=text_spans", "data.sequence_length=40"),
    ),
    "mt5": (
        "MT5ForConditionalGeneration",
        {**THEIRS["mt5"][1], "vocab_size": 503, "num_decoder_layers": 2},
        ("data=text_spans", "data.sequence_length=40"),
    ),
}
"""By name: class, settings of its configuration, and overrides of our run. The targets of both
encoder-decoders are padded from 10 tokens to 16. In 3D the first stage of T5Gemma has a layer of
its decoder."""
LAYOUTS = {
    "one rank": ("launch.ranks=1", "parallel.pipeline=1"),
    "3D": (
        "launch.ranks=8", "parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2",
        "sharding=zero3",
    ),
}  # fmt: skip
RUN = (
    f"trainer.steps={STEPS}", f"data.global_batch={SAMPLES}", "data.micro_batch=2",
    "data.sequence_length=32", "precision=fp32", "optimizer=adamw", f"optimizer.clip_norm={CLIP}",
    f"optimizer.learning_rate={PEAK}", f"optimizer.minimum_learning_rate={LOWEST}",
    f"optimizer.warmup_steps={WARMUP}", f"optimizer.weight_decay={DECAY}",
    f"optimizer.epsilon={EPSILON}",
    "trainer.evaluate_every_steps=null", "trainer.evaluate_batches=1", "trainer.sample_tokens=0",
    "telemetry.wandb=off",
)  # fmt: skip
Tokens = tuple[torch.Tensor, ...]
"""[samples, length + 1] of a decoder-only model; inputs and targets of an encoder-decoder."""


@dataclass(frozen=True)
class Trained:
    """The numbers of all steps, and the final weights under the names of transformers."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    weights: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Loop:
    """The choices of the reference that its mutants change."""

    is_decayed: Callable[[torch.Tensor], bool] = lambda parameter: parameter.dim() > 1
    clip: float = CLIP
    beta2: float = 0.95
    rates_late: bool = False
    """Whether each step has the learning rate of the step before."""
    separates: bool = True
    """Whether documents of a sample do not read each other."""


def make_model(kind: str) -> Any:
    architecture, settings, _ = MODELS[kind]
    return random_model(architecture, settings)


def their_arguments(kind: str, tokens: Tokens, end: int, loop: Loop) -> dict[str, Any]:
    """Derive the arguments of their model from token ids alone.

    Args:
        kind: key of MODELS.
        tokens: the samples of a step.
        end: token that ends a document.
        loop: whether documents are separate.
    """
    if kind in ("mt5", "t5gemma", "t5gemma2"):  # it makes the inputs of the decoder itself
        inputs, targets = tokens
        labels = targets.masked_fill(targets == 0, -100)
        return {"input_ids": inputs, "attention_mask": (inputs != 0).long(), "labels": labels}
    (window,) = tokens
    if kind == "llama" or not loop.separates:
        return {"input_ids": window, "labels": window}
    documents = (window == end).cumsum(1) - (window == end).long()
    is_first = torch.ones_like(window, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    places = torch.arange(window.shape[1]).expand_as(window)
    starts = torch.where(is_first, places, 0).cummax(1).values
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return {
        "input_ids": window,
        "position_ids": places - starts,
        "attention_mask": same & (places[0][:, None] >= places[0]),
        "labels": window.masked_fill(is_first, -100),
    }


def train_theirs(kind: str, steps: list[Tokens], end: int, loop: Loop) -> Trained:
    """Train their model on samples of `steps`, in one batch per step."""
    model = make_model(kind).train()
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if loop.is_decayed(p)], "weight_decay": DECAY},
        {"params": [p for p in parameters if not loop.is_decayed(p)], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, loop.beta2), eps=EPSILON)
    schedule = transformers.get_cosine_with_min_lr_schedule_with_warmup(
        adamw, WARMUP, STEPS, min_lr=LOWEST
    )
    result = Trained([], [], [], dict(model.named_parameters()))
    for tokens in steps:
        if not loop.rates_late:
            schedule.step()
        loss = model(**their_arguments(kind, tokens, end, loop)).loss
        adamw.zero_grad()
        loss.backward()
        result.norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, loop.clip)))
        result.rates.append(adamw.param_groups[0]["lr"])
        adamw.step()
        result.losses.append(loss.item())
        if loop.rates_late:
            schedule.step()
    return result


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Lines, each of which is a document."""
    folder = tmp_path_factory.mktemp("corpus")
    records = [json.dumps({"text": line}) for line in prose(30).splitlines() if len(line) > 20]
    (folder / "lines.jsonl").write_text("\n".join(records))
    return [f"data.path={folder}/lines.jsonl", f"data.directory={folder}/prepared"]


def convert_model(kind: str, folder: Path) -> dict[str, str]:
    """Convert a random model of theirs; return the overrides that the command prints."""
    transformers.utils.logging.disable_progress_bar()  # it keeps a thread
    make_model(kind).save_pretrained(folder / "theirs")
    with redirect_stdout(io.StringIO()) as printed:
        convert.main(["--from", "hf", f"{folder}/theirs", f"{folder}/ours", "--no-check"])
    words = shlex.split(printed.getvalue().splitlines()[-1])
    assert words[:2] == ["frontier-llm", "train"]
    # the random model has no tokenizer of its own, so that one may be trained on the text
    own = {"run.allow_changes": "[data.tokenizer]"}
    return dict(word.split("=", 1) for word in words[2:]) | own


def train_ours(folder: Path, overrides: dict[str, str]) -> Trained:
    """Run the program; read its metrics, and its last checkpoint as transformers does."""
    run, exported = folder / "run", folder / "exported"
    ended = train(*(f"{key}={value}" for key, value in overrides.items()), f"run.dir={run}")
    assert ended.code == 0, ended.text
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    with redirect_stdout(io.StringIO()):
        convert.main(["--to", "hf", str(run), str(exported), "--no-check"])
    losses, norms, rates = (
        [line[key] for line in lines] for key in ("loss", "grad_norm", "learning_rate")
    )
    return Trained(losses, norms, rates, tensors_of(exported))


def tokens_of(batches: list[Batch]) -> Tokens:
    """Return the token ids of a step; masks and what else follows from them are left out."""
    columns = [
        (torch.cat([b.tokens, b.labels[:, -1:]], dim=1),)
        if b.encoder_tokens is None
        else (b.encoder_tokens, b.labels)
        for b in batches
    ]
    return tuple(torch.cat(column) for column in zip(*columns, strict=True))


def read_tokens(run: Path) -> tuple[list[Tokens], int]:
    """Return the samples of every step of a run, and the token that ends a document."""
    config = read_config(run)
    corpora = open_all(config.data, prepare_all(config.data))
    loader = make_loader(config, corpora, 0, 1, train=True)
    steps = [tokens_of(loader.micro_batches(step * SAMPLES)) for step in range(STEPS)]
    loader.close()
    return steps, corpora.tokenizer.eod


def relative(mine: list[float], theirs: list[float]) -> torch.Tensor:
    expected = torch.tensor(theirs, dtype=torch.float64)
    return (torch.tensor(mine, dtype=torch.float64) / expected - 1).abs()


@dataclass(frozen=True)
class Case:
    """A trained model of ours, and what the reference needs."""

    kind: str
    ours: Trained
    steps: list[Tokens]
    end: int

    def differences(self, loop: Loop) -> dict[str, float]:
        """Return the differences from the reference that exceed the limits."""
        theirs = train_theirs(self.kind, self.steps, self.end, loop)
        found = {
            "losses": relative(self.ours.losses, theirs.losses).max(),
            "norms": relative(self.ours.norms, theirs.norms).median(),
            "rates": relative(self.ours.rates, theirs.rates).max(),
            "weights": self._of_weights(theirs.weights),
        }
        return {name: float(n) for name, n in found.items() if not n <= LIMITS[name]}

    def _of_weights(self, theirs: dict[str, torch.Tensor]) -> torch.Tensor:
        squares = torch.zeros(2, dtype=torch.float64)
        for name, initial in make_model(self.kind).named_parameters():
            if "vision" in name or "multi_modal" in name:
                continue
            own = self.ours.weights[name.replace("text_model.", "")]
            for place, other in enumerate((own, initial)):
                squares[place] += (other - theirs[name]).detach().double().square().sum()
        return (squares[0] / squares[1]).sqrt()


@pytest.fixture(scope="module")
def case_of(
    corpus: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Case]:
    """Train each model once in each layout that a test asks for."""

    @functools.cache
    def case(kind: str, layout: str) -> Case:
        folder = tmp_path_factory.mktemp(kind)
        overrides = convert_model(kind, folder)
        for word in (*RUN, *MODELS[kind][2], *LAYOUTS[layout], *corpus):
            key, value = word.split("=", 1)
            overrides[key] = value
        ours = train_ours(folder, overrides)
        return Case(kind, ours, *read_tokens(folder / "run"))

    return case


CASES = [(kind, layout) for layout in LAYOUTS for kind in MODELS]
USUAL = (
    ("qwen3", "one rank"), ("t5gemma2", "one rank"), ("llama", "3D"),
)  # fmt: skip
"""A layout in 3D, and an encoder-decoder; the others are exhaustive.

Other tests compare encoder-decoders in 3D with one process, and their logits with those of
transformers.
"""


@pytest.mark.parametrize(
    "case", covering(CASES, [case for case in CASES if case not in USUAL]), ids=str
)
def test_twenty_steps_equal_those_of_transformers(
    case: tuple[str, str], case_of: Callable[[str, str], Case]
) -> None:
    assert case_of(*case).differences(Loop()) == {}


MUTANTS: dict[str, tuple[str, Loop, set[str]]] = {
    "norms are decayed": ("llama", Loop(is_decayed=lambda _: True), {"losses", "weights"}),
    "rates of the step before": (
        "llama", Loop(rates_late=True), {"losses", "norms", "rates", "weights"},
    ),
    "another limit of the norm": ("llama", Loop(clip=1.01 * CLIP), {"losses", "weights"}),
    "another beta": ("qwen3", Loop(beta2=0.951), {"losses", "weights"}),
    "documents read each other": ("qwen3", Loop(separates=False), {"losses", "norms", "weights"}),
}  # fmt: skip
"""By name: the model, the changed reference, and what must differ."""


@pytest.mark.parametrize(
    "mutant", covering(MUTANTS, ["rates of the step before", "another beta", "norms are decayed"])
)
def test_a_wrong_reference_is_noticed(mutant: str, case_of: Callable[[str, str], Case]) -> None:
    kind, loop, expected = MUTANTS[mutant]
    assert expected <= case_of(kind, dict(USUAL)[kind]).differences(loop).keys()
