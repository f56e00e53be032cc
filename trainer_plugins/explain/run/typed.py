"""as_typed: a remedy as this run's command line takes it, which may be Hydra's."""

import re
from dataclasses import replace

from trainer_plugins.explain.answer import Remedy
from trainer_plugins.record.run_facts import RunFacts

_FLAG = re.compile(r"--(\w+) (\S+)")


def flags_of(do: str) -> dict[str, str]:
    """Read the arguments of a remedy; there are none if it is anything besides.

    >>> flags_of("--optim adafactor"), flags_of("loss.item()")
    ({'optim': 'adafactor'}, {})
    """
    return dict(_FLAG.findall(do)) if re.fullmatch(r"(--\w+ \S+ ?)+", do) else {}


def as_typed(remedy: Remedy, run: RunFacts) -> Remedy:
    """Write TrainingArguments as overrides, and a preset as a word, if Hydra made the run."""
    if not run.override:
        return remedy
    if remedy.do.startswith("trainer-plugins exec --preset survive"):
        return replace(remedy, do="+trainer_plugins=survive")
    flags = flags_of(remedy.do)
    if not flags or not flags.keys() <= run.arguments.keys():
        return remedy
    typed = " ".join(f"{run.override}{name}={value}" for name, value in flags.items())
    return replace(remedy, do=typed)
