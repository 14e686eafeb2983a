"""Two and five runs at once over one cold cache and one place to write: all are right, or refused with a message."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.campaign.inputs import Finding
from tests.campaign.kills import difference, left
from tests.campaign.process import environment, finished, start
from tests.campaign.subjects import Subjects, generate


def at_once(count: int, subjects: Subjects, say: Callable[[str], None]) -> list[Finding]:
    """``count`` processes each of build, import (to one file), quantize (to one folder) and generate, started together on a cold cache."""
    model = subjects.models[0].path
    findings = []
    with tempfile.TemporaryDirectory(prefix="kdgen-together-") as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        commands = {
            "build": ["build", "tiny", "--arch", "sm_90a", "--out", str(folder / "generated")],
            "import": ["import", str(model), str(folder / "model.kdtr"), "--force"],
            "quantize": ["quantize", str(model), str(folder / "int4")],
            "generate": generate(model),
        }
        variables = environment(folder / "cache", TMPDIR=str(folder / "tmp"))
        running = [(kind, arguments, start(arguments, folder, variables)) for kind, arguments in commands.items() for _ in range(count)]
        ended = [(kind, finished(process, arguments, 600)) for kind, arguments, process in running]
        for kind in commands:
            outcomes = [outcome for each, outcome in ended if each == kind]
            if not any(outcome.code == 0 for outcome in outcomes):
                findings.append(Finding(f"{count} {kind} at once", f"none succeeded: {outcomes[0].stderr[-300:]}"))
            for outcome in outcomes:
                refused = kind == "quantize" and outcome.code == 2 and "Traceback" not in outcome.stderr  # the folder is there already
                if outcome.code != 0 and not refused:
                    findings.append(Finding(f"{count} {kind} at once", f"exit code {outcome.code}: {outcome.stderr[-300:]}"))
        together = left(folder)
        with tempfile.TemporaryDirectory(prefix="kdgen-together-") as alone_name:
            alone = Path(alone_name)
            (alone / "tmp").mkdir()
            for kind, arguments in commands.items():
                moved = [argument.replace(str(folder), str(alone)) for argument in arguments]
                outcome = finished(start(moved, alone, environment(alone / "cache", TMPDIR=str(alone / "tmp"))), moved, 600)
                if outcome.code != 0:
                    findings.append(Finding(f"{kind} alone", outcome.stderr[-300:]))
            if problem := difference(together, left(alone)):
                findings.append(Finding(f"{count} of each at once", problem))
    say(f"{count} of each command at once: {len(findings)} findings")
    return findings
