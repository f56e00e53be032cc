"""A pasted text comes in; the cause, what shows it and what to do come out."""

import gzip
import html
import io
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import trainer_plugins
from tests.explain.stated import explained
from tests.models import tiny_llama
from trainer_plugins.advice.for_causes import FOR_CAUSE
from trainer_plugins.cli import app
from trainer_plugins.explain.answer import Explanation
from trainer_plugins.explain.log import explain_log
from trainer_plugins.snapshot.cards import StackFrame
from trainer_plugins.snapshot.stacks import lines_of

PAGE = (Path(trainer_plugins.__file__).parent.parent / "docs" / "explain.md").read_text()


def test_the_page_has_each_code_and_no_other() -> None:
    codes = re.findall(r"^- `([a-z0-9-]+)`: ", PAGE, re.MULTILINE)

    assert sorted(codes) == sorted({*FOR_CAUSE, "not-an-oom"} - {"eval-metrics"})


def said(asked: str, total: str, free: str, live: str, unused: str, more: str = "") -> str:
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total"
        f" capacity of {total} of which {free} is free. {more} Of the allocated memory {live} is"
        f" allocated by PyTorch, and {unused} is reserved by PyTorch but unallocated. If reserved"
        " but unallocated memory is large try setting"
        " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    )


def todo(answer: Explanation) -> str:
    return "\n".join(remedy.do for remedy in answer.remedies)


FULL = said("2.00 GiB", "23.65 GiB", "0.10 GiB", "22.90 GiB", "0.20 GiB")
PIECES = said("2.00 GiB", "23.65 GiB", "0.10 GiB", "18.00 GiB", "5.00 GiB")
FRAME = '  File "/app/train.py", line 7, in train\n    outputs = model(**batch)\n'
TRAINER = (
    '  File "/v/lib/python3.12/site-packages/transformers/trainer.py", line 2328, in train\n'
    "    return inner_training_loop(\n"
    '  File "/v/lib/python3.12/site-packages/torch/_tensor.py", line 581, in backward\n'
    "    torch.autograd.backward(\n"
)


@pytest.mark.parametrize(
    "words",
    [
        "step 0: [out-of-memory-refused] survive_oom does nothing in this run: batch norm\n",
        "ValueError: survive_oom cannot help this run: batch norm\n",
    ],
)
@pytest.mark.parametrize("is_hydra", [False, True])
def test_survival_that_was_refused_is_not_offered_again(words: str, is_hydra: bool) -> None:
    frames = '  File "/v/hydra/main.py", line 9, in main\n    run()\n' * is_hydra + TRAINER
    log = f"Traceback (most recent call last):\n{frames}{FULL}"
    assert "survive" in todo(explained(log))
    assert "survive" not in todo(explained(words + "{'loss': 1.0}\n" * 700 + log))
    assert todo(explained(words + log))


@pytest.mark.parametrize(
    ("message", "code", "grade"),
    [
        (said("4096.00 GiB", "80.00 GiB", "70.00 GiB", "1.00 GiB", "0.00 GiB"), "impossible-size", "certain"),
        (said("20.00 MiB", "80.00 GiB", "70.00 GiB", "1.00 GiB", "0.00 GiB"), "contradictory", "likely"),
        (said("20.00 MiB", "24.00 GiB", "0 bytes", "30.00 GiB", "1.00 GiB"), "capacity", "likely"),
        (said("20.00 MiB", "47.54 GiB", "0 bytes", "0.30 GiB", "0.10 GiB"), "foreign", "certain"),
        # In a container torch calls itself by a pid that is not its own.
        (
            said("1.74 GiB", "23.57 GiB", "0.60 GiB", "20.21 GiB", "0.18 GiB", "Process 9 has 22.97 GiB memory in use."),
            "capacity",
            "likely",
        ),
        # With the others gone it would not have fitted either.
        (
            said("90.00 GiB", "47.54 GiB", "1.00 GiB", "6.00 GiB", "0.10 GiB", "Process 9 has 40.00 GiB memory in use."),
            "api-misuse",
            "possible",
        ),
        # NVML's word for "not available" is no size.
        (
            said("2.00 GiB", "23.65 GiB", "0.10 GiB", "22.90 GiB", "0.20 GiB", "Including non-PyTorch memory, this process has 17179869184.00 GiB memory in use."),
            "capacity",
            "likely",
        ),
        (PIECES, "fragmentation", "likely"),
        # cuDNN that is not initialised in a backward pass is a full card.
        ('  File "/app/train.py", line 7, in train\n    loss.backward()\nRuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED', "capacity", "possible"),
        # Ray only suspects it.
        ("Worker exits with an exit code None. The worker may have exceeded K8s pod memory limits.", "host-limit", "likely"),
    ],
)  # fmt: skip
def test_the_numbers_decide(message: str, code: str, grade: str) -> None:
    cause = explained(message).causes[0]

    assert (cause.code, cause.grade) == (code, grade)


def test_what_others_hold_is_not_answered_with_a_smaller_batch() -> None:
    answer = explained(FRAME + said("20.00 MiB", "47.54 GiB", "0 bytes", "0.30 GiB", "0.10 GiB"))

    assert "nvidia-smi" in answer.remedies[0].do
    assert "batch" not in todo(answer)
    assert "you hold 409.6 MiB" in answer.causes[0].evidence[0]


def test_torchs_own_advice_is_given_only_where_it_fits() -> None:
    in_force = 'os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"\n'

    assert "expandable_segments:True" in todo(explained(PIECES))
    assert "5.00 GiB of small pieces" in explained(PIECES).remedies[0].effect
    assert "expandable_segments" not in todo(explained(FULL))
    assert "expandable_segments" not in todo(explained(in_force + PIECES))
    assert "expandable_segments" not in todo(explained("C:\\runs> python train.py\n" + PIECES))


@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        ("--per_device_train_batch_size 8 --gradient_accumulation_steps 4", "size 4 --gradient_accumulation_steps 8"),
        ("per_device_train_batch_size=3,\n    gradient_accumulation_steps=4,", "size 1 --gradient_accumulation_steps 12"),
        ("  Instantaneous batch size per device = 8\n  Gradient Accumulation steps = 4", "size 4 --gradient_accumulation_steps 8"),
        ("O^O/ \\_/ \\    Batch size per device = 2 | Gradient accumulation steps = 8", "size 1 --gradient_accumulation_steps 16"),
        ("per_device_train_batch_size: 2", "size 1 --gradient_accumulation_steps 2"),
    ],
)  # fmt: skip
def test_the_effective_batch_stays_exactly(flags: str, advice: str) -> None:
    assert advice in explained(f"{flags}\n{TRAINER}{FULL}").remedies[0].do


def test_under_fsdp_whole_gradients_are_kept_only_by_a_run_that_accumulates() -> None:
    fsdp = "distributed_type: FSDP\n--per_device_train_batch_size 1"
    several = explained(f"{fsdp} --gradient_accumulation_steps 8\n{TRAINER}{FULL}")
    assert "sync_each_batch" in todo(several)
    for text in (f"{fsdp} --gradient_accumulation_steps 1", "--gradient_accumulation_steps 8"):
        assert "sync_each_batch" not in todo(explained(f"{text}\n{TRAINER}{FULL}"))


def test_one_row_is_not_halved() -> None:
    answer = explained(f"--per_device_train_batch_size 1\n{TRAINER}{FULL}")

    assert "gradient_accumulation_steps" not in todo(answer)
    assert answer.remedies[-1].do.endswith(" --per_device_train_batch_size 1")
    assert answer.remedies[0].do == "--gradient_checkpointing True"


@pytest.mark.parametrize("width", [40, 71, 100])
def test_a_message_that_a_terminal_has_broken_is_whole_again(width: int) -> None:
    whole = explained(PIECES).facts
    hard = "\n".join(PIECES[start : start + width] for start in range(0, len(PIECES), width))

    assert explained(hard).facts == whole
    assert explained("\n".join(textwrap.wrap(PIECES, width))).facts == whole


def test_the_first_of_several_leads() -> None:
    later = "\n".join([FULL, "RuntimeError: NCCL error", "exitcode: -9 (pid: 3)"])

    assert explained(later).causes[0].code == "capacity"
    assert explained("Cannot allocate memory (os error 12)\n" + FULL).causes[0].code == "host-alloc"
    # A word that may mean anything gives way to the error that follows it.
    unsure = "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_SUPPORTED\n"
    assert explained(unsure + PIECES).causes[0].code == "fragmentation"


PLAIN = """Traceback (most recent call last):
  File "/app/run.py", line 211, in <module>
    trainer.evaluate()
  File "/v/lib/python3.10/site-packages/transformers/trainer.py", line 2515, in evaluation_loop
    preds_host = nested_concat(preds_host, logits, padding_index=-100)
RuntimeError: CUDA out of memory. Tried to allocate 3.00 GiB
"""
PYTHON_3_13 = PLAIN.replace(
    "padding_index=-100)\n", "padding_index=-100)\n                 ~~~~~~~~~~~~~^^^^^^^^^^^^\n"
).replace(
    "trainer.evaluate()\n", "trainer.evaluate()\n    ...<3 lines>...\n    ~~~~~~~~~~~~~~~~^^\n"
)
RICH = """╭───────────── Traceback (most recent call last) ─────────────╮
│ /app/run.py:211 in <module>                                  │
│                                                              │
│   210                                                        │
│ ❱ 211 trainer.evaluate()                                     │
│                                                              │
│ /v/lib/python3.10/site-packages/transformers/trai            │
│ ner.py:2515 in evaluation_loop                               │
│                                                              │
│ ❱ 2515 │   │   preds_host = nested_concat(preds_host, logits) │
╰──────────────────────────────────────────────────────────────╯
OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00
GiB
"""
NOTEBOOK = """---------------------------------------------------------------------------
OutOfMemoryError                          Traceback (most recent call last)
Cell In[4], line 1
----> 1 trainer.evaluate()

File /v/lib/python3.10/site-packages/transformers/trainer.py:2515, in Trainer.evaluation_loop(self)
   2514 if logits is not None:
-> 2515     preds_host = nested_concat(preds_host, logits, padding_index=-100)

OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB
"""


OURS = """  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/src/trainer_plugins/run.py", line 53, in <module>
    main(sys.argv[1:])
  File "/src/trainer_plugins/_site/sitecustomize.py", line 9, in <module>
  File "C:\\src\\trainer_plugins\\plug_in\\as_main.py", line 53, in run
    runpy.run_path(path, run_name="__main__")
  File "{script}", line 211, in <module>
    trainer.train()
  File "/src/trainer_plugins/callbacks/oom_reporter.py", line 205, in call
    return method(self, *args, **kwargs)
  File "/v/lib/python3.12/site-packages/transformers/trainer.py", line 2328, in train
    return inner_training_loop(
  File "/src/trainer_plugins/survival/training/training.py", line 20, in evaluate
    loss = self.loss.backward()
"""


@pytest.mark.parametrize("script", ["/app/fit.py", "/home/me/trainer_plugins/fit.py"])
def test_our_own_frames_are_never_the_users_line(script: str) -> None:
    text = OURS.format(script=script)
    answer = explained(text + FULL)
    assert (
        "innermost line outside packages: fit.py:211 in <module>: trainer.train()" in answer.facts
    )
    assert answer.causes[0].code == "capacity"
    assert answer.remedies[1].do == "trainer-plugins exec --preset survive -- python fit.py"

    file = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
    stack = [StackFrame(path, int(line), name) for path, line, name in file.findall(text)][::-1]
    assert lines_of(tuple(stack)) == [f"{'/'.join(script.split('/')[-2:])}:211 <module>"]


ACCELERATE = (
    '  File "/v/lib/python3.12/site-packages/accelerate/commands/launch.py", line 1198, in launch\n'
)


@pytest.mark.parametrize(
    ("before", "after", "typed"),
    [
        ("$ accelerate launch x.py", "", "accelerate launch x.py"),
        ("me@h:~/x$ CUDA_VISIBLE_DEVICES=0,1 A=b accelerate launch --num_processes 2 x.py --lr 1e-5", "", "accelerate launch --num_processes 2 x.py --lr 1e-5"),
        ("!torchrun --nproc_per_node=2 x.py \\\n    --kwargs '{\"a\": 1}' \\\n  --lr 1 2>&1 | tee log", "", "torchrun --nproc_per_node=2 x.py --kwargs '{\"a\": 1}' --lr 1"),
        ("+ python -m mine.train --bf16 > log", "", "python -m mine.train --bf16"),
        ("nohup deepspeed --num_gpus 4 x.py --deepspeed ds.json &", "", "deepspeed --num_gpus 4 x.py --deepspeed ds.json"),
        ("$ axolotl train x.yml", "", "axolotl train x.yml"),
        ("$ trainer-plugins exec --preset observe -- accelerate launch x.py", "", "accelerate launch x.py"),
        ("python version: 3.12.py", "", "python run.py"),
        ("# python is slow; rm -rf x.py", "", "python run.py"),
        # Nothing shows the command: what a launcher says of its ranks, then what is certain.
        ("", ACCELERATE + "subprocess.CalledProcessError: Command '['/usr/bin/python3', 'x.py', '--lr', '1 2']' returned non-zero exit status 1.", "accelerate launch x.py --lr '1 2'"),
        ("", ACCELERATE, "accelerate launch run.py"),
        ("", "[2024-01-01] [ERROR] [launch.py:325:sigkill_handler] ['/usr/bin/python', '-u', 'x.py', '--local_rank=1', '--a'] exits with return code = 1", "deepspeed x.py --a"),
        ("", '  File "/usr/bin/torchrun", line 8, in <module>\n    sys.exit(main())', "torchrun --nproc-per-node gpu run.py"),
        ('  File "<frozen runpy>", line 198, in _run_module_as_main', "", "YOUR LAUNCH COMMAND"),
    ],
)  # fmt: skip
def test_the_launcher_of_a_run_is_kept(before: str, after: str, typed: str) -> None:
    script = '  File "/app/run.py", line 211, in <module>\n    trainer.train()\n'
    answer = explained(f"{before}\n{script}{TRAINER}{FULL}\n{after}\n")
    assert f"trainer-plugins exec --preset survive -- {typed}" in [
        one.do for one in answer.remedies
    ]


QLORA = """$ accelerate launch --num_processes 2 sft.py --model_name_or_path {model} --load_in_4bit --lora_r=16 \\
    --max_length 2048 --per_device_train_batch_size 8 --gradient_checkpointing True --output_dir out
Traceback (most recent call last):
  File "/app/sft.py", line 211, in <module>
    trainer.train()
{trainer}  File "/v/lib/python3.12/site-packages/trl/trainer/sft_trainer.py", line 9, in compute_loss
  File "/v/lib/python3.12/site-packages/torch/nn/functional.py", line 3462, in cross_entropy
    return torch._C._nn.cross_entropy_loss(
"""


def test_what_halving_would_bring_is_told_by_a_plan_that_is_filled_in(tmp_path: Path) -> None:
    tiny_llama().config.save_pretrained(tmp_path)
    answer = explained(QLORA.format(model=tmp_path, trainer=TRAINER) + FULL)

    assert answer.causes[0].code == "logits-loss"
    assert (
        answer.remedies[1].do == "--per_device_train_batch_size 4 --gradient_accumulation_steps 2"
    )
    assert "you may have to halve it again" in answer.remedies[1].effect
    plan = answer.remedies[3]
    assert plan.do == (
        f"trainer-plugins plan --model {tmp_path} --gpu 23.65GiB --num-gpus 2 --trainer sft"
        " --seq-length 2048 --load-in-4bit --lora-r 16 --per_device_train_batch_size 8"
        " --gradient_checkpointing True"
    )
    assert "does not show" not in plan.effect


@pytest.mark.all
def test_the_plan_that_is_filled_in_can_be_typed(tmp_path: Path) -> None:
    tiny_llama().config.save_pretrained(tmp_path)
    plan = explained(QLORA.format(model=tmp_path, trainer=TRAINER) + FULL).remedies[3]
    words = shlex.split(plan.do.replace("2048", "64").replace(" --load-in-4bit", ""))
    done = CliRunner().invoke(app, words[1:])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("    weights = softmax(weights, dim=-1, dtype=torch.float32)", "plan --model MODEL --gpu 23.65GiB --seq-length LENGTH --per_device_train_batch_size ROWS"),
        ("base_model: mistralai/Mistral-7B-v0.1\nsequence_len: 4096\nmicro_batch_size: 2\nload_in_8bit: true\nlora_r: 32\ntorch_dtype: bfloat16", "plan --model mistralai/Mistral-7B-v0.1 --gpu 23.65GiB --seq-length 4096 --dtype bfloat16 --load-in-8bit --lora-r 32 --per_device_train_batch_size 2"),
        ('model = AutoModelForCausalLM.from_pretrained("org/m", load_in_4bit=True)\nLoraConfig(task_type="CAUSAL_LM", r=8)\nmax_seq_length=512, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16', "plan --model org/m --gpu 23.65GiB --seq-length 512 --load-in-4bit --bnb-4bit-quant-type nf4 --bnb-4bit-compute-dtype bfloat16 --lora-r 8 --per_device_train_batch_size ROWS"),
        ('AutoModelForCausalLM.from_pretrained("org/m", dtype=torch.bfloat16)\nbf16: auto', "plan --model org/m --gpu 23.65GiB --seq-length LENGTH --dtype bfloat16 --per_device_train_batch_size ROWS --bf16 True"),
        ("SFTConfig(max_length=512, model_init_kwargs={'dtype': 'bfloat16'})\nmixed_precision: bf16", "plan --model MODEL --gpu 23.65GiB --seq-length 512 --dtype bfloat16 --per_device_train_batch_size ROWS --bf16 True"),
        ("$ llamafactory-cli train --model_name_or_path org/m --quantization_bit 4 --lora_rank 8 --cutoff_len 1024 --per-device-train-batch-size=2 --deepspeed 'a b.json'", "plan --model org/m --gpu 23.65GiB --seq-length 1024 --load-in-4bit --lora-r 8 --per_device_train_batch_size 2 --deepspeed 'a b.json'"),
    ],
)  # fmt: skip
def test_a_plan_is_filled_with_what_a_text_shows_and_says_what_it_does_not(
    text: str, words: str
) -> None:
    answer = explained(f"{text}\n{TRAINER}{FULL}")
    (plan,) = (one for one in answer.remedies if one.do.startswith("trainer-plugins plan"))
    assert plan.do == f"trainer-plugins {words}"
    left = [name for name in ("MODEL", "LENGTH", "ROWS") if name in words]
    assert (f"does not show {' and '.join(left)}" in plan.effect) is bool(left)


def each_line(start: str, text: str, end: str = "\n") -> str:
    return "".join(f"{start}{line}{end}" for line in text.splitlines())


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        PYTHON_3_13,
        RICH,
        NOTEBOOK,
        each_line("", PLAIN, "\r\n"),
        each_line("\x1b[36m(Worker pid=12, ip=10.0.0.1)\x1b[0m ", PLAIN),
        each_line("[rank3]: ", PLAIN),
        each_line("2024-01-01T10:00:00.123456789Z stderr F ", PLAIN),
        each_line("trainer-1  | 2024-01-01 10:00:00,123 ERROR ", PLAIN),
        "  9%|▉ | 3/35 [00:01<00:10, 3.0it/s]\r" + PLAIN,
        # The message comes first, as some loggers write it.
        PLAIN.splitlines()[-1] + "\n" + PLAIN.rsplit("\n", 2)[0],
    ],
)
def test_a_traceback_is_read_however_it_was_printed(text: str) -> None:
    answer = explained(text)

    assert answer.causes[0].code == "eval-logits"
    assert answer.causes[0].evidence[0].startswith("It failed in trainer.py:2515 in ")
    assert "preds_host = nested_concat(" in answer.causes[0].evidence[0]


def in_docker(text: str) -> bytes:
    lines = ({"log": f"{line}\n", "stream": "stderr", "time": "t"} for line in text.splitlines())
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


@pytest.mark.parametrize(
    "kept",
    [
        lambda text: each_line("Nov  2 10:00:00 node7 train[1234]: ", text).encode(),
        lambda text: each_line("2026-11-20T10:00:00+00:00 node7 python3[1234]: ", text).encode(),
        lambda text: each_line("2026-11-20T10:00:00.123456789Z stderr F ", text).encode(),
        lambda text: each_line("2026-11-20 10:00:00,123 - stderr - ", text).encode(),
        in_docker,
        lambda text: json.dumps({"level": "error", "exc_info": f"it failed\n{text}"}).encode(),
        lambda text: f"<pre>{html.escape(text)}</pre>".encode(),
        lambda text: gzip.compress(text.encode()),
        lambda text: gzip.compress(text.encode())[:-20],
        lambda text: gzip.compress(b"loss 0.1\n" * (1 << 18) + text.encode()),
    ],
    ids=["syslog", "journald", "k8s", "wandb", "docker", "json", "html", "gzip", "cut", "large"],
)
def test_a_log_as_machines_keep_it_is_read(kept: Callable[[str], bytes], tmp_path: Path) -> None:
    """Its frames too: the file and the line of the failing call stand in the evidence."""
    text = f"Traceback (most recent call last):\n{FRAME}{TRAINER}{FULL}\n"
    (tmp_path / "kept.log").write_bytes(kept(text))

    with (tmp_path / "kept.log").open("rb") as stream:
        answer = explain_log(stream, "a test")

    assert "train.py:7 in train: outputs = model(**batch)" in "\n".join(answer.causes[0].evidence)
    assert answer.causes == explained(text).causes


def test_ranks_that_write_at_once_are_told_apart() -> None:
    other = each_line("[rank0]: ", TRAINER).splitlines()
    mine = each_line("[rank1]: ", PLAIN).splitlines()
    mixed = [line for pair in zip(mine, [*other, "", ""], strict=True) for line in pair]

    assert explained("\n".join(mixed)).causes[0].code == "eval-logits"


TABLE = """
|   0  Tesla V100-SXM2...  On   | 00000000:00:08.0 Off |                    0 |
| N/A   54C    P0   246W / 300W |  15514MiB / 16130MiB |    100%      Default |
|   1  Tesla V100-SXM2...  On   | 00000000:00:09.0 Off |                    0 |
| N/A   38C    P0    39W / 300W |      2MiB / 16130MiB |      0%      Default |
+-----------------------------------------------------------------------------+
| Processes:                                                                  |
|    0   N/A  N/A     91234      C   python                          15500MiB |
"""


def test_a_table_of_nvidia_smi_names_the_neighbour_and_the_free_card() -> None:
    answer = explained("RuntimeError: CUDA error: out of memory\n" + TABLE)

    assert answer.causes[0].code == "foreign"
    assert "python (pid 91234) has 15.14 GiB" in " ".join(answer.causes[0].evidence)
    assert answer.remedies[1].do.startswith("CUDA_VISIBLE_DEVICES=1 ")
    assert answer.remedies[1].grade == "arithmetic"


def test_an_engine_in_the_same_process_is_seen_beside_torch() -> None:
    own = "Including non-PyTorch memory, this process has 78.60 GiB memory in use."
    message = said("2.00 GiB", "79.15 GiB", "0.50 GiB", "40.00 GiB", "1.00 GiB", own)

    assert "37.60 GiB outside torch" in str(explained(message).causes[0])
    assert explained("--vllm_mode colocate\n" + message).causes[0].code == "engine-share"


STEPS = b"{'loss': 1.25, 'learning_rate': 0.001}\n" * (1 << 15)  # 1.2 MiB


@pytest.mark.parametrize("where", ["first", "last"])
def test_of_a_large_log_the_head_and_the_end_are_read_and_it_is_said(where: str) -> None:
    error, steps = FULL.encode() + b"\n", STEPS * 18
    log = error + steps if where == "first" else steps + error
    answer = explain_log(io.BytesIO(log), "a log")

    assert answer.causes[0].code == {"first": "capacity", "last": "long-sample"}[where]
    assert "were not read" in answer.unknown[-1]


def test_of_a_large_log_without_an_oom_it_is_said_too() -> None:
    answer = explain_log(io.BytesIO(STEPS * 18 + b"slurmstepd: *** CANCELLED AT 12:00\n"), "a log")

    assert answer.causes[0].code == "not-an-oom"
    assert "were not read" in answer.unknown[-1]


def packed(*parts: tuple[bytes, int]) -> bytes:
    """Pack a log with gzip without holding it: each part as often as it says."""
    packer = zlib.compressobj(1, wbits=31)
    return b"".join(packer.compress(part) for part, times in parts for _ in range(times)) + (
        packer.flush()
    )


BOMBS = {
    "one line of hints": lambda: b"Killed Allocation xit " * (1 << 18),
    "brackets": lambda: b"[" * (1 << 22),
    "a deep notebook": lambda: b'{"cells": [{"cell_type": "code", "outputs": ' + b"[" * (1 << 22),
    "a broken notebook": lambda: b'{"cells": [{"cell_type": "code", ' + b'"outputs": [' * (1 << 17),
    "a line of 520 MiB": lambda: packed((b"a" * (1 << 20), 520)),
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.all(but=4)
def test_a_file_made_to_hold_explain_ends_without_a_cause(bomb: str) -> None:
    code, out, err = command("-", stdin=BOMBS[bomb]())

    assert code == 1, err
    assert ("more than 512.0 MiB" in " ".join(out.split())) is ("520" in bomb)


def command(*arguments: object, stdin: bytes = b"") -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["explain", *map(str, arguments)], input=stdin)
    return done.exit_code, done.stdout, done.stderr


def test_the_command_says_why_and_what_to_do(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("\x1b]0;mine\x07" + PIECES + "\n", encoding="utf-16")
    code, out, _ = command(log, "--verbose")

    assert code == 0
    assert out.startswith(
        "Cause  enough memory was free, but only in small pieces  [likely: fragmentation]\n"
    )
    assert "\nTry    export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n" in out
    assert "Joins up to 5.00 GiB of small pieces" in out
    assert "(by arithmetic)" in out
    assert "\x1b" not in out


def test_first_come_nine_lines(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(PIECES + "\n")
    cause, first, numbers, do, effect, cost, one, other, more = command(log)[1].splitlines()
    assert (
        cause == "Cause  enough memory was free, but only in small pieces  [likely: fragmentation]"
    )
    assert first.startswith("       ")
    assert numbers.startswith("       asked for ")
    assert do == "Try    export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert effect.startswith("       Joins up to 5.00 GiB of small pieces")
    assert cost.startswith("       Cost: usually none")
    assert one.startswith("Or     ")
    assert other.startswith("Or     ")
    assert re.fullmatch(r"More   \d+ lines: --verbose", more)
    num_more = int(more.split()[1])
    everything = command(log, "--verbose")[1].splitlines()
    assert num_more >= 2
    assert len(everything) > 5 + num_more / 2


def test_the_next_cause_has_one_of_the_alternatives() -> None:
    """The loss failed, and enough memory was free in pieces: whichever it was, its remedy is there."""
    _, out, _ = command(Path(__file__).parent / "corpus" / "hiyouga-llamafactory-6800.txt")
    assert out.startswith("Cause  the logits and their loss do not fit")
    assert (
        "\nOr     export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"
        "       If enough memory was free, but only in small pieces (fragmentation).\n"
    ) in out


def test_a_remedy_of_no_shown_cause_is_no_alternative() -> None:
    """A replay adds remedies against fragmentation, also where that is none of the causes."""
    answer = explained(FULL)
    odd = replace(answer.remedies[-1], cause="fragmentation", do="export X=1")
    assert answer.causes[0].code == "capacity"
    assert "export X=1" not in " ".join(
        map(str, replace(answer, remedies=(*answer.remedies, odd)).brief())
    )


@pytest.mark.parametrize("named", [["-"], []], ids=["named", "piped"])
def test_the_command_writes_json_from_standard_input(named: list[str]) -> None:
    code, out, _ = command("--json", *named, stdin=FULL.encode())
    read = json.loads(out)
    assert code == 0
    assert [cause["code"] for cause in read["causes"]] == ["capacity"]
    assert {"code", "grade", "evidence", "doubt"} <= set(read["causes"][0])
    assert read["subject"] == "standard input"


@pytest.mark.parametrize(
    ("stdin", "code", "words"),
    [
        (b"all is well\n", 1, "no out-of-memory error found"),
        (
            b'  File "/v/trainer.py", line 9, in f\n    x = g(x)\n',
            1,
            "traceback ends before the error",
        ),
        (b"ValueError: MXFP4 cannot be trained\n", 1, "its last error: ValueError: MXFP4 cannot"),
        (b"OSError: [Errno 28] No space left on device\n", 1, "a disk is full, not the card"),
        (b"train.py FAILED, Signal 11 (SIGSEGV)\n", 1, "a native library crashed"),
        (b"", 2, "it is empty"),
        (bytes(range(256)) * 4096, 2, "it is not text"),
        (b"\x80\x04\x95 a pickle \x00", 2, "it is not text"),
    ],
)
def test_what_is_no_oom_or_no_text_is_said(stdin: bytes, code: int, words: str) -> None:
    found, out, err = command("-", stdin=stdin)

    assert found == code
    assert words in " ".join((out + err).replace("│", " ").split())
    assert "Traceback" not in err


def test_a_person_at_a_terminal_is_not_waited_for() -> None:
    ours, theirs = os.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "trainer_plugins", "explain"],
        check=False, stdin=theirs, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 2
    assert "or pipe in a log" in " ".join(done.stderr.replace("│", " ").split())


def test_bad_paths_get_one_line(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "not there.log"):
        code, out, err = command(path)
        assert (code, out) == (2, "")
        assert "Traceback" not in err
