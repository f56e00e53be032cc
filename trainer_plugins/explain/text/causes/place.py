"""Judge causes by the place of the failure: the activity of the run, and the tensor."""

from collections.abc import Callable
from dataclasses import dataclass

from trainer_plugins import advice
from trainer_plugins.advice import Door
from trainer_plugins.explain.answer import Cause
from trainer_plugins.explain.shared import Said, cause, quote
from trainer_plugins.explain.text.causes.others import leftover
from trainer_plugins.explain.text.solved import (
    count_logits,
    solve_gradients,
    solve_logits,
    solve_scores,
    solve_weights,
)
from trainer_plugins.explain.text.text_facts import Rule, TextFacts
from trainer_plugins.units import GIB, MIB

_DEEP = 6  # how many frames above the failing one still show its purpose
EVALUATION = (
    r"\b(?:\w+\.)?(?:evaluate|evaluation|evaluation_loop|prediction_loop|prediction_step|predict"
    r"|validate|validation\w*|_validate|eval_\w+|run_eval\w*|valid_\w+"
    r"|(?:val|test|evaluate|validate)_(?:one_)?(?:step|epoch|loop)|inference_on_\w+"
    r"|single_gpu_test|multi_gpu_test)(?= |$)"
)
TRAINING = (
    r"training_step|inner_training_loop|\btrain(?:_\w+)?(?= |$|\()|backward|trainer\.fit|optimizer"
)
LOADING = (
    r"from_pretrained|load_checkpoint_and_dispatch|_load_pretrained_model|dispatch_model"
    r"|into_meta_model|set_module_tensor|core_model_loading"
)
SHARDING = (
    r"init_param_handle|_init_flat_param|flatten_params|_get_shard\b|chunk\.clone\(\)"
    r"|shards\[.{1,40}\]\.clone\(\)|_shard_tensor|distribute_tensor|_init_sharded_param"
    r"|_sync_module_params|sync_params_and_buffers|load_full_state_dict|_move_states_to_device"
    r"|_materialize_meta_module"
)
LOGITS = (
    r"cross_entropy|log_softmax|logsumexp|nll_loss|lm_head\(|ForCausalLMLoss|loss_function"
    r"|(?:\b|_)logits?\b.*(?:float|\.to\(|contiguous|clone|softmax|temperature)|shift_logits"
    r"|selective_log|_logps|logprobs|log_probs|entropy_from"
    r"|_convert_to_fp32"  # accelerate's: a model's outputs, mostly logits
)
# Functions with which the Trainer and accelerate collect the outputs of batches.
COLLECTING = (
    r"nested_concat|nested_gather|pad_across_processes|gather_for_metrics|gather_function"
    r"|nested_detach|preds_host|all_preds|EvalLoopContainer|all_logits|\bpreds\.append"
)
_LANGUAGE = r"modeling_|lm_head|CausalLM|logp|shift_|vocab|trl[/\\]"
ATTENTION = (
    r"scaled_dot_product|attn_weights|attention_scores|attention_mask|\battn\b|\bsim = "
    r"|einsum\(.*[qk]\b|baddbmm|bmm\(.*(?:query|key)|(?<!log_)(?<!input\.)softmax\("
    r"|matmul\(.*(?:key|query|[qk]\b)|causal_mask"
)
LEAST_QUADRATIC_BYTES = 4 * GIB
# A run has ended, and its memory has not.
_BETWEEN_RUNS = (
    r"\b(?:after|when|once)\b[^!?]{0,40}\b(?:stop|cancel|finish|end|interrupt)\w*\b[^!?]{0,90}?"
    r"\bmemory\b[^.!?]{0,20}\b(?:not|n't|never|stays?|remains?|kept|still)\b"
    r"|\b(?:can ?not|can't|unable to|how to) (?:free|release|clear)[^.!?]{0,20}\bmemory after\b"
    r"|\b(?:memory|VRAM)\b[^.!?]{0,20}(?:not|n't|never) [^.!?]{0,12}(?:clear|free|releas)\w*"
    r"[^.!?]{0,30}\bafter\b[^.!?]{0,24}\b(?:train|run|stop|finish|end)"
    r"|\b(?:next|second|following) (?:run|training(?! step)|trial)\b[^.!?]{0,30}"
    r"\b(?:OOM|out of mem)"
    r"|(?:停止|结束|中断|训练完)[^。]{0,20}显存[^。]{0,12}[没不未][^。]{0,6}(?:释放|清)"
)
_LATER = (
    r"suddenly|sporadic|(?:after|until) (?:an?|one|the first|\d) epoch|个epoch后"
    r"|(?:after|till|until|for) (?:about |around |~)?\d[\d.,]*[kK]? ?(?:\w+ )?"
    r"(?:steps|iter|hours)|steadily"
    r"|(?:climb|increas|grow)\w* (?:\w+ ){0,2}(?:during|in the process|over)"
    r"|\b(?:some|certain|few|couple of|third|\d(?:rd|nd|th)) (?:optimization )?steps?\b"
    r"|突然|中途|(?:逐[步渐]|一直)(?:上升|增长|增加)|越来越|\d+ ?步|(?:某个?|一定) ?step"
    r"|[几一二三四五六七八九]千"
)
_LARGE_FRACTION = 0.02
_NEEDLE_BYTES = 256 * MIB


@dataclass(frozen=True, slots=True)
class ByFrame:
    """Names a cause if one of the innermost frames matches."""

    code: str
    unknown: str  # the open question, and how to settle it
    pattern: str = "(?!)"
    summary: str = ""
    innermost: int | None = _DEEP
    unless: str = ""  # frames with which it is another cause
    unless_within: str = ""  # frames it must not have called, which then failed
    applies: Callable[[TextFacts], object] = lambda _: True  # a condition besides the frames
    words: str = ""  # a person's words for it, if no frame shows the place
    solve: Callable[[TextFacts], Said | str] | None = None  # explains the refused size

    def __call__(self, facts: TextFacts) -> Cause | None:
        if self.words and facts.shows_no_moment and (sentence := facts.find_sentence(self.words)):
            return self._make_cause(facts, f"The text says: {quote(sentence)}")
        frame = facts.find_call(self.pattern, self.innermost)
        if not frame or (self.unless and facts.find_call(self.unless, self.innermost)):
            return None
        if not self.applies(facts):
            return None
        deeper = len(facts.frames) - 1 - facts.frames.index(frame)
        if self.unless_within and deeper and facts.find_call(self.unless_within, deeper):
            return None
        return self._make_cause(facts, f"It failed in {frame}.")

    def _make_cause(self, facts: TextFacts, evidence: str) -> Cause:
        doubt = f"The text does not show {self.unknown}"
        equation = self.solve(facts) if self.solve else ""
        return cause(self.code, evidence, equation, summary=self.summary, doubt=doubt)


def _moment(words: str, chinese: str = "") -> str:
    """Build a pattern for the moment of the failure, as a person names it in two languages."""
    when = (
        r"\b(?:during|when(?:ever)?|while|once|if|at|on|in|upon|after|before|each|every|by"
        r"|as soon as|(?:attempt|tr[yi])\w* to)\b"
    )
    leads = r"\b(?:leads? to|caus\w+|results? in|makes?|goes|gives?|runs?|fails?)\b"
    said = (
        rf"{when}(?:[^.!?]|\.\b){{0,40}}?\b(?:{words})|^\W*(?:{words})\W?[:-]"
        rf"|\b(?:{words})[^.!?]{{0,60}}?{leads}[^.!?]{{0,20}}\b(?:OOM|out.of\b)"
    )
    follows = r"[^\u3002\uff01\uff1f]{0,40}?(?:时|过程|期间|阶段|报|后|显存|直接|OOM)"
    # A letter of English may stand beside one of Chinese, where `\b` sees no boundary.
    words_in_it = (
        rf"(?<![a-z]){one}(?![a-z])" if one.isascii() else one for one in chinese.split("|")
    )
    in_chinese = rf"(?:{'|'.join(words_in_it)}){follows}"
    return f"{said}|{in_chinese}" if chinese else said


def logits_loss(facts: TextFacts) -> Cause | None:
    """Logits over the vocabulary, in fp32, at the loss."""
    frame = facts.find_call(LOGITS, innermost=4)
    asked = facts.asked_bytes
    least = min(_NEEDLE_BYTES, _LARGE_FRACTION * (facts.total_bytes or _NEEDLE_BYTES))
    if not frame or (asked is not None and asked < least):
        return None
    return cause(
        "logits-loss",
        f"It failed in {frame}.",
        (solve_logits(facts) or count_logits(facts)) if facts.find_call(_LANGUAGE) else "",
        doubt="The text does not show the shape of the logits: print logits.shape before that line",
    )


def long_sample(facts: TextFacts) -> Cause | None:
    """The run had fit for several steps, as its progress or a person says."""
    is_else = facts.find_call(EVALUATION) or not (facts.find_call(TRAINING) or not facts.frames)
    said = "" if facts.frames else facts.find_sentence(_LATER)
    is_else = is_else or facts.oom.source not in ("allocator", "masked", "library")
    if is_else or not (said or facts.progress):
        return None
    return cause(
        "long-sample",
        f"The text says: {quote(said)}" if said else f"It had run for some time: {facts.progress}.",
        grade="possible",
        doubt="A peak follows the longest batch so far, a leak grows between batches of one length,"
        " and an evaluation leaves something: print torch.cuda.memory_allocated() and"
        f" input_ids.shape at each step, or let `{advice.OBSERVE.flag(Door.SHELL)}` record them",
    )


PLACES: tuple[Rule, ...] = (
    ByFrame(
        code="adapter-merge",
        pattern=r"_merge_lora|merge_lora|merge_and_unload|merge_adapter|_unload_and_optionally_merge"
        r"|save_pretrained_(?:merged|gguf)|push_to_hub_(?:merged|gguf)|unsloth_save_model"
        r"|export_model\b|tuners[/\\]\S+ (?:un)?merge(?= |$)|\bmerged? = .*merge",
        innermost=None,
        unless=r"training_step|_inner_training_loop|_to_vllm|sync_weights",
        words=_moment(
            r"merg(?:e|es|ed|ing)\b[^.!?]{0,30}?(?:adapter|lora|model|weights|base)"
            r"|(?:adapter|lora)\W{1,3}merg\w+|merg(?:e|ing) step|gguf",
            "合并|导出|export|merge",
        )
        + r"|\b(?:merge_and_unload|save_pretrained_(?:merged|gguf)|push_to_hub_(?:merged|gguf))",
        unknown="what else is on the card: the trainer, its optimizer, a 4-bit base that merging"
        " turns into 16 bits",
    ),
    ByFrame(
        code="eval-logits",
        pattern=COLLECTING,
        applies=lambda facts: facts.find_call(EVALUATION),
        innermost=10,
        words=_moment(
            r"(?:eval\w*|validat\w+|predict\w*)\b[^.!?]{0,40}?\b(?:compute_metrics|metrics?|logits)"
        )
        + r"|\b\w*metrics?\b[^.!?]{0,40}?\beval|\beval\w*\b[^.!?]{0,40}?\b\w*metrics?\b",
        unknown="how many batches it had kept: with no compute_metrics, or with"
        f" {advice.OUTPUTS_TO_MAIN_MEMORY.flag(Door.TRAINER)}, the OOM should not come back",
    ),
    ByFrame(  # a traceback that is cut there
        code="eval-logits",
        pattern="_maybe_log_save_evaluate",
        innermost=1,
        unknown="whether it failed during evaluation or while saving: the frames after this one do",
    ),
    ByFrame(
        code="eval-batch",
        pattern=EVALUATION,
        innermost=None,
        unless=r"past_key_value|cache_utils|torch[/\\]optim[/\\]",
        words=_moment(
            r"eval(?:s|uat\w+)?\b|validat(?:ion|ing|e)\b|predict(?:s|ion|ing)?\b",
            "eval|val|evaluate|验证|评估|预测|predict",
        )
        + r"|\bfor validation\b",
        summary="evaluation does not fit: its batch, or leftovers of training and earlier batches",
        unknown="whether the batch or kept outputs are too large: see whether the first batch also"
        f" fails with {advice.SMALLER_EVAL_BATCH.flag(Door.TRAINER, rows=1)}",
    ),
    ByFrame(
        code="save-gather",
        pattern=r"(?<!load_)state_dict(?:_hook|_utils|\()|get_state_dict|summon_full_params"
        r"|save_pretrained|save_checkpoint|_save_checkpoint|save_model|save_16bit|consolidated_16bit"
        r"|fsdp_save|save_state|_full_post_state_dict|\bsafe_save|checkpoint_and_decide"
        r"|\b_?save(?= |$|\()|saver?\.save",
        innermost=20,
        unless=r"load_(?:full_)?state_dict|torch\.load|load_checkpoint|load_model"
        r"|from_pretrained|\bevaluate\b|evaluation_loop",
        words=_moment(
            r"(?:checkpoint )?sav(?:e|es|ed|ing)\b|(?:writ\w+|stor\w+) (?:a |the )?checkpoint",
            r"(?:保存|存储)(?!\S{0,12}梯度)|save",
        ),
        unknown="how large the gathered state is: weights in fp32 take 4 bytes per parameter",
    ),
    ByFrame(
        code="resume-load",
        pattern=r"torch[/\\]serialization\.py|torch\.load\(|load_state_dict|_load_optimizer_and"
        r"|load_checkpoint\b|restore_location|_load_from_checkpoint|_load_best_model|load_universal"
        r"|\brestore\b",
        innermost=20,
        unless=LOADING + r"|safetensors",
        words=_moment(
            r"resum(?:e|es|ed|ing)\b"
            r"|(?:load|restor)\w* (?:from )?(?:an? |the )?checkpoint\b(?! shards)",
            "断点|恢复训练|续训|检查点继续|继续训练|resume",
        ),
        unknown="whether the checkpoint or the run itself is too large: see whether it fits"
        " without resuming",
    ),
    ByFrame(
        code="ddp-buckets",
        pattern=r"\bReducer\(|_ddp_init_helper",
        innermost=4,
        solve=solve_gradients,
        unknown="the dtype of the trained weights: print next(model.parameters()).dtype",
    ),
    ByFrame(
        code="load-too-large",
        pattern=SHARDING,
        unless=r"training_step|\bforward\b|backward|_unshard|save",
        summary="the full weights do not fit on the card before they are sharded",
        unknown="whether every rank or only one loads the full model onto its card: `nvidia-smi`"
        " shows during the start which cards fill up",
    ),
    ByFrame(
        code="load-too-large",
        pattern=LOADING
        + r"|load_weights|create_weights|initialize_model|load_model\b|from_single_file"
        r"|materialize|prepare_model_for_kbit_training|\bquantize_4bit|Params4bit",
        innermost=None,
        unless=r"training_step|\bforward\b|backward",
        words=_moment(
            r"instantiat\w+|(?<!after )load(?:s|ed|ing)?\b[^.!?]{0,24}?"
            r"(?:model|weights|shards|base)|from_pretrained",
            "加载模型|加载权重|模型加载",
        ),
        unknown="whether the card was already in use: compare parameters x bytes with the memory"
        " `nvidia-smi` shows as free before the start",
    ),
    ByFrame(
        code="adapter-delta",
        pattern=r"get_delta_weight|_LoraParameterProxy|_low_prec_add|baddbmm\(W|\bdora\.py"
        r"|get_weight_norm",
        unknown="how large the delta is: if target_parameters names them, all experts of a layer at"
        " once, however few rows you train",
    ),
    logits_loss,
    ByFrame(
        code="image-size",
        pattern=r"Vision[A-Z]\w+|vision_(?:tower|model|encoder)|\.visual\b|image_encoder|[Ss]iglip"
        r"|patch_embed|pixel_values|image_tower",
        innermost=12,
        unless=r"backward",
        unknown="the sizes of the pictures: print pixel_values.shape of the batch",
    ),
    ByFrame(
        code="quadratic-attention",
        pattern=ATTENTION,
        innermost=3,
        applies=lambda facts: (facts.asked_bytes or 0) >= LEAST_QUADRATIC_BYTES,
        solve=solve_scores,
        unknown="the heads, rows and length: print the shapes of query and key",
    ),
    ByFrame(
        code="generate-cache",
        pattern=r"past_key_value|cache_utils|DynamicCache|StaticCache|key_cache|value_cache|layer_past"
        r"|KVCache|[/\\]cache\.py",
        summary="the KV cache of generation has grown too large",
        unknown="how long prompts and answers were: print input_ids.shape",
    ),
    ByFrame(
        code="optimizer-state",
        pattern=r"torch[/\\]optim[/\\]|optim(?:izer)?\.step\("
        r"|[/\\]\w*optim(?:izers?)?[/\\]|adam\w*\.py|_multi_tensor"
        r"|_init_group|initialize_optimizer_states|_setup_for_real_optimizer|_foreach_|_configure_zero"
        r"|_optimizer_step|_take_model_step|_sub_group\b|stage(?:3|_1_and_2)\.py \w*step\b"
        r"|\bopt\w*\.step\(|_create_fp32|fused_optimizer|DeepSpeedZeroOptimizer|zero_optimizer\.py"
        r"|_initialize_state",
        unless_within=r"\bforward\b|training_step|backward",
        words=_moment(r"(?:optimi[sz]er(?:[._ ']s?)*(?:step|states?|init\w*)|step function)")
        + r"|\bfirst step\b[^.!?]{0,60}\bsecond step\b",
        solve=solve_weights,
        unknown="whether the states or the temporaries of a foreach step are too large: if the"
        " first step fails, it is usually the states",
    ),
    ByFrame(
        code="optimizer-state",
        pattern=r"_prepare_deepspeed|ds_initialize|deepspeed\.initialize|accelerator\.prepare\(",
        innermost=2,
        summary="weights, gradients and optimizer states do not fit, before the first batch",
        unknown="how much of them each rank holds: `trainer-plugins plan` counts it",
    ),
    ByFrame(
        code="zero3-gather",
        pattern=r"all_gather_params|_all_gather|partition_parameters|fetch_sub_module|all_gather_into|unwrap_model_for_gen"
        r"|partitioned_param|GatheredParameters|_unshard\b|\bunshard",
        unknown="whether one layer or many prefetched ones are too large: see whether it fits"
        " without prefetching",
    ),
    leftover,
    ByFrame(
        code="leftover",
        words=_BETWEEN_RUNS,
        unknown="what keeps it: if torch.cuda.memory_allocated() stays high after gc.collect(), an"
        " object still refers to the tensors; else it is torch's cache",
    ),
    ByFrame(
        code="ddp-gpu0",
        words=r"\bcontexts?\b[^.!?]{0,30}\b(?:each|every|all|other)\b[^.!?]{0,8}(?:GPU|card)",
        unknown="which call opens a context, some hundred MB, on each card: `nvidia-smi` before and"
        " after that call does",
    ),
    ByFrame(
        code="load-too-large",
        pattern=r"module\.py .*(?:_apply|convert|to|cuda)\b|(?:model|net)\w*\.(?:to|cuda)\(|_move_m"
        r"|set_module_tensor|prepare_model\b|_configure_distributed_model|_wrap_model"
        r"|DistributedDataParallel\(|resize_token_embeddings|get_peft_model|inject_adapter|deepcopy\(",
        innermost=8,
        unless=r"training_step|\bforward\b|backward|[/\\]optim|[Oo]ptim\w*(?:\.step|\.py|\()|collat"
        r"|load_state_dict",
        words=_moment(
            r"(?<!after )(?<!before )(?:initiali[sz]\w+|start-?up\b|being (?:set up|buil|constr))",
            "初始化|开始训练前",
        )
        + r"|\bbefore (?:the |any )?(?:first |training )?(?:step|batch|iteration|starts|begins)",
        summary="the weights, or a copy of them, do not fit before the first step",
        unknown="which tensors are moved or copied, and whether the card was already in use: print"
        " model.get_memory_footprint() before that line, and check `nvidia-smi` before the start",
    ),
    ByFrame(
        code="generate-cache",
        words=_moment(
            r"generat(?:e|es|ed|ing|ion)\b|rollouts?\b|decoding\b(?! (?:video|image|audio))",
            "生成|rollout",
        ),
        pattern=r"\bgenerate(?= |$|\()|_greedy_search|beam_search|\b_sample\b|generation[/\\]utils",
        innermost=None,
        unless=r"backward",
        unknown="which of them it is: see whether it fits with one prompt, and with a small"
        " max_new_tokens",
    ),
)
