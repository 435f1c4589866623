"""A tiny masked-diffusion model with code of its own, in the shape of LLaDA's.

It does what breaks a loader and a hook: no class is named Attention, nothing looks attention up by
name, ``post_init`` is never called, ``tie_weights`` takes no arguments, ``config.use_cache`` is
read though the configuration does not set it, and attention is PyTorch's, called from a block.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_tiny_llada import TinyLladaConfig


class TinyBlock(nn.Module):
    """Projections, rotary embedding, attention, feed-forward."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.dim = config.d_model // config.n_heads
        shared = config.n_kv_heads * self.dim
        self.attn_norm = nn.RMSNorm(config.d_model)
        self.ff_norm = nn.RMSNorm(config.d_model)
        self.q_proj = nn.Linear(config.d_model, config.d_model, bias=False)
        self.k_proj = nn.Linear(config.d_model, shared, bias=False)
        self.v_proj = nn.Linear(config.d_model, shared, bias=False)
        self.attn_out = nn.Linear(config.d_model, config.d_model, bias=False)
        self.ff_proj = nn.Linear(config.d_model, config.mlp_hidden_size, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.mlp_hidden_size, bias=False)
        self.ff_out = nn.Linear(config.mlp_hidden_size, config.d_model, bias=False)

    def rotated(self, x):
        """Rotary embedding of [batch, heads, tokens, dim], in float32."""
        half = self.dim // 2
        place = torch.arange(x.shape[-2], device=x.device).float()
        step = torch.arange(half, device=x.device).float() / half
        angle = place[:, None] * self.config.rope_theta**-step
        one, two = x.float().chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1).to(x.dtype)

    def attention(self, q, k, v, attention_bias=None):
        batch, tokens, width = q.shape
        q, k, v = (x.view(batch, tokens, -1, self.dim).transpose(1, 2) for x in (q, k, v))
        q, k = self.rotated(q), self.rotated(k)
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attention_bias, dropout_p=0.0, is_causal=False
        )
        return self.attn_out(out.transpose(1, 2).reshape(batch, tokens, width))

    def forward(self, x):
        h = self.attn_norm(x)
        x = x + self.attention(self.q_proj(h), self.k_proj(h), self.v_proj(h))
        h = self.ff_norm(x)
        return x + self.ff_out(F.silu(self.ff_proj(h)) * self.up_proj(h))


class TinyTransformer(nn.Module):
    """Embedding, blocks and words at the end."""

    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList([TinyBlock(config) for _ in range(config.n_layers)])
        self.ln_f = nn.RMSNorm(config.d_model)
        self.ff_out = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def forward(self, tokens):
        x, states = self.wte(tokens), []
        for block in self.blocks:
            x = block(x)
            states.append(x)
        return self.ff_out(self.ln_f(x)), tuple(states)


class TinyLladaModelLM(PreTrainedModel):
    """The wrapper for transformers."""

    config_class = TinyLladaConfig
    base_model_prefix = "model"
    _no_split_modules = ("TinyBlock",)

    def __init__(self, config):
        super().__init__(config)
        self.model = TinyTransformer(config)

    def forward(self, input_ids=None, attention_mask=None, use_cache=None, return_dict=None):
        if use_cache is None:
            use_cache = self.config.use_cache
        if use_cache:
            raise ValueError("there is no cache of keys")
        logits, states = self.model(input_ids)
        return CausalLMOutputWithPast(logits=logits, hidden_states=states)

    def get_input_embeddings(self):
        return self.model.wte

    def get_output_embeddings(self):
        return self.model.ff_out

    def tie_weights(self):
        if self.config.weight_tying:
            self.model.ff_out.weight = self.model.wte.weight
