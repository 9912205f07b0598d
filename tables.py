"""What an evaluation says: means with their standard errors, diversity, GenEval's kinds; and the
markdown that prints them as the papers do."""

import math
from collections.abc import Sequence

from torch import Tensor


def mean_and_error(values: Tensor) -> dict[str, float | None]:
    """Mean over the prompts and its standard error, of one number a prompt [P] (NaN: failed)."""
    valid = values[~values.isnan()].double()
    error = float(valid.std()) / math.sqrt(len(valid)) if len(valid) > 1 else None
    return {"mean": float(valid.mean()) if len(valid) else None, "standard_error": error}


def diversity(features: Tensor) -> Tensor:
    """Mean of 1 − cosine over the pairs of pictures of one prompt: unit vectors [P, S, d] -> [P]
    in float64; S >= 2."""
    f, pairs = features.double(), features.shape[1] * (features.shape[1] - 1)
    cosines = (f.sum(1).square().sum(-1) - f.square().sum((1, 2))) / pairs
    return 1 - cosines


def geneval_tags(rewards, texts: Sequence[str]) -> list[str]:
    """GenEval's kinds of the prompts; [] where `geneval` is not among the rewards."""
    if "geneval" not in rewards.names:
        return []
    metadata = rewards.scorers["geneval"].metadata  # it has refused prompts that are not in there
    return [metadata[text]["tag"] for text in texts]


def row_of(names: Sequence[str], scores: Tensor, features: Tensor | None, tags: Sequence[str]):
    """The results of one model at one number of steps.

    names: R rewards; scores: [P, S, R] of P prompts and S seeds, NaN where one failed; features:
    CLIP's, [P, S, d], or None; tags: GenEval's kinds of the prompts where `geneval` is a reward."""
    row = {"scores": {}}
    for name, of_one in zip(names, scores.unbind(-1), strict=True):
        pictures = [[None if math.isnan(x) else x for x in some] for some in of_one.tolist()]
        failed = {"failed": int(of_one.isnan().sum()), "pictures": pictures}
        row["scores"][name] = mean_and_error(of_one.double().nanmean(1)) | failed
        if name == "geneval":
            import geneval

            pairs = [(tag, x) for tag, some in zip(tags, pictures, strict=True) for x in some]
            row["geneval"] = geneval.summary({"tag": tag, "correct": x} for tag, x in pairs)
    if features is not None:
        row["diversity"] = mean_and_error(diversity(features))
    return row


def markdown(rows: list[dict], errors: bool = True) -> str:
    """The table of an evaluation; errors: with standard errors, as the papers have not.

    rows: `row_of` with model, trained_on (names of rewards) and steps."""
    columns = [row["scores"] | {k: row[k] for k in ("diversity",) if k in row} for row in rows]
    lines = [["trained on", "model", "steps", *columns[0]]]
    for row, cells in zip(rows, columns, strict=True):
        texts = [cell_of(cell, errors) for cell in cells.values()]
        lines.append(["+".join(row["trained_on"]) or "—", row["model"], row["steps"], *texts])
    text = as_markdown(lines)
    if "geneval" in rows[0]:
        kinds = list(rows[0]["geneval"])
        lines = [["model", "steps", *kinds]]
        for row in rows:
            shares = [f"{row['geneval'][kind]:.2f}" for kind in kinds]
            lines.append([row["model"], row["steps"], *shares])
        text += "\n\n" + as_markdown(lines)
    return text


def notes(results: dict) -> list[str]:
    """What a reader of the table should know, one line each."""
    lines, rows = [], results["rows"]
    if "diversity" not in rows[0]:
        lines.append(f"diversity {results['diversity']}")
    names = {row["model"] for row in rows if set(row["scores"]) <= set(row["trained_on"])}
    return lines + [f"{name} was trained on every reward of this table: name another to --rewards, "
                    "to see reward hacking" for name in sorted(names)]  # fmt: skip


def cell_of(cell: dict, errors: bool) -> str:
    if cell["mean"] is None:
        return "—"
    known = errors and cell["standard_error"] is not None
    return f"{cell['mean']:.3f}" + (f" ± {cell['standard_error']:.3f}" if known else "")


def as_markdown(lines: list[list]) -> str:
    lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)
