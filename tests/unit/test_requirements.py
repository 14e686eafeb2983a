"""The pins that messages repeat are those of pyproject.toml."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import pytest

from kdgen.files.requirements import requirement

PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize("package", ["nvidia-cuda-nvrtc", "clang-format", "numba-cuda"])
def test_messages_name_the_pins(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: [*PROJECT["dependencies"], "clang-format-other>=1"])
    assert requirement(package) == next(each for each in PROJECT["dependencies"] if each.startswith(package))


def test_without_metadata_the_name_alone_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert requirement("clang-format") == "clang-format"
