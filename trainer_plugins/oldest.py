"""Name the version to install if a library is older than this package supports."""

from importlib.metadata import PackageNotFoundError, version

OLDEST = {"transformers": "4.57.1", "trl": "1.0.0"}


def too_old(name: str) -> str:
    """Say which version to install if a library is too old; empty if it is not, or is not here."""
    from packaging.version import Version

    try:
        here = version(name)
    except PackageNotFoundError:  # not installed, or without metadata: its version is unknown
        return ""
    if Version(here) >= Version(OLDEST[name]):
        return ""
    return (
        f"trainer_plugins works with {name} {OLDEST[name]} or newer, but this is {here}."
        f" Update it: pip install '{name}>={OLDEST[name]}'"
    )
