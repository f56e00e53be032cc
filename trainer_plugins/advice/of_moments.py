"""Define remedies outside the steps: loading, evaluation, generation, saving, resuming."""

from dataclasses import replace

from trainer_plugins.advice.entry import Advice

SMALLER_EVAL_BATCH = Advice(
    effect="metrics stay the same; the default is 8 rows",
    price="the evaluation takes a little longer",
    trainer="--per_device_eval_batch_size ROWS",
    unfilled="halve --per_device_eval_batch_size",
    code="halve the rows of an evaluation batch, and keep outputs with .cpu()",
)
# Before OUTPUTS_TO_MAIN_MEMORY if sizes are unknown: an evaluation of 1,000 rows of 1,024 tokens
# over 128,000 words keeps 524 GB of logits, more than main memory.
ARGMAX_LOGITS = Advice(
    effect="one number is kept a token instead of one for each word of the vocabulary",
    price="compute_metrics gets predictions instead of logits",
    # T5 and others return a tuple.
    code="Trainer(..., preprocess_logits_for_metrics=lambda logits, labels: "
    "(logits[0] if isinstance(logits, tuple) else logits).argmax(-1))",
)
EVALUATION_GUARD = replace(
    ARGMAX_LOGITS, code='callbacks=[trainer_plugins.EvaluationGuard(logits_to="argmax")]'
)
OUTPUTS_TO_MAIN_MEMORY = Advice(
    effect="outputs go to main memory after each batch",
    price="main memory has to hold them all; a slower evaluation",
    trainer="--eval_accumulation_steps STEPS",
    unfilled="--eval_accumulation_steps 1",
)
LOSS_ONLY = Advice(
    effect="no logits are kept; only the loss is reported",
    keeps_result=False,
    trainer="--prediction_loss_only True",
)
NO_GRAD = Advice(
    effect="without it all activations are kept for a backward pass",
    code="with torch.no_grad():  # around the evaluation",
)
METRICS_ON_CPU = Advice(
    effect="what compute_metrics makes needs nothing of the card",
    price="slower; or in parts, as eval_pred has all rows of the evaluation",
    code='device="cpu" in compute_metrics',
)
SHORTER_ANSWERS = Advice(
    effect="fewer tokens are in the cache of keys and values",
    price="shorter answers",
    keeps_result=False,
    trainer="--generation_max_length LENGTH",
    unfilled="--generation_max_length 256",
)
FEWER_BEAMS = Advice(
    effect="the cache of keys and values grows with the beams",
    price="a narrower search",
    keeps_result=False,
    trainer="--generation_num_beams 1",
)
OFFLOADED_CACHE = Advice(
    effect="the cache of keys and values waits in main memory, except one layer",
    price="slower generation",
    code='model.generation_config.cache_implementation = "offloaded"',
)
FEWER_INPUTS = Advice(
    effect="activations shrink with rows x length",
    price="more passes",
    code="pass fewer rows at once, or shorter ones",
)
SHARDED_SAVE = Advice(
    effect="each rank saves its own part (in accelerate's file); nothing is gathered on a card",
    price="`accelerate merge-weights` joins the parts afterwards",
    accelerate="fsdp_state_dict_type: SHARDED_STATE_DICT",
)
SAVE_WITHOUT_GATHER = Advice(
    effect="each rank saves its own part, and nothing is gathered (in DeepSpeed's file)",
    price="`zero_to_fp32.py` joins the parts on the CPU",
    deepspeed='"stage3_gather_16bit_weights_on_model_save": false',
)
COPY_IN_MAIN_MEMORY = Advice(
    effect="the copy is made in main memory",
    code=".cpu() HOW at PLACE",
)
SAVE_ONLY_MODEL = Advice(
    effect="the optimizer states are not saved",
    price="the run cannot be resumed from there",
    trainer="--save_only_model True",
)
FEWER_CHECKPOINTS = Advice(
    effect="only the last checkpoint stays on the disk",
    price="earlier checkpoints are deleted",
    trainer="--save_total_limit 1",
)
EMPTY_CACHE_BEFORE_SAVE = Advice(
    effect="saving needs a copy; what training has cached makes room for it",
    code="gc.collect(); torch.cuda.empty_cache()  # before saving",
)
SAVE_THE_ADAPTER = Advice(
    effect="the adapter alone is some MB, and what was trained is safe before anything is merged",
    code='model.save_pretrained("adapter")',
)
RESUME_THE_RUN = Advice(
    effect="goes on from the last checkpoint",
    code="trainer.train(resume_from_checkpoint=True)",
)
NO_GATHER_TO_GENERATE = Advice(
    effect="each layer is gathered when it generates, instead of the whole model on each card",
    price="much slower generation",
    trl="--ds3_gather_for_generation False",
    arguments="ds3_gather_for_generation=False",
)
GENERATE_ON_ITS_OWN_CARD = Advice(
    effect="vLLM generates on a card of its own, and the training cards gather nothing",
    price="another card",
    shell="trl vllm-serve ...   # on its own card; in the training use_vllm, as a server",
)
GATHER_BY_MODULE = Advice(
    effect="one module is gathered at a time; stage3_max_live_parameters does not bound this",
    code="for module in model.modules():"
    " with GatheredParameters(module.parameters(recurse=False)): ...",
)
LOAD_INTO_MAIN_MEMORY = Advice(
    effect="the checkpoint waits in main memory instead of on the card it was saved from",
    code='torch.load(..., map_location="cpu")',
)
DROP_THE_COPY = Advice(
    effect="the copy that was loaded does not stay on the card",
    code="del checkpoint; gc.collect(); torch.cuda.empty_cache()  # after load_state_dict",
)
RESUME_GUARD = Advice(
    effect="FSDP2 does not hold the optimizer states twice while it loads them",
    code="callbacks=[trainer_plugins.ResumeGuard()]",
)
RESUME_WITHOUT_STATES = Advice(
    effect="the states are not loaded in addition to those that are there",
    price="the optimizer starts from scratch",
    keeps_result=False,
    shell="rm CHECKPOINT/optimizer.pt",
)
LOAD_ON_ONE_RANK = Advice(
    effect="one rank loads the model into main memory, and the others get their shards (in"
    " accelerate's file); do not move the model to a card before",
    price="a slower start",
    accelerate="fsdp_cpu_ram_efficient_loading: true   # with fsdp_sync_module_states: true",
)
LOAD_ONCE = Advice(
    effect="a rank does not hold the weights twice while it loads (the default in transformers 5);"
    " each rank still holds them once",
    code="from_pretrained(..., low_cpu_mem_usage=True)",
)
CONVERT_IN_MAIN_MEMORY = Advice(
    effect="what transformers 5 stacks and joins of a checkpoint is made in main memory",
    price="main memory for the full model; a slower load",
    code='from_pretrained(..., device_map="cpu").to("cuda")',
)
# transformers#47404: accelerate counts only the weights
ROOM_IN_THE_MAP = Advice(
    effect="the weights leave each card room for what else is made there",
    price="all cards together have to hold the weights in less",
    code='from_pretrained(..., device_map="auto",'
    ' max_memory=dict.fromkeys(range(torch.cuda.device_count()), "SIZE"))',
)
READ_BY_ONE_RANK = Advice(
    effect="ZeRO-3: the first rank alone reads and stacks a checkpoint, and the others get parts",
    price="more traffic between the cards",
    accelerate="distributed_type: DEEPSPEED   # with zero_stage: 3",
    deepspeed="zero_optimization.stage: 3",
)
# LlamaFactory#8872, transformers#43696; integrations/mxfp4.py
BF16_CHECKPOINT = Advice(
    effect="a checkpoint in bf16 is read as it lies, and ZeRO-3 divides it meanwhile; of one in"
    " mxfp4 each rank makes all of the weights in bf16 first",
    price="a download three times as large",
    code='from_pretrained("unsloth/gpt-oss-20b-BF16")   # for openai/gpt-oss-20b',
)
# axolotl#3374 and #3439, bitsandbytes#1849
QUANTISED_EXPERTS = Advice(
    effect="experts, which transformers 5 stores as one tensor, are quantised as well",
    price="other code; transformers 4 has no newer models",
    keeps_result=False,
    code="quantize_moe_experts: true   # in the YAML of axolotl",
    shell='pip install "transformers<5"   # Mixtral, Qwen3-MoE, GLM-4.5: experts are layers there',
)
RELEASED = Advice(
    effect="empties the card of a Trainer of this process, and names what holds the rest",
    price="main memory of their size, until the Trainer is gone",
    code="from trainer_plugins import released; released(trainer)",
)
RESTART_KERNEL = Advice(
    effect="frees what is left from before",
    code="restart the kernel, and run the cells once",
)
RELEASE_EARLIER_RUNS = Advice(
    effect="what a trial has left is released before the next one",
    code="callbacks=[trainer_plugins.ReleaseEarlierRuns()]",
)
EMPTY_CACHE_AFTER_EXCEPT = Advice(
    effect="the exception's frames hold the tensors as long as the block runs",
    code="empty the cache after the `except` block, not in it",
)
