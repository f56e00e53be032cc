"""Define remedies around the run: card, allocator, inference engines, main memory, diagnosis."""

from dataclasses import replace
from math import floor

from trainer_plugins.advice.entry import Advice

# Every torch reads this name; torch 2.9 and earlier do not know the newer PYTORCH_ALLOC_CONF
# (pytorch#183387). Alone: with max_split_size_mb beside it, reserved memory grows (pytorch#123548).
EXPANDABLE_SEGMENTS = Advice(
    effect="lets the allocator join the free pieces of its segments",
    price="usually none; not compatible with vLLM's sleep mode",
    environment="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
)
MAX_SPLIT_SIZE = Advice(
    effect="stops the allocator from splitting large blocks",
    price="more memory may stay reserved, and more driver calls take time",
    environment="PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:MEGABYTES",
)
EXPORT_SETTINGS = Advice(
    effect="exports the allocator settings that suit this machine",
    shell='eval "$(trainer-plugins env)"',
)
EXPORT_SETTINGS_FOR_VLLM = Advice(
    effect="exports allocator settings that let the training process run vLLM",
    shell='eval "$(trainer-plugins env --vllm)"',
)
# set_per_process_memory_fraction sets its limit, which is lifted after training.
HEADROOM = Advice(
    effect="makes torch release its cache earlier, which leaves NCCL 1 to 2 GiB of a large card",
    price="tensors cannot use the memory that stays free",
    code="trainer.add_callback(trainer_plugins.Headroom(leave_fraction=0.05))",
)
MEMORY_FRACTION = replace(HEADROOM, code="torch.cuda.set_per_process_memory_fraction(0.95)")
# NCCL 2.24 and later register it through cuMem, which WSL2 and some containers refuse.
NO_CUMEM_HOST = Advice(
    effect="makes NCCL share main memory the older way, which WSL2 and containers allow",
    environment="NCCL_CUMEM_HOST_ENABLE=0",
)
NO_NCCL_SHM = Advice(
    effect="makes NCCL send between cards without shared memory",
    price="slower collectives",
    environment="NCCL_SHM_DISABLE=1",
)
NEWER_NCCL = Advice(
    effect="falls back to the older way by itself in later versions",
    shell="pip install -U nvidia-nccl-cu12   # as your torch allows, or a newer torch",
)
SMALLER_NCCL_BUFFERS = Advice(
    effect="shrinks NCCL's buffers to a quarter of the usual 4 MiB each",
    price="slower collectives",
    environment="NCCL_BUFFSIZE=1048576",
)
LIST_PROCESSES = Advice(
    effect="shows which processes hold memory on the card",
    shell="nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv",
)
SHOW_HOLDERS = Advice(
    effect="lists all processes that use the card, also in other containers (run it on the host)",
    shell="sudo fuser -v /dev/nvidia*",
)
SHOW_CARDS = Advice(
    effect="shows how full each card is",
    shell="nvidia-smi --query-gpu=index,memory.used,memory.total --format=csv",
)
LARGER_CARD = Advice(
    effect="gives the failing request enough room",
    price="later requests of the same step are not counted",
    shell="run where this process can hold SIZE",
)
OTHER_CARD = Advice(
    effect="runs on another card",
    environment="CUDA_VISIBLE_DEVICES=CARD",
    shell="CUDA_VISIBLE_DEVICES=CARD COMMAND",
)
ONE_CARD = Advice(
    effect="uses one card, with per_device_train_batch_size rows in all, not as many on each",
    environment="CUDA_VISIBLE_DEVICES=0",
    shell="CUDA_VISIBLE_DEVICES=0 COMMAND",
)
END_PROCESS = Advice(
    effect="frees the card if the process is a dead run of yours",
    price="the process loses its work",
    shell="kill PID",
)
WATCH_THE_CARD = Advice(
    effect="shows whether another process comes and goes while the run starts",
    only_on=("CUDA", "NPU", "XPU", "HPU"),
    shell="nvidia-smi --query-gpu=memory.used,memory.free --format=csv -l 1",
)
MAPPING_LIMITS = Advice(
    effect="shows the limits on mappings and locked memory, which the driver reports as 'out of"
    " memory'",
    only_on=("CUDA", "NPU", "XPU", "HPU"),
    shell="cat /proc/sys/vm/max_map_count; ulimit -v -l",
)
WSL_MEMORY = Advice(
    effect="gives WSL more main memory; it can pin at most half of it",
    shell="wsl --shutdown, then memory=... in .wslconfig",
)
ROCM_MEMORY = Advice(
    effect="shows which memory the driver counts",
    only_on=("HIP",),
    shell="rocm-smi --showmeminfo vram gtt",
)
ROCM_LOG = Advice(
    effect="shows why the driver refused", only_on=("HIP",), shell="dmesg | grep -i amdgpu"
)
# torch-xpu-ops#1406 (2025-03)
CLOSE_OTHER_PROGRAMS = Advice(
    effect="frees memory for the GPU, which shares main memory on a Mac",
    only_on=("MPS",),
    shell="close other programs that draw or compute",
)

# Computed from the run's current share (`smaller_share`): a constant might raise it.
SMALLER_ENGINE_SHARE = Advice(
    effect="limits the engine to this share of the card, for weights and KV cache together",
    price="the engine runs fewer sequences at once",
    trl="--vllm_gpu_memory_utilization SHARE",
    arguments="vllm_gpu_memory_utilization=SHARE",
    code="gpu_memory_utilization=SHARE",
    vllm="--gpu-memory-utilization SHARE",
    sglang="--mem-fraction-static SHARE",
    verl="actor_rollout_ref.rollout.gpu_memory_utilization=SHARE",
    plan="--vllm-utilization SHARE",
)
LARGER_ENGINE_SHARE = replace(
    SMALLER_ENGINE_SHARE,
    effect="leaves the KV cache more: it gets this share minus weights and graphs",
    price="less room for everything else on the card",
)
SHORTER_REQUESTS = Advice(
    effect="limits requests to the longest that the KV cache can hold now",
    price="longer requests are refused",
    trl="--vllm_max_model_length LENGTH",
    vllm="--max-model-len LENGTH",
)
FEWER_SEQUENCES = Advice(
    effect="warms up the sampler and the graphs for fewer sequences",
    price="fewer sequences at once",
    vllm="--max-num-seqs SEQUENCES",
    sglang="--cuda-graph-max-bs SEQUENCES",
)
TENSOR_PARALLEL = Advice(
    effect="puts half of the weights on each of two cards; a quantised checkpoint helps too",
    price="another card",
    vllm="--tensor-parallel-size 2",
    sglang="--tp 2",
)
SLEEP_MODE = Advice(
    effect="releases vLLM's memory while the training computes",
    price="vLLM reloads its weights before each generation",
    trl="--vllm_enable_sleep_mode True",
)
_SHARE_STEP = 0.05


def smaller_share(share: float, missing: float = 0.0) -> float:
    """Lower an engine's share by the missing part, if known, but not below half of it."""
    step = max(missing, _SHARE_STEP) if missing else max(share / 8, _SHARE_STEP)
    return floor(round(100 * max(share - step, share / 2), 3)) / 100


# Before a larger /dev/shm: it works even if the user may not restart the container.
FEWER_WORKERS = Advice(
    effect="frees what each worker holds: batches, libraries, a data set copy, space in /dev/shm",
    price="loading no longer overlaps with training",
    trainer="--dataloader_num_workers WORKERS",
    unfilled="lower --dataloader_num_workers",
    code="DataLoader(..., num_workers=WORKERS)",
)
NO_PINNED_BATCHES = Advice(
    effect="stops page-locking the batches",
    price="copies to the card no longer overlap with compute",
    trainer="--dataloader_pin_memory False",
    code="DataLoader(..., pin_memory=False)",
)
LARGER_SHM = Advice(
    effect="raises /dev/shm from docker's 64 MiB (Kubernetes: an emptyDir with medium: Memory)",
    shell="docker run --shm-size=SIZE",
    unfilled="docker run --shm-size=16g",
)
MORE_MAIN_MEMORY = Advice(
    effect="raises the memory limit of the container or the job",
    shell="docker run --memory=SIZE (Slurm: --mem=SIZE; Kubernetes: resources.limits.memory)",
)
MORE_SLURM_MEMORY = Advice(
    effect="raises the job's memory limit",
    shell="#SBATCH --mem=0   # all of the node, or a number above MaxRSS of sacct",
)
LARGER_PAGING_FILE = Advice(
    effect="raises the limit; little of the file is ever written",
    shell="enlarge the paging file (System, Advanced, Performance, Virtual memory)",
)
LOCK_MORE_MEMORY = Advice(
    effect="lets a process lock as much memory as it asks for",
    shell="ulimit -l unlimited; in Docker: --ulimit memlock=-1",
)
FIND_THE_KILL = Advice(
    effect="shows whether main memory ran out, and how much the process used",
    shell="sudo dmesg -T | grep -i 'killed process'",
)
ASK_SLURM = Advice(
    effect="shows whether the job was preempted, cancelled, timed out or out of memory",
    shell="sacct -j JOB --format=State,ExitCode,MaxRSS,ReqMem",
)
LIGHTER_SAMPLES = Advice(
    effect="shrinks each sample: one sample, not the number of workers, fills main memory",
    code="build less in one sample (dataset, collate_fn): masks, decoded pictures, sound,"
    " video, a long text in one piece",
)
SHOW_MAIN_MEMORY = Advice(
    effect="shows how much main memory is left",
    shell="free -h   # while it runs",
)
CHECK_LAUNCH_FILE = Advice(
    effect="compares the main memory that the offload needs with what this machine has",
    shell="trainer-plugins configs check your_launch_file.yaml",
)

OBSERVE = Advice(
    effect="records memory at each step, which distinguishes a long batch from steady growth",
    shell="trainer-plugins exec --preset observe -- COMMAND",
)
PLAN_THE_RUN = Advice(
    effect="predicts this run's peak, and searches for changes that make it fit",
    shell="trainer-plugins plan OPTIONS",
)
PRINT_THE_OOM = Advice(
    effect="prints the OOM itself, with the place where it fails and the size of the request",
    trainer="--auto_find_batch_size False --per_device_train_batch_size 1",
)
PRINT_SHAPES = Advice(
    effect="shows which axis has the wrong size",
    code="print the shapes and dtypes of the inputs before PLACE",
)
PRINT_BATCH = Advice(
    effect="shows the length and the number of rows, one of which explains so large a request; main"
    " memory served it, so the model is not on a card",
    code="print(model.device, {name: rows.shape for name, rows in batch.items()})",
)
# sentence_transformers/util/hard_negatives.py
SEARCH_BY_FAISS = Advice(
    effect="never holds the scores of all queries with all documents at once",
    price="needs faiss; or pip install -U sentence-transformers, which computes them in parts",
    code="mine_hard_negatives(..., use_faiss=True)",
)
LOOK_AT = Advice(effect="shows which tensor is allocated there", code="look at PLACE")

# For errors that are often mistaken for an OOM.
WAIT_FOR_KERNELS = Advice(
    effect="makes each call wait for its kernel, so the traceback names the one that fails",
    price="much slower",
    code='os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # before torch is imported',
)
REBOOT = Advice(
    effect="loads the driver that the installed libraries belong to",
    price="ends every process on the machine",
    shell="sudo reboot",
)
FREE_DISK = Advice(
    effect="shows which disk is full; HF_HOME and TMPDIR move caches to another",
    shell="df -h . ~/.cache /tmp",
)
SMALLER_BLOCKS = Advice(
    effect="makes the kernel's blocks small enough for this card's multiprocessors",
    code="use smaller block sizes or num_stages=1 in the kernel, or another attention backend",
)
JOIN_COMMAND = Advice(
    effect="the flags below it reach the program",
    shell="delete the line that begins with #, or move it above the command",
)
BACK_TO_WHAT_FITTED = Advice(
    effect="the run fitted there, by the text; compare the peaks of both before you report it",
    shell="pip install 'PACKAGE==VERSION'   # that of the run that fitted",
)
STREAM_THE_DATA = Advice(
    effect="samples are read when a step needs them, instead of all before the first",
    price="the number of steps has to be given, and rows are shuffled in a buffer",
    code="datasets.load_dataset(..., streaming=True)",
)
