"""A language model of stacked LSTM layers with the embedding tied to the output."""

from __future__ import annotations

from torch import Tensor, nn


class LSTMLanguageModel(nn.Module):
    """Token indices (batch, length) to logits (batch, length, vocab)."""

    def __init__(
        self, *, vocab: int = 10000, d_model: int = 512, nlayers: int = 2, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, d_model)
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(
            d_model, d_model, nlayers, batch_first=True, dropout=dropout if nlayers > 1 else 0.0
        )
        self.head = nn.Linear(d_model, vocab)
        nn.init.normal_(self.tokens.weight, std=0.1)
        self.head.weight = self.tokens.weight

    def forward(self, idx: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.dropout(self.tokens(idx)))
        return self.head(self.dropout(hidden))
