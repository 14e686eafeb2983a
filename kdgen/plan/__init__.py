"""Plan: every decision is taken here. ``build.py`` decides, ``ir.py`` is what it returns, ``params.py`` the templates' contexts."""
