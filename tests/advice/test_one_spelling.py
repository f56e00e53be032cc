"""Each remedy has one spelling at a door, which stands in `advice` alone; a cause has one order."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainer_plugins
from tests.advice.asked import Said, all_said
from trainer_plugins import advice, checkpointing
from trainer_plugins.advice import Advice, Door
from trainer_plugins.advice.entry import BLANKS
from trainer_plugins.advice.for_causes import (
    FIRST_IN,
    FOR_CAUSE,
    ONE_ROW,
    ONLY_OF_RECORDS,
    ONLY_RUN,
    UNKNOWN,
    order_remedies,
)
from trainer_plugins.advice.vendors import CUDA_ON_WINDOWS, VENDORS
from trainer_plugins.explain.text.frameworks import SPELLED
from trainer_plugins.explain.text.remedies.applies import APPLIES, APPLIES_TO_CAUSE
from trainer_plugins.explain.text.remedies.filled import FILLED

PACKAGE = Path(trainer_plugins.__file__).parent

# Names in the table's lines of Python that are no settings.
PLAIN = {
    "from_pretrained", "load_state_dict", "model_init_kwargs", "quantization_config", "num_workers",
    "max_length", "device_map", "trainer_plugins", "preset",
    "auto_find_batch_size", "target_parameters", "format",
}  # fmt: skip


def marks() -> set[str]:
    """The names of flags, keys and variables that the table spells; a plain word with its dashes."""
    found: set[str] = set()
    for each in advice.ALL.values():
        for door, text in each.spellings.items():
            text = text.replace(checkpointing.NAME, "gradient_checkpointing")
            if door is not Door.PLAN:
                found.update(re.findall(r"--([a-z][\w-]{4,})", text))
                found.update(re.findall(r"\b([a-z]\w*_\w+)\"?\s?[=:](?!=)", text))
                found.update(re.findall(r"\b([A-Z]+_[A-Z_]+)=", text))
                found.update(re.findall(r"--optim (\w+)", text))
    return {name if "_" in name or "-" in name else f"--{name}" for name in found - PLAIN}


MARK = re.compile(rf"(?<![\w-])(?:--)?(?:{'|'.join(sorted(map(re.escape, marks())))})(?![\w-])")

READS = {
    # These read flags, keys and logs, and spell them in patterns and tables of keys.
    "allocator/": "reads and judges settings of the allocator",
    "explain/text/excerpt.py": "finds errors in logs",
    "explain/text/causes/arithmetic.py": "finds settings in logs",
    "explain/text/causes/off_card.py": "finds errors in logs",
    "explain/text/followed.py": "finds settings in logs",
    "explain/text/states.py": "finds settings in logs",
    "explain/text/remedies/__init__.py": "finds settings in logs",
    "explain/text/frameworks.py": "spells advice for files of other programs",
    "explain/text/remedies/applies.py": "finds settings in logs",
    "explain/text/remedies/engine.py": "finds settings in logs",
    "explain/text/remedies/plan_command.py": "writes a plan's options",
    "explain/text/settings.py": "finds settings in logs",
    "planner/inputs.py": "refuses fields of an adapter's config by their names",
    "launch/masked.py": "lists the arguments whose values a record keeps",
    "launch/lint/": "names the keys of the file that it judges",
    "planner/rehearse/": "reads flags of the run that is planned",
    "planner/launched.py": "reads the launch file of the run that is planned",
    "plug_in/options.py": "defines --memory_stream_base",
    "oom/rules.py": "finds settings in messages",
    "strategy.py": "reads the arguments of a run",
    "callbacks/evaluation_guard.py": "names its own parameter, and what the Trainer was given",
    "callbacks/headroom.py": "names its own parameter",
}


def sentences(path: Path) -> Iterator[tuple[int, str]]:
    """The strings of a file that may be read by a user: no docstring, no name alone."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Expr, ast.JoinedStr))
        for part in ast.walk(node)
        if part is not node
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in skipped
        ):
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (each.value for each in node.values if isinstance(each, ast.Constant))
            yield node.lineno, " ".join(map(str, parts))


def spelled(path: Path) -> list[str]:
    found = []
    for line, text in sentences(path):
        is_name = re.fullmatch(r"[\w.\-]+", text) and not text.startswith("--")
        if not is_name and (mark := MARK.search(text)):
            found.append(f"{path.relative_to(PACKAGE)}:{line}: {mark[0]}: {text[:80]!r}")
    return found


def is_in(path: Path, places: object) -> bool:
    name = str(path.relative_to(PACKAGE))
    return name.startswith(tuple(places))  # type: ignore[arg-type]


def test_no_other_room_spells_a_flag_in_a_sentence() -> None:
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if not is_in(path, ("advice/", *READS))]
    assert len(files) > 200
    found = {path: spelled(path) for path in files}
    late = [each for some in found.values() for each in some]
    assert not late, "\n".join(late)


def test_the_marks_find_a_flag_and_no_name() -> None:
    assert {
        "gradient_checkpointing",
        "adamw_bnb_8bit",
        "shm-size",
        "expandable_segments",
    } <= marks()
    assert MARK.search("set gradient_checkpointing=True")
    assert MARK.search("docker run --shm-size=1g")
    assert not MARK.search("is_gradient_checkpointing_on")


def patterns(each: Advice) -> list[str]:
    """Its spellings, for every maker's cards, as patterns: a blank stands for any word."""
    texts = [*each.spellings.values(), each.unfilled, each.unfilled.replace("--", "")]
    texts += [vendor.translate(text) for vendor in VENDORS for text in texts]
    texts += [CUDA_ON_WINDOWS.translate(text) for text in each.spellings.values()]
    blank = rf"(?<![\w$])(?:{'|'.join(BLANKS)})(?!\w)"
    return [r"\S+".join(map(re.escape, re.split(blank, text))) for text in texts if text]


PATTERNS = {name: [re.compile(one) for one in patterns(each)] for name, each in advice.ALL.items()}


def named_in(text: str) -> list[set[str]]:
    """The remedies that a text names, in order; several share the spelling of one flag."""
    found: dict[tuple[int, int], set[str]] = defaultdict(set)
    for name, some in PATTERNS.items():
        for one in some:
            for match in one.finditer(text):
                found[match.start(), -match.end()].add(name)
    kept, end = [], -1
    for (start, last), names in sorted(found.items()):
        if start >= end:  # the longest one that begins there
            kept.append(names)
            end = -last
    return kept


def unspelled(text: str) -> list[str]:
    """The flags in a text that are spelled otherwise than in the table."""
    every = [one for some in PATTERNS.values() for one in some]
    every += [re.compile(re.escape(each)) for each in SPELLED.values()]
    for one in sorted(every, key=lambda one: -len(one.pattern)):  # one may begin as another does
        text = one.sub("", text)
    return MARK.findall(text)


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> list[Said]:
    return list(all_said(tmp_path_factory.mktemp("said")))


def test_what_is_said_is_spelled_as_in_the_table(said: list[Said]) -> None:
    table: dict[str, dict[str, str]] = defaultdict(dict)
    for each in said:
        table[each.cause].setdefault(each.room, each.remedies[0] if each.remedies else "")
    for cause, rooms in sorted(table.items()):
        for room, text in rooms.items():
            print(f"{cause:20} {room:10} {text}")
    assert len(table) > 25
    wrong = [
        f"{each.room}, {each.cause}: {text}: {names}"
        for each in said
        for text in each.remedies
        if not text.startswith("trainer-plugins plan") and (names := unspelled(text))
    ]
    assert not wrong, "\n".join(dict.fromkeys(wrong))


def orders(cause: str, room: str) -> list[tuple[Advice, ...]]:
    found = [order_remedies(cause, room)]  # type: ignore[arg-type]
    return [*found, ONE_ROW, ONLY_RUN, UNKNOWN] if cause == "capacity" else found


SOMETIMES = {*APPLIES, *FILLED, *(each for _, each in APPLIES_TO_CAUSE), advice.DROP_THE_COPY}
SOMETIMES |= {advice.SHORTER_ANSWERS, advice.EMPTY_CACHE_AFTER_EXCEPT}
SOMETIMES |= {each for left_out in ONLY_OF_RECORDS.values() for each in left_out}
"""What fits some runs alone."""


def may_be_first(names: set[str], cause: str, room: str) -> bool:
    """Whether all that comes before it in the table applies only to some runs."""
    for order in orders(cause, room):
        for each in order:
            if any(advice.ALL[name] is each for name in names):
                return True
            if each not in SOMETIMES and not each.only_on:
                break
    return False


def test_each_room_begins_with_the_same_remedy_or_the_table_says_why_not(said: list[Said]) -> None:
    wrong = []
    for each in said:
        if each.cause not in FOR_CAUSE or not each.remedies:
            continue
        first = named_in(each.remedies[0])
        if not first or not may_be_first(first[0], each.cause, each.room):
            wrong.append(f"{each.cause}, {each.room}: {each.remedies[0]} ({first[:1]})")
    assert not wrong, "\n".join(dict.fromkeys(wrong))


def test_what_a_room_begins_with_is_a_remedy_of_its_cause() -> None:
    for (_, cause), first in FIRST_IN.items():
        assert first in FOR_CAUSE[cause]
        assert first is not FOR_CAUSE[cause][0]


@pytest.mark.parametrize("name", advice.ALL)
def test_an_entry_is_whole(name: str) -> None:
    each = advice.ALL[name]
    assert each.spellings
    assert not each.effect.endswith(".")
    # Two entries may be typed alike only if they are the two directions of one setting.
    alike = {
        other
        for other, it in advice.ALL.items()
        if it is not each and set(it.spellings.items()) & set(each.spellings.items())
    }
    assert alike <= {"SMALLER_ENGINE_SHARE", "LARGER_ENGINE_SHARE"}, alike


def test_blanks_are_filled_and_others_refused() -> None:
    rows = advice.SMALLER_MICRO_BATCH
    flags = "--per_device_train_batch_size 4 --gradient_accumulation_steps 16"
    assert rows.flag(Door.TRAINER, rows=4, steps=16) == flags
    assert rows.flag(Door.TRAINER).startswith("halve --per_device_train_batch_size and double")
    assert rows.flag(Door.ARGUMENTS).startswith("halve per_device_train_batch_size and double")
    assert advice.EIGHT_BIT_ADAMW.flag(Door.ARGUMENTS) == 'optim="adamw_bnb_8bit"'
    assert advice.END_PROCESS.flag(Door.SHELL) == "kill PID"
    with pytest.raises(ValueError, match="VLLM"):
        rows.flag(Door.VLLM)
    with pytest.raises(ValueError, match="row"):
        rows.flag(Door.TRAINER, row=4)


@pytest.mark.parametrize(
    ("share", "missing", "new"), [(0.9, 0.0, 0.78), (0.2, 0.0, 0.15), (0.3, 0.4, 0.15), (0.9, 0.01, 0.85)]
)  # fmt: skip
def test_an_engines_share_is_lowered_from_what_it_is(
    share: float, missing: float, new: float
) -> None:
    assert advice.smaller_share(share, missing) == new
