"""Tiny random models of every pluggable MoE family, for tests."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

COMMON = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1,
    eos_token_id=2, tie_word_embeddings=False,
)
MLA = dict(
    q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
    num_key_value_heads=4,
)

# family -> (config class, settings over COMMON)
FAMILIES: dict[str, tuple[str, dict]] = {
    "mixtral": ("MixtralConfig", dict(intermediate_size=48, num_local_experts=6,
                                      num_experts_per_tok=2)),
    "qwen2_moe": ("Qwen2MoeConfig", dict(
        intermediate_size=48, moe_intermediate_size=24, shared_expert_intermediate_size=40,
        num_experts=6, num_experts_per_tok=2)),
    "qwen3_moe": ("Qwen3MoeConfig", dict(
        intermediate_size=48, moe_intermediate_size=24, num_experts=7, num_experts_per_tok=3,
        head_dim=8)),
    "qwen3_next": ("Qwen3NextConfig", dict(
        intermediate_size=48, moe_intermediate_size=24, shared_expert_intermediate_size=40,
        num_experts=6, num_experts_per_tok=2, head_dim=8, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"])),
    "deepseek_v2": ("DeepseekV2Config", dict(
        **MLA, intermediate_size=48, moe_intermediate_size=24, n_routed_experts=8,
        n_shared_experts=1, num_experts_per_tok=2, first_k_dense_replace=0, n_group=2,
        topk_group=1, topk_method="greedy", head_dim=8)),
    "deepseek_v3": ("DeepseekV3Config", dict(
        **MLA, intermediate_size=48, moe_intermediate_size=24, n_routed_experts=8,
        n_shared_experts=1, num_experts_per_tok=2, first_k_dense_replace=1, n_group=2,
        topk_group=1, routed_scaling_factor=2.5)),
    "olmoe": ("OlmoeConfig", dict(intermediate_size=24, num_experts=6, num_experts_per_tok=2)),
    "gpt_oss": ("GptOssConfig", dict(
        intermediate_size=24, num_local_experts=6, num_experts_per_tok=2, head_dim=8,
        sliding_window=32)),
    "glm4_moe": ("Glm4MoeConfig", dict(
        intermediate_size=48, moe_intermediate_size=24, n_routed_experts=6, n_shared_experts=1,
        num_experts_per_tok=2, first_k_dense_replace=1, n_group=1, topk_group=1, head_dim=8)),
    "phimoe": ("PhimoeConfig", dict(intermediate_size=24, num_local_experts=6,
                                    num_experts_per_tok=2)),
    "minimax_m2": ("MiniMaxM2Config", dict(
        intermediate_size=24, num_local_experts=6, num_experts_per_tok=2, head_dim=8,
        rotary_dim=4)),
    "granitemoe": ("GraniteMoeConfig", dict(intermediate_size=24, num_local_experts=6,
                                            num_experts_per_tok=2)),
}


def make_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32):
    """A tiny random model, with router and expert weights large enough that experts matter."""
    config_class, settings = FAMILIES[family]
    config = getattr(transformers, config_class)(**{**COMMON, **settings})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                torch.nn.init.normal_(parameter, std=0.15)
    return model.to(dtype)


def save_model(family: str, path: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Writes a tiny random checkpoint; returns its folder."""
    make_model(family, seed, dtype).save_pretrained(path)
    return path
