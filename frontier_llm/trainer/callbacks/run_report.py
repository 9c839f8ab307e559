"""What a run tells people: lines of the log, summary.json for programs, and report.html."""

import logging
import math
import os
import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from frontier_llm.checkpoint.rank_objects import gathered
from frontier_llm.config.checkpoint import CheckpointConfig
from frontier_llm.config.paths import on_this_node
from frontier_llm.config.recovery import RecoveryConfig
from frontier_llm.data.run_loader import describe_samples
from frontier_llm.data.tokenizer_source import unused_rows
from frontier_llm.device.identity import DEVICE_VARIABLES, variables
from frontier_llm.errors import FrontierError
from frontier_llm.geometry.inventory import count_parameters
from frontier_llm.geometry.partition import Survives, survives
from frontier_llm.saving.changes import OF_CORPUS, OF_ORDER
from frontier_llm.saving.restorer import Resumed
from frontier_llm.telemetry.history import History
from frontier_llm.telemetry.metrics import BITS_PER_BYTE
from frontier_llm.telemetry.summary import Layout, RankSummary, RunSummary, TextSample
from frontier_llm.trainer.callbacks.callback import Callback, Rewind, StepEnd
from frontier_llm.trainer.context import TrainerContext
from frontier_llm.trainer.learning_rate import LearningRate
from frontier_llm.trainer.sample import prompts_of
from frontier_llm.units import counted, format_bytes, format_count, format_seconds

_LOG = logging.getLogger(__name__)

_SAMPLING_TEMPERATURE = 0.8
"""Temperature at which the text samples of the report are drawn."""
OF_VALIDATION = {*OF_CORPUS, "data.path", "data.corpora", "data.denoisers", "data.documents",
                 "data.packing", "data.sequence_length"}  # fmt: skip
"""Keys that change the samples of the validation."""


class RunReport(Callback):
    """Writes summary.json, the facts of a run for programs, and report.html, for people.

    All ranks collect facts. Rank 0 writes the summary, and at the end also the report. `on_start`
    and `on_stop` are collective over all ranks. The `summary` so far is complete only on rank 0.
    The `path` is that of report.html after the end of the run; before, the run directory.
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
        since = before.validation_since if before else 0
        if resumed and self._reads_other_samples(resumed):
            initial_loss, since = validation_loss, self.context.progress.step
        self.summary = self._describe(ranks, initial_loss)
        self._update(validation_since=since)
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
        since = self.summary.validation_since
        validated = history.last_point("validation_loss", since)
        bits_per_byte = history.last_point("validation_bits_per_byte", since)
        return {
            "tokens": int(history.last("tokens") or 0),
            "seconds": history.total("step_seconds"),
            "final_loss": history.column("loss")[-1],
            "validation_loss": validated and validated[1],
            "validation_step": validated and validated[0],
            "validation_bits_per_byte": bits_per_byte and bits_per_byte[1],
        }

    def _reads_other_samples(self, resumed: Resumed) -> bool:
        """Whether a validation reads other samples than before a resume."""
        is_other = resumed.meta["corpus"] != self.context.data.corpus.manifest.digest
        return is_other or not OF_VALIDATION.isdisjoint(resumed.changes)

    def _update(self, **facts: Any) -> None:
        self.summary = self.summary.model_copy(update=facts)

    def _sample(self) -> list[TextSample]:
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
        context, position = self.context, self.context.groups.coordinates
        own = RankSummary(
            rank=context.world.rank,
            host=context.world.host,
            tensor=position.tensor,
            data=position.data,
            pipeline=position.pipeline,
            layers=[
                (chunk.layers.start, chunk.layers.stop - 1)
                for chunk in context.model.layout.chunks_of_stage(position.pipeline)
            ],
            memory_bytes=context.states.memory_bytes(),
            predicted_bytes=context.model.layout.state_bytes(position.pipeline, position.data),
            peak_bytes=context.hardware.accelerator.peak_bytes(),
        )
        return gathered(own)

    def _describe(self, ranks: list[RankSummary], initial_loss: float | None) -> RunSummary:
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


ON_THE_CONSOLE = ("model", "layout", "recovery", "precision", "data", "saved")
"""The lines at the start that are shown on the console; the others are only in run.log."""
SMALL_RATE, SMALL_PARAMETERS = 1e-3, 50e6
"""AdamW's rate above which a model of more parameters usually diverges. GPT-3 (arXiv:2005.14165,
table 2.1) trains 125M parameters with 6e-4 and larger models with less."""


class Announcements(Callback):
    """Logs what the run trains and how it ends, from the summary of `report`. Only on rank 0."""

    def __init__(self, context: TrainerContext, report: RunReport) -> None:
        super().__init__(context)
        self._report = report
        self._first_step = 0
        """Step of the checkpoint that this start has loaded."""

    def on_start(self, validation_loss: float, resumed: Resumed | None) -> None:
        """Log model, layout, data and precision; after a resume, also the changed settings."""
        for name, text in self._lines_at_start().items():
            _log_line(name, text, logging.INFO if name in ON_THE_CONSOLE else logging.DEBUG)
        for warning in _warnings(self.context):
            _LOG.warning("%s", warning)
        if resumed is None:
            return
        self._first_step = step = self.context.progress.step
        _log_line(
            "resumed",
            f"step {step} of {resumed.folder}; validation loss {validation_loss:.3f} nats per "
            f"token on {self.context.data.validation_windows}",
        )
        for key, (before, now) in resumed.changes.items():
            _log_line("changed", f"{key}: {before} -> {now}")
        data, position = self.context.data, self.context.progress.next_sample
        is_other = resumed.meta["corpus"] != data.corpus.manifest.digest
        if is_other or not OF_ORDER.isdisjoint(resumed.changes):
            places = ", ".join(f"{n} of {name}" for name, n in data.supplied(position).items())
            _log_line("order", f"of samples has changed: the run reads on at sample {places}")
        config = self.context.config
        rate, steps = LearningRate.of(config), config.trainer.steps
        steps_before, _ = resumed.changes.get("trainer.steps", (steps, steps))
        before = LearningRate.of(config.changed("trainer", steps=steps_before))
        is_other_schedule = before.describe(steps) != rate.describe(steps)
        if is_other_schedule or any(key.startswith("optimizer.") for key in resumed.changes):
            _log_line(
                "rates",
                f"{rate(step + 1):.3g} in step {step + 1}: the schedule is that of a run with the "
                f"new settings from step 0 on ({rate.describe(steps)})",
            )

    def on_rewind(self, rewind: Rewind) -> None:
        """Log why the run went back to an earlier checkpoint, and where it continues."""
        _LOG.warning(
            "step %d: %s. The run continues from step %d with sample %d; the samples in "
            "between are skipped",
            rewind.from_step,
            rewind.reason,
            self.context.progress.step,
            self.context.progress.next_sample,
        )

    def on_stop(self, *, is_early: bool) -> None:
        """Log text samples from the model, the validation loss, and the path of the report."""
        summary = self._report.summary
        step, total = self.context.progress.step, self.context.config.trainer.steps
        for sample in summary.samples:
            _log_line("sample", f"{sample.prompt}|{sample.text}".replace("\n", "\n" + " " * 11))
        if summary.validation_loss is not None:
            first = summary.initial_validation_loss
            before = "" if first is None else f"{first:.3f} -> "
            bits_per_byte = summary.validation_bits_per_byte
            bits = "" if bits_per_byte is None else f" = {bits_per_byte:.2f} {BITS_PER_BYTE}"
            bits += self.context.data.corpus.bits_note if bits else ""
            is_older = summary.validation_step not in (None, step)
            at = f" at step {summary.validation_step}" * is_older
            _log_line(
                "validation",
                f"{before}{summary.validation_loss:.3f} nats per token{at}{bits}; "
                f"read: {self.context.data.validation_windows}",
            )
        done = f"{summary.exit_reason} in {format_seconds(summary.seconds or 0)}"
        if step >= total and step == self._first_step:
            done = (
                f"no step: the run is at step {step} and trainer.steps={total}; to train on, set "
                f"trainer.steps above {step} with 'run.allow_changes=[trainer.steps]'"
            )
        _log_line("done", done)
        _log_line("report", str(self._report.path))

    def _lines_at_start(self) -> dict[str, str]:
        context, summary = self.context, self._report.summary
        config, hardware = context.config, context.hardware
        manifest = context.data.corpus.manifest
        tokens = config.data.global_batch * context.model.layout.lengths.total
        left_out = context.data.corpus.left_out
        more = f", listed by frontier-llm inspect-data {config.run.dir}"
        lines = {
            "run": config.run.dir,
            "model": f"{summary.model}, {format_count(summary.parameters or 0)} parameters, "
            f"{counted(config.model.layers, 'layer')}",
            **self._lines_of_layout(),
            "precision": f"{hardware.precision.name} ({hardware.precision.reason})",
            "kernels": hardware.kernels.source,
            "attention": ", ".join(f"{kind}: {name}" for kind, name in hardware.attention.items()),
            "peak": context.meter.throughput.peak_description,
            "data": f"{config.data.name}: {format_count(manifest.train.tokens)} training tokens, "
            f"{format_count(manifest.validation.tokens)} validation tokens, "
            f"{left_out}{more * (' left out (' in left_out)}; "
            f"a validation reads {context.data.validation_windows}; "
            f"{format_count(tokens)} tokens per step; "
            f"{describe_samples(config, context.data.corpus)}",
            "rates": LearningRate.of(config).describe(config.trainer.steps),
            "saved": _describe_saving(config.checkpoint),
        }
        if not hardware.accelerator.is_cpu:
            found = variables(os.environ, [*config.cluster.environment, *DEVICE_VARIABLES])
            lines["variables"] = ", ".join(f"{name}={value}" for name, value in found.items())
        if summary.initial_validation_loss is not None:
            vocabulary = config.model.vocabulary
            lines["untrained"] = (
                f"validation loss {summary.initial_validation_loss:.3f} nats per token on "
                f"{context.data.validation_windows} (ln {vocabulary} = {math.log(vocabulary):.2f})"
            )
        return lines

    def _lines_of_layout(self) -> dict[str, str]:
        config, grid = self.context.config, self.context.groups.grid
        factors = self.context.states.factors
        state_bytes = format_bytes(sum(self._report.summary.ranks[0].memory_bytes.values()))
        parts = f" (replicas {grid.replicas} x context {grid.context})" if grid.context > 1 else ""
        divided = ", which divides nothing on one data rank"
        if grid.data > 1 or config.sharding.name == "replicated":
            divided = ""
        lines = {
            "layout": f"{counted(grid.size, 'rank')} = tensor {grid.tensor} x pipeline "
            f"{grid.pipeline} x data {grid.data}{parts}; sharding={config.sharding.name}{divided}; "
            f"{counted(self.context.model.layout.micro_batches, 'micro-batch')} "
            f"of {counted(config.data.micro_batch, 'sample')}",
            "sharding": f"{config.sharding.name}: parameters / {factors.params}, gradients / "
            f"{factors.grads}, optimizer / {factors.optimizer}; {state_bytes} on rank 0",
        }
        if config.recovery.enabled:
            lines["recovery"] = _describe_recovery(survives(grid, factors), config.recovery)
        if config.collectives.is_quantised:
            lines["formats"] = _describe_formats(self.context)
        return lines


def _warnings(context: TrainerContext) -> Iterator[str]:
    """Yield what is probably not meant: a rate of small models, an embedding without tokens."""
    config, rate = context.config, context.config.optimizer.learning_rate
    if context.hardware.accelerator.is_cpu and config.precision.name == "fp16":
        yield (
            "precision=fp16 on a CPU: torch multiplies matrices in fp16 up to 100 times slower "
            "than in fp32; precision=auto takes the best that this processor has"
        )
    count = count_parameters(config.model, config.data.sequence_length)
    is_scaled = config.optimizer.name == "adafactor" or config.model.mup_base_hidden is not None
    if rate > SMALL_RATE and count > SMALL_PARAMETERS and not is_scaled:
        yield (
            f"optimizer.learning_rate={rate:g} is for models of a few million parameters, "
            f"{config.model.name} has {format_count(count)}: set optimizer=adamw, or a rate of at "
            "most 6e-4"
        )
    warmup, steps = config.optimizer.warmup_steps, config.trainer.steps
    if warmup > steps:
        highest = LearningRate.of(config)(steps)
        yield (
            f"the warm-up does not end: optimizer.warmup_steps={warmup} and trainer.steps={steps}, "
            f"so that the learning rate reaches {highest:.3g}, not {rate:g}: set "
            f"optimizer.warmup_steps to at most {steps}"
        )
    for name, warning in context.data.corpus.warnings:
        yield f"corpus {name}: {warning}"
    yield from unused_rows(config, context.data.corpus.tokenizer.vocabulary)


def _describe_recovery(survived: Survives, recovery: RecoveryConfig) -> str:
    if recovery.partner_copies and survived != "node":
        first = "" if survived == "nothing" else "from another rank, or else "
        return (
            f"dead ranks are replaced, and get their states {first}from copies in the memory of "
            f"their own and the next node, in {on_this_node(recovery.copies_path)}"
        )
    if survived == "nothing":
        return (
            "dead ranks are replaced, and all ranks load the newest checkpoint, because no two "
            "have the same optimizer states "
            "(a smaller sharding.optimizer leaves copies, and recovery.partner_copies makes some)"
        )
    return (
        "dead ranks are replaced, and get their states from another rank; copies survive the loss "
        f"of a {survived}"
    )


def _describe_saving(checkpoint: CheckpointConfig) -> str:
    if checkpoint.mode == "off":
        return "nothing, not even at the end (checkpoint=off)"
    local = checkpoint.tiers.local
    local_tier = f", every {local.every_steps} in {local.path}" if local.path else ""
    often = counted(checkpoint.every_steps, "step")
    return f"every {often} and at the end ({checkpoint.mode}){local_tier}"


def _describe_formats(context: TrainerContext) -> str:
    config, kernels = context.config.collectives, context.states.kernels
    params, refresh = config.params_format, str(config.refresh_format)
    if config.refresh_differences:
        refresh = f"differences in {refresh} (in full every {config.refresh_full_every} steps)"
    gradients = _by_level(config.grads_formats)
    if config.rotation_elements:
        gradients += f" (int4 rotated in runs of {config.rotation_elements})"
    text = (
        f"{config.name}: parameters {params} forward, {config.params_backward_format or params} "
        f"backward, {refresh} after the update; gradients {gradients}; "
        f"sums over replicas {_by_level(config.sums_formats)}; "
        f"blocks of {config.block_elements}; norms and biases in 16 bits; "
        f"{kernels.name} kernels ({kernels.reason})"
    )
    grid = context.groups.grid
    if context.states.factors.optimizer == 1 and set(config.sums_formats) == {"fp32"}:
        text += "; no effect: with these sharding factors nothing is gathered or scattered"
    elif grid.same_node(0, grid.size - 1):
        text += "; all ranks share a node, where sending may be faster than quantising"
    return text


def _by_level(formats: Sequence[str]) -> str:
    package, node, network = formats
    if package == node == network:
        return node
    inside = node if package == node else f"{package} inside a package, {node}"
    return f"{inside} inside a node, {network} between nodes"


def _log_line(heading: str, text: str, level: int = logging.INFO) -> None:
    _LOG.log(level, "%-10s %s", heading, text)
