"""Facts: the evidence around an OOM in a text: numbers, frames and words."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from trainer_plugins.advice.vendors import CUDA, CUDA_ON_WINDOWS, VENDORS, Vendor
from trainer_plugins.explain.answer import Cause, Numbers
from trainer_plugins.explain.progress import read_progress
from trainer_plugins.explain.shared import Said, quote, say
from trainer_plugins.explain.text.excerpt import Excerpt
from trainer_plugins.explain.text.frames import TracebackFrame, frames_around
from trainer_plugins.explain.text.settings import Settings, find_launch
from trainer_plugins.oom import OutOfMemory
from trainer_plugins.planner.public_models import Model, find_model
from trainer_plugins.record.shown import Process
from trainer_plugins.units import MIB

NOT_AVAILABLE_BYTES = 1 << 60  # and more: NVML's value for an unknown size
_MOMENT = re.compile(
    r"(?i)train\w*_step|_training_loop|_loss\b|eval|predict|generat|backward|optim|sav(?:e|ing)|load"
    r"|from_pretrained|merge|prepare|\.(?:to|cuda)\("
)
_NUM_LAST_WORDS, _NUM_NEAR = 4, 600
_MESSAGE = r"(?:CUDA|HIP|XPU|NPU|MPS backend) [Oo]ut of|NVML_SUCCESS|[\w.]+(?:Error|Exception): "
_SMI_PROCESS = re.compile(
    r"^\|\s+(\d{1,3})\s+(?:(?:N/A|\d+)\s+(?:N/A|\d+)\s+)?(\d{2,9})\s+(?:C|G|C\+G|M\+C)\s+(\S.*?)\s+"
    r"(\d{1,7})MiB\s*\|"
)
_SMI_CARD = re.compile(r"\|\s*(\d{1,7})MiB\s*/\s*(\d{1,7})MiB\s*\|")


# A line of code, of a log or of torch's message is not a person's sentence.
_NO_SENTENCE = re.compile(
    r"Tried to allocate|^\s*File |^\s{2,}\S|[\w\])]\((?!\))|[{}<>|]| = |=.*=.*=|\d%"
    r"|^\W*(?:Try|Consider|To avoid)\b|[Ii]f you\b|[Yy]ou (?:can|may|should|might|need)\b"
    r"|\[(?:INFO|WARN|ERROR|rank)|^\[?\d{4}-|Error: |^\W*(?:INFO|WARN|DEBUG)"
)
_PROSE = re.compile(
    r"(?i)(?!.*(?:\.py\b|[a-z]_[a-z]))"
    r".*\b(?:the|is|are|was|we|with|this|that|my)\b.*\b(?:the|and|is|are|to|of|it|with)\b"
    r"|(?=.*\b(?:I|we)\b)(?:.*?\b(?:the|is|are|was|we|with|this|that|to|of|it)\b){4}"
).match  # a sentence, in which no name of a program stands, or a long one
_SPEAKS = re.compile(
    r"(?i:(?<![a-z])OOM|显存|内存|memory|[\d ]G(?:i?B)?\b|\b(?:crash|dies|died|fail|kill|error)\w*)"
).search


class SmiProcess(NamedTuple):
    """Holds one line of nvidia-smi's process table."""

    card: int
    pid: int
    name: str
    num_bytes: int


class SmiCard(NamedTuple):
    """Holds nvidia-smi's figures of a card's memory."""

    used_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class TextFacts:
    """Gathers the input of the rules. All sizes are in bytes; None is unknown."""

    oom: OutOfMemory
    frames: tuple[TracebackFrame, ...]  # outermost first; empty if the text has none
    writer: str  # the failed rank or worker as named in the log; else empty
    text: str  # the lines around the OOM
    command: str  # the head of the log: arguments, versions
    processes: tuple[SmiProcess, ...]
    cards: tuple[SmiCard, ...]
    progress: str  # how far the run had come, as a clause; empty at its start, or if unknown
    num_skipped: int  # lines that report a skipped batch
    is_later_attempt: bool  # whether the text shows an earlier failed attempt

    @property
    def asked_bytes(self) -> int | None:
        return self.oom.requested_bytes

    @property
    def total_bytes(self) -> int | None:
        return self.oom.total_bytes

    @property
    def free_bytes(self) -> int | None:
        free = self.oom.free_bytes
        return None if free is not None and free >= NOT_AVAILABLE_BYTES else free

    @property
    def live_bytes(self) -> int | None:
        return self.oom.allocated_bytes

    @property
    def unused_bytes(self) -> int | None:
        """Return the memory that the allocator holds outside tensors."""
        unused, reserved, live = self.oom.unused_bytes, self.oom.reserved_bytes, self.live_bytes
        if unused is None and reserved is not None and live is not None:
            return max(0, reserved - live)
        return unused

    @cached_property
    def numbers(self) -> Numbers:
        """Return the numbers of the message."""
        reserved = self.oom.reserved_bytes
        if reserved is None and self.live_bytes is not None and self.unused_bytes is not None:
            reserved = self.live_bytes + self.unused_bytes
        return Numbers(
            rank=int(self.writer) if self.writer.isdecimal() else None,
            card=self.oom.device,
            requested_bytes=self.asked_bytes,
            capacity_bytes=self.total_bytes,
            limit_bytes=self.oom.limit_bytes,
            free_bytes=self.free_bytes,
            allocated_bytes=self.live_bytes,
            reserved_bytes=reserved,
            unused_bytes=self.unused_bytes,
            others_bytes=self.others_bytes,
            frames=self.frames[::-1],
            processes=tuple(
                Process(pid=pid, used_bytes=used, name=None, is_own=False)
                for pid, used in self.neighbours
            ),
        )

    def states(self, words: str, **more: int | float | str | None) -> Said:
        """Build a sentence from these facts, the message's numbers, and `more`."""
        return say(words, self, self.numbers, **more)

    @property
    def words(self) -> str:
        """Quote the error in a sentence."""
        return f"The log says: {quote(self.oom.text)}"

    @property
    def hides_processes(self) -> bool:
        """Return whether the driver hides the memory of each process, as on Windows and WSL."""
        return any(size >= NOT_AVAILABLE_BYTES for _, size in self.oom.process_bytes)

    @property
    def has_tried_one_row(self) -> bool:
        return "No executable batch size" in self.oom.text

    @property
    def own_bytes(self) -> int | None:
        """Return the memory of this process: from the message, else torch's reserved memory."""
        own = [size for pid, size in self._named if pid is None]
        reserved = None if self.live_bytes is None else self.live_bytes + (self.unused_bytes or 0)
        if own or reserved is None or self.total_bytes is None or self.free_bytes is None:
            return own[0] if own else reserved
        # In a container torch refers to itself by a foreign pid. If all named processes and this
        # one exceed the used memory, one of them is this process.
        sizes = [size for _, size in self._named]
        fits = [size for size in sizes if size >= reserved]
        used = self.total_bytes - self.free_bytes
        return min(fits) if fits and sum(sizes) + reserved > 1.02 * used else reserved

    @property
    def _named(self) -> list[tuple[int | None, int]]:
        return [one for one in self.oom.process_bytes if 0 < one[1] < NOT_AVAILABLE_BYTES]

    @property
    def others_bytes(self) -> int | None:
        """Return the memory neither free nor this process's: T - F - L - U."""
        if self.total_bytes is None or self.free_bytes is None or self.own_bytes is None:
            return None
        return max(0, self.total_bytes - self.free_bytes - self.own_bytes)

    @property
    def outside_torch_bytes(self) -> int:
        """Return this process's memory outside torch's allocator, as far as it is stated."""
        own = [size for pid, size in self._named if pid is None]
        if not own or self.live_bytes is None:
            return 0
        return max(0, own[0] - self.live_bytes - (self.unused_bytes or 0))

    @property
    def neighbours(self) -> list[tuple[int, int]]:
        """Return the other processes that the message names, as pairs (pid, bytes)."""
        return [
            (pid, size) for pid, size in self._named if pid is not None and size != self.own_bytes
        ]

    @property
    def shows_no_moment(self) -> bool:
        """Return whether no frame shows in which moment of the run it failed."""
        return not any(_MOMENT.search(frame.words) for frame in self.frames)

    def find_call(self, pattern: str, innermost: int | None = None) -> TracebackFrame | None:
        frames = self.frames[-innermost:] if innermost else self.frames
        return next((one for one in reversed(frames) if re.search(pattern, one.words)), None)

    def find_sentence(self, pattern: str) -> str:
        """Return a person's sentence about memory or an end, with these words; empty if none."""
        for line in self.text.splitlines():
            for one in re.split(r"(?<=[.!?;]) |(?<=[。\uff01\uff1f])", line):
                is_spoken = _SPEAKS(one) and not _NO_SENTENCE.search(one)
                if is_spoken and re.search(rf"(?i:{pattern})", one):
                    return one
        return ""

    def says(self, pattern: str) -> re.Match[str] | None:
        """Find words anywhere in the text, including the head of the log."""
        return re.search(pattern, self.text) or re.search(pattern, self.command)

    @property
    def has_ranks(self) -> str:
        """Return the words that show a launch of several ranks; empty if there are none."""
        named = self.says(
            r"(?:nproc[_-]per[_-]node|num_processes|num[_-]gpus|world_size|NPROC_PER_NODE)"
            r"[\"']?[ =:]{1,3}(?:[2-9]|\d\d|gpu|auto)|\btorchrun\b|accelerate[ -]launch"
            r"|\bdeepspeed |mpirun|local[_-]rank|LOCAL_RANK|MULTI_GPU|DistributedDataParallel"
            r"|\[rank\d+\]|\b[Rr]ank [1-9]\b"
        )
        if named:
            return named[0].strip()
        return f"rank {self.writer}" if self.writer.isdigit() else ""

    @property
    def users_frame(self) -> TracebackFrame | None:
        """Return the innermost frame in the user's code."""
        return next((one for one in reversed(self.frames) if one.is_users), None)

    @property
    def users_line(self) -> str:
        """Name that frame in a sentence; empty if there is none."""
        frame = self.users_frame
        return f"The innermost line outside packages is {frame}." if frame else ""

    @property
    def failed(self) -> TracebackFrame | None:
        return self.frames[-1] if self.frames else None

    @property
    def is_notebook(self) -> bool:
        frame = self.find_call(r"ipython-input|^(?:Cell )?In ?\[|ipykernel")
        return bool(frame or self.says(r"ipython-input-|\bCell In ?\[|ipykernel"))

    @property
    def is_windows(self) -> bool:
        return bool(self.says(r"\b[A-Z]:\\|WinError|os error 1455"))

    @property
    def is_wsl(self) -> bool:
        is_named = self.says(r"\bWSL|\bwsl2|microsoft-standard|/mnt/[a-z]/Users") is not None
        return is_named or self.hides_processes

    @property
    def vendor(self) -> Vendor:
        """Return the vendor of the card: from the message, else from frames and other text."""
        for read in (lambda words: re.search(words, self.oom.text), self.find_call, self.says):
            for one in VENDORS:
                if read(one.seen):
                    return one
        return CUDA_ON_WINDOWS if self.is_windows or self.is_wsl else CUDA

    @property
    def launched(self) -> str:
        """Return the command line of the run, including its launcher."""
        return find_launch(self.whole, self.frames, self.writer)

    @cached_property
    def whole(self) -> str:
        """Return the text, starting with the failed attempt if there were several."""
        parts = (self.text, self.command) if self.is_later_attempt else (self.command, self.text)
        return "\n".join(parts)

    @cached_property
    def settings(self) -> Settings:
        return Settings(self.whole)

    @cached_property
    def model(self) -> Model | None:
        """Return the public model that the text names."""
        return find_model(self.whole)


Rule = Callable[[TextFacts], Cause | None]


def gather(excerpt: Excerpt, oom: OutOfMemory) -> TextFacts:
    """Read the facts from the lines around an OOM."""
    lines, at, since = excerpt.lines, excerpt.at, excerpt.since
    texts = [line.text for line in lines]
    near = max(since, at - _NUM_NEAR)
    processes = filter(None, map(_SMI_PROCESS.match, texts))
    cards = filter(None, map(_SMI_CARD.search, texts))
    return TextFacts(
        oom=oom,
        frames=frames_around(lines[since:], at - since)
        or (_last_words(texts[since:], at - since) if oom.is_certain else ()),
        writer=lines[at].writer,
        text="\n".join(texts[near:]),
        command="\n".join(texts[:near]),
        processes=tuple(
            SmiProcess(int(one[1]), int(one[2]), one[3], int(one[4]) * MIB) for one in processes
        ),
        cards=tuple(SmiCard(int(one[1]) * MIB, int(one[2]) * MIB) for one in cards),
        progress=read_progress(texts[since : at + 1]),
        num_skipped=sum(bool(re.search(r"(?i)skipping (?:this )?batch", text)) for text in texts),
        is_later_attempt=since > 0,
    )


def _last_words(texts: Sequence[str], at: int) -> tuple[TracebackFrame, ...]:
    """Use the words right before the message as the place, if no frame is complete."""
    before = [text for text in texts[max(0, at - _NUM_LAST_WORDS) : at] if text.strip()]
    words = [one for one in (*before, re.split(_MESSAGE, texts[at])[0]) if not _PROSE(one)]
    return tuple(
        TracebackFrame(file="", line=0, function="", code=one.strip())
        for one in words
        if not re.search(r"(?:Arguments|Config|Trainer|from_pretrained)\($", one.strip())
        and re.search(r"\w\((?!\):)|\", line \d|\.py[\"']?[:,] ?(?:line )?\d|^ +\w+ = ", one)
    )
