"""Suggests the correct key for a misspelt one in our Hydra configs."""

import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from trainer_plugins.presets import nearest

_FOLDER = Path(__file__).parent.parent / "configs" / "hydra" / "trainer_plugins" / "callback"
_CALLBACKS = "trainer_plugins.callbacks"
_OVERRIDE = re.compile(r"(\+*)~?(trainer_plugins\.[\w.]+)(?:=|$)")
_OWN_KEY = re.compile(r"\+{1,2}(\w+)=")
# Hydra's extended override grammar: `a,b`, `choice(a,b)`, `glob(*)`.
_SWEEP = re.compile(
    r"\+{0,2}trainer_plugins(?:@[^=]*)?=.*[,(]|hydra\.sweeper\.params\.\+*trainer_plugins="
)
_ATTACHES = re.compile(r"(?:\+\+)?hydra\.callbacks\.|~?trainer_plugins/attach")
_TO_ATTACH = (
    "++hydra.callbacks.trainer_plugins._target_=trainer_plugins.integrations.hydra.AttachToJob"
)


def say_what_was_meant(words: Sequence[str]) -> None:
    """Warn on stderr about each probably misspelt key, and about a sweep that attaches nothing."""
    if any(map(_SWEEP.match, words)) and not any(map(_ATTACHES.match, words)):
        sys.stderr.write(
            "trainer_plugins: this sweep over presets attaches nothing: Hydra makes its callbacks"
            f" before it takes a sweep apart. Add {_TO_ATTACH}\n"
        )
    # Hydra rejects unknown keys without a suggestion, and `+` creates any key, also in a callback's
    # entry, whose class then rejects it.
    known = _list_known()
    for word in words:
        override = _OVERRIDE.match(word)
        key = override[2] if override else ""
        is_ours = override and (not override[1] or key.rpartition(".")[0] in known[1:])
        if is_ours and key not in known:
            line = f"our configs have no key {key}.{_meant(key)}"
        elif (own := _OWN_KEY.match(word)) and own[1] != "trainer_plugins":
            line = f"+{own[1]} makes a key of your own.{nearest(own[1], ['trainer_plugins'])}"
        else:
            continue
        if line.endswith("?"):
            sys.stderr.write(f"trainer_plugins: {line}\n")


def refuse_unknown(config: Any) -> None:
    """Reject unknown keys below `trainer_plugins`, suggesting the nearest known one."""
    for key in _keys(config):
        if key != "callbacks":
            raise ValueError(f"trainer_plugins.{key} is not used.{_meant(key)}")
    for name in _keys(config and config.get("callbacks")):
        entry, key = config["callbacks"][name], f"{_CALLBACKS}.{name}"
        if _keys(entry) and "_target_" not in entry:
            raise ValueError(f"{key} has no _target_, so it makes no callback.{_meant(key)}")


def _keys(part: Any) -> list[str]:
    return [*part] if hasattr(part, "keys") else []


def _meant(key: str) -> str:
    """Suggest a key, preferably one with a similar last part."""
    known, last = _list_known(), key.rpartition(".")[2]
    ends = get_close_matches(last, {each.rpartition(".")[2] for each in known}, 1, 0.8)
    alike = [each for each in known if each.rpartition(".")[2] in ends]
    return nearest(f"trainer_plugins.{key.removeprefix('trainer_plugins.')}", alike or known)


def _list_known() -> list[str]:
    known = [_CALLBACKS]
    for file in sorted(_FOLDER.glob("*.yaml")):
        key = f"{_CALLBACKS}.{file.stem}"
        known += [key, *(f"{key}.{name}" for name in yaml.safe_load(file.read_text()))]
    return known
