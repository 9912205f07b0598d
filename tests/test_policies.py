"""The policies against diffusers' own pipelines: same images, same weights after export, sharded or
not."""

import shutil

import numpy as np
import pytest
import torch
from diffusers import (
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from helpers import gradients, relative
from safetensors.torch import load_file, save_file

from common import generator, ode_sample, sigma_schedule
from g2rpo import PRESETS, Config
from options import UserError
from policies import FluxPolicy, SD3Policy, add_lora, distribute, load_policy

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")
CPU = torch.device("cpu")
PROMPTS = ["a red circle", "two blue squares and a green triangle"]
FAMILIES = {  # policy, pipeline, transformer, text tokens, guidance
    "flux": (FluxPolicy, FluxPipeline, FluxTransformer2DModel, 16, 3.5),
    "sd3": (SD3Policy, StableDiffusion3Pipeline, SD3Transformer2DModel, 1, 4.5),
}


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param, request.getfixturevalue(f"tiny_{request.param}")


def config(family, **changes) -> Config:
    name, folder = family
    tokens, guidance = FAMILIES[name][3:]
    own = dict(model=str(folder), max_sequence_length=tokens, guidance=guidance)
    return Config(**(PRESETS["tiny"] | own | changes))


def policy_of(family, dtype=torch.float32, **changes):
    """A policy that is not sharded, all of it in `dtype`."""
    policy = load_policy(config(family, **changes), CPU, dtype)
    assert type(policy) is FAMILIES[family[0]][0]
    policy.transformer.to(dtype)
    return policy


def pipeline_of(family, **parts):
    kind = FAMILIES[family[0]][1]
    if family[0] == "sd3":
        parts |= dict(text_encoder_3=None, tokenizer_3=None)
    pipe = kind.from_pretrained(family[1], dtype=torch.float32, **parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def start(policy, n: int = 2) -> torch.Tensor:
    return policy.noise([generator("test", j) for j in range(n)])


def sampled(policy, steps: int, schedule: str = "shifted") -> torch.Tensor:
    """Images of the policy's own ODE."""
    with torch.no_grad():
        sigmas, cond = sigma_schedule(steps, 3.0, schedule), policy.encode(PROMPTS)
        return policy.decode(ode_sample(policy, start(policy), cond, sigmas, batch=1))


def drawn(pipe, policy, steps: int, **how) -> torch.Tensor:
    """Images of the pipeline's own loop, from the same latents."""
    cfg = policy.cfg
    return pipe(
        prompt=PROMPTS, latents=start(policy), num_inference_steps=steps, height=cfg.height,
        width=cfg.width, guidance_scale=cfg.guidance, output_type="pt",
        max_sequence_length=cfg.max_sequence_length, **how,
    ).images  # fmt: skip


def disturb(module) -> None:
    """Move all weights, as training does."""
    torch.manual_seed(1)
    with torch.no_grad():
        for p in module.parameters():
            p += 0.1 * p.std().nan_to_num(1.0) * torch.randn_like(p)


def test_ode_draws_the_images_of_the_pipeline(family):
    steps = 6
    for guidance in (FAMILIES[family[0]][4], 1.0):
        policy, pipe = policy_of(family, guidance=guidance), pipeline_of(family)
        table = dict(sigmas=np.linspace(1, 1 / steps, steps))
        images, expected = sampled(policy, steps), drawn(pipe, policy, steps, **table)
        assert images.shape == (2, 3, 32, 32) and images.std() > 0.01
        assert images.min() >= 0 and images.max() <= 1
        torch.testing.assert_close(images, expected, rtol=0, atol=1e-5)
    if family[0] == "sd3":  # its own table, shifted twice
        twice = drawn(pipe, policy, steps)
        torch.testing.assert_close(
            sampled(policy, steps, "diffusers"), twice, rtol=0, atol=1e-5
        )
        assert (twice - images).abs().max() > 1e-3


def test_network_gets_the_exact_level(family):
    policy = policy_of(family)
    seen, scale = [], 1 if family[0] == "flux" else 1000
    policy.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["timestep"]), with_kwargs=True
    )
    t = torch.tensor([0.97826088, 0.123456789])
    with torch.no_grad():
        v = policy.velocity(start(policy), t, policy.encode(PROMPTS))
    assert v.dtype == torch.float32 and v.shape == (2, *policy.latent_shape)
    assert all(s.dtype == torch.float32 and torch.equal(s, scale * t) for s in seen)
    assert len(seen) == (1 if family[0] == "flux" else 2)  # guidance costs a second call


def test_guidance_without_gradient_of_the_unconditional_half(tiny_sd3):
    policy = policy_of(("sd3", tiny_sd3), torch.float64)
    x, t, cond = start(policy).double(), torch.tensor([0.7, 0.4]), policy.encode(PROMPTS)
    conditional = {k: cond[k] for k in ("text", "pooled")}
    negative = {k: cond[f"negative_{k}"] for k in ("text", "pooled")}
    v = policy.velocity(x, t, cond)
    v_c, v_u = (policy.velocity(x, t, half) for half in (conditional, negative))
    torch.testing.assert_close(v, v_u + 4.5 * (v_c - v_u))
    v.square().sum().backward()
    found = gradients(policy)
    policy.transformer.zero_grad()
    (2 * v.detach() * 4.5 * v_c).sum().backward()
    assert relative(found, gradients(policy)) < 1e-9
    other = policy_of(("sd3", tiny_sd3), negative_prompt="a white square").encode(PROMPTS)
    assert not torch.allclose(other["negative_text"].double(), cond["negative_text"])
    assert set(policy_of(("sd3", tiny_sd3), guidance=1.0).encode(PROMPTS)) == {"text", "pooled"}


def test_noise_is_that_of_its_generator(family):
    policy = policy_of(family)
    alone = torch.cat([policy.noise([generator("test", j)]) for j in range(3)])
    assert torch.equal(start(policy, 3), alone) and alone.dtype == torch.float32
    many = start(policy, 64)
    assert abs(many.mean()) < 0.01 and abs(many.std() - 1) < 0.01


def test_prompts_of_any_kind_are_encoded(family):
    policy = policy_of(family)
    prompts = [*PROMPTS, "", "ein Kätzchen in 東京 🦊", "a very long prompt " * 100]
    cond = policy.encode(prompts)
    for key, value in cond.items():
        assert len(value) == len(prompts) and value.isfinite().all(), key
        for j, prompt in enumerate(prompts):
            alone = policy.encode([prompt])[key][0]
            torch.testing.assert_close(value[j], alone, rtol=1e-4, atol=1e-5)
    kept = policy.encode(["a very long prompt " * 101])["pooled"][0]
    torch.testing.assert_close(cond["pooled"][-1], kept)  # cut at the limit, its end token kept
    assert not torch.allclose(cond["pooled"][0], cond["pooled"][1])


def test_export_is_what_plain_diffusers_loads(family, tmp_path):
    policy = policy_of(family)
    disturb(policy.transformer)
    policy.export(policy.transformer.state_dict(), tmp_path)
    transformer = FAMILIES[family[0]][2].from_pretrained(tmp_path / "transformer")
    pipe = pipeline_of(family, transformer=transformer)
    images = drawn(pipe, policy, 4, sigmas=np.linspace(1, 1 / 4, 4))
    torch.testing.assert_close(images, sampled(policy, 4), rtol=0, atol=1e-5)
    assert (images - sampled(policy_of(family), 4)).abs().max() > 1e-3


def test_lora_export_is_what_plain_diffusers_loads(family, tmp_path):
    """At an α that is not the rank, which loaders get wrong without its metadata."""
    policy = policy_of(family)
    before = sampled(policy, 4)
    add_lora(policy, 4, 10.0, torch.float32)
    torch.testing.assert_close(sampled(policy, 4), before, rtol=0, atol=1e-6)  # B starts at zero
    trained = {k: p for k, p in policy.transformer.named_parameters() if p.requires_grad}
    assert trained and all("lora" in k and p.dtype == torch.float32 for k, p in trained.items())
    with torch.no_grad():
        for p in trained.values():
            p += 0.1 * torch.randn(p.shape, generator=generator("lora", len(p)))
    policy.export(trained, tmp_path)
    pipe = pipeline_of(family)
    pipe.load_lora_weights(tmp_path)
    images = drawn(pipe, policy, 4, sigmas=np.linspace(1, 1 / 4, 4))
    torch.testing.assert_close(images, sampled(policy, 4), rtol=0, atol=1e-5)
    assert (images - before).abs().max() > 1e-2


def loss_of(policy) -> torch.Tensor:
    """Some loss of the velocity; its gradients are left in the parameters."""
    policy.transformer.zero_grad()
    cond, t = policy.encode(PROMPTS), torch.tensor([0.9, 0.3])
    v = policy.velocity(start(policy), t, cond)
    v.square().mean().backward()
    return v.detach()


def full_gradients(policy) -> torch.Tensor:
    whole = [p.grad.full_tensor() for p in policy.transformer.parameters()]
    return torch.cat([g.flatten().double() for g in whole])


def test_sharded_and_checkpointed_is_the_same_network(family, process_group):
    plain, sharded = policy_of(family), load_policy(config(family), CPU)
    expected, slope = loss_of(plain), gradients(plain)
    distribute(sharded, sharded.cfg, CPU, torch.float32, reference=False)
    assert len(sharded.blocks()) > 2
    assert all("DTensor" in type(p.data).__name__ for p in sharded.transformer.parameters())
    with torch.no_grad():
        sharded.velocity(start(sharded), torch.tensor([0.5, 0.5]), sharded.encode(PROMPTS))
    torch.testing.assert_close(loss_of(sharded), expected, rtol=1e-6, atol=1e-6)
    assert relative(full_gradients(sharded), slope) < 1e-6
    sharded.transformer.enable_gradient_checkpointing()
    torch.testing.assert_close(loss_of(sharded), expected, rtol=1e-6, atol=1e-6)
    assert relative(full_gradients(sharded), slope) < 1e-6


def test_bf16_computes_on_fp32_master_weights(family, process_group):
    policy = load_policy(config(family), CPU, torch.bfloat16)
    distribute(policy, policy.cfg, CPU, torch.bfloat16, reference=False)
    seen = []
    policy.blocks()[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(next(module.parameters()).dtype), with_kwargs=True
    )
    v = loss_of(policy)
    assert v.dtype == torch.float32 and seen == [torch.bfloat16] * len(seen) and seen
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in policy.transformer.parameters())
    assert relative(v, loss_of(policy_of(family))) < 0.05


def test_reference_is_the_initial_policy(family, process_group):
    initial = policy_of(family)
    x, t, cond = start(initial), torch.tensor([0.9, 0.3]), initial.encode(PROMPTS)
    with torch.no_grad():
        expected = initial.velocity(x, t, cond)
    for changes in (dict(), dict(lora_rank=4, lora_alpha=10.0)):
        policy = load_policy(config(family, **changes), CPU)
        distribute(policy, policy.cfg, CPU, torch.float32, reference=not changes)
        disturb_trained = [p for p in policy.transformer.parameters() if p.requires_grad]
        with torch.no_grad():
            for p in disturb_trained:
                p.add_(0.05)
            moved = policy.velocity(x, t, cond)
        reference = policy.reference_velocity(x, t, cond)
        torch.testing.assert_close(reference, expected, rtol=1e-5, atol=1e-5)
        assert not reference.requires_grad and (moved - expected).abs().max() > 1e-2
        with torch.no_grad():  # and afterwards it is the trained network again
            torch.testing.assert_close(policy.velocity(x, t, cond), moved)


def test_what_a_model_cannot_do_is_refused(family):
    for size in (dict(height=36), dict(width=4)):
        with pytest.raises(UserError, match="both must be multiples of 8"):
            load_policy(config(family, **size), CPU)
    if family[0] == "flux":
        with pytest.raises(UserError, match="--no-t5"):
            load_policy(config(family, t5=False), CPU)
    with pytest.raises(UserError, match="--lora-rank"):
        add_lora(load_policy(config(family, model="toy"), CPU), 4, 8.0, torch.float32)


def test_bf16_leaves_levels_and_rotary_angles_exact(family, process_group):
    policy = load_policy(config(family), CPU, torch.bfloat16)
    distribute(policy, policy.cfg, CPU, torch.bfloat16, reference=False)
    levels, angles = [], []
    time = policy.transformer.time_text_embed.time_proj
    time.register_forward_pre_hook(lambda module, args: levels.append(args[0]))
    policy.blocks()[0].register_forward_pre_hook(
        lambda module, args, kwargs: angles.append(kwargs.get("image_rotary_emb")), with_kwargs=True
    )
    with torch.no_grad():
        v = policy.velocity(start(policy), torch.full((2,), 45 / 46), policy.encode(PROMPTS))
        plain = policy_of(family, torch.bfloat16)
        alone = plain.velocity(start(plain), torch.full((2,), 45 / 46), plain.encode(PROMPTS))
    assert relative(v, alone) < 1e-6  # what diffusers computes of the bf16 weights
    if family[0] == "sd3":
        exact = 1000 * torch.full((2,), 45 / 46)
        assert all(u.dtype == torch.float32 and torch.equal(u, exact) for u in levels) and levels
    else:
        assert all(u.dtype == torch.float32 for pair in angles for u in pair) and angles


def test_adapters_are_fp32_on_a_bf16_base(family, process_group):
    policy = load_policy(config(family, lora_rank=4, lora_alpha=8.0), CPU, torch.bfloat16)
    distribute(policy, policy.cfg, CPU, torch.bfloat16, reference=False)
    dtypes = {(p.requires_grad, p.dtype) for p in policy.transformer.parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
    with torch.no_grad():
        v = policy.velocity(start(policy), torch.full((2,), 0.5), policy.encode(PROMPTS))
    assert v.isfinite().all()


def test_incomplete_models_are_refused(family, tmp_path):
    folder = shutil.copytree(family[1], tmp_path / "model")
    file = folder / "transformer/diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    del weights["proj_out.bias"]
    save_file(weights, file)
    with pytest.raises(UserError, match="lacks weights"):
        load_policy(config((family[0], folder)), CPU)
    shutil.rmtree(folder / "tokenizer_2")
    with pytest.raises(UserError, match="tokenizer_2 is missing"):
        load_policy(config((family[0], folder)), CPU)
