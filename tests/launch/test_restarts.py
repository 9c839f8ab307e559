"""A job script starts ranks again after a failure that may have passed, a few times."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


COMMAND = """
echo start >> starts
if [ "$(wc --lines < starts)" -gt 1 ] && [ "$FRONTIER_LLM_STARTED_AGAIN" != 1 ]; then exit 99; fi
"""


@pytest.mark.parametrize(
    ("command", "code", "starts"),
    [
        ("exit 0", 0, 1),
        ("exit 2", 2, 1),
        ("exit 3", 3, 1),
        ("exit 137", 137, 3),
        ("[ $(wc --lines < starts) -gt 2 ]", 0, 3),
        ("""mkdir --parents run/failures; echo '{"kind": "user"}' > run/failures/cause.json
        exit 1""", 1, 1),
        ("""mkdir --parents run/failures; echo '{"kind": "watchdog"}' > run/failures/cause.json
        exit 1""", 1, 3),
        ("""mkdir --parents run; [ $(wc --lines < starts) -lt 5 ] || exit 0
        echo "{\\"step\\": $(wc --lines < starts), \\"loss\\": 1}" >> run/metrics.jsonl
        exit 137""", 0, 5),
    ],
)  # fmt: skip
def test_a_job_script_starts_the_ranks_again(
    command: str, code: int, starts: int, tmp_path: Path
) -> None:
    (tmp_path / "train").write_text(f"set -eu\n{COMMAND}{command}\n")
    script = f"set -euo pipefail\nsource {SCRIPTS}/restarts.sh\n"
    script += "train_with_restarts bash ./train run.dir=other run.dir=run\n"
    environment = {**os.environ, "FRONTIER_LLM_RESTARTS": "2"}
    ended = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (ended.returncode, len((tmp_path / "starts").read_text().splitlines())) == (code, starts)
