"""Tell from the form of log lines how far a run had come before its OOM.

A number beside the word "step" is not enough: banners and configs are full of them ("Gradient
accumulation steps = 8", "warmup steps: 100"). A tqdm bar counts in steps, not in examples or bytes;
a logger's line has the step and a measurement, or the step and the last step.
"""

import re
from collections.abc import Sequence
from functools import partial

from trainer_plugins.explain.text.excerpt import LogLine

_FAR = 3  # from this step on, nothing happens for the first time

# tqdm, with its total and without; Lightning's and Keras's bars; the Trainer's bar in a notebook.
_BARS = (
    re.compile(r"\d{1,3}%\|[^|]{0,300}\| *(\d{1,9})/(\d{1,9}) ?\[([^\]]{0,200})"),
    re.compile(r"(?:^|[:\s])()(\d{1,9})it \[(\d[^\]]{0,200})"),
    re.compile(r"━{2,300} *(\d{1,9})/(\d{1,9}) +(\d+:\d\d.{0,200})"),
    re.compile(r"^ *(\d{1,9})/(\d{1,9}) \[[=>. ]{4,200}\](.{0,200})"),
    re.compile(r"\[ *(\d{1,9})/(\d{1,9}) (\d+:\d\d.{0,200})"),
)
# examples/s, toks/s, MB/s; steps are it/s.
_OTHER_UNITS = re.compile(r"(?<![a-zA-Z])(?!it/|iter|step|batch|ba/)[a-zA-Z]{2,20}/s")
_TITLES = re.compile(r"train|epoch|step|iter|tun(?:e|ing)|\bfit|loss|\brun|progress", re.IGNORECASE)
_OTHER_TITLES = re.compile(
    r"shard|download|fetch|map\b|filter|tokeni[sz]|dataset|generat|sav|load|captur|quanti"
    r"|sanity|valid|eval|test|predict|process|convert|pack|cache|extract|merg|profil|warm|calibrat",
    re.IGNORECASE,
)
_EPOCH_TITLE = re.compile(r"\bepoch\D{0,8}(\d{1,6})", re.IGNORECASE)

# A logger's dict, as printed by the Trainer, TRL, LLaMA-Factory, ms-swift and axolotl.
_LOSS = re.compile(r"[\"'](?:\w{1,20}_)?loss[\"']: [\"']?[\d.-]")
_SUMMARY = re.compile(r"[\"']train_runtime[\"']: |\btrain_runtime +=|Training completed")
_EPOCH = re.compile(r"[\"']epoch[\"']: [\"']?(\d{1,6}\.\d{1,9})")
# The Trainer's table in a notebook.
_TABLE = re.compile(r"\bStep\b.{0,40}\bLoss\b")
_ROW = re.compile(r"^\W{0,8}(\d{1,9})[\s|]+\d{1,9}\.\d{2,9}\b")

# "step 12/300", "iter 120: loss 2.5", "Step [100/600], Loss: 0.1". The text before the word
# decides: "warmup steps" and "save_steps" are settings.
_STEP = re.compile(
    r"(?:^|[^\w\s-]\s{0,9}|\s-\s{1,9}|\b\d{1,9}\s{1,9}"
    r"|\b(?:at|current|epoch|finished|global|optimizer|train|training)[ _-])"
    r"(?:step|iter|iteration|(?P<batch>batch))(?P<many>s?)(?:\(train\))?(?:/max_steps)?"
    r"[\"']?[\s=:#\[(]{1,8}[\"']?(?P<done>\d{1,9})(?P<of> {0,8}(?:/|of) {0,8}\d)?(?P<alone>\W*$)?",
    re.IGNORECASE,
)
# "Epoch: [0][ 120/5000]", "epoch 001:    10 / 500 loss=3.1", "Epoch(train) [1][ 50/1000]".
_STEP_OF_EPOCH = re.compile(
    r"\bepoch(?:\(train\))?:? {0,4}\[?\d{1,6}[\]: ]{1,3}\[? {0,8}(?P<done>\d{1,9}) ?/ {0,8}\d",
    re.IGNORECASE,
)
# "Epoch 2/10, loss: 0.5", printed at the end of an epoch.
_WHOLE_EPOCH = re.compile(r"\bepoch[ :=#\[]{1,3}(?P<done>\d{1,6})\b.{1,200}loss", re.IGNORECASE)
_MEASURED = re.compile(
    r"loss|\bppl\b|perplexity|grad_?norm|\blr\b|learning.rate|\bmem(?:ory)?\b|elapsed|time\b"
    r"|\bacc|samples|tokens|\btps\b|mfu|it/s|s/it|\bms\b|reward",
    re.IGNORECASE,
)
# `RUN` of a Dockerfile, a resumed run, and printed arguments.
_NOT_PROGRESS = re.compile(
    r"Step \d+/\d+ : [A-Z]|(?i:continu|resum|will |start(?:ing)? )|(?:Namespace|Arguments|Config)\("
)


def progress(before: Sequence[LogLine]) -> str:
    """Describe how far the run had come; empty at its start, or if the text does not show it."""
    num_losses = sum(bool(_LOSS.search(line.text)) for line in before)
    has_table = any(_TABLE.search(line.text) for line in before)
    for line in reversed(before):
        if _SUMMARY.search(line.text):
            return ""  # the training had ended
        row = _ROW.match(line.text) if has_table else None
        if row and int(row[1]) >= _FAR:
            return f"the table of losses is at step {row[1]}"
        for read in (_read_bar, _read_step, partial(_read_dict, num_losses)):
            if (found := read(line.text)) is not None:
                return found
    return ""


def _read_bar(text: str) -> str | None:
    """Read a bar that counts steps; None if there is none, empty if it is at its start."""
    bars = (bar for each in _BARS if (bar := each.search(text)))
    if (bar := min(bars, key=lambda bar: bar.start(), default=None)) is None:
        return None
    done, total, rest = bar.groups()
    title = text[: bar.start() + 1]
    is_other = re.search("[a-zA-Z]{2}", title) and not _TITLES.search(title)
    if is_other or _OTHER_TITLES.search(title) or _OTHER_UNITS.search(rest):
        return None
    epoch = _EPOCH_TITLE.search(title)
    if done == total and not epoch:
        return None  # a complete bar did not fail
    if int(done or total) >= _FAR:
        return f"the last progress bar is at {f'{done} of {total}' if done else total}"
    return f"the run was in epoch {epoch[1]}" if epoch and int(epoch[1]) > 1 else ""


def _read_dict(num_losses: int, text: str) -> str | None:
    """Read a logger's dict: a positive epoch, or enough lines with a loss."""
    epoch = _EPOCH.search(text)
    if epoch and float(epoch[1]) > 0:
        return f"the run was at epoch {epoch[1]}"
    if not epoch and not _LOSS.search(text):
        return None
    return f"{num_losses} lines before it report a loss" if num_losses >= _FAR else ""


def _read_step(text: str) -> str | None:
    """Read a line that names a step, with a measurement or the last step."""
    step = _STEP_OF_EPOCH.search(text)
    if not step and (step := _STEP.search(text)) and not _tells(step):
        step = None
    if step and not _NOT_PROGRESS.search(text):
        return f"the run was at step {step['done']}" if int(step["done"]) >= _FAR else ""
    epoch = _WHOLE_EPOCH.search(text)
    if not epoch:
        return None
    return f"the run was at epoch {epoch['done']}" if int(epoch["done"]) else ""


def _tells(step: re.Match[str]) -> bool:
    """Return whether a number beside the word is a step of the run, not a setting."""
    if step["batch"]:
        return bool(step["of"])
    if step["many"]:
        return "loss" in step.string.lower()
    is_alone = step["alone"] is not None and not re.search("[a-zA-Z]", step.string[: step.start()])
    return is_alone or bool(step["of"] or _MEASURED.search(step.string))
