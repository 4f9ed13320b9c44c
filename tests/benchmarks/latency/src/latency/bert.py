"""A BERT encoder of MiniLM's size, from a configuration of transformers, with weights from the seed."""

from __future__ import annotations

import torch
from torch import nn

_VOCABULARY, _LENGTH = 30522, 128


class Encoder(nn.Module):
    """BERT without its pooler: token ids to hidden states."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the last hidden state, [batch, length, 384]."""
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def build() -> Encoder:
    """Return 6 layers of width 384 with 12 heads."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=_VOCABULARY,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        max_position_embeddings=512,
    )
    return Encoder(BertModel(config, add_pooling_layer=False))


def example_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Return one sequence without padding."""
    return torch.randint(0, _VOCABULARY, (1, _LENGTH)), torch.ones(1, _LENGTH, dtype=torch.int64)
