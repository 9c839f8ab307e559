"""Find out in half an hour what is right, and how fast it is, on the GPU of this machine.

    python -m benchmarks.gpu                      # the slices that have not succeeded yet
    python -m benchmarks.gpu --only training      # one slice, again
    python -m benchmarks.gpu --rehearse           # the same code with tiny sizes, on any machine

Each slice takes less than nine minutes and writes its rows to --folder/NAME.json, so an interrupted
program continues where it stopped. The first slices are about correctness. The program stops when
one of them fails, because speed means nothing then; --keep-going continues. The exit code is 1 if a
slice failed. In the end all rows are written to benchmarks/results/gpu.json, and from there into
docs/gpu.md; a rehearsal writes both files into --folder instead.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, about, call, check_alike, print_table, train_run
from docs.generate.blocks import RESULTS, filled
from docs.generate.measured_tables import gpu_section
from frontier_llm.cli.options import run_command, tool_parser
from frontier_llm.errors import TrainingError
from frontier_llm.telemetry.history import History

LIMIT_SECONDS = 540.0
"""A command that takes longer is ended, and its slice has failed."""
COMMON = (
    "launch.ranks=1", "parallel.pipeline=1", "telemetry.wandb=off", "telemetry.progress=false",
    "trainer.sample_tokens=0", "trainer.evaluate_batches=1", "trainer.evaluate_every_steps=null",
    "optimizer.warmup_steps=0", "plan=off",
)  # fmt: skip
SCHEDULES = {
    "1f1b": ["parallel.schedule=1f1b"],
    "interleaved": ["parallel.schedule=interleaved", "parallel.chunks=2"],
    "zb_v": ["parallel.schedule=zb_v", "parallel.chunks=2"],
}
SEVERAL = ("model.layers=4", "data.micro_batch=1", "data.global_batch=8")
"""Of runs on several ranks: every layout divides them."""
HANG_SECONDS = 240.0
"""Time limit of a command that takes half a minute if nothing hangs."""
Row = dict[str, Any]
Rows = Iterator[Row]


@dataclass(frozen=True)
class Scale:
    """Sizes of the slices: those of a GPU, or tiny ones for a rehearsal."""

    model: tuple[str, ...]
    """Overrides of the model of the training runs."""
    steps: int
    """Steps of the training runs."""
    bench: tuple[tuple[str, ...], ...]
    """Options of bench_step, one run each."""
    is_rehearsal: bool


GPU = Scale(
    ("model=gpt_125m",), 50,
    (
        ("--hidden", "2048", "--heads", "16", "--layers", "6", "--sequence", "2048"),
        ("--hidden", "4096", "--heads", "32", "--layers", "4", "--sequence", "4096"),
    ),
    is_rehearsal=False,
)  # fmt: skip
REHEARSAL = Scale(
    ("model.layers=2", "model.hidden=32", "model.heads=2", "data.sequence_length=32",
     "data.micro_batch=2", "data.global_batch=4"),
    6,
    (("--hidden", "64", "--heads", "2", "--layers", "1", "--sequence", "32", "--steps", "1"),),
    is_rehearsal=True,
)  # fmt: skip


Slice = Callable[[Scale, Path], Rows]
"""Yields the rows of a slice; the arguments are the sizes and an empty folder for its runs."""


def device(scale: Scale, folder: Path) -> Rows:
    """Describe the device, its libraries and its kernels, as `frontier-llm doctor` does."""
    text = _tool(["tools/doctor.py", *COMMON[:2]])
    lines = [line.strip().partition("  ") for line in text.splitlines()]
    wanted = ("versions", "device", "kernels", "network", "variables", "cores", "groups")
    found = [{"what": name, "value": value.strip()} for name, _, value in lines if name in wanted]
    if not any(row["what"] == "device" for row in found):
        raise TrainingError(f"the doctor names no device: {text}")
    yield from found


def hangs(scale: Scale, folder: Path) -> Rows:
    """Train two steps in layouts whose messages could block each other, with a time limit.

    On several GPUs over NCCL or RCCL: every kind of pipeline schedule, tensor and sharded data
    parallelism, and each value of collectives.communicators. On one GPU two ranks share it, over
    gloo and without a pipeline.
    """
    ranks = min(8, _devices(scale))
    layouts = {"tensor": ["parallel.tensor=2"], "zero3": ["sharding=zero3"]}
    if ranks > 1:
        layouts |= {name: ["parallel.pipeline=2", *keys] for name, keys in SCHEDULES.items()}
        layouts["3D"] = [*layouts["zb_v"], "sharding=zero3", *["parallel.tensor=2"] * (ranks > 3)]
    backend = [] if ranks > 1 else ["collectives.backend=gloo", "collectives.pairwise=false"]
    ranks = max(2, ranks)
    for name, keys in layouts.items():
        for count in ("many", "few", "one") if name in ("zero3", "3D") else ("many",):
            overrides = [f"launch.ranks={ranks}", *SEVERAL, *backend, *keys, "trainer.steps=2",
                         f"collectives.communicators={count}"]  # fmt: skip
            start = time.monotonic()
            _tool(["tools/doctor.py", *COMMON[:2], *scale.model, *overrides],
                 limit_seconds=HANG_SECONDS)  # fmt: skip
            _train(folder / f"{name}_{count}", scale, *overrides, limit_seconds=HANG_SECONDS)
            seconds = time.monotonic() - start
            yield {"what": f"{name}, {ranks} ranks, {count}", "value": f"ended in {seconds:.0f} s"}


def numerics(scale: Scale, folder: Path) -> Rows:
    """Compare every kernel of the model with fp64 on the host, forward and backward."""
    text = _tool(["tools/doctor.py", "--numerics", *COMMON[:2], *scale.model])
    yield {"what": "kernels", "value": text.strip().splitlines()[-1]}


def several(scale: Scale, folder: Path) -> Rows:
    """Compare the losses of layouts on several GPUs with those of one, over NCCL or RCCL."""
    devices = _devices(scale)
    if devices < 2:
        yield {"what": "several GPUs", "value": "not checked: there is one GPU"}
        return
    ranks = 1 << (min(8, devices).bit_length() - 1)
    steps = f"trainer.steps={max(2, scale.steps // 5)}"
    common = [*SEVERAL, "precision=fp32", "collectives.pairwise=false", steps]
    one = _train(folder / "one", scale, *common)
    for name, tolerance, overrides in (
        ("tensor", 2e-3, ["parallel.tensor=2", "parallel.sequence=true"]),
        *((name, 2e-3, ["parallel.pipeline=2", *keys]) for name, keys in SCHEDULES.items()),
        ("zero3", 2e-3, ["sharding=zero3"]),
        ("zeropp", 2e-2, ["sharding=zeropp", "collectives=zeropp"]),
    ):
        losses = _train(folder / name, scale, *common, f"launch.ranks={ranks}", *overrides)
        yield _compared(f"{name} on {ranks} GPUs, and on one", losses, one, tolerance)


def tests(scale: Scale, folder: Path) -> Rows:
    """Run the tests that need a GPU; in a rehearsal, those of the kernels on a CPU."""
    chosen = ["-k", "same_bits", "tests/collectives"] if scale.is_rehearsal else ["-m", "gpu"]
    text = _tool(["-m", "pytest", "-p", "no:cacheprovider", *chosen])
    yield {"what": "tests", "value": text.strip().splitlines()[-1]}


def training(scale: Scale, folder: Path) -> Rows:
    """Compare the losses of the device with those of the CPU, in fp32 and in the run's precision.

    Recomputation must not change losses. A deterministic run that is stopped and resumed must give
    the losses of a run that is not, to the last digit.
    """
    cpu = _train(folder / "cpu", scale, "precision=fp32", on_cpu=True)
    for name, tolerance, overrides in (
        ("fp32", 2e-3, ["precision=fp32"]),
        ("bf16", 2e-2, ["precision=bf16"]),
        ("bf16, compiled", 2e-2, ["precision=bf16", "kernels=compiled"]),
        ("bf16, recomputed", 2e-2, ["precision=bf16", "recompute=full"]),
    ):
        losses = _train(folder / name.replace(", ", "_"), scale, *overrides)
        yield _compared(f"{name} and fp32 on the CPU", losses, cpu, tolerance)
    exact = ["precision=bf16", "trainer.deterministic=true", "checkpoint.every_steps=2"]
    whole = _train(folder / "whole", scale, *exact)
    _train(folder / "resumed", scale, *exact, f"trainer.steps={scale.steps // 2}")
    resumed = _train(folder / "resumed", scale, *exact)
    yield _compared("stopped and resumed, and not stopped", resumed, whole, 0.0)


def shared(scale: Scale, folder: Path) -> Rows:
    """Compare the losses of 2 and 4 ranks that share the device, over gloo, with those of the CPU.

    Streams, hooks and quantisation kernels are those of a GPU; NCCL is not used.
    """
    steps = f"trainer.steps={max(2, scale.steps // 5)}"
    for name, ranks, tolerance, overrides in (
        ("zero1", 2, 2e-3, ["sharding=zero1"]),
        ("zero3", 4, 2e-3, ["sharding=zero3"]),
        ("zeropp", 4, 2e-2,
         ["sharding=zeropp", "collectives=zeropp", "launch.ranks_per_node=2"]),
    ):  # fmt: skip
        common = [f"launch.ranks={ranks}", "data.micro_batch=1", "precision=fp32", steps,
                  "collectives.backend=gloo", "collectives.pairwise=false", *overrides]  # fmt: skip
        cpu = _train(folder / f"{name}_cpu", scale, *common, on_cpu=True)
        losses = _train(folder / name, scale, *common)
        what = f"{name} on {ranks} ranks of one device, and on the CPU"
        yield _compared(what, losses, cpu, tolerance)


def checkpoints(scale: Scale, folder: Path) -> Rows:
    """Save lazily and blocking while training, verify all digests, and compare the stalls."""
    stalls = {}
    for mode in ("lazy", "blocking"):
        run = folder / mode
        _train(run, scale, "precision=bf16", f"checkpoint={mode}", "checkpoint.every_steps=2")
        newest = max((run / "checkpoints").iterdir())
        checked = _tool(["tools/inspect_checkpoint.py", "--verify", str(newest)])
        yield {"what": f"{mode}: verified", "value": checked.strip().splitlines()[-1]}
        stalls[mode] = sum(History.read(run).column("checkpoint_stall_seconds"))
        yield {"what": f"{mode}: seconds that training waited", "value": round(stalls[mode], 3)}
    tensors = [_tensor_digests(folder / mode) for mode in stalls]
    if tensors[0] != tensors[1]:
        raise TrainingError("the lazy and the blocking checkpoint differ")
    yield {"what": "digests of both checkpoints", "value": "equal"}


def speed(scale: Scale, folder: Path) -> Rows:
    """Time steps of layers as wide as those of a 1.3B and of a 7B model, against plain torch."""
    for number, options in enumerate(scale.bench):
        file = folder / f"step_{number}.json"
        precision = [] if scale.is_rehearsal else ["--compiled"]
        _tool(["-m", "benchmarks.bench_step", "--precision", "bf16", *options,
              *precision, "--json", str(file)])  # fmt: skip
        for row in json.loads(file.read_text())["rows"]:
            for name, seconds in row["seconds"].items():
                yield {"what": " ".join(options), "value": f"{name}: {seconds * 1e3:.1f} ms"}


def kernels(scale: Scale, folder: Path) -> Rows:
    """Measure the quantisation kernels as bench_collectives does, besides a copy."""
    from benchmarks.bench_collectives import SPEEDS, codec_figures

    elements, limit = (1 << 16, 0.01) if scale.is_rehearsal else (1 << 26, 0.3)
    for row in codec_figures(elements, limit):
        if row["kernels"] == "copy":
            copied = row[SPEEDS[0]]
            yield {"what": f"copy, {row['dtype']}", "value": f"{copied:.1f} GB/s"}
            continue
        for name in SPEEDS:
            what = f"{row['kernels']}, {row['dtype']}, {row['format']}: {name.replace('_', ' ')}"
            share = f"{row[name] / copied:.0%} of the copy"
            yield {"what": what, "value": f"{row[name]:.1f} GB/s of {row['dtype']}, {share}"}


SLICES: dict[str, Slice] = {
    "device": device,
    "hangs": hangs,
    "numerics": numerics,
    "tests": tests,
    "training": training,
    "several": several,
    "shared": shared,
    "checkpoints": checkpoints,
    "speed": speed,
    "kernels": kernels,
}
"""The slices in their order, by value: what hangs comes first, and speed last."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the slices, print their rows; return the exit code."""
    parser = tool_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=SLICES, help="slices to run, again")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on any machine")
    parser.add_argument("--keep-going", action="store_true", help="continue after a failure")
    parser.add_argument("--folder", type=Path, default=Path("runs/gpu"), help="(%(default)s)")
    options = parser.parse_args(arguments)
    scale = REHEARSAL if options.rehearse else GPU
    failed = []
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.only or SLICES:
        file = options.folder.absolute() / f"{name}.json"
        if not options.only and _has_succeeded(file):
            print(f"{name}: done before ({file})")
            continue
        result = _run_slice(name, scale, options.folder.absolute() / name)
        file.write_text(json.dumps(result, indent=1) + "\n")
        cells = [[str(row["what"]), str(row["value"])] for row in result["rows"]]
        print_table(f"{name} ({result['seconds']} s)", ["what", "value"], cells, left=2)
        if result["error"]:
            failed.append(name)
            print(f"{name} failed: {result['error']}")
            if not options.keep_going:
                break
    publish(options.folder, scale)
    return 1 if failed else 0


def _run_slice(name: str, scale: Scale, folder: Path) -> dict[str, Any]:
    """Run a slice in an empty folder; return its rows, its duration, and why it failed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rows: list[Row] = []
    error, start = None, time.monotonic()
    try:
        rows.extend(SLICES[name](scale, folder))
    except (TrainingError, OSError) as failure:
        error = str(failure)
    seconds = round(time.monotonic() - start, 1)
    checks = " ".join((SLICES[name].__doc__ or name).partition("\n\n")[0].split())
    return {**about(), "rehearsal": scale.is_rehearsal, "checks": checks,
            "seconds": seconds, "error": error, "rows": rows}  # fmt: skip


def publish(folder: Path, scale: Scale) -> None:
    """Write the results of all slices that have run into one file, and from there into the page."""
    files = {name: folder / f"{name}.json" for name in SLICES}
    slices = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    command = "python -m benchmarks.gpu" + scale.is_rehearsal * " --rehearse"
    results = {"command": command, "hardware": _device_name(), "slices": slices}
    if scale.is_rehearsal:
        file, page = folder / "results.json", folder / "gpu.md"
    else:
        file, page = RESULTS / "gpu.json", ROOT / "docs" / "gpu.md"
    file.write_text(json.dumps(results, indent=1) + "\n")
    text = (ROOT / "docs" / "gpu.md").read_text()
    page.write_text(filled(text, {"measured": gpu_section(results)}))


def _device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"


def _has_succeeded(file: Path) -> bool:
    return file.exists() and json.loads(file.read_text())["error"] is None


def _devices(scale: Scale) -> int:
    """Return the number of GPUs; a rehearsal has two."""
    import torch

    return 2 if scale.is_rehearsal else torch.cuda.device_count()


def _train(
    run: Path,
    scale: Scale,
    *overrides: str,
    on_cpu: bool = False,
    limit_seconds: float = LIMIT_SECONDS,
) -> list[float]:
    """Train in a run directory; return the losses of all its steps."""
    variables = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""} if on_cpu else {}
    steps, decay = f"trainer.steps={scale.steps}", f"optimizer.decay_steps={scale.steps}"
    # the last value of a key counts
    keys = [*COMMON, *scale.model, steps, *overrides, decay]
    return train_run(keys, run, variables, limit_seconds).column("loss")


def _compared(what: str, losses: list[float], expected: list[float], tolerance: float) -> Row:
    """Return the largest relative difference of two series of losses.

    Raises:
        TrainingError: it is larger than the tolerance, or the numbers of steps differ.
    """
    series = [("the second", expected), ("the first", losses)]
    largest = check_alike(f"{what}: losses", series, tolerance)
    return {"what": f"{what}: largest relative difference of losses", "value": f"{largest:.1e}"}


def _tensor_digests(run: Path) -> dict[str, Any]:
    """Return the digests of the chunks of the newest checkpoint, by file."""
    newest = max((run / "checkpoints").iterdir())
    manifest = json.loads((newest / "manifest.json").read_text())
    return {name: file["chunks"] for name, file in manifest["files"].items()}


def _tool(command: Sequence[str], limit_seconds: float = LIMIT_SECONDS) -> str:
    """Run this Python with some arguments in the root of the checkout; return its output."""
    return call([sys.executable, *command], limit_seconds=limit_seconds)


if __name__ == "__main__":
    sys.exit(run_command(main))
