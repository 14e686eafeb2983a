"""Rounds, the path that users run: requests of every kind on a small model, and the shipped model and drafter, whose drafts are accepted.

Every request is decoded plainly, and what its rounds must do is found on the host (``kdgen.verify.decoding.course``). Then they run:
tokens, cache bits, lengths, forwards, rounds started, accepted tokens, nodes, budgets and recorded units must be those.
"""
