"""override_of: how the command line of a Hydra app changes one of the TrainingArguments."""

import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

_FEWEST_NAMES = 2
"""A part of a config that has one name of TrainingArguments, as `seed`, may be anything."""


def override_of(names: Collection[str]) -> str:
    """Return what an override begins with, as `++trainer.args.`.

    That is the part of the config with most of these names. The text is empty outside Hydra's jobs,
    and where no part has two of them. Hydra writes the config of a job to a file before the job
    begins; that file is read.
    """
    module: Any = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return ""
    from omegaconf import OmegaConf

    job = module.HydraConfig.get()
    if job.output_subdir is None:
        return ""
    file = Path(job.runtime.output_dir, job.output_subdir, "config.yaml")
    counted = {
        prefix: len(part.keys() & set(names))
        for prefix, part in _parts(OmegaConf.to_container(OmegaConf.load(file)), "++")
    }
    prefix = max(counted, key=lambda each: counted[each], default="")
    return prefix if counted.get(prefix, 0) >= _FEWEST_NAMES else ""


def _parts(value: object, prefix: str) -> Iterator[tuple[str, Mapping[str, object]]]:
    if isinstance(value, Mapping):
        yield prefix, value
        for name, inner in value.items():
            yield from _parts(inner, f"{prefix}{name}.")
