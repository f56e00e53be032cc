"""The published measurements can be believed: each says where it is from, what was measured and what is not known."""

import json
import re
import sys

import pytest
import transformers

from benchmarks.published import FOLDER, published, read
from tests import processes
from trainer_plugins.planner.tried import KNOWN_ERROR_OF_RESERVED

SOURCE = """
[[source]]
name = "a page"
where = "https://example.org"
unit = "GiB"
measured = "max_memory_allocated"
missing = ["batch"]
note = "1.5 GiB"
rows = [{ name = "small", allocated = 1.5 }]
"""


def test_each_row_can_be_found_again_and_says_what_it_is() -> None:
    rows = published()

    assert len(rows) > 200
    for row in rows:
        assert all(size > 10**8 for size in row.measured.values()), row.key  # a unit that is wrong
        if row.complete:
            assert row.versions.keys() == {"torch", "transformers", "peft"}, row.key
            assert row.loop, row.key
            assert {
                "config",
                "dtype",
                "batch",
                "seq_length",
                "optimizer",
                "attention",
            } <= row.settings.keys(), row.key


def test_no_row_needs_more_for_its_tensors_than_was_reserved_or_than_the_card_showed() -> None:
    for row in published():
        sizes = [
            row.measured[name]
            for name in ("allocated", "reserved", "nvidia_smi")
            if name in row.measured
        ]
        assert sizes == sorted(sizes), row.key


def test_the_architectures_are_those_of_transformers() -> None:
    for name in {row.settings["config"] for row in published() if "config" in row.settings}:
        config = transformers.AutoConfig.from_pretrained(FOLDER / "configs" / f"{name}.json")
        assert hasattr(transformers, config.architectures[0]), name


@pytest.mark.all
def test_runs_on_a_tesla_t4_need_what_the_dry_card_counts() -> None:
    """Nothing was learned from them, and they had an older torch, whose allocator reserves otherwise."""
    measured = {row.key: row.measured for row in published()}
    keys = (
        "fitcheck 2026-09-15: tinyllama-1.1b LORA r32 fp16 b2 s512 efficient checkpointing",
        "fitcheck 2026-09-16: smollm2-1.7b LORA r32 fp16 b1 s2048 eager checkpointing",
    )
    card = ("-m", "trainer_plugins.drycuda", "--gpu", "t4", "-m", "benchmarks.prediction_dry")
    done = processes.run([sys.executable, *card, *keys], check=True)
    answers = [json.loads(line) for line in done.stdout.splitlines()]

    assert [each["key"] for each in answers] == [*keys]
    for answer in answers:
        figures = measured[answer["key"]]
        assert answer["allocated"] == figures["allocated"], answer
        error = answer["reserved"] / figures["reserved"] - 1
        assert abs(error) <= KNOWN_ERROR_OF_RESERVED, answer


def test_sizes_are_bytes_whatever_the_source_counts_in() -> None:
    assert read(SOURCE)[0].measured == {"allocated": 3 * 2**29}


@pytest.mark.parametrize(
    ("part", "instead", "message"),
    [
        ('where = "https://example.org"', "", "a page does not say where"),
        ('unit = "GiB"', 'unit = "Gb"', "a unit is one of B, MB, GB, MiB, GiB, got Gb"),
        (", allocated = 1.5", "", "measures nothing"),
        ("allocated = 1.5", "alocated = 1.5", "unknown keys: alocated"),
        ('missing = ["batch"]', "missing = []", "is complete, and has no `config`"),
        ("}]", '}, { name = "small", allocated = 2 }]', "rows of one name: a page: small"),
    ],
)
def test_a_row_that_does_not_say_enough_is_refused(part: str, instead: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read(SOURCE.replace(part, instead))
