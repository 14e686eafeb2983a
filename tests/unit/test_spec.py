"""Specs: the shipped ones, their derived sizes, and every refusal with file, key, value and reason."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import Field, ValidationError

from kdgen.errors import SpecError
from kdgen.files.resources import specs_dir
from kdgen.spec.fields import RopeScaling
from kdgen.spec.model import MAX_YAML_BYTES, Spec, load_spec, parse_spec
from kdgen.spec.published import load_config
from kdgen.spec.publishing import published_config
from kdgen.spec.rope import inverse_frequencies, rope_tables
from kdgen.verify.oracles.models import model_cases

SHIPPED = sorted(path.stem for path in specs_dir().glob("*.yaml"))
#: Parameters each published model is known by, in units of 1e9.
PARAMETERS = {"k26": 1026, "deepseek-v3": 671, "deepseek-v2-lite": 15.7, "moonlight-16b-a3b": 16.0, "glm-4.7-flash": 29.9}


def tiny(**changes: Any) -> dict[str, Any]:
    """tiny.yaml as plain data, with changes; a key changed to ``...`` is left out."""
    values = yaml.safe_load((specs_dir() / "tiny.yaml").read_text()) | changes
    return {key: value for key, value in values.items() if value is not ...}


def findings(text_or_values: str | dict[str, Any]) -> dict[str, tuple[str, str]]:
    """{key: (value, reason)} of a refusal."""
    with pytest.raises(SpecError) as error:
        if isinstance(text_or_values, str):
            parse_spec(text_or_values, "bad.yaml")
        else:
            Spec.from_mapping(text_or_values, "bad.yaml")
    assert all(finding.file == "bad.yaml" for finding in error.value.findings)
    assert str(error.value).splitlines() == [str(finding) for finding in error.value.findings]
    return {finding.key: (finding.value, finding.reason) for finding in error.value.findings}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_specs(name: str) -> None:
    spec = load_spec(name)
    assert spec.name == name
    assert load_spec(specs_dir() / f"{name}.yaml") == spec == load_spec(str(specs_dir() / f"{name}.yaml"))
    assert parse_spec(spec.to_yaml()) == spec
    if name in PARAMETERS:
        sizes = {"matrix": 1, "small": 1, "packed": 8, "scale": 0, "shape": 0}
        total = sum(sizes[group.kind] * math.prod(group.shape) * group.count for group in spec.tensors())
        assert total / 1e9 == pytest.approx(PARAMETERS[name], rel=0.005)


#: The first 16 digits of the hashes that users' manifests, reports and packed files hold.
HASHES = {
    "deepseek-v2-lite": "f4ca44665247d3fc",
    "deepseek-v3": "fd5dadf850b5921a",
    "demo": "006b7469d889c0e4",
    "glm-4.7-flash": "6af378dcfabbc39d",
    "k26": "ee66264d881f3a6a",
    "moonlight-16b-a3b": "89c86c8cb350032d",
    "tiny": "4cacedd07a0ac588",
    "tiny-dflash": "5044391fa5d5fb61",
    "tiny2": "b446a56a7927a8f0",
}


class LaterScaling(RopeScaling):
    """RoPE scaling with a key of a later version."""

    new_slope: float = 1.5


class LaterSpec(Spec):
    """A spec with keys of a later version."""

    always_shared: bool = False
    new_ids: tuple[int, ...] = Field(default_factory=tuple)
    rope_scaling: LaterScaling | None = None


@pytest.mark.parametrize("name", SHIPPED)
def test_fields_added_later_leave_hashes_and_configs_as_they_are(name: str) -> None:
    spec = load_spec(name)
    assert spec.sha256[:16] == HASHES[name]
    values = spec.model_dump()
    same = LaterSpec(**values)
    assert same.sha256 == spec.sha256
    assert published_config(same) == published_config(spec)
    changes: list[dict[str, Any]] = [{"always_shared": True}, {"new_ids": (3,)}]
    if spec.rope_scaling:
        changes.append({"rope_scaling": values["rope_scaling"] | {"new_slope": 2.0}})
    others = [LaterSpec(**values | change).sha256 for change in changes]
    assert len({spec.sha256, *others}) == 1 + len(changes)
    assert LaterSpec(**values, always_shared=True).essential()["always_shared"] is True


def test_the_tiny_specs_are_the_oracles_configs() -> None:
    cases = {case.name: case for case in model_cases()}
    for name in cases.keys() & {"tiny", "tiny2"}:
        assert load_config(cases[name].folder) == load_spec(name)


def test_derived_sizes() -> None:
    k26 = load_spec("k26")
    assert (k26.qk_head_dim, k26.cache_row_dim, k26.moe_layers, k26.has_moe) == (192, 576, (1, 61), True)
    assert k26.shared_intermediate_size == 2048
    assert k26.has_router_bias
    assert k26.softmax_scale == pytest.approx(192**-0.5 * (0.1 * math.log(64) + 1) ** 2)
    v2 = load_spec("deepseek-v2-lite")
    assert (v2.has_router_bias, v2.q_lora_rank, v2.shared_intermediate_size) == (False, None, 2816)
    dense = Spec.from_mapping(tiny(n_routed_experts=None, first_k_dense_replace=4))
    assert (dense.moe_layers, dense.has_moe, dense.has_router_bias) == ((4, 4), False, False)
    assert not any("experts" in group.key for group in dense.tensors())


@pytest.mark.parametrize("changes", [{}, {"first_k_dense_replace": 0}, {"first_k_dense_replace": 4}, {"num_hidden_layers": 1}])
def test_kinds_of_tensors_count_what_all_tensors_do(changes: dict[str, Any]) -> None:
    spec = Spec.from_mapping(tiny(**changes))
    every = [(group.shape, group.kind) for group in spec.tensors() for _ in group.names()]
    kinds = [(group.shape, group.kind) for group, times in spec.tensor_kinds() for _ in range(times * group.count)]
    assert sorted(every) == sorted(kinds)
    assert len(list(spec.model_copy(update={"num_hidden_layers": 2**31 - 1}).tensor_kinds())) < 50


def test_a_spec_is_frozen_and_strict() -> None:
    spec = load_spec("tiny")
    with pytest.raises(ValidationError):
        spec.hidden_size = 1  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Spec(**tiny(qk_rope_head_dim=31))
    assert Spec.from_mapping(tiny(rms_norm_eps=1)).rms_norm_eps == 1.0  # an int is fine where a number is expected
    assert Spec.from_mapping(tiny(eos_token_id=[1, 2])).eos_token_id == (1, 2)
    assert Spec.from_mapping(tiny(eos_token_id=None, n_shared_experts=None)).n_shared_experts == 0


YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}

REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    # what is changed, the key that is named, a part of the reason
    ({"hidden_size": "256"}, "hidden_size", "integer"),
    ({"hidden_size": True}, "hidden_size", "integer"),
    ({"hidden_size": 256.0}, "hidden_size", "integer"),
    ({"hidden_size": None}, "hidden_size", "integer"),
    ({"hidden_size": [256]}, "hidden_size", "integer"),
    ({"hidden_size": 0}, "hidden_size", "greater than 0"),
    ({"hidden_size": -256}, "hidden_size", "greater than 0"),
    ({"hidden_size": 2**31}, "hidden_size", "less than or equal to 2147483647"),
    ({"hidden_size": 10**400}, "hidden_size", "less than or equal"),
    ({"hidden_size": ...}, "hidden_size", "missing"),
    ({"hiden_size": 256}, "hiden_size", "unknown key; did you mean hidden_size?"),
    ({"zzz": 1}, "zzz", "unknown key"),
    ({"attention_bias": 0}, "attention_bias", "boolean"),
    ({"attention_bias": "no"}, "attention_bias", "boolean"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps", "number"),
    ({"rms_norm_eps": True}, "rms_norm_eps", "number"),
    ({"rms_norm_eps": math.nan}, "rms_norm_eps", "finite"),
    ({"rope_theta": math.inf}, "rope_theta", "finite"),
    ({"rope_theta": 1e300}, "rope_theta", "float32"),
    ({"rms_norm_eps": 1e-300}, "rms_norm_eps", "float32"),
    ({"rms_norm_eps": 0}, "rms_norm_eps", "greater than 0"),
    ({"routed_scaling_factor": -1.0}, "routed_scaling_factor", "greater than 0"),
    ({"hidden_act": "gelu"}, "hidden_act", "'silu'"),
    ({"scoring_func": "tanh"}, "scoring_func", "'sigmoid' or 'softmax'"),
    ({"topk_method": "best"}, "topk_method", "'noaux_tc'"),
    ({"dtype": "float16"}, "dtype", "'bfloat16' or 'float32'"),
    ({"model_type": "llama"}, "model_type", "'deepseek_v3'"),
    ({"qk_rope_head_dim": 31}, "qk_rope_head_dim", "even"),
    ({"num_experts_per_tok": 9}, "num_experts_per_tok", "more than n_routed_experts 8"),
    ({"num_experts_per_tok": 0}, "num_experts_per_tok", "positive"),
    ({"num_experts_per_tok": ...}, "num_experts_per_tok", "missing"),
    ({"routed_scaling_factor": ...}, "routed_scaling_factor", "missing"),
    ({"moe_intermediate_size": 0}, "moe_intermediate_size", "positive"),
    ({"n_group": 3}, "n_group", "does not divide n_routed_experts 8"),
    ({"topk_group": 2}, "topk_group", "more than n_group 1"),
    ({"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}, "num_experts_per_tok", "more than the 2 experts"),
    ({"n_group": 8, "topk_group": 4}, "n_group", "fewer than 2 experts a group"),
    ({"topk_method": "greedy", "n_group": 2, "topk_group": 2}, "n_group", "greedy"),
    ({"first_k_dense_replace": 5}, "first_k_dense_replace", "more than num_hidden_layers 4"),
    ({"first_k_dense_replace": -1}, "first_k_dense_replace", "greater than or equal to 0"),
    ({"n_routed_experts": None}, "first_k_dense_replace", "dense model"),
    ({"n_routed_experts": 0}, "n_routed_experts", "greater than 0"),
    ({"eos_token_id": 512}, "eos_token_id", "vocab_size 512"),
    ({"eos_token_id": [1, True]}, "eos_token_id.1", "integer"),
    ({"bos_token_id": -1}, "bos_token_id", "greater than or equal to 0"),
    ({"quantization": {"group_size": 48}}, "quantization.group_size", "32, 64 or 128"),
    ({"quantization": {"group_size": 32, "num_bits": 8}}, "quantization.num_bits", "must be 4"),
    ({"quantization": {"group_size": 32, "symmetric": False}}, "quantization.symmetric", "must be True"),
    ({"quantization": {"group_size": 32, "groupsize": 1}}, "quantization.groupsize", "did you mean group_size?"),
    (
        {"quantization": {"group_size": 32}, "moe_intermediate_size": 130},
        "quantization.group_size",
        "does not divide moe_intermediate_size 130",
    ),
    ({"quantization": {"group_size": 128}, "hidden_size": 192}, "quantization.group_size", "does not divide hidden_size 192"),
    ({"quantization": {"group_size": 32}, "first_k_dense_replace": 4}, "quantization", "none"),
    ({"rope_scaling": {**YARN, "type": "linear"}}, "rope_scaling.type", "'yarn'"),
    ({"rope_scaling": {**YARN, "factor": 0.5}}, "rope_scaling.factor", "greater than or equal to 1"),
    ({"rope_scaling": {**YARN, "factr": 0.5}}, "rope_scaling.factr", "did you mean factor?"),
    ({"rope_scaling": {**YARN, "beta_slow": 64}}, "rope_scaling", "beta_fast must exceed beta_slow"),
    ({"rope_scaling": {**YARN, "mscale_all_dim": 1e200}}, "rope_scaling.mscale_all_dim", "less than or equal to 1000000"),
    ({"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta", "must exceed 1"),
    ({"num_attention_heads": 2**27}, "num_attention_heads", "2^31"),
    ({"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 1}, "memory", "64-bit"),
    ({"n_routed_experts": 2**31 - 1, "moe_intermediate_size": 2**24}, "memory", "64-bit"),
    ({"num_hidden_layers": 4097}, "num_hidden_layers", "less than or equal to 4096"),
    ({"num_hidden_layers": 4096, "hidden_size": 2**20, "moe_intermediate_size": 2**26}, "memory", "weights need"),
    (
        {"num_hidden_layers": 4096, "max_position_embeddings": 2**31 - 1, "kv_lora_rank": 2**20, "num_attention_heads": 1},
        "max_position_embeddings",
        "cache",
    ),
    ({"name": 3}, "name", "string"),
]


@pytest.mark.parametrize(("changes", "key", "reason"), REFUSALS, ids=[str(i) for i in range(len(REFUSALS))])
def test_refusals(changes: dict[str, Any], key: str, reason: str) -> None:
    found = findings(tiny(**changes))
    assert key in found, found
    assert reason in found[key][1]


@pytest.mark.parametrize("name", ["", "K26", "../x", "a/b", "-a", ".a", "a b", "a\n", "é", "a;b", "a.", "con", "com1.x", "a" * 65])
def test_names_that_are_no_folder_names(name: str) -> None:
    assert findings(tiny(name=name)).keys() == {"name"}


def test_every_finding_comes_at_once_with_its_value() -> None:
    found = findings(
        tiny(hidden_size="256", qk_rope_head_dim=31, num_experts_per_tok=9, n_group=3, colour="red", kv_lora_rank=..., eos_token_id=600)
    )
    assert found.keys() == {
        "hidden_size", "qk_rope_head_dim", "num_experts_per_tok", "n_group", "colour", "kv_lora_rank", "eos_token_id",
    }  # fmt: skip
    assert found["hidden_size"][0] == "'256'"
    assert found["qk_rope_head_dim"][0] == "31"
    assert found["colour"] == ("'red'", "unknown key")


TINY = (specs_dir() / "tiny.yaml").read_text()
LAST = TINY.count("\n")


@pytest.mark.parametrize(
    ("text", "key", "reason"),
    [
        ("", "file", "empty"),
        ("# nothing\n", "file", "empty"),
        ("- a\n- b\n", "file", "mapping"),
        ("just text", "file", "mapping"),
        ("a: [1, 2", "file", "valid YAML"),
        ("a: b: c", "file", "valid YAML"),
        ("a: \x00", "file", "valid YAML"),
        (TINY + "hidden_size: 256\n", "hidden_size", "given twice"),
        (TINY + "rope_scaling: {type: yarn, type: yarn}\n", "rope_scaling.type", "given twice"),
        (TINY + "1: 2\n", "1", "plain text"),
        (TINY + "? [a]\n: 2\n", "?", "plain text"),
        (TINY + "---\nname: other\n", "file", "2 YAML documents"),
        (TINY.replace("256", "!!python/object/apply:os.system ['true']"), "line 5", "tags"),
        (TINY.replace("256", "!!int '256'"), "line 5", "tags"),
        (TINY.replace("256", "&a 256"), "line 5", "anchors"),
        (TINY + "x: *a\n", f"line {LAST + 1}", "anchors"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "line 1", "anchors"),
        (TINY + "x: " + "[" * 100 + "]" * 100, f"line {LAST + 1}", "nested deeper"),
        (TINY.replace("256", "9" * 5000), "file", "cannot be read"),
        (TINY.replace("256", "0x100"), "hidden_size", "integer"),
        (TINY.replace("256", "1_000"), "hidden_size", "integer"),
        (TINY.replace("256", "4:16"), "hidden_size", "integer"),
        (TINY.replace("attention_bias: false", "attention_bias: no"), "attention_bias", "boolean"),
        (TINY.replace("1.0e-5", ".nan"), "rms_norm_eps", "finite"),
        (TINY + "<<: {hidden_size: 1}\n", "<<", "unknown key"),
        (TINY + "\"\\e[31m\": 1\n", "'\\x1b[31m'", "unknown key"),
    ],
)  # fmt: skip
def test_text_that_is_refused(text: str, key: str, reason: str) -> None:
    found = findings(text)
    assert key in found, found
    assert reason in found[key][1]


def test_exponents_need_no_decimal_point() -> None:
    assert parse_spec(TINY.replace("1.0e-5", "1e-5")) == load_spec("tiny")


def test_a_folder_does_not_hide_a_shipped_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()  # as `kdgen build tiny --out .` makes it
    assert load_spec("tiny").name == "tiny"
    (tmp_path / "other").mkdir()
    with pytest.raises(SpecError, match="other: file: is a folder"):
        load_spec("other")


def test_files_that_are_refused(tmp_path: Path) -> None:
    def message(path: Path | str) -> str:
        with pytest.raises(SpecError) as error:
            load_spec(path)
        return str(error.value)

    assert "is a folder" in message(tmp_path)
    assert "cannot be read: No such file" in message(tmp_path / "none.yaml")
    assert "shipped are" in message("no-such-spec")
    (tmp_path / "a.yaml").write_bytes(b"name: \xff\n")
    assert "a.yaml: file: is not UTF-8 text (byte 6)" in message(tmp_path / "a.yaml")
    (tmp_path / "b.yaml").write_bytes(b"#" * (MAX_YAML_BYTES + 1))
    assert "cannot be read: it is larger than 65536 bytes, so it is no model description" in message(tmp_path / "b.yaml")
    (tmp_path / "c.yaml").write_bytes(b" \n")
    assert "is empty" in message(tmp_path / "c.yaml")
    (tmp_path / "d.yaml").write_text(TINY + "bad: 1\n")
    assert message(tmp_path / "d.yaml") == "d.yaml: bad = 1: unknown key"


def test_rope_tables_turn_each_pair_at_its_own_speed() -> None:
    spec = load_spec("tiny")
    cos, sin = rope_tables(spec, 50)
    assert cos.shape == sin.shape == (50, 16)
    assert cos.dtype == sin.dtype == np.float32
    angles = np.arange(50)[:, None] * spec.rope_theta ** (-np.arange(0, 32, 2) / 32)
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-5)
    np.testing.assert_allclose(sin, np.sin(angles), atol=1e-5)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    yarn = load_spec("deepseek-v3")
    plain = inverse_frequencies(yarn.model_copy(update={"rope_scaling": None}))
    ratio = plain / inverse_frequencies(yarn)
    # Pair i turns 4096·θ^(−i/32)/2π times in the original context: more than 32 times up to i = 10.47, less than once from i = 22.5.
    np.testing.assert_allclose(ratio[:11], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[23:], 40, rtol=1e-6)
    ramp = np.arange(1, 13) / 13
    np.testing.assert_allclose(1 / ratio[11:23], ramp / 40 + (1 - ramp), rtol=1e-6)


def test_yarn_amplitude() -> None:
    yarn = load_spec("k26")
    assert yarn.rope_scaling is not None
    for mscale, all_dim, expected in (
        (1.0, 1.0, 1.0),
        (0.0, 0.0, 0.1 * math.log(64) + 1),
        (1.0, 0.5, (0.1 * math.log(64) + 1) / (0.05 * math.log(64) + 1)),
    ):
        scaling = yarn.rope_scaling.model_copy(update={"mscale": mscale, "mscale_all_dim": all_dim})
        cos, sin = rope_tables(yarn.model_copy(update={"rope_scaling": scaling}), 9)
        np.testing.assert_allclose(np.hypot(cos, sin), expected, rtol=1e-6)
