"""Files that kdgen reads and writes: shipped files, inputs of bounded size, and temporary files."""
