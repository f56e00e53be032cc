"""A checkpoint of holes: what `from_pretrained` reads where a folder has no weights."""

from pathlib import Path

from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

from trainer_plugins.inside.weights import holes_for
from trainer_plugins.units import GIB


def test_a_large_one_has_several_files_that_take_no_space(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRAINER_PLUGINS_DRYCUDA", str(tmp_path))
    config = LlamaConfig(num_hidden_layers=24, dtype="bfloat16")
    named, _ = holes_for(LlamaForCausalLM, "", {"config": config})
    files = [*map(Path, named)]
    assert len(files) > 1
    names = []
    for path in files:
        assert path.stat().st_size <= 4.1 * GIB
        assert path.stat().st_blocks * 512 < 1 << 20
        with safe_open(path, "pt") as file:
            names += file.keys()
    assert len(names) == len(set(names)) == 3 + 24 * 9
