"""The examples with trainers of others have the losses of one process, also after a kill."""

import json
import os
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from tests.commands import ROOT
from tests.forked_train import Ended, Forked
from tests.patience import wait_until
from tests.ports import reserved_port

pytestmark = pytest.mark.slow

EXAMPLES, STEPS = ROOT / "examples", 16
COMMITTED = "step_00000010"


def call(script: Path, arguments: Sequence[str | Path]) -> int:
    """Run a script in this process, as `python SCRIPT ARGUMENTS`."""
    sys.argv = [str(script), *map(str, arguments)]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
    return 0


def die_after(lines: int, committed: Path) -> None:
    """Kill this process when it prints a loss for the n-th time and a checkpoint is committed."""
    write, numbers = sys.stdout.write, count(1)

    def write_and_die(text: str) -> int:
        written = write(text)
        if "loss" in text and next(numbers) == lines:
            sys.stdout.flush()
            wait_until(committed.exists, f"{committed}")
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    sys.stdout.write = write_and_die  # type: ignore[method-assign]


def on_two_ranks(
    script: Path, *arguments: str | Path, prepare: Callable[[], None] = lambda: None
) -> list[Ended]:
    """Run a script as `torchrun --nproc-per-node 2` does; rank 0 calls `prepare` first."""

    def run(rank: int, port: int) -> int:
        here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in (here | address).items()}
        if rank == 0:
            prepare()
        return call(script, arguments)

    with reserved_port() as port:
        ranks = [Forked(lambda rank=rank: run(rank, port)) for rank in range(2)]  # type: ignore[misc]
        return [rank.wait() for rank in ranks]


def losses_in(text: str) -> dict[int, float]:
    """Return the losses that the loop has printed, by step."""
    rows = [line.split() for line in text.splitlines() if line.startswith("step ")]
    return {int(row[1]): float(row[3]) for row in rows}


def plain_loop(steps: int) -> list[float]:
    """Return the losses of the model of torchtitan_loop in a plain loop of one process."""
    example = SimpleNamespace(**runpy.run_path(str(EXAMPLES / "torchtitan_loop" / "model.py")))
    model, losses = example.Transformer(), []
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    schedule = SequentialLR(
        adamw,
        [LinearLR(adamw, 0.25, total_iters=3), CosineAnnealingLR(adamw, steps - 4)],
        milestones=[4],
    )
    for step in range(1, steps + 1):
        samples = example.samples_of(step)
        loss = cross_entropy(model(samples[:, :-1]).flatten(0, 1), samples[:, 1:].flatten())
        adamw.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def test_the_loop_equals_one_process_after_kill_and_conversion(tmp_path):
    """Rank 0 is killed; another run continues from a checkpoint that was converted twice."""
    example, saved, dcp, copied = EXAMPLES / "torchtitan_loop", *(tmp_path / x for x in "abc")
    options = ("--steps", str(STEPS), "--folder")
    killed, other = on_two_ranks(
        example / "train.py", *options, saved, prepare=lambda: die_after(12, saved / COMMITTED)
    )
    assert killed.code == -signal.SIGKILL, killed.text
    assert other.code, "a rank went on alone"
    for arguments in (("to_dcp", saved, dcp), ("from_dcp", dcp, copied)):
        converted = Forked(lambda a=arguments: call(example / "convert.py", a)).wait()
        assert converted.code == 0, converted.text
    again = on_two_ranks(example / "train.py", *options, copied)
    assert [rank.code for rank in again] == [0, 0], again[0].text + again[1].text
    before, after = losses_in(killed.text), losses_in(again[0].text)
    assert (list(before), list(after)) == ([*range(1, 13)], [*range(11, STEPS + 1)])
    expected = plain_loop(STEPS)
    assert list(before.values()) == pytest.approx(expected[:12], rel=1e-5)
    assert list(after.values()) == pytest.approx(expected[10:], rel=1e-5)


@pytest.mark.exhaustive
def test_the_loop_trains_in_bf16_with_compiled_layers(tmp_path):
    options = ("--bf16", "--compile", "aot_eager", "--steps", "6", "--folder", tmp_path)
    ranks = on_two_ranks(EXAMPLES / "torchtitan_loop" / "train.py", *options)
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].text + ranks[1].text
    losses = list(losses_in(ranks[0].text).values())
    assert losses == pytest.approx(plain_loop(6), rel=1e-3)
    assert losses != pytest.approx(plain_loop(6), rel=1e-6)


def plain_trainer(folder: Path) -> int:
    """Train the model of hugging_face_trainer with an unchanged Trainer in one process."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(folder), max_steps=STEPS, logging_steps=1, use_cpu=True, learning_rate=3e-3,
        per_device_train_batch_size=2, gradient_accumulation_steps=4, save_strategy="no",
        lr_scheduler_type="cosine", warmup_steps=4, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    torch.manual_seed(1)
    llama = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    rows = (torch.randint(256, (512, 1)) + 3 * torch.arange(32)) % 256
    samples = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(LlamaForCausalLM(llama), arguments, train_dataset=samples)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    return 0


def history_of(folder: Path) -> dict[int, dict[str, float]]:
    """Return what Trainer has logged, by step."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return {row["step"]: row for row in history if "loss" in row}


def test_trainer_has_the_losses_of_one_process_also_after_a_kill(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    transformers.Trainer, transformers.LlamaForCausalLM  # noqa: B018 (imported once, before forks)
    folder, plain = tmp_path / "sharded", tmp_path / "plain"
    script, states = EXAMPLES / "hugging_face_trainer" / "train.py", folder / "states"
    arguments = (script, folder, str(STEPS))
    killed, other = on_two_ranks(*arguments, prepare=lambda: die_after(12, states / COMMITTED))
    assert killed.code == -signal.SIGKILL, killed.text
    assert other.code, "a rank went on alone"
    again = on_two_ranks(*arguments)
    assert [rank.code for rank in again] == [0, 0], again[0].text + again[1].text
    ended = Forked(lambda: plain_trainer(plain)).wait()
    assert ended.code == 0, ended.text
    found, expected = history_of(folder), history_of(plain)
    assert list(found) == list(expected) == list(range(1, STEPS + 1))
    for name in ("loss", "grad_norm", "learning_rate"):
        assert [row[name] for row in found.values()] == pytest.approx(
            [row[name] for row in expected.values()], rel=1e-5
        )
    assert again[0].text.count("'loss'") == STEPS - 10
    load = transformers.LlamaForCausalLM.from_pretrained
    torch.testing.assert_close(
        load(folder).state_dict(), load(plain).state_dict(), rtol=1e-4, atol=1e-5
    )
