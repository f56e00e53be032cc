"""Judges allocator settings before a launch (names, values, pairs), and chooses what to export."""

from collections.abc import Iterator, Mapping, Sequence

from trainer_plugins.allocator.machine import TESTED, Machine, expandable_blocker
from trainer_plugins.allocator.settings import (
    OPTION_OF,
    Setting,
    SettingsError,
    UnknownOptionError,
    read,
    values_of,
)
from trainer_plugins.allocator.variables import CUDA, UNIFIED, find_read, names_known, pick
from trainer_plugins.finding import Finding, Severity

OURS = "expandable_segments:True"  # torch's own cure for fragmentation (pytorch#113481)


def lint(texts: Mapping[str, str], machine: Machine) -> tuple[Finding, ...]:
    """Judge the variables of a launch: first their names, then the text that takes effect."""
    own = pick(texts, names_known(machine))
    name = find_read(texts, machine) or next(iter(own), None)
    return (*_names(texts, machine), *(lint_text(own[name], name, machine) if name else ()))


def lint_text(text: str, name: str, machine: Machine) -> tuple[Finding, ...]:
    """Judge a text of settings as torch would find it under `name`."""
    settings, errors = read(text)
    given = f"{name}={text}"
    return (
        *(_report_refusal(error, given, machine) for error in errors),
        *_values(settings, given, machine),
        *_pairs(settings, given, machine),
    )


def _report_refusal(error: SettingsError, given: str, machine: Machine) -> Finding:
    if isinstance(error, UnknownOptionError):
        return Finding(
            code="allocator-unknown-option",
            severity=Severity.ERROR if machine.torch <= TESTED else Severity.WARNING,
            summary=str(error),
            evidence=given,
            remedy="Correct or remove it: torch raises when it first uses the card, and a"
            " CPU build ignores it.",
        )
    return Finding.error(
        code="allocator-bad-value",
        summary=str(error),
        evidence=given,
        remedy="Correct it: torch raises when it first reads it.",
    )


def _names(texts: Mapping[str, str], machine: Machine) -> Iterator[Finding]:
    read_name = find_read(texts, machine)
    foreign = [name for name in texts if name not in names_known(machine)]
    if foreign or (texts and read_name is None):
        ignored = foreign[0] if foreign else next(iter(texts))
        of_rocm = "only a ROCm build of torch reads it"
        why = of_rocm if foreign else f"on a card {machine.torch_name} only reads {CUDA}"
        yield Finding(
            code="allocator-name-not-read",
            severity=Severity.ERROR if read_name is None else Severity.WARNING,
            summary=f"{ignored} is set, but this torch does not read it",
            evidence=f"{ignored}={texts[ignored]}; {why}",
            remedy=f"Set {CUDA} to the same text: every version reads it.",
        )
    own = pick(texts, names_known(machine))
    if read_name and len(set(own.values())) > 1:
        yield Finding.warning(
            code="allocator-names-differ",
            summary=f"two variables hold different allocator settings; {read_name} counts",
            evidence=f"{'; '.join(f'{name}={text}' for name, text in own.items())};"
            f" {machine.torch_name}",
            remedy=f"Give both the same text, or unset all but {read_name}.",
        )
    if read_name == CUDA and machine.torch == (2, 9):
        yield Finding(
            code="allocator-deprecated-name",
            severity=Severity.INFO,
            summary=f"torch 2.9 calls {CUDA} deprecated, but reads no other name on a card",
            evidence=f"{CUDA}={texts[CUDA]}; pytorch#183387",
            remedy=f"Keep it, and set {UNIFIED} to the same text. From 2.10 on there is no warning,"
            " and both work.",
        )


def _values(settings: Sequence[Setting], given: str, machine: Machine) -> Iterator[Finding]:
    for setting in settings:
        option = OPTION_OF[setting.key]
        if setting.misread:
            yield Finding.warning(
                code="allocator-misread-value",
                summary=f"torch reads {setting.key} as {setting.value}, which is not what it says",
                evidence=given,
                remedy=f"Write a plain number for {setting.text}: sizes in MiB, fractions of one;"
                " no unit, no sign.",
            )
        if machine.torch < option.since:
            yield Finding.error(
                code="allocator-option-too-new",
                summary=f"{machine.torch_name} does not know {setting.key}, and raises when it"
                " first uses the card",
                evidence=f"{given}; it came with torch {option.since[0]}.{option.since[1]}",
                remedy="Remove it, or upgrade torch.",
            )


def _pairs(settings: Sequence[Setting], given: str, machine: Machine) -> Iterator[Finding]:
    values = values_of(settings)
    native = [key for key in values if key != "backend"]
    if values.get("backend", "native") != "native":
        if native:
            yield Finding.warning(
                code="allocator-async-ignores",
                summary=f"the backend {values['backend']} ignores {', '.join(native)}",
                evidence=f"{given}; some memory statistics are 0 under it"
                " (CUDAAllocatorConfig.cpp warns)",
                remedy="Remove those options, or the backend.",
            )
        return
    if not values.get("expandable_segments"):
        return
    if "max_split_size_mb" in values:
        yield Finding.error(
            code="allocator-expandable-and-max-split",
            summary="expandable_segments with max_split_size_mb lets reserved memory grow without"
            " bound",
            evidence=f"{given}; pytorch#123548, 220 MiB became 14060 MiB in pytorch#193400",
            remedy="Remove max_split_size_mb: expandable segments do its work.",
        )
    if "garbage_collection_threshold" in values:
        yield Finding(
            code="allocator-expandable-and-gc",
            severity=Severity.INFO,
            summary="garbage_collection_threshold has no effect on expandable segments",
            evidence=f"{given}; the collector skips them (pytorch#134338)",
            remedy="Remove garbage_collection_threshold.",
        )
    if blocker := expandable_blocker(machine):
        yield Finding.warning(
            code="allocator-expandable-unsupported",
            summary="expandable_segments:True does not work here, or is harmful",
            evidence=f"{given}; {blocker}",
            remedy="Remove expandable_segments, or set it to False.",
        )


def choose(texts: Mapping[str, str], machine: Machine) -> tuple[dict[str, str], str]:
    """Choose the allocator settings of a launch. The user's own are kept, under both names.

    Returns the variables to export, and a line of explanation, even if there are none.
    torch 2.9 reads only the old name (pytorch#183387), and vLLM looks at one only (vllm#54351).
    """
    own = pick(texts, names_known(machine))
    if not own:
        if blocker := expandable_blocker(machine):
            return {}, f"no allocator settings: {blocker}"
        return {CUDA: OURS}, "expandable segments, against fragmentation; every torch reads this"
    if len(set(own.values())) > 1:
        return {}, f"no allocator settings: you set {' and '.join(own)} to different values"
    name, text = next(iter(own.items()))
    if any(finding.severity is Severity.ERROR for finding in lint_text(text, name, machine)):
        return {}, f"no allocator settings: those in {name} are wrong and stay unchanged"
    return dict.fromkeys((CUDA, UNIFIED), text), f"your {name}, under both names"
