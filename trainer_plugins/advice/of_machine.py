"""Define remedies around the run: card, allocator, inference engines, main memory, diagnosis."""

from dataclasses import replace
from math import floor

from trainer_plugins.advice.entry import Advice

# Every torch reads this name; torch 2.9 and earlier do not know the newer PYTORCH_ALLOC_CONF
# (pytorch#183387). Alone: with max_split_size_mb beside it, reserved memory grows (pytorch#123548).
EXPANDABLE_SEGMENTS = Advice(
    effect="free pieces of the allocator's segments can be joined",
    price="none as a rule; it does not go with vLLM's sleep mode",
    environment="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
)
MAX_SPLIT_SIZE = Advice(
    effect="large blocks are not split, and so stay whole",
    price="more memory may stay reserved, and more calls of the driver take time",
    environment="PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:MEGABYTES",
)
COLLECT_EARLIER = Advice(
    effect="unused blocks are released before the card is full",
    price="more memory may stay reserved, and more calls of the driver take time",
    environment="PYTORCH_CUDA_ALLOC_CONF=garbage_collection_threshold:0.8",
    code="torch.cuda.set_per_process_memory_fraction(1.0)",
)
EXPORT_SETTINGS = Advice(
    effect="the allocator settings that fit this machine are exported",
    shell='eval "$(trainer-plugins env)"',
)
EXPORT_SETTINGS_FOR_VLLM = Advice(
    effect="the allocator settings of the training process go with vLLM",
    shell='eval "$(trainer-plugins env --vllm)"',
)
# set_per_process_memory_fraction sets its limit, which is lifted after training.
HEADROOM = Advice(
    effect="torch releases its cache earlier, and leaves NCCL 1 to 2 GiB of a large card",
    price="what is left free is lost for tensors",
    code="trainer.add_callback(trainer_plugins.Headroom(leave_fraction=0.05))",
)
MEMORY_FRACTION = replace(
    HEADROOM,
    code="torch.cuda.set_per_process_memory_fraction(0.95)",
)
# NCCL 2.24 and later register it through cuMem, which WSL2 and some containers refuse.
NO_CUMEM_HOST = Advice(
    effect="NCCL shares main memory in the older way, which WSL2 and containers allow",
    environment="NCCL_CUMEM_HOST_ENABLE=0",
)
NO_NCCL_SHM = Advice(
    effect="NCCL sends between the cards without shared memory",
    price="slower collectives",
    environment="NCCL_SHM_DISABLE=1",
)
NEWER_NCCL = Advice(
    effect="later versions go back to the older way by themselves",
    shell="pip install -U nvidia-nccl-cu12   # as your torch allows, or a newer torch",
)
SMALLER_NCCL_BUFFERS = Advice(
    effect="NCCL's buffers are a quarter of the usual 4 MiB each",
    price="slower collectives",
    environment="NCCL_BUFFSIZE=1048576",
)
LIST_PROCESSES = Advice(
    effect="shows which processes hold the card",
    shell="nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv",
)
SHOW_HOLDERS = Advice(
    effect="lists who has the card open, also in other containers; on the host, not in a container",
    shell="sudo fuser -v /dev/nvidia*",
)
SHOW_CARDS = Advice(
    effect="shows how full each card is",
    shell="nvidia-smi --query-gpu=index,memory.used,memory.total --format=csv",
)
LARGER_CARD = Advice(
    effect="the failing request fits",
    price="what the step would have asked for after it is not counted",
    shell="run where this process can hold SIZE",
)
OTHER_CARD = Advice(
    effect="takes another card",
    environment="CUDA_VISIBLE_DEVICES=CARD",
    shell="CUDA_VISIBLE_DEVICES=CARD COMMAND",
)
ONE_CARD = Advice(
    effect="one card, with per_device_train_batch_size rows instead of that many times the cards",
    keeps_result=False,
    environment="CUDA_VISIBLE_DEVICES=0",
    shell="CUDA_VISIBLE_DEVICES=0 COMMAND",
)
END_PROCESS = Advice(
    effect="frees the card, if the process is a dead run of your own",
    price="whatever that process was doing",
    shell="kill PID",
)
WATCH_THE_CARD = Advice(
    effect="shows whether another process comes and goes while the run starts",
    only_on=("CUDA", "NPU", "XPU", "HPU"),
    shell="nvidia-smi --query-gpu=memory.used,memory.free --format=csv -l 1",
)
MAPPING_LIMITS = Advice(
    effect="shows limits of mappings and of locked memory, which the driver reports as 'out of"
    " memory'",
    only_on=("CUDA", "NPU", "XPU", "HPU"),
    shell="cat /proc/sys/vm/max_map_count; ulimit -v -l",
)
WSL_MEMORY = Advice(
    effect="gives WSL more of main memory, half of which is the most it can pin",
    shell="wsl --shutdown, then memory=... in .wslconfig",
)
ROCM_MEMORY = Advice(
    effect="shows which memory the driver counts",
    only_on=("HIP",),
    shell="rocm-smi --showmeminfo vram gtt",
)
ROCM_LOG = Advice(
    effect="shows why the driver refused",
    only_on=("HIP",),
    shell="dmesg | grep -i amdgpu",
)
# torch-xpu-ops#1406 (2025-03)
NEWER_XPU = Advice(
    effect="later builds for Intel's cards allocate more than 4 GiB at once",
    only_on=("XPU",),
    shell="pip install -U torch   # 2.8 or later, from the index for xpu",
)
CLOSE_OTHER_PROGRAMS = Advice(
    effect="main memory and the card's are one on a Mac",
    only_on=("MPS",),
    shell="close other programs that draw or compute",
)

# Computed from the run's current share (`smaller_share`): a constant might raise it.
SMALLER_ENGINE_SHARE = Advice(
    effect="the engine reserves this share of the card, for weights and KV cache together",
    price="fewer sequences at once in the engine",
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
    effect="what weights and graphs leave of this share is the KV cache",
    price="less room for everything else on the card",
)
SHORTER_REQUESTS = Advice(
    effect="the longest request that the KV cache holds as it is",
    price="longer requests are refused",
    keeps_result=False,
    trl="--vllm_max_model_length LENGTH",
    vllm="--max-model-len LENGTH",
)
FEWER_SEQUENCES = Advice(
    effect="the sampler and the graphs are warmed up for fewer sequences",
    price="fewer sequences at once",
    vllm="--max-num-seqs SEQUENCES",
    sglang="--cuda-graph-max-bs SEQUENCES",
)
TENSOR_PARALLEL = Advice(
    effect="half of the weights on each of two cards; a quantised checkpoint helps too",
    price="another card",
    vllm="--tensor-parallel-size 2",
    sglang="--tp 2",
)
SLEEP_MODE = Advice(
    effect="vLLM releases its memory while the training computes",
    price="it loads weights again for each generation",
    trl="--vllm_enable_sleep_mode True",
)
_SHARE_STEP = 0.05


def smaller_share(share: float, missing: float = 0.0) -> float:
    """Lower an engine's share by the missing part, if known, but not below half of it."""
    step = max(missing, _SHARE_STEP) if missing else max(share / 8, _SHARE_STEP)
    return floor(round(100 * max(share - step, share / 2), 3)) / 100


# Before a larger /dev/shm: it works even if the user may not restart the container.
FEWER_WORKERS = Advice(
    effect="each worker holds batches, libraries, a copy of the data set and /dev/shm",
    price="loading does not overlap with training",
    trainer="--dataloader_num_workers WORKERS",
    unfilled="lower --dataloader_num_workers",
    code="DataLoader(..., num_workers=WORKERS)",
)
NO_PINNED_BATCHES = Advice(
    effect="batches are not page-locked",
    price="copies to the card do not overlap with computing",
    trainer="--dataloader_pin_memory False",
    code="DataLoader(..., pin_memory=False)",
)
LARGER_SHM = Advice(
    effect="/dev/shm is no longer docker's 64 MiB (Kubernetes: an emptyDir with medium: Memory)",
    shell="docker run --shm-size=SIZE",
    unfilled="docker run --shm-size=16g",
)
MORE_MAIN_MEMORY = Advice(
    effect="the container or the job may take more",
    shell="docker run --memory=SIZE (Slurm: --mem=SIZE; Kubernetes: resources.limits.memory)",
)
MORE_SLURM_MEMORY = Advice(
    effect="the job's limit is higher",
    shell="#SBATCH --mem=0   # all of the node, or a number above MaxRSS of sacct",
)
LARGER_PAGING_FILE = Advice(
    effect="raises the limit; little of it is written",
    shell="a larger paging file (System, Advanced, Performance, Virtual memory)",
)
LOCK_MORE_MEMORY = Advice(
    effect="a process may lock as much as it asks for",
    shell="ulimit -l unlimited; in Docker: --ulimit memlock=-1",
)
FIND_THE_KILL = Advice(
    effect="says whether it was main memory, and how much the process had",
    shell="sudo dmesg -T | grep -i 'killed process'",
)
ASK_SLURM = Advice(
    effect="shows whether the job was preempted, cancelled, timed out or out of memory",
    shell="sacct -j JOB --format=State,ExitCode,MaxRSS,ReqMem",
)
LIGHTER_SAMPLES = Advice(
    effect="one sample, not the number of workers, fills main memory",
    code="build less in one sample (dataset, collate_fn): masks, decoded pictures, sound or video",
)
SHOW_MAIN_MEMORY = Advice(
    effect="shows how much main memory is left",
    shell="free -h   # while it runs",
)
CHECK_LAUNCH_FILE = Advice(
    effect="compares what the offload needs of main memory with what there is",
    shell="trainer-plugins configs check your_launch_file.yaml",
)

OBSERVE = Advice(
    effect="records memory at each step: a longest batch and a growth look different",
    shell="trainer-plugins exec --preset observe -- COMMAND",
)
PLAN_THE_RUN = Advice(
    effect="predicts this run, and tries what makes it fit",
    shell="trainer-plugins plan OPTIONS",
)
PRINT_THE_OOM = Advice(
    effect="prints the OOM itself, which says where it fails and what it asked for",
    trainer="--auto_find_batch_size False --per_device_train_batch_size 1",
)
PRINT_SHAPES = Advice(
    effect="shows which axis is not what it should be",
    code="print the shapes and dtypes of the inputs before PLACE",
)
PRINT_BATCH = Advice(
    effect="a request this large is a length or a number of rows; it went to main memory, so the"
    " model is not on a card",
    code="print(model.device, {name: rows.shape for name, rows in batch.items()})",
)
# sentence_transformers/util/hard_negatives.py
SEARCH_BY_FAISS = Advice(
    effect="the scores of all queries with all documents are never in memory at once",
    price="needs faiss; or pip install -U sentence-transformers, which makes them in parts",
    code="mine_hard_negatives(..., use_faiss=True)",
)
LOOK_AT = Advice(
    effect="shows what was made there",
    code="look at PLACE",
)

# For errors that are often mistaken for an OOM.
WAIT_FOR_KERNELS = Advice(
    effect="each call waits for its kernel, so the traceback names the one that fails",
    price="much slower",
    code='os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # before torch is imported',
)
REBOOT = Advice(
    effect="the system loads the driver that its libraries belong to",
    price="every process of the machine ends",
    shell="sudo reboot",
)
FREE_DISK = Advice(
    effect="shows which disk is full; HF_HOME and TMPDIR move caches to another",
    shell="df -h . ~/.cache /tmp",
)
SMALLER_BLOCKS = Advice(
    effect="a kernel's blocks are then small enough for this card's multiprocessors",
    code="smaller block sizes or num_stages=1 in the kernel, or another attention backend",
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
    keeps_result=False,
    code="datasets.load_dataset(..., streaming=True)",
)
