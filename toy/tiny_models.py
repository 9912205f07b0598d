"""Architectures of the tiny models: small configurations of stock diffusers / open_clip classes.

Nothing here is trained; `build.py` does that. Vocabularies are the words of the shapes world, plus
single bytes or letters, so that any prompt can be read; they need no training.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import open_clip
import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from safetensors.torch import save_file
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from toy import shapes

WIDTH = 64  # of the text encoders


def words() -> list[str]:
    """Every word of the captions, sorted."""
    captions = [p for kind in shapes.KINDS for p in shapes.phrases(kind)] + list(shapes.WORDINGS)
    return sorted({word for caption in captions for word in caption.split()})


def clip_tokenizer() -> CLIPTokenizer:
    """Byte-level BPE whose merges spell out the words, one after the other."""
    merges: list[tuple[str, str]] = []
    for word in words():
        pieces = [*word[:-1], word[-1] + "</w>"]
        for left, right in merges:  # earlier merges apply first
            i = 0
            while i < len(pieces) - 1:
                if (pieces[i], pieces[i + 1]) == (left, right):
                    pieces[i : i + 2] = [left + right]
                i += 1
        while len(pieces) > 1:
            merges.append((pieces[0], pieces[1]))
            pieces[:2] = [pieces[0] + pieces[1]]
    letters = list(open_clip.tokenizer.bytes_to_unicode().values())
    vocabulary = [*letters, *(c + "</w>" for c in letters), *dict.fromkeys(map("".join, merges))]
    vocabulary += ["<|startoftext|>", "<|endoftext|>"]  # the end token must have the highest id
    return CLIPTokenizer(
        vocab={token: i for i, token in enumerate(vocabulary)},
        merges=merges,
        model_max_length=shapes.MAX_TOKENS + 1,  # CLIP also has a start token
    )


def t5_tokenizer() -> T5Tokenizer:
    """Unigram: a known word is one piece; anything else falls back to printable letters."""
    letters = [chr(i) for i in range(33, 127)]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -4.0)]
    vocabulary += [("\u2581" + word, -1.0) for word in words()]
    vocabulary += [(letter, -8.0) for letter in letters]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=shapes.MAX_TOKENS)


def _clip_config(tokenizer: CLIPTokenizer) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        projection_dim=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def new_vae() -> AutoencoderKL:
    """32 x 32 x 3 pixels <-> 8 x 8 x 16 latents, 0.4 M parameters."""
    return AutoencoderKL(
        block_out_channels=(16, 32, 48),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=8,
        sample_size=shapes.SIZE,
        shift_factor=0.0,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def _scheduler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=False)


def new_flux(vae: AutoencoderKL) -> FluxPipeline:
    """2 double and 2 single blocks of width 128 on 16 picture tokens: 1.9 M parameters."""
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    t5_config = T5Config(
        vocab_size=len(t5),
        d_model=WIDTH,
        d_kv=32,
        d_ff=4 * WIDTH,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        relative_attention_num_buckets=16,
        relative_attention_max_distance=32,
        dropout_rate=0.0,
    )
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * vae.config.latent_channels,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )
    return FluxPipeline(
        scheduler=_scheduler(),
        vae=vae,
        text_encoder=CLIPTextModel(_clip_config(clip)),
        tokenizer=clip,
        text_encoder_2=T5EncoderModel(t5_config),
        tokenizer_2=t5,
        transformer=transformer,
    )


def new_sd3(vae: AutoencoderKL) -> StableDiffusion3Pipeline:
    """3 joint blocks of width 128, two CLIP text encoders and no T5: 1.6 M parameters.

    The pipeline puts zeros in place of T5's tokens; call it with max_sequence_length=1, as in
    training, or there are 256 of them.
    """
    clip = clip_tokenizer()
    transformer = SD3Transformer2DModel(
        sample_size=shapes.SIZE // 4,
        patch_size=2,
        in_channels=vae.config.latent_channels,
        out_channels=vae.config.latent_channels,
        num_layers=3,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=2 * WIDTH,  # the two CLIPs side by side
        caption_projection_dim=128,
        pooled_projection_dim=2 * WIDTH,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=_scheduler(),
        vae=vae,
        text_encoder=CLIPTextModelWithProjection(_clip_config(clip)),
        tokenizer=clip,
        text_encoder_2=CLIPTextModelWithProjection(_clip_config(clip)),
        tokenizer_2=clip,
        text_encoder_3=None,
        tokenizer_3=None,
    )


def clip_config() -> dict:
    """open_clip's model_cfg: ViT of 4 layers on 16 patches, text of 2 layers, 0.6 M parameters."""
    tokenizer = clip_tokenizer()
    return {
        "embed_dim": WIDTH,
        "vision_cfg": {"image_size": shapes.SIZE, "patch_size": 8, "layers": 4, "width": 96,
                       "head_width": 24},
        # any name here makes open_clip read the tokenizer from the model's own folder
        "text_cfg": {"context_length": tokenizer.model_max_length, "vocab_size": len(tokenizer),
                     "width": WIDTH, "heads": 2, "layers": 2, "hf_tokenizer_name": "tiny-clip"},
    }


def new_clip() -> open_clip.CLIP:
    return open_clip.CLIP(**clip_config())


def save_half(model, folder: Path) -> None:
    """A diffusers or transformers model as fp16, which `half()` in place would spoil."""
    copy.deepcopy(model).half().save_pretrained(folder)


def save_pipeline(pipe: FluxPipeline | StableDiffusion3Pipeline, folder: Path) -> None:
    parts = {name: copy.deepcopy(part).half() if isinstance(part, nn.Module) else part
             for name, part in pipe.components.items()}
    type(pipe)(**parts).save_pretrained(folder)


def save_clip(model: open_clip.CLIP, folder: Path) -> None:
    """A folder that open_clip reads as "local-dir:<folder>", with its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    half = {name: value.half().contiguous() for name, value in model.state_dict().items()}
    save_file(half, folder / "open_clip_model.safetensors")
    config = {
        "model_cfg": clip_config(),
        "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bilinear",
                           "resize_mode": "squash"},
    }
    (folder / "open_clip_config.json").write_text(json.dumps(config, indent=2) + "\n")
    clip_tokenizer().save_pretrained(folder)


def load_vae(out: Path) -> AutoencoderKL:
    vae = AutoencoderKL.from_pretrained(out / "tiny-flux" / "vae", torch_dtype=torch.float32)
    vae.register_to_config(_name_or_path="tiny-flux/vae")  # else `out`, of the machine that builds
    return vae.requires_grad_(False)


def load_clip(folder: Path) -> open_clip.CLIP:
    return open_clip.create_model(f"local-dir:{folder}", precision="fp32")


def new_pipeline(family: str, vae: AutoencoderKL) -> FluxPipeline | StableDiffusion3Pipeline:
    return {"flux": new_flux, "sd3": new_sd3}[family](vae)


def load_pipeline(folder: Path) -> FluxPipeline | StableDiffusion3Pipeline:
    index = json.loads((folder / "model_index.json").read_text())
    if index["_class_name"] == "FluxPipeline":
        return FluxPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    return StableDiffusion3Pipeline.from_pretrained(
        folder, text_encoder_3=None, tokenizer_3=None, torch_dtype=torch.float32)
