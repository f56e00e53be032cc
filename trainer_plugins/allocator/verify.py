"""Compare the allocator settings that were asked for with those in use, and explain differences."""

from dataclasses import dataclass, field

from trainer_plugins.allocator.machine import Machine, expandable_blocker
from trainer_plugins.allocator.options import OPTION_OF, Kind
from trainer_plugins.allocator.settings import Value, read
from trainer_plugins.allocator.variables import CUDA, Variables, names_read
from trainer_plugins.finding import Finding, Severity

_FLAGS: dict[str, Value] = {
    key: False for key, option in OPTION_OF.items() if option.kind is Kind.FLAG
}
_DEFAULTS: dict[str, Value] = {
    **_FLAGS,
    "backend": "native",
    "pinned_num_register_threads": 1,
    "per_process_memory_fraction": 1.0,
}


@dataclass(frozen=True, slots=True)
class InForce:
    """Holds what the allocator of this process uses."""

    text: str = ""  # the text that torch read last, from a variable or a call
    # what the allocator reports: it wins over the text; None: not set
    known: dict[str, Value | None] = field(default_factory=dict)
    is_initialized: bool = False  # whether the allocator has started its work
    refusal: str | None = None  # torch's error if it could not read its settings

    def value(self, key: str) -> Value | None:
        """Return the value of an option; None if it is not set and has no default."""
        if key in self.known:
            return self.known[key]
        return read(self.text)[0].values.get(key, _DEFAULTS.get(key))


def verify(asked: str, in_force: InForce, variables: Variables, machine: Machine) -> Finding | None:
    """Judge whether the settings that were asked for are the ones in use."""
    wanted = read(asked)[0].values
    differing = [key for key in wanted if in_force.value(key) != wanted[key]]
    if in_force.refusal is None and not differing:
        return None
    why, remedy = _reason(wanted, in_force, variables, machine)
    seen = ", ".join(
        f"{key} is {in_force.value(key)} instead of {wanted[key]}" for key in differing
    )
    return Finding(
        code="allocator-settings-not-in-force",
        severity=Severity.WARNING,
        summary=f"the allocator does not use the settings that were asked for: {why}",
        evidence=f"asked {asked}; in force {in_force.text or 'nothing'!r}"
        + (f"; {seen}" if seen else ""),
        remedy=remedy,
    )


def _reason(
    wanted: dict[str, Value], in_force: InForce, variables: Variables, machine: Machine
) -> tuple[str, str]:
    """Return why they differ and what to do, by the first cause that applies."""
    if in_force.refusal is not None:
        return (
            f"torch refused to read them ({in_force.refusal})",
            "Correct the text: `trainer-plugins env` says what is wrong.",
        )
    holders = [name for name, text in variables.texts.items() if _holds(text, wanted)]
    if not holders:
        return (
            "no variable of this process holds them",
            'Export them in the shell that launches: eval "$(trainer-plugins env)".',
        )
    read_name = variables.read_by(machine)
    if not set(holders) & set(names_read(machine)):
        return f"{machine.torch_name} does not read {holders[0]}", f"Set {CUDA} to the same."
    if read_name not in holders:
        other = f"{read_name}={variables.texts[str(read_name)]}"
        return (
            f"{other} takes precedence over {holders[0]}",
            f"Unset {read_name}, or give it the same text.",
        )
    if not _holds(in_force.text, wanted):
        return (
            f"torch had read {read_name} before it was set, or a call changed the settings since"
            + (", and the allocator is already at work" if in_force.is_initialized else ""),
            "Set it before the process starts: torch reads it once, when it first uses the card.",
        )
    blocker = expandable_blocker(machine) if "expandable_segments" in wanted else None
    return (
        "torch has read them and uses something else"
        f" ({blocker or 'a build without that option, or a call since'})",
        "Remove what has no effect here.",
    )


def _holds(text: str, wanted: dict[str, Value]) -> bool:
    have = InForce(text)
    return all(have.value(key) == value for key, value in wanted.items())
