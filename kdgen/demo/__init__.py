"""The demo model: a small byte-level model of Python source and its DFlash drafter.

``corpus.py`` collects the training text, ``prompts.py`` reads and writes held-out prompts, ``target.py`` and ``drafter.py`` are the two
models in torch, ``train.py`` trains and exports them (with torch, an extra), and ``acceptance.py`` measures how many drafted tokens are
accepted on held-out prompts (without torch).
"""
