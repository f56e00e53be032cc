"""Every trainer under every strategy: docs/survival.md's table says what was seen here, cell by cell."""

import json
import re
from pathlib import Path

import pytest

from tests import processes, rounding
from tests.distributed import extensions
from tests.distributed.launched import environment, torchrun
from tests.survival.failing import TERMS
from tests.survival.ranks.test_fsdp2 import IS_REFUSED, WHY_NOT

pytestmark = [pytest.mark.slow, pytest.mark.all]
pytest.importorskip("trl")
if IS_REFUSED:
    pytest.skip(WHY_NOT, allow_module_level=True)

HERE, PAGE = Path(__file__).parent, Path(__file__).parents[3] / "docs" / "survival.md"
WRAPPED = {
    "1 process": r"Llama\w+",
    "DDP": "DistributedDataParallel",
    "FSDP1": "FullyShardedDataParallel",
    "FSDP2": r"FSDP(Llama|Peft)\w+",
    "ZeRO-2": "DeepSpeedEngine",
    "ZeRO-3": "DeepSpeedEngine",
    "ZeRO-3 offloaded": "DeepSpeedEngine",
    "ZeRO-3 rehearsed": "DeepSpeedEngine",
}
MAY = rounding.of_sums(TERMS)  # TRL takes its losses in float32, DeepSpeed its gradients


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict[str, dict[str, list[dict]]]:
    """By strategy and trainer what each rank has seen."""
    from tests.survival.ranks import every_trainer

    folder = tmp_path_factory.mktemp("every_trainer")
    extensions.build("cpu")
    done = processes.run(
        [*torchrun(2), HERE / "every_trainer.py", folder], cwd=folder, environ=environment()
    )
    assert done.returncode == 0, done.stderr[-5000:]
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    alone = every_trainer.cells(folder / "alone", "1 process")
    return {"1 process": {name: [facts] for name, facts in alone.items()}} | {
        strategy: {name: [rank[strategy][name] for rank in ranks] for name in seen}
        for strategy, seen in ranks[0].items()
    }


def verdict(strategy: str, facts: list[dict]) -> str:
    for word in ("refused", "fails", "not tried"):
        if all(word in each for each in facts):
            return word
    for each in facts:
        assert re.fullmatch(WRAPPED[strategy], each["wrapped"])
        assert each["world_size"] == len(facts)
        assert each["zero"] == (int(strategy[5]) if "ZeRO" in strategy else 0)
        assert each["divided"] == 2, "both micro-batches of the step"
        assert each["num_logged"] >= 3
        assert each["logged_off_by"] <= 2e-6
    off_by = [each["off_by"] for each in facts if each["off_by"] is not None]
    assert off_by, "one rank has the whole weights"
    return "exact" if max(off_by) <= MAY else f"off by {max(off_by):.1e}"


def test_adapters_references_and_uneven_ranks_are_exact(told) -> None:
    from tests.survival.ranks import every_trainer

    for strategy in every_trainer.OF_VARIANTS:
        for name in every_trainer.VARIANTS:
            expected = "fails" if (strategy, name) in every_trainer.FAILS else "exact"
            if (strategy, name) in every_trainer.REFUSED:
                expected = "refused"
            assert verdict(strategy, told[strategy][name]) == expected, (strategy, name)


@pytest.mark.parametrize("name", ["GRPOTrainer", "RLOOTrainer"])
def test_completions_are_rehearsed_at_the_length_they_may_get(told, name: str) -> None:
    """On cards that hold 60 and 40 tokens: one completion, where it and its prompt have 12."""
    facts = told["ZeRO-3 rehearsed"][name]
    assert [each["limit"] for each in facts] == [24, 24]
    assert verdict("ZeRO-3 rehearsed", facts) == "exact"


def test_the_page_says_what_was_seen(told) -> None:
    from tests.survival.ranks import every_trainer

    verdicts = {
        name: [verdict(strategy, told[strategy][name]) for strategy in every_trainer.OF_TABLE]
        for name in every_trainer.TRAINERS
    }
    page = PAGE.read_text().replace(" (*)", "").splitlines()
    assert f"| | {' | '.join(every_trainer.OF_TABLE)} |" in page
    rows = [row.strip("| ").split(" | ") for row in page if re.match(r"\| \w*Trainer\b", row)]
    assert {name: cells for names, *cells in rows for name in names.split(", ")} == verdicts
