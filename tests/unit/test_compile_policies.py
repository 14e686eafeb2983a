"""Texts whose copies ptxas encodes wrongly are compiled once more, without cache policies; what is still wrong is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdgen.codegen import compile as compile_module
from kdgen.codegen.compile import NO_CACHE_POLICY, compile_cubin
from kdgen.codegen.source import Source
from kdgen.errors import CompileError

SOURCE = Source("k", "text", 32, 0)
LOG = "ptxas info    : Used 10 registers, 16 bytes smem"


def compiled(monkeypatch: pytest.MonkeyPatch, whole: bool) -> list[tuple[str, ...]]:
    """The macros of each compilation; the first is broken, and the second, too, unless ``whole``."""
    asked: list[tuple[str, ...]] = []

    def machine_code(source: object, target: object, include: object, macros: tuple[str, ...]) -> tuple[bytes, str]:
        asked.append(macros)
        return b"whole" if macros and whole else b"broken", LOG

    monkeypatch.setattr(compile_module, "_machine_code", machine_code)
    monkeypatch.setattr(compile_module, "has_broken_copies", lambda code: code == b"broken")
    return asked


def test_once_more_without_policies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = compiled(monkeypatch, whole=True)
    assert compile_cubin(SOURCE, "sm_90a", tmp_path).code == b"whole"
    assert asked == [(), (NO_CACHE_POLICY,)]


def test_what_is_broken_still_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled(monkeypatch, whole=False)
    with pytest.raises(CompileError, match=r"kernel k .*encodes its copies wrongly; try another nvidia-cuda-nvrtc"):
        compile_cubin(SOURCE, "sm_90a", tmp_path)
