"""Measured times of steps and kernels, beside floors and peers."""
