"""List the shapes of public models, under the names people write, from their configs on the Hub.

To add a model, add its line to `_MODELS`; `tests/planner/test_public_models.py` counts the
parameters of each, and compares some with configs.
"""

import re
from typing import NamedTuple


class Model(NamedTuple):
    """Holds the dimensions of a model's tensors; 0 after the heads if no plan uses them."""

    name: str
    vocabulary: int
    hidden: int
    intermediate: int
    heads: int
    layers: int = 0
    kv_heads: int = 0
    head_size: int = 0
    kind: str = ""  # its `model_type`
    is_tied: bool = False  # whether embeddings and head are one matrix

    def to_config(self) -> dict[str, object]:
        """Return what a plan needs of its config.json, and its name under `SHAPE_OF`."""
        return {
            SHAPE_OF: self.name,
            "model_type": self.kind,
            "architectures": [f"{self.kind.capitalize()}ForCausalLM"],
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "tie_word_embeddings": self.is_tied,
            "max_position_embeddings": _LONGEST,
            "torch_dtype": "bfloat16",
        }


SHAPE_OF = "_shape_of"
# Models of a public name that have more than its text model, or other weights.
_ANOTHER = re.compile(r"(?i)\bvl\b|omni|audio|vision|awq|gptq|int[48]|bnb|gguf|moe")
_LONGEST = 1 << 17  # tokens of a row; no weight depends on it
_MODELS = (
    Model("Llama 3 8B", 128_256, 4096, 14_336, 32, 32, 8, 128, "llama"),
    Model("Llama 3 70B", 128_256, 8192, 28_672, 64, 80, 8, 128, "llama"),
    Model("Llama 3 1B", 128_256, 2048, 8192, 32, 16, 8, 64, "llama", True),
    Model("Llama 3 3B", 128_256, 3072, 8192, 24, 28, 8, 128, "llama", True),
    Model("Llama 3 405B", 128_256, 16_384, 53_248, 128, 126, 8, 128, "llama"),
    Model("Llama 2 7B", 32_000, 4096, 11_008, 32, 32, 32, 128, "llama"),
    Model("Llama 2 13B", 32_000, 5120, 13_824, 40, 40, 40, 128, "llama"),
    Model("Llama 2 70B", 32_000, 8192, 28_672, 64, 80, 8, 128, "llama"),
    Model("TinyLlama 1.1B", 32_000, 2048, 5632, 32, 22, 4, 64, "llama"),
    Model("Mistral 7B", 32_000, 4096, 14_336, 32, 32, 8, 128, "mistral"),
    Model("Mistral 7B v0.3", 32_768, 4096, 14_336, 32, 32, 8, 128, "mistral"),
    Model("Mistral Nemo", 131_072, 5120, 14_336, 32, 40, 8, 128, "mistral"),
    Model("Mixtral 8x7B", 32_000, 4096, 14_336, 32),
    Model("Qwen 2.5 0.5B", 151_936, 896, 4864, 14, 24, 2, 64, "qwen2", True),
    Model("Qwen 2.5 1.5B", 151_936, 1536, 8960, 12, 28, 2, 128, "qwen2", True),
    Model("Qwen 2.5 3B", 151_936, 2048, 11_008, 16, 36, 2, 128, "qwen2", True),
    Model("Qwen 2.5 7B", 152_064, 3584, 18_944, 28, 28, 4, 128, "qwen2"),
    Model("Qwen 2.5 14B", 152_064, 5120, 13_824, 40, 48, 8, 128, "qwen2"),
    Model("Qwen 2.5 32B", 152_064, 5120, 27_648, 40, 64, 8, 128, "qwen2"),
    Model("Qwen 2.5 72B", 152_064, 8192, 29_568, 64, 80, 8, 128, "qwen2"),
    Model("Qwen 3 0.6B", 151_936, 1024, 3072, 16, 28, 8, 128, "qwen3", True),
    Model("Qwen 3 1.7B", 151_936, 2048, 6144, 16, 28, 8, 128, "qwen3", True),
    Model("Qwen 3 4B", 151_936, 2560, 9728, 32, 36, 8, 128, "qwen3", True),
    Model("Qwen 3 8B", 151_936, 4096, 12_288, 32, 36, 8, 128, "qwen3"),
    Model("Qwen 3 14B", 151_936, 5120, 17_408, 40, 40, 8, 128, "qwen3"),
    Model("Qwen 3 32B", 151_936, 5120, 25_600, 64, 64, 8, 128, "qwen3"),
    Model("Qwen 3 30B", 151_936, 2048, 6144, 32),
    Model("Gemma 2B", 256_000, 2048, 16_384, 8, 18, 1, 256, "gemma", True),
    Model("Gemma 7B", 256_000, 3072, 24_576, 16, 28, 16, 256, "gemma", True),
    Model("Gemma 2 2B", 256_000, 2304, 9216, 8, 26, 4, 256, "gemma2", True),
    Model("Gemma 2 9B", 256_000, 3584, 14_336, 16, 42, 8, 256, "gemma2", True),
    Model("Gemma 2 27B", 256_000, 4608, 36_864, 32, 46, 16, 128, "gemma2", True),
    Model("Gemma 3 270M", 262_144, 640, 2048, 4),
    Model("Gemma 3 1B", 262_144, 1152, 6912, 4),
    Model("Gemma 3 4B", 262_208, 2560, 10_240, 8),
    Model("Gemma 3 12B", 262_208, 3840, 15_360, 16),
    Model("Gemma 3 27B", 262_208, 5376, 21_504, 32),
    Model("Phi 3 mini", 32_064, 3072, 8192, 32, 32, 32, 96, "phi3"),
    Model("Phi 4", 100_352, 5120, 17_920, 40, 40, 10, 128, "phi3"),
    Model("Phi 4 mini", 200_064, 3072, 8192, 24, 32, 8, 128, "phi3", True),
    Model("gpt oss", 201_088, 2880, 2880, 64),
    Model("SmolLM2 135M", 49_152, 576, 1536, 9, 30, 3, 64, "llama", True),
    Model("SmolLM2 360M", 49_152, 960, 2560, 15, 32, 5, 64, "llama", True),
    Model("SmolLM2 1.7B", 49_152, 2048, 8192, 32, 24, 32, 64, "llama", True),
    Model("OPT 13B", 50_272, 5120, 20_480, 40),
)
# By the module of its class, if no name is more specific.
_OF_MODULES = {
    "qwen2": (151_936, 152_064),
    "qwen3": (151_936,),
    "llama": (32_000, 128_256),
    "mistral": (32_000, 32_768, 131_072),
    "mixtral": (32_000,),
    "gemma": (256_000, 262_144),
    "phi3": (32_064, 100_352, 200_064),
    "gpt2": (50_257,),
    "gpt_oss": (201_088,),
}
USUAL_VOCABULARIES = (32_000, 128_256, 151_936)


def find_model(text: str) -> Model | None:
    """Return the public model that a text names; None if it names none, or several.

    >>> find_model("--model_name_or_path meta-llama/Llama-3.1-8B-Instruct").hidden
    4096
    """
    folded = text.casefold()
    found = [
        each
        for each in _MODELS
        if each.name.split()[0].casefold() in folded  # compiles fewer patterns
        and re.search(_pattern(each.name), text)
    ]
    longest = max(found, key=lambda each: len(each.name), default=None)
    is_one = longest is not None and all(longest.name.startswith(each.name) for each in found)
    return longest if is_one else None


def find_config(name: str) -> dict[str, object] | None:
    """Return the config of a public model by its name on the Hub; None if it is not known in full.

    >>> find_config("meta-llama/Llama-3.1-8B")["num_hidden_layers"]
    32
    """
    found = None if _ANOTHER.search(name) else find_model(name)
    return found.to_config() if found is not None and found.kind else None


def vocabularies_of(module: str) -> tuple[int, ...]:
    """Return the vocabularies of models by the file of their class: `modeling_llama.py`."""
    return next((sizes for name, sizes in _OF_MODULES.items() if f"_{name}" in module), ())


def _pattern(name: str) -> str:
    """Match a name as people write it: `Llama 3 8B` is also `Meta-Llama-3-8B` and `llama3.1_8b`."""
    family, version, *others = map(re.escape, name.split())
    if (family, version) == ("Llama", "3"):
        version = r"3(?:\.\d)?"
    if (family, version) == ("Qwen", r"2\.5"):  # of the same shapes as Qwen 2
        version = r"2(?:\.5)?"
    words = "[-_ ]{0,2}(?:(?:instruct|vl|coder|math|omni)[-_ ])?".join((family, version, *others))
    return rf"(?i)(?<![a-z]){words}(?![.\d]*\d|b\b)"
