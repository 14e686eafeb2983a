"""The demo's target model in torch, with parameters named as in published models. It computes the same as ``kdgen.reference.model``.

Routed experts are stacked, [experts, outputs, inputs] under ``…experts.gate_proj.weight``. All experts are computed for every token,
because they are few and small. Their weights are rounded to INT4 as in the export, with a straight-through estimator for gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kdgen.spec.model import LORA_NORM_EPS, Spec
from kdgen.spec.rope import rope_tables

Parameters = dict[str, Tensor]
INITIAL_DEVIATION = 0.02


@dataclass(frozen=True)
class Forward:
    """``logits`` [B, T, V]; ``features`` [B, T, requested layers · hidden]; ``loads`` [experts], tokens of each expert, for each MoE
    layer."""

    logits: Tensor
    features: Tensor
    loads: list[Tensor]


def shapes(spec: Spec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the parameters, experts stacked and not quantized."""
    plain = spec.model_copy(update={"quantization": None})
    for group in plain.tensors():
        name = group.key.replace("experts.{e}.", "experts.")
        yield name, (group.count, *group.shape) if group.count > 1 or "{e}" in group.key else group.shape


def initial(spec: Spec, seed: int) -> Parameters:
    """Initial parameters. Projections that add to the residual are scaled down by the square root of twice the number of layers."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes(spec):
        if name.endswith("norm.weight"):
            found[name] = torch.ones(shape)
        elif name.endswith("e_score_correction_bias"):
            found[name] = torch.zeros(shape)
        else:
            adds = "o_proj" in name or "down_proj" in name
            found[name] = torch.randn(shape, generator=generator) * INITIAL_DEVIATION / ((2 * spec.num_hidden_layers) ** 0.5 if adds else 1)
    return found


def trained(parameters: Parameters) -> Parameters:
    """The parameters that gradients train: all but the router's bias, which ``balance`` changes."""
    return {name: value for name, value in parameters.items() if not name.endswith("e_score_correction_bias")}


def balance(spec: Spec, parameters: Parameters, loads: list[Tensor], speed: float) -> None:
    """DeepSeek V3's balancing without a loss: raise an expert's bias if it has fewer tokens than the mean, lower it if it has more."""
    for layer, load in zip(range(*spec.moe_layers), loads, strict=True):
        parameters[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] += speed * torch.sign(load.mean() - load)


def fake_int4(weight: Tensor, group: int) -> Tensor:
    """``weight`` as ``kdgen.weights.quantize`` stores it, with the gradient of ``weight``."""
    groups = weight.detach().bfloat16().float().unflatten(-1, (-1, group))
    scale = (groups.abs().amax(-1, keepdim=True) / 7.5).bfloat16().float()
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    stored = (groups / scale).round().clamp(-8, 7) * scale
    return weight + (stored.flatten(-2) - weight).detach()


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Interleaved pairs of x [B, T, …, D] by cos and sin [T, D/2]."""
    shape = (cos.shape[0], *(1,) * (x.ndim - 3), cos.shape[1])
    c, s, pairs = cos.view(shape), sin.view(shape), x.float().unflatten(-1, (-1, 2))
    a, b = pairs[..., 0], pairs[..., 1]
    return torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)


class TorchTarget:
    """The model of ``spec`` over ``parameters``."""

    def __init__(self, spec: Spec, parameters: Parameters) -> None:
        self.spec, self.p = spec, parameters
        device = parameters["model.norm.weight"].device
        self.cos, self.sin = (torch.from_numpy(table).to(device) for table in rope_tables(spec, spec.max_position_embeddings))
        self.group = spec.quantization.group_size if spec.quantization else 0

    def forward(self, tokens: Tensor, layers: tuple[int, ...] = (), cache: list[tuple[Tensor, Tensor]] | None = None) -> Forward:
        """Run tokens [B, T] after those in ``cache``, the keys and values of each layer, which it extends in place."""
        spec, p = self.spec, self.p
        x = p["model.embed_tokens.weight"][tokens].float()
        features, loads = [], []
        for layer in range(spec.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            h = rmsnorm(x, p[f"{prefix}input_layernorm.weight"], spec.rms_norm_eps)
            x = x + self._attention(layer, h, cache)
            h = rmsnorm(x, p[f"{prefix}post_attention_layernorm.weight"], spec.rms_norm_eps)
            if layer < spec.first_k_dense_replace:
                x = x + self._swiglu(f"{prefix}mlp.", h)
            else:
                routed, load = self._experts(f"{prefix}mlp.", h)
                x = x + routed + self._swiglu(f"{prefix}mlp.shared_experts.", h)
                loads.append(load)
            if layer in layers:
                features.append(x)
        logits = F.linear(rmsnorm(x, p["model.norm.weight"], spec.rms_norm_eps), p["lm_head.weight"])
        return Forward(logits.float(), torch.cat(features, -1) if features else x[..., :0], loads)

    def _attention(self, layer: int, h: Tensor, cache: list[tuple[Tensor, Tensor]] | None) -> Tensor:
        spec, p, prefix = self.spec, self.p, f"model.layers.{layer}.self_attn."
        (batch, length), heads, nope = h.shape[:2], spec.num_attention_heads, spec.qk_nope_head_dim
        before = cache[layer][0].shape[2] if cache else 0
        cos, sin = self.cos[before : before + length], self.sin[before : before + length]
        q = F.linear(h, p[f"{prefix}q_proj.weight"]).view(batch, length, heads, spec.qk_head_dim)
        q = torch.cat([q[..., :nope], rotate(q[..., nope:], cos, sin).to(q)], -1).transpose(1, 2)
        kv = F.linear(h, p[f"{prefix}kv_a_proj_with_mqa.weight"])
        latent = rmsnorm(kv[..., : spec.kv_lora_rank], p[f"{prefix}kv_a_layernorm.weight"], LORA_NORM_EPS)
        k_rope = rotate(kv[..., spec.kv_lora_rank :], cos, sin)
        both = F.linear(latent, p[f"{prefix}kv_b_proj.weight"]).view(batch, length, heads, nope + spec.v_head_dim)
        k = torch.cat([both[..., :nope], k_rope.to(both)[:, :, None].expand(-1, -1, heads, -1)], -1).transpose(1, 2)
        v = both[..., nope:].transpose(1, 2)
        if cache is not None:
            if before:
                k, v = torch.cat([cache[layer][0], k], 2), torch.cat([cache[layer][1], v], 2)
            cache[layer] = k, v
        out = F.scaled_dot_product_attention(q, k, v, is_causal=before == 0, scale=spec.softmax_scale)
        return F.linear(out.transpose(1, 2).flatten(2), p[f"{prefix}o_proj.weight"])

    def _swiglu(self, prefix: str, h: Tensor) -> Tensor:
        gate, up, down = (self.p[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
        return F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)

    def _experts(self, prefix: str, h: Tensor) -> tuple[Tensor, Tensor]:
        """(the weighted sum of the chosen experts, tokens of each expert)."""
        spec, rows = self.spec, h.flatten(0, 1)
        with torch.autocast(h.device.type, enabled=False):
            scores = torch.sigmoid(rows.float() @ self.p[f"{prefix}gate.weight"].float().T)
        chosen = (scores + self.p[f"{prefix}gate.e_score_correction_bias"]).topk(spec.num_experts_per_tok, -1).indices
        weights = scores.gather(-1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * spec.routed_scaling_factor
        mix = torch.zeros_like(scores).scatter(-1, chosen, weights)
        stored = (self.p[f"{prefix}experts.{name}_proj.weight"] for name in ("gate", "up", "down"))
        gate, up, down = (fake_int4(weight, self.group) if self.group else weight for weight in stored)
        inner = F.silu(torch.einsum("th,eih->eti", rows, gate)) * torch.einsum("th,eih->eti", rows, up)
        out = torch.einsum("eti,ehi->eth", inner * mix.T[..., None].to(inner), down).sum(0)
        return out.view(h.shape), (mix > 0).float().sum(0)


@torch.no_grad()
def generate(target: TorchTarget, prompts: Tensor, new_tokens: int, temperature: float, seed: int) -> Tensor:
    """[B, P + new_tokens]: prompts [B, P] and the target's continuations."""
    generator = torch.Generator(prompts.device).manual_seed(seed)
    tokens, step = prompts, prompts
    empty = torch.zeros(0, 0, 0, 0, device=prompts.device)
    cache = [(empty, empty)] * target.spec.num_hidden_layers
    for _ in range(new_tokens):
        logits = target.forward(step, cache=cache).logits[:, -1]
        if temperature:
            step = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)
        else:
            step = logits.argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, step], 1)
    return tokens
