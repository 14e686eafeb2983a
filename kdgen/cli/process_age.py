"""How old this process is: what a user waits for includes the interpreter's start and the imports."""

from __future__ import annotations

import os
import time
from pathlib import Path


def process_seconds() -> float | None:
    """Seconds since the process was started, to a hundredth; None where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return None
