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
from frontier_llm.telemetry.log import close_logging, setup_logging
from frontier_llm.telemetry.metrics import Recorder, Sink, StepMetrics
from frontier_llm.telemetry.report import write_report
from frontier_llm.telemetry.sinks import make_sinks
from frontier_llm.telemetry.summary import Layout, RankSummary, RunSummary, TextSample
from frontier_llm.trainer import announce
from frontier_llm.trainer.parts import Parts
from frontier_llm.trainer.step import StepResult
from frontier_llm.trainer.throughput import Throughput

_LOG = logging.getLogger(__name__)


class Reporter:
    """Hears of everything on every rank; speaks on rank 0."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._run_dir = Path(parts.config.run.dir)
        self._start = time.perf_counter()
        self._throughput = Throughput(
            parts.config, parts.world.size, parts.accelerator, parts.choices.precision
        )
        self._samples = 0
        self._is_writer = parts.world.rank == 0
        setup_logging(parts.world.rank, self._run_dir if self._is_writer else None)
        self._recorder = Recorder(self._sinks() if self._is_writer else [])
        self._summary = RunSummary()

    def begin(self, validation_loss: float) -> None:
        """Say what is about to be trained.

        Collective over all ranks.

        Args:
            validation_loss: of the untrained model.
        """
        ranks = self._gather_ranks()
        if not self._is_writer:
            return
        self._summary = self._describe(ranks, validation_loss)
        self._summary.write(self._run_dir)
        announce.beginning(self._parts, self._summary, self._throughput.peak_reason)

    def step(
        self,
        step: int,
        result: StepResult,
        learning_rate: float,
        seconds: float,
        validation_loss: float | None,
    ) -> None:
        """Record a step."""
        self._samples += result.samples
        if not self._is_writer:
            return
        speed = self._throughput.of(seconds)
        fp16 = self._parts.choices.precision == "fp16"
        bits = None if validation_loss is None else self._bits_per_byte(validation_loss)
        self._recorder.write(
            StepMetrics(
                step=step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                learning_rate=learning_rate,
                tokens=self._tokens,
                samples=self._samples,
                step_seconds=seconds,
                tokens_per_second=speed.tokens_per_second,
                model_tflops_per_device=speed.model_tflops_per_device,
                hardware_tflops_per_device=speed.hardware_tflops_per_device,
                mfu=speed.mfu,
                hfu=speed.hfu,
                sent_bytes=result.sent,
                skipped=result.skipped,
                loss_scale=result.loss_scale if fp16 else None,
                validation_loss=validation_loss,
                validation_bits_per_byte=bits,
            )
        )
        update: dict[str, Any] = {"final_loss": result.loss, "tokens": self._tokens}
        if validation_loss is not None:
            update |= {"validation_loss": validation_loss, "validation_bits_per_byte": bits}
        self._summary = self._summary.model_copy(update=update)

    def finish(self, texts: Sequence[str], stopped_at: int | None) -> None:
        """Write the summary and the report.

        Collective over all ranks.

        Args:
            texts: what the model said to each of `trainer.sample_prompts`.
            stopped_at: the step after which the run was asked to stop, if it was.
        """
        ranks = self._gather_ranks()
        if not self._is_writer:
            return
        prompts = self._parts.config.trainer.sample_prompts
        samples = [TextSample(prompt=p, text=t) for p, t in zip(prompts, texts, strict=False)]
        reason = "all steps done" if stopped_at is None else f"stopped after step {stopped_at}"
        self._summary = self._summary.model_copy(
            update={
                "ranks": ranks,
                "seconds": time.perf_counter() - self._start,
                "samples": samples,
                "exit_code": 0 if stopped_at is None else 3,
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
        return self._samples * self._parts.config.data.sequence_length

    def _sinks(self) -> list[Sink]:
        config = self._parts.config
        return make_sinks(
            config.telemetry, self._run_dir, config.trainer.steps, config.model_dump(mode="json")
        )

    def _bits_per_byte(self, loss: float) -> float:
        """Turn nats a token into bits a byte of the validation text."""
        split = self._parts.corpus.manifest.validation
        return loss * split.tokens / split.text_bytes / math.log(2)

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
            ),
            peak_bytes=parts.accelerator.peak_bytes(),
        )
        gathered: list[RankSummary] = [mine] * parts.world.size
        dist.all_gather_object(gathered, mine)
        return gathered

    def _describe(self, ranks: list[RankSummary], validation_loss: float) -> RunSummary:
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
            initial_validation_loss=validation_loss,
        )
