"""A plan that runs: the engine and its memory, decode loops, rounds, batches, budgets, and what ``--model`` opens."""
