"""Checks of rounds, with requests of every kind on a small model, and on the shipped model and drafter, whose drafts are accepted.

Each request is decoded plainly first, and the host computes what its rounds must do (``kdgen.verify.decoding.expected_rounds``): tokens,
cache bits, lengths, forwards, rounds started, accepted tokens, nodes, budgets and recorded units. Then the rounds run and are compared.
"""
