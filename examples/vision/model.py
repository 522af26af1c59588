"""A vision transformer and a GPT, both of Megatron-core layers, with a projector between them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import nn

from megatron_patches import gpt_layer_spec


class VisionTower(nn.Module):
    """A vision transformer: LayerNorm, GELU and biases, attention in both directions, a class
    token.

    Args:
        config: of its layers. Sequence parallelism is off: 49 patches and a class token divide by
            no number of ranks.
        side, patch: pixels of a picture's and a patch's side.
    """

    def __init__(self, config: TransformerConfig, side: int, patch: int) -> None:
        super().__init__()
        self.patch, self.tokens = patch, (side // patch) ** 2 + 1
        self.embed = nn.Linear(3 * patch * patch, config.hidden_size)
        self.first = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.positions = nn.Parameter(0.02 * torch.randn(self.tokens, 1, config.hidden_size))
        self.decoder = TransformerBlock(
            config, gpt_layer_spec(config, attn_mask_type=AttnMaskType.no_mask)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """``[b, 3, side, side]`` → features ``[tokens, b, hidden]``."""
        patches = (
            F.unfold(images, self.patch, stride=self.patch).permute(2, 0, 1).to(self.first.dtype)
        )
        x = self.embed(patches)
        x = torch.cat([self.first.expand(-1, x.shape[1], -1), x]) + self.positions
        return self.decoder(x, attention_mask=None)


class VisionLanguageModel(nn.Module):
    """A GPT that reads features of a picture in the places of a run of placeholder tokens.

    Args:
        vision: any module from pictures to features ``[tokens, b, vision_hidden]``.
        language: built with ``scatter_embedding_sequence_parallel=False``, as features are put
            among the embeddings of the whole text first.
        image_token: the placeholder; a text has as many as a picture has features.
    """

    def __init__(
        self, vision: nn.Module, vision_hidden: int, language: GPTModel, image_token: int
    ) -> None:
        super().__init__()
        hidden = language.config.hidden_size
        self.vision = vision
        self.projector = nn.Sequential(
            nn.Linear(vision_hidden, hidden), nn.GELU(), nn.Linear(hidden, hidden)
        )
        self.language = language
        self.image_token = image_token

    def forward(
        self, images: torch.Tensor, tokens: torch.Tensor, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Pictures ``[b, 3, side, side]`` and tokens ``[b, s]`` → logits, or given labels losses
        ``[b, s]``.
        """
        features = self.projector(self.vision(images))
        # [s, b, h]; rotary: no positions are added here.
        text = self.language.embedding(tokens, None)
        places = (tokens == self.image_token)[..., None]  # [b, s, 1]
        mixed = text.transpose(0, 1).masked_scatter(places, features.transpose(0, 1).to(text.dtype))
        mixed = mixed.transpose(0, 1).contiguous()
        if self.language.config.sequence_parallel:
            mixed = tensor_parallel.scatter_to_sequence_parallel_region(mixed)
        return self.language(None, None, None, decoder_input=mixed, labels=labels)
