"""headwater's own decoder as a model of transformers: for runs with parts that no architecture there has.

Models with `shortswa` or `value_residual`, and those of KDA, MLA and experts (but for what kimi.py
writes), have no counterpart to copy weights into. So this class runs the decoder itself: it loads,
saves, is scored and generates like any other, without a cache and without padding on the left.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from headwater.models import Decoder, ModelConfig


class DecoderConfig(PreTrainedConfig):
    """The config of an exported decoder.

    `settings` is headwater's own configuration, as a dictionary. transformers asks for the rest.
    """

    model_type = "headwater-decoder"

    def __init__(self, settings: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.settings = dict(settings or ModelConfig(vocab_size=257).to_dict())
        # transformers looks these up under its own names.
        self.vocab_size = self.settings["vocab_size"]
        self.hidden_size = self.settings["dim"]
        self.num_hidden_layers = self.settings["layers"]
        self.num_attention_heads = self.settings["heads"]
        self.max_position_embeddings = self.settings["context"]
        super().__init__(
            **{"use_cache": False, **kwargs, "tie_word_embeddings": self.settings["tie_embeddings"]}
        )

    @property
    def headwater(self) -> dict[str, Any]:
        """The residual, where converted models name theirs."""
        return {"residual": self.settings["residual"]}


class DecoderForCausalLM(PreTrainedModel, GenerationMixin):
    """A `headwater.Decoder` behind the interface of transformers' language models."""

    config_class = DecoderConfig
    base_model_prefix = "decoder"
    main_input_name = "input_ids"
    _tied_weights_keys = {"decoder.head.weight": "decoder.embedding.weight"}  # noqa: RUF012 - as transformers declares

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        # from_pretrained builds on meta, where the tables would have no values.
        with torch.device("cpu"):
            self.decoder = Decoder(ModelConfig.from_dict(config.settings))
        # Tables of positions and permutations, which no checkpoint holds
        saved = self.decoder.state_dict().keys()
        buffers = self.decoder.named_buffers()
        self._tables = {name: table.clone() for name, table in buffers if name not in saved}
        self.post_init()

    def initialize_weights(self) -> None:
        """Fill the tables again: from_pretrained empties what a checkpoint does not hold."""
        for name, table in self._tables.items():
            self.decoder.get_buffer(name).copy_(table)

    def _init_weights(self, module: nn.Module) -> None:
        """Leave the parameters as they are: the decoder has started them, or they come from a run."""

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder.head

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, *_: Any, **inputs: Any
    ) -> dict[str, Any]:
        """Read the whole text for each new token: there is no cache."""
        return {"input_ids": input_ids, "attention_mask": inputs.get("attention_mask")}

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **_: Any,  # positions and caches that `generate` offers: the decoder counts from its first token
    ) -> CausalLMOutputWithPast:
        """Map tokens (B, T) to logits (B, T, vocab), with labels also to the loss.

        Padding may stand on the right.
        """
        if attention_mask is not None and bool((attention_mask[:, :1] == 0).any()):
            raise ValueError(
                "headwater's decoder takes no padding on the left: generate from one prompt at a time, "
                "or from prompts of equal length (headwater eval: --batch-size 1)"
            )
        logits = self.decoder(input_ids)
        # As transformers counts it: each token is predicted from those before.
        loss = None
        if labels is not None:
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def export_decoder(
    config: ModelConfig, weights: dict[str, Tensor], end_of_text: int | None
) -> PreTrainedModel:
    """The decoder of this config and these weights, as a model of transformers."""
    hf_config = DecoderConfig(
        settings=config.to_dict(), bos_token_id=end_of_text, eos_token_id=end_of_text
    )
    # The weights come from the run; drawing them leaves no trace.
    with torch.random.fork_rng(devices=[]):
        model = DecoderForCausalLM(hf_config)
    model.decoder.load_weights(weights)
    return model.eval()


def register_decoder() -> None:
    """Make the type known to the Auto classes; a second call changes nothing."""
    AutoConfig.register(DecoderConfig.model_type, DecoderConfig, exist_ok=True)
    AutoModelForCausalLM.register(DecoderConfig, DecoderForCausalLM, exist_ok=True)
