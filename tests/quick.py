"""The selection of tests that ``pytest -m quick`` runs."""

#: What ``pytest -m quick`` runs, for the minute between two edits: files, and single tests of files that take longer.
QUICK = (
    "unit/test_layers.py", "unit/test_style.py", "unit/test_docs.py", "unit/test_spec.py", "unit/test_config.py", "unit/test_plan.py",
    "unit/test_templates.py", "unit/test_format.py", "unit/test_generated_drift.py",
    "unit/test_kernels_cpu.py::test_kernel_is_right[tiny-f32-rmsnorm_hidden-cpu-checker]",
    "unit/test_examples.py::test_example[draft_trees.py]",
)  # fmt: skip
