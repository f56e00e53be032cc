"""Real messages, as `seen` has them, each with the class that raised it (`log` if nothing did).

`owner/name#1` is an issue or a pull request. Tracebacks and what follows the words are left out.
"""

from typing import NamedTuple


class Case(NamedTuple):
    raised: str
    text: str
    seen: str
    source: str = ""
    """Empty in `NEGATIVES`."""
    survivable: bool = True
    certain: bool = True


HINT = "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
HIP_HINT = HINT.replace("CUDA_ALLOC", "HIP_ALLOC")
OLD_HINT = "If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation.  See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
XPU_HINT = "Please use `empty_cache` to release all unoccupied cached memory."
MPS_HINT = "Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory allocations (may cause system failure)."
ASYNC = "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
OOM, OLD_OOM, RUNTIME = "torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError", "RuntimeError"

POSITIVES = (
    # torch's caching allocator
    Case(
        OOM,
        "CUDA out of memory. Tried to allocate 546.00 MiB. GPU 0 has a total capacity of 15.77 GiB of which 514.19 MiB is free. Process 562167 has 15.25 GiB memory in use. Of the allocated memory 13.73 GiB is allocated by PyTorch, with 46.00 MiB allocated in private pools (e.g., CUDA Graphs), and 736.86 MiB is reserved by PyTorch but unallocated. "
        + HINT,
        "kaito-project/kaito#976",
        "allocator",
    ),
    Case(
        OLD_OOM,
        "CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has a total capacity of 23.65 GiB of which 11.06 MiB is free. Including non-PyTorch memory, this process has 23.60 GiB memory in use. Of the allocated memory 22.90 GiB is allocated by PyTorch, and 194.87 MiB is reserved by PyTorch but unallocated. "
        + HINT,
        "pytorch/pytorch#16417",
        "allocator",
    ),
    Case(
        OLD_OOM,
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacty of 21.99 GiB of which 7.96 GiB is free. Process 1488 has 248.00 MiB memory in use. Process 1582 has 4.36 GiB memory in use. Process 3537 has 248.00 MiB memory in use. Process 8671 has 8.90 GiB memory in use. Process 8829 has 252.00 MiB memory in use. Of the allocated memory 3.11 GiB is allocated by PyTorch, and 5.46 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting max_split_size_mb to avoid fragmentation.",
        "pytorch/pytorch#105905",
        "allocator",
    ),
    Case(
        RUNTIME,
        "CUDA out of memory. Tried to allocate 1024.00 MiB (GPU 0; 15.90 GiB total capacity; 14.25 GiB already allocated; 991.56 MiB free; 607.00 KiB cached)",
        "pytorch/pytorch#18853",
        "allocator",
    ),
    Case(
        OLD_OOM,
        "CUDA out of memory. Tried to allocate 1.69 GiB (GPU 0; 14.56 GiB total capacity; 649.97 MiB already allocated; 1.31 GiB free; 1.01 GiB reserved in total by PyTorch) "
        + OLD_HINT,
        "One-2-3-45/One-2-3-45#25",
        "allocator",
    ),
    Case(
        OLD_OOM,
        "CUDA out of memory. Tried to allocate more than 1EB memory.",
        "NVIDIA/nccl#1284",
        "allocator",
    ),
    Case(
        "log",
        "ERROR 10-11 12:27:29 engine.py:157] OutOfMemoryError('CUDA out of memory. Tried to allocate 138.00 MiB. GPU 0 has a total capacity of 79.15 GiB of which 2.19 MiB is free. Including non-PyTorch memory, this process has 79.12 GiB memory in use.",
        "vllm-project/vllm#9290",
        "allocator",
    ),
    Case(
        "log",
        "[E205 21:41:28.167171125 c_shim_cuda.cpp:776] Exception in aoti_torch: CUDA out of memory. Tried to allocate 5.00 GiB. GPU 0 has a total capacity of 23.68 GiB of which 4.54 GiB is free. Process 511887 has 19.00 GiB memory in use. Of the allocated memory 11.92 GiB is allocated by PyTorch, and 6.44 GiB is reserved by PyTorch but unallocated.",
        "pytorch/pytorch#146524",
        "allocator",
    ),
    Case(
        OOM,
        "HIP out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 287.98 GiB of which 275.86 GiB is free. 1.05 GiB allowed; Of the allocated memory 1017.01 MiB is allocated by PyTorch, with 17.00 MiB allocated in private pools (e.g., HIP Graphs), and 54.99 MiB is reserved by PyTorch but unallocated. "
        + HINT,
        "ROCm/TheRock#2118",
        "allocator",
    ),
    Case(
        OOM,
        "HIP out of memory. Tried to allocate 16.00 GiB. GPU 0 has a total capacity of 15.24 GiB of which 15.09 GiB is free. Of the allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated. "
        + HIP_HINT,
        "ROCm/TheRock#1054",
        "allocator",
    ),
    Case(
        OOM,
        "XPU out of memory. Tried to allocate 4.66 GiB. GPU 0 has a total capacity of 5.65 GiB of which 5.65 GiB is free. Of the allocated memory 195.50 KiB is allocated by PyTorch, and 1.81 MiB is reserved by PyTorch but unallocated. "
        + XPU_HINT,
        "intel/torch-xpu-ops#3011",
        "allocator",
    ),
    Case(
        OOM,
        "XPU out of memory. Tried to allocate 8.11 GiB. GPU 0 has a total capacity of 16.54 GiB of which 16.54 GiB is free. 8.27 GiB allowed; Of the allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated. "
        + XPU_HINT,
        "intel/torch-xpu-ops#2392",
        "allocator",
    ),
    Case(
        OOM,
        "XPU out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 13.74 GiB. Of the allocated memory 10.10 GiB is allocated by PyTorch, and 3.47 GiB is reserved by PyTorch but unallocated. "
        + XPU_HINT,
        "intel/intel-extension-for-pytorch#851",
        "allocator",
    ),
    Case(
        RUNTIME,
        "XPU out of memory. Tried to allocate 1.71 GiB (GPU 0; 15.56 GiB total capacity; 176.00 MiB already allocated; 176.00 MiB reserved in total by PyTorch)",
        "intel/intel-extension-for-pytorch#629",
        "allocator",
    ),
    Case(
        RUNTIME,
        "MPS backend out of memory (MPS allocated: 9.57 GiB, other allocations: 17.35 GiB, max allowed: 27.20 GiB). Tried to allocate 292.50 MiB on private pool. "
        + MPS_HINT,
        "Comfy-Org/ComfyUI#7440",
        "allocator",
    ),
    Case(
        RUNTIME,
        "MPS backend out of memory (MPS allocated: 16.00 GB, other allocations: 3.31 GB, max allowed: 18.13 GB). Tried to allocate 256 bytes on shared pool. "
        + MPS_HINT,
        "pinokiocomputer/pinokio#941",
        "allocator",
    ),
    Case(
        RUNTIME,
        "NPU out of memory. Tried to allocate 22.00 MiB (NPU 0; 60.97 GiB total capacity; 10.24 GiB already allocated; 10.24 GiB current active; 19.52 MiB free; 10.65 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation.",
        "vllm-project/vllm-ascend#19",
        "allocator",
    ),
    Case(
        OOM,
        "NPU out of memory. Tried to allocate 72.00 MiB (NPU 0; 61.27 GiB total capacity; 56.05 GiB already allocated; 56.05 GiB current active; 5.04 MiB free; 58.39 GiB reserved in total by PyTorch).If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation.",
        "sgl-project/sglang#29838",
        "allocator",
    ),
    Case(
        RUNTIME,
        "[Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::234881024 (224)MB",
        "huggingface/optimum-habana#1469",
        "allocator",
    ),
    Case(
        RUNTIME,
        "Current platform can NOT allocate memory block with size larger than 4GB! Tried to allocate 6.85 GiB (GPU  0; 15.56 GiB total capacity; 0 bytes already allocated; 0 bytes reserved in total by PyTorch)",
        "intel/intel-extension-for-pytorch#629",
        "allocator",
    ),
    Case(
        RUNTIME,
        "FATAL ERROR :: MODULE:SYNHELPER workspace Allocation of size ::14493510400 failed!",
        "HabanaAI/Model-References#10",
        "allocator",
    ),
    Case(
        OLD_OOM,
        "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     : 6.89 GiB\nRequested               : 320.00 MiB\nDevice limit            : 23.69 GiB\nFree (according to CUDA): 2.94 MiB\nPyTorch limit (set by user-supplied memory fraction)\n                        : 17179869184.00 GiB",
        "AIFSH/ComfyUI-ChatTTS#9",
        "allocator",
    ),
    Case(
        "log",
        "Error occurred when executing SamplerCustom:\n\nAllocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated : 13.74 GiB\nRequested : 640.00 MiB\nDevice limit : 14.75 GiB\nFree (according to CUDA): 27.06 MiB",
        "JettHu/ComfyUI_TGate#10",
        "allocator",
    ),
    Case(OOM, "Allocation on device ", "Comfy-Org/ComfyUI#4880", "allocator"),
    # the same, hidden
    Case(
        RUNTIME,
        'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":830, please report a bug to PyTorch. ',
        "fal-ai/fal#478",
        "masked",
    ),
    Case(
        RUNTIME,
        'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":838',
        "huggingface/accelerate#3803",
        "masked",
    ),
    Case(
        RUNTIME,
        'NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":1123, please report a bug to PyTorch.',
        "pytorch/pytorch#112950",
        "masked",
    ),
    Case(
        RUNTIME,
        'NVML_SUCCESS == DriverAPI::get()->nvmlDeviceGetHandleByPciBusId_v2_( pci_id, &nvml_device) INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":815, please report a bug to PyTorch.',
        "pytorch/pytorch#112950",
        "masked",
    ),
    Case(
        RUNTIME,
        '!handles_.at(i) INTERNAL ASSERT FAILED at "c10/cuda/CUDACachingAllocator.cpp":487',
        "pytorch/pytorch#188008",
        "masked",
        survivable=False,
    ),
    Case(
        RUNTIME,
        "run_func_(...) API call failed at .../aoti_runner/model_container_runner.cpp, line 144",
        "deepmodeling/deepmd-kit#5418",
        "masked",
        certain=False,
    ),
    # the driver
    Case(
        "torch.AcceleratorError",
        "CUDA error: out of memory\n" + ASYNC,
        "deepbeepmeep/Wan2GP#1083",
        "driver",
    ),
    Case(
        RUNTIME,
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call,so the stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1.",
        "taohan10200/IIM#28",
        "driver",
    ),
    Case(
        RUNTIME,
        "CUDA driver error: out of memory",
        "deepmodeling/deepmd-kit#4493",
        "driver",
        survivable=False,
    ),
    Case(
        RUNTIME,
        "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62",
        "TideDra/lmm-r1#43",
        "driver",
    ),
    Case(
        RUNTIME,
        "cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/THCTensorRandom.cu:25",
        "rowanz/neural-motifs#58",
        "driver",
    ),
    Case(
        RUNTIME,
        "TensorStorage /io/include/tensorview/tensor.h 168\ncuda failed with error 2 out of memory. use CUDA_LAUNCH_BLOCKING=1 to get correct traceback.",
        "junjie18/CMT#15",
        "driver",
    ),
    Case(
        "log",
        "RuntimeError: Triton Error [CUDA]: out of memory",
        "triton, third_party/nvidia/backend/driver.c",
        "driver",
    ),
    Case(
        "log",
        "DGLError: [09:17:32] C:\\dgl\\src\\runtime\\cuda\\cuda_device_api.cc:117: Check failed: e == cudaSuccess || e == cudaErrorCudartUnloading: CUDA: out of memory",
        "yuki-younai/MOERec, main2.ipynb",
        "driver",
    ),
    Case(RUNTIME, "Invalid buffer size: 19.45 GB", "pytorch/pytorch#141909", "allocator"),
    Case(
        "log",
        "libc++abi: terminating due to uncaught exception of type std::runtime_error: [METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        "youssofal/MTPLX#194",
        "driver",
        survivable=False,
    ),
    Case(
        "log",
        "UserWarning: CUDA initialization: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that might have already set an error? Error 2: out of memory (Triggered internally at /pytorch/c10/cuda/CUDAFunctions.cpp:109.)",
        "pytorch/pytorch#150048",
        "driver",
    ),
    Case(
        "log",
        "numba.cuda.cudadrv.driver.CudaAPIError: [2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY",
        "rapidsai/dask-cuda#225",
        "driver",
    ),
    Case(
        "log",
        "Error out of memory at line 380 in file /mmfs1/gscratch/zlab/timdettmers/git/bitsandbytes/csrc/pythonInterface.c",
        "InternLM/xtuner#319",
        "driver",
        survivable=False,
    ),
    Case(
        RUNTIME,
        "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
        "intel/torch-xpu-ops#5432",
        "driver",
        survivable=False,
    ),
    Case(
        RUNTIME,
        "level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
        "pytorch/pytorch#190972",
        "driver",
        survivable=False,
        certain=False,
    ),
    # libraries
    Case(
        RUNTIME,
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "QwenLM/Qwen3#873",
        "library",
    ),
    Case(
        RUNTIME,
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`\nException raised from createCublasHandle at /opt/conda/conda-bld/pytorch_1595629403081/work/aten/src/ATen/cuda/CublasHandlePool.cpp:8 (most recent call first):",
        "DeepMotionAIResearch/DenseMatchingBenchmark#20",
        "library",
    ),
    Case(
        RUNTIME,
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "EleutherAI/lm-evaluation-harness#1689",
        "library",
        certain=False,
    ),
    Case(RUNTIME, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "KupynOrest/DeblurGAN#128", "library"),
    Case(
        RUNTIME,
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
        "open-mmlab/mmaction2#493",
        "library",
        certain=False,
    ),
    Case(
        RUNTIME,
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
        "pytorch/pytorch#81620",
        "library",
        certain=False,
    ),
    Case(
        RUNTIME,
        "Unable to find a valid cuDNN algorithm to run convolution",
        "marqo-ai/marqo#101",
        "library",
        certain=False,
    ),
    Case(
        RUNTIME,
        "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR",
        "deepmodeling/deepmd-kit#3836",
        "library",
        certain=False,
    ),
    Case(
        RUNTIME,
        "cusolver error: 7, when calling `cusolverDnCreate(handle)`",
        "jzhangbs/Vis-MVSNet#38",
        "library",
        certain=False,
    ),
    Case(RUNTIME, "cuFFT error: CUFFT_ALLOC_FAILED", "pytorch/pytorch#6511", "library"),
    Case(
        RUNTIME,
        "cuFFT error: CUFFT_INTERNAL_ERROR",
        "pytorch/pytorch#119420",
        "library",
        certain=False,
    ),
    # collectives
    Case(
        "log",
        "ng30903:3063028:3066152 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n\nng30903:3063028:3066152 [3] include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes\nng30903:3063028:3066152 [3] NCCL INFO transport/p2p.cc:204 -> 1",
        "NVIDIA/nccl#1235",
        "nccl",
        survivable=False,
    ),
    Case(
        "log",
        "ins-7df6eojsifuykig9:3018451:3018451 [0] enqueue.cc:1085 NCCL WARN Cuda failure 'out of memory'",
        "PKU-YuanGroup/Open-Sora-Plan#386",
        "nccl",
        survivable=False,
    ),
    Case(
        "log",
        "c460c041:101211:106353 [0] init.cu:218 WARN Cuda failure 'out of memory'",
        "pytorch/pytorch#4921",
        "nccl",
        survivable=False,
    ),
    Case(
        RUNTIME,
        "NCCL error in: /opt/conda/conda-bld/pytorch_1670525541990/work/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1269, internal error, NCCL version 2.14.3\nncclInternalError: Internal check failed.\nLast error:\nFailed to CUDA calloc async 1920 bytes\n",
        "deepspeedai/DeepSpeed#3827",
        "nccl",
        survivable=False,
        certain=False,
    ),
    Case(
        RUNTIME,
        "Workspace can't be allocated, no enough memory.",
        "daswer123/xtts-webui#25",
        "deepspeed",
    ),
    # page-locked and shared memory
    Case(
        "log",
        "2022-07-03 15:46:55.141157: E external/org_tensorflow/tensorflow/stream_executor/cuda/cuda_driver.cc:802] failed to alloc 1073741824 bytes on host: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
        "gaycodegal/craiyon-low-vram-easy#1",
        "pinned",
        survivable=False,
    ),
    Case(
        "log",
        '--> 145     saved_hidden_states = hidden_states.to("cpu", non_blocking = True)\n    146     with torch.no_grad():\n    147         output = forward_function(hidden_states, *args)\n\nRuntimeError: CUDA error: out of memory\n'
        + ASYNC,
        "unslothai/unsloth#1797",
        "pinned",
        survivable=False,
    ),
    Case(
        RUNTIME,
        "unable to write to file </torch_31911_952036340_6686>: No space left on device (28)",
        "idiap/ESLAM#20",
        "shared",
        survivable=False,
    ),
    Case(
        RUNTIME,
        "unable to mmap 29764 bytes from file </torch_10182_3020184674_63991>: Cannot allocate memory (12)",
        "pytorch/pytorch#87861",
        "shared",
        survivable=False,
    ),
    Case(
        RUNTIME,
        "unable to mmap 136 bytes from file <filename not specified>: Cannot allocate memory (12)",
        "open-mmlab/mmpose#2264",
        "shared",
        survivable=False,
    ),
    # main memory
    Case(
        RUNTIME,
        "[enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 132426121216 bytes. Error code 12 (Cannot allocate memory)",
        "mxfold/mxfold2#20",
        "host",
    ),
    Case(
        RUNTIME,
        "[enforce fail at CPUAllocator.cpp:64] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 1178729664 bytes. Error code 12 (Cannot allocate memory)",
        "nguyenvanhoang7398/FANG#1",
        "host",
    ),
    Case(
        RUNTIME,
        "[enforce fail at C:\\b\\abs_bao0hdcrdh\\croot\\pytorch_1675190257512\\work\\c10\\core\\impl\\alloc_cpu.cpp:81] data. DefaultCPUAllocator: not enough memory: you tried to allocate 1981808640 bytes.",
        "MaximeVandegar/Papers-in-100-Lines-of-Code#10",
        "host",
    ),
    Case(
        RUNTIME,
        "[enforce fail at CPUAllocator.cpp:56] posix_memalign(&data, gAlignment, nbytes) == 0. 12 vs 0",
        "pytorch/pytorch#20618",
        "host",
    ),
    Case(
        RUNTIME,
        "unable to mmap 23802932552 bytes from file <./flux1-dev.safetensors>: Cannot allocate memory (12)",
        "safetensors/safetensors#528",
        "host",
    ),
    Case(
        "MemoryError",
        "Unable to allocate 58.0 GiB for an array with shape (176351, 176460) and data type uint16",
        "ru1ven/KeypointFusion#3",
        "host",
    ),
    Case(
        "log",
        "numpy.core._exceptions.MemoryError: Unable to allocate 926. GiB for an array with shape (6794880, 36601) and data type float32",
        "theislab/single-cell-tutorial#85",
        "host",
    ),
    Case("MemoryError", "", "apache/arrow#12121", "host"),
    Case("OSError", "[Errno 12] Cannot allocate memory", "microsoft/Graphormer#7", "host"),
    Case(
        "log",
        "pyarrow.lib.ArrowMemoryError: realloc of size 2172846080 failed",
        "rom1504/img2dataset#443",
        "host",
    ),
    Case(
        "log",
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
        "real-stanford/flingbot#11",
        "host",
        survivable=False,
    ),
    Case(
        "log",
        "(raylet) node_manager.cc:3277: 2 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed due to other reasons",
        "WM-PO/WMPO#3",
        "host",
        survivable=False,
    ),
    Case(
        "log",
        "2024-04-29T14:55:41,679700+02:00 Out of memory: Killed process 1440763 (perl) total-vm:87033376kB, anon-rss:60356340kB, file-rss:0kB, shmem-rss:0kB, UID:21417 pgtables:169956kB oom_score_adj:0",
        "equinor/ert#7797",
        "host",
        survivable=False,
    ),
    Case(
        "log",
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=191.batch cgroup. Some of your processes may have been killed by the cgroup out-of-memory handler.",
        "ArjunaCluster/ArjunaUsers#52",
        "host",
        survivable=False,
    ),
    Case(
        "log",
        "srun: error: node107: task 0: Out Of Memory",
        "brain-score/vision#950",
        "host",
        survivable=False,
    ),
    Case(
        "log",
        "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc",
        "Parskatt/RoMa#134",
        "host",
        survivable=False,
    ),
    Case(
        "log",
        "memory allocation of 2097152 bytes failed",
        "deepspeedai/DeepSpeedExamples#321",
        "host",
        survivable=False,
    ),
    Case(
        RUNTIME,
        "DataLoader worker (pid 11011) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit",
        "pytorch/pytorch#108861",
        "shared",
        survivable=False,
        certain=False,
    ),
    Case(
        "log",
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
        "msr-fiddle/pipedream#28",
        "shared",
        survivable=False,
        certain=False,
    ),
    Case(
        "log",
        "vllm-deepseek-ep-decode-0:3663:4044 [0] misc/shmutils.cc:129 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-Ewjreo (size 33030528), error: No space left on device (28)",
        "llm-d/llm-d#352",
        "shared",
        survivable=False,
    ),
    Case(
        RUNTIME,
        "DataLoader worker (pid 75890) is killed by signal: Killed.",
        "thangvubk/SoftGroup#18",
        "host",
        survivable=False,
        certain=False,
    ),
    Case(
        "log",
        "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 0 (pid: 27657) of binary: /home/work/virtual-venv/fastchat-env/bin/",
        "lm-sys/FastChat#568",
        "host",
        survivable=False,
        certain=False,
    ),
    Case(
        "log",
        "[launch.py:434:sigkill_handler] ['/usr/bin/python3', '-u', 'main.py'] exits with return code = -9",
        "deepspeedai/DeepSpeed#3232",
        "host",
        survivable=False,
        certain=False,
    ),
    Case(
        "log",
        "command terminated with exit code 137",
        "jupyter/docker-stacks#736",
        "host",
        survivable=False,
        certain=False,
    ),
    Case(
        "log",
        "slurm_script: line 28:  8156 Killed                  python3 main.py --prop hform --epochs 400",
        "ArjunaCluster/ArjunaUsers#52, the line before",
        "host",
        survivable=False,
        certain=False,
    ),
    Case(
        "log",
        "kubeflow                    training-operator-1                            0/1     OOMKilled",
        "alauda/kubeflow-chart#45",
        "host",
        survivable=False,
    ),
    Case(
        "log",
        "kernel: [  514.682838] Memory cgroup out of memory: Killed process 15617 (python3) total-vm:11892kB, anon-rss:4292kB, file-rss:3428kB, shmem-rss:0kB",
        "docker/for-linux#1001",
        "host",
        survivable=False,
    ),
    Case(
        "OSError",
        '[WinError 1455] The paging file is too small for this operation to complete. Error loading "D:\\Anaconda\\envs\\swin-train\\lib\\site-packages\\torch\\lib\\shm.dll" or one of its dependencies.',
        "cszn/KAIR#127",
        "host",
        survivable=False,
    ),
    Case(
        "OSError",
        "Cannot allocate memory (os error 12)",
        "how Rust writes an io::Error",
        "host",
    ),
    Case(
        RUNTIME,
        "CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.",
        "vllm-project/vllm#14452",
        "allocator",
    ),
    Case(
        "log",
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker exits unexpectedly. Worker exits with an exit code None. The worker may have exceeded K8s pod memory limits.",
        "AgentR1/Agent-R1#33",
        "host",
        survivable=False,
        certain=False,
    ),
    Case(
        "log",
        "[PID: 210907] 2026-04-09-21:56:40.384.694 Memory_Allocation_Failure(EL0004): Failed to allocate memory requested by GE module.",
        "PKU-YuanGroup/Helios#62",
        "allocator",
    ),
    # an inference engine that refuses to start
    Case(
        "log",
        "(EngineCore_DP0 pid=6940) ValueError: Free memory on device cuda:0 (19.77/22.05 GiB) on startup is less than desired GPU memory utilization (0.9, 19.84 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
        "pytorch/pytorch#175666",
        "engine",
        survivable=False,
    ),
    Case(
        RUNTIME,
        "alloc_req_slots runs out of memory. Please set a smaller number for `--max-running-requests`.",
        "sgl-project/sglang#10408",
        "engine",
        survivable=False,
    ),
    Case(
        "log",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.",
        "QwenLM/Qwen3#12",
        "engine",
        survivable=False,
    ),
    Case(
        RUNTIME,
        "Not enough memory. Please try to increase --mem-fraction-static.",
        "sgl-project/sglang#4330",
        "engine",
        survivable=False,
    ),
    Case(
        RUNTIME,
        "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
        "seanie12/Info-HCVAE#7",
        "library",
        certain=False,
    ),
    Case(
        "log",
        "Cuda error: out of memory at /workspace/csrc/cumem_allocator.cpp:62",
        "verl-project/verl#302",
        "driver",
    ),
    Case(
        RUNTIME,
        "[enforce fail at CPUAllocator.cpp:64] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 6576668672 bytes. Error code 12 (Cannot allocate memory)",
        "HaoMood/blinear-cnn-faster#4",
        "host",
    ),
)

NCCL_NOT_MEMORY = Case(
    "torch.distributed.DistBackendError",
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 1 'invalid argument'",
    "NVIDIA/nccl#1410",
)

NEGATIVES = (
    # a collective that failed of something else
    NCCL_NOT_MEMORY,
    Case(
        "log",
        "[rank0]: ncclUnhandledCudaError: Call to CUDA function failed.\n[rank0]: Last error:\n[rank0]: Cuda failure 999 'unknown error'",
        "alisson-anjos/diffusion-pipe-ui#10",
    ),
    Case(
        "log",
        "msm-h200-2:4016:4653 [7] misc/ibvwrap.cc:190 NCCL WARN Call to ibv_create_cq failed with error Cannot allocate memory",
        "deepseek-ai/DeepEP#143",
    ),
    Case(
        "log",
        "[rank1]:[E1002 18:16:40.662329700 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2521, OpType=ALLREDUCE, NumelIn=160672064, NumelOut=160672064, Timeout(ms)=600000) ran for 600000 milliseconds before timing out.",
        "huggingface/diffusers#12422",
    ),
    # errors of the device that are none
    Case(
        RUNTIME, "CUDA error: an illegal memory access was encountered", "deepspeedai/DeepSpeed#308"
    ),
    Case(RUNTIME, "CUDA error: device-side assert triggered", "karpathy/nanoGPT#470"),
    Case(
        "log",
        "[rank9]:[E113 11:43:02.241131296 ProcessGroupNCCL.cpp:1899] [PG ID 5 PG GUID 55(mesh_replicate) Rank 1] Process group watchdog thread terminated with exception: CUDA error: unspecified launch failure\n"
        + ASYNC,
        "hao-ai-lab/FastVideo#1008",
    ),
    Case(
        RUNTIME,
        "CUDA error: uncorrectable ECC error encountered\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
        "tloen/alpaca-lora#123",
    ),
    Case(RUNTIME, "CUDA error: too many resources requested for launch", "sxyu/svox2#6"),
    Case(RUNTIME, "CUDA error: invalid argument\n" + ASYNC, "deepspeedai/DeepSpeed#7150"),
    Case(
        RUNTIME,
        "HIP error: no kernel image is available for execution on the device",
        "huggingface/autotrain-advanced#737",
    ),
    Case(
        RUNTIME,
        "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
        "pytorch/pytorch#190972",
    ),
    Case(RUNTIME, "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "askforalfred/alfred#23"),
    Case(RUNTIME, "cuFFT error: CUFFT_EXEC_FAILED", "adefossez/julius#16"),
    Case(
        "torch.linalg.LinAlgError",
        "cusolver error: CUSOLVER_STATUS_EXECUTION_FAILED, when calling `cusolverDnXsyevd( handle, params, jobz, uplo, n,",
        "alexfrom0815/Online-3D-BPP-DRL#24",
    ),
    Case(
        "log",
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072, Hardware limit: 101376. Reducing block sizes or `num_stages` may help.",
        "triton-lang/triton#8182",
    ),
    Case(
        RUNTIME,
        '!block->expandable_segment_ INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":2814, please report a bug to PyTorch.',
        "pytorch/pytorch#119452",
    ),
    Case(
        "log",
        "Error operation not supported at line 380 in file /mmfs1/gscratch/zlab/timdettmers/git/bitsandbytes/csrc/pythonInterface.c",
        "InternLM/xtuner#247",
    ),
    Case(RUNTIME, "Out of workspace memory in AlignedAlloactor", "flashinfer-ai/flashinfer#362"),
    # an OOM of another
    Case(
        RUNTIME,
        "CUDA out of memory encountered on a different rank",
        "mosaicml/composer, composer/trainer/trainer.py",
    ),
    Case(RUNTIME, "No executable batch size found, reached zero.", "huggingface/accelerate#1934"),
    # the disk
    Case(
        RUNTIME,
        "[enforce fail at inline_container.cc:778] . PytorchStreamWriter failed writing file data.pkl: file write failed",
        "SWivid/F5-TTS#458",
    ),
    Case("OSError", "[Errno 28] No space left on device", "NVIDIA/Megatron-LM#878"),
    Case(
        "log",
        'safetensors_rust.SafetensorError: Error while serializing: IoError(Os { code: 28, kind: StorageFull, message: "No space left on device" })',
        "hiyouga/LlamaFactory#5155",
    ),
    Case(RUNTIME, "write(): fd 29 failed with Input/output error", "pytorch/pytorch#10577"),
    # advice, settings and names that speak of it
    Case(
        "AttributeError",
        "module 'torch.cuda' has no attribute 'OutOfMemoryError'",
        "milesial/Pytorch-UNet#431",
    ),
    Case(
        "AttributeError",
        "module 'torch._C' has no attribute '_cuda_attach_out_of_memory_observer'",
        "pytorch/pytorch#102957",
    ),
    Case(
        "log",
        "If you encounter CUDA out of memory, try to set --tile with a smaller number.",
        "xinntao/Real-ESRGAN#272",
    ),
    Case(
        "log",
        "[2024-04-08 13:02:16,577] [WARNING] [stage3.py:2069:step] 27 pytorch allocator cache flushes since last step. this happens when there is high memory pressure and is detrimental to performance. if this is happening frequently consider adjusting settings to reduce memory consumption.",
        "jzhang38/EasyContext#11",
    ),
    Case(
        "log",
        "        raise RuntimeError('CUDA out of memory.')",
        "mosaicml/composer, tests/trainer/test_fsdp.py",
    ),
    # somebody's data; the only texts here that were written for the test
    Case(
        "log",
        '{"prompt": "CUDA out of memory. Tried to allocate 2.00 GiB", "label": 1}',
        "a row of a dataset",
    ),
    Case(
        "log",
        "step 4: the 3 words most seen were RuntimeError, OOM and out of memory.",
        "a line of a log",
    ),
    Case(
        "KeyError",
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "a label that is not in a table",
    ),
    Case(
        "ValueError", "CUDA error: out of memory is not one of the labels", "a check of a dataset"
    ),
)
