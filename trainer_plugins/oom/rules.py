"""The words that mean out of memory, where each was seen, and whether a run survives it."""

from functools import partial
from typing import Literal, NamedTuple

Source = Literal[  # the component that got no memory
    "allocator",  # torch's caching allocator on a CUDA, HIP, XPU, MPS, NPU, HPU or simulated card
    "masked",  # the same, hidden behind an error while reporting it
    "driver",  # a call of the CUDA, HIP or Level Zero driver outside the allocator
    "library",  # cuBLAS, cuDNN, cuSOLVER, cuFFT
    "nccl",  # a collective
    "deepspeed",  # the workspace of its inference kernels
    "pinned",  # page-locked main memory
    "shared",  # `/dev/shm`
    "host",  # main memory, including everything that kills a process over it
    "engine",  # vLLM or SGLang refusing to start, before any allocation
]


class Rule(NamedTuple):
    """A pattern that means out of memory, and its consequences for the process."""

    source: Source
    pattern: str
    seen: str  # source of the words: an issue, or the file that writes them
    fatal: str = ""  # why the process cannot go on; empty if it can
    is_certain: bool = True
    follows_anything: bool = False  # any text may precede the words in their line


LOST_CONTEXT = "a device error came with it, after which the CUDA context is lost"
_LOST_ALLOCATOR = (
    "expandable segments are left half mapped, and later allocations fail (pytorch#188008)"
)
_LOST_COLLECTIVE = "the communicator is lost, and the other ranks wait in the collective"
_LOST_XPU = "the Level Zero context may be lost (intel/torch-xpu-ops#1324, #5432)"
_LOST_PINNED = "page-locked main memory ran out, and freeing device memory does not help"
_LOST_WORKER = (
    "it is usually a dataloader worker that failed to get it, and a smaller batch on the device"
    " does not help"
)
_ENDED = "the process was ended"
_NOT_STARTED = "the engine did not start"
KILLED_FROM_OUTSIDE = "the process was killed from outside, and the log does not say by what"

# Code that requests page-locked memory: by name, or by a non-blocking copy to main memory.
# Unsloth's checkpointing keeps activations in pinned buffers too.
PINS = r"pin[ _]memory|to\(\\?['\"]cpu\\?['\"], ?non_blocking|CPU_BUFFERS|x\.resize_\(new_size\)"

# "Killed" in the translations of bash and glibc (po/*.po of both).
KILLED = (
    r"Killed(?:: 9)?|已杀死|强制结束|強制結束|強制終了|已砍除|죽었음|Getötet|Gekillt"
    r"|Abgebrochen \(Killed\)|Tué|Processus arrêté|Matado"
    r"|Terminado \(killed\)|Morto(?: \(Killed\))?|Убито?|Вбито|Вбитий"
    r"|Ucciso|Unicestwiony|Öldürüldü|Süreç durduruldu|Bị giết"
    r"|Bị buộc kết thúc|Geëlimineerd|Dödad|Dræbt|Drept"
    r"|Zabit(?: \(SIGKILL\))?|Matat|Tapettu|Kilőve|Terbunuh|Ubijen"
    r"|Σκοτώθηκε"
)

_allocator = partial(Rule, "allocator")
_driver = partial(Rule, "driver")
_ended = partial(Rule, "host", fatal=_ENDED)
_ended_anywhere = partial(_ended, follows_anything=True)
_engine = partial(Rule, "engine", fatal=_NOT_STARTED)
_host = partial(Rule, "host")
_killed = partial(Rule, "host", fatal=KILLED_FROM_OUTSIDE, is_certain=False, follows_anything=True)
_library = partial(Rule, "library")
_nccl = partial(Rule, "nccl", fatal=_LOST_COLLECTIVE)
_perhaps_library = partial(Rule, "library", is_certain=False)
_pinned = partial(Rule, "pinned", fatal=_LOST_PINNED)
_shared = partial(Rule, "shared", fatal=_LOST_WORKER)

# Specific rules come first. A pattern starts at the words and ends in the same line. Each
# repetition is bounded and none is nested, so reading a log takes linear time.
RULES = (
    # Collectives, whose messages contain the driver's words.
    _nccl(
        r"\bWARN Cuda failure (?:\d{1,9} )?'out of memory'",
        "NVIDIA/nccl#1235",
        follows_anything=True,
    ),
    _nccl(r"Cuda failure (?:\d{1,9} )?'out of memory'", "frame of NVIDIA/nccl#1410"),
    _nccl(
        r"\bFailed to CUDA [cm]alloc.{0,40} \d{1,20} bytes"
        r"|\bibv_reg_mr\w{0,20} failed with error Cannot allocate memory",
        "deepspeedai/DeepSpeed#3827; NCCL, transport/net_ib.cc",
        is_certain=False,
        follows_anything=True,
    ),
    # Page-locked main memory. The words are the driver's, so we look for the requesting call.
    _pinned(
        rf"(?:{PINS})(?:.{{0,500}}\n){{1,4}}?.{{0,100}}Error: CUDA error: out of memory",
        "torch, utils/data/_utils/pin_memory.py; unslothai/unsloth#1797",
        follows_anything=True,
    ),
    _pinned(
        r"failed to alloc \d{1,20} bytes on host: CUDA_ERROR_OUT_OF_MEMORY",
        "gaycodegal/craiyon-low-vram-easy#1",
    ),
    # The caching allocator.
    _allocator(
        r"(?:CUDA|HIP|XPU|NPU|MPS backend) out of memory"
        r"(?:[.:]| \(|$| occurred when warming up)",
        "torch, CUDACachingAllocator.cpp; vllm-project/vllm#14452",
    ),
    _allocator(
        r"Current platform can NOT allocate memory block with size larger than 4GB!",
        "intel/intel-extension-for-pytorch#629: first generation of Arc",
    ),
    # torch's own words with backend:cudaMallocAsync.
    _allocator(
        r"Allocation on device \d{1,9} would exceed allowed memory", "AIFSH/ComfyUI-ChatTTS#9"
    ),
    _allocator(r"Invalid buffer size: \d", "pytorch/pytorch#141909: MPS, one buffer"),
    _allocator(
        r"FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed", "huggingface/optimum-habana#1469"
    ),
    _allocator(
        r"FATAL ERROR :: MODULE:SYNHELPER workspace Allocation of size",
        "HabanaAI/Model-References#10",
    ),
    _allocator(
        r"\bEL0004\)?: .{0,100}?Failed to allocate memory",
        "PKU-YuanGroup/Helios#62: CANN, of an Ascend card",
        follows_anything=True,
    ),
    # torch asserts this only while writing an OOM message (reportProcessMemoryInfo).
    Rule(
        "masked",
        r"NVML_SUCCESS == .{0,300}?INTERNAL ASSERT FAILED at \"[^\"\n]{0,300}CUDACachingAllocator",
        "huggingface/accelerate#3803",
    ),
    Rule(
        "masked",
        r"!handles_\.at\(i\) INTERNAL ASSERT FAILED",
        "pytorch/pytorch#188008",
        fatal=_LOST_ALLOCATOR,
    ),
    Rule(
        "masked",
        r"run_\w{0,40}func_\(.{0,500}?\) API call failed at \S{0,300}model_container_runner",
        "deepmd-kit#5418",
        is_certain=False,
    ),
    # The driver, outside the allocator. cudaErrorMemoryAllocation leaves the context usable.
    _driver(
        r"CUDA driver error: out of memory", "deepmodeling/deepmd-kit#4493", fatal=_LOST_ALLOCATOR
    ),
    _driver(r"(?:CUDA|HIP) [Ee]rror: out of memory", "deepbeepmeep/Wan2GP#1083"),
    _driver(r"[Cc]uda [Ee]rror: out of memory at .{0,200}cumem_allocator", "verl-project/verl#302"),
    _driver(r"cuda runtime error \(2\) : out of memory", "rowanz/neural-motifs#58"),
    _driver(r"cuda failed with error 2 out of memory", "junjie18/CMT#15"),
    _driver(r"Triton Error \[CUDA\]: out of memory", "triton, driver.c: gpuAssert"),
    _driver(
        r"Check failed: .{0,100}cudaErrorCudartUnloading: CUDA: out of memory",
        "dmlc/dgl and TVM, cuda_device_api.cc: CUDA_CALL",
        follows_anything=True,
    ),
    _driver(
        r"Unexpected error from cudaGetDeviceCount\(\).{0,200} Error 2: out of memory",
        "pytorch/pytorch#150048",
        follows_anything=True,
    ),
    _driver(
        r"(?:\[2\] )?Call to cu\w{1,40} results in CUDA_ERROR_OUT_OF_MEMORY",
        "rapidsai/dask-cuda#225",
    ),
    _driver(
        r"Error out of memory at line \d{1,9} in file .{0,300}bitsandbytes",
        "InternLM/xtuner#319",
        fatal=_ENDED,
    ),
    _driver(
        r"(?:(?:level_zero|UR) backend|Native API) failed\b.{0,100}OUT_OF_DEVICE_MEMORY"
        r"|UR error: .{0,40}OUT_OF_DEVICE_MEMORY",
        "intel/torch-xpu-ops#5432",
        fatal=_LOST_XPU,
    ),
    _driver(
        r"(?:(?:level_zero|UR) backend|Native API) failed\b.{0,100}OUT_OF_RESOURCES",
        "pytorch/pytorch#190972, intel/torch-xpu-ops#1761",
        fatal=_LOST_XPU,
        is_certain=False,
    ),
    _driver(
        r"Command buffer execution failed: Insufficient Memory|error: Insufficient Memory \(",
        "ml-explore/mlx#479, ggml-org/llama.cpp#16274: Metal's words, whose ever they are",
        fatal=_ENDED,
    ),
    # Libraries: no memory for a handle, a workspace or a kernel. Nothing is left half done.
    _library(
        r"(?:CUDA|cuDNN|cusolver|cusparse) error: CU\w{1,20}_STATUS_ALLOC_FAILED",
        "QwenLM/Qwen3#873",
    ),
    _library(r"cuFFT error: CUFFT_ALLOC_FAILED", "pytorch/pytorch#6511"),
    _perhaps_library(r"CUDA error: CUBLAS_STATUS_NOT_INITIALIZED", "lm-evaluation-harness#1689"),
    _perhaps_library(r"cuDNN error: CUDNN_STATUS_NOT_SUPPORTED", "pytorch/pytorch#4107"),
    _perhaps_library(r"cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", "pytorch/pytorch#81620"),
    _perhaps_library(r"cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", "seanie12/Info-HCVAE#7"),
    _perhaps_library(r"Unable to find a valid cuDNN algorithm", "marqo-ai/marqo#101"),
    _perhaps_library(r"cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR", "deepmd-kit#3836"),
    _perhaps_library(
        r"cusolver error: 7, when calling `cusolver\w{1,40}Create", "jzhangbs/Vis-MVSNet#38"
    ),
    _perhaps_library(r"cuFFT error: CUFFT_INTERNAL_ERROR", "pytorch/pytorch#119420"),
    Rule("deepspeed", r"Workspace can't be allocated, no", "DeepSpeed, inference_context.h"),
    # Shared memory: torch names its files /torch_PID_..., or not at all. The same words with a
    # user's file mean main memory (host).
    _shared(
        r"unable to (?:mmap|write|allocate|open|resize)[^<\n]{0,100}"
        r"</?(?:torch_|filename not)[^>\n]{0,200}>: "
        r".{0,200}\((?:11|12|28)\)",
        "pytorch/pytorch#87861, idiap/ESLAM#20",
    ),
    _shared(
        r"shared memory segment /dev/shm/[^\n]{0,100}: (?:No space left|Cannot allocate memory)",
        "llm-d/llm-d#352: NCCL's",
        follows_anything=True,
    ),
    _shared(
        r"is killed by signal: Bus error|Unexpected bus error encountered in worker",
        "pytorch/pytorch#108861, msr-fiddle/pipedream#28",
        is_certain=False,
        follows_anything=True,
    ),
    # Main memory.
    _host(
        r"(?:\[enforce fail at .{0,300})?DefaultCPUAllocator: (?:can't allocate|not enough) memory",
        "alloc_cpu.cpp",
    ),
    _host(r"\[enforce fail at CPUAllocator\.cpp:\d{1,9}\] posix_memalign", "pytorch/pytorch#20618"),
    _host(r"unable to mmap \d{1,20} bytes from file .{0,300}\(12\)", "safetensors/safetensors#528"),
    _host(r"(?:OSError: )?\[Errno 12\] Cannot allocate memory", "microsoft/Graphormer#7"),
    _ended(
        r"ray\.exceptions\.OutOfMemoryError: |Task was killed due to the node running low on memory"
        r"|Memory on the node \(IP: ",
        "real-stanford/flingbot#11, OpenRLHF/OpenRLHF#1013",
    ),
    _ended_anywhere(
        r"\b[1-9]\d{0,8} Workers \(tasks / actors\) killed due to memory pressure"
        r"|address the out of memory issue: https://docs\.ray\.io",
        "WM-PO/WMPO#3, TideDra/lmm-r1#71",
    ),
    _host(r"\b(?:[\w.]{1,100}\.)?(?:_Array|Arrow)?MemoryError(?:: |$)", "numpy, pyarrow, Python"),
    _ended_anywhere(
        r"\bOut of memory: Killed process \d|\binvoked oom-killer: |\boom-kill:constraint=",
        "equinor/ert#7797, gensyn-ai/rl-swarm#463",
    ),
    _ended_anywhere(
        r"slurmstepd: error: Detected \d{1,9} oom[-_]kill event"
        r"|(?:slurmstepd|srun)[^\n]{0,80}[Ee]xceeded (?:job |step )?memory limit",
        "ArjunaCluster/ArjunaUsers#52, openbabel/openbabel#2658",
    ),
    _ended_anywhere(r"srun: error: .{0,200}?: Out Of Memory", "brain-score/vision#950"),
    _ended(r"terminate called after throwing an instance of 'std::bad_alloc'", "Parskatt/RoMa#134"),
    _ended(r"memory allocation of \d{1,20} bytes failed", "deepspeedai/DeepSpeedExamples#321"),
    _host(
        r"Cannot allocate memory \(os error 12\)|\bOs \{ code: 12, kind: OutOfMemory",
        "how Rust writes an io::Error: safetensors, tokenizers",
        follows_anything=True,
    ),
    _host(
        r"\[WinError 1455\]|\( ?os error 1455 ?\)",
        "cszn/KAIR#127",
        fatal="Windows' commit limit is reached, and freeing device memory does not raise it",
        follows_anything=True,
    ),
    _ended_anywhere(
        r"\bOOM ?Kill(?:ed)?\b|\bMemory cgroup out of memory: Kill"
        r"|node was low on resource: memory",
        "alauda/kubeflow-chart#45, docker/for-linux#1001, kubeflow/trainer#301",
    ),
    # Inference engines that refuse to start. vLLM raises a ValueError.
    _engine(r"(?:ValueError: )?Free memory on device.{0,60} on startup", "pytorch/pytorch#175666"),
    _engine(
        r"(?:ValueError: )?(?:No available memory for the cache blocks\. Try"
        r"|To serve at least one request with the model|The model's max seq len \(\d)",
        "vllm-project/vllm#2248, #34076, #2418",
    ),
    _engine(
        r"Not enough memory\. Please try to increase --mem-fraction-static",
        "sgl-project/sglang#4330",
    ),
    _engine(
        r"alloc_\w{3,40} runs out of memory|(?:Prefill|Decode) out of memory\. Try to lower",
        "sgl-project/sglang#10408; sglang, mem_cache/common.py",
        fatal=_ENDED,
    ),
    # Killed by a signal: often for lack of main memory, but any program may send it. The code or
    # the signal stands near a word for ending, in either order.
    _killed(
        r"(?i:\b(?:exit\w{0,8}|rc|return(?:ed|s)?[_ -]?(?:code|value|status))"
        r"(?![\w-])[^\n\d\[+]{0,40}?(?<![\w.+-])\(?(?:-9|137)(?![A-Za-z0-9_%-]|\.\d)"
        r"|\b(?:ended|died|terminated|killed)\b[^\n\d\[+]{0,24}?(?<![\w.+-])-9(?![A-Za-z0-9_%-]|\.\d)"
        r"|(?<![\w.+\[-])(?:-9|137)\b[^\n\d]{0,12}?\b(?:exit|return)[_ -]?(?:code|status|value))"
        r"|(?<!closing )(?<!nding )(?<!send )\b[Ss]ignals?\b[^\n\w]{1,6}"
        r"(?:9\b(?!\.)|SIGKILL|killed\b)|<Signals\.SIGKILL"
        r"|\b(?:[Kk]illed|died|terminated|received|got|was sent)\b[^\n\d]{0,24}?SIGKILL",
        "lm-sys/FastChat#568, deepspeedai/DeepSpeed#4239, mozilla/bugbug#3906, Unakar/Logic-RL#18",
    ),
    _killed(
        r"worker may have exceeded K8s pod memory limits"
        r"|the process was killed by the OOM killer due to high memory usage",
        "AgentR1/Agent-R1#33, verl-project/verl#4921: Ray, of any worker that has died",
    ),
    _killed(
        rf"is killed by signal: Killed|: {{1,8}}\d{{1,9}} (?:{KILLED}) {{2,30}}\S"
        rf"|(?:^|\])(?:{KILLED}) {{0,4}}$|^(?:\[\d{{1,4}}\])?[+-]? {{1,4}}(?:{KILLED}) {{2,30}}\S"
        r"|\bzsh: killed {2,12}\S|\btask \d{1,6}: Killed",
        "thangvubk/SoftGroup#18, InternLandMark/LandMark#65; what shells and srun say",
    ),
    # torch's own class with any message: ComfyUI#4880 cuts it to "Allocation on device".
    _allocator(r"\b(?:[\w.]{1,100}\.)?OutOfMemoryError: ", "Comfy-Org/ComfyUI#4880"),
)
