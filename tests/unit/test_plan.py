"""What every plan promises, over all shipped specs in both compute types."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from dataclasses import replace

import pytest

from kdgen.codegen.render import render
from kdgen.errors import KdgenError
from kdgen.files.resources import specs_dir, templates_dir
from kdgen.plan.arch import smem_limit
from kdgen.plan.build import buffers_at, build_plan
from kdgen.plan.derive import OpProgram, derive
from kdgen.plan.ir import ITEM_BYTES, Arg, Compute, Limits, Plan, Workload
from kdgen.plan.ops.op import Context
from kdgen.plan.shard import WHOLE, Shard
from kdgen.plan.step import Ops, norm
from kdgen.plan.tuning import mode_of
from kdgen.spec.model import load_spec

SPECS = sorted(path.stem for path in specs_dir().glob("*.yaml"))
#: Shipped specs, and one of two ranks of those with every kind of layer.
SUBJECTS = [*SPECS, "tiny@2", "tiny-dflash@2", "k26@2", "tiny@2 peer", "k26@8 peer"]
EVERY = pytest.mark.parametrize(("spec", "compute"), [(spec, compute) for spec in SUBJECTS for compute in ("f32", "bf16")])
#: Pointer types a tensor of each dtype may be read through; packed MMA fragments are read 16 bytes at a time.
#: Structs of int32 are what one kernel writes for another.
POINTERS = {
    "f32": {"float", "float2"}, "bf16": {"bf16", "uint4", "unsigned char"}, "i32": {"int", "int2", "Schedule", "DraftShape"},
    "u8": {"unsigned char"},
}  # fmt: skip


def build(subject: str, compute: Compute) -> Plan:
    name, _, shared = subject.partition("@")
    ranks, _, peer = shared.partition(" ")
    return build_plan(load_spec(name), compute, shard=Shard(int(ranks), 1, "peer" if peer else "gather") if ranks else WHOLE)


@functools.cache
def plan_of(subject: str, compute: Compute) -> Plan:
    return build(subject, compute)


@functools.cache
def parameters_of(spec: str, compute: Compute) -> dict[str, tuple[str, ...]]:
    """The parameter types of every kernel, read from its text."""
    found = {}
    for rendered in render(plan_of(spec, compute)):
        name = rendered.kernel.name
        (declared,) = re.findall(r'extern "C" __global__ void __launch_bounds__\([^)]*\)\s+' + name + r"\(([^)]*)\)\s*\{", rendered.text)
        types = [re.sub(r"\s*(__restrict__\s+)?\w+$", "", " ".join(parameter.split())) for parameter in declared.split(",")]
        found[name] = tuple(types)
    return found


@EVERY
def test_every_launch_fits_its_kernel(spec: str, compute: Compute) -> None:
    plan, parameters = plan_of(spec, compute), parameters_of(spec, compute)
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    weights = {weight.name: weight for weight in (*plan.weights, *plan.draft_weights)}

    def check(arg: Arg, declared: str, layer: int) -> None:
        if arg.kind in ("int", "rows"):
            assert declared == "int" and -(2**31) <= arg.value < 2**31
            return
        read_only, pointer = declared.startswith("const "), declared.removeprefix("const ")
        assert pointer.endswith("*")
        if arg.kind in ("weight", "layer_weight"):
            tensor = weights[arg.name]
            assert read_only and (tensor.layers is not None) == (arg.kind == "layer_weight")
            assert tensor.layers is None or tensor.layers[0] <= layer + arg.value < tensor.layers[1]
            assert pointer[:-1] in POINTERS[tensor.dtype]
        elif arg.kind == "ranks":
            assert declared == "const u64*" and buffers[arg.name].role == "inbox"
        else:
            assert pointer[:-1] in POINTERS[buffers[arg.name].dtype]
            assert arg.kind == "buffer" or layer < buffers[arg.name].shape[0]

    gathers = {gather.name for gather in plan.gathers}
    for program in plan.programs:
        for launch, layer in program.launches():
            if launch.kernel in gathers:
                assert not launch.args
                continue
            kernel = plan.kernel(launch.kernel)
            if kernel.row_tiles is not None:
                assert {"row_tiles": kernel.row_tiles}.items() <= {each.parameter: each.arg.value for each in launch.args}.items()
            for arg, parameter in zip(launch.in_order(kernel), parameters[launch.kernel], strict=True):
                check(arg, parameter, layer)


def test_inboxes_hold_the_rows_by_which_ranks_find_their_places() -> None:
    plan = build_plan(load_spec("tiny"), "f32", Limits(max_context=64, max_tokens=2 * Limits().max_logits), Shard(2, 1, "peer"))
    buffers, found = {buffer.name: buffer for buffer in plan.buffers}, set()
    for program in plan.programs:
        for launch, _ in program.launches():
            given = {each.parameter: each.arg for each in launch.args}
            for arg in given.values():
                if arg.kind == "ranks":
                    rows = next(given[name] for name in ("inbox_rows", "rows") if name in given)
                    assert rows.value <= buffers[arg.name].shape[2], (program.name, launch.kernel)
                    found.add(arg.name)
    assert found == {"inbox_sum", "inbox_choice", "inbox_logits"}


def test_a_launch_binds_by_name_and_no_other_order_counts() -> None:
    plan = plan_of("tiny", "f32")
    kernel = plan.kernel("rope_cache")
    launch = next(each for each, _ in plan.program("decode").launches() if each.kernel == kernel.name)
    assert replace(launch, args=launch.args[::-1]).in_order(kernel) == launch.in_order(kernel)
    first, second, *rest = launch.args
    for wrong in ((first, *rest), (first, replace(second, parameter="nobody"), *rest), (first, second, second, *rest)):
        with pytest.raises(ValueError, match="rope_cache"):
            replace(launch, args=wrong).in_order(kernel)


def test_templates_print_their_signature_from_the_plan() -> None:
    for path in sorted((templates_dir() / "kernels").iterdir()):
        declared = re.findall(r'extern "C" __global__ void __launch_bounds__\([^\n]*\) \{\{ p.name \}\}\((.*)\) \{\n', path.read_text())
        assert declared == ["{{ signature }}"], path.name


def test_headers_say_what_each_argument_is() -> None:
    """The shapes are MODEL.md's; a kernel that both families have has one text."""
    plan = plan_of("k26", "bf16")
    header = "\n".join(plan.kernel("o_proj").header)
    assert "Grid: (min(448, 1 * SMs), ceil(rows / 32), 1).\nBlock: 512 threads, 98304 bytes of dynamic shared memory." in header
    assert "Programs: prefill, decode, verify; in decode after w_uv_absorb_few and before rmsnorm_hidden" in header
    for row in (
        r"x +const bf16\* +attention \[rows\]\[64\]\[128\] bfloat16",
        r"weight +const uint4\* +o_proj \[7168\]\[8192\] bfloat16, packed as mma_a",
        r"y +float\* +residual \[rows\]\[7168\] float32",
    ):
        assert re.search(rf"^  {row}$", header, re.MULTILINE), row
    for kernel in plan.kernels:
        (special,) = plan.special
        twin = next((each for each in special.kernels if each.name == kernel.name), kernel)
        assert twin != kernel or twin.header == kernel.header
        table = kernel.header[kernel.header.index("Arguments:") + 1 :]
        assert [line.split()[0] for line in table] == [each.name for each in kernel.parameters]


def test_two_ops_of_one_kernel_that_differ_are_refused() -> None:
    spec = load_spec("tiny")
    c = Context(spec, spec, mode_of(spec, "f32"), Limits(), WHOLE)
    one, other = norm(c, "input_layernorm"), replace(norm(c, "input_layernorm"), eps=1.0)
    with pytest.raises(ValueError, match="rmsnorm_hidden"):
        derive([OpProgram("both", (Ops((one, other)),))])


@EVERY
def test_nothing_is_there_for_nothing(spec: str, compute: Compute) -> None:
    plan = plan_of(spec, compute)
    launches = [(launch, layer) for program in plan.programs for launch, layer in program.launches()]
    args = [(bound.arg, layer) for launch, layer in launches for bound in launch.args]
    assert {launch.kernel for launch, _ in launches} == {each.name for each in (*plan.kernels, *plan.gathers)}
    gathered = {name for gather in plan.gathers for name in (gather.source, gather.target)}
    assert {arg.name for arg, _ in args if "buffer" in arg.kind or arg.kind == "ranks"} | gathered == {
        buffer.name for buffer in plan.buffers
    }
    read = {(arg.name, layer + arg.value if arg.kind == "layer_weight" else 0) for arg, layer in args if "weight" in arg.kind}
    weights = (*plan.weights, *plan.draft_weights)
    assert read == {(weight.name, layer) for weight in weights for layer in range(*(weight.layers or (0, 1)))}


@EVERY
def test_names_are_unique_and_sizes_possible(spec: str, compute: Compute) -> None:
    plan = plan_of(spec, compute)
    for things in (plan.kernels, (*plan.weights, *plan.draft_weights), plan.buffers, plan.programs):
        names = [thing.name for thing in things]
        assert len(names) == len(set(names))
    for kernel in plan.kernels:
        assert kernel.block % 32 == 0 and 32 <= kernel.block <= 1024 and 0 <= kernel.smem <= smem_limit("generic")
        assert all(extent.value(1, 1) >= 1 for extent in kernel.grid)
        assert all(
            limit >= extent.value(64, plan.limits.capacity) for limit, extent in zip((2**31 - 1, 65535, 65535), kernel.grid, strict=True)
        )
    for weight in (*plan.weights, *plan.draft_weights):
        assert weight.stored_bytes >= math.prod(weight.logical) * (ITEM_BYTES[weight.dtype] if not weight.group_size else 0.5)


@EVERY
def test_a_plan_is_plain_data(spec: str, compute: Compute) -> None:
    plan = plan_of(spec, compute)
    text = json.dumps(dataclasses.asdict(plan), allow_nan=False)
    assert text == json.dumps(dataclasses.asdict(build(spec, compute)), allow_nan=False)
    assert hash(plan) == hash(build(spec, compute))


@pytest.mark.parametrize("compute", ["f32", "bf16"])
def test_limits_change_no_kernel(compute: Compute) -> None:
    spec = load_spec("tiny")
    small, large = (build_plan(spec, compute, limits) for limits in (Limits(1, 64, 1), Limits(256, 1024, 8)))
    assert small.kernels == large.kernels and small.weights == large.weights
    assert [r.text for r in render(small)] == [r.text for r in render(large)]
    assert small.buffers != large.buffers


@EVERY
def test_what_splits_a_reduction_depends_on_the_shape_alone(spec: str, compute: Compute) -> None:
    """Kernels of one shape split alike, whatever they are called; no split is a function of tokens."""
    splits: dict[tuple[str, int], set[tuple[object, ...]]] = {}
    for kernel in plan_of(spec, compute).kernels:
        p = kernel.params
        if hasattr(p, "cols"):
            split = tuple(getattr(p, name, None) for name in ("slices", "warps", "in_flight"))
            splits.setdefault((kernel.template, p.cols), set()).add(split)
    assert splits and all(len(found) == 1 for found in splits.values())


@EVERY
def test_every_launch_over_rows_covers_them(spec: str, compute: Compute) -> None:
    """A grid that depends on tokens has a block for each row, at any count, unless blocks take up several."""
    for kernel in plan_of(spec, compute).kernels:
        for extent in kernel.grid:
            if extent.per_tokens and not extent.cap and not extent.per_processor:
                assert all(extent.value(rows, 1) * extent.per_tokens >= rows for rows in (1, 7, 8, 9, 31, 32, 33, 64))


def test_k26_is_as_large_as_published() -> None:
    total = sum(weight.total_bytes for weight in plan_of("k26", "bf16").weights)
    assert total == pytest.approx(595e9, rel=0.005)


def test_costs_of_k26_are_its_weights() -> None:
    """A decoded token reads 8 of 384 routed experts, one row of the embedding, and all other weights; activations are small change.

    The drafter takes note of it with its first projection and those of keys and values.
    """
    plan = plan_of("k26", "bf16")
    share = {"experts_gate_up": 8 / 384, "experts_down": 8 / 384, "embed_tokens": 1 / 163840}
    weights = sum(weight.total_bytes * share.get(weight.name, 1) for weight in plan.weights)
    weights += sum(weight.total_bytes for weight in plan.draft_weights if weight.name in ("draft_fc", "draft_kv_proj"))
    moved = sum(plan.kernel(launch.kernel).cost.bytes(Workload(1, 1, 1, 8)) for launch, _ in plan.program("decode").launches())
    assert weights < moved < 1.01 * weights


def test_the_drafter_of_k26_is_as_large_as_published() -> None:
    weights = plan_of("k26", "bf16").draft_weights
    assert sum(weight.total_bytes for weight in weights) / 2**30 == pytest.approx(6.5, abs=0.05)


def test_a_draft_reads_the_drafter_and_the_head() -> None:
    """fc belongs to the tokens that are committed; the block reads all other weights of the drafter, and the target's head."""
    plan = plan_of("k26", "bf16")
    weights = sum(weight.total_bytes for weight in plan.draft_weights if weight.name != "draft_fc")
    weights += next(weight.total_bytes for weight in plan.weights if weight.name == "lm_head")
    moved = sum(plan.kernel(launch.kernel).cost.bytes(Workload(1, 1, 1, 8)) for launch, _ in plan.program("draft").launches())
    assert weights < moved < 1.01 * weights


@pytest.mark.parametrize("compute", ["f32", "bf16"])
def test_a_drafter_changes_nothing_of_its_target(compute: Compute) -> None:
    spec = load_spec("k26")
    with_draft, without = plan_of("k26", compute), build_plan(spec.with_draft(None), compute)
    assert [each for each in with_draft.kernels if each in without.kernels] == list(without.kernels)
    assert all(each.name.startswith("draft_") for each in with_draft.kernels if each not in without.kernels)
    assert with_draft.weights == without.weights and not without.draft_weights


def test_features_are_captured_behind_their_layers() -> None:
    plan = plan_of("tiny-dflash", "bf16")
    for name in ("prefill", "decode", "verify"):
        order = [(launch.kernel, layer) for launch, layer in plan.program(name).launches()]
        for place, layer in enumerate((0, 2)):
            at = [i for i, (kernel, _) in enumerate(order) if kernel == "draft_capture"][place]
            written = [i for i, (kernel, of) in enumerate(order) if kernel in ("down_proj", "moe_combine") and of == layer]
            following = [i for i, (kernel, of) in enumerate(order) if kernel == "q_b_proj" and of == layer + 1]
            assert max(written) < at < min(following)


@EVERY
def test_buffers_at_another_context_are_those_of_a_plan_for_it(spec: str, compute: Compute) -> None:
    name, _, _ = spec.partition("@")
    model, plan = load_spec(name), plan_of(spec, compute)
    for context in (1, 65, model.max_position_embeddings):
        for each in (plan, *plan.special):
            there = build_plan(model, compute, Limits(max_context=context), each.shard)
            assert buffers_at(each, model, context) == there.on(each.family).buffers


def test_directories() -> None:
    assert plan_of("tiny", "bf16").directory == "tiny" and plan_of("tiny", "f32").directory == "tiny-f32"


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(max_context=4096), "a context of 4096 exceeds max_position_embeddings 1024"),
        (Limits(max_context=0), "at least 1"),
        (Limits(max_tokens=0, max_context=64), "at least 1"),
        (Limits(max_sequences=-1, max_context=64), "at least 1"),
    ],
)
def test_impossible_limits_are_refused(limits: Limits, reason: str) -> None:
    with pytest.raises(KdgenError, match=reason):
        build_plan(load_spec("tiny"), None, limits)


def test_tensor_cores_are_refused_where_dims_rule_them_out() -> None:
    values = load_spec("tiny").model_dump() | {"moe_intermediate_size": 120, "name": "odd"}
    spec = type(load_spec("tiny")).model_validate(values)
    assert build_plan(spec).compute == "f32" and any("moe_intermediate_size 120" in note for note in build_plan(spec).notes)
    with pytest.raises(KdgenError, match="moe_intermediate_size 120 is no multiple of 16"):
        build_plan(spec, "bf16")


def test_a_plan_is_made_once() -> None:
    spec = load_spec("tiny")
    assert build_plan(spec, "f32") is build_plan(load_spec("tiny"), "f32")
    assert build_plan(spec, "bf16").compute == "bf16"
    assert build_plan(spec.model_copy(update={"name": "other"}), "f32").spec_name == "other"


def test_a_drafter_captures_what_its_layers_put_out() -> None:
    spec = load_spec("tiny-dflash")
    assert spec.draft is not None
    for name in ("prefill", "decode", "verify"):
        layers: list[int] = []  # of the model's launches so far
        captured = []
        for launch, _ in build_plan(spec).program(name).launches():
            if launch.kernel == "draft_capture":
                captured.append((launch.argument("place").value, layers[-1]))
            elif launch.kernel == "mla_attention":
                layers.append(len(layers))
        assert captured == list(enumerate(spec.draft.target_layer_ids)), name
