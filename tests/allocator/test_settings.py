"""The parser, beside torch's own."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainer_plugins.allocator.settings import (
    OPTIONS,
    Kind,
    SettingsError,
    UnknownOptionError,
    parse,
    read,
)

HAS_CUDA_BUILD = torch.version.cuda is not None

# text -> the values, or None where it is refused
BOTH = {
    "": {},
    "expandable_segments:True": {"expandable_segments": True},
    "expandable_segments:False": {"expandable_segments": False},
    "expandable_segments:true": None,
    "expandable_segments:1": None,
    "expandable_segments=True": None,
    "expandable_segments": None,
    "expandable_segments:": None,
    "expandable_segments:True,": {"expandable_segments": True},
    "expandable_segments:True max_split_size_mb:128": None,
    "expandable_segments:True;max_split_size_mb:128": None,
    "expandable_segments:True,expandable_segments:False": {"expandable_segments": False},
    " expandable_segments : True , max_split_size_mb : 128 ": {
        "expandable_segments": True,
        "max_split_size_mb": 128,
    },
    "max_split_size_mb:19": None,
    "max_split_size_mb:20": {"max_split_size_mb": 20},
    "max_split_size_mb:+64": {"max_split_size_mb": 64},
    "max_split_size_mb:128MB": {"max_split_size_mb": 128},
    "max_split_size_mb:128.5": {"max_split_size_mb": 128},
    "max_split_size_mb:-1": {"max_split_size_mb": 2**64 - 1},
    "max_split_size_mb:abc": None,
    "max_split_size_mb:99999999999999999999": None,
    "max_split_size_mb:[128]": None,
    "max_non_split_rounding_mb:19": None,
    "max_non_split_rounding_mb:20": {"max_non_split_rounding_mb": 20},
    "large_segment_size_mb:10": None,
    "large_segment_size_mb:11": {"large_segment_size_mb": 11},
    "large_segment_size_mb:64,max_split_size_mb:32": None,
    "max_split_size_mb:32,large_segment_size_mb:64": None,
    "max_non_split_rounding_mb:32,large_segment_size_mb:64": None,
    "max_split_size_mb:64,large_segment_size_mb:64": {
        "max_split_size_mb": 64,
        "large_segment_size_mb": 64,
    },
    "garbage_collection_threshold:0": None,
    "garbage_collection_threshold:0.8": {"garbage_collection_threshold": 0.8},
    "garbage_collection_threshold:.5": {"garbage_collection_threshold": 0.5},
    "garbage_collection_threshold:1e-3": {"garbage_collection_threshold": 0.001},
    "garbage_collection_threshold:0.8abc": {"garbage_collection_threshold": 0.8},
    "garbage_collection_threshold:1.0": None,
    "garbage_collection_threshold:80%": None,
    "garbage_collection_threshold:nan": None,
    "roundup_power2_divisions:4": {"roundup_power2_divisions": (4,) * 16},
    "roundup_power2_divisions:0": None,
    "roundup_power2_divisions:3": None,
    "roundup_power2_divisions:-4": None,
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]": {
        "roundup_power2_divisions": (*(1,) * 9, 2, 4, *(8,) * 5)
    },
    "roundup_power2_divisions:[512:2,256:4]": {
        "roundup_power2_divisions": (*(2,) * 8, 4, 2, *(0,) * 6)
    },
    "roundup_power2_divisions:[>:4]": {"roundup_power2_divisions": (0, *(4,) * 15)},
    "roundup_power2_divisions:[256:1,>:4,]": {"roundup_power2_divisions": (*(1,) * 9, *(4,) * 7)},
    "roundup_power2_divisions:[131072:2]": {"roundup_power2_divisions": (2,) * 16},
    "roundup_power2_divisions:[256:0]": {"roundup_power2_divisions": (0,) * 16},
    "roundup_power2_divisions:[]": {"roundup_power2_divisions": (0,) * 16},
    "roundup_power2_divisions:[300:1]": None,
    "roundup_power2_divisions:[0:1]": None,
    "roundup_power2_divisions:[256:3]": None,
    "roundup_power2_divisions:[256:1": None,
    "roundup_power2_divisions:[256]": None,
    "roundup_power2_divisions:[256:1;512:2]": None,
    "roundup_power2_divisions:[256:1,512:2],expandable_segments:True": {
        "roundup_power2_divisions": (*(1,) * 9, 2, *(0,) * 6),
        "expandable_segments": True,
    },
    "pinned_use_background_threads:True": {"pinned_use_background_threads": True},
    "pinned_use_background_threads:no": None,
    "pinned_max_round_threshold_mb:0": {"pinned_max_round_threshold_mb": 0},
    "pinned_max_cached_size_mb:64": {"pinned_max_cached_size_mb": 64},
    "pinned_max_cached_size_mb:x": None,
}
# A build without CUDA skips these keys, whatever their value: it says yes to all of them.
CUDA_ONLY = {
    "backend:native": {"backend": "native"},
    "backend:foo": None,
    "release_lock_on_cudamalloc:True": {"release_lock_on_cudamalloc": True},
    "release_lock_on_hipmalloc:False": {"release_lock_on_hipmalloc": False},
    "graph_capture_record_stream_reuse:True": {"graph_capture_record_stream_reuse": True},
    "per_process_memory_fraction:0": {"per_process_memory_fraction": 0.0},
    "per_process_memory_fraction:1": {"per_process_memory_fraction": 1.0},
    "per_process_memory_fraction:1.1": None,
    "per_process_memory_fraction:-0.1": None,
    "throw_on_cudamalloc_oom:True": {"throw_on_cudamalloc_oom": True},
    "throw_on_cudamalloc_oom:1": None,
    "pinned_use_cuda_host_register:True": {"pinned_use_cuda_host_register": True},
    "pinned_use_hip_host_register:True": {"pinned_use_hip_host_register": True},
    "pinned_num_register_threads:0": None,
    "pinned_num_register_threads:3": None,
    "pinned_num_register_threads:128": {"pinned_num_register_threads": 128},
    "pinned_num_register_threads:256": None,
    "pinned_reserve_segment_size_mb:0": None,
    "pinned_reserve_segment_size_mb:1024": {"pinned_reserve_segment_size_mb": 1024},
    "pinned_free_catch_all:True": {"pinned_free_catch_all": True},
    "pinned_free_catch_all:true": None,
    "max_split_size:128": None,
    "EXPANDABLE_SEGMENTS:True": None,
    ",expandable_segments:True": None,
    "expandable_segments:True,,max_split_size_mb:32": None,
}


@pytest.mark.parametrize(("text", "values"), (BOTH | CUDA_ONLY).items())
def test_the_whole_grammar(text: str, values: dict[str, object] | None) -> None:
    if values is None:
        with pytest.raises(SettingsError):
            parse(text)
    else:
        assert parse(text) == values


def test_every_option_is_in_the_table_with_a_good_value() -> None:
    good = {key for values in (BOTH | CUDA_ONLY).values() for key in values or ()}
    assert good == {option.key for option in OPTIONS}


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="the table is that of torch 2.13"
)
def test_torch_itself_says_the_same() -> None:
    table = BOTH | CUDA_ONLY
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("torch_reads.py"))],
        input="\n".join(table) + "\n",
        capture_output=True,
        text=True,
        check=True,
    )
    answers = dict(zip(table, done.stdout.splitlines(), strict=True))
    expected = {
        text: "accepted"
        if values is not None or (text in CUDA_ONLY and not HAS_CUDA_BUILD)
        else "refused"
        for text, values in table.items()
    }
    assert answers == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "expandable_segment:True",
            "knows the option 'expandable_segment': it is expandable_segments",
        ),
        ("Expandable_Segments:True", "it is expandable_segments"),
        ("max_split_size:128", "it is max_split_size_mb"),
        ("zzz:1", "it knows backend, max_split_size_mb"),
        (
            "expandable_segments:true",
            "expandable_segments needs True or False, in exactly this spelling, got 'true'",
        ),
        ("max_split_size_mb:19", "max_split_size_mb needs at least 20, got '19'"),
        ("garbage_collection_threshold:80", "needs a number above 0 and below 1, got '80'"),
        (
            "pinned_num_register_threads:256",
            "pinned_num_register_threads needs at most 128, got '256'",
        ),
        ("roundup_power2_divisions:[300:1]", "needs a power of 2 as interval, got '300'"),
        ("expandable_segments=True", "key:value pairs separated by commas"),
        ("expandable_segments,True", "key:value pairs"),  # torch takes it by accident
    ],
)
def test_an_error_names_the_option_the_rule_and_what_was_given(text: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse(text)
    assert message in str(caught.value)


def test_all_mistakes_are_told_at_once() -> None:
    settings, errors = read("expandable_segments:true,foo:1,max_split_size_mb:128MB")

    assert [type(error) for error in errors] == [SettingsError, UnknownOptionError]
    assert [(setting.value, setting.misread) for setting in settings] == [(128, True)]


def test_a_flag_is_never_a_number() -> None:
    flags = [option.key for option in OPTIONS if option.kind is Kind.FLAG]
    for key in flags:
        assert parse(f"{key}:True")[key] is True
        assert read(f"{key}:yes")[1]
