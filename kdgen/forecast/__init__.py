"""Lower bounds for the times of steps on known GPUs, by their data sheets."""
