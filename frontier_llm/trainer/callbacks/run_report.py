"""Writes summary.json, the facts of a run for programs, and report.html, the report for people."""

import logging
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from frontier_llm.errors import FrontierError
from frontier_llm.geometry.inventory import count_parameters
from frontier_llm.telemetry.history import History
from frontier_llm.telemetry.summary import Layout, RankSummary, RunSummary, TextSample
from frontier_llm.trainer.callbacks.callback import Callback, StepEnd
from frontier_llm.trainer.context import TrainerContext
from frontier_llm.trainer.resume import Resumed
from frontier_llm.trainer.sample import prompts_of

_LOG = logging.getLogger(__name__)
_SAMPLING_TEMPERATURE = 0.8
"""Temperature at which the text samples of the report are drawn."""


class RunReport(Callback):
    """Collects facts of the run. Rank 0 writes the summary, and at the end also the report.

    `on_start` and `on_stop` are collective over all ranks.

    Attributes:
        summary: facts of the run so far; complete only on rank 0.
        path: path of report.html after the end of the run; before, the run directory.
    """

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context)
        self._run_dir = Path(context.config.run.dir)
        self._is_writer = context.world.rank == 0
        self._was_done = False
        self.summary = RunSummary()
        self.path = self._run_dir

    def on_start(self, validation_loss: float, resumed: Resumed | None) -> None:
        """Write a first summary, with the facts that are known before the first step."""
        ranks = self._gather_ranks()
        if not self._is_writer:
            return
        before = RunSummary.read(self._run_dir) if resumed else None
        initial_loss = before.initial_validation_loss if before else validation_loss
        self.summary = self._describe(ranks, initial_loss)
        if resumed:
            self._update(**self._recorded(), plan=before.plan if before else [])
        step, total = self.context.progress.step, self.context.config.trainer.steps
        if before and before.exit_code == 0 and before.total_steps == step >= total:
            self.summary, self._was_done = before, True  # the run has nothing to do
        self.summary.write(self._run_dir)

    def on_replacement(self, last_step: int) -> None:
        """Continue with the summary that a rank 0 has written."""
        if self._is_writer:
            self.summary = RunSummary.read(self._run_dir) or self.summary

    def on_step_end(self, end: StepEnd) -> None:
        """Add the comparison with the plan to the summary."""
        if self._is_writer and end.plan:
            self._update(plan=end.plan)

    def on_stop(self, *, is_early: bool) -> None:
        """Sample text from the model, unless the run stops early; write summary and report."""
        samples = [] if is_early else self._sample()
        ranks = self._gather_ranks()
        if not self._is_writer:
            return
        step = self.context.progress.step
        if not self._was_done:
            self._update(
                **self._recorded(),
                ranks=ranks,
                samples=samples,
                exit_code=3 if is_early else 0,
                exit_reason=f"stopped after step {step}" if is_early else "all steps done",
            )
        self._write_files()

    def on_error(self, error: BaseException) -> None:
        """Write summary and report of a failed run on rank 0."""
        if not self._is_writer or self.summary.exit_code is not None:
            return
        self._update(
            **self._recorded(),
            exit_code=error.exit_code if isinstance(error, FrontierError) else 1,
            exit_reason=str(error) or type(error).__name__,
        )
        self._write_files()

    def _write_files(self) -> None:
        """Write summary.json and report.html; a failure does not decide how the run ends."""
        # loads matplotlib, which would delay the start of every rank
        from frontier_llm.telemetry.report_page import write_report

        try:
            if not self._was_done:
                self.summary.write(self._run_dir)
            self.path = write_report(self._run_dir)
        except Exception as failure:
            _LOG.warning("the report is not written: %s", failure)

    def _recorded(self) -> dict[str, float | None]:
        """Return the fields that follow from metrics.jsonl, which has the steps of all starts."""
        history = History.read(self._run_dir)
        if not len(history):
            return {}
        return {
            "tokens": int(history.last("tokens") or 0),
            "seconds": history.total("step_seconds"),
            "final_loss": history.column("loss")[-1],
            "validation_loss": history.last("validation_loss"),
            "validation_bits_per_byte": history.last("validation_bits_per_byte"),
        }

    def _update(self, **facts: Any) -> None:
        """Set fields of the summary."""
        self.summary = self.summary.model_copy(update=facts)

    def _sample(self) -> list[TextSample]:
        """Let the model continue `trainer.sample_prompts`. Collective over all ranks."""
        trainer = self.context.config.trainer
        if not trainer.sample_tokens:
            return []
        prompts = prompts_of(self.context.config, self.context.data.corpus)
        texts = self.context.sampler.continue_texts(
            prompts, trainer.sample_tokens, _SAMPLING_TEMPERATURE, trainer.seed
        )
        pairs = zip(prompts, texts, strict=True)
        return [TextSample(prompt=prompt, text=text) for prompt, text in pairs]

    def _gather_ranks(self) -> list[RankSummary]:
        """Return the place and memory of every rank. Collective over all ranks."""
        context, position = self.context, self.context.groups.coordinates
        own = RankSummary(
            rank=context.world.rank,
            host=context.world.host,
            tensor=position.tensor,
            data=position.data,
            pipeline=position.pipeline,
            layers=[
                (chunk.layers[0], chunk.layers[-1])
                for chunk in context.model.layout.chunks_of_stage(position.pipeline)
            ],
            memory_bytes=context.states.memory_bytes(),
            predicted_bytes=context.model.layout.state_bytes(position.pipeline, position.data),
            peak_bytes=context.hardware.accelerator.peak_bytes(),
        )
        gathered: list[RankSummary] = [own] * context.world.size
        dist.all_gather_object(gathered, own)
        return gathered

    def _describe(self, ranks: list[RankSummary], initial_loss: float | None) -> RunSummary:
        """Return the summary before the first step.

        Args:
            ranks: place and memory of every rank.
            initial_loss: validation loss before the first step of the run.
        """
        config, grid = self.context.config, self.context.groups.grid
        hardware = self.context.hardware
        return RunSummary(
            model=config.model.name,
            parameters=count_parameters(config.model, config.data.sequence_length),
            layout=Layout(
                tensor=grid.tensor,
                pipeline=grid.pipeline,
                chunks=config.parallel.chunks,
                head_stage=self.context.model.layout.head_stage,
                data=grid.data,
                sequence=config.parallel.sequence,
                ranks_per_node=grid.ranks_per_node,
            ),
            ranks=ranks,
            precision=hardware.precision.name,
            device=hardware.accelerator.name,
            kernels=f"{hardware.kernels.source} ({hardware.kernels.reason})",
            versions={
                "python": platform.python_version(),
                "torch": version("torch"),
                "megatron-core": version("megatron-core"),
            },
            total_steps=config.trainer.steps,
            initial_validation_loss=initial_loss,
            validation_samples=len(self.context.data.validation_windows),
        )
