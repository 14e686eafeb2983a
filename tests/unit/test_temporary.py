"""What is under construction goes with its maker, or, where that was killed, with the next run: at once, and never while it is alive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_model
from click.testing import CliRunner

from kdgen.cli import main
from kdgen.files.temporary import remove_abandoned, scratch_folder, temporary_file, temporary_folder
from kdgen.spec.model import load_spec
from kdgen.weights.random import random_weights

SMALL = load_spec("tiny").model_copy(update={"num_hidden_layers": 2, "vocab_size": 40, "n_routed_experts": 2, "hidden_size": 64})
MAKER = """
import contextlib, sys, time
from pathlib import Path
from kdgen.files.temporary import scratch_folder, temporary_file, temporary_folder
folder, cache = map(Path, sys.argv[1:])
with contextlib.ExitStack() as made:
    for name in (".x.kdtr.", ".int4."):
        made.enter_context(temporary_file(folder, name, ".tmp")).write_text("half")
        (made.enter_context(temporary_folder(folder, name, ".tmp")) / "shard").write_text("half")
    made.enter_context(temporary_file(cache, ".tmp-"))
    (made.enter_context(scratch_folder("format")) / "0.cu").touch()
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Path]:
    """The folder for output, the cache's, and the system's for temporary files."""
    found = tmp_path / "out", tmp_path / "cache", tmp_path / "tmp"
    for place in found:
        place.mkdir()
    monkeypatch.setenv("KDGEN_CACHE_DIR", str(found[1]))
    monkeypatch.setattr("tempfile.tempdir", str(found[2]))
    return found


def test_what_a_killed_process_left_goes_with_the_next_run_whatever_that_says(places: tuple[Path, Path, Path]) -> None:
    out, cache, temporary = places
    model = write_model(out / "model", SMALL, random_weights(SMALL, 5))
    maker = subprocess.Popen(
        [sys.executable, "-c", MAKER, str(out), str(cache)], stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(temporary)}
    )
    try:
        assert maker.stdout is not None and maker.stdout.readline() == b"ready\n"
        made = {path for place in places for path in place.iterdir()} - {model}
        assert len(made) == 6

        def refused(*arguments: str) -> None:
            result = CliRunner().invoke(main, arguments)
            assert result.exit_code == 2, result.output

        def run_all() -> None:
            (out / "x.kdtr").touch()
            refused("import", str(model), str(out / "x.kdtr"))  # is there already
            refused("quantize", str(out / "nothing"), str(out / "int4"))

        run_all()
        assert {path for place in places for path in place.iterdir()} - {model, out / "x.kdtr"} == made, "its maker is alive"
        maker.send_signal(signal.SIGKILL)
        maker.wait()
        run_all()
        assert {path for place in places for path in place.iterdir()} == {model, out / "x.kdtr"}
    finally:
        maker.kill()
        maker.communicate()


def test_nothing_else_goes(places: tuple[Path, Path, Path]) -> None:
    out = places[0]
    token = "0" * 32
    kept = [".x.kdtr.backup.tmp", f".x.kdtr.{token}", f".y.kdtr.{token}.tmp", f"x.kdtr.{token}.tmp", f".x.kdtr.{token[1:]}g.tmp"]
    for name in kept:
        (out / name).touch()
    (out / f".x.kdtr.{'1' * 32}.tmp").symlink_to(out)
    os.mkfifo(out / f".x.kdtr.{'2' * 32}.tmp")
    (out / f".x.kdtr.{'3' * 32}.tmp").touch()
    remove_abandoned(out, ".x.kdtr.", ".tmp")
    assert {path.name for path in out.iterdir()} == {*kept, f".x.kdtr.{'1' * 32}.tmp", f".x.kdtr.{'2' * 32}.tmp"}
    remove_abandoned(out / "nowhere", ".x.")


def test_what_is_renamed_stays_and_all_else_goes_at_the_end(places: tuple[Path, Path, Path]) -> None:
    out, _, temporary = places
    with temporary_file(out, ".a.") as file, temporary_folder(out, ".b.") as folder:
        file.write_text("whole")
        (folder / "part").write_text("whole")
        file.replace(out / "a")
        folder.replace(out / "b")
    assert (out / "a").read_text() == (out / "b" / "part").read_text() == "whole"
    with pytest.raises(ZeroDivisionError), temporary_file(out, ".a."), temporary_folder(out, ".b."), scratch_folder("cpu") as scratch:
        assert scratch.stat().st_mode & 0o777 == 0o700
        raise ZeroDivisionError
    assert {path.name for path in out.iterdir()} == {"a", "b"} and not list(temporary.iterdir())


def test_where_there_are_no_locks_age_decides(places: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    out = places[0]

    def none(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("kdgen.files.temporary.fcntl.flock", none)
    old, new = out / f".a.{'0' * 32}", out / f".a.{'1' * 32}"
    for path in (old, new):
        path.mkdir()
        (path / "part").touch()
    os.utime(old / "part", (0, 0))
    os.utime(old, (0, 0))
    with temporary_file(out, ".a.") as file:
        remove_abandoned(out, ".a.")
        assert set(out.iterdir()) == {new, file}


def test_a_file_taken_for_abandoned_before_it_was_locked_is_made_again(
    places: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    out, lock, taken = places[0], fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if not taken:
            taken.extend(out.iterdir())
            taken[0].unlink()
        lock(descriptor, operation)

    monkeypatch.setattr("kdgen.files.temporary.fcntl.flock", late)
    with temporary_file(out, ".a.") as file:
        assert file.exists() and file != taken[0]


def test_a_folder_removed_before_it_was_opened_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new folder has no lock yet, so that another process may take it for abandoned and remove it."""
    opened, removed = os.open, []

    def late(path: Path, *arguments: Any, **named: Any) -> int:
        if not removed:
            removed.append(path)
            path.rmdir()
        return opened(path, *arguments, **named)

    monkeypatch.setattr("kdgen.files.temporary.os.open", late)
    with temporary_folder(tmp_path, ".x.") as path:
        assert path.is_dir() and removed and path != removed[0]
    assert list(tmp_path.iterdir()) == []
