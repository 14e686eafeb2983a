"""What the documentation says is so: links lead somewhere, excerpts are in the files that they are from, docs/api.md is current."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.quick import QUICK

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """The ids that GitHub gives the headings of ``page``."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path, text: str) -> list[str]:
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(f"{page.relative_to(ROOT)}: {link}")
    return found


def test_links() -> None:
    broken = [each for page in PAGES for each in broken_links(page, page.read_text(encoding="utf-8"))]
    assert not broken, "\n".join(broken)


def test_a_broken_link_is_seen() -> None:
    page = ROOT / "docs" / "build.md"
    assert broken_links(page, "[a](nowhere.md) [b](speed.md#nothing) [c](speed.md#rounds) [d](#checking)") == [
        "docs/build.md: nowhere.md",
        "docs/build.md: speed.md#nothing",
    ]


def test_paths_in_the_pages_exist() -> None:
    """Files of the project that a page names in code style."""
    pattern = r"`((?:kdgen|templates|tests|specs|docs|examples|demo|generated)/[\w./-]+\.(?:py|j2|cuh|yaml|md|cu|json|npz))`"
    gone = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in PAGES
        for name in re.findall(pattern, page.read_text(encoding="utf-8"))
        if not (ROOT / name).exists()
    ]
    assert not gone, "\n".join(gone)


def test_api_page_is_current() -> None:
    made = subprocess.run([sys.executable, str(ROOT / "docs" / "make_api.py"), "--check"], capture_output=True, text=True, cwd=ROOT)
    assert made.returncode == 0, made.stderr


@pytest.mark.parametrize(
    ("language", "file"), [("yaml", "specs/k26.yaml"), ("cuda", "generated/k26/moe_combine.cu"), ("python", "examples/generate.py")]
)
def test_excerpts_of_the_readme(language: str, file: str) -> None:
    """Every line of the excerpt stands in the file, in that order."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    lines = iter([line.partition("  #")[0].strip() for line in (ROOT / file).read_text(encoding="utf-8").splitlines()])
    missing = [line for line in blocks[0].splitlines() if line.strip() not in ("", "…") and line.partition("  #")[0].strip() not in lines]
    assert not missing, f"not in {file}, or not in this order: {missing}"


def test_the_quick_selection_is_there() -> None:
    """Each entry of QUICK names tests; ``-m quick`` says nothing where a file or a test has another name."""
    whole, single = ([name for name in QUICK if ("::" in name) == chosen] for chosen in (False, True))
    assert [name for name in whole if not (ROOT / "tests" / name).is_file()] == []
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *(f"tests/{name}" for name in single)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
