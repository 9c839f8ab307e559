"""The callbacks of every run, and their order.

The order must be the same on all ranks: if two callbacks run collectives in another order on one
rank, the run hangs. It is therefore fixed in this file. These are the reasons for it:

- `PlanCheck` adds the comparison with the plan to the metrics, so it comes before the callbacks
  that write metrics.
- `MetricsFile` comes before the other callbacks that write metrics, so that none shows a step that
  is not recorded, or waits for space to be.
- `PipelineTimeline` logs a line after those of `PlanCheck`, before `ProgressBar` shows the step.
- `ProgressBar` removes its live line before `Announcements` prints the last lines.
- `Tracer` ends its trace before `RunReport` samples text, so that the trace contains only training.
- `Announcements` prints the summary that `RunReport` has written.
- `CorpusIntegrity` and `Divergence` may end the run, so they come after the
  callbacks that record the step.
"""

from frontier_llm.trainer.callbacks.announcements import Announcements
from frontier_llm.trainer.callbacks.callback import Callback
from frontier_llm.trainer.callbacks.callback_list import CallbackList
from frontier_llm.trainer.callbacks.corpus_integrity import CorpusIntegrity
from frontier_llm.trainer.callbacks.divergence import Divergence
from frontier_llm.trainer.callbacks.kernel_trial import KernelTrial
from frontier_llm.trainer.callbacks.ledger import Ledger
from frontier_llm.trainer.callbacks.pipeline_timeline import PipelineTimeline
from frontier_llm.trainer.callbacks.plan_check import PlanCheck
from frontier_llm.trainer.callbacks.run_report import RunReport
from frontier_llm.trainer.callbacks.sinks import (
    MetricsFile,
    ProgressBar,
    TensorBoard,
    WeightsAndBiases,
)
from frontier_llm.trainer.callbacks.stragglers import Stragglers
from frontier_llm.trainer.callbacks.tracer import Tracer
from frontier_llm.trainer.callbacks.user_callbacks import make_user_callbacks
from frontier_llm.trainer.context import TrainerContext


def make_callbacks(context: TrainerContext) -> CallbackList:
    """Make the built-in callbacks of a rank, and after them the callbacks of the user.

    Raises:
        ConfigError: a callback that the configuration names cannot be imported.
        TrainingError: a user's callback cannot be constructed, or metrics.jsonl cannot be opened.
    """
    report = RunReport(context)
    built_in: list[Callback] = [
        Ledger(context),
        PlanCheck(context),
        PipelineTimeline(context),
        MetricsFile(context),
        ProgressBar(context),
        WeightsAndBiases(context),
        TensorBoard(context),
        KernelTrial(context),
        Stragglers(context),
        Tracer(context),
        report,
        Announcements(context, report),
        CorpusIntegrity(context),
        Divergence(context),
    ]
    return CallbackList(built_in, make_user_callbacks(context))
