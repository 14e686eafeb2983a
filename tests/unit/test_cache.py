from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kdgen.codegen.cache import Cache, digest

KEY = digest("some", "source")


def test_round_trip_and_miss(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    assert cache.get("cubin", KEY, ".bin") is None
    file = cache.put("cubin", KEY, ".bin", b"code")
    assert file is not None and file.read_bytes() == b"code"
    assert cache.get("cubin", KEY, ".bin") == file
    assert cache.get("cubin", KEY, "bin") == file
    assert cache.read("cubin", KEY, ".bin") == b"code"
    assert cache.read("cubin", KEY, ".json") is None
    assert cache.read("cpu", KEY, ".bin") is None
    assert cache.read("cubin", digest("other"), ".bin") is None
    assert cache.size() == 4


@pytest.mark.parametrize("damage", [b"", b"cod", b"codf", b"code+"])
def test_a_damaged_entry_is_a_miss_and_can_be_put_again(tmp_path: Path, damage: bytes) -> None:
    cache = Cache(tmp_path)
    file = cache.put("cubin", KEY, ".bin", b"code")
    assert file is not None
    file.write_bytes(damage)
    assert cache.read("cubin", KEY, ".bin") is None
    assert cache.get("cubin", KEY, ".bin") is None
    assert cache.put("cubin", KEY, ".bin", b"code") == file
    assert cache.read("cubin", KEY, ".bin") == b"code"


def test_clear_removes_entries_and_nothing_else(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.put("cubin", KEY, ".bin", b"code")
    (tmp_path / ".tmp-left-by-a-killed-process").touch()
    (tmp_path / "notes.txt").write_text("mine")
    mine = tmp_path / "cubin" / KEY[:2] / "notes.txt"
    mine.write_text("mine")
    assert cache.clear() == 2
    assert cache.size() == 0
    assert (tmp_path / "notes.txt").exists() and mine.exists()


def test_an_unwritable_directory_warns_once_and_returns_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cache, "_warned", False)
    (tmp_path / "file").touch()
    cache = Cache(tmp_path / "file")
    assert cache.put("cubin", KEY, ".bin", b"code") is None
    assert cache.put("cubin", KEY, ".bin", b"code") is None
    assert cache.read("cubin", KEY, ".bin") is None
    assert cache.clear() == 0
    assert capsys.readouterr().err.count("warning") == 1


def test_nothing_is_left_behind_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert Cache(tmp_path).put("cubin", KEY, ".bin", b"code") is None
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_default_reads_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDGEN_CACHE_DIR", str(tmp_path))
    assert Cache.default().path == tmp_path
    monkeypatch.setenv("KDGEN_CACHE_DIR", "~no-such-user/x")
    assert Cache.default().path == Path("~no-such-user/x")
    monkeypatch.delenv("KDGEN_CACHE_DIR")
    assert Cache.default().path.name == "kdgen"


def test_two_processes_put_the_same_entries_at_once(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from kdgen.codegen.cache import Cache, digest\n"
        "cache = Cache(Path(sys.argv[1]))\n"
        "for i in range(200):\n"
        "    assert cache.put('k', digest(str(i)), '.bin', b'x' * 1000)\n"
        "    assert cache.read('k', digest(str(i)), '.bin') == b'x' * 1000\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path)]) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert Cache(tmp_path).size() == 200 * 1000


def test_digest_keeps_parts_apart() -> None:
    assert digest("ab", "c") != digest("a", "bc")
    assert digest("ab") == digest(b"ab")
