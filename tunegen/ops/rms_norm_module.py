"""`RMSNorm`, the module: state dicts of torch's and Hugging Face's norm modules load as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .arguments import check_contract
from .rms_norm import rms_norm


class RMSNorm(nn.Module):
    """RMSNorm over the last axis of size `hidden`; see `tunegen.rms_norm` for the arithmetic, dtypes and errors.

    Args:
        hidden: N, an int or a sequence of one int (as torch.nn.RMSNorm takes it).
        eps: a finite Python number >= 0, added to the mean of squares; what `rms_norm` refuses is refused here.
        offset: added to the weight, 1.0 for Gemma; the weight then starts at 0, else at 1.
        casting: "fp32" or "llama".
        elementwise_affine: False for no weight.

    The only entry of its state dict is `weight` of shape (hidden,), as in torch.nn.RMSNorm and Hugging Face's norms.
    """

    def __init__(
        self,
        hidden: int | Sequence[int],
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        casting: str = "fp32",
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = list(hidden) if isinstance(hidden, Sequence) else [hidden]
        if any(isinstance(size, bool) or not isinstance(size, int) for size in sizes):
            raise TypeError(f"hidden must be an int or a sequence of one int, got {hidden!r}")
        if len(sizes) != 1 or sizes[0] < 1:
            raise ValueError(f"hidden must be one size of at least 1, got {hidden}")
        check_contract(eps, offset, casting)
        self.hidden, self.eps, self.offset, self.casting = sizes[0], eps, offset, casting
        self.weight: nn.Parameter | None
        if elementwise_affine:
            self.weight = nn.Parameter(torch.empty(self.hidden, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The weight starts so that the whole factor, weight + offset, is 1."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) -> the same shape and dtype."""
        plain = type(self) is RMSNorm and "weight" in self._parameters  # else it may be a property, or no parameter
        weight = self._parameters["weight"] if plain else self.weight  # which is looked for there last
        return rms_norm(x, weight, self.eps, offset=self.offset, casting=self.casting)

    def extra_repr(self) -> str:
        """Shown by print(module)."""
        return f"{self.hidden}, eps={self.eps}, offset={self.offset}, casting={self.casting!r}"
