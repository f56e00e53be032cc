"""Causes that follow from settings: states, logits, pictures, lengths, and a cut command."""

import re
from dataclasses import replace

from trainer_plugins import advice
from trainer_plugins.advice.version_faults import find_fault
from trainer_plugins.explain.answer import Cause, Certainty
from trainer_plugins.explain.shared import cause, quote, say
from trainer_plugins.explain.text.causes.off_card import MERGES
from trainer_plugins.explain.text.followed import is_followed
from trainer_plugins.explain.text.solved import solve_logits
from trainer_plugins.explain.text.states import describe_need, read_states
from trainer_plugins.explain.text.text_facts import TextFacts
from trainer_plugins.explain.text.told import ASKS_NEED
from trainer_plugins.units import GIB

# A shell ends a command at a comment, also between lines that a backslash joins.
_CUT = re.compile(r"\\[ \t]*\n\s*(#[^\n]*)\n\s*([^\s#][^\n\\]*)")
_PIXELS = re.compile(
    r"(?i)(?<![a-z])(?:image_|video_)?max_pixels?[\"']?[ =:]{1,3}[\"']?(\d{4,9})\b"
)
FRAMES = re.compile(
    r"(?i)(?P<is_set>(?:--)?[a-z_]*(?:n_?frames|max_frames|num_frames)[\"']?[ =:]{1,3}[\"']?)"
    r"(?P<frames>\d{1,5})\b"
)
_SEES = re.compile(r"(?i)VL-|pixel|(?<!docker )images?(?![a-z])|图片|图像|图文")
_ONLY_TEXT = re.compile(r"(?is)(?!.*(?:pixel|images?(?![a-z])|图)).*\bgrpo\b")
# Not of a flag or a path, nor "video memory".
SEES_VIDEOS = r"(?i)(?<![\w/-])videos?(?![\w-]| ?(?:memory|v?ram|card|processor))|视频"
_PATCH = 28  # pixels of a token's side: patches of 14, two by two (Qwen2-VL, Qwen2.5-VL)
_UNLIMITED_PIXELS = 12_845_056  # of the processor of Qwen2-VL and Qwen2.5-VL without a setting
_MANY_PIXELS, _MANY_FRAMES = 2_000_000, 32
_SPEAKS_OF_OOM = (
    r"(?i)(?<![a-z])OOM|out.?of.?(?:\w+.)?memory|[显内]存[^。\n]{0,8}[不爆溢满炸超]"
    r"|[爆炸]显?存|crash|killed"
)
_OUTLIER = 1.5
_LARGE_LOGITS, _NEEDLE_BYTES = 7 * GIB, GIB // 4
# With a chosen and a rejected answer for each row.
_PAIRS = re.compile(r"(?i)\b(?:dpo|orpo|cpo|simpo)\b")
_REST = r"(?:[^.!?。\n]|\.(?=\d)){0,100}"  # of a sentence
FITS_WITHOUT = re.compile(
    rf"(?i){_REST}(?:\b(?:fine|works?|worked|fits?|succeeds?|no OOM)\b[^.!?\n]{{0,24}}?"
    r"\b(?:when|if|with|once|after)\b[^.!?\n]{0,60}?"
    r"\b(?:off|disabl\w+|commented out|removed?|unset|without)\b"
    rf"|\bOOM\b[^.!?\n]{{0,40}}\bif I use \w+ it (?:runs|works)(?: fine)?"
    r"|\b(?:when|if|once|after)\b[^.!?\n]{0,30}\b(?:disabl\w+|comment\w* out|remov\w+|unset)\b"
    r"[^.!?\n]{0,40}\b(?:fine|works?|fits?|no OOM)\b"
    rf"|不[加用设]\W?\w+_\w+[^。\n]{{0,60}}(?:正常|可以){_REST}){_REST}"
)
EMBEDDINGS = re.compile(r"[\"'](embed_tokens|lm_head)[\"']")
_VERSION = r"v?\d+\.\d+(?:\.\d+)?"
_OLDER = re.compile(
    rf"(?i){_REST}(?:"
    r"\b(?:previous|older|earlier|former|last) (?:version|release|nightly|build)|\bdowngrad\w+"
    r"|\b(?:after|since|when I) (?:the )?(?:upgrad|updat)\w+|\bregression\b"
    rf"|\b(?:work\w*|run\w*|fine|fits?)\b[^.!?\n]{{0,30}}{_VERSION}[^!?\n]{{0,40}}\bOOM"
    rf"|\bcan train\b{_REST}\bwhereas|(?:without any issues?|fine|worked) [^.!?\n]{{0,24}}\bago"
    r"|\buntil [^.!?\n]{0,20}\bago\b"
    r"|旧版|老版本|之前的?版本|最新版[^。\n]{0,40}(?:却|会)|升级[^。\n]{0,20}后|切换到[^。\n]{0,20}正常|一月份"
    rf"){_REST}"
)


def speaks_of_oom(facts: TextFacts) -> bool:
    """Return whether the text reports an error rather than asks a question."""
    return facts.says(_SPEAKS_OF_OOM) is not None


def judge_need(facts: TextFacts) -> Cause | None:
    """The text asks how much a run takes."""
    if facts.frames or not ASKS_NEED.search(facts.oom.text):
        return None
    found = read_states(facts)
    return cause(
        "capacity",
        (found.describe() if found else "") or describe_need(facts),
        summary="a question about the memory that a run needs",
        grade="possible",
        doubt="The batch and its length decide the rest: `trainer-plugins plan` counts it",
    )


def states(facts: TextFacts) -> Cause | None:
    """Weights, gradients and optimizer states alone fill the card."""
    found = read_states(facts)
    if found is None or facts.frames or facts.oom.source != "allocator":
        return None
    if not found.are_too_large and not found.crowd:
        return None
    return cause(
        "optimizer-state" if found.is_full else "load-too-large",
        found.describe(),
        grade="possible" if found.is_assumed or not found.card_bytes else None,
        summary="weights, gradients and optimizer states alone fill the card, at any batch size"
        if found.is_full
        else "",
        doubt="The numbers are the text's, and the ranks, the card and the method are read from its"
        " words: `trainer-plugins plan` with them counts what comes on top",
    )


def judge_size(facts: TextFacts) -> Cause | None:
    """The text shows no error, but what it trains is larger than its card."""
    found, is_merge = read_states(facts), facts.says(rf"{MERGES}|(?i:\bexport(?! \w+=)|合并)")
    if found is None or not found.are_too_large or is_merge:
        return None
    judged = states(facts)
    return replace(judged, grade="possible") if judged else None


def embeddings(facts: TextFacts) -> Cause | None:
    """An adapter trains the embedding and the head in full, as large as they are."""
    model, count = facts.model, len(set(EMBEDDINGS.findall(facts.whole)))
    if facts.oom.source != "allocator" or not trains_embeddings(facts):
        return None
    each = count * (model.vocabulary * model.hidden if model else 0)
    return cause(
        "optimizer-state",
        f"The text has {' and '.join(sorted(set(EMBEDDINGS.findall(facts.whole))))} beside the"
        " adapter.",
        say(
            f"{count} x {{num_words:,}} words x {{hidden:,}} x 16 bytes = {{full_bytes}}: weights,"
            f" gradients and Adam's states of {'both' if count > 1 else 'it'} in float32.",
            num_words=model.vocabulary,
            hidden=model.hidden,
            full_bytes=16 * each,
        )
        if model
        else "",
        summary="the adapter's settings train the embedding or the head in full",
        doubt="The text does not show what else fills the card: see whether it fits without them",
    )


def trains_embeddings(facts: TextFacts) -> bool:
    """Return whether PEFT, or Unsloth for its targets, trains embeddings and heads in full."""
    names = facts.says(r"modules_to_save|(?is:unsloth.{0,2000}target_modules)")
    return bool(names and EMBEDDINGS.search(facts.whole))


def cut_command(facts: TextFacts) -> Cause | None:
    """A comment inside a command ends it, and its other flags are not passed."""
    found = _CUT.search(facts.whole)
    if found is None:
        return None
    return cause(
        "cut-command",
        f"This line stands between lines that a backslash joins: {quote(found[1], 80)}",
        f"The shell does not pass what follows it, beginning with {quote(found[2].strip(), 60)}",
    )


def pictures(facts: TextFacts) -> Cause | None:
    """The pictures or videos of a text have far more tokens than a sample's text."""
    text, is_card = facts.whole, facts.oom.source == "allocator"
    if facts.frames or facts.asked_bytes or not is_card:
        return None
    pixels = max(map(int, _PIXELS.findall(text)), default=0)
    has_videos = re.search(SEES_VIDEOS, text)
    frames = max((int(one["frames"]) for one in FRAMES.finditer(text)), default=0)
    if frames >= _MANY_FRAMES or (has_videos and not frames):
        return _cause_of_frames(frames, pixels)
    if pixels >= _MANY_PIXELS:
        return _cause_of_pixels("The text allows", pixels, "likely")
    if not _SEES.search(text) or not re.search(r"(?i)qwen", text) or _ONLY_TEXT.match(text):
        return None
    if pixels or re.search(r"(?i)max_slice|resize|max_token_num", text):
        return None
    if re.search(r"(?i)max_pixels", text):
        return cause(
            "image-size",
            "The text sets max_pixels, and shows neither its value nor whether it takes effect.",
            grade="possible",
            doubt="image_grid_thw of one sample shows whether the limit is in force: its tokens are"
            " t x h x w / 4. The processor that makes the batch has to get it",
        )
    who = "The text sets no limit, and Qwen-VL's processor allows"
    return _cause_of_pixels(who, _UNLIMITED_PIXELS, "possible")


def _cause_of_frames(frames: int, pixels: int) -> Cause:
    words = "The text sets no number of frames: a sample has as many as its video is long."
    if frames:
        words = "The text allows {num_frames} frames of a video in a sample."
    if frames and pixels:
        words += (
            " If each may have {num_pixels:,} pixels, {num_frames} / 2 x {num_pixels:,} / 28 / 28"
            " = {num_tokens:,} tokens."
        )
    tokens = frames * pixels // (2 * _PATCH**2)
    return cause(
        "image-size",
        say(words, num_frames=frames, num_pixels=pixels, num_tokens=tokens) if frames else words,
        summary="the frames of a video produce too many tokens",
        grade="possible",
        doubt="The text does not show the videos: print pixel_values.shape, or video_grid_thw, of"
        " the failing batch, and see whether its video is the longest",
    )


def _cause_of_pixels(who: str, pixels: int, grade: Certainty) -> Cause:
    return cause(
        "image-size",
        say(
            f"{who} {{num_pixels:,}} pixels a picture: {{num_pixels:,}} / 28 / 28 ="
            " {num_tokens:,} tokens.",
            num_pixels=pixels,
            num_tokens=pixels // _PATCH**2,
        ),
        grade=grade,
        doubt="The text does not show the sizes of the pictures: print pixel_values.shape of the"
        " batch that fails",
    )


def logits(facts: TextFacts) -> Cause | None:
    """The size that was refused, or the settings alone, make logits of a good part of a card."""
    settings, model = facts.settings, facts.model
    if facts.frames or model is None or facts.oom.source != "allocator":
        return None
    if is_followed(advice.LIGER, facts):
        return None  # it never holds them all
    if max(map(int, _PIXELS.findall(facts.whole)), default=0) > _PATCH**2 * (settings.length or 0):
        return None  # a picture has more tokens than that
    rows = (settings.rows or 1) * (2 if _PAIRS.search(facts.whole) else 1)
    num_bytes = rows * (settings.length or 0) * model.vocabulary * 4
    equation = solve_logits(facts) if (facts.asked_bytes or 0) >= _NEEDLE_BYTES else ""
    if not equation and num_bytes < _LARGE_LOGITS:
        return None
    return cause(
        "logits-loss",
        equation
        or say(
            "{num_rows} rows x {num_tokens:,} tokens x {num_words:,} words x 4 bytes ="
            " {logits_bytes}: one float32 copy of the logits. A loss makes two or three.",
            num_rows=rows,
            num_tokens=settings.length,
            num_words=model.vocabulary,
            logits_bytes=num_bytes,
        ),
        doubt="The text has no traceback: the line that failed shows whether it computes the loss",
    )


def outlier(facts: TextFacts) -> Cause | None:
    """The logits that were refused are of a sample that is longer than the limit."""
    model, length, asked = facts.model, facts.settings.length, facts.asked_bytes
    if facts.frames or model is None or length is None or asked is None:
        return None
    tokens = asked // (4 * model.vocabulary)
    if tokens < _OUTLIER * length * (facts.settings.rows or 1):
        return None
    return cause(
        "long-sample",
        facts.states(
            "{requested_bytes} = {num_tokens:,} tokens x {num_words:,} words x 4 bytes, if they are"
            " logits: {times} times the limit of {num_limit:,} tokens.",
            num_tokens=tokens,
            num_words=model.vocabulary,
            times=f"{tokens / length:.1f}",
            num_limit=length,
        ),
        summary="one sample is far longer than the limit of the text, which did not cut it",
        doubt="The text has no traceback: log the length of each batch, input_ids.shape, and see"
        " whether it fails at the same step again",
    )


def judge_comparison(facts: TextFacts) -> Cause | None:
    """The person has seen the same run fit without one setting, or with another version."""
    said = FITS_WITHOUT.search(facts.text) or _OLDER.search(facts.text)
    if facts.oom.source != "allocator" or said is None:
        return None
    return cause(
        "regression",
        f"The text says: {quote(said[0].strip())}",
        summary="your own test decides: what changed between the run that fits and this one",
        doubt="One of several changes may be meant: change one alone, and compare"
        " torch.cuda.max_memory_allocated() after ten steps of each",
    )


def judge_fault(facts: TextFacts) -> Cause | None:
    """The text names a version with a known fault, and the words of it."""
    found = find_fault(facts.whole)
    if found is None or facts.oom.source == "engine":
        return None
    fault, version = found
    return cause(
        "regression",
        f"The text names {fault.library} {version};"
        f" {fault.fixed or 'no version'} is the first without it ({fault.source}).",
        summary=f"a fault of {fault.library}: {fault.symptom}",
        doubt="The text does not show that this fault filled the memory: run it with the remedy,"
        " and compare the peaks",
    )
