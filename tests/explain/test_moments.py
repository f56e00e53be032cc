"""Reports as people paste them: the moment, the ranks, the signal and what was tried decide."""

from pathlib import Path

import pytest

from tests.advice.asked import RECORDS
from tests.explain.stated import explained
from tests.explain.test_other_words import frame
from tests.explain.test_text import todo
from trainer_plugins.explain.answer import Explanation
from trainer_plugins.explain.run import explain_record

SITE = "/opt/py/site-packages"
CHECKPOINTING = "--gradient_checkpointing"


def out(
    asked: str = "512.00 MiB",
    free: str = "100.00 MiB",
    live: str = "38.00 GiB",
    unused: str = "300.00 MiB",
    others: str = "",
    card: int = 0,
) -> str:
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. GPU {card} has a"
        f" total capacity of 39.39 GiB of which {free} is free. {others}Of the allocated memory"
        f" {live} is allocated by PyTorch, and {unused} is reserved by PyTorch but unallocated.\n"
    )


FULL = out()
ROWS = ("batch", "rows", "survive")


def check(text: str, code: str, first: str, never: tuple[str, ...]) -> Explanation:
    answer = explained(text)
    assert answer.causes[0].code == code
    assert first in answer.remedies[0].do, todo(answer)
    assert not [word for word in never if word in todo(answer)], todo(answer)
    return answer


@pytest.mark.parametrize(
    "text",
    [
        "Rank(Worker): 16 caught unknown unhandled exception:\nException type: OOM\nreturn code is -9, maybe OUT OF MEMORY",
        "exitcode  : -9 (pid: 4541)",
        "The process exited with code -9. dmesg shows it was OOM.",
        "worker 3 was terminated with signal 9 (probably the OOM killer)",
        "subprocess.CalledProcessError: Command '['python', 'x.py']' died with <Signals.SIGKILL: 9>.",
        "The exit codes of the workers are {SIGKILL(-9)}",
        "srun: error: node-3: task 2: Killed",
        '    "exitCode": 137,',
        "got -9 as exit code",
        "process group killed, rc=137",
        "Sending process 4540 closing signal SIGTERM\nfailed (exitcode: -9) local_rank: 3 (pid: 4542)",
    ],
)  # fmt: skip
def test_sigkill_is_seen_by_its_number_beside_a_word_of_ending(text: str) -> None:
    answer = explained(text)
    words = ("oom", "memory")
    is_bare = not any(word in text.lower() for word in words)

    assert answer.causes[0].code == "host-kill"
    assert ("preemption" in answer.causes[0].summary) is is_bare
    assert answer.causes[0].grade == ("possible" if is_bare else "likely")
    assert "num_workers" in todo(answer)
    assert "--memory=SIZE" in todo(answer)
    assert "batch" not in todo(answer)


@pytest.mark.parametrize(
    "text",
    [
        "slurmstepd: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-11-01T10:00:00 DUE TO PREEMPTION ***\nsrun: error: n1: task 0: Killed",
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4021 got signal: 15",
        "Received Signals.SIGTERM death signal, shutting down workers\nexitcode  : -9 (pid: 4541)",
        "command terminated with exit code 143",
    ],
)  # fmt: skip
def test_who_was_asked_to_end_has_no_oom(text: str) -> None:
    answer = explained(text)

    assert answer.causes[0].code == "not-an-oom"
    assert "SIGTERM" in answer.causes[0].summary
    assert "sacct" in answer.causes[0].doubt
    assert "resume_from_checkpoint" in todo(answer)
    assert "docker" not in todo(answer)


def test_who_killed_is_asked_where_the_run_was() -> None:
    killed = "exitcode  : -9 (pid: 4541)"

    for place in ("/content/train.py", "/kaggle/working/train.py"):
        answer = explained(f"{place}\n{killed}")
        assert "sudo" not in todo(answer) + answer.causes[0].doubt
    assert explained(f"sbatch train.sh\n{killed}").remedies[0].do.startswith("sacct ")
    assert "kubectl" in explained(f"kubectl logs pod/train\n{killed}").causes[0].doubt


def stage(function: str, number: str = "3") -> str:
    return f"deepspeed/runtime/zero/stage{number}.py:947 in {function}\n"


TRL = frame(f"{SITE}/trl/models/utils.py", "unwrap_model_for_generation", "with deepspeed.zero.GatheredParameters(model.parameters()):")  # fmt: skip
GATHER = frame(f"{SITE}/deepspeed/runtime/zero/partition_parameters.py", "__enter__", "x")
STEP = frame(f"{SITE}/torch/optim/adamw.py", "step", "loss = closure()")
OFFLOAD, SAVED = "zero3_offload_optimizer", 'save_pretrained("adapter")'


@pytest.mark.parametrize(
    ("text", "code", "first", "never"),
    [
        # DeepSpeed's step, also as a lone line.
        (frame(f"{SITE}/deepspeed/runtime/zero/stage3.py", "_optimizer_step", "self.optimizer.step()") + FULL, "optimizer-state", OFFLOAD, ROWS),
        (f'  File "{SITE}/deepspeed/runtime/zero/stage3.py", line 9, in _optimizer_step\n' + FULL, "optimizer-state", OFFLOAD, ROWS),
        (stage("_optimizer_step", "_1_and_2") + FULL, "optimizer-state", OFFLOAD, ROWS),
        ("stage3.py, line 1003, in _optimizer_step\n" + FULL, "optimizer-state", OFFLOAD, ROWS),
        ("ZeRO-3 with optimizer offload to CPU\n" + stage("_optimizer_step") + FULL, "optimizer-state", "more cards than now", (OFFLOAD, *ROWS)),
        # An adapter is merged.
        (frame(f"{SITE}/unsloth/save.py", "unsloth_save_pretrained_merged", "unsloth_save_model(**arguments)") + frame(f"{SITE}/unsloth/save.py", "_merge_lora", "W.min().abs()") + FULL, "adapter-merge", SAVED, ROWS),
        (frame("merge.py", "<module>", "model = model.merge_and_unload()") + frame(f"{SITE}/peft/tuners/lora/bnb.py", "merge", "w_data = dequantize(w)") + FULL, "adapter-merge", SAVED, ROWS),
        (frame(f"{SITE}/llamafactory/train/tuner.py", "export_model", "model.merge_and_unload()") + FULL, "adapter-merge", "export_device: cpu", ROWS),
        ("OOM when merging the LoRA adapter into the base model\n" + FULL, "adapter-merge", SAVED, ROWS),
        ("model.push_to_hub_gguf crashes: CUDA out of memory", "adapter-merge", SAVED, ROWS),
        # A save.
        ("memory grows by 12 GiB at each checkpoint save until OOM", "save-gather", "SHARDED_STATE_DICT", ROWS),
        ("each save adds 12 GB that stays", "save-gather", "SHARDED_STATE_DICT", ROWS),
        ("FSDP is fine but it crashes with OOM while saving the model at the end\n" + FULL, "save-gather", "SHARDED_STATE_DICT", (*ROWS, "stage3_gather")),
        # An evaluation.
        ("OOM during eval with compute_metrics\n" + FULL, "eval-logits", "preprocess_logits_for_metrics", ("train_batch",)),
        ("Evaluation: OOM as soon as compute_metrics is given\n" + FULL, "eval-logits", "preprocess_logits_for_metrics", ("train_batch",)),
        ("CUDA OOM while evaluating, training is fine\n" + FULL, "eval-batch", "per_device_eval_batch_size", ("train_batch",)),
        ("even with eval_accumulation_steps=1 it is OOM in validation\n" + FULL, "eval-batch", "per_device_eval_batch_size", ("train_batch", "eval_accumulation")),
        (frame(f"{SITE}/transformers/trainer.py", "evaluation_loop", "losses, logits, labels = self.prediction_step(model, inputs)") + FULL, "eval-batch", "per_device_eval_batch_size", ("train_batch",)),
        # ZeRO-3 gathers all to generate, or the script does.
        (TRL + GATHER + FULL, "zero3-gather", "ds3_gather_for_generation False", (*ROWS, "max_live")),
        (frame("/app/x.py", "sample", "with GatheredParameters(list(model.parameters())):") + GATHER + FULL, "zero3-gather", "recurse=False", (*ROWS, "max_live")),
        # Other moments in words.
        ("OOM during generation with PPO\n" + FULL, "generate-cache", "eval_batch", ("train_batch",)),
        ("CUDA out of memory when resuming from checkpoint-500\n" + FULL, "resume-load", "map_location", ROWS),
        ("OOM when loading the model on 4 GPUs\n" + FULL, "load-too-large", "from_pretrained", ("survive",)),
        # DDP's buckets.
        ("    self.reducer = dist.Reducer(\n" + out(asked="25.10 GiB"), "ddp-buckets", "configs show fsdp2", ROWS),
        # NCCL's shared memory.
        ("NCCL WARN Cuda failure 2 'out of memory'\nNCCL INFO transport/shm.cc:534 -> 1\nPlatform: Linux-5.15-microsoft-standard-WSL2-x86_64", "nccl", "NCCL_CUMEM_HOST_ENABLE=0", ("fraction", *ROWS)),
        ("NCCL INFO ncclShmImportShareableBuffer\nNCCL WARN Cuda failure 2 'out of memory'", "nccl", "NCCL_CUMEM_HOST_ENABLE=0", ("fraction", *ROWS)),
        ("NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory", "nccl", "ulimit -l", ("fraction", *ROWS)),
        ("out of memory, skipping this batch\n" * 3 + FULL, "leak", "", ()),
        # A base in 4 bits that fails as it is prepared is not answered with 4 bits.
        (frame(f"{SITE}/peft/utils/other.py", "prepare_model_for_kbit_training", "param.data = param.data.to(torch.float32)") + FULL, "load-too-large", "leave out prepare_model_for_kbit_training(model)", ("4bit",)),
        # What an optimizer calls is not its state: Lightning computes the loss within its step.
        (STEP + FULL, "optimizer-state", "", ()),
        (STEP + frame("/app/model.py", "forward", "return self.net(x)") + FULL, "capacity", "", ()),
        # Outputs that accelerate makes float32 are logits.
        (frame("/home/me/grpo.py", "logps", "logits = model(ids).logits") + frame("/v/accelerate/utils/operations.py", "_convert_to_fp32", "return tensor.float()") + FULL, "logits-loss", "", ()),
        # The allocator's cache, noted in a log.
        ("memory (MB) | allocated:  6.44e+01 | max_allocated:  8.34e+03 | reserved:  5.54e+04\ntorch.cuda.OutOfMemoryError: CUDA out of memory.", "fragmentation", "expandable_segments", ()),
        ("MA 8.34 GB  Max_MA 8.34 GB  CA 55.4 GB  Max_CA 55 GB\nCUDA out of memory.", "fragmentation", "expandable_segments", ()),
        # Little was asked of a full card after many steps.
        (" 42%|████  | 42/100 [00:30<01:00, 1.1it/s]\n" + out("2.00 MiB", "1.00 MiB"), "long-sample", "--preset observe", ()),
    ],
)  # fmt: skip
def test_the_moment_decides(text: str, code: str, first: str, never: tuple[str, ...]) -> None:
    assert check(text, code, first, never).causes[0].grade != "certain"


def held(*gibs: float) -> str:
    return "".join(f"Process {7 + at} has {gib} GiB memory in use. " for at, gib in enumerate(gibs))


@pytest.mark.parametrize(
    "text",
    [
        "torchrun --nproc_per_node 4 t.py\n" + out(live="9.00 GiB", others=held(9.5, 9.4, 9.3, 9.2)),
        "accelerate launch --num_processes 2 t.py\n" + out(live="18.90 GiB", others=held(19.3, 19.9)),
        "[rank3]: " + out(live="18.90 GiB", others=held(19.3, 19.9)),
        "deepspeed --num_gpus 8 t.py\n" + out(live="20.00 GiB", others=held(20.5, *[2.6] * 7)),
    ],
)  # fmt: skip
def test_ranks_on_one_card_are_the_launchs_own(text: str) -> None:
    answer = check(text, "ddp-gpu0", 'set_device(int(os.environ["LOCAL_RANK"]))', ("kill",))
    assert "end what is yours" not in str(answer)
    assert "certain" not in [each.grade for each in answer.causes]


def test_a_stranger_beside_a_rank_is_foreign_and_nothing_is_killed() -> None:
    beside = out(live="6.00 GiB", others=held(6.5, 32.6))
    answer = check(
        "torchrun --nproc_per_node 2 t.py\n" + beside, "foreign", "nvidia-smi", ("kill",)
    )
    assert answer.causes[0].grade == "likely"
    assert explained(beside).causes[0].grade == "certain"


def test_ranks_on_one_card_are_seen_in_the_record_of_a_launch(tmp_path: Path) -> None:
    answer = explain_record(RECORDS["ddp-gpu0"], tmp_path)

    assert (answer.causes[0].code, answer.causes[0].grade) == ("ddp-gpu0", "likely")
    assert "LOCAL_RANK" in answer.remedies[0].do
    assert "kill" not in todo(answer)


PIECES = out("54.00 MiB", "41.38 MiB", "34.00 GiB", "4.16 GiB")


@pytest.mark.parametrize(
    ("text", "code", "never"),
    [
        (f"[rank0]: {FULL}\nAfter lowering the batch size from 16 to 8 I get this again.\n\n[rank0]: {PIECES}", "fragmentation", "double --gradient"),
        (f"$ python a.py --bs 8\n{FULL}\n$ python a.py --bs 4\n{PIECES}", "fragmentation", "--bs 8"),
        (f"bs 16 -> OOM\n{FULL}\nbs 8 -> OOM too:\n{PIECES}", "fragmentation", "double --gradient"),
        (FULL + "\nNow with ZeRO offload I only get this:\nexits with return code = -9", "host-kill", "batch"),
        # No attempts: another rank, what followed, and a repetition.
        (f"[rank0]: {FULL}[rank1]: {out('54.00 MiB', '41.38 MiB', '34.00 GiB', '4.16 GiB', card=1)}", "capacity", "expandable"),
        (FULL + "During handling of the above exception, another exception occurred:\n" + PIECES, "capacity", "expandable"),
        (FULL + "[rank1]: Sending closing signal\nexitcode: -9 (pid: 3)\n" + FULL, "capacity", "dmesg"),
    ],
)  # fmt: skip
def test_the_last_attempt_counts(text: str, code: str, never: str) -> None:
    check(text, code, "", (never,))


@pytest.mark.parametrize(
    ("said", "gone"),
    [
        ("batch size is 1 already", "double --gradient"),
        ("I halved the batch, no change", "double --gradient"),
        ("even with micro batch 1", "double --gradient"),
        ("gradient checkpointing is enabled", CHECKPOINTING),
        ("tried gradient_checkpointing", CHECKPOINTING),
        ("Gradient checkpointing did not help", CHECKPOINTING),
        ("trainer-plugins exec --preset survive -- python t.py", "--preset survive"),
    ],
)
def test_what_is_tried_or_in_force_is_not_offered(said: str, gone: str) -> None:
    assert gone in todo(explained(FULL))
    assert gone not in todo(explained(f"{said}\n{FULL}"))
    for other in ("you may try a smaller batch", "gradient_checkpointing=False", "batch 1/500"):
        assert gone in todo(explained(f"{other}\n{FULL}"))


def test_a_worker_that_is_none_leaves_what_a_sample_builds() -> None:
    killed = "RuntimeError: DataLoader worker (pid 2637) is killed by signal: Killed."
    for none in ("num_workers is 0", "dataloader_num_workers=0", "with zero workers"):
        check(f"{none}\n{killed}", "host-kill", "one sample", ("num_workers",))


def test_a_line_that_is_broken_in_a_word_and_a_number_keeps_its_numbers() -> None:
    rank = "[rank4]: " + out("1.42 GiB", "1.05 GiB", "36.33 GiB", "354.65 MiB")
    whole = explained(rank)
    for at in ("PyTorc|h", "36.3|3 GiB", "354|.65", "total capa|city", "of |which"):
        before, after = at.split("|")
        broken = rank.replace(before + after, f"{before}\n{after}")
        assert broken != rank
        assert explained(broken).numbers == whole.numbers


def test_evidence_ends_with_a_whole_word() -> None:
    words = "exit code 137 " + "of a worker " * 30
    (line,) = explained(words).causes[0].evidence
    assert line.removesuffix(" ...").split()[-1] in words.split()
    assert line.endswith(" ...")


@pytest.mark.parametrize(
    ("model", "vocabularies"),
    [("qwen2", ["151,936", "152,064"]), ("llama", ["32,000", "128,256"]), ("mine", [])],
)
def test_only_the_vocabulary_of_the_model_in_the_traceback_is_counted(
    model: str, vocabularies: list[str]
) -> None:
    path = f"{SITE}/transformers/models/{model}/modeling_{model}.py"
    answer = explained(frame(path, "forward", "logits = self.lm_head(h).float()") + out("7.77 GiB"))
    evidence = " ".join(answer.causes[0].evidence)
    for each in ("32,000", "128,256", "151,936", "152,064"):
        assert (each in evidence) is (each in vocabularies)
