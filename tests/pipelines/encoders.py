"""Tiny text encoders: classes of transformers that pipelines use, from configs alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .weights import made

TOKENS, VOCABULARY, WIDTH, LAYERS = 7, 64, 32, 4


@dataclass(frozen=True)
class Encoder:
    """A text encoder and what is asked of it: `use(model, ids)` returns a tensor."""

    name: str
    construct: Callable[[], Any]
    use: Callable[[Any, torch.Tensor], torch.Tensor]

    def build(self) -> Any:
        return made(self.construct)


def ids(device: torch.device) -> torch.Tensor:
    """Two prompts of `TOKENS` tokens; the last token of each ends it."""
    found = torch.randint(3, VOCABULARY - 1, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    found[:, -1] = VOCABULARY - 1
    return found.to(device)


def _t5() -> Any:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=64, num_layers=LAYERS, num_heads=4, feed_forward_proj="gated-gelu")
    )


def _umt5() -> Any:
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(UMT5Config(vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=64, num_layers=LAYERS, num_heads=4))


def clip_config() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "projection_dim": WIDTH,
        "max_position_embeddings": 77,
        "bos_token_id": 0,
        "eos_token_id": VOCABULARY - 1,
    }


def _clip() -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(CLIPTextConfig(**clip_config()))


def _clip_with_projection() -> Any:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    return CLIPTextModelWithProjection(CLIPTextConfig(**clip_config()))


def llama_config() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "pad_token_id": 0,
    }


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**llama_config()))


def _gemma() -> Any:
    from transformers import Gemma2Config, Gemma2Model

    return Gemma2Model(Gemma2Config(**llama_config()))


def _qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**llama_config()))


def _qwen_vl() -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {**llama_config(), "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "rope_theta": 10000.0}
    text.pop("head_dim")
    vision = {
        "depth": LAYERS,
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_heads": 4,
        "out_hidden_size": WIDTH,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    }
    special = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 58, "vision_end_token_id": 59}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **special))


def _hidden(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(tokens)[0]
    return found


def _last_states(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    states = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), output_hidden_states=True).hidden_states
    found: torch.Tensor = states[-1]
    return found


def _skipping(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """`clip_skip`: an inner layer's output through the final norm, which the pipeline calls by itself."""
    states = model(tokens, output_hidden_states=True).hidden_states
    inner = getattr(model, "text_model", model)
    found: torch.Tensor = inner.final_layer_norm(states[-2])
    return found


def _generated(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Words that a pipeline lets a language model write."""
    found: torch.Tensor = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=3, do_sample=False)
    return found


def _looked_up(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Embeddings that are looked up outside the model's forward."""
    embedded = model.get_input_embeddings()(tokens)
    found: torch.Tensor = model(inputs_embeds=embedded)[0]
    return found


def _with_image(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """A prompt with a picture: the vision tower runs inside the language model's wrapper."""
    tokens = tokens[:1].clone()
    tokens[0, 1:6] = torch.tensor([58, 60, 60, 60, 60], device=tokens.device)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(16, 3 * 2 * 4 * 4, generator=generator).to(tokens.device)
    grid = torch.tensor([[1, 4, 4]], device=tokens.device)
    kinds = (tokens == 60).to(torch.int64)
    output = model(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        pixel_values=pixels,
        image_grid_thw=grid,
        mm_token_type_ids=kinds,
        output_hidden_states=True,
    )
    found: torch.Tensor = output.hidden_states[-1]
    return found


ALL = (
    Encoder("t5", _t5, _hidden),
    Encoder("umt5", _umt5, _hidden),
    Encoder("clip", _clip, _hidden),
    Encoder("clip-skip", _clip, _skipping),
    Encoder("clip-projection", _clip_with_projection, _hidden),
    Encoder("llama", _llama, _last_states),
    Encoder("llama-generate", _llama, _generated),
    Encoder("llama-embeddings", _llama, _looked_up),
    Encoder("gemma2", _gemma, _last_states),
    Encoder("qwen3", _qwen3, _last_states),
    Encoder("qwen2.5-vl", _qwen_vl, _last_states),
    Encoder("qwen2.5-vl-image", _qwen_vl, _with_image),
)
NAMED = {one.name: one for one in ALL}
