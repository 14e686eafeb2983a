"""What steps must cost at least on GPUs that are not here, by data sheets."""
