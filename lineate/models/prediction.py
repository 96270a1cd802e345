"""Multi-token prediction: a small head that guesses the tokens after the next from what the model's head reads.

    u_i = in_proj(embedding_norm(e(x_{i+1})) | hidden_norm(h_i))      h_i: what the model's head read for token i
    p_i = norm(block(u_0 .. u_i)_i)                                   one block of attention and feed-forward
    logits of x_{i+2} = head(p_i)                                     embedding and head are those of the model

A guess x_{i+2} together with p_i in place of h_{i+1} yields the next guess, and so on. Qwen3-Next and Qwen3.5 were
trained with such a head; their checkpoints have its tensors under `mtp.`.
"""

import torch
from torch import Tensor, nn

from lineate.layers import RMSNorm
from lineate.layers.projection import project
from lineate.models.block import Block
from lineate.models.config import HybridConfig
from lineate.models.state import ModelState
from lineate.models.trail import ModelTrail


class PredictionHead(nn.Module):
    """The module of multi-token prediction, without the embedding and the head, which are the model's.

    Args:
        config: the configuration of the model; the block has its attention and its feed-forward.
    """

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        size, eps, centred = config.hidden_size, config.norm_eps, config.zero_centred_norm
        self.embedding_norm = RMSNorm(size, eps, zero_centred=centred)
        self.hidden_norm = RMSNorm(size, eps, zero_centred=centred)
        self.in_proj = nn.Linear(2 * size, size, bias=False)
        self.block = Block(config.of_prediction(), 0)
        self.norm = RMSNorm(size, eps, zero_centred=centred)

    def forward(self, embedded: Tensor, hidden: Tensor, state: ModelState | None = None) -> tuple[Tensor, ModelState]:
        """Return what the model's head reads to predict the tokens after these, `b t hidden`, and the state.

        Args:
            embedded: the embeddings of tokens, `b t hidden`.
            hidden: what the model's head read for the token before each of them, or what this returned for it.
            state: the state of an earlier call, to continue; None: the sequences begin here.
        """
        x, layer = self.block(self._join(embedded, hidden), None if state is None else state.layers[0])
        seen = 0 if state is None else state.lengths
        return self.norm(x), ModelState((layer,), seen + embedded.shape[1])

    @torch.no_grad()
    def trail(self, embedded: Tensor, hidden: Tensor, state: ModelState) -> tuple[Tensor, ModelTrail]:
        """Read tokens of which every row keeps as many as it likes, as HybridLM.trail does.

        Args:
            embedded: the embeddings of tokens, `b t hidden`.
            hidden: what the model's head read for the token before each of them.
            state: the state of an earlier call; it is not changed.
        """
        x, trailed = self.block.trail(self._join(embedded, hidden), state.layers[0])
        return self.norm(x), ModelTrail((trailed,), state.lengths, *embedded.shape[:2])

    def _join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Return the input of the block."""
        if hidden.shape != embedded.shape:
            raise ValueError(
                f"hidden must have the shape (b, t, hidden) of the embeddings, {tuple(embedded.shape)}, got "
                f"{tuple(hidden.shape)}"
            )
        return project(self.in_proj, torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), -1))
