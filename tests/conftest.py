"""Hypothesis profiles, the ``gpu`` and ``quick`` markers, and backends as fixtures."""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # before anything imports NumPy: there is a worker for each core already
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, "1")

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kdgen.backends import open_backend
from kdgen.backends.base import Backend
from tests.quick import QUICK

settings.register_profile("quick", max_examples=10, deadline=None)
# the same examples on every run, and whatever is needed to repeat a failure
settings.register_profile("ci", max_examples=25, deadline=None, derandomize=True, print_blob=True)
settings.register_profile("nightly", max_examples=500, deadline=None, print_blob=True)
# a GPU is lent by the minute: few examples, and no complaint that the first one compiles kernels
settings.register_profile("gpu", max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.hookimpl(tryfirst=True)  # before xdist chooses
def pytest_cmdline_main(config: pytest.Config) -> None:
    """With ``-n``, a worker runs neighbouring tests, which need the same kernels, and takes others' when it has no more."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "worksteal"


def pytest_configure() -> None:
    """Programs started in the background ignore Ctrl-C, and so would those that tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the markers that -m asks for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.removeprefix("tests/").startswith(QUICK):
            item.add_marker("quick")
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    from kdgen.backends.gpu import cuda_unusable

    if reason := cuda_unusable():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {reason}"))


@pytest.fixture(scope="session", autouse=True)
def cache_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache for the whole run, workers included; never the user's own unless KDGEN_CACHE_DIR asks for it."""
    chosen = os.environ.get("KDGEN_CACHE_DIR")
    if chosen:
        yield Path(chosen)
        return
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "kdgen-cache"
    os.environ["KDGEN_CACHE_DIR"] = str(shared)
    yield shared
    del os.environ["KDGEN_CACHE_DIR"]


@pytest.fixture(scope="session")
def cpu_backend(cache_directory: Path) -> Backend:
    return open_backend("cpu")


@pytest.fixture(scope="session")
def cuda_backend(cache_directory: Path) -> Backend:
    """For tests marked ``gpu``."""
    return open_backend("cuda")
