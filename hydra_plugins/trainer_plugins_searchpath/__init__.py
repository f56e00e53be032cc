"""Let Hydra find our configs: in every app it imports all modules below `hydra_plugins`."""

import sys
from importlib.util import find_spec
from inspect import signature
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf


class TrainerPluginsSearchPath(SearchPathPlugin):
    """Adds the config group `trainer_plugins`."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        # As a file: Hydra accepts a pkg:// only for a folder with an __init__.py. We locate the
        # package without importing it.
        spec = find_spec("trainer_plugins")
        if spec is not None and spec.origin is not None:
            folder = Path(spec.origin).parent / "configs" / "hydra"
            # Not as_uri(): Hydra strips the scheme, and reads %20 literally.
            search_path.append(provider="trainer_plugins", path=f"file://{folder.as_posix()}")
            if any("trainer_" in word for word in sys.argv[1:]):
                from trainer_plugins.integrations.hydra_keys import say_what_was_meant

                say_what_was_meant(sys.argv[1:])


def _callbacks(*, _root_: DictConfig) -> list[object]:
    from trainer_plugins.integrations.hydra import callbacks_of

    return [*callbacks_of(_root_)]


def _register() -> None:
    """Register ${trainer_plugins.callbacks:} with OmegaConf, through its version's function.

    OmegaConf 2.4 deprecates `register_new_resolver` for `register_resolver`, which was another
    function before.
    """
    register = getattr(OmegaConf, "register_resolver", None)
    if register is None or "replace" not in signature(register).parameters:
        register = OmegaConf.register_new_resolver
    register("trainer_plugins.callbacks", _callbacks, replace=True)


try:
    _register()
except Exception as error:
    # Hydra only warns about a plugin that cannot be imported. Any other error would end every Hydra
    # app here, ours or not.
    raise ImportError(f"trainer_plugins found no place for its resolver: {error}") from error
