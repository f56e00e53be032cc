"""Decide which values of arguments and commands a record shows; of the others, only the name.

We write down numbers, switches, words and paths, under names that libraries declare or `_NAMES`
lists. In free text, such as an error, we hide everything that looks like a secret.
"""

import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from inspect import Parameter, signature

from trainer_plugins.printable import printable
from trainer_plugins.record.webhook import VARIABLE

HIDDEN = "(hidden)"

_LIBRARIES = ("transformers", "trl", "peft", "accelerate")
_LONGEST_TEXT, _DEEPEST = 2000, 12

# Arguments of scripts and launchers, and fields of nested settings, that no class declares.
_NAMES = (
    r"(?:base_)?model(?:_name|_name_or_path|_type)?|_name_or_path|architectures"
    r"|modules_to_not_convert"
    r"|(?:tokenizer|config|dataset)(?:_name|_file|_config|_split)?|(?:train|validation|test)_file"
    r"|(?:data|cache|nvme)_(?:path|dir)|template|stage|lr|epochs|(?:torch_)?dtype"
    r"|attn_implementation"
    r"|(?:(?:micro_)?batch|block)_size|(?:cutoff|sequence)_len|trainer_plugins|preset|capacity"
    r"|device"
    r"|(?:lora|bnb_4bit|num|max|load_in|llm_int8|offload|use|fsdp|rope|quant|quantization)_\w+"
    r"|layer_types|hidden_act|(?:(?:task|peft|finetuning)_)?type|(?:machine|node)_rank"
    r"|(?:main_process|master)_port|nnodes"
    r"|nproc_per_node|standalone|multi_gpu|mixed_precision|zero_stage|deepspeed_config_file"
    r"|CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS"
)
_SECRET = r"(?i)(?:token|key|secret|passw(?:or)?d|passphrase|auth|cookie|credential)(s?)$"
_NUMBER = r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?[kKmMgG]?"
_SWITCH = r"(?i)|true|false|yes|no|on|off|none|null|auto"
_PLAIN = r"[\w./~][\w./~+-]*(?::\d+)?(?:[, ][\w./~+-]+)*"
_OPTION = r"--[A-Za-z][\w.-]*|-[A-Za-z]{1,2}"
_ASSIGNED = r"(?s)([-+~]{0,2}[A-Za-z_][\w.@/-]*)=(.*)"
_PROGRAM = r"launch|.*/bin/[\w.-]+|.*\.(?:py|sh|ya?ml|json|toml)"

# Published formats: Hugging Face, GitHub, GitLab, OpenAI and Anthropic, Slack, AWS, Google, Weights
# & Biases, NVIDIA; JSON Web Tokens (RFC 7519); PEM keys (RFC 7468); Authorization (RFC 6750).
_FORMS = (
    r"-----BEGIN [A-Z ]+-----(?s:.*?)(?:-----END [A-Z ]+-----|\Z)|\beyJ[\w-]{10,}(?:\.[\w-]*)*"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{12,}|\bwandb_v1_\w{16,}|(?<=\bBearer )\S+|(?<=\bBasic )\S+"
    r"|\b(?:hf_|api_org_|gh[oprsu]_|github_pat_|sk-|gl[a-z]{2,5}-|xox[abeprs]-|ya29\.|AIza|nvapi-)"
    r"(?=[\w-]*?(?:[0-9][A-Za-z]|[a-z][0-9A-Z]|[A-Za-z0-9]{24}))[\w-]{10,}"
)
_USER = r"(?<=://)[^\s\"'<>]*(?=@)|(?<![\w/@.:-])[\w.+-]+:[^\s/@\"':]+(?=@[\w-]+[.:])"
_QUERY = r"(?<=\?)[\w.-]+=[^\s\"'<>]*"
_NAMED = (
    r"(?im)((?:token(?!s)|(?:api|access|account|private|[_-])_?key|secret|passw(?:or)?d|passphrase"
    r"|authorization"
    r"|credential)s?(?:\\*[\"']\]?)?\s{0,3}(?:=>|[:=](?!=))\s{0,3}(?:Bearer |Basic )?)"
    r"(?:(\\*[\"']).*?(?:\2|$)|[\[{].*|[^\s,;&)\]}]+)"
)
_ATOM = r"[A-Za-z0-9+]{16,}"
_CHUNK = r"[A-Z]?[a-z]+|[A-Z]+|[0-9]+"
_FEWEST_LETTERS_A_CHUNK = 3  # in names of transformers, torch and DeepSpeed


def mask_text(text: str) -> str:
    """Hide everything that looks like a secret in a line of code or an error, and the home folder.

    >>> mask_text("login('hf_0123456789abcdef', password='x'), https://me:pass@host/x")
    "login('(hidden)', password=(hidden)), https://(hidden)@host/x"
    """
    if webhook := os.environ.get(VARIABLE, "").strip():
        text = text.replace(webhook, HIDDEN)
    text = re.sub(_NAMED, lambda found: found[1] + HIDDEN, _shorten_home(text)[:_LONGEST_TEXT])
    for pattern in (_USER, _QUERY, _FORMS):
        text = re.sub(pattern, HIDDEN, text)
    return re.sub(_ATOM, lambda found: HIDDEN if _is_drawn(found[0]) else found[0], text)


def mask_error(error: BaseException) -> str:
    """Return an error's class and the first line of its message, without secrets."""
    lines = mask_text(str(error)).strip().splitlines() or [""]
    return printable(f"{type(error).__name__}: {lines[0][:300]}".rstrip(": "))


def mask_command(command: Iterable[str]) -> tuple[str, ...]:
    """Hide all of a command line except programs, names of options, and harmless values.

    >>> mask_command(["train.py", "--keys.api", "abc", "--lr=1", "++args.wandb_key=abc"])
    ('train.py', '--keys.api', '(hidden)', '--lr=1', '++args.wandb_key=(hidden)')
    """
    declared = _arguments()
    shown: list[str] = []
    option, num_values, before = "", 0, ""
    for word in command:
        if before == "-c" or re.search(_SECRET, before):
            shown.append(HIDDEN)
        elif word == "--" or re.fullmatch(_OPTION, word):
            option, num_values = word, 0
            shown.append(mask_text(word))
        elif assigned := re.fullmatch(_ASSIGNED, word):
            shown.append(f"{mask_text(assigned[1])}={_value(assigned[1], assigned[2], declared)}")
        elif before == "-m" or not shown or re.fullmatch(_PROGRAM, word):
            shown.append(mask_text(word) if re.fullmatch(_PLAIN, word) else HIDDEN)
        else:
            shown.append(_value(option, word, declared, num_values))
            num_values += 1
        before = word
    return tuple(shown)


def list_declared(kind: type) -> dict[str, Parameter]:
    """Return the fields that libraries declare for a class of arguments or a config, by name."""
    found: dict[str, Parameter] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] in _LIBRARIES:
            found |= signature(base.__init__).parameters  # type: ignore[misc]
    return found


def mask_fields(
    fields: Mapping[str, object], known: Collection[str] | None = None, depth: int = 0
) -> dict[str, object]:
    """Return a mapping in JSON types, in which only `known` names may have words or numbers.

    Below them, and without `known`, any name may have numbers.

    >>> mask_fields({"hub_token": "abc", "seed": 1, "kwargs": {"model": "x", "mine": "y"}})
    {'hub_token': '(hidden)', 'seed': 1, 'kwargs': {'model': 'x', 'mine': '(hidden)'}}
    """
    shown: dict[str, object] = {}
    for name, value in fields.items():
        has_words = bool(re.fullmatch(_NAMES, str(name))) or name in (known or ())
        has_numbers = has_words or known is None or depth > 0
        if secret := re.search(_SECRET, str(name)):
            has_words, has_numbers = False, has_numbers and bool(secret[1])  # a number of tokens
        shown[mask_text(str(name))] = _mask(value, has_numbers, has_words, known, depth)
    return shown


def _mask(
    value: object, has_numbers: bool, has_words: bool, known: Collection[str] | None, depth: int
) -> object:
    if value is None or isinstance(value, bool) or (has_numbers and isinstance(value, int | float)):
        return value
    if depth > _DEEPEST:
        return "..."
    if isinstance(value, Mapping) and has_numbers:
        return mask_fields(value, known, depth + 1)
    if isinstance(value, list | tuple | set | frozenset):
        return [_mask(each, has_numbers, has_words, known, depth + 1) for each in value]
    return _word(str(value.value if isinstance(value, Enum) else value), has_numbers, has_words)


def _word(text: str, has_numbers: bool, has_words: bool) -> str:
    """Return a switch, a number, or a word or path that does not look like a secret."""
    if re.fullmatch(_SWITCH, text) or (has_numbers and re.fullmatch(_NUMBER, text)):
        return text
    shown = _shorten_home(text)
    return (
        shown if has_words and re.fullmatch(_PLAIN, text) and mask_text(text) == shown else HIDDEN
    )


def _value(
    name: str, text: str, declared: Mapping[str, Parameter], num_values_before: int = 0
) -> str:
    """Return a value of a command line; under a dotted name, as in Hydra, only numbers."""
    *groups, last = re.split(r"[.@/]", name.lstrip("-+~").replace("-", "_"))
    field = declared.get(last)
    is_known = bool((field or re.fullmatch(_NAMES, last)) and not re.search(_SECRET, last))
    kind = "list[str]" if last == "lora_target_modules" else str(field.annotation if field else str)
    is_shown = is_known and ("list" in kind or not num_values_before)
    return _word(text, is_shown, is_shown and not groups and bool(re.search(r"\bstr\b", kind)))


def _arguments() -> Mapping[str, Parameter]:
    """Return the fields of all TrainingArguments classes that this process has imported."""
    module = sys.modules.get("transformers.training_args")
    kinds: list[type] = [module.TrainingArguments] if module else []
    found: dict[str, Parameter] = {}
    for kind in kinds:
        kinds += kind.__subclasses__()
        found |= list_declared(kind)
    return found


def _shorten_home(text: str) -> str:
    home = os.path.expanduser("~")
    return text.replace(home + os.sep, "~" + os.sep) if len(home) > 1 else text


def _is_drawn(text: str) -> bool:
    """Return whether letters and digits look random: they change kind at every second character."""
    return len(text) < _FEWEST_LETTERS_A_CHUNK * len(re.findall(_CHUNK, text))
