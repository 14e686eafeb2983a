"""Measured times beside floors and peers."""
