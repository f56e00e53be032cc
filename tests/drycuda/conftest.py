"""What needs torch's build for CUDA is skipped where there is none; CI fetches it into the cache."""

import os

import pytest

from trainer_plugins.drycuda.cuda_build import fetch
from trainer_plugins.drycuda.dry_cuda import unavailable_reason


@pytest.fixture(scope="session")
def cuda_build() -> None:
    """torch's build for CUDA is here, and a compiler."""
    if os.environ.get("CI"):
        fetch(print)
    if reason := unavailable_reason():
        assert not os.environ.get("CI"), reason
        pytest.skip(reason)
