"""Choose what to export before a launch."""

from dataclasses import dataclass

from trainer_plugins.allocator.lint import lint_text
from trainer_plugins.allocator.machine import Machine
from trainer_plugins.allocator.platforms import expandable_blocker
from trainer_plugins.allocator.variables import CUDA, UNIFIED, Variables, names_read
from trainer_plugins.finding import Severity

OURS = "expandable_segments:True"
"""torch's own cure for fragmentation (pytorch#113481), and nothing beside it: see `lint` for what must not be."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What to export, and why: one line, also where there is nothing to export."""

    exports: dict[str, str]
    why: str


def choose(variables: Variables, machine: Machine) -> Choice:
    """Choose the settings of a launch.

    What the user has set is kept, never changed and never added to.

    It is mirrored to both names, so that every version of torch reads it, and so do the programs
    that look at one name only (vLLM: vllm#54351). Not where that would bring a mistake into force:
    what torch refuses, a pair that hurts.

    Where the user has set nothing, and nothing speaks against it, the answer is
    `expandable_segments:True` under the one name that this torch reads: 2.9 reads the old one alone
    (pytorch#183387).
    """
    own = variables.of_platform(machine)
    if not own:
        blocker = expandable_blocker(machine)
        if blocker:
            return Choice({}, f"no allocator settings: {blocker}")
        name = UNIFIED if UNIFIED in names_read(machine) else CUDA
        return Choice(
            {name: OURS},
            f"segments that grow, against fragmentation; {name} is what {machine.torch_name} reads",
        )
    if len(set(own.values())) > 1:
        return Choice({}, f"no allocator settings: {' and '.join(own)} differ, and both are yours")
    (text,) = set(own.values())
    if any(
        finding.severity is Severity.ERROR for finding in lint_text(text, next(iter(own)), machine)
    ):
        return Choice(
            {}, f"no allocator settings: those in {next(iter(own))} are wrong, and stay as they are"
        )
    return Choice(
        dict.fromkeys((CUDA, UNIFIED), text), f"your own {next(iter(own))}, under both of its names"
    )
