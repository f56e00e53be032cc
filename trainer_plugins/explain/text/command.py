"""Find in a text how a run was launched: its command line, ready to be typed again."""

import re
import shlex
from collections.abc import Sequence

from trainer_plugins.explain.text.frames import TracebackFrame

_UNKNOWN = "YOUR LAUNCH COMMAND"
_MOST_CHARACTERS = 2000
# A typed line, or one that names the running program; we drop text before the launcher.
_PROMPT = r"[^\n]{0,80}?[$#%>!] ?|\+ |(?i:[^\n:]{0,30}(?:running|command|cmd)[^\n:]{0,20}: ?)"
_WRAPPER = (
    r"\w+=\S*|nohup|time|srun(?: -\S+)*|(?:uv|poetry|pixi) run"
    r"|trainer-plugins exec [^\n]{0,200}? --"
)
_SHOWN = re.compile(
    rf"(?m)^(?:{_PROMPT})?(?:(?:{_WRAPPER}) +)*((?:\S*/)?(?:python[\d.]*|torchrun|deepspeed"
    r"|accelerate[ -]launch|axolotl train|llamafactory-cli train|trl \w+|swift \w+) +[^\n]*)$"
)
_CONTINUED = re.compile(r" *\\\n(?:> )?\s*")
_END = re.compile(r"\s\d?(?:[|<]|>[>&]?|&)|;")
# Shows the command of each rank in a launcher's own traceback, or in its last line.
_LISTED = re.compile(
    r"(?:Command '|cmd = |sigkill_handler\] )\[((?:'[^'\n]{0,500}'(?:, )?){2,200})\]"
)
_GIVEN_BY_LAUNCHER = re.compile(r"-u|--local[_-]rank=\d+")
_LAUNCHERS = (
    ("accelerate launch", r"accelerate[/\\]commands|bin/accelerate\b|accelerate\.commands"),
    ("deepspeed", r"deepspeed[/\\]launcher|bin/deepspeed\b|\[launch\.py:"),
    (
        "torchrun --nproc-per-node gpu",
        r"torch[/\\]distributed[/\\](?:run|launcher|elastic)|bin/torchrun\b"
        r"|torch\.distributed\.run",
    ),
)


def find_launch(text: str, frames: Sequence[TracebackFrame], writer: str) -> str:
    """Return the command line of a run, with its launcher, quoted so that nothing is executed."""
    if words := find_command(text):
        return shlex.join(words)
    several = writer.isdigit() or "local_rank" in text
    launcher = next(
        (name for name, pattern in _LAUNCHERS if re.search(pattern, text)),
        "accelerate launch" if several else "python",
    )
    if listed := _LISTED.search(text):
        _, *words = re.findall(r"'([^'\n]*)'", listed[1])
        words = [word for word in words if not _GIVEN_BY_LAUNCHER.fullmatch(word)]
        if words[:1] and not words[0].startswith("-"):
            return f"{launcher} {shlex.join(words)}"
    return _find_by_frames(launcher, text, frames)


def find_command(text: str) -> list[str]:
    """Return the words of the first command line in a text; empty if there is none."""
    for match in _SHOWN.finditer(_CONTINUED.sub(" ", text)):
        line = _END.split(match[1][:_MOST_CHARACTERS])[0]
        try:
            words = shlex.split(line)
        except ValueError:  # an unmatched quote
            words = line.split()
        if _names_a_program(words):
            return words
    return []


def _names_a_program(words: Sequence[str]) -> bool:
    """Distinguish a command line from a sentence that begins with the same word."""
    launcher, *others = words
    if launcher.rpartition("/")[2].startswith("python"):
        others = [word for word in others if word == "-m" or not word.startswith("-")][:1]
    elif not launcher.endswith(("torchrun", "deepspeed", "accelerate", "accelerate-launch")):
        return True
    return any(word == "-m" or word.endswith(".py") for word in others)


def _find_by_frames(launcher: str, text: str, frames: Sequence[TracebackFrame]) -> str:
    main = next((one for one in frames if one.function == "<module>"), None)
    is_ours = re.search(r"trainer_plugins[/\\]run\.py", text)
    if any("runpy" in one.file for one in frames) and not is_ours:
        return _UNKNOWN
    if not main or not main.is_users or not re.fullmatch(r"[\w./-]+\.py", main.file):
        return f"{launcher} train.py"
    path = main.file.rsplit("/", 1)[-1] if main.file.startswith("/") else main.file
    return f"{launcher} {path}"
