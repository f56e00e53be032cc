"""Find public models by the names that people write (public_models.txt): the shapes of tensors."""

import re
from pathlib import Path
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

    @classmethod
    def parse(cls, name: str, *cells: str) -> "Model":
        """Return a model from the cells of its line."""
        numbers = [*map(int, cells[:7]), 0, 0, 0]
        return cls._make((name, *numbers[:7], "".join(cells[7:8]), len(cells) > 8))

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
_LINES = Path(__file__).with_suffix(".txt").read_text().partition("\n\n")[2].splitlines()[1:]
_MODELS = tuple(Model.parse(*re.split(" {2,}", line)) for line in _LINES)
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
