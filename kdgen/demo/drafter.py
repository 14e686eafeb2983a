"""The demo's DFlash drafter in torch, with parameters named as in published models. It computes the same as ``kdgen.reference.dflash``.

It is trained as it is used. One pass computes blocks [root, mask, …] at several positions of a text, the anchors. A block attends to the
target's features of the text before its anchor, and to itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kdgen.demo.target import INITIAL_DEVIATION, Parameters, rmsnorm
from kdgen.spec.drafter import DraftSpec
from kdgen.spec.rope import rope_tables


def initial(draft: DraftSpec, seed: int) -> Parameters:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for group in draft.tensors():
        if group.kind == "small":
            found[group.key] = torch.ones(group.shape) if group.key.endswith("norm.weight") else torch.zeros(group.shape)
        else:
            deviation = group.shape[1] ** -0.5 if group.key == "fc.weight" else INITIAL_DEVIATION
            found[group.key] = torch.randn(group.shape, generator=generator) * deviation
    return found


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs half a head apart of x [B, T, heads, D] by cos and sin [B, T, D/2]."""
    a, b = x.float().chunk(2, -1)
    c, s = cos[:, :, None], sin[:, :, None]
    return torch.cat([a * c - b * s, b * c + a * s], -1)


class TorchDrafter:
    """The drafter of ``draft`` over ``parameters``, with its target's ``embedding`` and ``head`` [V, hidden], which are not trained."""

    def __init__(self, draft: DraftSpec, parameters: Parameters, embedding: Tensor, head: Tensor, positions: int) -> None:
        if any(draft.window(layer) for layer in range(draft.num_hidden_layers)):
            raise NotImplementedError("drafters with sliding layers are not trained here")
        self.draft, self.p = draft, parameters
        self.embedding, self.head = embedding.detach(), head.detach()
        self.cos, self.sin = (torch.from_numpy(table).to(embedding.device) for table in rope_tables(draft, positions + draft.block_size))

    def blocks(self, features: Tensor, roots: Tensor, anchors: Tensor) -> Tensor:
        """Logits [B, N, block − 1, V] of blocks at ``anchors`` [B, N]; ``roots`` [B, N] are the tokens there.

        ``features`` [B, T, feature_width] are of positions 0 … T − 1; a block attends to those before its anchor.
        """
        draft, p = self.draft, self.p
        (batch, length), (count, size) = features.shape[:2], (anchors.shape[1], draft.block_size)
        context = rmsnorm(F.linear(features, p["fc.weight"]), p["hidden_norm.weight"], draft.rms_norm_eps)
        before = torch.arange(length, device=anchors.device).expand(batch, -1)
        inside = (anchors[..., None] + torch.arange(size, device=anchors.device)).flatten(1)
        ids = torch.full((batch, count, size), draft.mask_token_id, device=anchors.device)
        ids[..., 0] = roots
        seen_context = before[:, None] < anchors.repeat_interleave(size, 1)[..., None]
        block = torch.arange(count, device=anchors.device).repeat_interleave(size)
        seen = torch.cat([seen_context, (block[:, None] == block).expand(batch, -1, -1)], -1)[:, None]
        x = self.embedding[ids].flatten(1, 2).float()
        for layer in range(draft.num_hidden_layers):
            prefix = f"layers.{layer}."
            h = rmsnorm(x, p[f"{prefix}input_layernorm.weight"], draft.rms_norm_eps)
            keys = torch.cat([self._heads(layer, "k", context, before), self._heads(layer, "k", h, inside)], 1)
            values = torch.cat([self._split(layer, "v", context), self._split(layer, "v", h)], 1)
            query = self._heads(layer, "q", h, inside)
            q, k, v = (part.to(values).transpose(1, 2) for part in (query, keys, values))
            k, v = (part.repeat_interleave(draft.group_heads, 1) for part in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)
            x = x + F.linear(out, p[f"{prefix}self_attn.o_proj.weight"])
            h = rmsnorm(x, p[f"{prefix}post_attention_layernorm.weight"], draft.rms_norm_eps)
            gate, up, down = (p[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
            x = x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)
        hidden = rmsnorm(x, p["norm.weight"], draft.rms_norm_eps).view(batch, count, size, -1)[:, :, 1:]
        return F.linear(hidden, self.head).float()

    def _split(self, layer: int, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.p[f"layers.{layer}.self_attn.{name}_proj.weight"]).unflatten(-1, (-1, self.draft.head_dim))

    def _heads(self, layer: int, name: str, x: Tensor, positions: Tensor) -> Tensor:
        normed = rmsnorm(self._split(layer, name, x), self.p[f"layers.{layer}.self_attn.{name}_norm.weight"], self.draft.rms_norm_eps)
        return rotate_halves(normed, self.cos[positions], self.sin[positions])
