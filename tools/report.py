"""Make the report of a run again: `python tools/report.py RUN_DIR`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from frontier_llm.errors import FrontierError
from frontier_llm.telemetry.report import write_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Write report.html into a run directory; return the exit code."""
    parser = argparse.ArgumentParser(
        description="Make report.html of a run from its metrics.jsonl, summary.json, config.yaml."
    )
    parser.add_argument("run_dir", type=Path, help="run.dir of a run, finished or not")
    run_dir = parser.parse_args(arguments).run_dir
    if not run_dir.is_dir():
        parser.error(f"{run_dir} is not a directory; give the run.dir of a run")
    try:
        print(write_report(run_dir))
    except FrontierError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
