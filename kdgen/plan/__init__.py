"""Plan: the stage where every decision is taken. ``build.py`` decides, ``ir.py`` is what it returns, ``params.py`` the templates' contexts."""
