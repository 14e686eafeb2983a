"""``kdgen bench --plot``: the bytes per second of each kernel below the memory bandwidth, as a small SVG without a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kdgen.bench.run import BenchReport, KernelTime, StepTime

WIDTH, LEFT, RIGHT, ROW, TOP = 860, 190, 150, 20, 34
BAR, ROOF = "#1f6feb", "#bf5b17"
LEAST_SHARE = 0.005  #: of a step's time; kernels with a smaller share are left out


def plot(report: BenchReport) -> str:
    """A panel for each step whose kernels were timed. Kernels are in the order of their share of the step. A bar is the bytes that a kernel
    must move divided by its time; the roof is the measured read bandwidth. To the right: the part of the roof, and µs in the step."""
    panels = [step for step in report.steps if step.kernels]
    parts: list[str] = []
    y = 46
    for step in panels:
        y = _panel(parts, step, _shown(step), report.read_bytes_per_second, y)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{y}" fill="white"/>\n'
        f'<text x="16" y="22" font-size="14">{escape(f"{report.spec}, {report.layers} layers, {report.compute}, {report.backend}")}</text>'
    )
    return "\n".join([head, *parts, "</svg>\n"])


def _shown(step: StepTime) -> Sequence[KernelTime]:
    """The kernels that move enough bytes and take enough time, the largest share of the step first."""
    worth = [k for k in step.kernels if k.microseconds * k.launches >= LEAST_SHARE * step.microseconds and k.floor_microseconds > 0]
    return sorted(worth, key=lambda k: -k.microseconds * k.launches)


def _panel(parts: list[str], step: StepTime, kernels: Sequence[KernelTime], roof: float, y: int) -> int:
    """Append a panel at ``y``. Returns the y of the next one."""
    span = WIDTH - LEFT - RIGHT
    most = max([1.0, *(k.floor_microseconds / k.microseconds for k in kernels)])  # a kernel whose data stay in a cache may exceed the roof
    title = f"{step.program}, {step.rows} rows, context {step.context}: {step.microseconds:.0f} µs, floor {step.floor_microseconds:.0f} µs"
    parts.append(f'<text x="16" y="{y + 14}" font-weight="bold">{escape(title)}</text>')
    bottom = y + TOP + ROW * len(kernels)
    for place, kernel in enumerate(kernels):
        at, reached = y + TOP + ROW * place, kernel.floor_microseconds / kernel.microseconds
        width = span * reached / most
        parts.append(f'<text x="{LEFT - 8}" y="{at + 12}" text-anchor="end">{escape(kernel.kernel)}</text>')
        parts.append(f'<rect x="{LEFT}" y="{at}" width="{width:.1f}" height="{ROW - 5}" fill="{BAR}"/>')
        said = f"{reached * roof / 1e12:.2f} TB/s, {100 * reached:.0f} %, {kernel.microseconds * kernel.launches:.0f} µs"
        parts.append(f'<text x="{LEFT + max(width, span / most) + 8:.1f}" y="{at + 12}">{said}</text>')
    x = LEFT + span / most
    parts.append(f'<path d="M{x:.1f} {y + TOP - 6}V{bottom}" stroke="{ROOF}" stroke-width="1.5"/>')
    parts.append(f'<text x="{x:.1f}" y="{y + TOP - 10}" text-anchor="middle" fill="{ROOF}">{roof / 1e12:.2f} TB/s read</text>')
    return bottom + 16
