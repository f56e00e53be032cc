"""A Hydra app as people write them: a registry of trainers, of which a config picks one.

It knows nothing of us.
"""

from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig


@hydra.main(config_path="conf", config_name="config", version_base=None)
def main(config: DictConfig) -> None:
    from trainers import HANDLERS, train  # type: ignore[import-not-found] # beside this script

    train(HANDLERS[config.trainer.handler], config, Path(HydraConfig.get().runtime.output_dir))


if __name__ == "__main__":
    main()
