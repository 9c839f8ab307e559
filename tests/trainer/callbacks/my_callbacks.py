"""Callbacks as a user writes them, which tests name in `callbacks=[...]`."""

import json
import os
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from frontier_llm.trainer.callbacks.callback import Callback

MODULE = __name__


class Recorder(Callback):
    """Writes the moments of a run to a file per rank, with a collective in each of them."""

    def __init__(self, context):
        super().__init__(context)
        self._path = Path(context.config.run.dir) / f"moments_{context.world.rank}"

    def _note(self, text):
        with self._path.open("a") as file:
            file.write(f"{text}\n")

    def _note_together(self, text):
        """All ranks must be at the same moment, or the sum is wrong."""
        digest = torch.tensor([float(sum(text.encode()))], dtype=torch.float64)
        expected = digest * dist.get_world_size()
        dist.all_reduce(digest)
        assert digest == expected, text
        self._note(text)

    def on_start(self, validation_loss, resumed):
        assert validation_loss > 0
        self._note_together(f"start at {0 if resumed is None else resumed.step}")

    def on_step_begin(self, step):
        self._note_together(f"begin {step}")

    def on_update(self, step, first_sample, result):
        self._note_together(f"update {step} from sample {first_sample}")

    def on_evaluation(self, step, validation_loss):
        self._note_together(f"evaluation {step}")

    def on_step_end(self, end):
        assert end.metrics.loss == end.result.loss
        self._note_together(f"end {end.metrics.step}")

    def on_checkpoint_begin(self, step):
        self._note_together(f"checkpoint {step}")

    def on_checkpoint_committed(self, checkpoint):
        assert (checkpoint.folder / "manifest.json").exists()
        self._note_together(f"committed {checkpoint.step}")

    def on_rewind(self, rewind):
        self._note_together(f"rewind from {rewind.from_step}: {rewind.reason}")

    def on_stop(self, *, is_early):
        self._note_together(f"stop, early: {is_early}")

    def on_error(self, error):
        self._note(f"error {type(error).__name__}")

    def close(self):
        self._note("close")


class NotesSettings(Callback):
    """Writes the settings for exact repetition to a file per rank, in the last step."""

    def on_step_end(self, end):
        found = {
            "enabled": torch.are_deterministic_algorithms_enabled(),
            "warns only": torch.is_deterministic_algorithms_warn_only_enabled(),
            "fills memory": torch.utils.deterministic.fill_uninitialized_memory,
            "products": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        }
        run_dir = Path(self.context.config.run.dir)
        (run_dir / f"settings_{self.context.world.rank}").write_text(json.dumps(found))


class LateNews(Recorder):
    """Learns of commits only at the end of the run, as if each took until then."""

    def __init__(self, context):
        super().__init__(context)
        state = context.checkpoints.state
        context.checkpoints.state = lambda: replace(state(), committed=False)


class GoesBackOnce(Callback):
    """Sends the run back after step 5."""

    asked = False

    def on_step_end(self, end):
        if end.metrics.step == 5 and not self.asked:
            self.asked = True
            end.rewind_reason = "step 5 is not to my taste"


class Fails(Callback):
    """Raises in the second step."""

    def on_step_end(self, end):
        if end.metrics.step == 2:
            raise ValueError("the loss is not to my taste")


class FailsAtOnce(Callback):
    """Raises in its constructor."""

    def __init__(self, context):
        super().__init__(context)
        raise KeyError("no such file")


class NoCallback:
    """Does not inherit from Callback."""
