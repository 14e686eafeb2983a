"""A campaign of damaged inputs, kills, runs at once and full disks against the kdgen command.

``python -m tests.campaign --minutes 30`` runs it; it is no part of the test suite's time. ``process.py`` starts commands and watches
them, ``damage.py`` draws damage, ``subjects.py`` makes the files that are damaged, ``inputs.py`` runs commands over damaged files,
``judge.py`` decides whether an ending is acceptable; ``entries.py``, ``kills.py``, ``together.py`` and ``disks.py`` are
the other parts.
"""
