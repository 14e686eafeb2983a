"""Processes that share a model: how they meet and exchange, and how they are started."""
