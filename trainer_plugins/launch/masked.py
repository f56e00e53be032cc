"""Masks secrets in what is written about a run: arguments, configs, command lines, source lines."""

import os
import re
from collections.abc import Iterable, Mapping
from enum import Enum

from trainer_plugins.record.webhook import VARIABLE

HIDDEN = "(hidden)"

_LONGEST_TEXT = 2000
_DEEPEST = 12

# Names whose texts are secrets. Numbers and switches under such names are not: num_tokens.
_NAME = re.compile(
    r"(?:^|.*[_.-])(?:token|api_?key|access_?key|key|secret|passw(?:or)?d|credential|auth)s?$",
    re.IGNORECASE,
)
# Texts that are secrets whatever their name: the published prefixes of Hugging Face, GitHub,
# OpenAI, Slack, AWS and Google; 40 hexadecimal digits, which are Weights & Biases' keys (and
# commits, which nobody misses here); the user and password of a URL.
_TEXT = re.compile(
    r"\b(?:hf_|api_org_|gh[opsu]_|github_pat_|sk-|xox[abprs]-|AKIA|ASIA|ya29\.|AIza)[\w-]{10,}"
    r"|\b[0-9a-f]{40}\b|(?<=://)[^/\s@]+(?=@)|(?<=Bearer )\S+",
)
_ASSIGNED = re.compile(r"([\w.-]+)=(.*)", re.DOTALL)


def masked_text(text: str) -> str:
    """Hide what looks like a secret, the URL of the webhook, and the home folder.

    >>> masked_text("login('hf_0123456789abcdef'), https://me:pass@host/x")
    "login('(hidden)'), https://(hidden)@host/x"
    """
    if webhook := os.environ.get(VARIABLE, "").strip():
        text = text.replace(webhook, HIDDEN)
    home = os.path.expanduser("~")
    if len(home) > 1:
        text = text.replace(home + os.sep, "~" + os.sep)
    return _TEXT.sub(HIDDEN, text[:_LONGEST_TEXT])


def masked_command(command: Iterable[str]) -> tuple[str, ...]:
    """Hide the values of arguments whose name says that they are secrets.

    >>> masked_command(["train.py", "--hub_token", "abc", "--lr=1", "++args.wandb_key=abc"])
    ('train.py', '--hub_token', '(hidden)', '--lr=1', '++args.wandb_key=(hidden)')
    """
    shown: list[str] = []
    is_secret = False
    for argument in command:
        assigned = _ASSIGNED.fullmatch(argument.lstrip("+-"))
        if is_secret and not argument.startswith("-"):
            shown.append(HIDDEN)
        elif assigned and _NAME.match(assigned[1]):
            shown.append(argument[: -len(assigned[2]) or None] + HIDDEN)
        else:
            shown.append(masked_text(argument))
        is_secret = argument.startswith("-") and _NAME.match(argument.lstrip("-")) is not None
    return tuple(shown)


def masked(value: object, depth: int = 0) -> object:
    """Return a value as JSON has it, without what looks like a secret, at any depth.

    >>> masked({"hub_token": "abc", "seed": 1, "kwargs": {"api_key": "x", "path": "y"}})
    {'hub_token': '(hidden)', 'seed': 1, 'kwargs': {'api_key': '(hidden)', 'path': 'y'}}
    """
    if value is None or isinstance(value, bool | int | float):
        return value
    if depth > _DEEPEST:
        return "..."
    if isinstance(value, Enum):
        return masked(value.value, depth + 1)
    if isinstance(value, Mapping):
        return {
            masked_text(str(name)): HIDDEN
            if _NAME.match(str(name)) and isinstance(its, str) and its
            else masked(its, depth + 1)
            for name, its in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [masked(each, depth + 1) for each in value]
    return masked_text(str(value))
