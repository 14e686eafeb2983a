"""What steps, drafts and choices of experts must move at least: the floors that ``kdgen bench`` measures against and ``kdgen plan``
forecasts."""

from __future__ import annotations

from kdgen.plan.ir import ITEM_BYTES, Plan, Workload
from kdgen.spec.drafter import DraftSpec
from kdgen.spec.model import Spec


def expected_experts(experts: int, chosen: int, rows: int) -> float:
    """Distinct experts that ``rows`` tokens are expected to choose, each independently, ``chosen`` of ``experts``, all alike."""
    return experts * (1 - (1 - chosen / experts) ** rows)


def workload(spec: Spec, rows: int, context: int, experts: float) -> Workload:
    """What a launch works on in a step of ``rows`` token rows behind ``context`` keys, where a layer's rows choose so many distinct
    ``experts``. The rows of a tree share the keys before them."""
    draft_keys_of_layer = sum(draft_keys(spec.draft, context)) / spec.draft.num_hidden_layers if spec.draft else 0
    return Workload(rows, context + rows, draft_keys_of_layer, experts)


def draft_keys(draft: DraftSpec, context: int) -> list[int]:
    """Keys that a block sees in each layer."""
    windows = [draft.window(layer) for layer in range(draft.num_hidden_layers)]
    return [min(context, window - 1 if window else context) + draft.block_size for window in windows]


def draft_bytes(plan: Plan, draft: DraftSpec, context: int) -> int:
    """Of a block: the drafter's weights but fc, which belongs to committed tokens, the target's head, and the draft cache. ``draft`` is
    the part of it that the plan is for."""
    weights = sum(weight.total_bytes for weight in plan.draft_weights if weight.name != "draft_fc")
    head = next(weight.total_bytes for weight in plan.weights if weight.name == "lm_head")
    return weights + head + sum(draft_keys(draft, context)) * 2 * draft.key_width * ITEM_BYTES[plan.compute]
