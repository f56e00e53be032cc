"""classify: whether an error or a log is an out-of-memory error, of what, and whether the process may go on."""

import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from trainer_plugins.units import GIB, KIB, size

Source = Literal[
    "allocator", "masked", "driver", "library", "nccl", "deepspeed", "pinned", "shared", "host"
]
"""Who could not get memory.

`allocator`: torch's caching allocator, on a CUDA, HIP, XPU, MPS, NPU, HPU or simulated card.
    `masked`: the same, hidden
by a failure to report it. `driver`: a call of the CUDA, HIP or Level Zero driver outside the
allocator. `library`: cuBLAS, cuDNN, cuSOLVER, cuFFT. `nccl`: a collective. `deepspeed`: the
workspace of its inference kernels. `pinned`: page-locked main memory. `shared`: `/dev/shm`. `host`:
main memory, and who kills for it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """An out-of-memory error in words: no exception, whose frames would hold the tensors.

    All sizes in bytes.
    """

    source: Source

    is_certain: bool
    """False where a full device is the usual cause of these words but not the only one: look at what is free first."""

    fatal: str
    """Why this process cannot go on; empty where it can, once memory is given back and less is asked for.

    Also why one should not count on it: the numbers of the message cannot all be true.
    """

    text: str
    """The lines that said so, six at most."""

    device: int | None = None
    """The index in the message: of the process's own numbering, so `GPU 0` under CUDA_VISIBLE_DEVICES=3 is card 3."""

    requested_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    limit_bytes: int | None = None
    """What the process is allowed, where it was given less than the device has."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    unused_bytes: int | None = None
    """Reserved by the allocator and in no tensor: large means fragmentation."""

    process_bytes: tuple[tuple[int | None, int], ...] = ()
    """What each process holds as (pid, bytes), where told; the pid is None for the process that failed.

    In a container torch names itself by a pid that is not its own; it is known by what it holds.
    """

    @property
    def is_survivable(self) -> bool:
        """Whether the process may go on: its context, its allocator and its communicators are usable."""
        return not self.fatal


class _Rule(NamedTuple):
    source: Source
    pattern: str
    seen: str  # where such words come from: an issue, or the file that writes them
    fatal: str = ""
    is_certain: bool = True
    follows_anything: bool = (
        False  # the words say enough, whatever stands before them in their line
    )


_LOST_CONTEXT = "an error of the device came with it, after which its context is lost"
_LOST_ALLOCATOR = (
    "expandable segments are left half mapped, and later allocations fail (pytorch#188008)"
)
_LOST_COLLECTIVE = "the communicator is lost, and the other ranks wait in the collective"
_LOST_XPU = "the Level Zero context may be lost (intel/torch-xpu-ops#1324, #5432)"
_LOST_PINNED = "page-locked main memory ran out, and nothing that the device gives back frees any"
_LOST_WORKER = "what did not get it is usually a dataloader worker, and a smaller batch on the device does not help"
_ENDED = "the process was ended"

# What asks for page-locked memory: by name, or by a copy to main memory that does not block.
_PINS = r"pin[ _]memory|to\(['\"]cpu['\"], non_blocking"

# What is more specific comes first. A pattern starts where the words start and ends in the line
# that says it. Each repetition has a bound, and none stands in another, so that the time to read a
# log grows with its length alone.
_RULES = (
    # A collective, before the driver's words inside it.
    _Rule(
        "nccl",
        r"\bWARN Cuda failure (?:\d{1,9} )?'out of memory'",
        "NVIDIA/nccl#1235",
        _LOST_COLLECTIVE,
        follows_anything=True,
    ),
    _Rule(
        "nccl",
        r"Cuda failure (?:\d{1,9} )?'out of memory'",
        "frame of NVIDIA/nccl#1410",
        _LOST_COLLECTIVE,
    ),
    _Rule(
        "nccl",
        r"\bFailed to CUDA [cm]alloc.{0,40} \d{1,20} bytes",
        "deepspeedai/DeepSpeed#3827",
        _LOST_COLLECTIVE,
        is_certain=False,
        follows_anything=True,
    ),
    # Page-locked main memory: torch says it in the driver's words, so what called for it must stand
    # near.
    _Rule(
        "pinned",
        rf"(?:{_PINS})(?:.{{0,500}}\n){{1,4}}?.{{0,100}}Error: CUDA error: out of memory",
        "torch, utils/data/_utils/pin_memory.py; unslothai/unsloth#1797",
        _LOST_PINNED,
        follows_anything=True,
    ),
    _Rule(
        "pinned",
        r"failed to alloc \d{1,20} bytes on host: CUDA_ERROR_OUT_OF_MEMORY",
        "gaycodegal/craiyon-low-vram-easy#1",
        _LOST_PINNED,
    ),
    # The caching allocator.
    _Rule(
        "allocator",
        r"(?:CUDA|HIP|XPU|NPU|MPS backend) out of memory(?:[.:]| \(|$)",
        "torch, CUDACachingAllocator.cpp",
    ),
    _Rule(
        "allocator",
        r"Allocation on device \d{1,9} would exceed allowed memory",
        "AIFSH/ComfyUI-ChatTTS#9",
    ),
    _Rule(
        "allocator",
        r"FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed",
        "huggingface/optimum-habana#1469",
    ),
    _Rule(
        "allocator",
        r"FATAL ERROR :: MODULE:SYNHELPER workspace Allocation of size",
        "HabanaAI/Model-References#10",
    ),
    # Asserted nowhere but while the message of an OOM is written: reportProcessMemoryInfo, called
    # by a failed malloc.
    _Rule(
        "masked",
        r"NVML_SUCCESS == .{0,300}?INTERNAL ASSERT FAILED at \"[^\"\n]{0,300}CUDACachingAllocator",
        "huggingface/accelerate#3803",
    ),
    _Rule(
        "masked",
        r"!handles_\.at\(i\) INTERNAL ASSERT FAILED",
        "pytorch/pytorch#188008",
        _LOST_ALLOCATOR,
    ),
    _Rule(
        "masked",
        r"run_\w{0,40}func_\(.{0,500}?\) API call failed at \S{0,300}model_container_runner",
        "deepmd-kit#5418",
        is_certain=False,
    ),
    # The driver, outside the allocator. cudaErrorMemoryAllocation is not sticky: the context stays
    # usable.
    _Rule(
        "driver",
        r"CUDA driver error: out of memory",
        "deepmodeling/deepmd-kit#4493",
        _LOST_ALLOCATOR,
    ),
    _Rule("driver", r"(?:CUDA|HIP) [Ee]rror: out of memory", "deepbeepmeep/Wan2GP#1083"),
    _Rule("driver", r"cuda runtime error \(2\) : out of memory", "rowanz/neural-motifs#58"),
    _Rule("driver", r"cuda failed with error 2 out of memory", "junjie18/CMT#15"),
    _Rule(
        "driver",
        r"(?:\[2\] )?Call to cu\w{1,40} results in CUDA_ERROR_OUT_OF_MEMORY",
        "rapidsai/dask-cuda#225",
    ),
    _Rule(
        "driver",
        r"Error out of memory at line \d{1,9} in file .{0,300}bitsandbytes",
        "InternLM/xtuner#319",
        _ENDED,
    ),
    _Rule(
        "driver",
        r"level_zero backend failed .{0,100}OUT_OF_DEVICE_MEMORY",
        "intel/torch-xpu-ops#5432",
        _LOST_XPU,
    ),
    _Rule(
        "driver",
        r"level_zero backend failed .{0,100}OUT_OF_RESOURCES",
        "pytorch/pytorch#190972",
        _LOST_XPU,
        False,
    ),
    # Libraries: a handle, a workspace or a kernel that did not fit. Nothing is left half done.
    _Rule(
        "library",
        r"(?:CUDA|cuDNN|cusolver|cusparse) error: CU\w{1,20}_STATUS_ALLOC_FAILED",
        "QwenLM/Qwen3#873",
    ),
    _Rule("library", r"cuFFT error: CUFFT_ALLOC_FAILED", "pytorch/pytorch#6511"),
    _Rule(
        "library",
        r"CUDA error: CUBLAS_STATUS_NOT_INITIALIZED",
        "lm-evaluation-harness#1689",
        is_certain=False,
    ),
    _Rule(
        "library",
        r"cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
        "pytorch/pytorch#4107",
        is_certain=False,
    ),
    _Rule(
        "library",
        r"cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
        "pytorch/pytorch#81620",
        is_certain=False,
    ),
    _Rule(
        "library", r"Unable to find a valid cuDNN algorithm", "marqo-ai/marqo#101", is_certain=False
    ),
    _Rule(
        "library",
        r"cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR",
        "deepmd-kit#3836",
        is_certain=False,
    ),
    _Rule(
        "library",
        r"cusolver error: 7, when calling `cusolver\w{1,40}Create",
        "jzhangbs/Vis-MVSNet#38",
        is_certain=False,
    ),
    _Rule(
        "library", r"cuFFT error: CUFFT_INTERNAL_ERROR", "pytorch/pytorch#119420", is_certain=False
    ),
    _Rule("deepspeed", r"Workspace can't be allocated, no", "DeepSpeed, inference_context.h"),
    # Shared memory: torch names its files /torch_PID_..., or none. The same words with a file of
    # the user's are host's.
    _Rule(
        "shared",
        r"unable to (?:mmap|write|allocate|open|resize)[^<\n]{0,100}</?(?:torch_|filename not)[^>\n]{0,200}>: "
        r".{0,200}\((?:11|12|28)\)",
        "pytorch/pytorch#87861, idiap/ESLAM#20",
        _LOST_WORKER,
    ),
    # Main memory.
    _Rule(
        "host",
        r"(?:\[enforce fail at .{0,300})?DefaultCPUAllocator: (?:can't allocate|not enough) memory",
        "alloc_cpu.cpp",
    ),
    _Rule(
        "host",
        r"\[enforce fail at CPUAllocator\.cpp:\d{1,9}\] posix_memalign",
        "pytorch/pytorch#20618",
    ),
    _Rule(
        "host",
        r"unable to mmap \d{1,20} bytes from file .{0,300}\(12\)",
        "safetensors/safetensors#528",
    ),
    _Rule("host", r"(?:OSError: )?\[Errno 12\] Cannot allocate memory", "microsoft/Graphormer#7"),
    _Rule("host", r"ray\.exceptions\.OutOfMemoryError: ", "real-stanford/flingbot#11", _ENDED),
    _Rule(
        "host",
        r"\b(?:[\w.]{1,100}\.)?(?:_Array|Arrow)?MemoryError(?:: |$)",
        "numpy, pyarrow, Python",
    ),
    _Rule(
        "host",
        r"\bOut of memory: Killed process \d",
        "equinor/ert#7797",
        _ENDED,
        follows_anything=True,
    ),
    _Rule(
        "host",
        r"slurmstepd: error: Detected \d{1,9} oom[-_]kill event",
        "ArjunaCluster/ArjunaUsers#52",
        _ENDED,
        follows_anything=True,
    ),
    _Rule(
        "host",
        r"srun: error: .{0,200}?: Out Of Memory",
        "brain-score/vision#950",
        _ENDED,
        follows_anything=True,
    ),
    _Rule(
        "host",
        r"terminate called after throwing an instance of 'std::bad_alloc'",
        "Parskatt/RoMa#134",
        _ENDED,
    ),
    _Rule(
        "host",
        r"memory allocation of \d{1,20} bytes failed",
        "deepspeedai/DeepSpeedExamples#321",
        _ENDED,
    ),
    # torch's own class, whatever it says: ComfyUI#4880 cuts the message to "Allocation on device".
    _Rule("allocator", r"\b(?:[\w.]{1,100}\.)?OutOfMemoryError: ", "Comfy-Org/ComfyUI#4880"),
)
_COMPILED = tuple((rule, re.compile(rule.pattern, re.MULTILINE)) for rule in _RULES)

# Errors after which every call on the device fails until the process is new. They are no OOM, but
# they may follow one.
_STICKY = re.compile(
    r"illegal memory access|device-side assert triggered|unspecified launch failure|misaligned address"
    r"|illegal instruction|uncorrectable (?:ECC|NVLink)|the launch timed out|hardware stack error"
    r"|invalid program counter|DEVICE_LOST"
)

# An error of these kinds speaks about the program or the data, and may quote anything.
_NEVER = (
    "ArithmeticError|AssertionError|AttributeError|EOFError|ImportError|IndexError|KeyError|LookupError|ModuleNotFoundError"
    "|NameError|NotImplementedError|SyntaxError|TypeError|UnicodeDecodeError|UnicodeEncodeError|ValueError|Warning"
)
# What may stand before the words in their line: the mark of a log or the name of an error. A
# sentence may not, nor a quote, nor the line of a program that raises it, which a traceback shows.
_LED = re.compile(r"^\s*$|[:\])>|│-]\s+$|^(?!.*\braise ).*Error\(['\"]$")
_LED_BY_OTHER = re.compile(rf"(?:{_NEVER}): $")

# torch divides by 1024 whatever it calls the unit; older MPS allocators write GB, and the kernel
# writes kB.
_SIZE = r"(\d{1,20}(?:\.\d{0,9})?) ?([KkMGTPE]?)i?[Bb](?:ytes)?"
_NUMBERS = {
    "requested_bytes": (
        rf"[Tt]ried to allocate {_SIZE}",
        rf"Requested {{0,40}}: {_SIZE}",
        rf"Unable to allocate {_SIZE}",
        r"[Aa]lloc\w{0,20}(?: async| failed for size| of size)? ?:{0,2}(\d{1,20})()(?: bytes| \(|\sfailed)",
        r"(?:mmap|allocation of) (\d{1,20})() bytes",
    ),
    "total_bytes": (
        rf"total capaci?ty of {_SIZE}",
        rf"{_SIZE} total capacity",
        rf"Device limit {{0,40}}: {_SIZE}",
    ),
    "free_bytes": (
        rf"of which {_SIZE} is free",
        rf"{_SIZE} free;",
        rf"Free \(according to CUDA\): {_SIZE}",
    ),
    "limit_bytes": (rf"{_SIZE} allowed;", rf"max allowed: {_SIZE}"),
    "allocated_bytes": (
        rf"{_SIZE} is allocated by PyTorch",
        rf"{_SIZE} already allocated",
        rf"Currently allocated {{0,40}}: {_SIZE}",
        rf"MPS allocated: {_SIZE}",
    ),
    "reserved_bytes": (rf"{_SIZE} reserved in total by PyTorch",),
    "unused_bytes": (rf"{_SIZE} is reserved by PyTorch but unallocated", rf"{_SIZE} cached\)"),
}
_DEVICE = re.compile(r"\b(?:[GN]PU|on device) {1,4}(\d{1,9})\b")
_HOLDER = re.compile(
    rf"(?:this process|[Pp]rocess (\d{{1,20}})) has {_SIZE} memory in use"
    rf"|Killed process (\d{{1,20}}) .{{0,200}}anon-rss:{_SIZE}"
)
_NUM_LINES = 6
_HEAD_CHARACTERS = (
    600  # before the words in their line: what a log or a traceback puts there is shorter
)
_SAID_CHARACTERS = 6000
_CONTEXT_BYTES = 2 * GIB  # of CUDA and NCCL in a process, at most, beside what torch has reserved
_ROUNDING_BYTES = 10 << 20  # a message has two digits after the point
_LARGEST_BYTES = 1 << 60  # no device has more; NVML's "not available" reads as 1 << 64


def classify(error: BaseException | str) -> OutOfMemory | None:
    """Say whether an error or a log text is an out-of-memory error; None where it is none.

    Pure on words: of an exception it reads the names of its classes and its text, then the
    exceptions of a group, its cause and its context, the nearest OOM first. What is raised to end
    the program (KeyboardInterrupt, SystemExit) is none, whatever it interrupted. Nothing of the
    exception is kept.

    >>> found = classify("RuntimeError: CUDA error: out of memory")
    >>> found.source, found.is_survivable
    ('driver', True)
    >>> classify("OSError: [Errno 28] No space left on device") is None
    True
    """
    if isinstance(error, str):
        return _read(error, [error])
    chain = list(_chain(error))
    all_texts = [text for one in chain for text in _texts(one)]
    return next(
        (found for one in chain for text in _texts(one) if (found := _read(text, all_texts))), None
    )


def _chain(error: BaseException) -> Iterator[Exception]:
    """The error and those it came from, each once, since a chain may be a circle; none that ends the program."""
    waiting: list[object] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop(0)
        if id(one) in seen or not isinstance(one, Exception):
            continue
        seen.add(id(one))
        yield one
        # The groups of Python 3.11 by their attribute: in 3.10 a library brings them.
        grouped = getattr(one, "exceptions", ())
        waiting += grouped if isinstance(grouped, (list, tuple)) else ()
        waiting.append(one.__cause__ if one.__suppress_context__ else one.__context__)


def _texts(error: Exception) -> list[str]:
    """The error as a traceback ends, once for each of its classes: a subclass of torch's is what torch's is."""
    names = [
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
        for kind in type(error).__mro__[:-2]
    ]
    if any(re.search(rf"(?:{_NEVER})$", name) for name in names):
        return []
    return [f"{_pinning(error)}{name}: {error}" for name in names]


def _pinning(error: Exception) -> str:
    """The line that raised, if it asked for page-locked memory: nothing in the error itself says so."""
    raised = [
        f"in {frame.name}: {frame.line}\n"
        for frame in traceback.extract_tb(error.__traceback__, limit=-1)
    ]
    return "".join(line for line in raised if re.search(_PINS, line))


def _read(text: str, all_texts: list[str]) -> OutOfMemory | None:
    """The first OOM in a text: what is certain before what is not, and of two at one place that of the first rule."""
    text = text.replace("\r\n", "\n").replace(
        "\r", "\n"
    )  # a progress bar ends its lines by that alone
    matches = [
        (rule, match)
        for rule, pattern in _COMPILED
        if (match := _first(rule, pattern, text)) is not None
    ]
    if not matches:
        return None
    rule, match = min(matches, key=lambda one: (not one[0].is_certain, one[1].start()))
    end = match.end()
    said = text[end - len(_head(text, end)) : end + _SAID_CHARACTERS]
    is_lost = any(_STICKY.search(one) for one in all_texts)
    return _found(
        rule, "\n".join(said.splitlines()[:_NUM_LINES]), _LOST_CONTEXT if is_lost else rule.fatal
    )


def _first(rule: _Rule, pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    for match in pattern.finditer(text):
        head = _head(text, match.start())
        if rule.follows_anything or (_LED.search(head) and not _LED_BY_OTHER.search(head)):
            return match
    return None


def _head(text: str, end: int) -> str:
    """What stands before a place in its line, as far back as counts."""
    start = max(0, end - _HEAD_CHARACTERS)
    return text[max(start, text.rfind("\n", start, end) + 1) : end]


def _found(rule: _Rule, said: str, fatal: str) -> OutOfMemory:
    numbers = {
        name: next(
            (_bytes(*match.groups()) for one in patterns if (match := re.search(one, said))), None
        )
        for name, patterns in _NUMBERS.items()
    }
    holders = [
        (
            int(pid) if (pid := one[1] or one[4]) else None,
            _bytes(one[2] or one[5], one[3] or one[6]),
        )
        for one in _HOLDER.finditer(said)
    ]
    device = _DEVICE.search(said)
    found = OutOfMemory(
        source=rule.source,
        is_certain=rule.is_certain,
        fatal=fatal,
        text=said,
        device=int(device[1]) if device else None,
        process_bytes=tuple(holders),
        **numbers,
    )
    return replace(
        found, fatal=fatal or _contradiction(found), process_bytes=tuple(_own_marked(found))
    )


def _contradiction(found: OutOfMemory) -> str:
    """Why the numbers of a message cannot all be true; empty where they can."""
    in_use = [num_bytes for _, num_bytes in found.process_bytes]
    told = (
        found.total_bytes,
        found.free_bytes,
        found.allocated_bytes,
        found.reserved_bytes,
        found.unused_bytes,
        *in_use,
    )
    largest = max((number for number in told if number is not None), default=0)
    if largest >= _LARGEST_BYTES:
        return f"its numbers cannot be true: {size(largest)} of a device"
    if found.total_bytes is None or found.free_bytes is None:
        return ""
    if found.free_bytes > found.total_bytes:
        return f"its numbers cannot be true: {size(found.free_bytes)} free of {size(found.total_bytes)}"
    # Half of a card does not become free between the refusal and the message, a neighbour's block
    # may.
    refused, is_limited = found.requested_bytes, found.limit_bytes is not None
    if (
        refused is not None
        and not is_limited
        and found.free_bytes >= max(2 * refused, found.total_bytes // 2)
    ):
        return (
            f"its numbers contradict each other: {size(refused)} were refused with {size(found.free_bytes)} of "
            f"{size(found.total_bytes)} free, so asking for less need not help"
        )
    return ""


def _own_marked(found: OutOfMemory) -> list[tuple[int | None, int]]:
    """The processes of a message, its own one without a pid: in a container torch does not know its pid outside.

    The own one holds what torch says that it has reserved, and a context: of those that fit, the
    nearest is taken.
    """
    holders = list(found.process_bytes)
    own_bytes = (found.allocated_bytes or 0) + (found.unused_bytes or 0)
    if found.allocated_bytes is None or any(pid is None for pid, _ in holders):
        return holders
    rounding = own_bytes // 1000 + _ROUNDING_BYTES
    fits = [one for one in holders if own_bytes - rounding <= one[1] <= own_bytes + _CONTEXT_BYTES]
    own = min(fits, key=lambda one: one[1], default=None)
    return [(None, one[1]) if one is own else one for one in holders]


def _bytes(number: str, unit: str | None) -> int:
    return int(float(number.rstrip(".")) * KIB ** (" KMGTPE".index(unit.upper()) if unit else 0))
