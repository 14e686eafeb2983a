"""The age of this process. A user also waits for the interpreter's start and the imports, so times count from the process's start."""

from __future__ import annotations

import os
import time
from pathlib import Path


def process_seconds() -> float | None:
    """Seconds since the process started, with a resolution of 0.01 s; None if the system does not report it."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return None
