"""A small causal transformer over characters."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import UsageError


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, width: int, *, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        joint = self.queries_keys_values(x).view(batch, time, 3, self.heads, width // self.heads)
        # To (3, batch, heads, time, head width): attention uses the last two dimensions.
        queries, keys, values = joint.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, dropout_p=dropout, is_causal=True
        )
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return result


class TransformerBlock(nn.Module):
    """Attention and an MLP, each with pre-normalization and a residual connection."""

    def __init__(self, width: int, *, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads=heads, dropout=dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        y = self.contract(F.gelu(self.expand(self.mlp_norm(x))))
        total: Tensor = x + self.dropout(y)
        return total


class CharTransformer(nn.Module):
    """Predicts each next character; `input_shape` is (context,), `classes` the vocabulary."""

    def __init__(
        self,
        *,
        input_shape: Sequence[int],
        classes: int,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        (self.context,) = input_shape
        self.characters = nn.Embedding(classes, width)
        self.positions = nn.Embedding(self.context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, heads=heads, dropout=dropout) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes, bias=False)
        # Tied embedding: one tensor under two names.
        self.head.weight = self.characters.weight
        self._init_weights()

    def forward(self, characters: Tensor) -> Tensor:
        """Logits (batch, time, vocabulary) for LongTensor (batch, time)."""
        time = characters.shape[1]
        if time > self.context:
            raise UsageError(
                f"the sequence has {time} characters, but the model's context is {self.context}; "
                "shorten the sequence or build the model with a longer context"
            )
        positions = torch.arange(time, device=characters.device)
        x = self.dropout(self.characters(characters) + self.positions(positions))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits

    def _init_weights(self) -> None:
        std = 0.02
        # Every block adds to the residual stream twice; smaller weights keep its variance bounded.
        residual_std = std / math.sqrt(2 * len(self.blocks))
        nn.init.normal_(self.characters.weight, std=std)
        nn.init.normal_(self.positions.weight, std=std)
        for name, layer in self.blocks.named_modules():
            if isinstance(layer, nn.Linear):
                adds_to_stream = name.endswith((".out", ".contract"))
                nn.init.normal_(layer.weight, std=residual_std if adds_to_stream else std)
                nn.init.zeros_(layer.bias)
