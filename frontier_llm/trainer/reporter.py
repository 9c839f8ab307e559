"""What a run says: its log, its metrics, its summary and its report. Rank 0 writes."""

import logging
import math
import platform
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from frontier_llm.errors import FrontierError
from frontier_llm.geometry.inventory import count_parameters
from frontier_llm.geometry.layout import predict_bytes
from frontier_llm.geometry.lengths import run_lengths
from frontier_llm.telemetry import jsonl
from frontier_llm.telemetry.log import close_logging, setup_logging
from frontier_llm.telemetry.metrics import Recorder, Sink, StepMetrics
from frontier_llm.telemetry.report import write_report
from frontier_llm.telemetry.sinks import make_sinks
from frontier_llm.telemetry.summary import Layout, PlanRow, RankSummary, RunSummary, TextSample
from frontier_llm.trainer import announce
from frontier_llm.trainer.ledger import Ledger
from frontier_llm.trainer.parts import Parts
from frontier_llm.trainer.planned import Planned, values_of, words_of
from frontier_llm.trainer.resume import Resumed
from frontier_llm.trainer.step import StepResult
from frontier_llm.trainer.throughput import Throughput

_LOG = logging.getLogger(__name__)


class Reporter:
    """Hears of everything on every rank; speaks on rank 0."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._progress = parts, parts.progress
        self._run_dir = Path(parts.config.run.dir)
        self._start = time.perf_counter()
        self._throughput = Throughput(
            parts.config, parts.world.size, parts.accelerator, parts.choices.precision
        )
        self._is_writer = parts.world.rank == 0
        setup_logging(parts.world.rank, self._run_dir if self._is_writer else None)
        self._recorder = Recorder(self._sinks() if self._is_writer else [])
        self._ledger = Ledger(self._run_dir)
        self._planned = Planned(parts) if self._is_writer and parts.config.plan != "off" else None
        self._summary = RunSummary()

    def begin(self, validation_loss: float, resumed: Resumed | None) -> None:
        """Say what is about to be trained.

        Collective over all ranks.

        Args:
            validation_loss: of the model as it is now.
            resumed: what the run goes on from; None where it begins.
        """
        ranks = self._gather_ranks()
        if not self._is_writer:
            return
        before = RunSummary.read(self._run_dir) if resumed else None
        untrained = before.initial_validation_loss if before else validation_loss
        self._summary = self._describe(ranks, untrained)
        self._summary.write(self._run_dir)
        announce.beginning(self._parts, self._summary, self._throughput.peak_reason)
        if resumed is not None:
            jsonl.cut(self._run_dir, self._progress.step)
            self._ledger.event("resume", self._progress.step, changes=resumed.changes)
            announce.resumed(resumed, self._progress, validation_loss)
        if self._parts.blend is not None:
            segments = self._parts.blend.schedule.to_meta()
            self._ledger.event("blend", self._progress.step, segments=segments)

    def read(self, step: int, first_sample: int, result: StepResult) -> None:
        """Note which samples a step has read; that it is done may never be said."""
        if self._is_writer:
            self._ledger.step(step, first_sample, result.samples, result.digest)

    def step(
        self,
        result: StepResult,
        learning_rate: float,
        seconds: float,
        validation_loss: float | None,
    ) -> None:
        """Record the step that was just done."""
        if not self._is_writer:
            return
        step = self._progress.step
        if result.skipped:
            self._ledger.event("skip", step, loss=str(result.loss), norm=str(result.grad_norm))
        speed = self._throughput.of(seconds)
        fp16 = self._parts.choices.precision == "fp16"
        bits = self._bits_per_byte(validation_loss)
        plan = self._compare_plan()
        self._recorder.write(
            StepMetrics(
                step=step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                learning_rate=learning_rate,
                tokens=self._tokens,
                samples=self._progress.samples,
                step_seconds=seconds,
                tokens_per_second=speed.tokens_per_second,
                model_tflops_per_device=speed.model_tflops_per_device,
                hardware_tflops_per_device=speed.hardware_tflops_per_device,
                mfu=speed.mfu,
                hfu=speed.hfu,
                sent_bytes=result.sent,
                unquantised_bytes=result.unquantised,
                checkpoint_stall_seconds=self._parts.checkpoints.take_stall_seconds(),
                skipped=result.skipped,
                loss_scale=result.loss_scale if fp16 else None,
                validation_loss=validation_loss,
                validation_bits_per_byte=bits,
                plan=values_of(plan),
            )
        )
        update: dict[str, Any] = {"final_loss": result.loss, "tokens": self._tokens}
        if validation_loss is not None:
            update |= {"validation_loss": validation_loss, "validation_bits_per_byte": bits}
        self._summary = self._summary.model_copy(update=update)

    def _compare_plan(self) -> list[PlanRow]:
        """Put the plan beside what the first steps measured, once."""
        timer = self._parts.step.timer
        if self._planned is None or not timer.is_complete:
            return []
        rows = self._planned.compare()
        for words in words_of(rows):
            _LOG.info("%-10s %s", "plan", words)
        self._planned.warn(rows)
        self._planned = None
        self._summary = self._summary.model_copy(update={"plan": rows})
        return rows

    def rewound(self, spike: int, loss: float) -> None:
        """Note that a spike has sent the run back to where it is now."""
        if not self._is_writer:
            return
        step, behind = self._progress.step, self._progress.next_sample
        jsonl.cut(self._run_dir, step)
        self._ledger.event("rewind", step, spike=spike, loss=loss, next_sample=behind)
        _LOG.warning(
            "step %d: the loss spiked to %.4g. The run goes on from step %d, with the samples "
            "from %d on; those in between are left out",
            spike,
            loss,
            step,
            behind,
        )

    def finish(self, texts: Sequence[str], stopped: bool) -> None:
        """Write the summary and the report.

        Collective over all ranks.

        Args:
            texts: what the model said to each of `trainer.sample_prompts`.
            stopped: whether the run was asked to stop before its end.
        """
        ranks = self._gather_ranks()
        if not self._is_writer:
            return
        prompts = self._parts.config.trainer.sample_prompts
        samples = [TextSample(prompt=p, text=t) for p, t in zip(prompts, texts, strict=False)]
        reason = f"stopped after step {self._progress.step}" if stopped else "all steps done"
        self._summary = self._summary.model_copy(
            update={
                "ranks": ranks,
                "seconds": time.perf_counter() - self._start,
                "samples": samples,
                "exit_code": 3 if stopped else 0,
                "exit_reason": reason,
            }
        )
        self._recorder.close()  # ends the live progress line before the last words
        self._recorder = Recorder([])
        self._summary.write(self._run_dir)
        announce.end(self._summary, write_report(self._run_dir))

    def close(self, error: BaseException | None) -> None:
        """Close all sinks and the log; a run that failed gets its report here.

        Not collective: other ranks may be gone.
        """
        try:
            self._recorder.close()
            if self._is_writer and error is not None and self._summary.exit_code is None:
                self._report_failure(error)
        finally:
            close_logging()

    def _report_failure(self, error: BaseException) -> None:
        code = error.exit_code if isinstance(error, FrontierError) else 1
        update = {
            "seconds": time.perf_counter() - self._start,
            "exit_code": code,
            "exit_reason": str(error) or type(error).__name__,
        }
        self._summary = self._summary.model_copy(update=update)
        try:
            self._summary.write(self._run_dir)
            write_report(self._run_dir)
        except Exception as trouble:  # the cause of the failure must not be hidden by this
            _LOG.warning("no report: %s", trouble)

    @property
    def _tokens(self) -> int:
        return self._progress.samples * run_lengths(self._parts.config).total

    def _sinks(self) -> list[Sink]:
        config = self._parts.config
        return make_sinks(
            config.telemetry, self._run_dir, config.trainer.steps, config.model_dump(mode="json")
        )

    def _bits_per_byte(self, loss: float | None) -> float | None:
        """Turn nats a token into bits a byte, where every token of the text was predicted."""
        if loss is None or self._parts.config.data.objective == "spans":
            return None
        return loss / self._parts.corpus.validation_bytes_per_token / math.log(2)

    def _gather_ranks(self) -> list[RankSummary]:
        """Collect what every rank holds.

        Collective over all ranks.
        """
        parts = self._parts
        at = parts.groups.at
        mine = RankSummary(
            rank=parts.world.rank,
            host=parts.world.host,
            tensor=at.tensor,
            data=at.data,
            pipeline=at.pipeline,
            layers=[
                (piece.layers[0], piece.layers[-1])
                for piece in parts.model.pieces
                if piece.stage == at.pipeline
            ],
            memory_bytes=parts.states.memory_bytes(),
            predicted_bytes=predict_bytes(
                parts.config,
                at.pipeline,
                parts.states.factors,
                parts.model.transformer.params_dtype.itemsize,
                parts.groups.grid,
            ),
            peak_bytes=parts.accelerator.peak_bytes(),
        )
        gathered: list[RankSummary] = [mine] * parts.world.size
        dist.all_gather_object(gathered, mine)
        return gathered

    def _describe(self, ranks: list[RankSummary], untrained: float | None) -> RunSummary:
        parts, grid = self._parts, self._parts.groups.grid
        parallel = parts.config.parallel
        return RunSummary(
            model=parts.config.model.name,
            parameters=count_parameters(parts.config.model, parts.config.data.sequence_length),
            layout=Layout(
                tensor=grid.tensor,
                pipeline=grid.pipeline,
                chunks=parallel.chunks,
                data=grid.data,
                sequence=parallel.sequence,
                ranks_per_node=grid.ranks_per_node,
            ),
            ranks=ranks,
            precision=parts.choices.precision,
            device=parts.accelerator.name,
            kernels=f"{parts.kernels.source} ({parts.kernels.reason})",
            versions={
                "python": platform.python_version(),
                "torch": version("torch"),
                "megatron-core": version("megatron-core"),
            },
            total_steps=parts.config.trainer.steps,
            initial_validation_loss=untrained,
        )
