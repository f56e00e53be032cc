"""What is written about a run: values that are known to be harmless, and of all others the name."""

import base64
import json
import random
import string

import pytest
from transformers import TrainingArguments

from trainer_plugins.launch.masked import list_declared, mask_command, mask_fields, mask_text

SECRET = "swordfish"
LETTERS = string.ascii_letters + string.digits
DRAW = random.Random()
"""The corpus is drawn: each test seeds it, so that it is the same each time."""


def drawn(num: int, letters: str = LETTERS) -> str:
    return "".join(DRAW.choices(letters, k=num))


# As their issuers make them: nothing but themselves says that they are secrets.
ISSUED = {
    "Hugging Face": lambda: f"hf_{drawn(34, string.ascii_letters)}",
    "W&B, until 2025": lambda: drawn(40, "0123456789abcdef"),
    "W&B, since": lambda: f"wandb_v1_{drawn(27)}_{drawn(49)}",
    "GitHub": lambda: f"gh{DRAW.choice('pousr')}_{drawn(36)}",
    "GitLab": lambda: f"glpat-{drawn(20, LETTERS + '-_')}",
    "OpenAI": lambda: f"sk-proj-{drawn(48, LETTERS + '-_')}",
    "AWS, id": lambda: f"AKIA{drawn(16, string.ascii_uppercase + '234567')}",
    "Google": lambda: f"AIza{drawn(35, LETTERS + '-_')}",
    "Slack": lambda: f"xoxb-{drawn(12, string.digits)}-{drawn(12, string.digits)}-{drawn(24)}",
    "NVIDIA": lambda: f"nvapi-{drawn(64, LETTERS + '-_')}",
    "Azure": lambda: base64.b64encode(DRAW.randbytes(64)).decode(),
}


@pytest.mark.parametrize("issuer", ISSUED)
def test_a_secret_that_is_issued_is_hidden_wherever_it_stands(issuer: str) -> None:
    """40 of each, in a command, a config, a line of code and an error, also below a known name."""
    DRAW.seed(issuer)
    for _ in range(40):
        secret = ISSUED[issuer]()
        places = [
            mask_command([secret, secret, "--run_name", secret, f"--output_dir={secret}"]),
            mask_fields({"run_name": secret, "a": [{"b": secret}], secret: 1}, {"run_name"}),
            mask_text(f'    tracker.start("{secret}")  # {secret}'),
            mask_text(f"401 Client Error: {secret} is not valid, see https://x.y/?q={secret}"),
        ]
        assert not [each for each in places if secret in json.dumps(each)], secret


@pytest.mark.parametrize(
    "command",
    [
        ["--keys.api", SECRET],
        ["--keys.model", SECRET],
        ["--keys.api", "--fp16", SECRET],
        ["--hub_token", SECRET],
        [f"--hub-token={SECRET}"],
        ["--password", f"--{SECRET}"],
        ["--password", f"-{SECRET}"],
        ["--pad_token", SECRET],
        ["--api_keys", "K1", SECRET],
        ["-k", SECRET],
        [f"-k{SECRET}"],
        [f"KEY={SECRET}"],
        [f"OPENAI_API_KEY={SECRET}"],
        [f"+x.y={SECRET}"],
        [f"++trainer.args.output_dir={SECRET}"],
        [f"++a={{b:1,hub_token:{SECRET}}}"],
        ["--model_init_kwargs", json.dumps({"a": SECRET})],
        ["--model_init_kwargs", repr({"model": SECRET})],
        ["--", SECRET],
        [SECRET],
        ["-c", f"login('{SECRET}')"],
        ["-c", f"TOKEN={SECRET}"],
        ["--bf16", SECRET],
        ["--output_dir", "out", SECRET],
        ["--learning_rate", "1e-4", SECRET],
        ["--max_steps", SECRET],
        ["--model", f"https://me:{SECRET}@host/x"],
        ["--model", f"s3://ID:{SECRET}@bucket"],
        ["--run_name", f"me:{SECRET}@proxy:8080"],
        ["--dataset_name", f"https://h.example/x?sig={SECRET}"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_is_not_known_to_be_harmless_is_hidden(command: list[str]) -> None:
    shown = mask_command(["train.py", *command, "--seed", "42"])
    assert SECRET not in json.dumps(shown)
    assert shown[0] == "train.py"
    assert shown[-2:] == ("--seed", "42")
    assert len(shown) == len(command) + 3


def test_numbers_below_names_that_no_library_has_are_hidden_too() -> None:
    shown = mask_command(["train.py", "--pin", "123456", "--my_pin=0.5"])
    assert shown == ("train.py", "--pin", "(hidden)", "--my_pin=(hidden)")


ORDINARY = """
accelerate launch --num_processes 8 --config_file configs/fsdp2.yaml train.py --fp16 --lr=1e-4
torchrun --nproc-per-node 2 --standalone -m mine.train --bf16 True --learning_rate -1e-5
/venv/bin/python /venv/bin/accelerate launch --mixed_precision bf16 train.py conf/sft.yaml
train.py --model_name_or_path meta-llama/Llama-3.1-8B-Instruct --report_to wandb tensorboard
train.py --lora_target_modules q_proj k_proj v_proj --fsdp full_shard --optim paged_adamw_8bit
train.py --run_name llama3-8b-lr1e-4-bs64-seed42-20241124T123055Z --output_dir /mnt/nfs/me/runs.v2
train.py ++trainer.args.learning_rate=1e-4 ++trainer.args.bf16=true +trainer_plugins=memory_safe
train.py --lr_scheduler_type cosine --deepspeed ds.json --mine true --load_in_4bit --dtype bfloat16
"""


@pytest.mark.parametrize("line", ORDINARY.strip().splitlines())
def test_an_ordinary_command_stays_readable(line: str) -> None:
    assert mask_command(line.split()) == tuple(line.split())


def test_fields_that_the_user_has_added_to_a_class_of_arguments_have_only_switches() -> None:
    class Mine(TrainingArguments):
        pass

    fields = {
        "output_dir": "runs/a", "learning_rate": 1e-4, "optim": "adamw_torch", "fp16": True,
        "optim_args": None, "report_to": ["wandb"], "deepspeed": {"zero": {"stage": 3}, "x": "auto"},
    }  # fmt: skip
    assert mask_fields(fields, list_declared(Mine)) == fields
    theirs = {"api": SECRET, "pin": 1234, "hub_token": SECRET, "run_name": f"https://a:{SECRET}@b"}
    theirs |= {"inner": {"seed": 1, "x": [SECRET]}, "deepspeed": {"token": SECRET, "x": SECRET}}
    shown = mask_fields(theirs, list_declared(Mine))
    assert shown.pop("deepspeed") == {"token": "(hidden)", "x": "(hidden)"}
    assert set(shown.values()) == {"(hidden)"}
    assert mask_fields({"api": True, "key": None}, list_declared(Mine)) == {
        "api": True,
        "key": None,
    }


def test_hostile_texts_are_cut_and_raise_nothing() -> None:
    for part in ("a=", "{", "token=", '{"token":', "://", "key='", "\\", "hf_-", "[token={", "@:"):
        text = part * 5000
        assert max(map(len, mask_command([text, f"--token={text}", f"--x={text}"]))) < 9000
        assert mask_fields({"token": [text]}) == {"token": ["(hidden)"]}
        assert len(mask_text(text)) < 9000


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("https://me:p@SSW@host/x", "https://(hidden)@host/x"),
        ("s3://KEY:SLASH/SECRET@b", "s3://(hidden)@b"),
        ("proxy me:swordfish@proxy:8080", "proxy (hidden)@proxy:8080"),
        ("https://h.example/x?a=1&token=abc&b=2", "https://h.example/x?(hidden)"),
        ("Authorization: Basic bWU6cHc=", "Authorization: Basic (hidden)"),
        ("X-Api-Key: swordfish", "X-Api-Key: (hidden)"),
        ('{"seed": 1, "secrets": {"a": "]"}}', '{"seed": 1, "secrets": (hidden)'),
        ("-----BEGIN KEY-----\nabc\n-----END KEY-----", "(hidden)"),
        ("AccountName=me;AccountKey=sword+fish==;x=1", "AccountName=me;AccountKey=(hidden);x=1"),
        ("os.environ['API_KEY'] = 'swordfish'", "os.environ['API_KEY'] = (hidden)"),
        ("login(user, password='a, b', x=1)", "login(user, password=(hidden), x=1)"),
    ],
)
def test_each_way_to_write_a_secret_into_a_text(said: str, shown: str) -> None:
    assert mask_text(said) == shown


@pytest.mark.parametrize(
    "line",
    [
        "query, key, value = self.qkv(hidden_states).split(self.hidden_size, dim=-1)",
        "tokens = tokenizer(batch['text'], truncation=True, max_length=tokenizer.model_max_length)",
        "token_type_ids: torch.LongTensor | None = None,",
        "return sorted(rows, key=lambda row: row.length)",
        "size mismatch for model.layers.0.self_attn.k_proj.weight: copying a param with shape",
        "if token == self.eos_token_id and key not in self.cache:",
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB",
        "torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=causal_mask)",
        "class MyBidirectionalTransformerForTokenClassificationWithCRF(nn.Module):",
        "expandable_segments:True,max_split_size_mb:64",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023",
    ],
)  # fmt: skip
def test_a_line_of_code_or_of_an_error_stays_readable(line: str) -> None:
    assert mask_text(line) == line
