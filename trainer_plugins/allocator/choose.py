"""Choose which allocator settings to export before a launch."""

from dataclasses import dataclass

from trainer_plugins.allocator.lint import lint_text
from trainer_plugins.allocator.machine import Machine, expandable_blocker
from trainer_plugins.allocator.variables import CUDA, UNIFIED, Variables, names_read
from trainer_plugins.finding import Severity

OURS = "expandable_segments:True"
"""torch's own cure for fragmentation (pytorch#113481), alone: `lint` says what must not join it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Holds what to export, and one line that says why, even if there is nothing to export."""

    exports: dict[str, str]
    why: str


def choose(variables: Variables, machine: Machine) -> Choice:
    """Choose the allocator settings of a launch.

    Settings of the user are kept: never changed and never extended. They are exported under both
    names, so that every version of torch reads them, and so do programs that look at one name only
    (vLLM: vllm#54351). Exceptions are texts that torch refuses and pairs of options that hurt.

    If the user set nothing and nothing speaks against it, the answer is `expandable_segments:True`
    under the one name that this torch reads: 2.9 only reads the old one (pytorch#183387).
    """
    own = variables.of_platform(machine)
    if not own:
        blocker = expandable_blocker(machine)
        if blocker:
            return Choice({}, f"no allocator settings: {blocker}")
        name = UNIFIED if UNIFIED in names_read(machine) else CUDA
        return Choice(
            {name: OURS},
            f"expandable segments, against fragmentation; {machine.torch_name} reads {name}",
        )
    if len(set(own.values())) > 1:
        return Choice({}, f"no allocator settings: you set {' and '.join(own)} to different values")
    (text,) = set(own.values())
    if any(
        finding.severity is Severity.ERROR for finding in lint_text(text, next(iter(own)), machine)
    ):
        return Choice(
            {}, f"no allocator settings: those in {next(iter(own))} are wrong and stay as they are"
        )
    return Choice(dict.fromkeys((CUDA, UNIFIED), text), f"your {next(iter(own))}, under both names")
