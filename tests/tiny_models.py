"""Small random models of the architectures that `patch` knows, in every release of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

ARCHITECTURES = {
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config"),
    "llama": ("LlamaForCausalLM", "LlamaConfig"),
    "mistral": ("MistralForCausalLM", "MistralConfig"),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config"),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig"),
}
NORMS = {"qwen3": 9, "qwen2": 5, "llama": 5, "mistral": 5, "gemma2": 9, "gemma3": 13}
"""Of two layers: Qwen3 has two more a layer on heads, Gemma 2 two more on hidden states, Gemma 3 both."""
VOCABULARY = 64


def tiny(architecture: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> nn.Module:
    """Two layers of width 64, four heads of 16, weights of the norms away from where they start."""
    transformers = pytest.importorskip("transformers")
    model_name, config_name = ARCHITECTURES[architecture]
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = getattr(transformers, config_name)(**{**sizes, **changes})
    torch.manual_seed(seed)
    model: nn.Module = getattr(transformers, model_name)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(dtype)


def tokens(rows: int = 2, length: int = 12, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (rows, length), generator=generator)


def batch(device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Labels too: the model returns a loss."""
    ids = tokens().to(device)
    return {"input_ids": ids, "labels": ids.clone()}


def gradients(model: nn.Module, device: torch.device | str = "cpu") -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, and the gradient of each parameter, of one step; the model's own gradients are cleared first."""
    model.zero_grad()
    result = model(**batch(device))
    result.loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return result.logits.detach(), found
