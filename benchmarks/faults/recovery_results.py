"""Put the JSON files of the benchmarks of recovery in place into benchmarks/results/recovery.json.

    python -m benchmarks.faults.recovery_results --deaths "one rank" deaths.json --cost cost.json
    python -m docs.generate.measured_tables --write

Each file replaces the figures of the same name; all other figures stay.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.testbed.machine import about
from frontier_llm.cli.options import run_command, tool_parser

RESULTS = Path(__file__).resolve().parents[1] / "results" / "recovery.json"
PARTS = {
    "slurm": "benchmarks.faults.slurm_replacement",
    "cost": "benchmarks.bench_recovery",
    "copies": "benchmarks.bench_recovery --copies",
    "goodput": "benchmarks.faults.goodput_kills",
}
"""The benchmark that writes each part but the deaths."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Merge the files; return the exit code."""
    parser = tool_parser(__doc__)
    parser.add_argument(
        "--deaths", nargs=2, action="append", default=[], metavar=("NAME", "FILE"),
        help="row of the table of deaths, and the output of rank_deaths or node_deaths",
    )  # fmt: skip
    for part, module in PARTS.items():
        parser.add_argument(f"--{part}", type=Path, help=f"output of {module}")
    options = parser.parse_args(arguments)
    results: dict[str, Any] = json.loads(RESULTS.read_text())
    rows = {row["name"]: row for row in results["deaths"]}
    for name, file in options.deaths:
        rows[name] = {"name": name, **json.loads(Path(file).read_text())}
    results["deaths"] = list(rows.values())
    for part in PARTS:
        if (file := getattr(options, part)) is not None:
            found = json.loads(file.read_text())
            results[part] = found["rows"] if part == "slurm" else found
    machine = about()
    results["date"] = machine["date"]
    results["hardware"] = f"{machine['cores']} CPU cores of an {machine['processor']}"
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
