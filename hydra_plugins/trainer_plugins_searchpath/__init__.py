"""How Hydra finds our configs: it imports every module below `hydra_plugins`, in every app of the environment."""

from importlib.util import find_spec
from inspect import signature
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf


class TrainerPluginsSearchPath(SearchPathPlugin):
    """Adds the config group `trainer_plugins`."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        # As a file: Hydra takes a pkg:// only for a folder with an __init__.py. Found, and not
        # imported.
        spec = find_spec("trainer_plugins")
        if spec is not None and spec.origin is not None:
            folder = Path(spec.origin).parent / "configs" / "hydra"
            # Not as_uri(): Hydra cuts the scheme off, and reads %20 as it stands.
            search_path.append(provider="trainer_plugins", path=f"file://{folder.as_posix()}")


def _callbacks(*, _root_: DictConfig) -> list[object]:
    from trainer_plugins.integrations.hydra import callbacks_of

    return [*callbacks_of(_root_)]


def _register() -> None:
    """Make ${trainer_plugins.callbacks:} known to OmegaConf, by the name that its version has for that.

    OmegaConf 2.4 warns of `register_new_resolver` and says `register_resolver`, which was another
    function before.
    """
    register = getattr(OmegaConf, "register_resolver", None)
    if register is None or "replace" not in signature(register).parameters:
        register = OmegaConf.register_new_resolver
    register("trainer_plugins.callbacks", _callbacks, replace=True)


try:
    _register()
except Exception as error:
    # Of a plugin that cannot be imported Hydra warns. Anything else would end every Hydra app here,
    # ours or not.
    raise ImportError(f"trainer_plugins found no place for its resolver: {error}") from error
