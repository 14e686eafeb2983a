"""Backends run generated kernels: ``base`` says what one is, ``cpu`` and ``cuda`` are the two."""
