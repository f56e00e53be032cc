"""Judges which names stand for a secret, and which letters and digits are random.

hub_token, apiKey, db-password   a secret, whatever the text
token, wandb.key, auth           a secret, unless it is a number, or written like <pad>
revision, run_id                 made by a program, and public
max_tokens, pad_token, key_padding, label_key, password_file    none
"""

import re
from enum import Enum, auto

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SURE = re.compile(
    r"(?:^|_)(?:[a-z]*passw(?:or)?d|pass_?phrase|passcode|[a-z]*secret|credential|cred"
    r"|authorization|cookie"
    r"|(?:x_)?(?:api|access|private|account|signing|encryption|subscription|license|ssh|wandb)_?key"
    r"|(?:api|access|auth|bearer|bot|hf|hub|huggingface|refresh|session|github|gitlab|wandb)_?token"
    r")s?(?:_|$)"
)
_LIKELY = ("token", "key", "auth", "pass", "pwd", "sig", "signature")
# Before `token` and `key`: a piece of text, a bound of how many, or a column of the data.
_OF_TEXT = re.compile(
    r"pad|eos|bos|unk|sep|cls|mask|special|image|video|audio|vision|boi|eoi|start|end|stop|begin"
    r"|new|max|min|num|total|per|budget|prompt|completion|input|output|text|word|sub|target"
    r"|source|response|think|thinking|tool|language|lang|prefix|suffix|middle|decoder|role"
    r"|assistant|virtual|label|chosen|rejected|messages?|question|answer|fn|solution|truth|sort"
    r"|group|metric|dataset|data|column|row|primary|foreign|public|index|cache|state|query|padding"
    r"|attention|map|dict|instruction|content|history|system|feature|field|loss"
)
# At the end of a name: it tells something about the secret.
_ABOUT = re.compile(
    r"file|path|dir|folder|name|env|var|variable|type|length|len|size|count|prefix|suffix|column"
    r"|field|padding|mask|class|budget|second|metric"
)
# At the end of a name: a program made it, and it is public.
_PUBLIC = re.compile(
    r"revision|commit|rev|ref|sha|hash|digest|checksum|fingerprint|ids?|uid|uuid|version|tags?"
    r"|branch|name|dir|path|file|folder|group|project|experiment"
)
_SWITCH = re.compile(r"|true|false|yes|no|none|null|auto|\(hidden\)", re.IGNORECASE)
_NO_TOKEN = re.compile(
    r"[-+]?[\d_,]*\.?\d+(?:[eE][-+]?\d+)?[kKmM]?|<[^<>,]{1,40}>|\[[A-Z_]{2,20}\]|[a-z]+(?:_[a-z]+)+"
)

_HEXADECIMAL = re.compile(r"(?=.*[0-9])(?=.*[a-fA-F])(?:[0-9a-f]+|[0-9A-F]+)")
_CLASSES = ("[a-z]", "[A-Z]", "[0-9]")
_CHUNK = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|[0-9]+")


class Kind(Enum):
    """Classifies a name by the text below it."""

    PLAIN = auto()
    PUBLIC = auto()
    LIKELY = auto()
    SURE = auto()

    @property
    def is_secret(self) -> bool:
        return self in (Kind.LIKELY, Kind.SURE)

    def hides(self, text: str) -> bool:  # all that stands below the name
        if self is Kind.LIKELY and _NO_TOKEN.fullmatch(text):
            return False
        return self.is_secret and not _SWITCH.fullmatch(text)


def kind_of(name: str) -> Kind:
    """Judge a name, in any spelling: `hub_token`, `--hub-token`, `a.hubToken`, `HUB_TOKEN`."""
    words = [word.lower() for word in _WORD.findall(name[-100:])]
    if not words:
        return Kind.PLAIN
    *before, last = words
    if not _ABOUT.fullmatch(last) and _SURE.search("_".join(words)):
        return Kind.SURE
    is_of_text = before and _OF_TEXT.fullmatch(before[-1])
    if last.removesuffix("s") in _LIKELY and not is_of_text:
        return Kind.LIKELY
    return Kind.PUBLIC if _PUBLIC.fullmatch(last) else Kind.PLAIN


def is_drawn(text: str) -> bool:
    """Return whether letters and digits look random: they change kind at every second character.

    The bounds were found with names in transformers, torch and DeepSpeed. They miss 1 in 100 random
    texts of 32 characters or more, and 1 in 15 of 16 or more.
    """
    num, chunks = len(text), _CHUNK.findall(text)
    if _HEXADECIMAL.fullmatch(text):
        return num >= 32  # shorter ones are ids, and hashes that were cut
    if num < 16:
        return False
    mean = num / len(chunks)
    in_words = sum(len(chunk) for chunk in chunks if len(chunk) >= 4) / num
    has_small, has_capital, has_digit = (bool(re.search(each, text)) for each in _CLASSES)
    if has_small and has_capital:
        if num >= 32:
            return mean < 3
        return has_digit and mean < 3 and in_words < (0.6 if num >= 24 else 0.5)
    return has_digit and (has_small or has_capital) and num >= 24 and mean < 3.5
