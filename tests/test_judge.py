"""The judge's client, against a scripted server for faults and a real OpenAI-compatible one."""

import base64
import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from PIL import Image

import judge
from options import RewardOptions, UserError
from rewards import load_rewards, missing_rewards

PICTURES = torch.rand(8, 3, 40, 48, generator=torch.Generator().manual_seed(0))
MODELS = b'{"object": "list", "data": []}'


def completion(text) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


FINE = (200, completion("A fine picture.\nFinal Score: 4"))


class Script:
    """A server on loopback that answers each POST with the next step of a script: (status, body,
    seconds of silence before it, seconds between its bytes), or what a function of the request
    returns."""

    def __init__(self, *steps):
        script, self.requests, self.keys, self.active, self.peak = self, [], [], 0, 0
        self.steps, self.lock = iter(steps), threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer(200, MODELS)

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with script.lock:
                    script.requests.append(request)
                    script.keys.append(self.headers["Authorization"])
                    step = next(script.steps)
                    script.active += 1
                    script.peak = max(script.peak, script.active)
                with contextlib.suppress(ConnectionError):  # the client gave up
                    self.answer(*(step(request) if callable(step) else step))

            def answer(self, status, body, silence=0.0, drip=0.0):
                time.sleep(silence)
                if self.command == "POST":
                    with script.lock:  # before the client can know, and ask again
                        script.active -= 1
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                for byte in [body[i:i + 1] for i in range(len(body))] if drip else [body]:
                    time.sleep(drip)
                    self.wfile.write(byte)
                    self.wfile.flush()

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def script():
    scripts = []

    def start(*steps) -> Script:
        scripts.append(Script(*steps))
        return scripts[-1]

    yield start
    for started in scripts:
        started.close()


@pytest.fixture(autouse=True)
def pauses(monkeypatch) -> list[float]:
    """The pauses between tries, not slept."""
    taken = []
    monkeypatch.setattr(judge, "sleep", taken.append)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    return taken


def options(*scripts: Script, **more) -> RewardOptions:
    urls = tuple(script.url for script in scripts)
    cfg = RewardOptions(judge_servers=urls, rewards=("unifiedreward",),
                        **dict(dict(judge_timeout=5.0, judge_retries=2), **more))
    cfg.validate()
    return cfg


def ask(cfg, n=1) -> list[float]:
    return judge.Judge(cfg)(PICTURES[:n], [f"prompt {i}" for i in range(n)]).tolist()


@pytest.mark.parametrize("text, mark", [
    ("Final Score: 4", 4), ("Good.\n\nFinal Score: 3.75\n", 3.75), ("Final Score: 4.5/5", 4.5),
    ("**Final Score:** **4**", 4), ("**Final Score**: 4", 4), ("final score:2", 2),
    ("## Final Score:\n\n**4**", 4), ("Final Score: 4 out of 5", 4), ("Final Score: 1.", 1),
    ("Final Score: 4 (well aligned)", 4), ("Final Score: 4 (out of 5)", 4),
    ("Final Score: 4 (out of 10)", None), ("Final Score: 4\nFinal Score: 4.0", 4),
    ("Final Score: 5\n\nThe 2 cats are there.", 5), ("I see 3 cats. Final Score: +4", 4),
    # invalid: absent, not a number, out of scale, of another scale, or not exactly one
    ("", None), (None, None), ("4", None), ("Final Score:", None), ("Final Score: nan", None),
    ("Final Score: four", None), ("Final Score: 10", None), ("Final Score: 0.9", None),
    ("Final Score: -4", None), ("Final Score: 9/10", None), ("Final Score: 4/10", None),
    ("Final Score: 4\nFinal Score: 5", None), ("Final Score: 4 or 5", None),
    ("Final Score: 4-5", None), ("Final Score: 4,5", None), ("Final Score: 4.5.1", None),
    ("Final Score: 4%", None), ("Final Score: 4e0", None), ("Final Score: inf", None),
    ("Final Score: X, where X is 4", None), ("Final Score: 4\nFinal Score: none", None),
    ("Final Score: ٤", None), ("Score: 4", None), ("Final Score: 4x", None),
])
def test_exactly_one_valid_mark(text, mark):
    assert judge.parse_score(text, "Final Score:", 1, 5) == mark


@pytest.mark.parametrize("text, field, scale, mark", [
    ("Alignment Score (1-5): 3", "Alignment Score (1-5):", (1, 5), 3),
    ("**Alignment Score (1 - 5)** : 3/5", "Alignment Score (1-5):", (1, 5), 3),
    ("87", "", (0, 100), 87), (" **8.5/10** ", "", (0, 10), 8.5), ("4.5/5", "", (1, 5), 4.5),
    ("10", "", (1, 5), None), ("**4**", "", (1, 5), 4), ("4\n5", "", (1, 5), None),
    ("nan", "", (1, 5), None), ("", "", (1, 5), None), ("Score 4", "", (1, 5), None),
    ("Final Score: -0.5", "Final Score:", (-1, 1), -0.5),
])
def test_other_fields_and_scales(text, field, scale, mark):
    assert judge.parse_score(text, field, *scale) == mark


def test_a_request_shows_the_picture_and_the_caption(script, monkeypatch, tmp_path):
    monkeypatch.setenv("OPENAI_API_KEY", "open sesame")
    template = tmp_path / "template.txt"
    template.write_text("Judge {prompt}! {not a field}")
    server = script(FINE, FINE)
    assert ask(options(server, judge_template=str(template), judge_tokens=77)) == [4]
    assert judge.Judge(options(server))(PICTURES[:1], ["a {prompt} of 東京"]).tolist() == [4]
    first, second = server.requests
    assert (first["temperature"], first["max_tokens"]) == (0, 77)
    assert first["model"] == "CodeGoat24/UnifiedReward-7b"
    (message,) = first["messages"]
    picture, text = message["content"]
    assert text["text"] == "Judge prompt 0! {not a field}"
    assert "Caption: a {prompt} of 東京\n" in second["messages"][0]["content"][1]["text"]
    kind, data = picture["image_url"]["url"].split(",")
    seen = np.array(Image.open(io.BytesIO(base64.b64decode(data))))
    assert kind == "data:image/png;base64"
    assert np.array_equal(seen, (PICTURES[0] * 255).round().byte().permute(1, 2, 0).numpy())
    assert server.keys == ["Bearer open sesame"] * 2


@pytest.mark.parametrize("status", [408, 429, 500, 503, 599])
def test_passing_faults_are_tried_again(script, pauses, status):
    server = script((status, b"busy"), (status, b"busy"), FINE)
    assert ask(options(server)) == [4]
    assert len(server.requests) == 3 and pauses == [0.5, 1.0]


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_lasting_faults_are_not_tried_again(script, pauses, status):
    server = script((status, b"no"), FINE)
    with pytest.raises(UserError, match=f"'prompt 0': .* answered {status} .* after 1 tries"):
        ask(options(server))
    assert len(server.requests) == 1 and not pauses


def test_tries_are_bounded(script, pauses):
    server = script(*[(500, b"")] * 10)
    with pytest.raises(UserError, match="answered 500 Internal Server Error, after 4 tries"):
        ask(options(server, judge_retries=3))
    assert len(server.requests) == 4
    server = script(*[(500, b"")] * 10)
    assert np.isnan(ask(options(server, judge_retries=9, reward_failure="mask"))).all()
    assert len(server.requests) == 10 and max(pauses) == 30


@pytest.mark.parametrize("late", [(200, FINE[1], 1.5), (200, FINE[1], 0, 0.05)],
                         ids=["silent", "dripping"])
def test_a_late_answer_is_a_time_out(script, late):
    server = script(late, FINE)
    start = time.monotonic()
    assert ask(options(server, judge_timeout=0.5)) == [4]
    assert len(server.requests) == 2 and time.monotonic() - start < 30
    with pytest.raises(UserError, match="TimeoutError: .*after 1 tries"):
        ask(options(script(late), judge_timeout=0.5, judge_retries=0))


def test_a_slow_answer_in_time_is_fine(script):
    assert ask(options(script((200, FINE[1], 0.3, 0.001)), judge_timeout=60.0)) == [4]


@pytest.mark.parametrize("body", [
    b"garbage", b"", b"[1, 2]", b'"text"', b'{"choices": []}', b'{"choices": [{"message": 3}]}',
    b"\xff\xfe\x00", completion("It is nice."), completion(None), completion(""),
    completion("Final Score: 7"), completion(["Final Score: 4"]),
])
def test_garbage_is_no_score(script, pauses, body):
    server = script((200, body), (200, body))
    with pytest.raises(UserError, match="reward unifiedreward, prompt 'prompt 0': ") as error:
        ask(options(server))
    assert "\n" not in str(error.value) and len(server.requests) == 1 and not pauses
    assert np.isnan(ask(options(server, reward_failure="mask"))).all()


def test_a_dead_server_is_tried_again_elsewhere(script, monkeypatch):
    dead = script()
    dead.close()
    monkeypatch.setattr(dead, "close", lambda: None)
    server = script(FINE, FINE, FINE)
    assert ask(options(dead, server), n=3) == [4, 4, 4]
    with pytest.raises(UserError, match="after 2 tries"):
        ask(options(dead, judge_retries=1))


@pytest.mark.parametrize("rank, first", [(0, [0, 2]), (1, [1])])
def test_ranks_take_turns(script, monkeypatch, rank, first):
    monkeypatch.setenv("RANK", str(rank))
    servers = script(*[FINE] * 3), script(*[FINE] * 3)
    assert ask(options(*servers), n=3) == [4] * 3
    asked = [request["messages"][0]["content"][1]["text"] for request in servers[0].requests]
    assert sorted(text.split("prompt ")[1][0] for text in asked) == [str(i) for i in first]


def by_prompt(request):
    i = int(request["messages"][0]["content"][1]["text"].split("Caption: prompt ")[1][0])
    return 200, completion(f"Final Score: {1 + i / 2}"), 0.8 - i / 20


def test_requests_run_together_and_keep_their_order(script):
    server = script(*[by_prompt] * 8)
    assert ask(options(server, judge_parallel=4), n=8) == [1 + i / 2 for i in range(8)]
    assert server.peak == 4


def test_after_a_failure_nothing_more_is_asked(script):
    server = script((400, b""), *[(200, FINE[1], 0.2)] * 7)
    with pytest.raises(UserError, match="400"):
        ask(options(server, judge_parallel=1), n=8)
    assert len(server.requests) < 8


def test_failed_scores_are_masked_and_counted(script):
    server = script(FINE, (400, b""), FINE)
    cfg = options(server, reward_failure="mask", judge_parallel=1)
    reward = load_rewards(["unifiedreward"], (), cfg, torch.device("cpu"))
    scores = reward(PICTURES[:3], ["a", "b", "c"])
    assert scores.isnan().tolist() == [[False, True, False]] and scores[0, ::2].tolist() == [4, 4]
    assert reward.failed == {"unifiedreward": 1}
    assert reward.model_ids["unifiedreward"].startswith("CodeGoat24/UnifiedReward-7b@template:")


def test_what_is_missing_is_named(script, tmp_path):
    server = script()
    assert missing_rewards(["unifiedreward"], options(server)) == []
    template = tmp_path / "template.txt"
    template.write_text("no field")
    for cfg, complaint in [
        (options(server, judge_template=str(template)), "has no {prompt}"),
        (options(server, judge_template=str(tmp_path / "none")), "cannot be read"),
    ]:
        (line,) = missing_rewards(["unifiedreward"], cfg)
        assert complaint in line and line.startswith("--judge-template")
    server.server.RequestHandlerClass.do_GET = lambda self: self.answer(401, b"who are you?")
    (line,) = missing_rewards(["unifiedreward"], options(server))
    assert "401" in line and "OPENAI_API_KEY" in line
    cfg = options(server)
    cfg.judge_servers = ("http://127.0.0.1:9/v1",)
    (line,) = missing_rewards(["unifiedreward"], cfg)
    assert "no answer" in line and "start one for CodeGoat24/UnifiedReward-7b" in line


@pytest.mark.parametrize("name, value", [
    ("judge_servers", ()), ("judge_servers", ("localhost:8000",)), ("judge_scale", (5.0, 1.0)),
    ("judge_scale", (5.0,)), ("judge_tokens", 0), ("judge_timeout", 0.0), ("judge_retries", -1),
    ("judge_parallel", 0),
])
def test_bad_options(name, value):
    with pytest.raises(UserError, match="--judge-"):
        RewardOptions(**{name: value}).validate()


MARKS = [f"Final Score: {i}" for i in range(1, 6)]


def tiny_judge(folder):
    """A random LLaVA-OneVision that can only answer with a mark, saved as a transformers folder."""
    torch.manual_seed(0)
    words = [*MARKS, "<unk>", "<end>", "<image>", "<video>", "a", "red", "blue", "circle"]
    vocabulary = tokenizers.Tokenizer(tokenizers.models.WordLevel(
        {word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    vocabulary.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, unk_token="<unk>", eos_token="<end>", pad_token="<end>",
        extra_special_tokens=["<image>", "<video>"])
    square = {"height": 32, "width": 32}
    processor = transformers.LlavaOnevisionProcessor(
        transformers.LlavaOnevisionImageProcessor(size=square, image_grid_pinpoints=[[32, 32]]),
        tokenizer, transformers.LlavaOnevisionVideoProcessor(size=square), num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template="{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == "
                      "'image' %}<image>{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
                      "{% endfor %}")
    tower = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    model = transformers.LlavaOnevisionForConditionalGeneration(transformers.LlavaOnevisionConfig(
        vision_config=transformers.SiglipVisionConfig(
            **tower, image_size=32, patch_size=8, vision_use_head=False),
        text_config=transformers.Qwen2Config(
            **tower, vocab_size=len(words), num_key_value_heads=2, bos_token_id=None,
            eos_token_id=words.index("<end>"), pad_token_id=words.index("<end>")),
        image_token_index=words.index("<image>"), video_token_index=words.index("<video>"),
        image_grid_pinpoints=[[32, 32]]))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.3)
    model.lm_head.weight.data[5:] = 0  # all but the marks; one of the marks is above 0:
    model.lm_head.weight.data[4] = -model.lm_head.weight.data[0]
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model.eval(), processor


@pytest.fixture(scope="module", autouse=True)
def real_server(tmp_path_factory):
    """`transformers serve` on loopback: url, folder, process, model, processor. It starts while the
    other tests run."""
    if not find_spec("uvicorn") or not find_spec("fastapi"):
        yield
        return
    folder = tmp_path_factory.mktemp("judge")
    model, processor = tiny_judge(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = (folder / "log.txt").open("wb")
    command = ["serve", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu", str(folder)]
    code = "from transformers.cli.transformers import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command], stdout=log, stderr=subprocess.STDOUT,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
    yield f"http://127.0.0.1:{port}/v1", folder, process, model, processor
    process.terminate()
    process.wait(30)
    log.close()


def test_many_ranks_at_once(script):
    """As 16 processes would: no request is lost, each gets its own mark."""
    server = script(*[by_prompt] * 64)
    cfg = options(server, judge_parallel=2)
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda _: ask(cfg, n=4), range(16)))
    assert results == [[1, 1.5, 2, 2.5]] * 16 and len(server.requests) == 64


def test_a_real_server(real_server, monkeypatch):
    if real_server is None:
        pytest.skip('pip install "transformers[serving]"')
    url, folder, process, model, processor = real_server
    cfg = RewardOptions(judge_servers=(url,), judge_model=str(folder), judge_tokens=1,
                        judge_timeout=120.0, judge_parallel=2)
    deadline = time.monotonic() + 240  # 7 seconds on an idle machine
    while missing_rewards(["unifiedreward"], cfg) and time.monotonic() < deadline:
        assert process.poll() is None, (folder / "log.txt").read_text()
        time.sleep(0.5)
    prompts = ["a red circle", "a blue circle", "blue blue", "東京", "", "a", "red", "circle"]
    reward = load_rewards(["unifiedreward"], (), cfg, torch.device("cpu"))
    scores = reward(PICTURES, prompts)

    expected = []
    for pixels, prompt in zip(PICTURES, prompts, strict=True):
        picture = Image.fromarray((pixels * 255).round().byte().permute(1, 2, 0).numpy())
        content = [{"type": "image", "image": picture},
                   {"type": "text", "text": judge.TEMPLATE.replace("{prompt}", prompt)}]
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True,
            return_dict=True, return_tensors="pt")
        with torch.no_grad():
            expected.append(1.0 + model(**inputs).logits[0, -1].argmax().item())
    assert scores.tolist() == [expected] and len(set(expected)) > 1
    # a picture that the server cannot read has no mark
    monkeypatch.setattr(judge.base64, "b64encode", lambda data: b"AAAA")
    cfg.judge_retries = 1
    with pytest.raises(UserError, match=r"answered [45]\d\d .* after [12] tries"):
        reward(PICTURES[:1], ["a red circle"])
