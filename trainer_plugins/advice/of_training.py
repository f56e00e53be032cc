"""Define remedies for a training step: its batch, activations, optimizer, weights and shards."""

from trainer_plugins.advice.entry import Advice
from trainer_plugins.checkpointing import spell

SMALLER_MICRO_BATCH = Advice(
    effect="activations shrink with the rows; the effective batch stays the same",
    price="smaller steps keep the card less busy",
    trainer="--per_device_train_batch_size ROWS --gradient_accumulation_steps STEPS",
    unfilled="halve --per_device_train_batch_size and double --gradient_accumulation_steps",
    code="halve the rows of a micro-batch and double the accumulation steps",
)
SURVIVE = Advice(
    effect="a micro-batch that does not fit is finished in pieces, with the same gradient",
    price="time for the micro-batches that are divided; nothing for the others",
    shell="trainer-plugins exec --preset survive -- COMMAND",
    code="trainer_plugins.survive_oom(trainer)",
    hydra="+trainer_plugins=survive",
)
CHECKPOINTING = Advice(
    effect="only the inputs of layers are kept for the backward pass",
    # A backward pass costs two forward passes: 4 instead of 3 (arXiv:1604.06174, section 4.1).
    price="each forward pass is computed twice, about a third more time",
    trainer=spell("--gradient_checkpointing True"),
    code=spell("model.gradient_checkpointing_enable()"),
)
OFFLOADED_ACTIVATIONS = Advice(
    effect="the inputs of layers wait in pinned main memory for the backward pass",
    price="each forward pass is computed twice, and these inputs go over the bus and back",
    trainer=spell(
        "--gradient_checkpointing True --gradient_checkpointing_kwargs '{\"offload\": true}'"
    ),
    arguments=spell('gradient_checkpointing=True, gradient_checkpointing_kwargs={"offload": True}'),
)
NON_REENTRANT = Advice(
    effect="checkpointing works with frozen inputs and with DDP",
    trainer=spell("--gradient_checkpointing_kwargs '{\"use_reentrant\": false}'"),
    arguments=spell('gradient_checkpointing_kwargs={"use_reentrant": False}'),
)
INPUTS_REQUIRE_GRADS = Advice(
    effect="reentrant checkpointing reaches the adapters behind frozen embeddings",
    code="model.enable_input_require_grads()",
)
REDUCED_EACH_TIME = Advice(
    effect="each card keeps its part of the gradients alone, also between the micro-batches of a"
    " step",
    price="gradients are reduced for each micro-batch",
    trainer='--accelerator_config \'{"gradient_accumulation_kwargs": {"sync_each_batch": true}}\'',
    arguments='accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}}',
)
SHORTER_ROWS = Advice(
    effect="rows are cut there (SFTConfig, or your tokenizer's max_length)",
    price="the end of long rows is lost",
    keeps_result=False,
    trl="--max_length LENGTH",
    arguments="max_length=LENGTH",
    code="halve the longest length (max_length)",
    plan="--seq-length LENGTH",
)
PAD_TO_FEW_LENGTHS = Advice(
    effect="few different lengths leave few odd pieces",
    price="some padding",
    arguments="pad_to_multiple_of=64",
    code="DataCollatorForSeq2Seq(..., pad_to_multiple_of=64)",
)
GROUP_BY_LENGTH = Advice(
    effect="the longest rows come first, so an OOM happens in the first steps or not at all"
    " (transformers 4: --group_by_length True)",
    price="another order of the rows",
    keeps_result=False,
    trainer="--train_sampling_strategy group_by_length",
)
LIGER = Advice(
    effect="the logits are never in memory all at once",
    price="needs liger-kernel and a model that it supports; rounding differs a little",
    trainer="--use_liger_kernel True",
)
# sdpa comes with torch, takes every dtype and is transformers' default. FlashAttention-2 needs a
# package and 16 bits; it is the remedy only if sdpa is already on and still built the table.
SDPA_ATTENTION = Advice(
    effect="the table of length x length scores is never made",
    price="rounding differs a little",
    arguments='model_init_kwargs={"attn_implementation": "sdpa"}',
    code='from_pretrained(..., attn_implementation="sdpa")',
)
FLASH_ATTENTION = Advice(
    effect=SDPA_ATTENTION.effect,
    price="needs flash-attn, and 16 bits; rounding differs a little",
    arguments='model_init_kwargs={"attn_implementation": "flash_attention_2"}',
    code='from_pretrained(..., attn_implementation="flash_attention_2")',
)
FEWER_PATCHES = Advice(
    effect="at most 512 patches a picture in Qwen-VL; attention falls with their square",
    price="less detail",
    keeps_result=False,
    code="AutoProcessor.from_pretrained(..., max_pixels=512 * 28 * 28)",
)
FUSED_ADAMW = Advice(
    effect="the step makes no temporaries of the size of the weights",
    trainer="--optim adamw_torch_fused",
    code="torch.optim.AdamW(..., fused=True)",
)
# Not paged_adamw_8bit: on a full card its states move to main memory, as managed memory that
# neither plan nor reading counts, and then each step waits for them.
EIGHT_BIT_ADAMW = Advice(
    effect="optimizer states take 2 instead of 8 bytes a parameter",
    price="needs bitsandbytes; states are rounded to 8 bits",
    keeps_result=False,
    trainer="--optim adamw_bnb_8bit",
    code="bitsandbytes.optim.AdamW8bit(...)",
)
ADAFACTOR = Advice(
    effect="optimizer states are a row and a column of each weight",
    price="another optimizer: the learning rate may have to change",
    keeps_result=False,
    trainer="--optim adafactor",
    code="torch.optim.Adafactor(...)",
)
HALF_PRECISION_WEIGHTS = Advice(
    effect="weights take 2 bytes a parameter; float32, transformers 4's default, takes 4",
    price="they are rounded: train an adapter, or keep a copy in float32 elsewhere",
    keeps_result=False,
    code="from_pretrained(..., dtype=torch.bfloat16)",
    plan="--dtype bfloat16",
)
FOUR_BITS = Advice(
    effect="weights take about 0.6 bytes a parameter, except experts stored as one tensor",
    price="an adapter is trained on rounded weights; needs bitsandbytes and peft",
    keeps_result=False,
    trl="--load_in_4bit True --use_peft True",
    code="from_pretrained(..., quantization_config=BitsAndBytesConfig(load_in_4bit=True))",
    plan="--load-in-4bit --bnb-4bit-quant-type nf4 --bnb-4bit-compute-dtype bfloat16",
)
UNPREPARED = Advice(
    effect="what bitsandbytes does not quantise stays in 16 bits: prepare_model_for_kbit_training"
    " makes embeddings, head and experts stored as one tensor float32",
    price=spell(
        "norms compute in 16 bits; pass --gradient_checkpointing True, which it had switched on"
    ),
    keeps_result=False,
    code="leave out prepare_model_for_kbit_training(model)",
    plan="--no-prepare-kbit",
)
ADAPTER = Advice(
    effect="only an adapter has gradients and optimizer states",
    price="an adapter is trained instead of the weights",
    keeps_result=False,
    trl="--use_peft True --lora_r 16 --lora_target_modules all-linear",
    code='model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear"))',
    plan="--lora-r 16 --lora-target all-linear",
)
PRECOMPUTED_REFERENCE = Advice(
    effect="the reference model is asked before the training, and leaves the card",
    price="one pass over all rows before the first step",
    trl="--precompute_ref_log_probs True",
    arguments="precompute_ref_log_probs=True",
)
SECOND_MODEL_IN_16_BITS = Advice(
    effect="a second model that is not trained takes half of what it takes in float32",
    price="its outputs are rounded",
    keeps_result=False,
    code="PLACE.to(torch.bfloat16)",
)
STREAM_BASE = Advice(
    effect="the frozen base waits in main memory, except a few layers",
    price="copies to the card in each step",
    trainer="--memory_stream_base always",
    code="callbacks=[trainer_plugins.StreamBase()]",
    plan="--stream-base LAYERS",
)
MERGE_IN_MAIN_MEMORY = Advice(
    effect="a new process merges in main memory, with nothing of the training beside it",
    price="some minutes, and main memory for the model in 16 bits",
    code='PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE, device_map="cpu"),'
    ' "adapter").merge_and_unload()',
)
NO_DORA = Advice(
    effect="only DoRA needs the full delta in each forward pass",
    price="another adapter",
    keeps_result=False,
    code="LoraConfig(..., use_dora=False)",
)
NEWER_PEFT = Advice(
    effect="since peft#3577 (2026-08) one adapter's delta of experts is never made",
    shell="pip install -U peft",
)
NO_EXPERTS = Advice(
    effect="attention and dense layers are adapted, and no expert: linear layers need no delta",
    price="another adapter",
    keeps_result=False,
    code="LoraConfig(..., target_modules=[...], target_parameters=None)",
)
SHARD_THE_RUN = Advice(
    effect="weights, gradients and optimizer states are divided among the cards; DDP keeps all on"
    " each",
    price="more traffic between the cards",
    shell="trainer-plugins configs show fsdp2 > accelerate.yaml",
)
MORE_CARDS = Advice(
    effect="ZeRO divides the optimizer states among more cards",
    price="more cards",
    shell="launch on more cards than now",
)
OFFLOAD_OPTIMIZER = Advice(
    effect="optimizer states of 12 bytes a parameter go to main memory",
    price="a slower step; the host needs that memory",
    shell="trainer-plugins configs show zero3_offload_optimizer > accelerate.yaml",
)
OFFLOAD_TO_DISK = Advice(
    effect="optimizer states (12 bytes a parameter) and parameters go to a disk",
    price="much slower steps; needs a fast local disk",
    shell="trainer-plugins configs show zero3_offload_nvme > accelerate.yaml",
)
NO_PINNED_OFFLOAD = Advice(
    effect="what is offloaded is not page-locked (the same for offload_param)",
    price="slower copies",
    deepspeed='"offload_optimizer": {"device": "cpu", "pin_memory": false}',
)
FEWER_LIVE_PARAMETERS = Advice(
    effect="fewer parameters are gathered at once than DeepSpeed's default of 1e9, which are 2 GB"
    " in half precision (in its file)",
    price="they are gathered more often, with less overlap of sending and computing",
    deepspeed='"stage3_max_live_parameters": 1e8, "stage3_prefetch_bucket_size": 1e7',
)
WRAP_LAYERS = Advice(
    effect="one layer is gathered at a time, not the model (in accelerate's file)",
    accelerate="fsdp_transformer_layer_cls_to_wrap: LAYER",
    unfilled="fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer  # your model's layer",
)
ONE_PROCESS_A_CARD = Advice(
    effect="one process a card (DDP): outputs and losses stay where they are made",
    accelerate="distributed_type: MULTI_GPU",
    shell="torchrun --nproc_per_node CARDS COMMAND",
)
OWN_CARD_FIRST = Advice(
    effect="each rank opens a context on its own card only",
    code='torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # before any other CUDA call',
)
OWN_DEVICE_MAP = Advice(
    effect="each rank loads the weights onto its own card",
    code='from_pretrained(..., device_map={"": int(os.environ["LOCAL_RANK"])})',
)
EMPTY_CACHE_EACH_STEP = Advice(
    effect="torch's cache is released after each step, on all ranks at the same time",
    price="about a tenth slower",  # transformers, TrainingArguments: "about 10% slower"
    trainer="--torch_empty_cache_steps 1",
    code="torch.cuda.empty_cache()  # after each step",
)
KEEP_NUMBERS = Advice(
    effect="a number is kept instead of a tensor with its graph",
    code="loss.item(), or .detach().cpu()",
)
NO_CACHE_IN_TRAINING = Advice(
    effect="no training forward pass returns keys and values",
    code="model.config.use_cache = False",
)
NO_PINNED_ACTIVATIONS = Advice(
    effect='activations stay on the card; with "unsloth" each is kept in pinned main memory',
    price="more of the card; or pip install -U unsloth_zoo, which pins less (unsloth-zoo#1257)",
    code='use_gradient_checkpointing=True   # in get_peft_model, not "unsloth"',
)
