"""Engines, other vendors, other frameworks, other languages, weights: each gets its own words."""

import pytest

from tests.explain.stated import explained
from tests.explain.test_text import FULL, TRAINER, command, said, todo


def startup(free: float, total: float, share: float, device: str = " cuda:1") -> str:
    return (
        f"ValueError: Free memory on device{device} ({free}/{total} GiB) on startup is less than"
        f" desired GPU memory utilization ({share}, {share * total:.2f} GiB). Decrease GPU memory"
        " utilization or reduce GPU memory used by other processes."
    )


NO_BLOCKS = (
    "(EngineCore pid=6) ERROR 12-23 23:34:23 [core.py:708] ValueError: No available memory for the"
    " cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine."
)
TOO_LONG = (
    "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV"
    " cache is needed, which is larger than the available KV cache memory ({free} GiB). Based on the"
    " available memory, the estimated maximum model length is 5632. Try increasing"
    " `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
)
SGLANG = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
WARM_UP = (
    "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests."
)
ENGINE = '  File "/v/vllm/v1/worker/gpu_worker.py", line 1, in initialize_cache\n    x()\n'
TORCHS = "torch.OutOfMemoryError: "
SHORT = said("2.00 GiB", "40.00 GiB", "0.50 GiB", "30.00 GiB", "0.50 GiB")


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        # Lowered to what is free.
        (startup(19.77, 22.05, 0.9), "--gpu-memory-utilization 0.89"),
        (startup(12.18, 23.56, 0.92, ""), "--gpu-memory-utilization 0.51"),
        (startup(61.05, 119.7, 0.52), "--gpu-memory-utilization 0.51"),
        ("trl GRPO\n" + startup(20, 80, 0.3), "--vllm_gpu_memory_utilization 0.25"),
        # No share fits in what others have left: who they are comes first.
        (startup(2.02, 63.59, 0.92), "nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv"),
        # Lowered below the text's own, by what is missing.
        (f"vllm serve x --gpu-memory-utilization 0.9\n{ENGINE}{SHORT}", "--gpu-memory-utilization 0.85"),
        (f"verl actor_rollout_ref.rollout.gpu_memory_utilization=0.25\n{ENGINE}{SHORT}", "actor_rollout_ref.rollout.gpu_memory_utilization=0.2"),
        (f"--mem-fraction-static 0.8\nException: Capture cuda graph failed: {SHORT.removeprefix(TORCHS)}", "--mem-fraction-static 0.75"),
        (f'llm = LLM("x", gpu_memory_utilization=0.25)\n{WARM_UP}', "gpu_memory_utilization=0.2"),
        # More is missing than a share has: it is halved, and the training has to take less too.
        (f"colocate, vllm_gpu_memory_utilization=0.3\n{ENGINE}" + said("30.00 GiB", "80.00 GiB", "1.00 GiB", "40.00 GiB", "0.50 GiB"), "vllm_gpu_memory_utilization=0.15"),
        # Raised above the text's own, by what is missing.
        (f"--gpu-memory-utilization 0.5\n{NO_BLOCKS}", "--gpu-memory-utilization 0.55"),
        (f"--gpu-memory-utilization 0.5 total_gpu_memory=40.00GiB\nAvailable KV cache memory: -6.00 GiB\n{NO_BLOCKS}", "--gpu-memory-utilization 0.65"),
        (f"--vllm_mode colocate --vllm_gpu_memory_utilization 0.3\n{NO_BLOCKS}", "--vllm_gpu_memory_utilization 0.35"),
        (SGLANG + " Current value: mem_fraction_static=0.3", "mem_fraction_static=0.35"),
        (f"python -m sglang.launch_server --mem-fraction-static 0.84\n{SGLANG}", "--mem-fraction-static 0.89"),
        # There is no room above it.
        (f"--gpu-memory-utilization 0.95 --max-num-seqs 32\n{NO_BLOCKS}", "--max-num-seqs 16"),
        # The length that the engine has measured.
        (TOO_LONG.format(free="0.71"), "--max-model-len 5632"),
        ("ValueError: The model's max seq len (4096) is larger than the maximum number of tokens that can be stored in KV cache (3664). Try", "--max-model-len 3664"),
    ],
)  # fmt: skip
def test_an_engine_gets_a_share_that_its_own_numbers_allow(text: str, advice: str) -> None:
    answer = explained(text)

    assert answer.causes[0].code == "engine-share"
    assert answer.remedies[0].do == advice
    assert "batch_size" not in todo(answer)


def test_what_is_raised_says_how_much_is_missing() -> None:
    text = "total_gpu_memory=80.00GiB gpu_memory_utilization=0.60\n" + TOO_LONG.format(free="4.00")
    shorter, higher, *_ = explained(text).remedies

    assert (shorter.grade, higher.grade) == ("arithmetic", "arithmetic")
    assert higher.do == "gpu_memory_utilization=0.75"  # 12 of 80 GiB more
    assert "12.00 GiB are missing" in higher.effect


OF = " out of memory. Tried to allocate {} GiB. GPU 0 has a total capacity of 40.00 GiB of which 0.50 GiB is free. Of the allocated memory {} GiB is allocated by PyTorch, and {} GiB is reserved by PyTorch but unallocated."
OF_NPU = " out of memory. Tried to allocate {} GiB (NPU 0; 40.00 GiB total capacity; {} GiB already allocated; 0.50 GiB free; {} GiB reserved in total by PyTorch)"


@pytest.mark.parametrize(
    ("vendor", "form", "words"),
    [
        ("HIP", OF, ("rocm-smi --showpids", "HIP_VISIBLE_DEVICES=1 ", "export PYTORCH_HIP_ALLOC_CONF=")),
        ("XPU", OF, ("xpu-smi ps", "ZE_AFFINITY_MASK=1 ", "export PYTORCH_ALLOC_CONF=")),
        ("NPU", OF_NPU, ("npu-smi info", "ASCEND_RT_VISIBLE_DEVICES=1 ", "export PYTORCH_NPU_ALLOC_CONF=")),
    ],
)  # fmt: skip
def test_a_vendor_is_spoken_to_in_its_own_words(
    vendor: str, form: str, words: tuple[str, str, str]
) -> None:
    held = "1" if form is OF else "3"  # cached, or reserved in total
    others = explained("RuntimeError: " + vendor + form.format("2", "2", held))
    pieces = explained(
        "RuntimeError: " + vendor + form.format("6", "29", "10" if form is OF else "39")
    )
    load = '  File "/v/torch/serialization.py", line 1, in load\n    return _load(\n'
    resumed = explained(load + "RuntimeError: " + vendor + form.format("2", "36", "38"))

    assert (others.causes[0].code, pieces.causes[0].code) == ("foreign", "fragmentation")
    assert others.remedies[0].do == words[0]
    assert others.remedies[1].do.startswith(words[1])
    assert pieces.remedies[0].do.startswith(words[2])
    assert resumed.causes[0].code == "resume-load"
    everything = str((others, pieces, resumed))
    assert not [word for word in ("nvidia", "CUDA") if word in everything]
    assert ("torch.cuda" in everything) is (vendor == "HIP")  # as torch calls it there


def test_the_words_of_a_mac_have_no_command_of_a_card() -> None:
    load = '  File "/v/torch/serialization.py", line 1, in load\n    return _load(\n'
    message = "RuntimeError: MPS backend out of memory (MPS allocated: 16.00 GiB, other allocations: 1.0 GiB, max allowed: 27.20 GiB). Tried to allocate 12.00 GiB on private pool."

    assert "torch.mps.empty_cache()" in todo(explained(load + message))


def frame(path: str, function: str, source: str) -> str:
    return f'  File "{path}", line 7, in {function}\n    {source}\n'


HUGE = "RuntimeError: [enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 237494511600 bytes. Error code 12 (Cannot allocate memory)"
SCORES = frame(
    "/v/lib/python3.12/site-packages/transformers/models/bert/modeling_bert.py",
    "forward",
    "attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))",
)


@pytest.mark.parametrize(
    ("text", "first", "never"),
    [
        (SCORES + HUGE, 'from_pretrained(..., attn_implementation="sdpa")', "low_cpu_mem_usage"),
        (frame("/v/lib/python3.12/site-packages/torch/nn/modules/linear.py", "forward", "return F.linear(") + HUGE, "halve the micro-batch size", "low_cpu_mem_usage"),
        (HUGE, "print(model.device, ", "low_cpu_mem_usage"),
        (frame("/app/prepare.py", "<module>", "table = torch.zeros(n, n)") + HUGE, "look at prepare.py:7", "low_cpu_mem_usage"),
        (frame("/v/lib/python3.12/site-packages/transformers/modeling_utils.py", "from_pretrained", "x") + HUGE, "free -h", "batch_size"),
    ],
)  # fmt: skip
def test_main_memory_is_answered_by_what_was_made_in_it(text: str, first: str, never: str) -> None:
    answer = explained(text)

    assert answer.causes[0].code == "host-alloc"
    assert answer.remedies[0].do.startswith(first)
    assert never not in todo(answer)


FSDP = "/v/lib/python3.12/site-packages/torch/distributed/fsdp/_flat_param.py"


@pytest.mark.parametrize(
    ("frames", "code", "first"),
    [
        (frame(FSDP, "_get_shard", "shard = chunk.clone()"), "load-too-large", "fsdp_cpu_ram_efficient_loading"),
        (frame("/v/torch/distributed/tensor/placement_types.py", "_select_shard", "return shards[shard_index].clone()"), "load-too-large", "fsdp_cpu_ram_efficient_loading"),
        (frame("/v/accelerate/utils/fsdp_utils.py", "fsdp2_load_full_state_dict", "sharded_tensor = distribute_tensor("), "load-too-large", "fsdp_cpu_ram_efficient_loading"),
        (frame("/v/torch/nn/parallel/distributed.py", "_ddp_init_helper", "self.reducer = dist.Reducer("), "ddp-buckets", "trainer-plugins configs show fsdp2"),
        (frame("/v/transformers/core_model_loading.py", "convert", "merged[target_pattern] = torch.stack(tensors, dim=self.dim)"), "load-too-large", 'from_pretrained(..., device_map="cpu")'),
        (frame("/v/transformers/core_model_loading.py", "_materialize_copy", "tensor = tensor.to(device=device, dtype=dtype)"), "load-too-large", "from_pretrained(..., dtype="),
        (frame("/app/train.py", "main", "from_pretrained(name, quantization_config=BitsAndBytesConfig(load_in_4bit=True))") + frame("/v/transformers/core_model_loading.py", "convert", "merged[target_pattern] = torch.stack(tensors, dim=self.dim)"), "load-too-large", "quantize_moe_experts: true"),
        (frame("/v/transformers/integrations/mxfp4.py", "_convert_moe_packed_tensors", "out = torch.empty(rows_total, B * 2,") + frame("/v/transformers/core_model_loading.py", "convert", "x"), "load-too-large", 'from_pretrained("unsloth/gpt-oss-20b-BF16")'),
        (frame("/v/peft/tuners/lora/layer.py", "get_delta_weight", 'delta_weight = torch.einsum("o r e, e r i -> e i o", weight_B, weight_A)'), "adapter-delta", "pip install -U peft"),
        (frame("/v/peft/tuners/lora/model.py", "merge_and_unload", "x") + frame("/v/peft/tuners/lora/layer.py", "get_delta_weight", "x"), "adapter-merge", 'model.save_pretrained("adapter")'),
    ],
)  # fmt: skip
def test_what_is_made_of_weights_is_not_answered_with_fewer_rows(
    frames: str, code: str, first: str
) -> None:
    start = frame("/app/train.py", "<module>", "trainer.train()")
    answer = explained(start + frames + FULL)

    assert answer.causes[0].code == code
    assert answer.remedies[0].do.startswith(first)
    # A plan may say how many rows there were.
    advice = [one.do for one in answer.remedies if not one.do.startswith("trainer-plugins plan")]
    assert not [word for word in ("batch_size", "rows", "survive") if word in "\n".join(advice)]


def test_a_kill_while_ranks_load_is_one_of_the_load() -> None:
    killed = "failed (exitcode: -9) local_rank: 3 (pid: 4242) of binary: /opt/py/bin/python"
    loading = explained(f"Loading weights:  61%|██████    | 322/531 [00:41<00:20]\n{killed}")
    loaded = explained(f"Loading weights: 100%|██████████| 531/531 [00:41<00:00]\n{killed}")

    assert "while each rank loaded" in loading.causes[0].summary
    assert "zero_stage: 3" in todo(loading)
    assert "while each rank loaded" not in loaded.causes[0].summary
    assert "zero_stage: 3" not in todo(loaded)


@pytest.mark.parametrize(
    "text",
    [
        "已杀死",
        "Getötet",
        "Terminado (killed)",
        "./run.sh: 第 3 行:  1234 已杀死               python train.py --x",
        "run.sh: Zeile 3:  1234 Getötet                 python train.py",
        "[1]+  已杀死               nohup python train.py",
        " 31%|████   | 331/1063 [01:06<03:59,  3.06it/s]Killed",
        "zsh: killed     python train.py",
        "fish: Job 1, 'python train.py' terminated by signal SIGKILL (Forced quit)",
    ],
)
def test_a_shell_says_killed_in_its_own_language(text: str) -> None:
    assert explained(text).causes[0].code == "host-kill"


def test_unsloths_buffers_are_pinned() -> None:
    path = "/v/lib/python3.12/site-packages/unsloth_zoo/gradient_checkpointing.py"
    for source in (
        "if new_size > x.numel(): x.resize_(new_size)",
        'x = torch.empty(new_size, dtype = arg.dtype, device = "cpu", pin_memory = True)',
        'saved_hidden_states = hidden_states.to("cpu", non_blocking = True)',
    ):
        answer = explained(
            frame(path, "forward", source) + "RuntimeError: CUDA error: out of memory"
        )
        assert answer.causes[0].code == "pinned"
        assert answer.remedies[0].do.startswith("use_gradient_checkpointing=True")


@pytest.mark.parametrize(
    ("path", "function", "source", "code"),
    [
        ("/v/torch/nn/functional.py", "cross_entropy", "return torch._C._nn.cross_entropy_loss(", "logits-loss"),
        ("/v/torch/optim/adamw.py", "step", "state['exp_avg'] = torch.zeros_like(p)", "optimizer-state"),
        ("/v/transformers/cache_utils.py", "update", "torch.cat([self.key_cache[layer_idx], key_states])", "generate-cache"),
        ("/app/eval.py", "evaluate", "outputs = net(images)", "eval-batch"),
        ("/app/net.py", "forward", "return self.layers(x)", "capacity"),
    ],
)  # fmt: skip
def test_a_loop_without_a_trainer_gets_no_flag_of_one(
    path: str, function: str, source: str, code: str
) -> None:
    loop = frame("/app/loop.py", "<module>", "main()")
    answer = explained(loop + frame(path, function, source) + FULL)

    assert answer.causes[0].code == code
    assert answer.remedies
    advised = [one.do for one in answer.remedies]
    assert not [do for do in advised if do.startswith(("--", "trainer")) or "Trainer" in do], (
        advised
    )


def test_who_tried_one_row_is_not_told_to_halve_it() -> None:
    gave_up = "RuntimeError: No executable batch size found, reached zero."
    answer = explained(TRAINER + gave_up)

    assert answer.causes[0].code == "capacity"
    assert "halve" not in todo(answer)
    assert "--gradient_checkpointing True" in todo(answer)
    ran = " 41%|████      | 4100/10000 [2:30:00<7:00:00, 4.4s/it]\n"
    assert explained(ran + TRAINER + gave_up).causes[0].code == "long-sample"


def test_pressure_is_no_oom_and_has_remedies() -> None:
    code, out, _ = command("-", stdin=b"2 pytorch allocator cache flushes since last step.\n")

    assert code == 1
    assert "torch released its cache to continue, which is slow" in " ".join(out.split())
    assert "--torch_empty_cache_steps 1" in out


def test_a_size_that_the_driver_does_not_know_is_said() -> None:
    unknown = "Including non-PyTorch memory, this process has 17179869184.00 GiB memory in use."
    answer = explained(said("2.00 GiB", "24.00 GiB", "0 bytes", "12.00 GiB", "0.30 GiB", unknown))

    assert "17179869184" in " ".join(answer.unknown)
    assert "nvidia-smi" not in todo(answer)  # on Windows it does not say it either
    assert "Task Manager" in todo(answer)
    free = said("2.00 GiB", "24.00 GiB", "17179869184.00 GiB", "12.00 GiB", "0.30 GiB")
    assert explained(free).causes[0].code == "capacity"


@pytest.mark.parametrize(
    ("told", "code"),
    [
        ("训练时显存不足", "capacity"),
        ("Why does it say Error 1455?", "host-commit"),
        ("Your session crashed after using all available RAM.", "host-kill"),
        ("INFO gpu_worker.py:298] Available KV cache memory: -2.77 GiB", "engine-share"),
        ("OOM with 2 cards\n" + frame("/v/torch/optim/adam.py", "_init_group", "x"), "optimizer-state"),
        ("slurmstepd: error: Exceeded job memory limit at some point.", "host-limit"),
    ],
)  # fmt: skip
def test_an_oom_that_a_person_tells_of_is_explained(told: str, code: str) -> None:
    assert explained(told).causes[0].code == code


@pytest.mark.parametrize(
    "text",
    [
        # A sentence about killing, a nine elsewhere.
        "success: 已杀死服务器进程: 1234",
        "Das Tier wurde getötet",
        "Tué par qui ?",
        "Killed by whom",
        "kill -9 4541",
        "    return x[:, -9:]",
        "Unable to shutdown process 123 via 15, forcefully exiting via 9",
        "exit code 1, 137 rows",
        "python3.9 exited with code 1",
        "terminated after 137 steps",
        # A question on something else.
        "The loss is NaN on a card with 24 GB. Why?",
        "0%| | 0/80 [00:00<?, ?it/s] 8 GB",
        "step 3\n" * 100 + "a smaller batch, and OOM is far\n",
        "it trains without OOM",
        "OOM?\n" + frame("/app/run.py", "<module>", "x[9]") + "IndexError: list index out of range",
    ],
)
def test_a_log_of_something_else_is_no_oom(text: str) -> None:
    assert not explained(text).causes


def test_another_error_of_the_card_gets_a_remedy_in_the_makers_words() -> None:
    answer = explained("RuntimeError: HIP error: invalid device function")

    assert answer.causes[0].code == "not-an-oom"
    assert "HIP_LAUNCH_BLOCKING" in answer.remedies[0].do


def test_a_lost_card_and_a_wait_for_others_are_no_oom() -> None:
    lost = explained(
        "RuntimeError: level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)"
    )
    waited = explained("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)")
    both = explained(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)"
    )

    assert [one.causes[0].code for one in (lost, waited, both)] == [*["not-an-oom"] * 2, "capacity"]
    assert not lost.causes[0].doubt
    assert "may have run out of memory" in waited.causes[0].doubt


def test_unused_memory_that_was_enough_comes_before_others_that_are_only_counted() -> None:
    said = (
        "CUDA out of memory. Tried to allocate 8.54 GiB. GPU 0 has a total capacity of 15.92 GiB of"
        " which 0 bytes is free. {}Of the allocated memory 3.97 GiB is allocated by PyTorch, and 9.27"
        " GiB is reserved by PyTorch but unallocated."
    )
    counted = explained("torch.OutOfMemoryError: " + said.format(""))
    named = explained(
        "torch.OutOfMemoryError: " + said.format("Process 7 has 2.68 GiB memory in use. ")
    )

    assert [one.code for one in counted.causes][:2] == ["fragmentation", "foreign"]
    assert named.causes[0].code == "foreign"


def test_an_error_of_a_gaudi_is_no_oom_unless_it_names_memory() -> None:
    failed = explained(
        "RuntimeError: synNodeCreateWithId failed with synStatus 26 [Generic failure]."
    )

    assert failed.causes[0].code == "not-an-oom"
    assert "`hl-smi`" in failed.causes[0].doubt
    assert not failed.remedies
    assert not explained("RuntimeError: failed with synStatus 9 [Device memory refused].").causes
