"""What must be known of a machine to read its figures."""

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any


def about() -> dict[str, Any]:
    """Return what every benchmark writes beside its figures."""
    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch": version("torch"),
    }


def _processor() -> str:
    """Return the processor's name, which platform.processor() leaves empty on Linux."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
