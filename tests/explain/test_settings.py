"""Texts without a traceback: what a person wrote of the run decides, by arithmetic and words."""

import pytest

from tests.explain.stated import explained

SWIFT = "OOM at the first step\nswift sft --model Qwen/Qwen2.5-VL-7B-Instruct \\\n"


@pytest.mark.parametrize(
    ("text", "code", "sentence", "remedy"),
    [
        # 3 billion parameters in full: 16 bytes of each, on a card each.
        ("full fine-tuning of a 3B model on one 4090 is OOM", "optimizer-state", "3 billion parameters x 16 bytes = 44.70 GiB", "zero3_offload_optimizer"),
        ("llamafactory: OOM with train_full of a 13B model on 4 x A100 80GB", "optimizer-state", "13 billion parameters x 16 bytes", "deepspeed: examples/deepspeed/ds_z3_config.json"),
        # ZeRO-3 divides all of it, so the states of a question that is no error fit.
        ("32B full on 7 x 80GB with ZeRO-3?", "capacity", "x 16 bytes / 7 ranks = 68.12 GiB a card", ""),
        ("LoRA on a 70B model, one H100 80GB: OOM", "load-too-large", "70 billion parameters x 2 bytes", ""),
        # QLoRA of the same fits: nothing of the weights is named as the cause.
        ("QLoRA on a 70B model, one H100 80GB: OOM", "capacity", "70 billion parameters x 0.55 bytes", "halve --per_device"),
        ("full fine-tuning on four cards with zero-2, batch size 1: OOM. 4 GPUs", "capacity", "OOM", "trainer-plugins configs show fsdp2"),
        # A shell passes nothing that follows a comment.
        (f"{SWIFT}  --train_type lora \\\n  # --target_modules all-linear \\\n  --deepspeed zero3", "cut-command", "--deepspeed zero3", "delete the line"),
        (f"{SWIFT}  --train_type lora \\\n  --max_length 2048", "image-size", "12,845,056 pixels a picture", "export MAX_PIXELS"),
        ("OOM\nmodel_name_or_path: Qwen/Qwen2.5-VL-3B\nimage_max_pixels: 67108864\nfinetuning_type: lora", "image-size", "= 85,598 tokens", "image_max_pixels: 401408"),
        (f"{SWIFT}  --max_pixels 401408 --max_length 2048", "capacity", "OOM", ""),
        # Logits by rows, length and vocabulary; two answers a row in DPO.
        ("OOM in DPO\nmodel: google/gemma-3-270m\nmax_length: 4096", "logits-loss", "2 rows x 4,096 tokens x 262,144 words x 4 bytes = 8.00 GiB", "--use_liger_kernel True"),
        ("CUDA out of memory. Tried to allocate 19.14 GiB. GPU 6 has a total capacity of 79.33 GiB\n--model Qwen/Qwen2.5-VL-3B --max_length 4096 --per_device_train_batch_size 1", "long-sample", "8.3 times the limit of 4,096 tokens", "--max_length"),
        # Moments, in two languages.
        ("训练正常\uff0c进行eval的时候显存会一直增加\uff0c然后OOM", "eval-batch", "eval", "--per_device_eval_batch_size"),
        ("合并LoRA的时候爆显存 swift export", "adapter-merge", "合并", "--device_map cpu"),
        ("Memory climbs, and it is OOM after 4000 steps", "long-sample", "after 4000 steps", ""),
        ("GRPO: memory went from 8G to 20G, and the next training step was OOM", "capacity", "OOM", ""),
        ("A memory leak in Trainer.train: 0.25 GiB more with each run", "leak", "memory leak", "exec --preset observe"),
        # The frames only start the training.
        ('OOM at the first eval\n  File "/v/swift/llm/train/sft.py", line 243, in train\n    trainer.train()\n', "eval-batch", "first eval", "--per_device_eval_batch_size 1"),
        # A title quotes the error; a warning of full cards precedes an OOM in words.
        ("Llama-3.2-11B CUDA error: out of memory, RTX 3090", "capacity", "CUDA error: out of memory", ""),
        ("10 pytorch allocator cache flushes since last step. It is still OOM, only after more steps.", "capacity", "OOM", ""),
        ("Qwen3-Coder OOM in the newest docker image", "capacity", "OOM", ""),
        # The frames are of the model alone: they show no moment.
        ('OOM in SFTTrainer, during validation\n  File "/v/torch/nn/modules/module.py", line 1776, in _wrapped_call_impl\n    return self._call_impl(*args)\n', "eval-batch", "during validation", "--per_device_eval_batch_size 1"),
        # What 4 bits hold is not trained, whatever a comment says.
        ("OOM\nmodel_name = 'unsloth/Qwen3-30B-A3B', RTX 4090\nload_in_4bit = True, # full_finetuning = True", "capacity", "30 billion parameters x 0.55 bytes = 15.37 GiB", ""),
        ("resume_from_checkpoint is oom killed", "host-kill", "oom killed", "dmesg"),
        # Questions: whether the cards are enough.
        ("想微调 32B 的模型\uff0c单机 4*80G 够不够\uff1f", "capacity", "4 x 74.51 GiB: room for LoRA and QLoRA, not for full training.", "trainer-plugins plan"),
        ("LoRA\u5fae\u8c038B\u6240\u9700\u7684\u663e\u5b58: \u4e00\u5757 4090", "capacity", "8 billion parameters x 2 bytes = 14.90 GiB", "trainer-plugins plan"),
        ("Are 8 x A100 80GB enough to fine-tune a 397B model?", "capacity", "8 x 74.51 GiB: room for QLoRA, not for full training or LoRA.", "trainer-plugins plan"),
        # Main memory, which no smaller batch helps.
        ("CPU memory keeps growing during tokenization, then the process gets killed", "host-kill", "CPU memory", "streaming"),
        # What the person has compared decides.
        ("OOM in training. It is fine when use_unsloth_gc is disabled.", "regression", "use_unsloth_gc", "leave use_unsloth_gc out"),
        ("OOM since the upgrade: DeepSpeed 0.15.4 can train the model, whereas 0.16.4 cannot", "regression", "0.16.4", "pip install"),
        # A version with a known fault; the one that cures it is no fault any more.
        ("OOM with ZeRO-3 and gradient checkpointing, deepspeed==0.16.4", "regression", "DeepSpeed#7116", "deepspeed>=0.16.8"),
        ("OOM with ZeRO-3 and gradient checkpointing, deepspeed==0.16.8", "capacity", "OOM", ""),
        # What is in force is not offered, however a framework spells it.
        ("OOM\nmodel_name_or_path: Qwen/Qwen2.5-1.5B\ncutoff_len: 16384\nper_device_train_batch_size: 4\nenable_liger_kernel: true\nfinetuning_type: full", "capacity", "1.5 billion", "--per_device_train_batch_size 2"),
        ("Some modules are dispatched on the CPU or the disk. Make sure you have enough GPU RAM to fit the quantized model.", "load-too-large", "quantized model", 'device_map={"": 0}'),
        ("保存模型时 CPU 内存暴涨至 250GB+ 导致 OOM", "host-kill", "250GB", "--save_only_model True"),
        ("OOM in training. If I comment out use_unsloth_gc it is fine.", "regression", "use_unsloth_gc", "leave use_unsloth_gc out"),
        # Unsloth trains these targets in full, PEFT what it saves.
        ("OOM with unsloth, gemma-2-2b\ntarget_modules = ['q_proj', 'embed_tokens', 'lm_head']\nlora_alpha = 32", "optimizer-state", "= 17.58 GiB", '"embed_tokens" and "lm_head"'),
        # A method that is not named is full training, if it reports an error.
        ("DPO training of Llama2-7B is OOM on an A100 40GB GPU", "optimizer-state", "If all weights are trained: 7 billion", "zero3_offload_optimizer"),
        ("OOM with lora on a 48 GB card\nall params: 8,041,160,224", "capacity", "8 billion parameters x 2 bytes", ""),
        ("Training is 自动被killed且无任何报错信息", "host-kill", "被killed", "dmesg"),
        # The cards have room for what offload keeps in main memory.
        ("The OS OOM killer ends it, out of system memory.\nfull sft of a 30B model on 8 x H200, zero2_offload", "host-kill", "30 billion parameters x 18 bytes", "configs show fsdp2"),
        ("OOM in GRPO\n--per_device_train_batch_size 1 --gradient_checkpointing true --num_generations 8", "capacity", "Each answer of a prompt", "--num_generations 4"),
        ('OOM\n  File "/v/accelerate/accelerator.py", line 2033, in _prepare_deepspeed\n    engine = ds_initialize(**kwargs)\n', "optimizer-state", "_prepare_deepspeed", "zero3_offload_optimizer"),
        # What names an engine or a video, and is none.
        ('OOM with DPO\n  File "/c/envs/vllm/lib/python3.12/site-packages/transformers/trainer.py", line 2241, in train\n    return inner_training_loop()\n', "capacity", "trainer.py:2241", "halve --per_device"),
        ("OOM\n--model Qwen/Qwen2-VL-2B --video-backend decord --max_pixels 200000 --image_folder /data/videos", "capacity", "OOM", ""),
        # DeepSpeed's first lines show next to nothing, reserved or not.
        ("[utils.py:789] MA 0.06 GB         CA 0.13 GB\nz3 offload 任然OOM", "capacity", "OOM", ""),
        ("训练到一半内存不足", "capacity", "内存不足", ""),
        ("系统内存不足\uff0c训练停了", "host-kill", "系统内存不足", "--dataloader_num_workers 0"),
        ("同配置和环境下从检查点继续训练OOM", "resume-load", "检查点", "map_location"),
        ("SIGKILL on save steps, with zero3 and offload", "host-kill", "SIGKILL", "stage3_gather"),
        ("I ran into an OOM issue in the merge step of a LoRA on llama-3 70b", "adapter-merge", "merge step", ""),
        ("I think this is due to pinned memory being overfilled, in WSL", "pinned", "overfilled", ""),
        # No card that is sold as this one has room for it.
        ("16*A100 fine-tuning of InternVL2-40B with deepspeed: OOM", "optimizer-state", "of 74.51 GiB at most", "configs show fsdp2"),
        # One row in other frameworks' words is not halved, and a length is halved in theirs.
        ("OOM in backward at some step\nlocal_batch_size: 1\nmax_length: 8192", "long-sample", "at some step", "--preset observe"),
        ("OOM\nactor_rollout_ref.actor.ppo_micro_batch_size=64", "capacity", "OOM", "actor_rollout_ref.actor.ppo_micro_batch_size=32"),
        ("OOM during the actor update, verl\nmodel.path=Qwen/Qwen2.5-7B\nactor.ppo_max_token_len_per_gpu=32768", "logits-loss", "32,768 tokens x 152,064 words", "use_fused_kernels=True"),
        ("OOM with LoRA of a 30B model on a 4090\u5355\u5361\nfinetuning_type: lora\ndeepspeed: ds_z3_config.json", "load-too-large", "30 billion parameters", "quantization_bit: 4"),
        ("OOM: lora of openai/gpt-oss-120b\nGPU number: 8\nGPU memory: 93.12GB\nfinetuning_type: lora", "load-too-large", "120 billion parameters", "ds_z3_config"),
        ("8B in full on 8 x 140G \u663e\u5b58 with deepspeed zero0: OOM\nswift sft --train_type full", "optimizer-state", "8 billion parameters x 16 bytes", "--deepspeed zero3"),
        # Frames of videos are tokens.
        ("OOM on long videos\n--per_device_train_batch_size 1 --video_max_frames 64 --video_max_pixels 1304576", "image-size", "= 53,248 tokens", "--video_max_frames 16"),
        ("swift sft on videos is OOM --max_pixels 3136", "image-size", "no number of frames", "FPS_MAX_FRAMES=16"),
        # The engine beside the training, by its moment or its share.
        ("GRPO colocate: the card is still full, so wake up of the weights is OOM", "engine-share", "wake up", "--vllm_gpu_memory_utilization 0.25"),
        ("OOM at the end of an epoch, vllm_gpu_memory_utilization set to 0.65", "engine-share", "0.65 of each card", "--vllm_gpu_memory_utilization 0.4"),
        ("vllm_gpu_memory_utilization=0.7 doesn't seem to help. OOM at the third step", "long-sample", "third step", "--preset observe"),
        # A merge that fills main memory, and workers that do.
        ("The colab session crashes for memory when I merge the model:\nmodel.save_pretrained_merged('x')", "host-kill", "merge", 'save_pretrained("adapter")'),
        ("\u673a\u5668\u5185\u5b58(CPU RAM)\u4e00\u76f4\u4e0a\u6da8\n--dataloader_num_workers 128", "host-kill", "RAM", "num_workers"),
        ("It worked with transformers v4.46.3 and is OOM with v4.47.0", "regression", "v4.46.3", "pip install 'transformers==4.46.3'"),
        # A remedy of a step does not help at another moment.
        ("FSDP on 4 GPUs: it dies with OOM on startup, no batch was seen", "load-too-large", "startup", "cpu_ram_efficient"),
        ("ZeRO-2 on 4 GPUs is OOM before the first step. A smaller batch had no effect", "load-too-large", "before the first step", "configs show fsdp2"),
        ("Training fits, but as soon as I validate, the card runs out of memory", "eval-batch", "validate", "--per_device_eval_batch_size"),
        ("I see that saving the optimizer with save_checkpoint() leads to OOM", "save-gather", "leads to OOM", "--save_only_model True"),
        ("swift export of the LoRA of Qwen2.5-VL-7B is OOM while it merges the adapter", "adapter-merge", "merges", "--device_map cpu"),
        ("I pressed stop, and after the run has stopped the memory is not freed: the next run is OOM", "leftover", "not freed", "a process of its own"),
        ("GRPO without an engine, use_vllm=False, vllm_gpu_memory_utilization=0.5. The first step takes 30 GB, in the second step it is OOM", "optimizer-state", "second step", ""),
        # Main memory decides over the arithmetic of the card.
        ("RAM, not VRAM, is full after an hour\nmodel: google/gemma-3-270m\nmax_length: 32000", "host-kill", "not VRAM", "num_workers"),
        ("The host memory fills up: each row is a book of 50M characters", "host-kill", "fills up", "a long text in one piece"),
        ("The system memory is exhausted while it writes the checkpoint", "host-kill", "exhausted", "save_only_model True"),
        # Where the text shows neither the moment nor the run, the question comes first.
        ("Why is it OOM?", "capacity", "OOM", "--preset observe"),
        ("OOM on 8 GPUs, --gradient_checkpointing false", "capacity", "OOM", "--gradient_checkpointing True"),
        # What a person asks to know is computed, although the word for an error stands beside it.
        ("The README has a part on OOM: fine-tuning a 7B model needs 112 GB. How much VRAM is required, and why?", "capacity", "for 7 billion 104.31 GiB, 13.04 GiB and 3.59 GiB", ""),
        ("I got an OOM on 80 GB. How many GPUs do I need for a full fine-tune?", "capacity", "for each billion 14.90 GiB", "--use_peft True"),
        ("The minimum GPU resources needed to fine-tune the 32B model?", "capacity", "for 32 billion 476.84 GiB", "trainer-plugins plan"),
        ("Can grpo run on a single H20?", "capacity", "single H20", "trainer-plugins plan"),
        # An error that is named in words, also right before a letter that is not Latin.
        ("单机双卡4090 开启了zero3 一直 torch.cuda.OutOfMemoryError", "capacity", "OutOfMemoryError", "--preset observe"),
        ("执行finetune.sh遇到exits with return code = -9是怎么错误呢?", "host-kill", "-9", ""),
        ("提示bus error insufficient shared memory (shm)", "shm", "64 MiB", "--dataloader_num_workers 0"),
        ("训练 70B 模型 采用 zero3 时溢出 显存 141G", "capacity", "溢出", ""),
    ],
)  # fmt: skip
def test_a_person_s_words_decide(text: str, code: str, sentence: str, remedy: str) -> None:
    answer = explained(text)
    first = answer.causes[0]

    assert first.code == code
    assert any(sentence in each for each in first.evidence)
    assert remedy in answer.remedies[0].do
    assert {one.cause for one in answer.remedies} <= {one.code for one in answer.causes}


@pytest.mark.parametrize(
    "said",
    [
        "local_batch_size: 1",
        "micro_batch_size: 1",
        '"train_micro_batch_size_per_gpu": 1',
        "mbs=1",
        "batch_size is 1",
        "bs=1",
        "ppo_micro_batch_size_per_gpu=1",
    ],
)
def test_one_row_is_not_halved_in_anybody_s_words(said: str) -> None:
    for more in ("", "\ntorchrun train.py --gradient_checkpointing --bf16"):
        typed = "\n".join(one.do for one in explained(f"OOM\n{said}{more}").remedies)
        assert "double --gradient" not in typed
        # With checkpointing in force, survival has nothing to turn on for one row.
        assert ("--preset survive" in typed) is not bool(more or "local" in said)


def test_main_memory_of_offloaded_states_is_counted_where_their_number_is_known() -> None:
    killed = "full fine-tuning, zero-3-offload, 744G CPU memory\nexitcode -9, dmesg shows OOM"
    sized = explained(f"32B {killed}").causes[0]
    unknown = explained(killed).causes[0]

    assert any("32 billion parameters x 18 bytes = 536.44 GiB" in one for one in sized.evidence)
    assert not any("billion" in one for one in unknown.evidence)


def test_a_traceback_that_ends_before_its_error_is_read_by_its_place() -> None:
    frame = (
        '  File "/v/site-packages/torch/optim/adamw.py", line 220, in step\n    self._init_group('
    )
    answer = explained(f"out of memory, 40gb\nTraceback (most recent call last):\n{frame}")
    other = explained(f"a shape is wrong\nTraceback (most recent call last):\n{frame}")

    assert answer.causes[0].code == "optimizer-state"
    assert not other.causes


@pytest.mark.parametrize(
    ("text", "code", "summary", "remedy"),
    [
        ("Why does half the length leave the GPU memory as it is?", "capacity", "no error is in this text", "trainer-plugins plan"),
        ("Is a memory spike at the first evaluation a leak?", "eval-batch", "evaluation", "--per_device_eval_batch_size"),
        ("After all_gather_object, GPU memory is gone for a context on each GPU by each rank. Why?", "ddp-gpu0", "several ranks", "gloo"),
        ("(raylet) /tmp/ray is over 95% full, available space: 2 GB", "not-an-oom", "a disk is full", "df -h"),
        ("One of the subprocesses has abruptly died during map operation", "not-an-oom", "prepares the data", "streaming=True"),
    ],
)  # fmt: skip
def test_a_text_without_an_oom_is_answered_without_certainty(
    text: str, code: str, summary: str, remedy: str
) -> None:
    answer = explained(text)

    assert answer.causes[0].code == code
    assert answer.causes[0].grade == ("likely" if code == "not-an-oom" else "possible")
    assert summary in answer.causes[0].summary
    assert remedy in answer.remedies[0].do


def test_an_evaluation_is_read_from_a_traceback_that_is_cut_there() -> None:
    frame = '  File "/v/transformers/trainer.py", line 1994, in _inner_training_loop\n'
    answer = explained(
        f"{frame}    self._maybe_log_save_evaluate(tr_loss, grad_norm)\n"
        "torch.OutOfMemoryError: CUDA out of memory."
    )
    ray = explained("ray.exceptions.OutOfMemoryError: the node running low on memory, at step 4/60")

    assert answer.causes[0].code == "eval-logits"
    assert answer.causes[0].grade == "likely"
    # Ray has killed an actor, which neither the kernel's log nor a dataloader shows.
    assert "docker run --memory" in ray.remedies[0].do
