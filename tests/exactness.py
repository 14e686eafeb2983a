"""The exactness contract as a property of models and situations that Hypothesis draws."""

from __future__ import annotations

from hypothesis import Phase, event, settings

from kdgen.backends.base import Backend
from kdgen.plan.ir import Compute
from kdgen.spec.model import Spec
from kdgen.verify.decoding.exact import check_exactness
from kdgen.verify.decoding.random_cases import Situation

#: A failing model would be shrunk by compiling hundreds of others; the blob that is printed repeats it as it is.
unshrunk = settings(phases=(Phase.explicit, Phase.reuse, Phase.generate))


def assert_exact(backend: Backend, spec: Spec, compute: Compute, situation: Situation) -> None:
    """L1 to L5, and in float32 the float64 reference's logits."""
    found = check_exactness(backend, spec, compute, situation)
    event(f"{'several requests' if found.requests > 1 else 'one request'}, {'some' if found.accepted else 'no'} drafts accepted")
    assert not found.problem, found.problem
