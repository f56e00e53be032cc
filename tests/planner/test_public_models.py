"""The shapes of public models give as many parameters as their weights on the Hub have."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trainer_plugins.planner.public_models import find_config, find_model

CONFIGS = Path(__file__).parent / "configs"
KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "tie_word_embeddings",
)  # fmt: skip
# As the Hub counts the tensors of each model's safetensors files.
PARAMETERS = {
    "Llama-3-8B": 8_030_261_248, "Llama-3.1-70B": 70_553_706_496, "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824, "Llama-3.1-405B": 405_853_388_800, "Llama-2-7b": 6_738_415_616,
    "Llama-2-13b": 13_015_864_320, "Llama-2-70b": 68_976_648_192, "TinyLlama-1.1B": 1_100_048_384,
    "Mistral-7B-v0.1": 7_241_732_096, "Mistral-7B-v0.3": 7_248_023_552,
    "Mistral-Nemo-Instruct": 12_247_782_400, "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304, "Qwen2.5-3B": 3_085_938_688, "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664, "Qwen2.5-32B": 32_763_876_352, "Qwen2.5-72B": 72_706_203_648,
    "Qwen3-0.6B": 596_049_920, "Qwen3-1.7B": 1_720_574_976, "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360, "Qwen3-14B": 14_768_307_200, "Qwen3-32B": 32_762_123_264,
    "gemma-2b": 2_506_172_416, "gemma-7b": 8_537_680_896, "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984, "gemma-2-27b": 27_227_128_320, "Phi-3-mini-4k": 3_821_079_552,
    "phi-4": 14_659_507_200, "Phi-4-mini": 3_836_021_760, "SmolLM2-135M": 134_515_008,
    "SmolLM2-360M": 361_821_120, "SmolLM2-1.7B": 1_711_376_384,
}  # fmt: skip


@pytest.mark.parametrize(("name", "expected"), PARAMETERS.items())
def test_a_public_model_has_the_parameters_of_its_weights(name: str, expected: int) -> None:
    found = find_config(name)
    assert found is not None
    config = AutoConfig.for_model(**found)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert model.num_parameters() == expected


NAMES = {
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B-Instruct", "unsloth/llama-3-8b-bnb-4bit", "Llama 3 8B"),
    "llama-3.2-1b": ("Llama 3.2 1B",),
    "llama-3.1-405b": ("Llama-3.1-405B",),
    "llama-2-7b": ("Llama2-7b-hf",),
    "mistral-7b-v0.1": ("mistralai/Mistral-7B-v0.1",),
    "mistral-7b-v0.3": ("mistralai/Mistral-7B-v0.3", "mistralai/Mistral-7B-Instruct-v0.3"),
    "qwen2.5-1.5b": ("qwen2.5_1.5b",),
    "qwen2.5-7b": ("Qwen2.5-7B",),
    "qwen3-8b": ("qwen3 8b",),
    "smollm2-135m": ("HuggingFaceTB/SmolLM2-135M",),
    "tinyllama-1.1b": ("TinyLlama-1.1B-Chat",),
}  # fmt: skip


@pytest.mark.parametrize("file", NAMES)
def test_a_model_is_known_by_the_names_that_people_write(file: str) -> None:
    config = json.loads((CONFIGS / f"{file}.json").read_text())
    for name in NAMES[file]:
        model = find_model(f"I train {name} with LoRA")
        assert model is not None
        shape = model.to_config()
        assert {key: shape[key] for key in KEYS} == {key: config[key] for key in KEYS}


@pytest.mark.parametrize("name", ["llama3.1:405b", "gemma-2-27b-it, not gemma-2b", "CodeLlama-7b"])
def test_no_other_model_is_taken_for_a_known_one(name: str) -> None:
    assert find_model(f"I train {name} with LoRA") is None


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-VL-7B-Instruct", "Qwen2.5-7B-AWQ", "gemma-3-4b-it"])
def test_other_weights_of_the_same_name_have_no_config(name: str) -> None:
    assert find_config(name) is None
