"""ImageReward (Xu et al., arXiv 2304.05977) on transformers' BLIP modules: its own package does not
import with transformers 5. The published checkpoint is read as it is."""

import functools
import math
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    BertTokenizer,
    BlipTextConfig,
    BlipTextModel,
    BlipVisionConfig,
    BlipVisionModel,
)

from options import UserError
from rewards import clip_pixels
from weights import model_id, short

# ImageReward's names of BLIP's vision tower (timm's) -> transformers' names
BLIP_NAMES = (
    (r"^cls_token", "embeddings.class_embedding"),
    (r"^pos_embed", "embeddings.position_embedding"),
    (r"^patch_embed\.proj", "embeddings.patch_embedding"),
    (r"^norm\.", "post_layernorm."),
    (r"^blocks\.", "encoder.layers."),
    (r"\.norm([12])\.", r".layer_norm\1."),
    (r"\.attn\.qkv\.", ".self_attn.qkv."),
    (r"\.attn\.proj\.", ".self_attn.projection."),
)


def blip_modules(state: dict[str, Tensor]) -> tuple[nn.Module, nn.Module, nn.Module]:
    """ImageReward's checkpoint -> (vision tower, text tower with cross-attention, score head).

    Widths and depths are read off the weights; both towers have heads of 64."""
    def part(prefix: str) -> dict[str, Tensor]:
        return {k[len(prefix):]: v for k, v in state.items() if k.startswith(prefix)}

    def depth(names: Iterable[str], pattern: str) -> int:
        return 1 + max(int(m[1]) for name in names if (m := re.match(pattern, name)))

    vision, text = part("blip.visual_encoder."), part("blip.text_encoder.")
    head = part("mlp.layers.")
    text.pop("embeddings.position_ids", None)  # a constant, not stored by transformers
    width, _, _, patch = vision["patch_embed.proj.weight"].shape
    vision_config = BlipVisionConfig(
        hidden_size=width, num_attention_heads=width // 64, layer_norm_eps=1e-6, patch_size=patch,
        intermediate_size=len(vision["blocks.0.mlp.fc1.bias"]),
        num_hidden_layers=depth(vision, r"blocks\.(\d+)"),
        image_size=patch * math.isqrt(vision["pos_embed"].shape[1] - 1))
    vocabulary, width = text["embeddings.word_embeddings.weight"].shape
    layer = "encoder.layer.0."
    text_config = BlipTextConfig(
        vocab_size=vocabulary, hidden_size=width, num_attention_heads=width // 64,
        intermediate_size=len(text[layer + "intermediate.dense.bias"]),
        num_hidden_layers=depth(text, r"encoder\.layer\.(\d+)"),
        encoder_hidden_size=text[layer + "crossattention.self.key.weight"].shape[1],
        max_position_embeddings=len(text["embeddings.position_embeddings.weight"]),
        is_decoder=True)  # builds the cross-attention; `forward` says that nothing is causal
    for old, new in BLIP_NAMES:
        vision = {re.sub(old, new, name): value for name, value in vision.items()}
    rows = sorted({int(name.split(".")[0]) for name in head})  # dropout between: 0, 2, 4, 6, 7
    head = {f"{rows.index(int(i))}.{kind}": v for (i, kind), v in
            ((name.split("."), v) for name, v in head.items())}
    linear = [nn.Linear(*head[f"{i}.weight"].T.shape) for i in range(len(rows))]
    modules = (BlipVisionModel(vision_config), BlipTextModel(text_config, add_pooling_layer=False),
               nn.Sequential(*linear))
    for module, weights in zip(modules, (vision, text, head), strict=True):
        module.load_state_dict(weights)
    return modules


@functools.cache
def _image_reward(weights: Path, vocabulary: Path, dtype: torch.dtype, device: torch.device):
    """(vision tower, text tower, score head in fp32, tokenizer) of ImageReward's checkpoint."""
    try:
        state = torch.load(weights, map_location="cpu", weights_only=True)
        vision, text, head = (m.eval().requires_grad_(False) for m in blip_modules(state))
        tokenizer = BertTokenizer.from_pretrained(vocabulary.parent)
    except Exception as error:
        raise UserError(f"{weights}: cannot be loaded as ImageReward ({short(error)})") from error
    tokenizer.add_special_tokens({"bos_token": "[DEC]", "additional_special_tokens": ["[ENC]"]})
    return vision.to(device, dtype), text.to(device, dtype), head.to(device), tokenizer


class ImageReward:
    """`imagereward`: images [n, 3, H, W] in [0, 1] and n prompts -> human preference [n],
    standardised: mean 0 and std 1 over its training pictures. BLIP reads the prompt (up to 35
    tokens) with the picture beside it; the first token's feature is scored, in float32.

    files: [checkpoint]; vocabulary: [the BERT tokenizer's files …]."""

    LIMIT, MEAN, STD = 35, 0.16717363, 1.03333950

    def __init__(self, files: list[Path], vocabulary: list[Path], dtype, device):
        self.vision, self.text, self.head, self.tokenizer = _image_reward(
            files[0], vocabulary[0], dtype, device)
        self.model_id, self.dtype, self.device = model_id(files[0]), dtype, device

    def __call__(self, images: Tensor, prompts: list[str]) -> Tensor:
        x = clip_pixels(images.to(self.device), self.vision.config.image_size)
        tokens = self.tokenizer(prompts, padding="max_length", truncation=True,
                                max_length=self.LIMIT, return_tensors="pt").to(self.device)
        seen = self.vision(x.to(self.dtype)).last_hidden_state
        read = self.text(tokens.input_ids, attention_mask=tokens.attention_mask,
                         encoder_hidden_states=seen, is_decoder=False).last_hidden_state
        score = self.head(read[:, 0].float()).squeeze(-1)
        return (score - self.MEAN) / self.STD

    def too_long(self, prompt: str) -> bool:
        return len(self.tokenizer(prompt, verbose=False).input_ids) > self.LIMIT
