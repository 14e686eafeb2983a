"""kdgen: from a model's description to specialised CUDA C++, decoded exactly.

Each stage turns one frozen value into the next. Everything above ``backends/`` in this list works without a GPU and without a CUDA driver::

    spec/        Spec       a validated description: our YAML, a published ``config.json``, a drafter's config
    plan/        Plan       every decision as data: kernels, tiles, packed layouts, buffers, programs (ordered launches)
    codegen/     Source     a kernel's CUDA text, from ``templates/`` and the plan's parameters
                 Cubin      NVRTC's machine code for one architecture, through a cache; ``generated/`` is written here
    backends/    Backend    runs sources: ``cuda`` on a GPU, ``cpu`` the same text under an emulator and checker
    weights/                checkpoints, read tensor by tensor and packed into the plan's layouts
    runtime/     Engine     a plan, its weights and a backend: prefill, decode and verify steps over device state
                 Decoded    what the loops give: plain decoding, draft trees (DDTree), rounds that the host starts ahead, batches

``runtime/pipeline.py`` goes through all of it in one function, ``open_engine``; start reading there.

The other rooms: ``files/`` (what is read, written and cleaned up), ``text/`` (tokenizers, chat templates), ``ranks/`` (processes that
share a model), ``drafters/`` (what proposes tokens), ``reference/`` (the model in float64 NumPy, which imports only ``spec/``),
``forecast/`` (the least that steps cost on GPUs that are not here), ``bench/`` (times beside floors and peers), ``demo/`` (the shipped
model's training), ``verify/`` (everything generated, compared with the reference, with other implementations, and with itself by bits),
``cli/``. Imports go one way; ``tests/unit/test_layers.py`` has the order. ``docs/architecture.md`` says where to change what, and
``docs/api.md`` what to import.
"""

__version__ = "0.1.0"
