"""Files that kdgen reads and writes: where shipped ones lie, inputs of bounded size, and what is under construction."""
