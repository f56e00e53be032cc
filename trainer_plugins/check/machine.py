"""Judge the cards of a machine: which are visible, and who else holds memory on them."""

from collections.abc import Iterator, Sequence

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.check.facts import CardFacts, Check, CheckLine, Facts, Owner
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.reading import MemoryReading
from trainer_plugins.units import size
from trainer_plugins.watch.foreign import context_allowance_bytes, foreign_memory

_AMPERE = (8, 0)
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_NUMBER = "a number"
_KINDS = {"GPU-": "a card's UUID", "MIG-": "a MIG slice"}


def cards(facts: Facts) -> CheckLine:
    """Judge which cards a process will see, and whether the driver can read them."""
    if facts.driver_trouble:
        remedy = "Repair the driver: `nvidia-smi` must work first"
        return CheckLine("cards", "", (_silent("the cards", facts.driver_trouble, remedy),))
    if not facts.cards:
        return CheckLine("cards", facts.no_cards or "none")
    if facts.own_pids:  # this process has its card already
        return CheckLine("cards", _name_cards(facts.cards))
    silent = []
    for card in facts.cards:
        if card.trouble:
            remedy = f"Leave {card.uuid} out of {_VISIBLE} until it does"
            silent.append(_silent(card.name or card.uuid, card.trouble, remedy))
    seen = f"{_name_cards(cards_in_use(facts))} of {len(facts.cards)}"
    return CheckLine("cards", seen, (*_visibility(facts), *silent))


def memory_of_others(facts: Facts) -> CheckLine | None:
    """Judge the memory of other processes on each card in use."""
    free, found = [], []
    for card in cards_in_use(facts):
        if card.reading is not None:
            free.append(size(card.reading.free_bytes))
            owners = card.owners
            processes = None if owners is None else tuple(owner.process for owner in owners)
            allowance = context_allowance_bytes(card.reading.total_bytes) if facts.own_pids else 0
            found.append(foreign_memory(card.reading, allowance, processes, facts.own_pids))
    if not free:
        return None
    return CheckLine("free memory", f"{', '.join(free)} free", tuple(filter(None, found)))


def earlier_runs(facts: Facts) -> CheckLine | None:
    """Judge the leftovers of earlier runs and of other ranks on the cards in use."""
    owners = [owner for card in cards_in_use(facts) for owner in card.owners or ()]
    if not owners:
        return None
    others = [owner for owner in owners if owner.process.pid not in facts.own_pids]
    left = filter(None, map(_judge_leftover, others))
    return CheckLine("processes", "none of an earlier run", (*left, *_strays(facts)))


def precision(facts: Facts) -> CheckLine | None:
    """Judge whether the cards support the requested precision."""
    known = [(each.capability, each.name) for each in cards_in_use(facts) if each.capability]
    if not known:
        return None
    capability, name = min(known, key=lambda each: each[0] >= _AMPERE)  # the first old one, if any
    if capability >= _AMPERE:
        return CheckLine("precision", "bf16, TF32 and flash attention")
    seen = "no bf16, TF32 or flash attention: fp16"
    if not facts.run.flag("bf16"):
        return CheckLine("precision", seen)
    number = ".".join(map(str, capability))
    finding = Finding.warning(
        code="bf16-emulated",
        summary=f"{name} emulates bf16 in float32",
        evidence=f"compute capability {number}; bf16 and flash attention need 8.0",
        remedy="Use --fp16 instead of --bf16",
    )
    return CheckLine("precision", seen, (finding,))


def cards_in_use(facts: Facts) -> list[CardFacts]:
    """Return the cards that a process will see, or this process's card once it has one."""
    if facts.own_pids:
        return list(facts.cards)
    uuids, _ = _visible(facts)
    return [card for card in facts.cards if not {card.uuid, *card.slices}.isdisjoint(uuids)]


def fullest_card(facts: Facts) -> tuple[CardFacts, MemoryReading] | None:
    """Return the card in use with the least free memory, and its reading; None if there is none."""
    read = [(card, card.reading) for card in cards_in_use(facts) if card.reading is not None]
    return min(read, key=lambda each: each[1].free_bytes, default=None)


CHECKS: tuple[Check, ...] = (cards, memory_of_others, earlier_runs, precision)


def _name_cards(cards: Sequence[CardFacts]) -> str:
    names = [card.name or card.uuid for card in cards]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"


def _silent(what: str, trouble: str, remedy: str) -> Finding:
    return Finding.error(
        code="card-not-answering",
        summary=f"the driver does not answer for {what}",
        evidence=trouble,
        remedy=remedy,
    )


def _visibility(facts: Facts) -> Iterator[Finding]:
    environ = facts.environ
    visible = environ.get(_VISIBLE, "").strip()
    if not visible:  # an empty list hides all on purpose
        return
    uuids, trouble = _visible(facts)
    given = f"{_VISIBLE}={visible}"
    if trouble:
        all_of_them = "; ".join(f"{number}: {card.uuid}" for number, card in enumerate(facts.cards))
        yield Finding(
            code="card-not-visible",
            severity=Severity.WARNING if uuids else Severity.ERROR,
            summary=f"CUDA will show {len(uuids)} of {len(facts.cards)} cards: {trouble}",
            evidence=f"{given}; the driver has {all_of_them}",
            remedy="Name cards by their UUIDs, as `nvidia-smi -L` prints them",
        )
    num_kinds = len({card.name for card in facts.cards})
    is_by_number = _kind(visible) == _NUMBER
    if is_by_number and num_kinds > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        yield Finding.warning(
            code="card-order",
            summary=f"the numbers in {_VISIBLE} may mean other cards than in nvidia-smi",
            evidence=f"{_name_cards(facts.cards)}: CUDA puts the fastest first (pytorch#86539)",
            remedy="export CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )
    slices = [uuid for uuid in uuids if uuid.startswith("MIG-")]
    if len(slices) > 1:
        yield Finding.warning(
            code="mig-one-slice",
            summary=f"a process uses one MIG slice, and {_VISIBLE} names {len(slices)}",
            evidence=f"{given}; CUDA enumerates a single compute instance (pytorch#92315)",
            remedy=f"Start a process for each slice, each with its own {_VISIBLE}",
        )


def _judge_leftover(owner: Owner) -> Finding | None:
    process = owner.process
    held = "memory" if process.used_bytes is None else size(process.used_bytes)
    if "ipykernel" in owner.command:
        return Finding.warning(
            code="notebook-holds-card",
            summary=f"a notebook kernel holds {held}: the model of an earlier cell is still alive",
            evidence=f"pid {process.pid}: {owner.command}",
            remedy="Restart or shut down that kernel in Jupyter",
        )
    if owner.is_orphan:
        return Finding.warning(
            code="leftover-process",
            summary=f"a process of an earlier run, whose launcher is gone, holds {held}",
            evidence=f"pid {process.pid}: {owner.command}",
            remedy=f"If it is idle: {advice.END_PROCESS.flag(Door.SHELL, pid=process.pid)}",
        )
    return None


def _strays(facts: Facts) -> Iterator[Finding]:
    """Find ranks that hold a context on a card other than their own."""
    held = [
        (owner, owner.process.used_bytes or 0, card)
        for card in facts.cards
        for owner in card.owners or ()
        if card.reading is not None
    ]
    most: dict[int, int] = {}
    for owner, num_bytes, _ in held:
        most[owner.process.pid] = max(num_bytes, most.get(owner.process.pid, 0))
    strays = {
        owner.process.pid: (num_bytes, card)
        for owner, num_bytes, card in held
        if (owner.is_peer or num_bytes < most[owner.process.pid])
        and num_bytes <= context_allowance_bytes(card.reading.total_bytes if card.reading else 0)
    }
    if not strays:
        return
    least, card = next(iter(strays.values()))
    who = "a rank holds" if len(strays) == 1 else f"{len(strays)} ranks hold"
    yield Finding.warning(
        code="stray-context",
        summary=f"{who} a second CUDA context, on {card.name or card.uuid}",
        evidence=f"pids {', '.join(map(str, strays))}, {size(least)} or more each (pytorch#23138)",
        remedy=f"{advice.OWN_CARD_FIRST.flag(Door.CODE)}; and load with"
        f" {advice.LOAD_INTO_MAIN_MEMORY.flag(Door.CODE)}",
    )


def _visible(facts: Facts) -> tuple[list[str], str]:
    """Return the cards and slices that a process will see, and why some entries are lost.

    CUDA reads CUDA_VISIBLE_DEVICES from the left, up to the first entry that matches nothing.
    """
    # CUDA C++ Programming Guide, "CUDA Environment Variables"
    text = facts.environ.get(_VISIBLE)
    if text is None:
        return [each for card in facts.cards for each in card.slices[:1] or (card.uuid,)], ""
    found: list[str] = []
    entries = [entry.strip() for entry in text.split(",")] if text.strip() else []
    for entry in entries:
        kind, first = _kind(entry), _kind(entries[0])
        if kind != first:
            why = f"{entry} is {kind}, and the list began with {first}: they cannot be mixed"
            return found, why
        named = _match_entry(entry, facts.cards)
        if len(named) != 1:
            return found, f"{entry} names {len(named) or 'none'} of them"
        if named[0] in found:
            # torch/cuda/__init__.py, _parse_visible_devices: then CUDA reports no devices
            return [], f"{entry} names a card twice, so CUDA shows none"
        found += named
    return found, ""


def _kind(entry: str) -> str:
    return _KINDS.get(entry[:4], _NUMBER)


def _match_entry(entry: str, cards: Sequence[CardFacts]) -> list[str]:
    """Return the UUIDs of the cards or slices that an entry names, by number or by prefix."""
    if _kind(entry) == _NUMBER:
        numbers = [int(entry)] if entry.isdecimal() else []
        return [cards[number].uuid for number in numbers if number < len(cards)]
    uuids = (each for card in cards for each in (card.uuid, *card.slices))
    return [uuid for uuid in uuids if uuid.startswith(entry)]
