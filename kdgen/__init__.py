"""kdgen: from a model spec to specialised CUDA C++, decoded exactly.

The pipeline is the map of the package; each stage turns one frozen value into the next, and everything above
``backends/`` works with no GPU and no CUDA driver::

    spec.py      Spec        a validated model description (YAML, or a published ``config.json`` through config.py)
    plan/        Plan        every decision: kernels, tiles, packed weight layouts, buffers, programs (ordered launches)
    render.py    Source      the CUDA text of one kernel, from templates/kernels/*.cu.j2 and the plan's parameters
    compile.py   Cubin       NVRTC's machine code for one architecture, its registers, shared memory and spills
    backends/    Backend     runs sources: ``cuda`` on a GPU, ``cpu`` the same text under an emulator and checker
    engine.py    Engine      a plan, its weights and a backend: prefill, decode and verify steps over device state
    rounds.py    Rounds      draft to compaction as one unit that the host starts ahead of results; ``budget.py`` chooses tree sizes
    decode.py                the loops, plain (AR), draft tree (DDTree) and rounds, over an Engine and a Drafter;
                             ``batch.py`` decodes several requests together

``build.py`` takes the first stages to ``generated/``; ``model.py`` takes what ``--model`` names to an Engine.

Several ranks share a model: ``plan/shard.py`` says who has what, ``ranks.py`` how they meet, ``launch.py`` starts them.

Beside the pipeline: ``reference/`` is the same model in float64 NumPy and imports none of the above but ``spec``;
``weights/`` reads checkpoints and packs them into the plan's layouts; ``drafters/`` propose tokens; ``verify/`` holds
every kernel and every decode against the reference and the oracles; ``cli/`` is the command line.
"""

__version__ = "0.1.0"
