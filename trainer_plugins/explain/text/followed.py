"""Judge whether a text says that a remedy is already set, or was tried."""

import re
from collections.abc import Iterator
from functools import cache

from trainer_plugins import advice, checkpointing
from trainer_plugins.advice import Advice
from trainer_plugins.advice.entry import BLANKS
from trainer_plugins.explain.text.frameworks import SPELLED
from trainer_plugins.explain.text.text_facts import TextFacts

# A setting in a spelling: `--name value`, `name=value`, `"name": value`.
_SETTING = re.compile(
    r"(?=--([\w.-]{4,60})[= ]([\w.]+)|\b([a-zA-Z][\w.]{3,60})[\"']?(?:=|: ?)[\"']?([\w.]+))"
)
_CALL = re.compile(r"\b(\w{6,60})\(\)")
_PREFIX = re.compile(r"^(?:use|enable|load_in|dataloader|per_device)[_-]")
_ON = r"(?:True|true|1|on|enabled)"
# How people say that they have done something, before and after its name.
_DONE = (
    r"(?:\btried\b|\balready\b|\beven (?:with|after)\b|\bwith\b|\bafter\b|\benabled\b|\bset\b"
    r"|\b(?:I|we)(?:'m|'re| am| are)? (?:\w+ )?us(?:e|ed|ing)\b)"
)
_DONE_BEHIND = (
    r"(?:is|are|was|were|:|=)? ?(?:enabled|already|set\b|in use|(?:turned |switched )?on\b|tried)"
)
_NO_HELP = (
    r"(?:(?:did|does|do)(?:n't| not) (?:seem to )?(?:help|change|work)"
    r"|(?:made|makes|make) no difference|no (?:help|effect)|still OOM)"
)
_NOT = r"(?:\bno\b|\bnot\b|n't\b|\bwithout\b|\bdisabl|\boff\b|[Ff]alse\b)"
_LESS = r"(?:lower|reduc|halv|decreas|dropp|shrink|shorten|cut)"
_MADE_LESS = (
    rf"\b(?:{_LESS}(?:e?d|t)?\b(?<=[dt])|(?:after|tried|despite) \w{{0,12}}ing"
    r"|(?:tried|with|even)\b[^.\n]{0,20}\b(?:smaller|fewer|lower))\b"
)
# Words for things without a single value: made smaller, or already minimal.
_SMALLER = {
    advice.SMALLER_MICRO_BATCH: r"(?<!eval )(?<!eval_)(?:batch(?:es|[ _-]?size)?|\bbs)",
    advice.SMALLER_EVAL_BATCH: r"eval\w*[ _]batch(?:[ _-]?size)?",
    advice.SHORTER_ROWS: r"(?:sequence|seq|max|context|cutoff|input|prompt)[ _-]?len(?:gth)?",
    advice.FEWER_WORKERS: r"workers",
    advice.SMALLER_ENGINE_SHARE: r"(?:memory[ _-]utili[sz]ation|mem[_-]fraction)",
    advice.SHORTER_ANSWERS: r"(?:max[_ ]new[_ ]tokens|completion[_ ]length)",
}
_ROWS = r"(?i:\b(?:bs|\w*batch[ _-]?size)[\"']?\W{1,3}(\d{1,6})\b)"
_OTHER_NAMES = {
    advice.ADAPTER: r"Q?LoRA",
    advice.CHECKPOINTING: r"(?:activation|gradient)[_ -]?checkpointing",
    advice.EIGHT_BIT_ADAMW: r"8[ -]?bit[ _-](?:adam\w*|optim\w*)|adamw?_8bit",
    advice.FLASH_ATTENTION: r"flash[_ -]?att(?:n|ention)",
    advice.FOUR_BITS: r"QLoRA|4[ -]?bit",
    advice.OFFLOAD_OPTIMIZER: r"(?:optimizer|CPU)[_ -]?offload(?:ing)?|offload_optimizer",
    advice.SURVIVE: r"preset survive|survive_oom\(",
}
# A flag without a value, as argparse's store_true takes it.
_SWITCH = r"--(?:gradient|activation)_checkpointing(?=\s*\\?\s*(?:$|\n|--))"
_SHARE_TRIED = rf"(?is)(?:utilization|mem_fraction\w*)\b.{{0,160}}?{_NO_HELP}"
_EITHER_NAME = "(?:activation|gradient)_checkpointing"  # since transformers 5.23, and before
_TORCHS_ADVICE = re.compile(r"try setting \S+ to avoid fragmentation")
_CHECKPOINTED = r"torch[/\\]utils[/\\]checkpoint|_gradient_checkpointing_func"


def is_followed(one: Advice, facts: TextFacts) -> bool:
    """Return whether the text says that an advice is already followed, or did not help."""
    text = _TORCHS_ADVICE.sub("", facts.whole)
    if one is advice.CHECKPOINTING and facts.find_call(_CHECKPOINTED):
        return True
    if one is advice.CHECKPOINTING and re.search(_SWITCH, text):
        return True
    if one is advice.SMALLER_ENGINE_SHARE and re.search(_SHARE_TRIED, text):
        return True
    if one is advice.SMALLER_MICRO_BATCH and facts.is_later_attempt:
        rows = [int(each) for each in re.findall(_ROWS, f"{facts.command}\n{facts.text}")]
        if rows and rows[-1] < rows[0]:
            return True
    return any(re.search(pattern, text) for pattern in _patterns(one))


@cache
def _patterns(one: Advice) -> tuple[str, ...]:
    return tuple(_words_of(one))


def _words_of(one: Advice) -> Iterator[str]:
    names = set()
    by_others = [each for (which, _), each in SPELLED.items() if which is one and "/" not in each]
    for spelling in (*one.spellings.values(), one.unfilled, *by_others):
        names |= set(_CALL.findall(spelling))
        settings = []
        for flag, of_flag, name, of_name in _SETTING.findall(spelling):
            last, value = (flag or name).rpartition(".")[2], of_flag or of_name
            if value in BLANKS or last in BLANKS or len(last) < 4:
                continue
            is_on = value in ("True", "true")
            wanted = _ON if is_on else re.escape(value)
            called = re.escape(last).replace(checkpointing.NAME, _EITHER_NAME)
            settings.append(rf"\b{called}[\"'\]]{{0,2}}(?: ?[=:,] ?| is | to | )[\"']?{wanted}\b")
            names |= {last} if is_on else set()
        if settings:
            yield rf"(?s)\A{''.join(f'(?=.*{each})' for each in settings)}"
    for name in sorted(names):
        spoken = re.sub(r"(?<=\d)(?=[a-z])|[_-]", "[ _-]?", _PREFIX.sub("", name))
        yield from _write_patterns(spoken)
    if other := _OTHER_NAMES.get(one):
        # Only its own words show that it is in force.
        yield from (other,) if one is advice.SURVIVE else _write_patterns(other)
    if what := _SMALLER.get(one):
        yield rf"(?i:{_MADE_LESS}[^.,;\n]{{0,40}}?{what})"
        yield rf"(?i:{what}[^.\n]{{0,30}}?(?:{_LESS}\w*d\b|\bcut\b|\d ?(?:down )?(?:to|->|→) ?\d))"
        least = "0|zero" if one is advice.FEWER_WORKERS else "1|one"
        end = r"\b(?!['\w]|[.,]\d|[/:|]| ?(?:of|loss|/|\|))"
        yield rf"(?i:{what}[\"']?\W{{0,3}}(?:is|of|to|was)?\W{{0,3}}(?:{least}){end})"
        if one is advice.FEWER_WORKERS:
            yield r"(?i:\b(?:zero|no|0) (?:data ?loader )?workers\b)"


def _write_patterns(name: str) -> Iterator[str]:
    """Yield ways to write that something is on, or was tried, without a denial in between."""
    between = rf"(?:(?!{_NOT})(?:[^.\n]|\.(?=\S))){{0,40}}?"
    yield rf"(?i:{_DONE}{between}(?<!\w)(?:{name})(?!\w)(?!=? ?false))"
    behind = rf"(?:(?!{_NOT})[^.\n]){{0,12}}?(?:{_DONE_BEHIND}|{_NO_HELP})"
    yield rf"(?i:(?<!\w)(?:{name})(?!\w) ?{behind})"
