"""What a run wrote into its timeline, as its file has it."""

from pathlib import Path
from typing import Any

from trainer_plugins.finding import Finding
from trainer_plugins.record.timeline import Remark, Sample, read_timeline


def read_entries(folder: Path | str, *kinds: type, rank: int = 0) -> list[Any]:
    """Return the entries of a rank; where kinds are given, those of them alone."""
    entries = read_timeline(Path(folder, "_trainer_plugins", "memory", f"rank-{rank}.jsonl"))
    return [each for each in entries if isinstance(each, kinds or object)]


def read_findings(folder: Path | str, rank: int = 0) -> list[Finding]:
    """Return what was remarked, in order."""
    return [each.finding for each in read_entries(folder, Remark, rank=rank)]


def read_steps(folder: Path | str, moment: str = "train", rank: int = 0) -> list[int]:
    """Return the steps of the samples of one moment."""
    return [each.step for each in read_entries(folder, Sample, rank=rank) if each.moment == moment]
