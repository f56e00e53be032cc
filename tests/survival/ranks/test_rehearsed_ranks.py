"""Two ranks rehearse together: what one of them cannot do both know, and the run is the one it would have been."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests import processes
from tests.distributed import extensions
from tests.distributed.launched import command, environment, torchrun
from tests.survival.ranks.test_fsdp2 import IS_REFUSED, WHY_NOT

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("rehearsed_ranks.py")
WRAPPERS = {
    "ddp": "DistributedDataParallel",
    "fsdp2": "FSDPLlamaForCausalLM",
    "zero3": "DeepSpeedEngine",
}
ALL = ["optimizer step", "evaluation", "training", "save", "resume"]
FAILS = {
    "ddp": {"resume": "don't know how to restore data location"}
    if transformers.__version__.startswith("4.")
    else {}
}
"""What the rehearsal rightly says: transformers 4 loads no optimizer to `cpu:0`, nor in a real run."""
DONE = {"ddp": ALL, "fsdp2": ALL[:-1], "zero3": ALL[1:-1]}


@pytest.fixture(scope="module", params=WRAPPERS)
def launched(request, tmp_path_factory) -> tuple[str, list[dict[str, Any]]]:
    """One launch a kind."""
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    if kind == "fsdp2" and IS_REFUSED:
        pytest.skip(WHY_NOT)
    call = command("fsdp2", (), SCRIPT) if kind == "fsdp2" else [*torchrun(2), SCRIPT]
    if kind == "zero3":
        extensions.build("cpu")
    done = processes.run([*call, folder, kind], cwd=folder, environ=environment())
    files = [folder / f"rank-{rank}.json" for rank in (0, 1)]
    assert all(file.is_file() for file in files), done.stderr[-5000:]
    return kind, [json.loads(file.read_text()) for file in files]


@pytest.mark.all(unless=lambda launched: launched == "fsdp2")
def test_the_run_is_the_one_that_it_would_have_been(launched) -> None:
    kind, facts = launched
    for each in facts:
        assert each["world"] == [2, "gloo"]
        told = each["fits"]
        assert (told["wrapped"], told["step"]) == (WRAPPERS[kind], 4)
        assert list(told["moments"]) == DONE[kind]
        for moment, why in told["moments"].items():
            expected = FAILS.get(kind, {}).get(moment, "")
            assert expected in why if expected else why == ""
        assert set(told["left_out"]) == set(ALL) - set(DONE[kind])
        assert told["changed"] == []
        assert told["same"] == [True, True, True]
        assert set(told["kept"]) >= {"checkpoint-2", "checkpoint-4"}
        assert ".trainer_plugins_rehearsal" not in told["kept"]


@pytest.mark.all(unless=lambda launched: launched == "fsdp2")
def test_also_where_one_rank_has_no_room(launched) -> None:
    kind, facts = launched
    first, second = (each["small"] for each in facts)
    elsewhere = "it does not fit on another rank"
    assert second["moments"]["training"] == "2 of them fit at once"
    assert first["moments"]["training"] in (second["moments"]["training"], elsewhere)
    for told in (first, second):
        assert (told["step"], told["changed"], told["same"]) == (4, [], [True, True, True])
    assert first["moments"]["evaluation"]
    assert second["moments"]["evaluation"]
    if kind != "ddp":  # where it would end both, it is not tried
        assert "predicted from 1 and 2 rows: 57.2 MiB here" in second["moments"]["evaluation"]


@pytest.mark.all(unless=lambda launched: launched == "fsdp2")
def test_and_all_refuse_where_that_was_asked_for(launched) -> None:
    kind, facts = launched
    if kind != "ddp":
        pytest.skip("one kind is enough: the vote is the same")
    for each in (both["refused"] for both in facts):
        assert each["step"] == 0
        assert "[rehearsal-does-not-fit] training does not fit" in each["refused"]
