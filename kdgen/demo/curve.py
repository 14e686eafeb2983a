"""Loss curves as a small SVG, without a plotting library."""

from __future__ import annotations

import json
from pathlib import Path

WIDTH, HEIGHT, MARGIN = 640, 300, 46
COLOURS = {"target": "#1f6feb", "drafter": "#bf5b17"}


def write_curve(log: Path, out: Path) -> None:
    """Draw the loss of every run in ``log.jsonl``, whose lines have run, step and loss, over the run's steps."""
    runs: dict[str, dict[int, float]] = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if entry["run"] in COLOURS:  # a continued run may log a step twice
            runs.setdefault(entry["run"], {})[int(entry["step"])] = float(entry["loss"])
    top = max((loss for run in runs.values() for loss in run.values()), default=1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tick in range(5):
        y = _y(top * tick / 4, top)
        parts.append(f'<path d="M{MARGIN} {y:.1f}H{WIDTH - 12}" stroke="#ddd"/>')
        parts.append(f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{top * tick / 4:.2f}</text>')
    for place, (name, losses) in enumerate(runs.items()):
        last = max(losses)
        points = " ".join(
            f"{MARGIN + (WIDTH - MARGIN - 12) * step / last:.1f},{_y(loss, top):.1f}" for step, loss in sorted(losses.items())
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="1.5"/>')
        label = f"{name}: {last} steps, {losses[last]:.3f}"
        parts.append(f'<text x="{WIDTH - 16}" y="{24 + 16 * place}" text-anchor="end" fill="{COLOURS[name]}">{label}</text>')
    parts.append(f'<text x="{MARGIN}" y="{HEIGHT - 12}">nats a byte, over each run\'s steps</text></svg>\n')
    out.write_text("\n".join(parts), encoding="utf-8")


def _y(loss: float, top: float) -> float:
    return HEIGHT - MARGIN + 10 - (HEIGHT - MARGIN - 20) * loss / top
