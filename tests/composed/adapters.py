"""Steps of scenes: what is done to a pipeline or a model, the same for a resident and an offloaded one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import models


def load(name: str, seed: int, **options: Any) -> Callable[[Any], None]:
    def step(pipe: Any) -> None:
        pipe.load_lora_weights(models.lora(pipe.transformer, seed, **options), adapter_name=name)

    return step


def load_unet(unet: Any) -> None:
    unet.load_lora_adapter(models.lora(unet, 1), adapter_name="a", prefix="transformer")


def add(pipe: Any) -> None:
    """An adapter that peft makes: nothing re-applies hooks for it."""
    add_to(pipe.transformer)


def add_to(model: Any, *targets: str) -> None:
    from peft import LoraConfig

    with models.seeded(7):
        model.add_adapter(LoraConfig(r=4, target_modules=list(targets or ("to_q", "to_k", "to_v")), init_lora_weights=False))
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.data = parameter.data.to(torch.bfloat16)


def replace(pipe: Any) -> None:
    """A block, a module beside the blocks, and a layer inside a block are replaced by others."""
    model, other = pipe.transformer, models.flux(seed=3)
    home = model.device
    model.transformer_blocks[1] = other.transformer_blocks[1].to(home)
    model.proj_out = other.proj_out.to(home)
    model.transformer_blocks[0].attn.to_q = other.transformer_blocks[0].attn.to_q.to(home)


def assign(pipe: Any) -> None:
    home = pipe.transformer.device
    other = models.flux(seed=5).state_dict()
    pipe.transformer.load_state_dict({name: value.to(home) for name, value in other.items()}, assign=True)


def double(module: Any) -> None:
    with torch.no_grad():
        module.weight.mul_(2)


def edit(pipe: Any) -> None:
    layer = pipe.transformer.transformer_blocks[0].attn.to_q
    layer.weight.data = layer.weight.data * 2


def load_ip_adapter(unet: Any) -> None:
    """Projections for an image prompt: a new submodule of the model, and attention processors with weights."""
    with models.seeded(11):
        names = [name for name in unet.attn_processors if "attn2" in name]
        keys: dict[str, torch.Tensor] = {}
        for number, name in enumerate(names):
            width = dict(unet.named_modules())[name.removesuffix(".processor")].to_q.out_features
            for part in ("k", "v"):
                keys[f"{2 * number + 1}.to_{part}_ip.weight"] = torch.randn(width, models.WIDTH)
        projection = {"proj.weight": torch.randn(4 * models.WIDTH, 8), "proj.bias": torch.randn(4 * models.WIDTH)}
        projection |= {"norm.weight": torch.randn(models.WIDTH), "norm.bias": torch.randn(models.WIDTH)}
    # In float32, as in most files: the loader converts it.
    unet._load_ip_adapter_weights([{"image_proj": projection, "ip_adapter": keys}], low_cpu_mem_usage=False)


def unload_ip_adapter(unet: Any) -> None:
    unet.encoder_hid_proj = None
    unet.config.encoder_hid_dim_type = None
    unet.set_default_attn_processor()


def extend_vocabulary(encoder: Any) -> None:
    """What `load_textual_inversion` does to a text encoder: a larger embedding, with a vector for the new token."""
    size = encoder.config.vocab_size
    # Before: transformers draws new rows with the generator of the device on which the embedding is.
    with models.seeded(13):
        vectors = torch.randn(3, encoder.config.hidden_size)
    encoder.resize_token_embeddings(size + 1, mean_resizing=False)
    weight = encoder.get_input_embeddings().weight
    weight.data[size - 2 :] = vectors.to(weight.device, weight.dtype)
