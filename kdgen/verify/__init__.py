"""Checks of everything generated: kernels against float64 NumPy, decodes against oracles and each other.

``tasks.py`` lists the checks, ``task_runner.py`` runs them, and ``run.py`` reports the results. ``parts/`` makes the checks: of single
kernels with ``kernels/``, of whole models with ``decoding/`` and ``rounds/``, of primitives with ``ptx/``. ``plans.py`` chooses the plans,
and ``shrink.py`` makes a wide spec small enough for a CPU.
"""
