"""Run directories made up for tests: what a real run of some layout would have written."""

import math
from pathlib import Path

from frontier_llm.geometry.grid import Grid
from frontier_llm.geometry.model_chunks import make_model_chunks
from frontier_llm.geometry.pipeline_schedule import Placement
from frontier_llm.geometry.wire import Sent
from frontier_llm.telemetry.jsonl import JsonlSink
from frontier_llm.telemetry.metrics import StepMetrics
from frontier_llm.telemetry.summary import Layout, RankSummary, RunSummary, TextSample

MIB = 1024**2


def step_metrics(step: int, **changes: object) -> StepMetrics:
    """Return the numbers of a plausible step."""
    wobble = math.sin(step * 1.7) + math.sin(step * 0.61)
    values: dict[str, object] = {
        "step": step,
        "loss": 2.9 + 5.4 * math.exp(-step / 45) + 0.06 * wobble,
        "grad_norm": 0.6 + 3 * math.exp(-step / 20) + 0.1 * abs(wobble),
        "learning_rate": 1e-3 * min(step / 20, 0.5 + 0.5 * math.cos(step / 70)),
        "tokens": step * 8192,
        "samples": step * 32,
        "step_seconds": 0.61 + 0.02 * wobble,
        "tokens_per_second": 8192 / (0.61 + 0.02 * wobble),
        "model_tflops_per_device": 0.0912 / (0.61 + 0.02 * wobble),
        "hardware_tflops_per_device": 0.0912 / (0.61 + 0.02 * wobble),
        "mfu": None,
        "hfu": None,
        "sent_bytes": {
            "gradients": Sent(node=21.5e6, network=10.7e6),
            "tensor": Sent(node=63e6, network=0),
            "pipeline": Sent(node=0, network=16.8e6),
            "tied_copies": Sent(node=0, network=8.4e6),
            "totals": Sent(node=400, network=200),
            "sequence_norms": Sent(),
        },
    }
    return StepMetrics(**{**values, **changes})


def ranks_of(layout: Layout, layers: int) -> list[RankSummary]:
    """Return what each rank of a layout would say of itself."""
    grid = Grid(layout.tensor, layout.data, layout.pipeline, layout.ranks_per_node)
    chunks = make_model_chunks(layers, Placement(layout.pipeline, layout.chunks))
    ranks = []
    for rank in range(grid.size):
        at = grid.coordinates(rank)
        held = [chunk for chunk in chunks if chunk.stage == at.pipeline]
        weights = int(sum(len(p.layers) + p.has_embedding + p.has_head for p in held) * 0.8 * MIB)
        ranks.append(
            RankSummary(
                rank=rank,
                host=f"node{grid.node(rank):03d}",
                tensor=at.tensor,
                data=at.data,
                pipeline=at.pipeline,
                layers=[(p.layers[0], p.layers[-1]) for p in held],
                memory_bytes={
                    "parameters": 2 * weights,
                    "gradients": 4 * weights,
                    "master": 4 * weights,
                    "moments": 8 * weights,
                },
                peak_bytes=620 * MIB + 40 * weights,
            )
        )
    return ranks


def make_run(run_dir: Path, layout: Layout, *, layers: int = 4, steps: int = 200) -> RunSummary:
    """Write metrics.jsonl, summary.json and config.yaml of a run that ended well."""
    run_dir.mkdir(parents=True, exist_ok=True)
    sink = JsonlSink(run_dir)
    for step in range(1, steps + 1):
        metrics = step_metrics(step)
        validation = metrics.loss + 0.08 if step % 50 == 0 else None
        bits = validation * 0.42 if validation else None
        sink.write(step_metrics(step, validation_loss=validation, validation_bits_per_byte=bits))
    sink.close()
    summary = RunSummary(
        model="gpt_tiny",
        parameters=4_470_000,
        layout=layout,
        ranks=ranks_of(layout, layers),
        precision="bf16",
        device="AMD EPYC 7A53",
        kernels="torch (apex: not installed)",
        versions={"python": "3.11.2", "torch": "2.13.0", "megatron-core": "0.16.1"},
        total_steps=steps,
        tokens=steps * 8192,
        seconds=steps * 0.61 + 9,
        initial_validation_loss=8.41,
        samples=[
            TextSample(
                prompt="def __init__(self",
                text=", name, *, parent=None):\n        self.name = name\n        if a < b & c:",
            ),
            TextSample(prompt="import ", text="os\nimport sys\n\nfrom collections import deque\n"),
        ],
        exit_code=0,
        exit_reason="finished",
    )
    summary.write(run_dir)
    (run_dir / "config.yaml").write_text("model:\n  name: gpt_tiny\n  note: <b>&bold</b>\n")
    return summary
