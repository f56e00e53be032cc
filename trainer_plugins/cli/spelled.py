"""Let `plan` and `check` accept the options of TRL's commands."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from trainer_plugins.plug_in.flags import Command

_SAME = {
    "model_name_or_path": "model",
    "torch_dtype": "dtype",
    "lora_target_modules": "lora_target",
    "use_bnb_nested_quant": "bnb_4bit_use_double_quant",
}  # of trl/trainer/model_config.py, TRL 1.16
_NO_INFLUENCE = ("lora_alpha", "lora_dropout", "lora_task_type", "use_rslora", "trust_remote_code")
_ADAPTER, _RANK = "use_peft", "16"  # TRL's default of `lora_r`
WITH_OTHER_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}
TYPED = "trainer_plugins.typed"
"""The key under which a context keeps the command line as typed."""

_FLAG = re.compile(r"-\D")  # not a negative number
_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class CommandOfARun(Command):
    """Translates TRL's flags before it parses its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[TYPED] = [*args]
        end = args.index("--") if "--" in args else len(args)
        own = {flag: each for each in self.params for flag in (*each.opts, *each.secondary_opts)}
        words = [*_translate(args[:end], own)]
        return super().parse_args(ctx, [*words, *args[end:]])


def _translate(words: Sequence[str], own: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words of a command line in the spelling of its own options."""
    flags = [*_flags(words)]
    has_rank = any(name == "lora_r" for name, _, _ in flags)
    for name, word, values in flags:
        flag = f"--{_SAME.get(name, name).replace('_', '-')}"
        option = own.get(flag)
        truth = _TRUTHS.get(values[0].lower()) if values else None
        if name in _NO_INFLUENCE:
            continue
        if name == _ADAPTER:
            if truth is not False and not has_rank:
                yield from ("--lora-r", _RANK)
        elif option is None:
            yield from (word, *values)
        elif option.is_flag:
            if truth is not False:
                yield flag
            elif option.secondary_opts:
                yield option.secondary_opts[0]
            yield from values[truth is not None :]
        else:
            yield from (flag, ",".join(values)) if name in _SAME else (flag, *values)


def _flags(words: Sequence[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield each flag's name, its spelling, and the words up to the next flag."""
    at = 0
    while at < len(words):
        spelt, equals, value = words[at].partition("=")
        values, at = [value] if equals else [], at + 1
        if not spelt.startswith("--"):
            yield "", words[at - 1], []
            continue
        while not equals and at < len(words) and not _FLAG.match(words[at]):
            values.append(words[at])
            at += 1
        yield spelt[2:].replace("-", "_"), spelt, values
