"""Read and check the measurements of `tests/planner/published.toml`; sizes in bytes."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it
    import tomli as tomllib

FOLDER = Path(__file__).parents[1] / "tests" / "planner"
UNITS = {"B": 1, "MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}
COUNTERS = ("allocated", "reserved", "step_end", "sampled", "nvidia_smi", "host")
CARDS = {"NVIDIA RTX A6000": "rtxa6000", "Tesla T4": "t4", "NVIDIA L40S": "l40s"}
"""The cards of the replayed sources, as the planner names them."""
SAID = ("name", "where", "unit", "measured", "missing", "note")
OF_A_SOURCE = {
    *SAID,
    "date",
    "gpu",
    "num_gpus",
    "torch",
    "transformers",
    "peft",
    "ran",
    "loop",
    "common",
    "rows",
}
SETTINGS = {
    "config", "model", "dtype", "autocast", "batch", "seq_length", "mean_seq_length",
    "accumulation", "checkpointing", "optimizer", "attention", "padded", "peft_config",
    "autocast_adapter_dtype", "quantization", "strategy", "gpu", "num_gpus", "trainable",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Describes one run whose memory was measured and published."""

    source: str
    name: str
    settings: Mapping[str, Any]
    """The training and its settings, as the head of the file explains."""

    measured: Mapping[str, int]
    """Bytes by counter, as far as the source gives them.

    The counters are allocated, reserved, step_end, sampled, nvidia_smi and host.
    """

    missing: tuple[str, ...]
    """Requirements of a replay that the source does not state, or that only its authors have."""

    gpu: str
    versions: Mapping[str, str]
    """The versions of torch, transformers and peft that it ran with, as far as known."""

    loop: Mapping[str, Any]
    """The objects that the training loop keeps alive; empty if unknown."""

    @property
    def complete(self) -> bool:
        """Return whether the run can be repeated from what is known."""
        return not self.missing

    @property
    def key(self) -> str:
        """Return a name that is unique among all rows."""
        return f"{self.source}: {self.name}"

    @property
    def architecture(self) -> dict[str, Any]:
        """Return the model's configuration as in a `config.json`.

        Raises:
            ValueError: only a model's name is known of this row.
        """
        if "config" not in self.settings:
            raise ValueError(
                f"{self.key}: no architecture is known of {self.settings.get('model')}"
            )
        found: dict[str, Any] = json.loads(
            (FOLDER / "configs" / f"{self.settings['config']}.json").read_text()
        )
        return found


def name_of(settings: Mapping[str, Any]) -> str:
    """Name a row that has no name, by what distinguishes it from its neighbours."""
    peft: Mapping[str, Any] = settings.get("peft_config", {})
    words = [
        settings.get("model") or settings["config"],
        f"{peft['type']} r{peft['r']}" if peft else "full",
        settings.get("quantization", ""),
        {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[settings["dtype"]],
        "autocast" if "autocast" in settings else "",
        f"b{settings['batch']} s{settings['seq_length']}",
        "" if settings["attention"] == "sdpa" else settings["attention"],
        "checkpointing" if settings.get("checkpointing") else "",
    ]
    return " ".join(word for word in words if word)


def rows_of(source: Mapping[str, Any]) -> list[Row]:
    """Read the rows of one source.

    Raises:
        ValueError: something that a reader needs is missing, or a word is unknown.
    """
    of = source.get("name", "a source without a name")
    if lacking := [key for key in SAID if key not in source]:
        raise ValueError(f"{of} does not say {', '.join(lacking)}")
    if unknown := source.keys() - OF_A_SOURCE:
        raise ValueError(f"{of} has unknown keys: {', '.join(sorted(unknown))}")
    if source["unit"] not in UNITS:
        raise ValueError(f"{of}: a unit is one of {', '.join(UNITS)}, got {source['unit']}")
    rows = []
    for written in source.get("rows", ()):
        fields = {**source.get("common", {}), **written}
        missing = (*source["missing"], *fields.pop("missing", ()))
        measured = {
            key: round(fields.pop(key) * UNITS[source["unit"]]) for key in COUNTERS if key in fields
        }
        name = fields.pop("name", None)
        if unknown := fields.keys() - SETTINGS:
            raise ValueError(f"a row of {of} has unknown keys: {', '.join(sorted(unknown))}")
        if not measured:
            raise ValueError(f"a row of {of} measures nothing: {written}")
        if not missing and "config" not in fields:
            raise ValueError(f"a row of {of} is complete, and has no `config`: {written}")
        versions = {key: source[key] for key in ("torch", "transformers", "peft") if key in source}
        versions |= source.get("ran", {})
        loop = source.get("loop", {})
        gpu = str(fields.get("gpu", source.get("gpu", "")))
        rows.append(
            Row(of, name or name_of(fields), fields, measured, missing, gpu, versions, loop)
        )
    if not rows:
        raise ValueError(f"{of} has no rows")
    return rows


def read(text: str) -> list[Row]:
    """Read all rows of such a file.

    Raises:
        ValueError: it is not TOML, a row or a source lacks something, or two rows have one name.
    """
    rows = [row for source in tomllib.loads(text)["source"] for row in rows_of(source)]
    keys = [row.key for row in rows]
    if twice := {key for key in keys if keys.count(key) > 1}:
        raise ValueError(f"rows of one name: {', '.join(sorted(twice))}")
    return rows


def published() -> list[Row]:
    """Return the rows that this project keeps."""
    return read((FOLDER / "published.toml").read_text())
