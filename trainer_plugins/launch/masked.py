"""Masks what a name, an issuer's published form or random letters and digits show as a secret.

hub_token, apiKey, db-password   a secret, whatever the text
token, wandb.key, auth           a secret, unless it is a number, or written like <pad>
revision, run_id                 made by a program, and public
max_tokens, pad_token, key_padding, label_key, password_file    none
"""

import os
import re
from collections.abc import Iterable, Mapping
from enum import Enum, auto

from trainer_plugins.record.webhook import VARIABLE

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

    def hides(self, text: str) -> bool:
        """Return whether to hide this text, which is the undivided value below the name."""
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


HIDDEN = "(hidden)"

_LONGEST_TEXT = 2000
_DEEPEST = 12
_LEAST_NUMBER = 1000  # a smaller one is an index: label2id={"B-PASSWORD": 29}

# Published forms: Hugging Face, GitHub, GitLab, OpenAI and Anthropic, Slack, AWS, Google, Weights &
# Biases (86 characters since 0.22.3: wandb/wandb#10687), NVIDIA; JSON Web Tokens (RFC 7519, also
# Neptune's); keys in PEM (RFC 7468); an Authorization (RFC 7617, 6750).
# Words after such a prefix are a name: hf_checkpoints, sk-learn-baseline.
_FORMS = re.compile(
    r"-----BEGIN [A-Z ]+-----(?s:.*?)(?:-----END [A-Z ]+-----|\Z)"
    r"|\beyJ[\w-]{10,}(?:\.[\w-]*)*"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{12,}|\bwandb_v1_\w{16,}"
    r"|\b(?:hf_|api_org_|gh[oprsu]_|github_pat_|sk-|gl[a-z]{2,5}-|xox[abeprs]-|ya29\.|AIza|nvapi-)"
    r"(?=[\w-]*?(?:[0-9][A-Za-z]|[a-z][0-9A-Z]|[A-Za-z0-9]{24}))[\w-]{10,}"
    r"|(?<=\bBearer )[^\s\"',]+|(?<=\bBasic )(?=[a-z+/]*[A-Z0-9=])[\w+/]{6,}={0,2}"
)
_ASSIGNED = re.compile(r"(-*\+{0,2}[\w.@/-]+)=(.*)", re.DOTALL)
_FLAG = re.compile(r"--?[A-Za-z][\w.-]*(?:=.*)?", re.DOTALL)
# A name, and what stands between it and its value: `"a": `, `a=`, `['a'] = `, `a: str = `, `--a `.
_NAMED = re.compile(
    r"(?<![\w.-])(?:(--[\w.-]+)\s{1,3}(?=[\w\"'{\[])|([\w.-]+)(?:\\*[\"']\]?)?\s{0,3}"
    r"(?::\s?(?:str|Optional\[str\])(?:\s?\|\s?None)?\s?=(?!=)|=>|:=|[:=](?![:=]|//))\s{0,3})"
)
_QUOTE = re.compile(r"[fFrRbBuU]{0,2}(\\*(?:\"\"\"|'''|[\"']))")
_BRACKET = re.compile(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|[\[{]|[\]}]")
_BARE = re.compile(r"[^\s,;&|}\])\"']+")
_LINE = re.compile(r"[^\"'\n]+")
_CODE = re.compile(r"[A-Za-z_]\w*[.(\[].*|str|int|bytes|object")
_URL = re.compile(r"(?<=://)[^\s\"'<>]+")
# `me:password@proxy:8080`, and no `image:tag@sha256:...`.
_NO_SCHEME = re.compile(
    r"(?<![\w/@.:-])[\w.+-]+:[^\s/@\"':]+(?=@(?!sha\d)[\w-]+(?:\.[\w-]+)*(?:\.[a-z]{2,}|:\d))"
)
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+/-]{15,}={0,2}")
_ATOM = re.compile(r"[A-Za-z0-9]{16,}")
_HASH = re.compile(r"[0-9a-f]{32,}")
_BEFORE_HASH = re.compile(
    r"(?:[/@]|(?:sha\d*|md5|commit|revision|rev|ref|hash|digest|id|tree|version)\W{1,4})$"
)


def masked_text(text: str) -> str:
    """Hide the secrets in a line of code or of an error, the webhook's URL, and the home folder.

    >>> masked_text("login('hf_0123456789abcdef'), https://me:pass@host/x")
    "login('(hidden)'), https://(hidden)@host/x"
    """
    return _masked(text, Kind.PLAIN, is_code=True)


def masked_command(command: Iterable[str]) -> tuple[str, ...]:
    """Hide the secrets of a command line.

    >>> masked_command(["train.py", "--hub_token", "abc", "--lr=1", "++args.wandb_key=abc"])
    ('train.py', '--hub_token', '(hidden)', '--lr=1', '++args.wandb_key=(hidden)')
    """
    shown: list[str] = []
    flag, num_values = "", 0
    for argument in command:
        if _is_value(argument, flag):
            is_plural = flag.rstrip("0123456789_").lower().endswith("s")
            kind = kind_of(flag) if not num_values or is_plural else Kind.PLAIN
            shown.append(_masked(argument, kind))
            num_values += 1
        else:
            shown.append(_masked(argument, Kind.PLAIN))
            flag, num_values = argument if "=" not in argument else "", 0
    return tuple(shown)


def masked(value: object, kind: Kind = Kind.PLAIN, depth: int = 0) -> object:
    """Return a value as JSON has it (else as text), without secrets; `kind` is that of its name.

    >>> masked({"hub_token": "abc", "seed": 1, "kwargs": {"api_keys": ["x"], "path": "y"}})
    {'hub_token': '(hidden)', 'seed': 1, 'kwargs': {'api_keys': ['(hidden)'], 'path': 'y'}}
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return HIDDEN if kind is Kind.SURE and abs(value) >= _LEAST_NUMBER else value
    if depth > _DEEPEST:
        return "..."
    if isinstance(value, Enum):
        return masked(value.value, kind, depth + 1)
    if isinstance(value, Mapping):
        return masked_fields(value, kind, depth)
    if isinstance(value, list | tuple | set | frozenset):
        if not kind.is_secret and all(isinstance(each, str) for each in value):
            return list(masked_command(value))  # a list of words may be one
        return [masked(each, kind, depth + 1) for each in value]
    return _masked(str(value), kind)


def masked_fields(
    fields: Mapping[str, object], kind: Kind = Kind.PLAIN, depth: int = 0
) -> dict[str, object]:
    """Return a mapping as JSON has it, without secrets; see `masked`."""
    kinds = {name: kind if kind.is_secret else kind_of(str(name)) for name in fields}
    return {
        masked_text(str(name)): masked(value, kinds[name], depth + 1)
        for name, value in fields.items()
    }


def _is_value(argument: str, flag: str) -> bool:
    """Return whether an argument is a value of the flag before it: some values begin with `-`."""
    if not flag.startswith("-") or not argument.startswith("-"):
        return flag.startswith("-")
    if not kind_of(flag).is_secret:
        return False
    looks_like_flag = _FLAG.fullmatch(argument) and not is_drawn(argument.strip("-"))
    is_short = not argument.startswith("--") and len(argument) <= 3
    return not looks_like_flag or not (argument.startswith("--") or is_short)


def _masked(text: str, kind: Kind, is_code: bool = False) -> str:
    if kind.hides(text):
        return HIDDEN
    if webhook := os.environ.get(VARIABLE, "").strip():
        text = text.replace(webhook, HIDDEN)
    home = os.path.expanduser("~")
    if len(home) > 1:
        text = text.replace(home + os.sep, "~" + os.sep)
    text = text[:_LONGEST_TEXT]
    name = ""
    if not is_code and (whole := _ASSIGNED.fullmatch(text)):
        name, text = f"{_without_values(whole[1], Kind.PLAIN)}=", whole[2]
        kind = kind_of(whole[1])
    return name + (HIDDEN if kind.hides(text) else _without_values(text, kind, is_code))


def _without_values(text: str, kind: Kind, is_code: bool = False) -> str:
    text = _NO_SCHEME.sub(HIDDEN, _URL.sub(_without_user, text))
    text = _FORMS.sub(HIDDEN, _without_named(text, is_code))
    return text if kind is Kind.PUBLIC else _RUN.sub(_without_drawn, text)


def _without_user(found: re.Match[str]) -> str:
    """Hide user and password of a URL, which may have any characters in them."""
    rest = found[0]
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    user, at, host = authority.rpartition("@")
    end = len(user) if at else -1
    if not at:
        _, _, port = authority.partition(":")
        if port and not port.isdigit() and not authority.startswith("["):
            end = rest.rfind("@")
    elif ":" not in user:
        is_web = found.string[: found.start()].endswith(("http://", "https://"))
        end = end if is_web and user != "git" else -1
    elif not re.search(r"\.|^localhost|:\d+$", host):
        end = rest.rfind("@")
    return rest if end < 0 else HIDDEN + rest[end:]


def _without_named(text: str, is_code: bool) -> str:
    """Hide the values that stand in a text behind a name: in JSON, Python, YAML, Hydra, headers."""
    shown, done = [], 0
    for found in _NAMED.finditer(text):
        name = found[1] or found[2]
        kind = kind_of(name)
        if found.end() < done or not kind.is_secret:
            continue
        start, end = _value_at(text, found.end(), kind, name, is_code)
        if end > start:
            shown += [text[done:start], HIDDEN]
            done = end
    return "".join([*shown, text[done:]])


def _value_at(text: str, start: int, kind: Kind, name: str, is_code: bool) -> tuple[int, int]:
    """Return from where to where a value is hidden; if it is not, both are equal."""
    if quoted := _QUOTE.match(text, start):
        start, quote = quoted.end(), quoted[1]
        end = text.find(quote, start)
        while end > 0 and text[end - 1] == "\\":
            end = text.find(quote, end + 1)
        end = len(text) if end < 0 else end
        # Behind a name the quote may also be the end of a text: `print("token: ", x)`.
        is_shown = is_code and text[start : start + 1] in (",", ")", "")
    elif text[start : start + 1] in ("[", "{"):
        end = _closed(text, start)
        is_shown = is_code and (kind is Kind.LIKELY or not re.search("[\"']", text[start:end]))
    else:
        is_header = name.lower().endswith(("authorization", "cookie"))
        bare = (_LINE if is_header else _BARE).match(text, start)
        end, word = (start, "") if bare is None else (bare.end(), bare[0])
        is_shown = is_code and bool(
            kind is Kind.LIKELY or _CODE.match(word) or kind_of(word).is_secret
        )
    return (start, start) if is_shown or not kind.hides(text[start:end]) else (start, end)


def _closed(text: str, start: int) -> int:
    """Return the end of the brackets that open here; quoted brackets do not count."""
    depth = 0
    for found in _BRACKET.finditer(text, start):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return found.end()
    return len(text)


def _without_drawn(found: re.Match[str]) -> str:
    """Hide random letters and digits, but no hash that is named as one, or in a path."""
    run, before = found[0], found.string[: found.start()]
    letters = re.sub(r"[^A-Za-z0-9]", "", run)
    num_others = len(re.sub(r"[A-Za-z0-9+]", "", run))
    is_one = len(run) >= 32 and num_others <= len(run) / 10
    if is_one and not _HASH.search(run) and is_drawn(letters):
        return HIDDEN

    def hidden(atom: re.Match[str]) -> str:
        is_hash = _HASH.fullmatch(atom[0]) and _BEFORE_HASH.search(before + run[: atom.start()])
        return HIDDEN if is_drawn(atom[0]) and not is_hash else atom[0]

    return _ATOM.sub(hidden, run)
