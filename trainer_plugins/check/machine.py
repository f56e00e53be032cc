"""Judges the cards of a machine: which are seen, and who else holds memory on them."""

from collections.abc import Callable, Iterator

from trainer_plugins.check.facts import CardFacts, Facts, Line, Owner
from trainer_plugins.check.visible import Visible, visible
from trainer_plugins.finding import Finding, Severity
from trainer_plugins.units import size
from trainer_plugins.watch.foreign import context_allowance_bytes, foreign_memory

_AMPERE = (8, 0)


def cards(facts: Facts) -> Line:
    """Judge which cards a process will see, and whether the driver answers for them."""
    if facts.driver_trouble:
        return Line("cards", "", (_silent("the cards", facts.driver_trouble, "Mend the driver"),))
    if not facts.cards:
        return Line("cards", facts.no_cards or "none")
    if facts.own_pids:  # this process has its card already
        return Line("cards", _named(facts.cards))
    seen = _seen(facts)
    shown = [card for card in facts.cards if _is_shown(card, seen)]
    findings = [*_visibility(facts, seen), *filter(None, map(_answer, facts.cards))]
    return Line("cards", f"{_named(shown)} of {len(facts.cards)}", tuple(findings))


def memory_of_others(facts: Facts) -> Line | None:
    """Judge how much other processes hold on each card that will be used."""
    used = [card for card in cards_in_use(facts) if card.reading is not None]
    if not used:
        return None
    free = ", ".join(size(card.reading.free_bytes) for card in used if card.reading)
    findings = (_foreign(card, facts.own_pids) for card in used)
    return Line("free memory", f"{free} free", tuple(filter(None, findings)))


def earlier_runs(facts: Facts) -> Line | None:
    """Judge what earlier runs and other ranks have left on the cards that will be used."""
    used = cards_in_use(facts)
    if not any(card.owners for card in used):
        return None
    owners = [owner for card in used for owner in card.owners or ()]
    others = [owner for owner in owners if owner.process.pid not in facts.own_pids]
    findings = [found for owner in others for found in _left(owner)]
    return Line("processes", "none of an earlier run", (*findings, *_strays(facts)))


def precision(facts: Facts) -> Line | None:
    """Judge whether the cards compute in the precision that was asked for."""
    known = [card for card in cards_in_use(facts) if card.capability is not None]
    if not known:
        return None
    old = [card for card in known if card.capability and card.capability < _AMPERE]
    if not old:
        return Line("precision", "bf16, TF32 and flash attention")
    asks = facts.run is not None and facts.run.flag("bf16")
    said = "no bf16, TF32 or flash attention: fp16"
    if not asks:
        return Line("precision", said)
    number = ".".join(map(str, old[0].capability or ()))
    finding = Finding(
        code="bf16-emulated",
        severity=Severity.WARNING,
        summary=f"{old[0].name} computes bf16 by emulation, through float32",
        evidence=f"compute capability {number}; bf16 and flash attention need 8.0",
        remedy="Take --fp16 in place of --bf16",
    )
    return Line("precision", said, (finding,))


def cards_in_use(facts: Facts) -> list[CardFacts]:
    """Return the cards that a process will see, or this one's card once it has one."""
    if facts.own_pids:
        return list(facts.cards)
    seen = _seen(facts)
    return [card for card in facts.cards if _is_shown(card, seen)]


CHECKS: tuple[Callable[[Facts], Line | None], ...] = (
    cards,
    memory_of_others,
    earlier_runs,
    precision,
)


def _seen(facts: Facts) -> Visible:
    text = facts.environment.visible if facts.environment is not None else None
    return visible(text, facts.cards)


def _is_shown(card: CardFacts, seen: Visible) -> bool:
    return not {card.uuid, *card.slices}.isdisjoint(seen.uuids)


def _named(cards: list[CardFacts] | tuple[CardFacts, ...]) -> str:
    names = [card.name or card.uuid for card in cards]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"


def _visibility(facts: Facts, seen: Visible) -> Iterator[Finding]:
    text = facts.environment.visible if facts.environment is not None else None
    given = f"CUDA_VISIBLE_DEVICES={text}"
    uuids = "; ".join(f"{number}: {card.uuid}" for number, card in enumerate(facts.cards))
    if seen.trouble:
        yield Finding(
            code="card-not-visible",
            severity=Severity.WARNING if seen.uuids else Severity.ERROR,
            summary=f"CUDA will show {len(seen.uuids)} of {len(facts.cards)} cards: {seen.trouble}",
            evidence=f"{given}; the driver has {uuids}",
            remedy="Name cards by their UUIDs, as `nvidia-smi -L` prints them",
        )
    order = facts.environment.card_order if facts.environment is not None else ""
    if seen.by_number and len({card.name for card in facts.cards}) > 1 and order != "PCI_BUS_ID":
        yield Finding(
            code="card-order",
            severity=Severity.WARNING,
            summary="the numbers in CUDA_VISIBLE_DEVICES may mean other cards than in nvidia-smi",
            evidence=f"{given} and {_named(facts.cards)}: CUDA puts the fastest first "
            "(pytorch#86539)",
            remedy="export CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )
    slices = [uuid for uuid in seen.uuids if uuid.startswith("MIG-")]
    if text is not None and len(slices) > 1:
        yield Finding(
            code="mig-one-slice",
            severity=Severity.WARNING,
            summary=f"a process uses one MIG slice, and CUDA_VISIBLE_DEVICES names {len(slices)}",
            evidence=f"{given}; CUDA enumerates a single compute instance (pytorch#92315)",
            remedy="Start a process for each slice, each with its own CUDA_VISIBLE_DEVICES",
        )


def _answer(card: CardFacts) -> Finding | None:
    if not card.trouble:
        return None
    remedy = f"Leave {card.uuid} out of CUDA_VISIBLE_DEVICES until it does"
    return _silent(card.name or card.uuid, card.trouble, remedy)


def _silent(what: str, trouble: str, remedy: str) -> Finding:
    return Finding(
        code="card-not-answering",
        severity=Severity.ERROR,
        summary=f"the driver does not answer for {what}",
        evidence=trouble,
        remedy=remedy,
    )


def _foreign(card: CardFacts, own_pids: frozenset[int]) -> Finding | None:
    assert card.reading is not None
    processes = None if card.owners is None else tuple(owner.process for owner in card.owners)
    allowance = context_allowance_bytes(card.reading.total_bytes) if own_pids else 0
    return foreign_memory(card.reading, allowance, processes, own_pids)


def _left(owner: Owner) -> Iterator[Finding]:
    process = owner.process
    held = "memory" if process.used_bytes is None else size(process.used_bytes)
    if "ipykernel" in owner.command:
        yield Finding(
            code="notebook-holds-card",
            severity=Severity.WARNING,
            summary=f"a notebook kernel holds {held}: the model of an earlier cell is alive there",
            evidence=f"pid {process.pid}: {owner.command}",
            remedy="Restart or shut down that kernel in Jupyter",
        )
    elif owner.is_orphan:
        yield Finding(
            code="leftover-process",
            severity=Severity.WARNING,
            summary=f"a process whose launcher is gone holds {held}: it is left of an earlier run",
            evidence=f"pid {process.pid}: {owner.command}",
            remedy=f"If it does no work any more: kill {process.pid}",
        )


def _strays(facts: Facts) -> Iterator[Finding]:
    """Find ranks that hold a context on a card beside their own."""
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
    yield Finding(
        code="stray-context",
        severity=Severity.WARNING,
        summary=f"{len(strays)} process(es) hold a context on {card.name or card.uuid} beside their"
        " own card",
        evidence=f"pids {', '.join(map(str, strays))}, {size(least)} and more each"
        " (pytorch#23138: 725 MB)",
        remedy="Call torch.cuda.set_device(local_rank) before anything touches CUDA, and load with"
        " map_location='cpu'",
    )
