"""Remedies that leave the training as it is: who holds the card, what is loaded onto it."""

import re

from trainer_plugins.explain import switches
from trainer_plugins.explain.answer import Remedy
from trainer_plugins.explain.text.causes.place import SHARDING
from trainer_plugins.explain.text.remedies.batch import capacity, fewer_rows, plan, uses_trainer
from trainer_plugins.explain.text.text_facts import TextFacts
from trainer_plugins.explain.text.vendor import vendor_of
from trainer_plugins.units import size

_CONVERT_IN_MAIN_MEMORY = Remedy(
    do='from_pretrained(..., device_map="cpu").to("cuda")',
    effect="what transformers 5 stacks and joins of a checkpoint is made beside no weights",
    grade="known",
    price="main memory for the whole model; a slower load",
)
_EXPANDABLE = r"ALLOC_CONF[\"'\]\s=:,]{1,6}expandable_segments:True(?! to avoid)"
_SEE = "nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv"


def foreign(facts: TextFacts) -> list[Remedy]:
    """See who it is, then take another card or wait: no setting of the run helps."""
    who = ", ".join(str(pid) for pid, _ in facts.neighbours) or "the text names nobody"
    found = [Remedy(do=_SEE, effect=f"shows who holds the card ({who})", grade="known")]
    if len(facts.cards) != 1:
        rooms = [total - used for used, total in facts.cards]
        best = rooms.index(max(rooms)) if rooms else 0 if facts.oom.device else 1
        there = f"{size(rooms[best])} were free there" if rooms else "if there is one"
        gone = f"; {size(facts.others)} are in the way on this one" if facts.others else ""
        found.append(
            Remedy(
                do=f"CUDA_VISIBLE_DEVICES={best} {facts.launched}",
                effect=f"takes another card, {there}{gone}",
                grade="arithmetic" if rooms or gone else "known",
            )
        )
    return [
        *found,
        Remedy(
            do="kill PID",
            effect="frees the card, if the process is a dead run of your own",
            grade="known",
            price="whatever that process was doing",
        ),
    ]


def ddp_gpu0(facts: TextFacts) -> list[Remedy]:
    """Keep ranks off card 0."""
    first = min((one.card for one in facts.processes), default=0)
    stray = sum(one.num_bytes for one in facts.processes if one.card == first)
    told = f"; nvidia-smi shows {size(stray)} on card {first}" if stray else ""
    return [
        Remedy(
            do='torch.load(path, map_location="cpu")',
            effect=f"a checkpoint saved on card 0 is not loaded there by every rank{told}",
            grade="arithmetic" if stray else "known",
        ),
        Remedy(
            do='torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # before any other CUDA call',
            effect="each rank opens a context on its own card only",
            grade="known",
        ),
    ]


def fragmentation(facts: TextFacts) -> list[Remedy]:
    """Expandable segments where they exist and are not in force, else fewer lengths."""
    pieces = size(facts.unused or 0)
    pad = Remedy(
        do="DataCollatorForSeq2Seq(..., pad_to_multiple_of=64)",
        effect="few different lengths leave few odd pieces",
        grade="known",
        price="some padding",
    )
    padded = [pad] if uses_trainer(facts) else []
    if facts.is_windows or facts.is_wsl or facts.says(_EXPANDABLE):
        return [*padded, *fewer_rows(facts)]
    return [
        Remedy(
            do="export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            effect=f"up to {pieces} in pieces become usable, {size(facts.asked or 0)} are needed",
            grade="arithmetic",
            price="none as a rule; it does not go with vLLM's sleep mode",
        ),
        *padded,
    ]


def contradictory(facts: TextFacts) -> list[Remedy]:
    """Name the check; a smaller batch would not help."""
    if vendor_of(facts).name == "HIP":
        checks = [
            ("rocm-smi --showmeminfo vram gtt", "shows which memory the driver counts"),
            ("dmesg | grep -i amdgpu", "shows why the driver refused"),
        ]
    else:
        checks = [
            (
                "nvidia-smi --query-gpu=memory.used,memory.free --format=csv -l 1",
                "shows whether a neighbour comes and goes while the run starts",
            ),
            (
                "cat /proc/sys/vm/max_map_count; ulimit -v -l",
                "shows limits of mappings and of"
                " locked memory that the driver reports as 'out of memory'",
            ),
        ]
        if facts.is_windows or facts.is_wsl:
            checks.append(
                (
                    "wsl --shutdown, then memory=... in .wslconfig",
                    "gives WSL more of main memory, half of which is the most it can pin",
                )
            )
    return [Remedy(do=do, effect=effect, grade="known") for do, effect in checks]


def wrong_shape(facts: TextFacts) -> list[Remedy]:
    """Look at the shapes."""
    where = facts.users_frame
    place = f"{where.path.rsplit('/', 1)[-1]}:{where.line}" if where else "the failing line"
    return [
        Remedy(
            do=f"print the shapes and dtypes of the inputs before {place}",
            effect="shows which axis is not what it should be",
            grade="known",
        )
    ]


def leftover(facts: TextFacts) -> list[Remedy]:
    """Start anew, or free what is left."""
    first = Remedy(
        do="restart the kernel, and run the cells once",
        effect=f"frees {size(facts.live)}, if it is left from before"
        if facts.live
        else "frees what is left from before",
        grade="arithmetic" if facts.live else "known",
    )
    if facts.says(r"[Tt]rial ?#?\d"):
        first = Remedy(
            do="callbacks=[trainer_plugins.ReleaseEarlierRuns()]",
            effect="what a trial has left is given back before the next one",
            grade="known",
        )
    return [first, *([] if facts.says(r"[Tt]rial ?#?\d") else capacity(facts)[:1])]


def kept_after_catch(facts: TextFacts) -> list[Remedy]:
    """Let go of what the exception keeps."""
    del facts
    return [
        Remedy(
            do="empty the cache after the `except` block, not in it",
            effect="the exception's frames hold the tensors as long as the block runs",
            grade="known",
        ),
    ]


def data_parallel(facts: TextFacts) -> list[Remedy]:
    """Start one process a card, so that nothing is gathered on the first."""
    num_cards = len({one.card for one in facts.processes}) or len(facts.cards) or "NUM_CARDS"
    script = re.search(r"\S+\.py\b.*", facts.launched)
    return [
        Remedy(
            do=f"torchrun --nproc_per_node {num_cards} {script[0] if script else 'train.py'}",
            effect="one process a card (DDP): outputs and losses stay where they are made",
            grade="known",
        ),
        Remedy(
            do=f"CUDA_VISIBLE_DEVICES=0 {facts.launched}",
            effect="one card, with per_device_train_batch_size rows and not that many times cards",
            grade="known",
        ),
    ]


def adapter_delta(facts: TextFacts) -> list[Remedy]:
    """Make no delta of the size of the weights; rows have no part in it."""
    if facts.called(r"\bmerge"):
        return [
            Remedy(
                do='model.to("cpu").merge_and_unload()',
                effect="the deltas are made in main memory, one layer at a time",
                grade="known",
                price="some minutes",
            )
        ]
    if facts.called(r"\bdora\.py|get_weight_norm"):
        return [
            Remedy(
                do="LoraConfig(..., use_dora=False)",
                effect="only DoRA needs the whole delta in each forward pass",
                grade="known",
                price="another adapter",
            )
        ]
    no_experts = Remedy(
        do="LoraConfig(..., target_modules=[...], target_parameters=None)",
        effect="attention and dense layers are adapted, and no expert: linear layers need no delta",
        grade="known",
        price="another adapter",
    )
    if facts.called(r"baddbmm\(W"):
        return [no_experts]
    newer = Remedy(
        do="pip install -U peft",
        effect="since peft#3577 (2026-08) one adapter's delta of experts is never made",
        grade="known",
    )
    return [newer, no_experts]


def load_too_large(facts: TextFacts) -> list[Remedy]:
    """Load fewer bytes a parameter, or never all of them onto one card."""
    if facts.called("prepare_model_for_kbit_training"):
        unprepared = Remedy(
            do="leave out prepare_model_for_kbit_training(model)",
            effect="what bitsandbytes does not quantise stays in 16 bits: it makes embeddings, head"
            " and experts that are one tensor float32",
            grade="known",
            price="norms compute in 16 bits; pass --gradient_checkpointing True, which it had done",
        )
        return [unprepared, plan(facts)]
    if facts.called(SHARDING):
        return [switches.LOAD_ON_ONE_RANK, *_fewer_bytes(facts)]
    if facts.called(r"core_model_loading"):
        return [*_fewer_bytes(facts), _CONVERT_IN_MAIN_MEMORY]
    return _fewer_bytes(facts)


def _fewer_bytes(facts: TextFacts) -> list[Remedy]:
    return [
        Remedy(
            do="from_pretrained(..., dtype=torch.bfloat16)",
            effect="2 bytes a parameter; float32, transformers 4's default, takes 4",
            grade="known",
        ),
        Remedy(
            do="from_pretrained(..., quantization_config=BitsAndBytesConfig(load_in_4bit=True))",
            effect="about 0.6 bytes a parameter; experts that are one tensor stay as they are",
            grade="known",
            price="other rounding; trains as an adapter only",
        ),
        plan(facts),
    ]


def resume_load(facts: TextFacts) -> list[Remedy]:
    """Load into main memory, and drop the copy."""
    del facts
    return [
        Remedy(
            do='torch.load(path, map_location="cpu")',
            effect="the checkpoint waits in main memory, and is freed after load_state_dict",
            grade="known",
        ),
        Remedy(
            do="del checkpoint; gc.collect(); torch.cuda.empty_cache()  # after load_state_dict",
            effect="the copy that was loaded does not stay beside the run",
            grade="known",
        ),
    ]


def save_gather(facts: TextFacts) -> list[Remedy]:
    """Save in parts."""
    if facts.called(r"deepspeed|zero3"):
        return [switches.SAVE_WITHOUT_GATHER]
    if facts.called(r"fsdp") or facts.says(r"(?i)fsdp"):
        return [switches.SHARDED_SAVE]
    return [
        Remedy(
            do="gc.collect(); torch.cuda.empty_cache()  # before saving",
            effect="saving needs a copy; what training has cached makes room for it",
            grade="known",
        )
    ]


def zero3_gather(facts: TextFacts) -> list[Remedy]:
    """Gather less at once."""
    if not facts.called(r"deepspeed"):
        return [
            Remedy(
                do="fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer  # your model's layer",
                effect="one layer is gathered at a time, not the model",
                grade="known",
            ),
            *fewer_rows(facts),
        ]
    return [switches.FEWER_LIVE_PARAMETERS, *fewer_rows(facts)]


def mps_other(facts: TextFacts) -> list[Remedy]:
    """Give back what is not live."""
    del facts
    return [
        Remedy(
            do="--torch_empty_cache_steps 1",
            effect="gives torch's cache back after each step",
            grade="known",
            price="about a tenth slower",
        ),
        Remedy(
            do="close other programs that draw or compute",
            effect="main memory and the card's are one on a Mac",
            grade="known",
        ),
    ]


def nccl(facts: TextFacts) -> list[Remedy]:
    """Leave room outside torch."""
    del facts
    return [
        Remedy(
            do="torch.cuda.set_per_process_memory_fraction(0.95)",
            effect="torch fails earlier by itself, and leaves NCCL 1 to 2 GiB of a large card",
            grade="known",
        ),
        Remedy(
            do="export NCCL_BUFFSIZE=1048576",
            effect="a quarter of the usual buffers (4 MiB each)",
            grade="known",
            price="slower collectives",
        ),
    ]
