"""Each survival collects garbage once; what imported libraries hold, a million objects, is spared that here."""

import gc

import pytest

collect_ignore = ["ranks/ddp_gives_up.py"]  # launched by a test, and no test


@pytest.fixture(autouse=True, scope="package")
def _collect_only_what_is_new():
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
