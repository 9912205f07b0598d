"""The run's parts one by one: levels, integration, randomness, prompts, refusals, averages."""

import itertools
import json
import math
from dataclasses import asdict, fields
from importlib import util
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from helpers import PointReward, SmallPolicy, golden

import common
from common import (
    Meter,
    Run,
    batched_velocity,
    check_same_run,
    decode_and_score,
    generator,
    ode_sample,
    ode_step,
    preflight,
    sigma_schedule,
)
from g2rpo import PRESETS, Config
from options import UserError
from prompts import load_prompts
from rewards import Rewards


def toy(**changes) -> Config:
    return Config(**(PRESETS["toy"] | dict(preset="toy") | changes))


def test_levels():
    for T, shift in itertools.product((1, 2, 10, 16, 50), (0.5, 1.0, 3.0)):
        sigmas = sigma_schedule(T, shift)
        assert sigmas.dtype == torch.float64 and sigmas.shape == (T + 1,)
        assert sigmas[0] == 1 and sigmas[-1] == 0 and (sigmas.diff() < 0).all()
        u = [1 - i / T for i in range(T + 1)]
        expected = [shift * x / (1 + (shift - 1) * x) for x in u]
        assert sigmas.tolist() == pytest.approx(expected, abs=1e-14)
    for step in golden()["steps"]:
        table = sigma_schedule(step["T"], step["shift"]).tolist()
        i = step["index"]
        assert table[i : i + 2] == pytest.approx([step["sigma"], step["sigma_next"]], abs=1e-7)
    for steps, shift in ((0, 3.0), (-1, 3.0), (4, 0.0), (4, -1.0), (4, math.nan)):
        with pytest.raises(UserError, match="a schedule needs"):
            sigma_schedule(steps, shift)


def test_levels_of_diffusers():
    """Its scheduler shifts given levels once, as ours are, and its own table twice."""
    T, scheduler = 10, FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=False)
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / T, T))
    torch.testing.assert_close(
        scheduler.sigmas.double(), sigma_schedule(T, 3.0), atol=1e-6, rtol=0
    )
    twice = sigma_schedule(T, 3.0, "diffusers").tolist()
    assert [twice[i] for i in (0, 1, 2, 8, 9, 10)] == pytest.approx(
        [1, 0.960, 0.913, 0.278, 0.0089, 0], abs=6e-4
    )
    assert len(twice) == T + 1 and all(a > b for a, b in itertools.pairwise(twice))


def test_ode_step_and_sample():
    x, v = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    assert torch.equal(ode_step(x, v, 0.7, 0.5), x + (0.5 - 0.7) * v)
    t, s = torch.tensor([0.9, 0.5, 0.1]), torch.tensor([0.8, 0.1, 0.0])
    rows = [ode_step(x[j : j + 1], v[j : j + 1], t[j], s[j]) for j in range(3)]
    torch.testing.assert_close(ode_step(x, v, t, s), torch.cat(rows))
    linear = SimpleNamespace(velocity=lambda x, t, cond: x * cond["rate"][:, None])
    x, cond = torch.ones(5, 2, dtype=torch.float64), {"rate": torch.arange(5.0).double()}
    sigmas = sigma_schedule(7, 3.0)
    factors = [math.prod(1 + float(s - t) * r for t, s in itertools.pairwise(sigmas))
               for r in range(5)]  # fmt: skip
    found = ode_sample(linear, x, cond, sigmas, batch=2)
    torch.testing.assert_close(found[:, 0], torch.tensor(factors).double(), rtol=1e-7, atol=0)


def test_batches_change_nothing():
    policy, reward = SmallPolicy((2, 3)), PointReward()
    prompts = [f"prompt {j}" for j in range(7)]
    cond, x = policy.encode(prompts), torch.randn(7, 2, 3, dtype=torch.float64)
    t = torch.linspace(0.1, 0.9, 7)
    whole, scores = policy.velocity(x, t, cond), reward(x, prompts)
    who = torch.tensor([6, 0, 0, 3, 2, 6, 1])
    for batch in (1, 2, 3, 7, 100):
        torch.testing.assert_close(batched_velocity(policy, x, t, cond, batch), whole)
        some = batched_velocity(policy, x[who], t[who], cond, batch, who)
        torch.testing.assert_close(some, whole[who])
        torch.testing.assert_close(decode_and_score(policy, reward, x, prompts, batch), scores)
    levels = []
    recording = SimpleNamespace(velocity=lambda x, t, cond: levels.append(t) or x)
    batched_velocity(recording, x, 0.123456789, cond, 4)
    assert all(t.dtype == torch.float32 and t[0] == torch.tensor(0.123456789) for t in levels)


def test_noise_is_a_function_of_its_key():
    before = torch.get_rng_state()
    keys = [(0, 1, 2), (0, 12), (0, "12"), (1, 0, 2), (0, 1, 2, -1), ("evaluation", 3), (3,)]
    draws = [torch.randn(4, generator=generator(*key)) for key in keys]
    torch.manual_seed(7)
    for key, draw in zip(keys, draws, strict=True):
        assert torch.equal(torch.randn(4, generator=generator(*key)), draw)
    for a, b in itertools.combinations(draws, 2):
        assert not torch.equal(a, b)
    torch.set_rng_state(before)
    generator(1)
    assert torch.equal(torch.get_rng_state(), before)
    seeds = {generator(0, n, p, g, i).initial_seed() for n, p, g, i in
             itertools.product(range(5), range(8), range(6), range(-1, 10))}  # fmt: skip
    assert len(seeds) == 5 * 8 * 6 * 11
    normal = torch.cat([torch.randn(64, generator=generator(0, 0, 0, j, 0)) for j in range(2000)])
    assert abs(normal.mean()) < 0.02 and abs(normal.std() - 1) < 0.02
    first = torch.stack([torch.randn(2, generator=generator(0, 0, 0, j, 0)) for j in range(4000)])
    assert abs(float((first[1:, 0] * first[:-1, 0]).mean())) < 0.05  # neighbours do not correlate


class Slots(Run):
    """The shares of a process of a run, without the run."""

    def __init__(self, cfg, texts, rank=0, world=1):
        self.cfg, self.train_prompts, self.rank, self.world = cfg, texts, rank, world


def test_prompt_order():
    """A pure function of (seed, step); every pass over the file has its own; ranks share it out."""
    texts, cfg = [f"prompt {j}" for j in range(10)], toy(prompts_per_step=4, seed=3)
    stream = [p for n in range(15) for p in Slots(cfg, texts).prompts(n)]
    passes = [tuple(stream[j : j + 10]) for j in range(0, 60, 10)]
    assert all(sorted(one) == texts for one in passes) and len(set(passes)) == 6
    again = Slots(cfg, texts)
    assert [again.prompts(n) for n in (9, 2)] == [stream[36:40], stream[8:12]]
    assert Slots(toy(prompts_per_step=4, seed=4), texts).prompts(0) != stream[:4]
    for n, world in itertools.product(range(5), (2, 4)):
        shares = [Slots(cfg, texts, rank, world) for rank in range(world)]
        assert sum((share.prompts(n) for share in shares), []) == stream[4 * n : 4 * n + 4]
    few = Slots(toy(prompts_per_step=16), ["a", "b", "c"])  # more prompts a step than there are
    counts = [few.prompts(0).count(text) for text in "abc"]
    assert sum(counts) == 16 and max(counts) - min(counts) <= 1


def test_noise_does_not_depend_on_the_processes():
    cfg = toy(prompts_per_step=4)
    one = Slots(cfg, []).noise(7)
    for rank in range(2):
        share = Slots(cfg, [], rank, 2).noise(7)
        for p, g, i in itertools.product(range(2), range(3), (-1, 0, 4)):
            assert share(p, g, i).initial_seed() == one(2 * rank + p, g, i).initial_seed()
    assert one(0, 0, 0).initial_seed() != Slots(cfg, []).noise(8)(0, 0, 0).initial_seed()


PROMPT_FILES = [
    ("a.txt", "a cat\n\n  two dogs \r\na cat\n", ["a cat", "two dogs", "a cat"]),
    ("a.txt", "\ufeffein Kätzchen\n東京 🦊", ["ein Kätzchen", "東京 🦊"]),
    ("a.txt", "one line\u2028of text", ["one line\u2028of text"]),
    ("a.jsonl", '{"prompt": "a cat", "n": 3}\n"a dog"\n\n', ["a cat", "a dog"]),
    ("a.json", '["a cat", {"prompt": "a dog"}, "a cat"]', ["a cat", "a dog"]),
]
BAD_PROMPT_FILES = [
    ("a.txt", "", "is empty"),
    ("a.txt", "\n  \n", "is empty"),
    ("a.json", "[]", "is empty"),
    ("a.csv", "a cat", ".txt, .jsonl or .json"),
    ("a.txt", b"\xff\xfe\x00a", "cannot be read"),
    ("a.json", "[oops", "cannot be read"),
    ("a.json", '{"prompt": "a cat"}', "must be a list"),
    ("a.json", '"a cat"', "must be a list"),
    ("a.json", "3", "must be a list"),
    ("a.json", '["a", 7]', "entry 2"),
    ("a.json", '[{"text": "a cat"}]', "entry 1"),
    ("a.jsonl", '"a"\n{"prompt": 3}', "line 2"),
    ("a.jsonl", '"a"\n\n{"prompt": ', "line 3"),
]


def test_prompt_files(tmp_path):
    for name, text, expected in PROMPT_FILES:
        (tmp_path / name).write_bytes(text.encode())
        assert load_prompts(str(tmp_path / name)) == expected, text
    for name, text, message in BAD_PROMPT_FILES:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(UserError, match=message) as error:
            load_prompts(str(tmp_path / name))
        assert str(tmp_path / name) in str(error.value) and "\n" not in str(error.value)
    (tmp_path / "folder.txt").mkdir()
    for source in (str(tmp_path / "folder.txt"), str(tmp_path / "missing.txt")):
        with pytest.raises(UserError, match="cannot be read"):
            load_prompts(source)
    with pytest.raises(UserError, match="hf download ymhao/HPDv2 train.json"):
        load_prompts("hf://datasets/ymhao/HPDv2/train.json")
    with pytest.raises(UserError, match="hf://datasets/OWNER/NAME/FILE"):
        load_prompts("hf://datasets/HPDv2")


def test_meter_counts_samples_and_seconds():
    meter = Meter()
    network = meter.count("network", lambda x: x)
    with torch.no_grad():
        network(torch.zeros(3))
    network(torch.zeros(2))
    assert meter.count("decode", lambda x: x * 2)(torch.ones(4)).sum() == 8
    record = meter.pop()
    calls = {k: v for k, v in record.items() if k.startswith("calls/")}
    assert calls == {"calls/network": 3, "calls/network_trained": 2, "calls/decode": 4}
    assert all(record[f"seconds/{k[6:]}"] >= 0 for k in calls) and meter.pop() == {}


def test_rewards_are_counted_per_iteration():
    """A prompt over the limit once in each, so that a resumed run counts like any other."""

    class Scorer:
        model_id = "m"

        def too_long(self, prompt):
            return len(prompt) > 3

        def __call__(self, images, prompts):
            return images[:, 0, 0, 0]

    rewards, images = Rewards({"a": Scorer()}), torch.rand(4, 3, 2, 2)
    for _ in range(2):
        rewards(images, ["long", "long", "longer", "no"])
        rewards(images[:1], ["long"])
        record = rewards.pop()
        assert record.pop("seconds/reward") > 0
        assert record == {"calls/reward": 5, "calls/truncated/a": 2}
    assert rewards.pop() == {"calls/reward": 0, "calls/truncated/a": 0, "seconds/reward": 0}


def saved_run(folder, cfg, algorithm="g2rpo", iteration=None):
    """The record of a run as a run leaves it."""
    folder.mkdir(parents=True)
    sigmas = sigma_schedule(cfg.sampling_steps, cfg.shift, cfg.schedule).tolist()
    record = {"algorithm": algorithm, "config": asdict(cfg), "sigmas": sigmas}
    name = "config.json" if iteration is None else "run.json"
    (folder / name).write_text(json.dumps(record | {"iteration": iteration}))
    return folder


def test_only_the_same_run_is_continued(tmp_path):
    record = saved_run(tmp_path / "step_000003", toy(), iteration=3) / "run.json"
    check_same_run(toy(), "g2rpo", record)
    free = dict(iterations=99, rollout_batch=1, train_batch=1, decode_batch=1, out="elsewhere")
    check_same_run(toy(**free, device="cpu", save_every=7, trackers=("wandb",)), "g2rpo", record)
    with pytest.raises(UserError, match="is a run of g2rpo, not of dance_grpo"):
        check_same_run(toy(), "dance_grpo", record)
    changes = dict(
        lr=1.0, seed=1, group_size=9, sampling_steps=11, shift=2.0, eta=0.1, clip_range=0.3,
        rewards=("own:reward",), reward_weights=(2.0,), prompts_per_step=32, guidance=1.0,
        granularities=(1,), weight_decay=0.5, ema_decay=0.5, steps=(1,), model="other", prompts="x",
        dtype="bf16", lora_rank=4, schedule="diffusers", eval_steps=3,
    )  # fmt: skip
    for name, value in changes.items():
        with pytest.raises(UserError, match="--" + name.replace("_", "-")):
            check_same_run(toy(**{name: value}), "g2rpo", record)
    names = {f.name for f in fields(Config)}
    assert names >= common.FREE and not common.FREE & set(changes)
    (other := tmp_path / "step_000004").mkdir()
    altered = json.loads(record.read_text())
    altered["sigmas"][3] += 1e-3
    (other / "run.json").write_text(json.dumps(altered))
    with pytest.raises(UserError, match="noise levels"):
        check_same_run(toy(), "g2rpo", other / "run.json")


def refusal(**changes) -> str:
    with pytest.raises(UserError) as error:
        preflight(toy(**changes), "g2rpo")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_cannot_run_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    there = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: name != "wandb" and there(name) or None)
    out = str(tmp_path / "out")
    for changes, text in (
        (dict(prompts=str(tmp_path / "empty.txt")), "empty.txt is empty"),
        (dict(eval_prompts=str(tmp_path / "missing.txt")), "missing.txt cannot be read"),
        (dict(model=str(tmp_path / "folder")), "model_index.json"),
        (dict(model=str(tmp_path / "nowhere")), "model_index.json"),
        (dict(model="owner/name"), "hf download owner/name"),
        (dict(rewards=("nowhere:score",)), "nowhere:score"),
        (dict(rewards=("math:nothing",)), "math:nothing"),
        (dict(eval_rewards=("clip",), clip_model=str(tmp_path / "folder")), "clip"),
        (dict(out=str(tmp_path / "file")), "cannot be made"),
        (dict(out=str(tmp_path / "file" / "below")), "cannot be made"),
        (dict(resume=str(tmp_path / "folder")), "not a checkpoint"),
        (dict(trackers=("wandb",)), "pip install wandb"),
    ):
        assert text in refusal(**(dict(out=out) | changes))
        assert not list((tmp_path / "out").glob("*"))  # nothing is left behind
    both = refusal(out=out, model=str(tmp_path / "nowhere"), prompts=str(tmp_path / "empty.txt"))
    assert "model_index.json" in both and "is empty" in both  # all that is missing, at once
    if not torch.cuda.is_available():
        assert "no GPU" in refusal(out=out, device="cuda")
    with monkeypatch.context() as patched:  # root may write everywhere
        patched.setattr(common.os, "access", lambda path, mode: False)
        assert "is not writable" in refusal(out=out)
    for prompts, world, near in ((16, 3, "15 or 18"), (2, 4, "4 can"), (17, 16, "16 or 32")):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        assert near in refusal(out=out, prompts_per_step=prompts)


def test_a_run_is_never_overwritten_by_another(tmp_path):
    one, two = saved_run(tmp_path / "one", toy()), saved_run(tmp_path / "two", toy(lr=0.5))
    mine = saved_run(one / "checkpoints/step_000003", toy(), iteration=3)
    theirs = saved_run(two / "checkpoints/step_000005", toy(lr=0.5), iteration=5)
    assert "already holds a run" in refusal(out=str(one))
    assert "--lr" in refusal(out=str(two), resume="auto")
    assert "already holds a run" in refusal(out=str(one), resume=str(theirs), lr=0.5)
    assert "already holds a run" in refusal(out=str(two), resume=str(mine))
    preflight(toy(out=str(one), resume="auto"), "g2rpo")
    preflight(toy(out=str(one), resume=str(mine)), "g2rpo")
    preflight(toy(out=str(tmp_path / "new"), resume=str(mine)), "g2rpo")
    unsaved = saved_run(tmp_path / "unsaved", toy(lr=0.5))  # killed before its first checkpoint
    assert "--lr" in refusal(out=str(unsaved), resume="auto")
    preflight(toy(out=str(unsaved), resume="auto", lr=0.5), "g2rpo")


def test_the_newest_whole_checkpoint_is_found(tmp_path):
    cfg = toy(out=str(tmp_path), resume="auto")
    assert common.find_checkpoint(cfg, "g2rpo") is None
    for step in (9, 10, 1000000):
        saved_run(tmp_path / f"checkpoints/step_{step:06d}", cfg, iteration=step)
        assert common.find_checkpoint(cfg, "g2rpo").name == f"step_{step:06d}"
    for name in (".partial_step_2000000", "step_3000000", "step_4000000.bak", "step_old"):
        (tmp_path / "checkpoints" / name).mkdir()  # half-written, or somebody's
    assert common.find_checkpoint(cfg, "g2rpo").name == "step_1000000"
    assert common.find_checkpoint(toy(out=str(tmp_path)), "g2rpo") is None


@pytest.fixture(scope="module")
def toy_run(tmp_path_factory):
    """A run of the toy in this process, before its first iteration."""
    out = tmp_path_factory.mktemp("run") / "out"
    cfg = toy(out=str(out), eval_every=0, ema_decay=0.75, ema_every=2, lr=0.1, max_grad_norm=0.5)
    return Run(cfg, "g2rpo")


def full(tensor) -> torch.Tensor:
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().clone()


def test_checkpoints_of_an_abandoned_branch_go(tmp_path):
    cfg = toy(out=str(tmp_path / "out"), eval_every=0, keep_checkpoints=0)
    run = Run(cfg, "g2rpo")
    for run.iteration in (1, 2, 3):
        run.save()
    run.lock.close()  # the process ended
    run = Run(toy(out=cfg.out, eval_every=0, resume=f"{cfg.out}/checkpoints/step_000001"), "g2rpo")
    assert run.iteration == 1
    assert [c.name for c in common.checkpoints(tmp_path / "out")] == ["step_000001"]


def toy_loss(run):
    prompts = ["north", "west", "north-east"]
    x = torch.tensor([[0.3, -1.0], [1.0, 0.2], [0.0, 2.0]])
    v = run.policy.velocity(x, torch.tensor([0.9, 0.5, 0.2]), run.policy.encode(prompts))
    return v, (v**2).sum()


def test_optimizer_step_clips_and_averages(toy_run):
    """Against AdamW, clipping and the average written out on an unsharded copy."""
    weights = {k: full(p).requires_grad_() for k, p in toy_run.parameters.items()}
    twin = torch.optim.AdamW(weights.values(), lr=0.1, weight_decay=toy_run.cfg.weight_decay)
    average = {k: w.detach().clone() for k, w in weights.items()}
    for update in range(1, 5):
        toy_loss(toy_run)[1].backward()
        gradients = {k: full(p.grad) for k, p in toy_run.parameters.items()}
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
        assert norm > 0.5 and toy_run.optimizer_step() == pytest.approx(norm, rel=1e-5)
        assert all(p.grad is None for p in toy_run.parameters.values())
        for k, w in weights.items():
            w.grad = gradients[k] * (0.5 / norm)
        twin.step()
        for k, w in weights.items():
            if update % 2 == 0:
                average[k] = 0.75 * average[k] + 0.25 * w.detach()
            torch.testing.assert_close(full(toy_run.parameters[k]), w, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(full(toy_run.ema[k]), average[k], rtol=1e-4, atol=1e-5)
    assert toy_run.updates == 4


def test_averaged_weights_are_those_of_the_network(toy_run):
    """Inside `averaged` the sharded network computes with the average, afterwards again with the
    trained weights, also where a forward pass without gradient came before."""
    plain = type(toy_run.policy.transformer)()

    def expected(weights):
        plain.load_state_dict({k: full(w) for k, w in weights.items()})
        x = torch.tensor([[0.3, -1.0], [1.0, 0.2], [0.0, 2.0]])
        cond = toy_run.policy.encode(["north", "west", "north-east"])
        return plain(x, torch.tensor([0.9, 0.5, 0.2]), cond["prompt"])

    with torch.no_grad():
        trained, averaged = expected(toy_run.parameters), expected(toy_run.ema)
        assert (trained - averaged).abs().max() > 1e-3
        torch.testing.assert_close(toy_loss(toy_run)[0], trained)
        with toy_run.averaged():
            torch.testing.assert_close(toy_loss(toy_run)[0], averaged)
        torch.testing.assert_close(toy_loss(toy_run)[0], trained)


def test_evaluation_is_exact_and_repeatable(toy_run):
    """Mean scores of every held-out prompt once, whatever the batches; twice the same."""
    toy_run.cfg.rollout_batch = 100  # 256 prompts: the last batch is smaller
    first, second = toy_run.evaluate(), toy_run.evaluate()
    assert first["eval/mode"] == second["eval/mode"]
    prompts = toy_run.held_out
    assert len(prompts) == 256 and prompts[:8] == load_prompts(toy_run.cfg.eval_prompts)
    with torch.no_grad(), toy_run.averaged():
        x = toy_run.policy.noise([generator("evaluation", k) for k in range(256)])
        cond, sigmas = toy_run.policy.encode(prompts), sigma_schedule(10, 3.0)
        x0 = ode_sample(toy_run.policy, x, cond, sigmas, batch=256)
    expected = toy_run.eval_reward(x0, prompts).mean()
    assert first["eval/mode"] == pytest.approx(float(expected), rel=1e-5)


def test_ratios_far_from_one_are_warned_of(toy_run, capsys):
    half = toy_run.cfg.clip_range / 2
    for deviation, warned in ((0.0, False), (0.9 * half, False), (1.1 * half, True)):
        toy_run.log({"ratio_deviation_max": deviation})
        assert ("warning" in capsys.readouterr().out) == warned
        assert toy_run.record["ratio_deviation_max"] == deviation


def test_a_gradient_that_is_not_finite_ends_the_run(toy_run):
    before = {k: full(p) for k, p in toy_run.parameters.items()}
    (toy_loss(toy_run)[1] * math.nan).backward()
    with pytest.raises(UserError, match="gradient norm of iteration 0 is nan"):
        toy_run.optimizer_step()
    assert all(torch.equal(full(p), before[k]) for k, p in toy_run.parameters.items())
    toy_run.optimizer.zero_grad()


def test_spread_of_groups_leaves_failed_scores_out():
    rewards = torch.tensor([[1.0, 2.0, 4.0], [0.1, 0.1, 0.1], [1.0, torch.nan, 2.0],
                            [torch.nan, torch.nan, 3.0], [torch.nan] * 3])  # fmt: skip
    stds = [torch.tensor(group).std() for group in ([1.0, 2.0, 4.0], [1.0, 2.0])]
    found = common.spread("x", rewards)
    assert found["group_std/x"] == pytest.approx(float(sum(stds)) / 5, rel=1e-6)
    assert found["groups_without_spread/x"] == pytest.approx(3 / 5)
