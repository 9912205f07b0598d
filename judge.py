"""UnifiedReward and its like: a vision-language model on OpenAI-compatible servers gives a mark.

The judge sees the picture and the caption and answers in prose that ends in a mark (for instance
"Final Score: 4.5"). The server is your own process (vLLM, SGLang, `transformers serve`):

    vllm serve CodeGoat24/UnifiedReward-qwen-7b --port 8000
    python -m sglang.launch_server --model-path CodeGoat24/UnifiedReward-7b --port 8000 \
        --chat-template chatml-llava                                  # a LLaVA-OneVision checkpoint
    python g2rpo.py --rewards unifiedreward --judge-servers http://127.0.0.1:8000/v1

Requests run at the same time, `judge_parallel` of them in each process; several servers take turns.
A time-out, a lost connection and the answers 408, 429 and 5xx are tried again, a bounded number of
times and with growing pauses; any other answer, and a text without exactly one valid mark, is
final (the judge runs at temperature 0, it would say the same again). A failed request has no mark:
it ends the run, or is NaN with `--reward-failure mask`. If OPENAI_API_KEY is set it is sent along.
"""

import base64
import hashlib
import http.client
import io
import itertools
import json
import logging
import os
import re
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, sleep

import torch
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from options import UserError
from weights import short

log = logging.getLogger(__name__)

TEMPLATE = """\
Here are a caption and a picture that was generated from it.
Caption: {prompt}
Judge the picture in two respects. First, alignment: name the objects, attributes, numbers and \
relations that the caption asks for, and say for each whether the picture shows it. Second, \
quality: is the picture well composed, realistic where it should be, and free of artefacts? Then \
give one overall score from 1 (poor) to 5 (excellent), decimals allowed, on a last line of the form:
Final Score: X"""

RETRIED = (408, 429, *range(500, 600))


def parse_score(text: str, field: str, low: float, high: float) -> float | None:
    """The mark in a judge's answer, or None unless there is exactly one valid mark.

    The mark is the number behind `field` (markup and spacing may differ; "": the answer is the mark
    alone), also written 4/5, 4 out of 5 or 4 (out of 5), where 5 must be `high`. More numbers
    behind it ("4 or 5"), several fields that disagree, and values outside [low, high] are invalid.
    """
    text = re.sub(r"[*`#]", " ", text or "")
    number = r"([-+]?[0-9]+(?:\.[0-9]+)?)"
    mark = re.compile(rf"\s*{number}(?:\s*\(?(?:/|out of)\s*{number}\)?)?(?![\w%])([^\n]*)")
    words = re.findall(r"\w+|[^\w\s]", field)
    starts = [m.end() for m in re.finditer(r"\s*".join(map(re.escape, words)), text, re.I)]
    scores = set()
    for start in starts if words else [0]:
        found = mark.match(text, start)
        rest = found and (found[3] if words else text[found.start(3):])
        if not found or re.search(r"\d", rest) or (found[2] and float(found[2]) != high):
            return None
        scores.add(float(found[1]))
    if len(scores) != 1:
        return None
    score = scores.pop()
    return score if low <= score <= high else None


def _request(url: str, body: dict | None = None) -> urllib.request.Request:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.Request(url, data, headers)


def _read(request: urllib.request.Request, timeout: float) -> bytes:
    """The whole answer within `timeout` seconds, however slowly its pieces drip in."""
    end, pieces = monotonic() + timeout, []
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        while piece := answer.read1(1 << 16):
            pieces.append(piece)
            if monotonic() > end:
                raise TimeoutError(f"no complete answer in {timeout:g} seconds")
    return b"".join(pieces)


def check_servers(cfg) -> None:
    """Refuse servers that do not answer; raises UserError with one line."""
    _template(cfg)
    for server in cfg.judge_servers:
        try:
            _read(_request(server.rstrip("/") + "/models"), min(cfg.judge_timeout, 20))
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                raise UserError(f"--judge-servers {server}: refuses us ({error.code}); set "
                                "OPENAI_API_KEY") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise UserError(f"--judge-servers {server}: no answer ({short(error)}); start one for "
                            f"{cfg.judge_model} (the head of judge.py says how), or give other "
                            "addresses") from error


def _template(cfg) -> str:
    if not cfg.judge_template:
        return TEMPLATE
    try:
        text = Path(cfg.judge_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--judge-template {cfg.judge_template}: cannot be read "
                        f"({short(error)})") from error
    if "{prompt}" not in text:
        raise UserError(f"--judge-template {cfg.judge_template}: has no {{prompt}} for the caption")
    return text


class Judge:
    """`unifiedreward`: images [n, 3, H, W] in [0, 1] and n prompts -> marks [n]. A failed request
    raises UserError, or is NaN if cfg.reward_failure is "mask"."""

    can_fail = True

    def __init__(self, cfg):
        self.cfg, self.template = cfg, _template(cfg)
        digest = hashlib.sha256((self.template + cfg.judge_field).encode()).hexdigest()[:12]
        self.model_id = f"{cfg.judge_model}@template:{digest}"
        self.turn = itertools.count(int(os.environ.get("RANK", 0)))  # ranks start at other servers

    def __call__(self, images: Tensor, prompts: list[str]) -> Tensor:
        pixels = (images.float().clamp(0, 1) * 255).round().byte().cpu()
        pool = ThreadPoolExecutor(self.cfg.judge_parallel)
        try:
            turns = itertools.islice(self.turn, len(prompts))
            marks = list(pool.map(self._score, pixels, prompts, turns))
        finally:  # after a failure nothing more is asked
            pool.shutdown(cancel_futures=True)
        return torch.tensor(marks)

    def _score(self, pixels: Tensor, prompt: str, turn: int) -> float:
        try:
            text = self._ask(pixels, prompt, turn)
            mark = parse_score(text, self.cfg.judge_field, *self.cfg.judge_scale)
            if mark is None:
                raise UserError(f"no valid score in its answer {text[-200:]!r}")
        except UserError as error:
            if self.cfg.reward_failure == "mask":
                log.warning("reward unifiedreward, a sample is masked: %s", error)
                return float("nan")
            raise UserError(f"reward unifiedreward, prompt {prompt!r}: {error}") from error
        return mark

    def _ask(self, pixels: Tensor, prompt: str, turn: int) -> str:
        """The judge's text; UserError when it cannot be had within the retries."""
        cfg = self.cfg
        png = io.BytesIO()
        to_pil_image(pixels).save(png, "PNG")
        picture = base64.b64encode(png.getvalue()).decode()
        content = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
            {"type": "text", "text": self.template.replace("{prompt}", prompt)},
        ]
        body = {"model": cfg.judge_model, "temperature": 0, "max_tokens": cfg.judge_tokens,
                "messages": [{"role": "user", "content": content}]}
        for attempt in range(cfg.judge_retries + 1):
            if attempt:
                sleep(min(2.0 ** (attempt - 2), 30))
            server = cfg.judge_servers[(turn + attempt) % len(cfg.judge_servers)]
            try:
                request = _request(server.rstrip("/") + "/chat/completions", body)
                answer = _read(request, cfg.judge_timeout)
            except urllib.error.HTTPError as error:
                reason = f"{server} answered {error.code} {error.reason}"
                if error.code not in RETRIED:
                    break
            except (OSError, http.client.HTTPException) as error:  # time-outs and lost connections
                reason = f"{server}: {short(error)}"
            else:
                return self._text(answer, server)
        raise UserError(f"{reason}, after {attempt + 1} tries")

    @staticmethod
    def _text(answer: bytes, server: str) -> str:
        try:
            text = json.loads(answer)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError):
            text = 0
        if not isinstance(text, str | None):
            raise UserError(f"{server} answered no chat completion: {answer[:100]!r}")
        return text or ""
