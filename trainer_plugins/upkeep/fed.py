"""Names what a run is fed with: the shapes of its batches, and what its dataset keeps."""

from collections import deque
from collections.abc import Sequence
from math import prod

from transformers import Trainer

from trainer_plugins.upkeep.frames import batch_of, drop_variables, frames_above

_CONTAINERS = (list, dict, set, deque)
_WRAPPERS = ("torch.utils.data.", "accelerate.")
_MANY = 10_000  # Python objects of which each worker's copies add up


def largest_of_batch() -> tuple[str, tuple[int, ...]] | None:
    """Return name and shape of the largest tensor of the batch in the step that calls this."""
    frames = [*frames_above()][::-1]  # outermost first
    batch = batch_of(frames, Trainer)
    drop_variables(frames)
    if not batch:
        return None
    name = max(batch, key=lambda each: prod(batch[each].shape))
    return name, batch[name].shape


def words_of_batches(seen: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    """Say how many shapes the batches of these steps had; empty if all had one."""
    shapes = sorted({shape for _, shape in seen}, key=prod)
    if len(shapes) < 2:
        return ""
    first, last = list(shapes[0]), list(shapes[-1])
    return f"{len(shapes)} shapes of {seen[-1][0]} in {len(seen)} steps, {first} to {last}"


def words_of_dataset(dataset: object) -> tuple[str, str]:
    """Name what a dataset keeps, which is in each worker, and the cure; empty if nothing shows."""
    while type(dataset).__module__.startswith(_WRAPPERS) and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    kind = type(dataset).__name__
    values = {f"{kind}.{name}": value for name, value in getattr(dataset, "__dict__", {}).items()}
    if isinstance(dataset, list):
        values = {"train_dataset, a list,": dataset}
    kept = {name: len(value) for name, value in values.items() if type(value) in _CONTAINERS}
    if type(dataset).__module__.startswith("datasets.") or not kept:
        return "", ""
    place = max(kept, key=kept.__getitem__)
    if kept[place] >= _MANY:
        return (
            f"{place} has {kept[place]:,} Python objects: each read writes a count beside one, and"
            " the worker gets a copy of that page (pytorch#13246)",
            "Keep the rows in one array or an Arrow table: `numpy.array(rows)`,"
            " `datasets.Dataset.from_list(rows)`.",
        )
    cure = f"self.{place.rpartition('.')[2]}.clear()"
    return (
        f"each worker has its own {', '.join(kept)}",
        f"Bound what `{kind}.__getitem__` keeps, or empty it: `{cure}`.",
    )
