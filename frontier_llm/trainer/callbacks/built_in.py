"""The callbacks of every run, and their order.

The order is written down here, and not derived from anything that can differ between ranks: two
callbacks with collectives must run them in the same order on all ranks, or the run hangs.
It also decides what callbacks see of each other:

- `PlanCheck` adds the comparison with the plan to the metrics, so it comes before all that write.
- `MetricsFile` comes before the other sinks: a step that cannot be recorded is not shown.
- `ProgressBar` removes its live line before `Announcements` prints the last lines.
- `Tracer` ends its trace before `RunReport` samples text, which would fill the trace.
- `Announcements` prints the summary that `RunReport` has written.
- `Divergence` may end the run, so it comes after all that record the step.
"""

from frontier_llm.trainer.callbacks.announcements import Announcements
from frontier_llm.trainer.callbacks.callback import Callback
from frontier_llm.trainer.callbacks.callback_list import CallbackList
from frontier_llm.trainer.callbacks.divergence import Divergence
from frontier_llm.trainer.callbacks.ledger import Ledger
from frontier_llm.trainer.callbacks.metrics_file import MetricsFile
from frontier_llm.trainer.callbacks.plan_check import PlanCheck
from frontier_llm.trainer.callbacks.progress_bar import ProgressBar
from frontier_llm.trainer.callbacks.run_report import RunReport
from frontier_llm.trainer.callbacks.stragglers import Stragglers
from frontier_llm.trainer.callbacks.tensorboard import TensorBoard
from frontier_llm.trainer.callbacks.tracer import Tracer
from frontier_llm.trainer.callbacks.user_callbacks import make_user_callbacks
from frontier_llm.trainer.callbacks.weights_and_biases import WeightsAndBiases
from frontier_llm.trainer.context import TrainerContext


def make_callbacks(context: TrainerContext) -> CallbackList:
    """Make the built-in callbacks of a rank, and after them the user's.

    Raises:
        ConfigError: a callback that the configuration names cannot be imported.
        TrainingError: a user's callback cannot be made, or metrics.jsonl cannot be opened.
    """
    report = RunReport(context)
    built_in: list[Callback] = [
        Ledger(context),
        PlanCheck(context),
        MetricsFile(context),
        ProgressBar(context),
        WeightsAndBiases(context),
        TensorBoard(context),
        Stragglers(context),
        Tracer(context),
        report,
        Announcements(context, report),
        Divergence(context),
    ]
    return CallbackList(built_in, make_user_callbacks(context))
