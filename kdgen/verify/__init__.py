"""Everything generated, held against something else: kernels against float64 NumPy, decodes against the oracles and each other.

``kernels.py`` runs each kernel alone, ``decodes.py`` whole models, ``shrink.py`` makes a wide spec small enough for a CPU,
``tolerances.py`` says how far float32 may stray, ``report.py`` is what comes out.
"""
