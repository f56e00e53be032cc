"""List the launch files of this package (configs/accelerate/*.yaml); copy them with changes."""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from trainer_plugins.printable import printable
from trainer_plugins.record.folder import replacing

_HOME = Path(__file__).parent.parent / "configs" / "accelerate"


def names() -> tuple[str, ...]:
    """Return the names of the shipped files, in order."""
    return tuple(sorted(path.stem for path in _HOME.glob("*.yaml")))


def path(name: str) -> Path:
    """Return the path of a shipped file, or raise ValueError, which names the nearest one."""
    known, stem = names(), name.removesuffix(".yaml")
    if stem not in known:
        near = get_close_matches(name, known, 1, 0.4)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        raise ValueError(f"no config is named {name!r}: {hint}")
    return _HOME / f"{stem}.yaml"


def read(name: str) -> str:
    """Return the text of a shipped file."""
    return path(name).read_text(encoding="utf-8")


def headline(name: str) -> str:
    """Return the first line of a shipped file, which describes it."""
    return read(name).split("\n", 1)[0].removeprefix("# ")


def copy(name: str, folder: Path, overrides: Sequence[str] = (), *, force: bool = False) -> Path:
    """Write a copy of a shipped file, with `key=value` overrides; an error leaves no file."""
    target = folder / f"{path(name).stem}.yaml"
    text = read(name).replace(f"configs/accelerate/{target.name}", printable(str(target)))
    if target.exists() and not force:
        raise ValueError(f"{target} exists: replace it with --force, or name another folder")
    if overrides:
        from trainer_plugins.launch.overrides import override_values

        text = override_values(text, overrides, name)
    try:
        folder.mkdir(exist_ok=True)
        with replacing(target) as file:
            file.write(text.encode())
    except OSError as error:
        why = error.strerror or error
        raise ValueError(f"{target} is not writable: {why}. Name another folder") from None
    return target
