"""Define remedies for a training step: its batch, activations, optimizer, weights and shards."""

from trainer_plugins.advice.entry import Advice
from trainer_plugins.checkpointing import spell

SMALLER_MICRO_BATCH = Advice(
    effect="shrinks the activations; the effective batch size stays the same",
    price="smaller micro-batches lower GPU utilization",
    trainer="--per_device_train_batch_size ROWS --gradient_accumulation_steps STEPS",
    unfilled="halve --per_device_train_batch_size and double --gradient_accumulation_steps",
    code="halve the micro-batch size and double the gradient accumulation steps",
)
SURVIVE = Advice(
    effect="finishes a micro-batch that does not fit in pieces, with the same gradient",
    price="extra time for each micro-batch that it splits; none for the others",
    shell="trainer-plugins exec --preset survive -- COMMAND",
    code="trainer_plugins.survive_oom(trainer)",
    hydra="+trainer_plugins=survive",
)
CHECKPOINTING = Advice(
    effect="keeps only the inputs of each layer for the backward pass",
    # A backward pass costs two forward passes: 4 instead of 3 (arXiv:1604.06174, section 4.1).
    price="each forward pass runs twice, about a third more time",
    trainer=spell("--gradient_checkpointing True"),
    code=spell("model.gradient_checkpointing_enable()"),
)
OFFLOADED_ACTIVATIONS = Advice(
    effect="moves the inputs of each layer to pinned main memory until the backward pass",
    price="each forward pass runs twice, and these inputs cross the bus and come back",
    trainer=spell(
        "--gradient_checkpointing True --gradient_checkpointing_kwargs '{\"offload\": true}'"
    ),
    arguments=spell('gradient_checkpointing=True, gradient_checkpointing_kwargs={"offload": True}'),
)
NON_REENTRANT = Advice(
    effect="makes checkpointing work with frozen inputs and with DDP",
    trainer=spell("--gradient_checkpointing_kwargs '{\"use_reentrant\": false}'"),
    arguments=spell('gradient_checkpointing_kwargs={"use_reentrant": False}'),
)
INPUTS_REQUIRE_GRADS = Advice(
    effect="lets reentrant checkpointing reach the adapters behind frozen embeddings",
    code="model.enable_input_require_grads()",
)
REDUCED_EACH_TIME = Advice(
    effect="keeps only each card's shard of the gradients, also between micro-batches of a step",
    price="gradients are reduced for each micro-batch",
    trainer='--accelerator_config \'{"gradient_accumulation_kwargs": {"sync_each_batch": true}}\'',
    arguments='accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}}',
)
SHORTER_ROWS = Advice(
    effect="cuts longer rows there (SFTConfig, or your tokenizer's max_length)",
    price="the end of long rows is lost",
    trl="--max_length LENGTH",
    arguments="max_length=LENGTH",
    code="halve the maximum length (max_length)",
    plan="--seq-length LENGTH",
)
PAD_TO_FEW_LENGTHS = Advice(
    effect="pads to few different lengths, which leave few odd-sized gaps",
    price="some padding",
    arguments="pad_to_multiple_of=64",
    code="DataCollatorForSeq2Seq(..., pad_to_multiple_of=64)",
)
GROUP_BY_LENGTH = Advice(
    effect="puts the longest rows first, so an OOM happens in the first steps or not at all"
    " (transformers 4: --group_by_length True)",
    price="rows come in another order",
    trainer="--train_sampling_strategy group_by_length",
)
LIGER = Advice(
    effect="never holds all logits in memory at once",
    price="needs liger-kernel and a model that it supports; rounding differs a little",
    trainer="--use_liger_kernel True",
)
# sdpa comes with torch, takes every dtype and is transformers' default. FlashAttention-2 needs a
# package and 16 bits; it is the remedy only if sdpa is already on and still built the table.
SDPA_ATTENTION = Advice(
    effect="never builds the length x length score matrix",
    price="rounding differs a little",
    arguments='model_init_kwargs={"attn_implementation": "sdpa"}',
    code='from_pretrained(..., attn_implementation="sdpa")',
)
FLASH_ATTENTION = Advice(
    effect=SDPA_ATTENTION.effect,
    price="needs flash-attn and 16 bits; rounding differs a little",
    arguments='model_init_kwargs={"attn_implementation": "flash_attention_2"}',
    code='from_pretrained(..., attn_implementation="flash_attention_2")',
)
FEWER_PATCHES = Advice(
    effect="limits a picture to 512 patches in Qwen-VL; attention grows with their square",
    price="less detail",
    code="AutoProcessor.from_pretrained(..., max_pixels=512 * 28 * 28)",
)
FEWER_FRAMES = Advice(
    effect="samples fewer frames of each video; their tokens shrink with them",
    price="less of the video",
    code='{"type": "video", "video": ..., "nframes": 16, "max_pixels": 128 * 28 * 28}',
)
FUSED_ADAMW = Advice(
    effect="updates without temporaries as large as the weights",
    trainer="--optim adamw_torch_fused",
    code="torch.optim.AdamW(..., fused=True)",
)
# Not paged_adamw_8bit: on a full card its states move to main memory, as managed memory that
# neither plan nor reading counts, and then each step waits for them.
EIGHT_BIT_ADAMW = Advice(
    effect="shrinks optimizer states from 8 to 2 bytes per parameter",
    price="needs bitsandbytes; states are rounded to 8 bits",
    trainer="--optim adamw_bnb_8bit",
    code="bitsandbytes.optim.AdamW8bit(...)",
)
ADAFACTOR = Advice(
    effect="shrinks optimizer states to a row and a column for each weight",
    price="another optimizer: you may have to tune the learning rate",
    trainer="--optim adafactor",
    code="torch.optim.Adafactor(...)",
)
HALF_PRECISION_WEIGHTS = Advice(
    effect="shrinks weights to 2 bytes per parameter; transformers 4 defaults to 4 (float32)",
    price="weights are rounded: train an adapter, or keep a float32 copy elsewhere",
    code="from_pretrained(..., dtype=torch.bfloat16)",
    plan="--dtype bfloat16",
)
FOUR_BITS = Advice(
    effect="shrinks weights to about 0.6 bytes per parameter, except experts stored as one tensor",
    price="you train an adapter on rounded weights; needs bitsandbytes and peft",
    trl="--load_in_4bit True --use_peft True",
    code="from_pretrained(..., quantization_config=BitsAndBytesConfig(load_in_4bit=True))",
    plan="--load-in-4bit --bnb-4bit-quant-type nf4 --bnb-4bit-compute-dtype bfloat16",
)
UNPREPARED = Advice(
    effect="keeps the weights that bitsandbytes does not quantise in 16 bits:"
    " prepare_model_for_kbit_training makes embeddings, head and experts stored as one tensor"
    " float32",
    price=spell(
        "norms compute in 16 bits; pass --gradient_checkpointing True, which it had switched on"
    ),
    code="leave out prepare_model_for_kbit_training(model)",
    plan="--no-prepare-kbit",
)
ADAPTER = Advice(
    effect="limits gradients and optimizer states to an adapter",
    price="you train an adapter instead of the weights",
    trl="--use_peft True --lora_r 16 --lora_target_modules all-linear",
    code='model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear"))',
    plan="--lora-r 16 --lora-target all-linear",
)
PRECOMPUTED_REFERENCE = Advice(
    effect="runs the reference model before training, then takes it off the card",
    price="one pass over all rows before the first step",
    trl="--precompute_ref_log_probs True",
    arguments="precompute_ref_log_probs=True",
)
SECOND_MODEL_IN_16_BITS = Advice(
    effect="halves a second, frozen model that is in float32",
    price="its outputs are rounded",
    code="PLACE.to(torch.bfloat16)",
)
STREAM_BASE = Advice(
    effect="keeps the frozen base in main memory, except a few layers",
    price="copies to the card in each step",
    trainer="--memory_stream_base always",
    code="callbacks=[trainer_plugins.StreamBase()]",
    plan="--stream-base LAYERS",
)
MERGE_IN_MAIN_MEMORY = Advice(
    effect="merges in a new process, in main memory, with no training beside it",
    price="some minutes, and main memory for the model in 16 bits",
    code='PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE, device_map="cpu"),'
    ' "adapter").merge_and_unload()',
)
NO_DORA = Advice(
    effect="avoids the full delta that DoRA needs in each forward pass",
    price="another adapter",
    code="LoraConfig(..., use_dora=False)",
)
NEWER_PEFT = Advice(
    effect="never builds one adapter's delta of experts (peft#3577, 2026-08)",
    shell="pip install -U peft",
)
NO_EXPERTS = Advice(
    effect="adapts attention and dense layers only: linear layers need no delta, experts do",
    price="another adapter",
    code="LoraConfig(..., target_modules=[...], target_parameters=None)",
)
SHARD_THE_RUN = Advice(
    effect="shards weights, gradients and optimizer states across the cards; DDP keeps a full copy"
    " on each",
    price="more traffic between the cards",
    shell="trainer-plugins configs show fsdp2 > accelerate.yaml",
)
MORE_CARDS = Advice(
    effect="shards the optimizer states (ZeRO) across more cards",
    price="more cards",
    shell="launch on more cards than now",
)
OFFLOAD_OPTIMIZER = Advice(
    effect="moves optimizer states to main memory, 12 bytes per parameter",
    price="a slower step, and that much main memory",
    shell="trainer-plugins configs show zero3_offload_optimizer > accelerate.yaml",
)
NO_FULL_EMBEDDINGS = Advice(
    effect="trains no embedding and no head in full, each with a gradient and states of its own",
    price="new tokens are not learned",
    code='leave "embed_tokens" and "lm_head" out of modules_to_save (Unsloth: target_modules)',
)
OFFLOAD_TO_DISK = Advice(
    effect="moves optimizer states (12 bytes per parameter) and parameters to a disk",
    price="much slower steps; needs a fast local disk",
    shell="trainer-plugins configs show zero3_offload_nvme > accelerate.yaml",
)
NO_PINNED_OFFLOAD = Advice(
    effect="stops page-locking what is offloaded (the same for offload_param)",
    price="slower copies",
    deepspeed='"offload_optimizer": {"device": "cpu", "pin_memory": false}',
)
FEWER_LIVE_PARAMETERS = Advice(
    effect="gathers fewer parameters at once than DeepSpeed's default of 1e9, which take 2 GB in"
    " half precision (in its file)",
    price="more frequent gathers, which overlap less with compute",
    deepspeed='"stage3_max_live_parameters": 1e8, "stage3_prefetch_bucket_size": 1e7',
)
WRAP_LAYERS = Advice(
    effect="gathers one layer at a time instead of the model (in accelerate's file)",
    accelerate="fsdp_transformer_layer_cls_to_wrap: LAYER",
    unfilled="fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer  # your model's layer",
)
ONE_PROCESS_A_CARD = Advice(
    effect="runs one process per card (DDP), so outputs and losses stay on their own card",
    accelerate="distributed_type: MULTI_GPU",
    shell="torchrun --nproc_per_node CARDS COMMAND",
)
OWN_CARD_FIRST = Advice(
    effect="opens each rank's context on its own card only",
    code='torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # before any other CUDA call',
)
OWN_DEVICE_MAP = Advice(
    effect="loads each rank's weights onto its own card",
    code='from_pretrained(..., device_map={"": int(os.environ["LOCAL_RANK"])})',
)
EMPTY_CACHE_EACH_STEP = Advice(
    effect="releases torch's cache after each step, on all ranks at the same time",
    price="about 10 % slower",  # transformers, TrainingArguments: "about 10% slower"
    trainer="--torch_empty_cache_steps 1",
    code="torch.cuda.empty_cache()  # after each step",
)
KEEP_NUMBERS = Advice(
    effect="keeps a number instead of a tensor with its graph",
    code="loss.item(), or .detach().cpu()",
)
NO_CACHE_IN_TRAINING = Advice(
    effect="returns no keys and values from forward passes in training",
    code="model.config.use_cache = False",
)
NO_PINNED_ACTIVATIONS = Advice(
    effect='keeps activations on the card; with "unsloth" each is kept in pinned main memory',
    price="more GPU memory; or pip install -U unsloth_zoo, which pins less (unsloth-zoo#1257)",
    code='use_gradient_checkpointing=True   # in get_peft_model, not "unsloth"',
)
