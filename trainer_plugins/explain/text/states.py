"""States: weights, gradients and optimizer states of a run, by the arithmetic of a text's numbers.

Full training with Adam in mixed precision takes 16 bytes a parameter: 2 for the weight, 2 for the
gradient, 12 for the float32 copy and both moments. ZeRO divides the last 12 among the ranks (stage
1), the gradient too (2), or all of it (3) (arXiv:1910.02054, section 3). It is 8 bytes where all of
them have 16 bits and there is no float32 copy.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from trainer_plugins.explain.shared import Said, say
from trainer_plugins.explain.text.text_facts import TextFacts
from trainer_plugins.explain.text.told import ASKS_NEED

_GB = 10**9
_ASCII = str.maketrans("\uff08\uff09\uff0a", "()*")
# Of a name as "Qwen2.5-VL-7B", "32bVL"; "4bit", "80GB", "1B tokens" and "910B" are something else.
_BILLIONS = re.compile(r"(?<![\d.A])(?!910)(\d{1,3}(?:\.\d{1,2})?) ?[bB](?![a-z\d])(?! tokens)")
# PEFT's print_trainable_parameters.
_COUNTED = re.compile(r"\ball params: ([\d,]{9,15})")
_FULL = re.compile(
    r"(?i)(?:finetuning|train|tuner)_type[\"']?[ =:]{1,3}[\"']?full|train_full|full_fine_?tun"
    r"|(?<![a-z])full[- ]?(?:param\w*[- ]?)?(?:fine[- ]?tun|sft|ft\b|training)"
    r"|\b\d{1,3}B (?:in )?full\b|全参|全量|\btune_mm_llm[ =]True"
)
_TRAINS = r"(?i)\btrain|fine-?tun|微调|训练|\b(?:sft|dpo|grpo|ppo|rlhf)\b"
# A person has seen it fit, an optimizer has other states, or the weights only run.
_IS_ELSE = (
    r"(?i)\bwork(?:s|ed)\b|\bfine\b(?![- ]?tun)|正常|没问题|\bgalore|\blomo|\bbadam"
    r"|\binference\b|推理|vllm|sglang"
)
# Parts of the model are frozen, or the framework trains an adapter by default.
_NOT_FULL = re.compile(r"(?i)freez|冻结|swift|llama-?factory|unsloth")
_ADAPTER = re.compile(r"(?i)lora|\bpeft|\badapter")
IN_4_BITS = re.compile(
    r"(?i)qlora|int4\b|bnb-4bit|load_in_4bit[\"']?[ =:]{1,3}True"
    r"|(?:bits|quantization_bit)[\"']?[ =:]{1,3}4"
)
FOUR_BIT_BYTES = 0.55  # of one parameter: half a byte and its scales
_METHODS = {"full": 16, "lora": 2, "qlora": FOUR_BIT_BYTES}
_SPOKEN = {"full": "full training", "lora": "LoRA", "qlora": "QLoRA"}
ROOM = 0.85  # of a card: activations and the context take the rest
_NUMERALS = dict(zip("单双两三四五六七八", (1, 2, 2, 3, 4, 5, 6, 7, 8), strict=True))
_GPU = (
    r"(?:NVIDIA )?(?:[ABHLV]\d{1,3}[A-Za-z]?(?![A-Za-z\d])|RTX|GPUs?\b|cards?\b"
    r"|\d{2,3} ?GB?\b|MI\d|[3-5]090)"
)
_NUM_CARDS = re.compile(
    rf"(?<![\d.])(\d{{1,4}}) ?[*x\u00d7] ?{_GPU}|{_GPU}\)? ?[*x\u00d7] ?(\d{{1,3}})\b"
    r"|\bnproc[-_]per[-_]node[ =]{1,3}(\d{1,3})|\bNPROC_PER_NODE=(\d{1,3})"
    r"|\bnum_processes[\"']?[ =:]{1,3}(\d{1,4})"
    r"|(?<![\d.])(\d{1,2}) (?:NVIDIA )?(?:[AHV]\d{2,3}s?\b|GPUs\b|cards\b)"
    r"|(\d{1,2}) ?(?:[张卡块]|个 ?(?:GPU|[ABHLV]\d))|GPU (?:number|[Cc]ount)\W{1,9}(\d{1,2})\b"
)
_ONE_CARD = re.compile(
    r"(?i)num_gpus[ =]1\b|\b(?:single|one|an?)\b[^.\n]{0,16}\b(?:GPU|[AHV]\d00|card)|单卡|一张"
)
_STAGE = re.compile(r"(?i)zero[-_ ]?(?:stage[-_ ]?)?([123])|ds_z([123])|[\"']stage[\"']: ?([123])")
_OFFLOADED = re.compile(r"(?i)z(?:ero)?[-_ ]?[123][-_ ](?:cpu[-_ ])?offload|offload_optimizer")
# In 10^9 bytes, of cards that are sold with one size.
_CARDS: Mapping[str, int] = {
    "H200": 141, "H100": 80, "H800": 80, "A800": 80, "A6000": 48, "L40S": 48, "L40": 48, "A40": 48,
    "A10G": 24, "A10": 24, "L4": 24, "4090": 24, "3090": 24, "5090": 32, "B200": 180,
    "MI300X": 192, "T4": 16,
}  # fmt: skip
_USUAL_BYTES = 80 * _GB  # of a large card, where none is named
_SOLD_IN_SIZES: Mapping[str, int] = {"A100": 80, "V100": 32, "H20": 141}  # the largest
_SIZES = {11, 12, 40, 64, 96, *_CARDS.values()}
_SIZE = re.compile(
    r"(?:(?i:[AHV])\d00\w{0,4}|GPU|card|VRAM|显存)\W{0,3}(?:\w{1,6}\W{1,2})?(\d{2,3})(?:\.\d+)?"
    r" ?G(?:i?B)?\b|Max memory: (\d{2,3})\.\d+ GB"
    r"|(?<![\d.])(\d{2,3}) ?G(?:i?B)?\W{0,2}(?:of |per |的)?"
    r"(?:VRAM|显存|[Gg]raphics|GPU|cards?\b|[AHV]\d00)"
    r"|[*x\u00d7] ?(\d{2,3}) ?GB?\b"
)
# Of a size behind it, which is what the run holds.
_IN_USE = re.compile(
    r"(?i)(?:\boccup\w+|\b(?:use[sd]?|using|takes?|consum\w+|peak\w*)|占用?)[^.\n]{0,12}$"
)


class States(NamedTuple):
    """Holds how large the states of a run are. Sizes in bytes."""

    billions: float  # of parameters; 0 if the text does not show them
    is_full: bool
    num_ranks: int
    stage: int
    weight_bytes: float  # of one parameter, where only an adapter is trained
    card_bytes: int | None
    most_bytes: int | None  # of a card of that name, the largest that is sold
    is_offloaded: bool
    is_deepspeed: bool  # it keeps a float32 copy of all that is trained
    is_assumed: bool  # whether the text shows neither full training nor an adapter

    def count_bytes(self, moments: int = 8) -> int:
        """Return the bytes of one card, with so many for the optimizer's moments of a parameter."""
        each = 8 + moments if self.is_full else self.weight_bytes
        if self.is_full:
            divided = (0, 4 + moments, 6 + moments, each)[self.stage]
        else:
            divided = each if self.stage == 3 else 0
        whole = each - divided
        return int(self.billions * _GB * (whole + divided / self.num_ranks))

    @property
    def room_bytes(self) -> int:
        """Return the memory of a card, of a large one if the text does not show which it is."""
        return self.card_bytes or self.most_bytes or _USUAL_BYTES

    @property
    def are_too_large(self) -> bool:
        """Return whether they fill the card, even if all of them are in 16 bits."""
        least = self.count_bytes() / (2 if self.is_full and not self.stage else 1)
        return least > 0.93 * self.room_bytes and not self.is_offloaded

    @property
    def crowd(self) -> bool:
        """Return whether DeepSpeed's states leave little room that sharding would give back."""
        is_full_card = self.card_bytes is not None and self.count_bytes() > 0.75 * self.card_bytes
        return is_full_card and self.could_be_sharded and self.is_deepspeed

    @property
    def could_be_sharded(self) -> bool:
        """Return whether each of several ranks keeps states that ZeRO-3 and FSDP divide."""
        return self.is_full and self.num_ranks > 1 and self.stage < 3

    def describe(self) -> Said | str:
        """Write the equation; empty if a number is missing."""
        if not self.billions:
            return ""
        what, each = "the frozen weights", f"{self.weight_bytes:g} bytes"
        if self.is_full:
            what, each = "weights, gradients and Adam's states", "16 bytes"
        room = ", of {capacity_bytes}" if self.card_bytes else ""
        if self.most_bytes and not self.card_bytes:
            room = ", of {capacity_bytes} at most"
        if_so = "If all weights are trained: " if self.is_assumed else ""
        if self.is_full and self.stage in (1, 2):
            share = f", of which ZeRO-{self.stage} divides a part among {self.num_ranks} ranks"
        else:
            share = f" / {self.num_ranks} ranks" if self.stage == 3 and self.num_ranks > 1 else ""
        return say(
            f"{if_so}{self.billions:g} billion parameters x {each}{share} = {{state_bytes}} a card"
            f" for {what}{room}.",
            state_bytes=self.count_bytes(),
            capacity_bytes=self.card_bytes or self.most_bytes,
        )


def read_states(facts: TextFacts) -> States | None:
    """Read a model's size and how it is trained; None if the text names several, or no method."""
    settings, text = facts.settings, facts.whole.translate(_ASCII)
    named = _BILLIONS.findall(settings.model) or sorted(set(_BILLIONS.findall(text)))
    if counted := _COUNTED.search(text):
        named = [f"{int(counted[1].replace(',', '')) / _GB:.1f}"]
    is_full, is_adapter = bool(_FULL.search(text)), bool(_ADAPTER.search(text))
    explicit = settings.value(
        "finetuning_type|train_type|tuner_type|sft_type|adapter", "full|q?lora"
    )
    if explicit:
        is_full, is_adapter = explicit == "full", explicit != "full"
    if IN_4_BITS.search(text):  # such weights cannot be trained themselves
        is_full, is_adapter = False, True
    is_assumed = not (is_full or is_adapter) and _NOT_FULL.search(text) is None
    is_assumed = is_assumed and facts.asked_bytes is None and _may_be_full(facts)
    num_ranks, stage = _count_ranks(text), _read_stage(text)
    if not is_adapter and settings.names_model and _NOT_FULL.search(text) is None:
        is_full, is_assumed = True, False  # a command would name an adapter
    if len(named) > 1 or is_full == (is_adapter or is_assumed):
        return None
    found = States(
        billions=float(named[0]) if named else 0,
        is_full=is_full or is_assumed,
        num_ranks=num_ranks,
        stage=stage,
        weight_bytes=FOUR_BIT_BYTES if IN_4_BITS.search(text) else 2,
        card_bytes=facts.total_bytes or _read_card(text),
        most_bytes=_find_card(text, _SOLD_IN_SIZES),
        is_offloaded=bool(_OFFLOADED.search(text)),
        is_deepspeed="deepspeed" in text.casefold(),
        is_assumed=is_assumed,
    )
    is_known = not stage or num_ranks > 1 or _ONE_CARD.search(text) is not None
    return None if is_assumed and not (found.are_too_large and is_known) else found


def _may_be_full(facts: TextFacts) -> bool:
    """Return whether a text reports a training that failed, and no method of it."""
    is_question = ASKS_NEED.search(facts.oom.text) is not None
    return not is_question and bool(facts.says(_TRAINS)) and not facts.says(_IS_ELSE)


def describe_need(facts: TextFacts) -> Said:
    """State what each method takes of all cards together, for the text's size or a billion."""
    text = facts.whole.translate(_ASCII)
    named = _BILLIONS.findall(text)
    billions = float(named[0]) if named else 1
    total = {f"{name}_bytes": int(billions * _GB * each) for name, each in _METHODS.items()}
    num_cards, card_bytes = _count_ranks(text), facts.total_bytes or _read_card(text)
    verdict = ""
    if named and card_bytes and card_bytes // _GB in _SIZES:
        room = ROOM * num_cards * card_bytes
        fits = [name for name in _METHODS if total[f"{name}_bytes"] < room]
        verdict = f" {num_cards} x {{card_bytes}}: {_judge(fits)}"
    return say(
        "Full training with Adam takes 16 bytes a parameter (4 weight, 4 gradient, 8 Adam), LoRA 2"
        f" and QLoRA {FOUR_BIT_BYTES}: for {f'{billions:g} billion' if named else 'each billion'}"
        " {full_bytes}, {lora_bytes} and {qlora_bytes}. ZeRO-3 and FSDP divide that among the"
        f" cards; activations and logits come on top.{verdict}",
        **total,
        card_bytes=card_bytes,
    )


def _judge(fits: list[str]) -> str:
    if not fits:
        return "none of them fits without offload."
    lacks = [_SPOKEN[name] for name in _METHODS if name not in fits]
    said = f"room for {' and '.join(_SPOKEN[name] for name in fits)}"
    return f"{said}, not for {' or '.join(lacks)}." if lacks else f"{said}."


def copies_weights(facts: TextFacts) -> bool:
    """Return whether a text without a traceback has several ranks that each keep all weights."""
    text = facts.whole.translate(_ASCII)
    is_named = not facts.frames and re.search("(?i)zero|deepspeed|ddp", text) is not None
    return is_named and _count_ranks(text) > 1 and _read_stage(text) < 3


def _read_stage(text: str) -> int:
    if found := _STAGE.search(text):
        return int(next(filter(None, found.groups())))
    return 3 if re.search("(?i)fsdp", text) else 0  # FSDP divides as ZeRO-3 does


def _count_ranks(text: str) -> int:
    if found := _NUM_CARDS.search(text):
        return max(1, int(next(filter(None, found.groups()))))
    if listed := re.search(r"CUDA_VISIBLE_DEVICES=[\"']?(\d+(?:,\d+)*)", text):
        return listed[1].count(",") + 1
    if written := re.search(rf"([{''.join(_NUMERALS)}])[张卡块]", text):
        return _NUMERALS[written[1]]
    return 1


def _read_card(text: str) -> int | None:
    for found in _SIZE.finditer(text):
        if not _IN_USE.search(text[: found.start()]):
            return int(next(filter(None, found.groups()))) * _GB
    return _find_card(text, _CARDS)


def _find_card(text: str, cards: Mapping[str, int]) -> int | None:
    named = {size for name, size in cards.items() if re.search(rf"(?ia:(?<!\w){name}(?!\w))", text)}
    return named.pop() * _GB if len(named) == 1 else None
