"""A Hydra app that knows nothing of this package: one override gives its Trainer the callbacks.

python examples/hydra_app/hydra_app.py +trainer_plugins=memory_safe
"""

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    """Train the model in the config."""
    rows = torch.randint(1, 512, (64, 32), generator=torch.Generator().manual_seed(0))
    settings = OmegaConf.to_container(config.trainer.args, resolve=True)
    model = LlamaForCausalLM(LlamaConfig(**config.model))
    data = [{"input_ids": row, "labels": row} for row in rows]
    Trainer(model, TrainingArguments(**settings), train_dataset=data).train()  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
