"""Ops: the pieces of work that a forward is made of. An op says everything about its piece, in one place.

One file a family: ``dense`` layers, ``norm``, ``attention``, ``router``, ``experts``, ``rows`` of a step, draft ``tree``, ``logits`` and
choices, ``ranks``, the ``drafter``, and ``many_rows``. ``kdgen.plan.step`` lists a model's ops, ``kdgen.plan.passes`` rewrites the lists,
and ``kdgen.plan.derive`` makes kernels and programs of them.
"""
