"""Hugging Face decoder-only models behind the packed interface: no padding, rows end to end."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from verl.models.hf.attention import FLASH_ATTENTION


class PackedBackbone(nn.Module):
    """A decoder that reads packed rows: embedding, layers and last norm."""

    def __init__(self, hf_model: PreTrainedModel) -> None:
        super().__init__()
        self.hf_model = hf_model

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, in order: the units of sharding."""
        layers = self.hf_model.base_model.layers
        assert isinstance(layers, nn.ModuleList)
        return layers

    @property
    def hidden_size(self) -> int:
        embedding = self.hf_model.get_input_embeddings()
        assert isinstance(embedding, nn.Embedding)
        return embedding.embedding_dim

    def tie(self) -> None:
        """Restores shared parameters after ``to_empty``, which separates them: a backbone has none."""

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen_in_batch: int,
    ) -> torch.Tensor:
        """Hidden states after the last norm, (total_nnz, hidden).

        Args:
            input_ids: (total_nnz,) int64, the rows one after another.
            position_ids: (total_nnz,) int64, counting from 0 in every row.
            cu_seqlens: (batch + 1,) int32, where rows begin, and total_nnz.
            max_seqlen_in_batch: tokens of the longest row.
        """
        if self.hf_model.config._attn_implementation == FLASH_ATTENTION:
            attention = {
                "cu_seq_lens_q": cu_seqlens,
                "cu_seq_lens_k": cu_seqlens,
                "max_length_q": max_seqlen_in_batch,
                "max_length_k": max_seqlen_in_batch,
            }
        else:
            attention = {"sequence_lengths": cu_seqlens.diff().tolist()}
        output = self.hf_model.base_model(
            input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, **attention
        )
        return output.last_hidden_state[0]


class PackedCausalLM(PackedBackbone):
    """A backbone with its output projection to the vocabulary.

    Parameter names below ``hf_model`` are the Hugging Face names of the checkpoint.
    """

    @property
    def head_weight(self) -> torch.Tensor:
        """(vocabulary, hidden): the output projection, the embedding itself where they are tied."""
        return self.hf_model.get_output_embeddings().weight

    def tie(self) -> None:
        if self.hf_model.config.tie_word_embeddings:
            self.hf_model.get_output_embeddings().weight = self.hf_model.get_input_embeddings().weight

    def backbone(self) -> PackedBackbone:
        """The same modules without the output projection, which nothing of the result refers to."""
        model = self.hf_model.base_model
        assert isinstance(model, PreTrainedModel)
        return PackedBackbone(model)
