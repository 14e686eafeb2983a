"""Hands tests every oracle case found: ask for ``model_case`` or ``tree_case`` and run once for each.

Cases come from the folder in KDGEN_ORACLE_DIR when that is set, and from ``data/`` here otherwise.
"""

from __future__ import annotations

import pytest

from kdgen.verify.oracles.models import model_cases, tree_cases


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, find in (("model_case", model_cases), ("tree_case", tree_cases)):
        if name in metafunc.fixturenames:
            cases = find()
            metafunc.parametrize(name, cases, ids=[case.name for case in cases])
