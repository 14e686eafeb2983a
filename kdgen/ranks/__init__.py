"""Ranks, processes that share a model: how they start, connect, exchange data and end."""
