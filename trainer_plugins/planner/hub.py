"""Find the config of a model by its name on the hub: in the local cache, or there on request."""

import os
import re
from pathlib import Path

from trainer_plugins.planner.plan import PlanError

_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_FILE = "config.json"


def may_be_a_name(text: str) -> bool:
    """Return whether a model on the hub may have this name.

    >>> may_be_a_name("org/name"), may_be_a_name("gpt2"), may_be_a_name("./org/name")
    (True, True, False)
    """
    return _NAME.fullmatch(text) is not None and not text.endswith(".json")


def config_file(name: str, from_hub: bool) -> Path:
    """Return a model's config.json in the hub's cache; `from_hub` fetches that one file."""
    # Otherwise it also asks the hub for a list of agents, to describe itself in each request.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    try:
        if from_hub:
            return Path(hf_hub_download(name, _FILE))
        found = try_to_load_from_cache(name, _FILE)
    except (OSError, ValueError) as error:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _one_line(error)
        raise PlanError(f"no config of the model {name} from the hub: {reason}") from error
    if isinstance(found, str):
        return Path(found)
    raise PlanError(
        f"no config of a model at {name}, and the cache {constants.HF_HUB_CACHE} has no model of"
        " that name. Give a file or folder on disk, or add --from-hub: it fetches the model's"
        f" {_FILE} and nothing else"
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
