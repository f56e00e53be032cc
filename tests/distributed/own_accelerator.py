"""examples/train.py with an Accelerator for the CPU of its own, built between the arguments and the Trainer."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from accelerate import Accelerator

spec = spec_from_file_location(
    "train", Path(__file__).parent.parent.parent / "examples" / "train.py"
)
assert spec is not None
assert spec.loader is not None
train = module_from_spec(spec)
spec.loader.exec_module(train)
set_seed = train.set_seed


def set_seed_and_more(seed):
    Accelerator(cpu=True)
    set_seed(seed)


train.__dict__["set_seed"] = set_seed_and_more
train.main()
