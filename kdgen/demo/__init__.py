"""The demo model: a small byte-level model of Python source and its DFlash drafter.

``corpus.py`` is the text, ``prompts.py`` what of it is held out to begin with, ``target.py`` and ``drafter.py`` the two models in torch,
``train.py`` trains and exports them (an extra: torch), ``acceptance.py`` measures on held-out prompts what drafts are accepted, with the
engine and without torch.
"""
