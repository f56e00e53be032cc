"""Tell from the form of log lines how far a run had come before its OOM.

A number beside the word "step" is not enough: banners and configs are full of them ("Gradient
accumulation steps = 8", "warmup steps: 100"). A tqdm bar counts in steps, not in examples or bytes;
a logger's line has the step and a loss, or the step and the last step.
"""

import re
from collections.abc import Sequence

_FAR = 3  # from this step on, nothing happens for the first time

# tqdm; the Trainer's bar in a notebook.
_BARS = (
    re.compile(r"\d{1,3}%\|[^|]{0,300}\| *(\d{1,9})/(\d{1,9}) ?\[([^\]]{0,200})"),
    re.compile(r"\[ *(\d{1,9})/(\d{1,9}) (\d+:\d\d.{0,200})"),
)
# examples/s, toks/s, MB/s; steps are it/s.
_OTHER_UNITS = re.compile(r"(?<![a-zA-Z])(?!it/|iter|step|batch|ba/)[a-zA-Z]{2,20}/s")
_TITLES = re.compile(r"train|epoch|step|iter|tun(?:e|ing)|\bfit|loss|\brun|progress", re.IGNORECASE)
_OTHER_TITLES = re.compile(
    r"shard|download|fetch|map\b|filter|tokeni[sz]|dataset|generat|sav|load|captur|quanti"
    r"|sanity|valid|eval|test|predict|process|convert|pack|cache|merg|profil|warm|calibrat",
    re.IGNORECASE,
)
_EPOCH_TITLE = re.compile(r"\bepoch\D{0,8}(\d{1,6})", re.IGNORECASE)

# A logger's dict, as printed by the Trainer, TRL, LLaMA-Factory, ms-swift and axolotl.
_LOSS = re.compile(r"[\"'](?:\w{1,20}_)?loss[\"']: [\"']?[\d.-]")
_SUMMARY = re.compile(r"[\"']train_runtime[\"']: |\btrain_runtime +=|Training completed")
_EPOCH = re.compile(r"[\"']epoch[\"']: [\"']?(\d{1,6}\.\d{1,9})")

# "step 12/300", "iter 120: loss 2.5", "Step [100/600], Loss: 0.1", with a loss or the last step.
_STEP = re.compile(
    r"(?<![a-z] )(?<!\w)(?:(?:global|train|training|current)[ _-])?(?:step|iter|iteration)s?"
    r"(?:\(train\))?(?:/max_steps)?[\"']?[\s=:#\[(]{1,8}[\"']?(\d{1,9})"
    r"(?: {0,8}(?:/|of) {0,8}\d|.*(?:loss|reward|lr=))",
    re.IGNORECASE,
)
# `RUN` of a Dockerfile, a resumed run, and printed arguments.
_NOT_PROGRESS = re.compile(
    r"Step \d+/\d+ : [A-Z]|(?i:continu|resum|will |start(?:ing)? )|(?:Namespace|Arguments|Config)\("
)


def read_progress(before: Sequence[str]) -> str:
    """Describe how far the run had come; empty at its start, or if the text does not show it."""
    num_losses = sum(bool(_LOSS.search(text)) for text in before)
    for text in reversed(before):
        if _SUMMARY.search(text):
            return ""  # the training had ended
        for found in (_read_bar(text), _read_step(text), _read_dict(num_losses, text)):
            if found is not None:
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
    if int(done) >= _FAR:
        return f"the last progress bar is at {done} of {total}"
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
    """Read a line that names a step, with a loss or the last step."""
    step = _STEP.search(text)
    if step is None or _NOT_PROGRESS.search(text):
        return None
    return f"the run was at step {step[1]}" if int(step[1]) >= _FAR else ""
