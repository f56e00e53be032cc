"""What is written about a run has no secret in it, and leaves everything else as it is."""

import base64
import json
import random
import string

import pytest

from trainer_plugins.launch.masked import masked, masked_command, masked_text

LETTERS = string.ascii_letters + string.digits
DRAW = random.Random()
"""The corpus is drawn: each test seeds it, so that it is the same each time."""


def drawn(num: int, letters: str = LETTERS) -> str:
    return "".join(DRAW.choices(letters, k=num))


def ticket() -> str:
    header = base64.urlsafe_b64encode(b'{"alg":"HS256","typ":"JWT"}').decode().rstrip("=")
    return f"{header}.{drawn(60)}.{drawn(43, LETTERS + '-_')}"


# As their issuers make them: nothing but themselves says that they are secrets.
ISSUED = {
    "Hugging Face": lambda: f"hf_{drawn(34, string.ascii_letters)}",
    "W&B, until 2025": lambda: drawn(40, "0123456789abcdef"),
    "W&B, local": lambda: f"local-{drawn(40, '0123456789abcdef')}",
    "W&B, since": lambda: f"wandb_v1_{drawn(27)}_{drawn(49)}",
    "GitHub": lambda: f"gh{DRAW.choice('pousr')}_{drawn(36)}",
    "GitHub, fine-grained": lambda: f"github_pat_{drawn(22)}_{drawn(59)}",
    "GitLab": lambda: f"glpat-{drawn(20, LETTERS + '-_')}",
    "OpenAI": lambda: f"sk-proj-{drawn(48, LETTERS + '-_')}",
    "Anthropic": lambda: f"sk-ant-api03-{drawn(93, LETTERS + '-_')}AA",
    "AWS, id": lambda: f"AKIA{drawn(16, string.ascii_uppercase + '234567')}",
    "AWS": lambda: drawn(40, LETTERS + "+/"),
    "Google": lambda: f"AIza{drawn(35, LETTERS + '-_')}",
    "Slack": lambda: f"xoxb-{drawn(12, string.digits)}-{drawn(12, string.digits)}-{drawn(24)}",
    "NVIDIA": lambda: f"nvapi-{drawn(64, LETTERS + '-_')}",
    "Comet": lambda: drawn(25),
    "Azure": lambda: base64.b64encode(DRAW.randbytes(64)).decode(),
    "a JSON Web Token": ticket,
}

# Below a name that says it, any text is one: these are no more than words.
NAMED = ["swordfish", "-swordfish9", "12345678", "hunter-2", "C0rrect/horse", "p@ss word", "k" * 80]
NAMES = [
    "hub_token",
    "api_key",
    "wandb_key",
    "password",
    "aws_secret_access_key",
    "apiKey",
    "HF_TOKEN",
]
NAMES += ["hftoken", "db-password", "client_secret", "OPENAI_API_KEY", "credentials", "token"]

PLAIN_NAMES = ["note", "tracker.note", "x"]


def in_a_command(name: str, secret: str) -> list[list[str]]:
    return [
        [f"--{name}", secret],
        [f"--{name}={secret}", "--lr", "1"],
        [f"++trainer.args.{name}={secret}"],
        ["--model_init_kwargs", json.dumps({"seed": 1, "inner": [{name: secret}]})],
        ["--model_init_kwargs", repr({"seed": 1, name: secret})],
        [f'++a={{b: 1, {name}: "{secret}"}}'],
        ["-c", f"login({name}={secret!r})"],
    ]


def hides(shown: object, secret: str) -> None:
    text = json.dumps(shown, ensure_ascii=False)
    kept = [secret[at : at + 8] for at in range(len(secret) - 7) if secret[at : at + 8] in text]
    assert secret not in text, text
    assert not kept, text


@pytest.mark.parametrize("issuer", ISSUED)
def test_a_secret_that_is_issued_is_found_wherever_it_stands(issuer: str) -> None:
    """40 of each, below names that say nothing, in a command, a config, a line of code and an error."""
    DRAW.seed(issuer)
    for _ in range(40):
        secret = ISSUED[issuer]()
        name = DRAW.choice(PLAIN_NAMES)
        for command in [[secret], *in_a_command(name, secret)]:
            hides(masked_command(["train.py", *command]), secret)
        hides(masked({"a": [{name: secret}], secret: 1}), secret)
        hides(masked_text(f'    tracker.start("{secret}")  # {secret}'), secret)
        hides(
            masked_text(f"401 Client Error: {secret} is not valid, see https://x.y/?q={secret}"),
            secret,
        )


@pytest.mark.parametrize("name", NAMES)
def test_whatever_stands_below_a_name_that_says_it_is_hidden(name: str) -> None:
    for secret in NAMED:
        if name == "token" and secret.isdigit():
            continue  # a number of tokens
        for command in in_a_command(name, secret):
            hides(masked_command(["train.py", *command, "--seed", "42"]), secret)
            assert masked_command([*command, "--seed", "42"])[-2:] == ("--seed", "42")
        for value in (secret, [secret], {"a": {"b": secret}}, {"seed": [{"c": (1, secret)}]}):
            hides(masked({"kwargs": [{name: value}]}), secret)
        hides(masked_text(f'    connect("x", {name}="{secret}", timeout=3)'), secret)
        hides(masked_text(f"    os.environ['{name}'] = '{secret}'"), secret)
    assert masked({name: True, "a": None}) == {name: True, "a": None}
    assert masked_command([f"--use_{name}", "--fp16", f"--{name}", "--seed", "42"]) == (
        *(f"--use_{name}", "--fp16", f"--{name}", "--seed", "42"),
    )


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("https://me:p@SSW@host/x", "https://(hidden)@host/x"),
        ("s3://KEY:SLASH/SECRET@b", "s3://(hidden)@b"),
        ("https://me:p?w#d@host.example/x", "https://(hidden)@host.example/x"),
        ("https://me:p@w/d@host.example/x", "https://(hidden)@host.example/x"),
        ("git+https://me:pw@github.com/o/r@v1.0", "git+https://(hidden)@github.com/o/r@v1.0"),
        ("https://swordfish@github.com/o/r", "https://(hidden)@github.com/o/r"),
        ("--proxy=me:swordfish@proxy:8080", "--proxy=(hidden)@proxy:8080"),
        ("https://h.example/x?a=1&token=abc&b=2", "https://h.example/x?a=1&token=(hidden)&b=2"),
        ("Authorization: Basic bWU6cHc=", "Authorization: (hidden)"),
        ('{"Authorization": "Bearer abc"}', '{"Authorization": "(hidden)"}'),
        ("X-Api-Key: swordfish", "X-Api-Key: (hidden)"),
        ("++a={hub_token:X,seed:1}", "++a={hub_token:(hidden),seed:1}"),
        ("++a={api_keys:[K1,K2],seed:1}", "++a={api_keys:(hidden),seed:1}"),
        ('{"secrets": {"a": {"b": "]"}}, "seed": 1}', '{"secrets": (hidden), "seed": 1}'),
        (
            '"{\\"token\\": \\"X\\", \\"seed\\": 1}"',
            '"{\\"token\\": \\"(hidden)\\", \\"seed\\": 1}"',
        ),
        ("-----BEGIN KEY-----\nabc\n-----END KEY-----", "(hidden)"),
        ("--password=12345", "--password=(hidden)"),
        ("AccountName=me;AccountKey=sword+fish==;x=1", "AccountName=me;AccountKey=(hidden);x=1"),
    ],
)
def test_each_way_to_write_a_secret(said: str, shown: str) -> None:
    assert masked_command([said]) == (shown,)
    assert masked([said]) == [shown]


def test_hostile_texts_are_cut_and_raise_nothing() -> None:
    for part in ("a=", "{", "token=", '{"token":', "://", "key='", "\\", "hf_-", "[token={", "@:"):
        text = part * 5000
        assert max(map(len, masked_command([text, f"--token={text}", f"--x={text}"]))) < 9000
        assert masked({"token": [text]}) == {"token": ["(hidden)"]}
        assert len(masked_text(text)) < 9000


def test_values_after_a_flag_that_has_several() -> None:
    command = [
        "x.py",
        "--api_keys",
        "K1",
        "K2",
        "-K3secret",
        "--files",
        "a",
        "--hub_token",
        "T",
        "d",
    ]
    hidden = ["(hidden)"] * 3
    shown = ("x.py", "--api_keys", *hidden, "--files", "a", "--hub_token", "(hidden)", "d")
    assert masked_command(command) == shown
    assert masked(command) == list(shown)
    assert masked({"password": 12345, "api_key": [71234], "tokens": 7, "max_tokens": "4096"}) == {
        "password": "(hidden)",
        "api_key": ["(hidden)"],
        "tokens": 7,
        "max_tokens": "4096",
    }


COMMIT = "0e9e39f249a16976918f6564b8830bc894c89659"
ORDINARY = f"""
accelerate launch --num_processes 8 --config_file configs/fsdp2.yaml train.py --fp16 --lr=1e-4
--token_type ids --max_tokens 4096 --max_new_tokens=512 --tokenizer meta-llama/Llama-3.1-8B-Instruct
--key_padding left --key_padding_mask true --num_key_value_heads 8 --keyword loss --monkey patch
--prompt_key question --input_key=messages --label_key label --data.reward_fn_key=data_source
--pad_token <|end_of_text|> --eos_token </s> --image_token=<image> --special_tokens [PAD] [UNK]
--additional_special_tokens <tool> </tool> --tokens_per_second 1200 --token_budget 2e6
--revision {COMMIT} --model_revision={COMMIT} --code_revision main git+https://github.com/o/r@{COMMIT}
/home/x/.cache/huggingface/hub/models--meta-llama--Llama-3.1-8B/snapshots/{COMMIT}/model.safetensors
/var/lib/docker/overlay2/{COMMIT}{COMMIT[:24]}/merged sha256:{COMMIT}{COMMIT[:24]} --git_sha {COMMIT}
nvcr.io/nvidia/pytorch:24.01-py3@sha256:{COMMIT}{COMMIT[:24]} --run_id 3k8x2p9q
--run_name sft-qwen2p5-7b-r64a128-d0p05-s42-lr2e-5_wd0.01_bs8x4_ga16_ep3 --use_auth_token
--run_name llama3-8b-lr1e-4-bs64-seed42-20241124T123055Z --job_id 8f14e45f-ceea-467f-a0e6-1f2b3c4d5e6f
timm/eva02_large_patch14_448.mim_m38m_ft_in22k_in1k timm/vit_base_patch16_clip_224.laion2b_ft_in12k_in1k
Qwen/Qwen3-30B-A3B-Instruct-2507-FP8 TheBloke/Mistral-7B-Instruct-v0.2-GPTQ unsloth/gemma-3n-E4B-it-bnb-4bit
laion/CLIP-ViT-bigG-14-laion2B-39B-b160k microsoft/Phi-3.5-MoE-instruct nvidia/Llama-3_1-Nemotron-51B
Qwen2_5_VLForConditionalGeneration AutoModelForSequenceClassification openai/whisper-large-v3-turbo
sk-learn-baseline-experiment /data/hf_checkpoints/step_1000 hf_transfer_enabled ghp_experiments_of_may
/mnt/nfs/me/checkpoint-12000/model-00001-of-00004.safetensors outputs/2024-11-24/12-30-55/0
ray_results/train_fn_7c3a1_00000_0_lr=0.0001_2024-11-24_12-30-55 2.6.0+cu124 2.13.0.dev20260101+cu128
https://host:8080/path@v1 https://huggingface.co/datasets/o/d/resolve/{COMMIT}/train.parquet
abfss://data@account.dfs.core.windows.net/x git@github.com:org/repo.git ssh://git@github.com/o/r
s3://bucket/key/of/object@v2 hf://datasets/o/d@v1/x.parquet http://127.0.0.1:29500 [::1]:29500
++model.hidden_sizes=[64,128,256] ++trainer.args={{lr:1e-4,bf16:true}} hydra.run.dir=out/${{now:%Y-%m-%d}}
--lora_target_modules q_proj k_proj v_proj o_proj --fsdp full_shard --optim paged_adamw_8bit
--password_file /run/secrets/pw --api_key_env OPENAI_API_KEY --monitor_key_metric eval_loss
--master_addr ip-10-0-0-1.ec2.internal --rdzv_endpoint=10.0.0.1:29500 -m torch.distributed.run -lr 1e-3
events.out.tfevents.1700000000.host.123.0 mlruns/0/8f14e45fceea467fa0e61f2b3c4d5e6f/artifacts
CUDA_VISIBLE_DEVICES=GPU-8f14e45f-ceea-467f-a0e6-1f2b3c4d5e6f --deepspeed_transformer_layer_cls_to_wrap
"""


def test_an_ordinary_command_stays_readable() -> None:
    for line in ORDINARY.strip().splitlines():
        assert " ".join(masked_command(line.split())) == line
    command = ORDINARY.split()
    assert masked(command) == command


@pytest.mark.parametrize(
    "value",
    [
        {"pad_token": "<pad>", "eos_token": "<|im_end|>", "num_tokens": 3, "use_token": True},
        {"additional_special_tokens": ["<a>", "<b>"], "keys_to_ignore_at_inference": ["past_key"]},
        {"metric_key_prefix": "eval", "label_names": ["labels"], "text_key": "content"},
        {
            "_commit_hash": COMMIT,
            "revision": COMMIT,
            "auto_map": {"AutoModel": "o/m--modeling.Own"},
        },
        {"auth": None, "token": None, "key": False, "secret": ""},
        {"model_init_kwargs": '{"revision": "' + COMMIT + '", "max_tokens": 4096}'},
    ],
)
def test_an_ordinary_config_stays_readable(value: dict[str, object]) -> None:
    assert masked(value) == value


@pytest.mark.parametrize(
    "line",
    [
        "query, key, value = self.qkv(hidden_states).split(self.hidden_size, dim=-1)",
        "key_states = key.transpose(1, 2).to(dtype=torch.float32)",
        "tokens = tokenizer(batch['text'], truncation=True, max_length=tokenizer.model_max_length)",
        "token_type_ids: torch.LongTensor | None = None,",
        "return sorted(rows, key=lambda row: row.length)",
        "login(token=args.hub_token, password=getpass())",
        "token: str | None = None, secret: str = config.secret,",
        "size mismatch for model.layers.0.self_attn.k_proj.weight: copying a param with shape",
        "if token == self.eos_token_id and key not in self.cache:",
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB",
        "torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=causal_mask)",
        "self.past_key_values = DynamicCache(config=self.config, num_key_value_heads=8)",
        "class MyBidirectionalTransformerForTokenClassificationWithCRF(nn.Module):",
        f"GitRefInfo(ref='refs/heads/main', target_commit='{COMMIT}', blob_id='{COMMIT}')",
        f"fatal: reference is not a tree: {COMMIT}; commit {COMMIT} of https://github.com/o/r",
    ],
)
def test_a_line_of_code_or_of_an_error_stays_readable(line: str) -> None:
    assert masked_text(line) == line
