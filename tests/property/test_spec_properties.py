"""Every valid spec survives being written and read, as YAML and as a published config."""

from __future__ import annotations

import json

from hypothesis import given
from strategies import specs

from kdgen.spec.model import Spec, parse_spec
from kdgen.spec.published import parse_config
from kdgen.spec.publishing import published_config


@given(specs(quantized=None))
def test_yaml_round_trip(spec: Spec) -> None:
    again = parse_spec(spec.to_yaml())
    assert again == spec
    assert again.sha256 == spec.sha256


@given(specs(quantized=None))
def test_published_config_round_trip(spec: Spec) -> None:
    assert parse_config(json.dumps(published_config(spec)), spec.name).sha256 == spec.with_draft(None).sha256


@given(specs())
def test_hash_is_of_the_model_and_not_of_its_name(spec: Spec) -> None:
    assert spec.model_copy(update={"name": "other"}).sha256 == spec.sha256
    assert spec.model_copy(update={"num_hidden_layers": spec.num_hidden_layers + 1}).sha256 != spec.sha256


@given(specs(quantized=None))
def test_tensor_keys_are_distinct(spec: Spec) -> None:
    keys = [key for group in spec.tensors() for key in group.names()]
    assert len(keys) == len(set(keys))
