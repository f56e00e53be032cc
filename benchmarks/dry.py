"""Plan users' commands on dry cards, and check each answer on a card of its size.

    python -m benchmarks.dry [NAME...]

plans all, or those whose name starts with one of the words, each by `plan --json --gpu 80GiB --
COMMAND`. Then it runs the command on the smallest card of the plan, where it must complete, and on
one with a MiB less, where the request named in the plan must fail. It prints the table of
benchmarks/results/dry.txt. Programs are those of the PATH, and all files are made here. A program
that is not installed as a package has a row only if a variable names its checkout.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

from benchmarks.prediction import equip_dry_cards
from trainer_plugins.drycuda.dry_run import DryRun, run_dry
from trainer_plugins.planner.cards import card_of
from trainer_plugins.planner.plan import MemoryPlan, PlanError
from trainer_plugins.units import GIB, MIB

ROOT = Path(__file__).parent.parent
CARD = "80GiB"
TIMEOUT_SECONDS = 1500

_LLAMA = "num_key_value_heads=8 vocab_size=128256 max_position_embeddings=131072"
MODELS = {
    "1b": f"LlamaForCausalLM {_LLAMA} hidden_size=2048 intermediate_size=8192 num_hidden_layers=16"
    " num_attention_heads=32 head_dim=64 tie_word_embeddings=true",
    "8b": f"LlamaForCausalLM {_LLAMA} hidden_size=4096 intermediate_size=14336"
    " num_hidden_layers=32 num_attention_heads=32",
    "70b": f"LlamaForCausalLM {_LLAMA} hidden_size=8192 intermediate_size=28672"
    " num_hidden_layers=80 num_attention_heads=64",
    "mixtral": "MixtralForCausalLM num_hidden_layers=4",
    "qwen3-moe": "Qwen3MoeForCausalLM num_hidden_layers=8 head_dim=128",
    "bart": "BartForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration d_model=768 encoder_layers=12 decoder_layers=12"
    " encoder_ffn_dim=3072 decoder_ffn_dim=3072 encoder_attention_heads=12"
    " decoder_attention_heads=12",
    "qwen-vl": "Qwen2_5_VLForConditionalGeneration"
    ' vision_config={"hidden_size":1280,"out_hidden_size":2048}'
    ' text_config={"hidden_size":2048,"intermediate_size":11008,"num_hidden_layers":36,'
    '"vocab_size":151936,"num_attention_heads":16,"num_key_value_heads":2,'
    '"tie_word_embeddings":true,"rope_parameters":{"rope_type":"default","rope_theta":1e6,'
    '"mrope_section":[16,24,24]}} tie_word_embeddings=true',
}
"""The class and the sizes of published models of these names; all else is transformers' default:
Mixtral 8x7B, Qwen3 30B-A3B, BART large."""

TRAIN = """
import json, sys, torch, transformers
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

name, options, *words = sys.argv[1:]
args, = transformers.HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses(words)
options = json.loads(options)
if options.pop("tensor_parallel", None):
    from transformers.distributed import DistributedConfig
    options["distributed_config"] = DistributedConfig(tp_size=2, tp_plan="auto")
lora = options.pop("lora", None)
config = transformers.AutoConfig.from_pretrained(name)
model = getattr(transformers, config.architectures[0]).from_pretrained(name, **options)
if lora:
    from peft import LoraConfig, get_peft_model
    model = get_peft_model(model, LoraConfig(**lora))
ids = torch.full((2048,), 5)
row = {"input_ids": ids, "labels": ids}
if name == "bart":
    row = {"input_ids": ids[:1024], "labels": ids[:256]}
elif name == "whisper":
    row = {"input_features": torch.zeros(80, 3000), "labels": ids[:400]}
elif name == "qwen-vl":  # two pictures of 448 x 448: pieces of 14 x 14, four a token
    ids[8:264] = ids[272:528] = config.image_token_id
    kinds = (ids == config.image_token_id).int()
    row |= {"pixel_values": torch.zeros(2048, 1176), "mm_token_type_ids": kinds}
    row["image_grid_thw"] = torch.tensor([[1, 32, 32]] * 2)

def collate(rows):
    put = lambda name: torch.cat if name in ("pixel_values", "image_grid_thw") else torch.stack
    return {name: put(name)([each[name] for each in rows]) for name in row}

trainer, rows = Seq2SeqTrainer if args.predict_with_generate else Trainer, [row] * 64
trainer(model, args, collate, train_dataset=rows, eval_dataset=rows).train()
"""
CONTEXT = """
distributed_type: FSDP
num_processes: 2
mixed_precision: bf16
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP,
 fsdp_state_dict_type: FULL_STATE_DICT}
parallelism_config: {parallelism_config_cp_size: 2}
"""
FACTORY = """
{model_name_or_path: 8b, stage: sft, do_train: true, finetuning_type: lora, lora_target: all,
 dataset: rows, dataset_dir: ., template: default, cutoff_len: 2048, output_dir: out, bf16: true,
 per_device_train_batch_size: 2, num_train_epochs: 1, report_to: none}
"""
AXOLOTL = """
{base_model: 8b, adapter: lora, lora_r: 16, lora_alpha: 32, lora_target_linear: true, bf16: true,
 datasets: [{path: rows.jsonl, ds_type: json, type: completion}], sequence_len: 2048,
 output_dir: out, micro_batch_size: 2, gradient_accumulation_steps: 1, num_epochs: 1,
 optimizer: adamw_torch, learning_rate: 1e-4, gradient_checkpointing: true}
"""
CHAT = "{% for each in messages %}{{ each.content }} {% endfor %}"

_OUT = "--output_dir out --bf16 True --report_to none --per_device_train_batch_size"
_OWN, _BF16 = "-- python train.py", """'{"dtype": "bfloat16"}'"""
_REENTRANT = """--gradient_checkpointing_kwargs '{"use_reentrant": true}'"""
_OVER_CARDS = """'{"dtype": "bfloat16", "device_map": "auto",
 "lora": {"target_modules": "all-linear"}}' --gradient_checkpointing True"""
_SFT = f"trl sft --dataset_name sft --max_length 2048 {_OUT} 2 --model_name_or_path"
_1B, _8B = f"-- {_SFT} 1b", f"-- {_SFT} 8b"
_LORA = "--use_peft --lora_target_modules all-linear --dtype bfloat16"
_QLORA = f"{_LORA} --load_in_4bit"
_WHOLE = "--gradient_checkpointing False"
_ON_2, _ON_8 = f"--num-gpus 2 -- {_SFT}", f"--num-gpus 8 --alone -- {_SFT}"
_FSDP1, _FSDP2 = "--accelerate_config fsdp1", "--accelerate_config fsdp2"
_ZERO2, _ZERO3 = "--accelerate_config zero2", "--accelerate_config zero3"
_OFFLOADED = f"--accelerate_config {ROOT}/configs/accelerate/zero3_offload_all.yaml"
_GENERATES = "--predict_with_generate --eval_strategy epoch --per_device_eval_batch_size 8"
_EXPERTS = "--dtype bfloat16 --optim adafactor"
_UNLEARN = (
    "-- python {OPEN_UNLEARNING}/src/train.py --config-name=unlearn.yaml task_name=dry"
    " experiment=unlearn/tofu/default trainer=NPO paths.root_dir=."
    " model.model_args.pretrained_model_name_or_path=1b trainer.args.eval_strategy=no"
    " model.model_args.attn_implementation=sdpa trainer.args.eval_on_start=false"
    " model.tokenizer_args.pretrained_model_name_or_path=1b"
    " data.forget.TOFU_QA_forget.args.hf_args={path:qa,split:train,name:null}"
    " data.retain.TOFU_QA_retain.args.hf_args={path:qa,split:train,name:null}"
)
_VARIABLE = re.compile(r"\{([A-Z_]+)\}")
ROWS = {
    "Trainer 1.2B, full": f"{_OWN} 1b {{}} {_OUT} 2",
    "Seq2Seq BART, generates": f"{_OWN} bart {{}} {_OUT} 8 {_GENERATES}",
    "Whisper small, generates": f"{_OWN} whisper {{}} {_OUT} 8 {_GENERATES}",
    "Qwen2.5-VL 3B, pictures": f"{_OWN} qwen-vl {_BF16} {_OUT} 2",
    "sft 1.2B, full": _1B,
    "sft, no checkpointing": f"{_1B} {_WHOLE}",
    "sft, reentrant": f"{_1B} {_REENTRANT}",
    "sft, packed": f"{_1B} --packing",
    "sft, Liger": f"{_1B} --use_liger_kernel",
    "sft, activations offloaded": f"{_1B} --activation_offloading",
    "sft, LoRA": f"{_1B} {_LORA}",
    "sft, DoRA": f"{_1B} {_LORA} --use_dora",
    "sft, torch_compile": f"{_1B} --torch_compile {_WHOLE}",
    "DDP, 2": f"{_ON_2} 1b --num_processes 2 --multi_gpu",
    "FSDP1, 0 of 8": f"{_ON_8} 1b {_FSDP1}",
    "FSDP1, 2": f"{_ON_2} 1b {_FSDP1} --num_processes 2",
    "FSDP2, 0 of 8": f"{_ON_8} 1b {_FSDP2}",
    "FSDP2, 2": f"{_ON_2} 1b {_FSDP2} --num_processes 2",
    "ZeRO-2, 0 of 8": f"{_ON_8} 1b {_ZERO2}",
    "ZeRO-3, 0 of 8": f"{_ON_8} 1b {_ZERO3}",
    "ZeRO-3 all offloaded, 0 of 8": f"{_ON_8} 1b {_OFFLOADED} --num_processes 8",
    "tensor parallel, 2": "--num-gpus 2 -- torchrun --nproc_per_node 2 train.py 1b"
    f""" '{{"tensor_parallel": true}}' {_OUT} 2 --save_only_model True""",
    "context parallel, 2": f"{_ON_2} 1b --accelerate_config context.yaml {_WHOLE}"
    " --attn_implementation sdpa --pad_to_multiple_of 4",
    "dpo 1.2B": f"-- trl dpo --dataset_name dpo {_OUT} 2 --model_name_or_path 1b",
    "grpo 1.2B, no vLLM": f"-- trl grpo --dataset_name grpo {_OUT} 8 --model_name_or_path 1b"
    " --reward_funcs think_format_reward --num_generations 8 --max_completion_length 64",
    "8B LoRA": f"{_8B} {_LORA}",
    "8B QLoRA, paged 8-bit": f"{_8B} {_QLORA} --optim paged_adamw_8bit",
    "8B QLoRA FSDP2, 0 of 8": f"{_ON_8} 8b {_QLORA} --bnb_4bit_quant_storage bfloat16 {_FSDP2}",
    "8B QLoRA ZeRO-3, 0 of 8": f"{_ON_8} 8b {_QLORA} {_ZERO3}",
    "70B QLoRA FSDP2, 0 of 8": f"{_ON_8} 70b {_QLORA} --bnb_4bit_quant_storage bfloat16 {_FSDP2}",
    "8B LoRA, device_map of 4": f"--num-gpus 4 {_OWN} 8b {_OVER_CARDS} {_OUT} 2",
    "70B LoRA, device_map of 4": f"--num-gpus 4 {_OWN} 70b {_OVER_CARDS} {_OUT} 2",
    "Mixtral, 4 layers": f"-- {_SFT} mixtral {_EXPERTS}",
    "Qwen3-MoE, 8 layers": f"-- {_SFT} qwen3-moe {_EXPERTS}",
    "LLaMA-Factory 8B LoRA": "-- python {LLAMA_FACTORY}/src/train.py factory.yaml",
    "run_clm.py 1.2B": "-- python {RUN_CLM} --model_name_or_path 1b --dtype bfloat16"
    " --train_file rows.txt --validation_file rows.txt --do_train --block_size 2048"
    f" {_OUT} 2",
    "open-unlearning 1.2B": _UNLEARN,
    "axolotl 8B LoRA": "-- axolotl train axolotl.yaml",
}
"""Options of `plan`, and the command of a user; `{NAME}` is a variable that must be set."""


def make_files(folder: Path) -> None:
    """Write models with only config and tokenizer, and data sets."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "</s>", "<unk>", *(f"word{number}" for number in range(97))]
    inner = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = CHAT
    for name, described in MODELS.items():
        architecture, *sizes = described.split()
        fields = {key: json.loads(value) for key, value in (each.split("=") for each in sizes)}
        config = getattr(transformers, architecture).config_class(**fields)
        config.architectures = [architecture]
        config.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    text, short = "word5 " * 2100, "word5 " * 60
    ask = [{"role": "user", "content": short}]
    say = [{"role": "assistant", "content": "word6 " * 400}]
    for name, row in {
        "sft": {"text": text},
        "dpo": {"prompt": ask, "chosen": say, "rejected": say},
        "grpo": {"prompt": ask},
        "qa": {"question": short, "answer": text},
    }.items():
        (folder / name).mkdir()
        (folder / name / "train.jsonl").write_text((json.dumps(row) + "\n") * 64)
    (folder / "rows.jsonl").write_text((json.dumps({"text": text}) + "\n") * 64)
    (folder / "rows.txt").write_text(f"{text}\n" * 64)
    rows = [{"instruction": short, "input": "", "output": text}] * 64
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text('{"rows": {"file_name": "rows.json"}}')
    for name, written in {
        "train.py": TRAIN,
        "context.yaml": CONTEXT,
        "factory.yaml": FACTORY,
        "axolotl.yaml": AXOLOTL,
    }.items():
        (folder / name).write_text(written)


def planned(options: list[str], command: list[str]) -> tuple[MemoryPlan, float]:
    """Type `plan`; return the answer, and the CPU seconds of all its processes."""
    words = ["--json", "--gpu", CARD, "--timeout", str(TIMEOUT_SECONDS), *options]
    before = getrusage(RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "trainer_plugins", "plan", *words, "--", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    after = getrusage(RUSAGE_CHILDREN)
    if done.returncode not in (0, 3):
        raise PlanError(done.stderr.strip()[-2000:])
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return MemoryPlan.from_json(done.stdout), seconds


def difference(options: list[str], command: list[str], plan: MemoryPlan) -> str:
    """Run a command on the smallest card of its plan and with a MiB less; report differences."""
    if plan.smallest_card_bytes is None:
        return "no smallest card is named"
    run = DryRun(
        command=command,
        card=replace(card_of(CARD), capacity_bytes=plan.smallest_card_bytes),
        num_cards=int(options[1]) if options else 1,
        alone="--alone" in options,
        timeout_seconds=TIMEOUT_SECONDS,
    )
    found = run_dry(run, print)
    if found.died:
        return f"dies on it: {found.failed_request[1]}"
    less = replace(run.card, capacity_bytes=run.card.capacity_bytes - MIB)
    found = run_dry(replace(run, card=less), print)
    if not found.died:
        return "completes on 1 MiB less"
    _, place = found.failed_request
    return "" if place == plan.fails_on_less else f"dies at {place}, not {plan.fails_on_less}"


def told(name: str) -> str:
    """Return the line of a row, or the reason why it cannot run."""
    options, _, typed = ROWS[name].partition("-- ")
    try:
        command = shlex.split(_VARIABLE.sub(lambda found: os.environ[found[1]], typed))
        plan, seconds = planned(options.split(), command)
        differs = difference(options.split(), command, plan)
    except KeyError as error:
        return f"{name:28} not run: {error} names no checkout"
    except PlanError as error:
        return f"{name:28} no answer: {error}"
    for note in plan.not_reliable:
        print(f"{name}: {note}", file=sys.stderr)
    least = (plan.smallest_card_bytes or 0) / GIB
    figures = f"{plan.reserved_peak_bytes / GIB:6.2f} {least:6.2f} {seconds:4.0f}"
    return f"{name:28} {figures}  {differs or 'held'}"


def main(names: list[str]) -> None:
    """Print the lines of all rows, or of those whose name starts with one of the words."""
    equip_dry_cards()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        make_files(folder)
        os.environ |= {"HF_HOME": str(folder / "cache"), "TMPDIR": str(folder)}
        os.chdir(folder)
        print(f"{'reserved':>36} {'card':>6} {'CPU s':>5}")
        for row in ROWS:
            if not names or row.startswith(tuple(names)):
                print(told(row), flush=True)
        os.chdir(ROOT)


if __name__ == "__main__":
    main(sys.argv[1:])
