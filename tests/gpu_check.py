"""What the CPU tests cannot show, on one GPU: python tests/gpu_check.py (minutes, no download).

1. Every algorithm trains its tiny model in bf16: losses are finite, and before the first update
   ratios are within half of the clip range of 1 (G²RPO: exactly 1).
2. The GPU computes what the CPU computes: velocity and decoded images in fp32.
3. FLUX.1-dev's transformer at its real size with random weights, 720×720: seconds and peak memory
   of a network call, and of one forward/backward with LoRA.

Each check prints one line; the exit status is the number of failures."""

import functools
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SCRIPTS = ("g2rpo", "dance_grpo", "mix_grpo", "flow_grpo", "stepwise_flow_grpo")


def train_tiny(script: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        options = ["--preset", "tiny", "--iterations", "3", "--eval-count", "16", "--out", folder]
        options += ["--device", "cuda", "--dtype", "bf16"]
        command = [sys.executable, str(ROOT / f"{script}.py"), *options]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-800:]
        lines = pathlib.Path(folder, "metrics.jsonl").read_text().splitlines()
        about = json.loads(pathlib.Path(folder, "config.json").read_text())
    rows = [row for row in map(json.loads, lines) if "loss" in row]
    worst = max(row["ratio_deviation_max"] for row in rows)
    assert all(abs(row["loss"]) < float("inf") for row in rows), "a loss is not finite"
    most = 0 if script == "g2rpo" else about["config"]["clip_range"] / 2
    assert worst <= most, f"ratios start {worst} away from 1"
    return f"ratio deviation {worst:.1e}, {rows[-1]['seconds/iteration']:.2f} s an iteration"


def same_as_cpu() -> str:
    import g2rpo
    from common import generator
    from policies import load_policy

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    cfg, results = g2rpo.Config(**g2rpo.PRESETS["tiny"]), []
    for device in ("cpu", "cuda"):
        policy = load_policy(cfg, torch.device(device))
        policy.transformer.to(device)
        x = policy.noise([generator("gpu", j) for j in range(4)])
        t = torch.tensor([0.9, 0.6, 0.3, 0.1], device=device)
        with torch.no_grad():
            v = policy.velocity(x, t, policy.encode(["a red circle"] * 4))
            results.append((v.cpu(), policy.decode(x).cpu()))
    worst = [float((a - b).abs().max()) for a, b in zip(*results, strict=True)]
    assert max(worst) < 1e-3, f"GPU and CPU differ by {worst}"
    return f"velocity differs by {worst[0]:.1e}, images by {worst[1]:.1e}"


def full_size() -> str:
    from diffusers import FluxTransformer2DModel
    from peft import LoraConfig

    from policies import LORA_TARGETS

    with torch.device("meta"):
        model = FluxTransformer2DModel(guidance_embeds=True)  # every other default is FLUX.1-dev's
    model = model.to(torch.bfloat16).to_empty(device="cuda")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.01).requires_grad_(False)
    model.add_adapter(LoraConfig(r=32, lora_alpha=64, target_modules=LORA_TARGETS))
    model.enable_gradient_checkpointing()
    lines = []
    for n, trained in ((1, False), (12, False), (1, True)):
        shapes = dict(hidden_states=(45 * 45, 64), encoder_hidden_states=(512, 4096))
        shapes |= dict(pooled_projections=(768,), timestep=(), guidance=())
        inputs = {k: torch.rand(n, *shape) for k, shape in shapes.items()}
        inputs |= dict(img_ids=torch.zeros(45 * 45, 3), txt_ids=torch.zeros(512, 3))
        inputs = {k: u.to("cuda", torch.bfloat16) for k, u in inputs.items()}
        for _ in range(2):  # the second is timed
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
            start = time.perf_counter()
            with torch.set_grad_enabled(trained):
                out = model(**inputs, return_dict=False)[0]
                if trained:
                    out.float().square().mean().backward()
            torch.cuda.synchronize()
        gib, seconds = torch.cuda.max_memory_allocated() / 2**30, time.perf_counter() - start
        what = "forward/backward (LoRA)" if trained else "call"
        lines.append(f"{what} of {n}: {seconds:.3f} s, {gib:.0f} GiB")
    return "; ".join(lines)


def main() -> int:
    if not torch.cuda.is_available():
        print("no GPU is visible to torch: nothing was checked")
        return 1
    checks = {f"{s} tiny bf16": functools.partial(train_tiny, s) for s in SCRIPTS}
    checks |= {"same as the CPU": same_as_cpu, "FLUX.1-dev's size": full_size}
    failed = 0
    for name, check in checks.items():
        try:
            print(f"ok    {name}: {check()}", flush=True)
        except Exception as error:
            failed += 1
            print(f"FAIL  {name}: {type(error).__name__}: {error}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
