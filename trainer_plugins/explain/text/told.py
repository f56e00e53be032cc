"""Find an OOM that a text only reports, in a title or a sentence, without an error line."""

import re

from trainer_plugins.explain.text.excerpt import Excerpt, LogLine
from trainer_plugins.oom import OutOfMemory, classify_anywhere
from trainer_plugins.oom.rules import KILLED_FROM_OUTSIDE, Source

# The exhausted resource, the reason for the end, and a person's words; specific ones first.
_SAID: tuple[tuple[Source, str, str], ...] = (
    # vLLM before it gives up; SGLang's pool.
    (
        "engine",
        "",
        r"Available (?:KV cache )?memory: (?:-\d|0,)|(?:Prefill|Decode) out of memory"
        r"|No available memory for the cache blocks",
    ),
    ("shared", "", r"\b_share_(?:filename|fd)_cpu_\("),
    ("host", "", r"(?i:paging file is too small|\berror 1455)"),
    ("host", KILLED_FROM_OUTSIDE, r"all available RAM|\bRay OOM\b"),
    ("nccl", "", r"(?i:unhandled ?cuda ?error)"),
    (
        "allocator",
        "",
        r"(?i:out[ -]of[ -]memory|OutOfMemory|(?<![a-z0-9_-])OOM(?![a-z0-9_-])|CUDA out of$"
        r"|not enough (?:gpu )?memory|failed to allocate memory|capture cuda graph failed(?!:)"
        r"|enough GPU RAM|memory (?:use |usage )?(?:grows|rises|increases|climbs|keeps)"
        r"|\d ?Gi?B\b[^.!?]{0,24}\b(?:stays?|never (?:freed|released)|more each))"
        r"|Invalid buffer size|NvMapMemAlloc\w*.{0,20}error 12|显存不足|爆显存|显存溢出",
    ),
)
_NOT_SAID = r"(?i:\b(?:no|avoid\w*|prevent\w*|without|against|if|handl\w*)\b[^.!?]{0,40})"
_ANY = re.compile("|".join(words for *_, words in _SAID) + "|[Mm]emory")
_AN_ERROR = re.compile(r"[\w.]+(?:Error|Exception): |KeyboardInterrupt|SystemExit")
_FRAME = re.compile(r'\s*File "')
_MOST_LINES = 60  # a longer text without an error is a log of something else


def find_told_oom(excerpt: Excerpt) -> Excerpt | None:
    """Find the line that reports an OOM; None if it names another error, or is a long log."""
    lines = excerpt.lines
    has_frames = any(_FRAME.match(line.text) for line in lines)
    if len(lines) > _MOST_LINES and not has_frames:
        return None
    if any(_AN_ERROR.match(one.text) and not _ANY.search(one.text) for one in lines):
        return None
    for at, line in enumerate(lines):
        if found := classify_anywhere(line.text):
            return Excerpt(found, lines, at)
    return next((one for each in _SAID if (one := _cut_at_words(lines, *each))), None)


def _cut_at_words(
    lines: tuple[LogLine, ...], source: Source, fatal: str, words: str
) -> Excerpt | None:
    for at, line in enumerate(lines):
        if re.search(words, line.text) and not re.search(f"{_NOT_SAID}(?:{words})", line.text):
            is_certain = source == "engine"
            oom = OutOfMemory(source=source, is_certain=is_certain, fatal=fatal, text=line.text)
            return Excerpt(oom, lines, at)
    return None
