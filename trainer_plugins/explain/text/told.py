"""Find an OOM that a text only reports, in a title or a sentence, without an error line."""

import re

from trainer_plugins.explain.text.excerpt import Excerpt, LogLine
from trainer_plugins.oom import OutOfMemory, classify_anywhere
from trainer_plugins.oom.rules import KILLED_FROM_OUTSIDE, Source

_HOST = r"(?:cpu|host|system|main)\)? ?(?:memory|ram)\b"
# The exhausted resource, the reason for the end, and a person's words; specific ones first.
_SAID: tuple[tuple[Source, str, str], ...] = (
    # vLLM before it gives up; SGLang's pool.
    (
        "engine",
        "",
        r"Available (?:KV cache )?memory: (?:-\d|0,)|(?:Prefill|Decode) out of memory"
        r"|No available memory for the cache blocks",
    ),
    ("host", "", r"(?i:\berror 1455)"),
    (
        "pinned",
        "",
        r"(?i:pinned (?:system )?memory\b[^.!?\n]{0,24}\b(?:overfill|full|exhaust|limit))",
    ),
    ("shared", "", r"(?i:\bbus error\b|\binsufficient shared mem|/dev/shm)|共享内存(?:不足|不够)"),
    (
        "host",
        KILLED_FROM_OUTSIDE,
        r"\b(?:all|up|whole|entire)(?: of)?(?: the| my| its)?(?: available| free)? RAM\b"
        rf"|\bRay OOM\b|\bRAM OOM|(?i:out of \(?{_HOST}"
        rf"|{_HOST}[^.!?]{{0,60}}\b(?:grow|increas|leak|full|fills|exhaust|explo)"
        rf"|\boom[- ]killed\b|\b(?:oom|killed)\b[^.!?\n]{{0,40}}\b{_HOST}"
        rf"|grow[^.!?\n]{{0,12}} of {_HOST})"
        r"|\bRAM\b\W{1,3}not\b|不是显存|被 ?kill|被杀"
        r"|\bSIGKILL|(?:出现|报错?|就) ?Killed|\b(?i:cpu) oom\b|\bCPU OOM\b"
        r"|(?i:\bkilled\b[^.!?\n]{0,30}\bout.of.memory"
        r"|(?<!gpu )(?<!video )(?<!graphics )\bRAM\b(?: memory)? (?:usage|consumption)"
        r"|\b(?:eats?|exceeds?|consumes?)\b[^.!?\n]{0,24} (?:cpu |system )?RAM\b)"
        r"|(?<!显)内存[^。\uff0c显\n]{0,12}?(?:OOM|[爆暴]|飙|涨|占满|耗尽|一直|不断|持续|泄)"
        r"|(?:CPU|系统|主机|物理|服务器|机器的?) ?内存[^。\uff0c显\n]{0,12}?(?:溢出|不足|不够)"
        r"|(?i:\bOOM\b[^.\n]{0,12}\bnot (?:a )?(?:cuda|gpu|vram))"
        r"|(?i:\b(?:gets?|got|(?:process|run|job) (?:is|was)) killed\b)"
        r"|(?i:(?:session|notebook|kernel|colab)\w*\b[^.!?\n]{0,16}\bcrash|crash\w*[^.!?\n]{0,24}"
        r"\b(?:session|memory (?:problem|issue)))",
    ),
    (
        "allocator",
        "",
        r"(?i:out ?[ -] ?of ?[ -] ?(?:\w+[ -])?(?:memory|VRAM)|OutOfMemory|CUDA out of$"
        r"|(?<![a-z0-9_-])OOM(?:ing|s)?(?![a-z0-9_-])"
        r"|not enough (?:gpu )?memory|failed to allocate memory|capture cuda graph failed(?!:)"
        r"|enough GPU RAM|memory (?:leak|overflow|exhaust)|insufficient (?:\w+ )?memory"
        r"|(?:can ?not|can't|unable to|how to) (?:free|release|clear) [^.!?\n]{0,12}\bmemory"
        r"|memory (?:use |usage )?(?:grows|rises|increases|climbs|keeps|explodes)"
        r"|\d ?Gi?B\b[^.!?]{0,24}\b(?:stays?|never (?:freed|released)|more each))"
        r"|Invalid buffer size|NvMapMemAlloc\w*.{0,20}error 12"
        r"|[显内]存[还也会又]{0,2}(?:不足|不够|爆|溢出)|爆显存"
        r"|显存[^。\n]{0,8}(?:递增|增加|增长|上升|涨)|(?:时|会)溢出",
    ),
)
_NOT_SAID = (
    r"(?i:\b(?:no|avoid\w*|prevent\w*|without|against|(?<!see )if|handl\w*)\b[^.,;!?]{0,40})"
)
_ANY = re.compile("|".join(words for *_, words in _SAID) + "|[Mm]emory")
_ON_MEMORY = re.compile(r"(?i)memory|\boom|显存|\bcuda(?!:\d)|alloc|optimizer\.step")
_ON_CARDS = re.compile(
    r"(?i)\bV?RAM\b|显存|\b(?:gpu|cuda|peak) memory\b|\bmemory (?:us|spike|leak|footprint)"
    r"|lora|\bfull\b|全[参量]|\d ?[*x\u00d7] ?(?:\d{2,3} ?G|[ahlbv]\d)|\d ?[张卡块]"
    # whether a model or a method runs on these cards is a question of their memory
    r"|\b(?:can|could|possible|enough|minimum|requir\w*|need\w*|how many)\b[^?\n]{0,80}?"
    r"(?:\bGPUs?\b|(?<![a-z0-9])(?:[ahlbv]\d{2,3}|(?:rtx ?)?[345]0[6-9]0|t4)(?![a-z0-9]))"
)
_ASKS = re.compile(r"\w[)\"'`]?[?\uff1f](?:\s|$)")
# How much a run takes, before or after it has failed.
ASKS_NEED = re.compile(
    r"(?i)(?:how (?:much|many)|minimum) (?:\w+ ){0,2}(?:V?RAM|memory|GPUs?|cards)\b"
    r"|\b(?:V?RAM|memory) requirements?\b|\b(?:need|require)\w* (?:\w+ ){0,3}GB of V?RAM"
    r"|(?:多少|多大)(?:的)?\w{0,4}(?:显存|资源|卡)|[张卡块G][^。?\uff1f\n]{0,16}够[吗么不]|够不够"
    r"|所需的?显存|可以[^。?\uff1f\n]{0,20}(?:微调|训练)[^。?\uff1f\n]{0,20}[不吗么][?\uff1f]"
    r"|\b(?:is|are|would|will)\b[^.?\n]{0,60}\benough\b[^.?\n]{0,60}\?"
)
_AN_ERROR = re.compile(r"[\w.]+(?:Error|Exception): |KeyboardInterrupt|SystemExit")
# In a title.
_OTHER_ERRORS = re.compile(
    r"(?i)expected all tensors|mismatch|no attribute|unexpected keyword"
    r"|not (?:supported|implemented)|(?:key|type|value|import|attribute|assertion|index)error"
)
FRAME = re.compile(r'\s*File "')
SETS_ROWS = re.compile("per_device_train_batch_size")  # settings without an error ask, too
_MOST_LINES = 60  # a longer text without an error is a log of something else, unless a person wrote
_WRITTEN = re.compile(r"#{1,4} \w|```|.*[?\uff1f]\s*$")


def find_told_oom(excerpt: Excerpt) -> Excerpt | None:
    """Find the line that reports an OOM; None if it names another error, or is a long log."""
    lines = excerpt.lines
    has_frames = any(FRAME.match(line.text) for line in lines)
    is_written = any(_WRITTEN.match(line.text) for line in lines)
    if len(lines) > _MOST_LINES and not has_frames and not is_written:
        return None
    if any(_AN_ERROR.match(one.text) and not _ANY.search(one.text) for one in lines):
        return None
    for at, line in enumerate(lines):
        if found := classify_anywhere(line.text):
            return Excerpt(found, lines, at)
    for source, fatal, words in _SAID:
        for at, line in enumerate(lines):
            if re.search(words, line.text) and not re.search(f"{_NOT_SAID}(?:{words})", line.text):
                is_certain = source == "engine"
                oom = OutOfMemory(source=source, is_certain=is_certain, fatal=fatal, text=line.text)
                return Excerpt(oom, lines, at)
    return _cut_at_the_end(lines) if has_frames else None


def find_question(excerpt: Excerpt, asks: re.Pattern[str] = _ASKS) -> Excerpt | None:
    """Take a short text that asks about memory; None if it is a log, or is on something else."""
    lines = excerpt.lines
    asked = next((at for at, line in enumerate(lines) if asks.search(line.text)), None)
    if asked is None or len(lines) > _MOST_LINES or any(_AN_ERROR.match(one.text) for one in lines):
        return None
    if not any(_ON_CARDS.search(one.text) for one in lines):
        return None
    words = lines[asked].text
    oom = OutOfMemory(source="allocator", is_certain=False, fatal="", text=words)
    return Excerpt(oom, lines, asked)


def _cut_at_the_end(lines: tuple[LogLine, ...]) -> Excerpt | None:
    """Take a traceback that ends before its error for one of memory: that is why it was given."""
    texts = [line.text for line in lines]
    is_else = any(map(_AN_ERROR.match, texts)) or _OTHER_ERRORS.search(texts[0])
    if is_else or not any(map(_ON_MEMORY.search, texts)):
        return None
    last = max(at for at, text in enumerate(texts) if FRAME.match(text))
    end = min(len(lines) - 1, last + 1)
    words = "the text ends before its error"
    oom = OutOfMemory(source="allocator", is_certain=False, fatal="", text=words)
    return Excerpt(oom, (*lines[: end + 1], LogLine(lines[last].writer, words)), end + 1)
