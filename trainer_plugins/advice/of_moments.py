"""Define remedies outside the steps: loading, evaluation, generation, saving, resuming."""

from dataclasses import replace

from trainer_plugins.advice.entry import Advice

SMALLER_EVAL_BATCH = Advice(
    effect="shrinks the evaluation batch (8 rows by default) without changing the metrics",
    price="the evaluation takes a little longer",
    trainer="--per_device_eval_batch_size ROWS",
    unfilled="halve --per_device_eval_batch_size",
    code="halve the rows of an evaluation batch, and move outputs to main memory with .cpu()",
)
# Before OUTPUTS_TO_MAIN_MEMORY if sizes are unknown: an evaluation of 1,000 rows of 1,024 tokens
# over 128,000 words keeps 524 GB of logits, more than main memory.
ARGMAX_LOGITS = Advice(
    effect="keeps one number for each token instead of one for each word of the vocabulary",
    price="compute_metrics gets predictions instead of logits",
    # T5 and others return a tuple.
    code="Trainer(..., preprocess_logits_for_metrics=lambda logits, labels: "
    "(logits[0] if isinstance(logits, tuple) else logits).argmax(-1))",
)
EVALUATION_GUARD = replace(
    ARGMAX_LOGITS, code='callbacks=[trainer_plugins.EvaluationGuard(logits_to="argmax")]'
)
OUTPUTS_TO_MAIN_MEMORY = Advice(
    effect="moves outputs to main memory after that many batches",
    price="main memory must hold all outputs, at the end twice; the evaluation is slower",
    trainer="--eval_accumulation_steps STEPS",
    unfilled="--eval_accumulation_steps 1",
)
LOSS_ONLY = Advice(
    effect="keeps no logits; the evaluation reports only the loss",
    trainer="--prediction_loss_only True",
)
NO_GRAD = Advice(
    effect="keeps no activations for a backward pass",
    code="with torch.no_grad():  # around the evaluation",
)
METRICS_ON_CPU = Advice(
    effect="computes the metrics without using GPU memory",
    price="slower; or compute in parts, as eval_pred has every row of the evaluation",
    code='device="cpu" in compute_metrics',
)
SHORTER_ANSWERS = Advice(
    effect="keeps fewer tokens in the KV cache",
    price="shorter answers",
    trainer="--generation_max_length LENGTH",
    unfilled="--generation_max_length 256",
)
FEWER_BEAMS = Advice(
    effect="shrinks the KV cache, which grows with the number of beams",
    price="a narrower search",
    trainer="--generation_num_beams 1",
)
OFFLOADED_CACHE = Advice(
    effect="keeps the KV cache in main memory, except one layer",
    price="slower generation",
    code='model.generation_config.cache_implementation = "offloaded"',
)
FEWER_INPUTS = Advice(
    effect="shrinks activations, which grow with rows x length",
    price="more passes",
    code="pass fewer rows at once, or shorter ones",
)
SHARDED_SAVE = Advice(
    effect="makes each rank save its own shard (in accelerate's file): no card gathers them",
    price="`accelerate merge-weights` joins the parts afterwards",
    accelerate="fsdp_state_dict_type: SHARDED_STATE_DICT",
)
SAVE_WITHOUT_GATHER = Advice(
    effect="makes each rank save its own shard, so nothing is gathered (in DeepSpeed's file)",
    price="`zero_to_fp32.py` joins the parts on the CPU",
    deepspeed='"stage3_gather_16bit_weights_on_model_save": false',
)
COPY_IN_MAIN_MEMORY = Advice(effect="makes the copy in main memory", code=".cpu() HOW at PLACE")
SAVE_ONLY_MODEL = Advice(
    effect="leaves the optimizer states out of the checkpoint",
    price="you cannot resume the run from it",
    trainer="--save_only_model True",
)
FEWER_CHECKPOINTS = Advice(
    effect="keeps only the last checkpoint on disk",
    price="earlier checkpoints are deleted",
    trainer="--save_total_limit 1",
)
EMPTY_CACHE_BEFORE_SAVE = Advice(
    effect="frees the training cache, to make room for the copy that saving needs",
    code="gc.collect(); torch.cuda.empty_cache()  # before saving",
)
OBJECTS_IN_MAIN_MEMORY = Advice(
    effect="sends objects through main memory: with NCCL each rank copies those of all ranks to its"
    " card, and a tensor in them opens a context on the card that it comes from",
    price="a slower exchange; move tensors in the objects to the CPU first",
    code='dist.all_gather_object(objects, own, group=dist.new_group(backend="gloo"))',
)
SAVE_THE_ADAPTER = Advice(
    effect="saves only the adapter, some MB, so the training is safe before you merge",
    code='model.save_pretrained("adapter")',
)
RESUME_THE_RUN = Advice(
    effect="continues from the last checkpoint",
    code="trainer.train(resume_from_checkpoint=True)",
)
NO_GATHER_TO_GENERATE = Advice(
    effect="gathers one layer at a time to generate, instead of the whole model on each card",
    price="much slower generation",
    trl="--ds3_gather_for_generation False",
    arguments="ds3_gather_for_generation=False",
)
FEWER_GENERATIONS = Advice(
    effect="halves the answers to a prompt that pass through the model together",
    price="the advantage of an answer is estimated from fewer others",
    trl="--num_generations GENERATIONS",
    arguments="num_generations=GENERATIONS",
    unfilled="lower --num_generations",
)
GENERATE_ON_ITS_OWN_CARD = Advice(
    effect="generates with vLLM on a separate card, so the training cards gather nothing",
    price="another card",
    shell="trl vllm-serve ...   # on a separate card; in the training use_vllm, as a server",
)
GATHER_BY_MODULE = Advice(
    effect="gathers one module at a time; stage3_max_live_parameters does not limit this gather",
    code="for module in model.modules():"
    " with GatheredParameters(module.parameters(recurse=False)): ...",
)
LOAD_INTO_MAIN_MEMORY = Advice(
    effect="loads the checkpoint into main memory instead of onto the card it was saved from",
    code='torch.load(..., map_location="cpu")',
)
DROP_THE_COPY = Advice(
    effect="frees the loaded copy on the card",
    code="del checkpoint; gc.collect(); torch.cuda.empty_cache()  # after load_state_dict",
)
RESUME_GUARD = Advice(
    effect="keeps FSDP2 from holding the optimizer states twice while it loads them",
    code="callbacks=[trainer_plugins.ResumeGuard()]",
)
RESUME_WITHOUT_STATES = Advice(
    effect="skips loading the states on top of those on the card",
    price="the optimizer starts from scratch",
    shell="rm CHECKPOINT/optimizer.pt",
)
LOAD_ON_ONE_RANK = Advice(
    effect="loads the model into main memory on one rank, which sends the others their shards (in"
    " accelerate's file); do not move the model to a card first",
    price="a slower start",
    accelerate="fsdp_cpu_ram_efficient_loading: true   # with fsdp_sync_module_states: true",
)
LOAD_ONCE = Advice(
    effect="keeps a rank from holding the weights twice while it loads (the default in transformers"
    " 5); each rank still holds them once",
    code="from_pretrained(..., low_cpu_mem_usage=True)",
)
CONVERT_IN_MAIN_MEMORY = Advice(
    effect="stacks and joins the checkpoint's tensors in main memory (transformers 5)",
    price="main memory for the full model, and a slower load",
    code='from_pretrained(..., device_map="cpu").to("cuda")',
)
# transformers#47404: accelerate counts only the weights
ROOM_IN_THE_MAP = Advice(
    effect="leaves each card room for the tensors that loading creates",
    price="the weights must fit into the smaller share of all cards together",
    code='from_pretrained(..., device_map="auto",'
    ' max_memory=dict.fromkeys(range(torch.cuda.device_count()), "SIZE"))',
)
WHOLE_ON_THE_CARD = Advice(
    # transformers' quantizer gives `device_map="auto"` 0.9 of the free memory (bnb_4bit.py)
    effect='loads all weights onto the card; "auto" uses nine tenths of what is free at most',
    code='from_pretrained(..., device_map={"": 0})',
)
READ_BY_ONE_RANK = Advice(
    effect="makes only ZeRO-3's first rank read the checkpoint, and send the others their parts",
    price="more traffic between the cards",
    accelerate="distributed_type: DEEPSPEED   # with zero_stage: 3",
    deepspeed="zero_optimization.stage: 3",
)
# LlamaFactory#8872, transformers#43696; integrations/mxfp4.py
BF16_CHECKPOINT = Advice(
    effect="loads a bf16 checkpoint as it is, which ZeRO-3 shards meanwhile; of an mxfp4 checkpoint"
    " each rank first builds all weights in bf16",
    price="a download three times as large",
    code='from_pretrained("unsloth/gpt-oss-20b-BF16")   # for openai/gpt-oss-20b',
)
# axolotl#3374 and #3439, bitsandbytes#1849
QUANTISED_EXPERTS = Advice(
    effect="also quantises experts, which transformers 5 stores as one tensor",
    price="other code; transformers 4 lacks newer models",
    code="quantize_moe_experts: true   # in the YAML of axolotl",
    shell='pip install "transformers<5"   # Mixtral, Qwen3-MoE, GLM-4.5: experts are layers there',
)
RELEASED = Advice(
    effect="moves a Trainer of this process off the card, and names what holds the rest",
    price="main memory of the same size, until the Trainer is gone",
    code="from trainer_plugins import released; released(trainer)",
)
RESTART_KERNEL = Advice(
    effect="frees the memory of earlier runs",
    code="restart the kernel, and run the cells once",
)
RELEASE_EARLIER_RUNS = Advice(
    effect="frees what a trial has left before the next one starts",
    code="callbacks=[trainer_plugins.ReleaseEarlierRuns()]",
)
EMPTY_CACHE_AFTER_EXCEPT = Advice(
    effect="frees the tensors that the exception's frames hold until the block ends",
    code="empty the cache after the `except` block, not in it",
)
