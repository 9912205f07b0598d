"""Prompt files: .txt, .jsonl, .json, from disk or from the hub."""

import json
import pathlib

from options import UserError


def load_prompts(source: str) -> list[str]:
    """The prompts of a file, in its order.

    source: a .txt file (one a line), a .jsonl or .json file (strings, or objects with "prompt"), or
    hf://datasets/REPO/FILE of the same kinds. A .json file counts a repeated prompt once (HPDv2
    lists one for each pair of images). Raises UserError naming file and line."""
    path = pathlib.Path(fetch_dataset_file(source))
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".json":
            rows = list(enumerate(json.loads(text), 1))
        else:
            rows = [(n, row.strip()) for n, row in enumerate(text.split("\n"), 1) if row.strip()]
        if path.suffix == ".jsonl":
            rows = [(n, json.loads(row)) for n, row in rows]
        elif path.suffix not in (".json", ".txt"):
            raise UserError(f"prompt file {source}: its name must end in .txt, .jsonl or .json")
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, TypeError) as error:
        raise UserError(f"prompt file {source} cannot be read: {error}") from None
    prompts = []
    for n, row in rows:
        prompt = row.get("prompt") if isinstance(row, dict) else row
        if not isinstance(prompt, str):
            raise UserError(
                f'prompt file {source}, entry {n}: neither a string nor an object with "prompt"'
            )
        prompts.append(prompt)
    if not prompts:
        raise UserError(f"prompt file {source} is empty: it needs at least one prompt")
    return list(dict.fromkeys(prompts)) if path.suffix == ".json" else prompts


def fetch_dataset_file(source: str) -> str:
    """The local path of `source`; hf://datasets/OWNER/NAME/FILE comes from the hub, or its local
    cache."""
    if not source.startswith("hf://datasets/"):
        return source
    from huggingface_hub import hf_hub_download

    owner, name, file = source.removeprefix("hf://datasets/").split("/", 2)
    try:
        return hf_hub_download(f"{owner}/{name}", file, repo_type="dataset")
    except Exception as error:
        raise UserError(
            f"prompt file {source} is not in the local cache and could not be downloaded "
            f"({type(error).__name__}): name a local file, or run "
            f"`hf download {owner}/{name} {file} --repo-type dataset` where there is a network"
        ) from None
