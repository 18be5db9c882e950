"""A small Qwen3 from its config, with random weights, and the norm under test put into it. Nothing is downloaded."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

from ..errors import ExtraMissingError, installs
from ..integrations.patching import replace
from .checks import Norm


def required(module: str, extra: str) -> Any:
    """The imported module. Raises ExtraMissingError with the command that installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ExtraMissingError(
            f"tunegen gate needs {package} ({error}); install it with: {installs(extra)}"
        ) from error


def hugging_faces_norm() -> type[nn.Module]:
    """Qwen3RMSNorm(N, eps). Raises ExtraMissingError without transformers."""
    found: type[nn.Module] = required("transformers.models.qwen3.modeling_qwen3", "qwen3").Qwen3RMSNorm
    return found


def small_qwen3(vocab: int, sequence_length: int, seed: int) -> nn.Module:
    """Qwen3ForCausalLM of two layers, hidden 64, four heads of 16 with two of keys: nine norms, four of them per head.
    fp32, on the CPU; torch's own random numbers go on as if it had not been made.

    Weights start at Qwen3's .02, embeddings among them: the first norm sees a mean square of 4e-4, where eps = 1e-5 is
    not eps = 1e-6.
    """
    transformers = required("transformers", "qwen3")
    config = transformers.Qwen3Config(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=sequence_length,
        initializer_range=0.02,
        rms_norm_eps=1e-6,
        use_cache=False,
        attn_implementation="eager",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = transformers.Qwen3ForCausalLM(config)
    return model


def put_in(model: nn.Module, norm: Norm) -> None:
    """Let `norm` compute every norm of the model."""
    report = replace(model, lambda x, weight, contract: norm(x, weight, contract.eps))
    assert not report.left, str(report)
