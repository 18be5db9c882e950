"""Tokens that can be learned, with a known end: an order-1 Markov chain.

On random tokens the loss stays where it starts and a loss curve is blind. Here it falls from ln(vocab) to the entropy
rate of the chain, which is the loss of a model that knows the transitions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SHARPNESS = 2.0
"""Transitions are softmax(SHARPNESS x normal numbers): about 2.2 nats a token of the ln(32) = 3.5 at the start."""


@dataclass(frozen=True)
class Chain:
    """`transitions` (V, V): row i holds the probabilities of what follows token i. `stationary` (V): how often each
    token occurs. `entropy`: nats a token. All in float64."""

    transitions: Tensor
    stationary: Tensor
    entropy: float


def make_chain(vocab: int, seed: int) -> Chain:
    """A chain in which every token can follow every other."""
    generator = torch.Generator().manual_seed(seed)
    rows = SHARPNESS * torch.randn(vocab, vocab, generator=generator, dtype=torch.float64)
    return chain_of(rows.softmax(-1))


def chain_of(transitions: Tensor) -> Chain:
    """Stationary distribution p = p T and entropy rate -sum p_i T_ij ln T_ij of transitions without a zero."""
    vocab = len(transitions)
    one = torch.eye(vocab, dtype=torch.float64)
    equations = torch.cat([transitions.T - one, torch.ones(1, vocab, dtype=torch.float64)])
    right = torch.cat([torch.zeros(vocab, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)])
    stationary = torch.linalg.lstsq(equations, right).solution.squeeze(1)
    entropies = -(transitions * transitions.log()).sum(-1)
    return Chain(transitions, stationary, float(stationary @ entropies))


def sample(chain: Chain, steps: int, batch: int, sequence_length: int, seed: int) -> Tensor:
    """Tokens (steps, batch, sequence_length), int64: each sequence starts from the stationary distribution."""
    generator = torch.Generator().manual_seed(seed)
    sequences, last = steps * batch, len(chain.stationary) - 1
    tokens = torch.empty(sequences, sequence_length, dtype=torch.int64)
    tokens[:, 0] = torch.multinomial(chain.stationary, sequences, replacement=True, generator=generator)
    cumulative = chain.transitions.cumsum(-1)
    for place in range(1, sequence_length):
        uniform = torch.rand(sequences, 1, generator=generator, dtype=torch.float64)
        following = torch.searchsorted(cumulative[tokens[:, place - 1]], uniform)
        tokens[:, place] = following.squeeze(1).clamp(max=last)  # a sum of probabilities may end just below 1
    return tokens.view(steps, batch, sequence_length)
