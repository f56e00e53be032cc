"""Choose which allocator settings to export before a launch."""

from dataclasses import dataclass

from trainer_plugins.allocator.lint import lint_text
from trainer_plugins.allocator.machine import Machine, expandable_blocker
from trainer_plugins.allocator.variables import CUDA, UNIFIED, Variables
from trainer_plugins.finding import Severity

OURS = "expandable_segments:True"  # torch's own cure for fragmentation (pytorch#113481)


@dataclass(frozen=True, slots=True)
class Choice:
    """Holds what to export, and one line that says why, even if there is nothing to export."""

    exports: dict[str, str]
    why: str


def choose(variables: Variables, machine: Machine) -> Choice:
    """Choose the allocator settings of a launch; what the user set is kept, under both names.

    torch 2.9 reads only the old one (pytorch#183387), and vLLM looks at one only (vllm#54351).
    """
    own = variables.of_platform(machine)
    if not own:
        blocker = expandable_blocker(machine)
        if blocker:
            return Choice({}, f"no allocator settings: {blocker}")
        return Choice(
            {CUDA: OURS}, "expandable segments, against fragmentation; every torch reads this"
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
