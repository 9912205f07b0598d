"""Train every algorithm for the same time and print what each made of it, as a markdown table.

    python toy/compare.py                                 # 15 minutes, one thread, seed 0
    python toy/compare.py --seconds 300 --seeds 0 1 2     # longer, and as a mean over three seeds
    python toy/compare.py -- --model toy/tiny-sd3 --max-sequence-length 1 --guidance 1

One run after the other, each in its own process with one thread. Three iterations that are not
counted tell how many fit into --seconds (evaluations and start-up not included); seconds per
iteration, in the table, are those of the counted run. With the preset tiny all train tiny FLUX,
also those whose preset has Stable Diffusion 3; learning rates are the presets' own. Flags after
`--` go to every script."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parents[1]
ALGORITHMS = ("g2rpo", "stepwise_flow_grpo", "mix_grpo", "dance_grpo", "flow_grpo")
ALIKE = ["--model", ROOT / "toy/tiny-flux", "--max-sequence-length", "12", "--guidance", "1.25"]
PHASES = ("network", "decode", "reward", "update")  # `network`: of the rollout


def run(script: str, out: Path, flags: list[str]) -> list[dict]:
    """The lines of metrics.jsonl of one run."""
    command = [sys.executable, ROOT / f"{script}.py", *flags, "--out", out]
    command += ["--no-export", "--save-every", "0"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if done.returncode:
        lines = done.stderr.decode().splitlines() or [f"ended with {done.returncode}"]
        raise SystemExit(f"{script}: {lines[-1]}")
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def compare(script: str, args, seed: int) -> dict[str, float]:
    """One algorithm, one seed: the metrics of its table row."""
    flags = ["--preset", args.preset, *(ALIKE if args.preset == "tiny" else []), *args.flags]
    flags += ["--seed", str(seed)]
    out = args.out / f"{script}-{seed}"
    probe = run(script, out / "probe", [*flags, "--iterations", "3", "--eval-every", "0"])
    second = fmean(row["seconds/iteration"] for row in probe[1:])
    count = max(round(args.seconds / second), 1)
    flags += ["--iterations", str(count), "--eval-every", str(count)]
    rows = run(script, out / "run", flags)
    before, *steps, after = rows
    found = {"iterations": count}
    for name in [key for key in before if key.startswith("eval/")]:
        found |= {f"{name} before": before[name], f"{name} after": after[name]}
    prompts = json.loads((out / "run/config.json").read_text())["config"]["prompts_per_step"]
    for name in ("network", "network_trained", "decode"):
        found[f"calls/{name}"] = fmean(row[f"calls/{name}"] for row in steps) / prompts
    for name in ("iteration", *PHASES):
        found[f"seconds/{name}"] = fmean(row[f"seconds/{name}"] for row in steps)
    return found


def table(rows: dict[str, dict[str, float]]) -> str:
    """Markdown: scores before → after; calls are samples of one prompt, seconds of an iteration."""
    names = [k[5:-7] for k in next(iter(rows.values())) if k.endswith(" before")]
    head = ["algorithm", "iterations", *names, "calls: rollout + trained", "images"]
    head += ["s/iteration", *PHASES]
    lines = [head, ["---"] * len(head)]
    for script, row in rows.items():
        scores = [f"{row[f'eval/{n} before']:.3f} → {row[f'eval/{n} after']:.3f}" for n in names]
        calls = f"{row['calls/network']:.0f} + {row['calls/network_trained']:.0f}"
        seconds = [f"{row[f'seconds/{name}']:.2f}" for name in ("iteration", *PHASES)]
        lines.append([script, f"{row['iterations']:.0f}", *scores, calls,
                      f"{row['calls/decode']:.0f}", *seconds])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120, help="of training, each run [120]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="means over these [0]")
    parser.add_argument("--preset", choices=("tiny", "toy"), default="tiny", help="[tiny]")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=ALGORITHMS,
                        metavar="NAME", help=f"[{' '.join(ALGORITHMS)}]")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), help="[runs/compare]")
    parser.add_argument("flags", nargs="*", help="after `--`: flags for every script")
    args = parser.parse_args()
    if not 0 < args.seconds < float("inf"):
        parser.error(f"--seconds {args.seconds}: must be above 0")
    if args.out.exists():
        parser.error(f"--out {args.out} exists: name a new folder")
    rows = {}
    for script in args.algorithms:
        found = [compare(script, args, seed) for seed in args.seeds]
        rows[script] = {key: fmean(one[key] for one in found) for key in found[0]}
        print(script, "done", file=sys.stderr, flush=True)
    (args.out / "table.md").write_text(text := table(rows) + "\n")
    print(text, end="")


if __name__ == "__main__":
    main()
