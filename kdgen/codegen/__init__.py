"""From a plan to machine code: rendering, formatting, compiling, the cache, and the generated folders."""
