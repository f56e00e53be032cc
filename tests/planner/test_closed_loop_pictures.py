"""Vision-language models from a config and flags: predicted, then really run on the simulated card."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForImageTextToText
from typer.testing import CliRunner

from tests.planner.loop import Loop
from tests.planner.test_closed_loop import run
from tests.planner.test_plans import request, tiny
from tests.processes import ENDS_A_HANG
from tests.wanted import wanted
from trainer_plugins.cli import app
from trainer_plugins.planner import MemoryPlan, PlanError
from trainer_plugins.planner.cards import Card
from trainer_plugins.planner.predict import predict_all
from trainer_plugins.units import GIB

IS_OLD = int(transformers.__version__.partition(".")[0]) < 5
CARD = Card(
    name="simgpu",
    capacity_bytes=4 * GIB,
    capability=(9, 0),
    context_bytes=0,
    context_source="a simulated card has none",
)
LENGTH, ROWS, PICTURES = 160, 4, 2
SIDE, HEIGHT, WIDTH, PATCH = 56, 112, 84, 14
PICTURE = 990  # the token that stands for a piece of a picture
TEXT = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
GEMMA = {**TEXT, "head_dim": 32}
ROPE = {"rope_type": "default", "mrope_section": [4, 6, 6]}
QWEN = {**TEXT, "head_dim": 32, "rope_scaling": ROPE}
SEES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": PATCH,
}
SEES_ANY = {"patch_size": PATCH, "spatial_merge_size": 2, "depth": 3, "num_heads": 4}
SEES_WIDE = {**SEES_ANY, "hidden_size": 64, "intermediate_size": 128, "out_hidden_size": 128}


def of(kind, text, vision, **fields):
    tokens = {"image_token_id": PICTURE, "image_token_index": PICTURE}
    return {
        "model_type": kind, "text_config": text, "vision_config": vision, **tokens, **fields
    }  # fmt: skip


def of_qwen(kind, vision):
    tokens = {"vision_start_token_id": 991, "vision_end_token_id": 992, "video_token_id": 993}
    return of(kind, QWEN, {"temporal_patch_size": 2, **vision}, **tokens)


LLAMA = {"model_type": "llama", **TEXT}
SIGLIP = {"model_type": "siglip_vision_model", **SEES}
CONFIGS = {
    "llava": of("llava", LLAMA, {"model_type": "clip_vision_model", **SEES}),
    "paligemma": of(
        *("paligemma", {"model_type": "gemma", **GEMMA}, {**SIGLIP, "projection_dim": 128}),
        projection_dim=128,
    ),
    "gemma3": of(
        *("gemma3", {"model_type": "gemma3_text", "sliding_window": 64, **GEMMA}, SIGLIP),
        mm_tokens_per_image=4,
    ),
    "idefics3": of("idefics3", LLAMA, SEES, scale_factor=2, pad_token_id=0),
    "smolvlm": of("smolvlm", LLAMA, SEES, scale_factor=2, pad_token_id=0),
    "qwen2_vl": of_qwen(
        "qwen2_vl", {**SEES_ANY, "embed_dim": 64, "hidden_size": 128, "mlp_ratio": 2}
    ),
    "qwen2_5_vl": of_qwen(
        "qwen2_5_vl", {**SEES_WIDE, "window_size": 56, "fullatt_block_indexes": [1]}
    ),
    "qwen3_vl": of_qwen(
        "qwen3_vl", {**SEES_WIDE, "num_position_embeddings": 64, "deepstack_visual_indexes": [1]}
    ),
}


def planned(name, *flags, **source):
    wanted = {
        "sequence_length": LENGTH,
        "images_per_row": PICTURES,
        "image_size": (HEIGHT, WIDTH) if "qwen" in name else None,
        **source,
    }
    return on_the_card(request(CONFIGS[name], *flags, rows=ROWS, dtype="float32", **wanted))


def on_the_card(asked):
    return replace(asked, device="simgpu", card=CARD)


def rows(name, sides=((HEIGHT, WIDTH),) * 16):
    """What a processor makes: a token for each piece of a picture, and what the model is told of it."""
    num_pieces = {"llava": 16, "paligemma": 16, "gemma3": 4, "idefics3": 4, "smolvlm": 4}
    made = []
    for index, (height, width) in enumerate(sides):
        pieces = num_pieces.get(name, height * width // (2 * PATCH) ** 2)
        tokens = torch.full((LENGTH,), index + 3)
        for start in range(5, LENGTH, LENGTH // PICTURES):
            tokens[start : start + pieces] = PICTURE
        row = {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}
        types = (tokens == PICTURE).long()
        if "qwen" in name:
            grid = [1, height // PATCH, width // PATCH]
            patches = torch.rand(PICTURES * grid[1] * grid[2], 3 * 2 * PATCH * PATCH)
            grids = torch.tensor([grid] * PICTURES)
            row |= {"pixel_values": patches, "image_grid_thw": grids, "mm_token_type_ids": types}
        else:
            row |= {"pixel_values": torch.rand(PICTURES, 3, SIDE, SIDE)}
        if name in ("paligemma", "gemma3"):
            row["token_type_ids"] = types
        if name in ("idefics3", "smolvlm"):
            row["pixel_attention_mask"] = torch.ones(PICTURES, SIDE, SIDE).long()
        made.append(row)
    return made


def trains(path, name, **more):
    fields = {key: value for key, value in CONFIGS[name].items() if key != "model_type"}
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(name, **fields))
    trainer = run(path, model, data=rows(name, **more), per_device_train_batch_size=ROWS)

    def collate(batch):
        in_one_list = {"pixel_values", "image_grid_thw"}
        if "pixel_attention_mask" in batch[0]:
            in_one_list.clear()
        return {
            key: (torch.cat if key in in_one_list else torch.stack)([row[key] for row in batch])
            for key in batch[0]
        }

    trainer.data_collator = collate
    return trainer


LLAVA_NEXT = {key: value for key, value in CONFIGS["llava"].items() if key != "model_type"}
PIXTRAL = {"model_type": "pixtral", **SEES, "head_dim": 16}
WITH_SIZES = {
    "llava_next": (
        {**LLAVA_NEXT, "image_grid_pinpoints": [[SIDE, 2 * SIDE], [2 * SIDE, SIDE]]},
        *(56, (3, 3, SIDE, SIDE), (2 * SIDE, SIDE)),
    ),
    "mistral3": (
        {
            "text_config": {"model_type": "mistral", **GEMMA},
            "vision_config": PIXTRAL,
            "image_token_index": PICTURE,
            "spatial_merge_size": 2,
        },
        *(12, (3, HEIGHT, WIDTH), (HEIGHT, WIDTH)),
    ),
}


def trains_with_sizes(path, kind):
    """A model that is told the height and width of each picture, before it was cut up."""
    fields, num_pieces, pixels, size = WITH_SIZES[kind]
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **fields))
    tokens = torch.full((LENGTH,), 5)
    tokens[3 : 3 + num_pieces] = PICTURE
    row = {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}
    row |= {"pixel_values": torch.rand(pixels), "image_sizes": torch.tensor(size)}
    return run(path, model, data=[row] * 16, per_device_train_batch_size=ROWS)


OTHER_SIDES = ((HEIGHT, WIDTH), (56, 56), (84, 140), (112, 56))  # of one batch
RUNS = {name: lambda path, name=name: trains(path, name) for name in CONFIGS}
OF_TRAINERS = Loop(
    {
        **RUNS,
        **{
            f"{name}, pictures of four sizes": partial(trains, name=name, sides=OTHER_SIDES)
            for name in CONFIGS
            if "qwen" in name
        },
        **{kind: partial(trains_with_sizes, kind=kind) for kind in WITH_SIZES},
    }
)
SAID = {
    **{name: planned(name) for name in CONFIGS},
    "no flags": planned("qwen2_vl", images_per_row=None, image_size=None, sequence_length=320),
    "evaluates": planned("qwen2_5_vl", "--do_eval", "True"),
    "text": planned("gemma3", images_per_row=0),
    "no room": planned("qwen2_vl", image_size=(2048, 2048)),
    "other size": planned("llava", image_size=(112, 112)),
    "llama": on_the_card(request(tiny(), images_per_row=1)),
}


@pytest.fixture(scope="module")
def outcomes(request) -> dict[str, MemoryPlan | PlanError]:
    fixed = ("no flags", "evaluates", "gemma3", "text")
    asked = wanted(request, SAID, also=fixed)
    return dict(zip(asked, predict_all([*asked.values()], ENDS_A_HANG), strict=True))


@pytest.mark.all(unless=lambda name: name == "qwen2_vl")
@pytest.mark.skipif(IS_OLD, reason="transformers 4 asks how much a mask picks")
@pytest.mark.parametrize("name", RUNS)
def test_the_card_holds_what_was_predicted(simgpu, outcomes, tmp_path, name):
    loop = Loop(RUNS)
    loop.outcomes.update(outcomes)
    plan = loop.goes_round(name, tmp_path)
    size = f"{HEIGHT} x {WIDTH}" if "qwen" in name else f"{SIDE} x {SIDE}"
    assert any(f"each row has 2 pictures of {size} pixels" in line for line in plan.assumptions)


@pytest.mark.all(unless=lambda name: name == "llava")
@pytest.mark.skipif(IS_OLD, reason="transformers 4 asks how much a mask picks")
@pytest.mark.parametrize("name", OF_TRAINERS.runs)
def test_a_trainer_is_planned_with_its_own_pictures(simgpu, tmp_path, name):
    OF_TRAINERS.goes_round(name, tmp_path)


@pytest.mark.skipif(IS_OLD, reason="transformers 4 asks how much a mask picks")
def test_what_nobody_said_of_pictures_is_assumed_and_said(outcomes):
    plan = outcomes["no flags"]
    assert isinstance(plan, MemoryPlan), plan
    line = (
        "each row has a picture of 448 x 448 pixels (a guess; see --image-size), 256 of its tokens"
    )
    assert any(line in said for said in plan.assumptions)
    assert "evaluation" in outcomes["evaluates"].moments
    with_pictures, text = outcomes["gemma3"], outcomes["text"]
    assert "rows have no pictures (--images-per-row)" in text.assumptions
    assert (
        text.moments["forward"].allocated_bytes < with_pictures.moments["forward"].allocated_bytes
    )


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "no room",
            "its pictures take 10,658 of them (--images-per-row 2): nothing is left for text",
        ),
        ("other size", "--image-size: this model's pictures have 56x56 pixels"),
        ("llama", "for these models, and not for llama: llava, paligemma, gemma3"),
    ],
)
def test_pictures_that_cannot_be_are_one_line(outcomes, name, line):
    assert line in str(outcomes[name])
    assert "\n" not in str(outcomes[name])


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--image-size", "448"), "a height and a width, as in 448x672, got '448'"),
        (("--image-size", "448x0"), "a height and a width, as in 448x672, got '448x0'"),
        (("--images-per-row", "-1"), "pictures, got -1"),
        (
            ("--images-per-row", "1", "--trainer", "sft"),
            "pictures and --trainer do not go together",
        ),
    ],
)
def test_a_wrong_flag_is_refused_at_once(tmp_path, flags, line):
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    done = CliRunner().invoke(app, ["plan", "--model", str(tmp_path), *flags])
    assert done.exit_code == 2
    assert line in done.output
