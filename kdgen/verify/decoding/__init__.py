"""Whole decodes, against the reference and each other by bits."""
