"""From a plan to machine code: render, format, compile, the cache of compiled kernels, the generated folders."""
