"""Everything generated, held against something else: kernels against float64 NumPy, decodes against the oracles and each other.

``tasks.py`` lists what is checked, ``running.py`` runs the tasks, and ``run.py`` reports what they found. ``parts/`` makes the checks:
of kernels alone with ``kernels/``, of whole models with ``decoding/`` and ``rounds/``, of primitives with ``ptx/``. ``plans.py`` chooses
the plans, and ``shrink.py`` makes a wide spec small enough for a CPU.
"""
