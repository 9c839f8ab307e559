"""Describe this machine, for the JSON files of benchmarks."""

import os
import platform
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any


def about() -> dict[str, Any]:
    """Return the date, the processor, its cores and the version of torch."""
    return {
        "date": date.today().isoformat(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch": version("torch"),
    }


def _processor() -> str:
    """Return the name of the processor; platform.processor() is empty on Linux."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
