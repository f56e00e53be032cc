"""Speech models, from a Trainer and from a config: predicted, then run on the simulated card."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    ASTConfig,
    ASTForAudioClassification,
    HubertConfig,
    HubertForCTC,
    MoonshineConfig,
    MoonshineForConditionalGeneration,
    Speech2TextConfig,
    Speech2TextForConditionalGeneration,
    Trainer,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    WavLMConfig,
    WavLMForSequenceClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from tests.planner.loop import Loop
from tests.planner.test_closed_loop import run
from tests.planner.test_closed_loop_pictures import on_the_card
from tests.planner.test_plans import request, tiny
from tests.processes import ENDS_A_HANG
from tests.wanted import wanted
from trainer_plugins import MemoryPlan, plan_run
from trainer_plugins.planner import NotPredicted, PlanError
from trainer_plugins.planner.predict import predict_all
from trainer_plugins.planner.rehearse.gather import request_of

IS_OLD = int(transformers.__version__.partition(".")[0]) < 5
SECOND = 16_000  # samples, as the models' feature extractors make them
ROWS, SECONDS, LETTERS = 4, 2.0, 12
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "conv_dim": (32,) * 7,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "vocab_size": 40,
    "pad_token_id": 0,
}
BOTH_HAVE_HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
BOTH_ARE_SMALL = {
    **BOTH_HAVE_HEADS,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
}


def sounds(letters):
    """Rows of sound of three lengths with their texts; without letters, with a class."""
    made = []
    for index in range(16):
        length = int((SECONDS, 1.6, SECONDS, 0.7)[index % 4] * SECOND)
        text = [1 + (index + place) % 30 for place in range(letters - index % 3)]
        made.append(
            {
                "input_values": torch.rand(length).tolist(),
                "labels": text if letters else 0,
                "length": length,
            }
        )
    return Dataset.from_list(made)


def collate(batch):
    """What a script defines for such rows: it pads each column to its longest."""
    columns = {
        name: [torch.tensor(row[name]) for row in batch] for name in ("input_values", "labels")
    }
    made = {"input_values": pad_sequence(columns["input_values"], batch_first=True)}
    masks = [torch.ones(len(row), dtype=torch.long) for row in columns["input_values"]]
    made["attention_mask"] = pad_sequence(masks, batch_first=True)
    has_text = columns["labels"][0].ndim == 1
    made["labels"] = (
        pad_sequence(columns["labels"], batch_first=True, padding_value=-100)
        if has_text
        else torch.stack(columns["labels"])
    )
    return made


MODELS = {
    "wav2vec2": (Wav2Vec2Config, Wav2Vec2ForCTC),
    "hubert": (HubertConfig, HubertForCTC),
    "wavlm": (WavLMConfig, WavLMForSequenceClassification),
}


def hears(path, kind, letters=LETTERS, frozen=True, trainer=Trainer, config=None, **arguments):
    """A model whose layers are left out by chance, and that hides parts of the sound."""
    torch.manual_seed(0)
    of_config, of_model = MODELS[kind]
    model = of_model(of_config(**{**SIZES, **(config or {})}))
    if frozen:
        model.freeze_feature_encoder()
    settings = {"max_steps": 6, "per_device_train_batch_size": ROWS, **arguments}
    made = run(path, model, trainer, data=sounds(letters), remove_unused_columns=False, **settings)
    made.data_collator = collate
    return made


def classifies_spectra(path):
    model = ASTForAudioClassification(
        ASTConfig(
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=128,
            max_length=256,
            num_mel_bins=32,
        )
    )
    rows = [{"input_values": torch.rand(256, 32), "labels": index % 2} for index in range(16)]
    return run(path, model, data=rows, per_device_train_batch_size=ROWS)


def writes(path, make):
    """An encoder-decoder, whose texts of several lengths are padded with -100."""
    torch.manual_seed(0)
    model, sound = make()
    rows = []
    for index in range(16):
        text = torch.full((40,), -100)
        text[: 40 - index % 4] = 7
        rows.append({**{name: torch.rand(shape) for name, shape in sound.items()}, "labels": text})
    return run(path, model, data=rows, per_device_train_batch_size=ROWS)


def whisper():
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    sizes = {"max_source_positions": 128, "max_target_positions": 64, "num_mel_bins": 32}
    config = WhisperConfig(vocab_size=1000, **BOTH_ARE_SMALL, **sizes, **tokens)
    return WhisperForConditionalGeneration(config), {"input_features": (32, 256)}


def speech_to_text():
    sizes = {"max_source_positions": 600, "max_target_positions": 64, "conv_channels": 64}
    config = Speech2TextConfig(vocab_size=1000, **BOTH_ARE_SMALL, **sizes)
    return Speech2TextForConditionalGeneration(config), {"input_features": (256, 80)}


def moonshine():
    layers = {"encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2}
    heads = {"encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4}
    config = MoonshineConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=128, pad_token_id=2, **layers, **heads
    )
    return MoonshineForConditionalGeneration(config), {"input_values": (SECOND,)}


TOO_LONG_ARE_ZERO = {"ctc_zero_infinity": True, "ctc_loss_reduction": "mean"}
SPEAKS = Loop(
    {
        "wav2vec2": lambda path: hears(path, "wav2vec2"),
        "wav2vec2, of one length": lambda path: hears(
            path, "wav2vec2", train_sampling_strategy="group_by_length"
        ),
        "wav2vec2, checkpointing": lambda path: hears(
            path, "wav2vec2", gradient_checkpointing=True
        ),
        "wav2vec2, long texts": lambda path: hears(
            path, "wav2vec2", letters=400, config=TOO_LONG_ARE_ZERO
        ),
        "wav2vec2, evaluation": lambda path: hears(
            path,
            "wav2vec2",
            evaluation=sounds(LETTERS),
            metrics=lambda predictions: {},
            eval_strategy="steps",
            eval_steps=3,
            per_device_eval_batch_size=2 * ROWS,
        ),
        "hubert, trained whole": lambda path: hears(path, "hubert", frozen=False),
        "wavlm": lambda path: hears(path, "wavlm", letters=0),
        "ast": classifies_spectra,
        "whisper": lambda path: writes(path, whisper),
        "speech2text": lambda path: writes(path, speech_to_text),
        "moonshine": lambda path: writes(path, moonshine),
    }
)


def of_config(kind, **source):
    _, model = MODELS[kind]
    config = {"model_type": kind, "architectures": [model.__name__], **SIZES}
    return on_the_card(request(config, rows=ROWS, dtype="float32", **source))


SAID = {
    "wav2vec2": of_config("wav2vec2", sound_seconds=SECONDS, target_length=LETTERS),
    "wavlm": of_config("wavlm", sound_seconds=SECONDS),
    "guess": of_config("hubert", sound_seconds=SECONDS),
    "llama": on_the_card(request(tiny(), sound_seconds=1.0)),
}


class OwnLoss(Trainer):
    """A script's own CTC loss: over all labels in one list, each row with as many."""

    dtype, lengths = torch.long, None

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.pop("labels")
        scores = model(**inputs).logits.log_softmax(-1).transpose(0, 1)
        rows = scores.shape[1]
        return torch.nn.CTCLoss(zero_infinity=True)(
            scores,
            labels[labels >= 0].to(self.dtype),
            (scores.shape[0],) * rows,
            self.lengths or (labels >= 0).sum(-1),
        )


class OwnShortLoss(OwnLoss):
    dtype = torch.int32


def on_cuda(path, **given):
    return replace(request_of(hears(path, "wav2vec2", **given), None, "", 1, None), device="cuda")


@pytest.fixture(scope="module")
def from_configs(request) -> dict[str, MemoryPlan | PlanError]:
    asked = wanted(request, SAID, also=("guess", "llama"))
    return dict(zip(asked, predict_all([*asked.values()], ENDS_A_HANG), strict=True))


@pytest.mark.all(unless=lambda name: name in ("wav2vec2", "whisper"))
@pytest.mark.skipif(IS_OLD, reason="transformers 4 asks how much a mask picks")
@pytest.mark.parametrize("name", SPEAKS.runs)
def test_the_card_holds_what_was_predicted(simgpu, tmp_path, name):
    plan = SPEAKS.goes_round(name, tmp_path)
    said = "\n".join(plan.assumptions)
    assert ("the labels of a CTC loss are as long" in said) == (name[:6] in ("wav2ve", "hubert"))
    assert ("LayerDrop skips no layer" in said) == (name[:5] in ("wav2v", "huber", "wavlm"))


@pytest.mark.all
@pytest.mark.skipif(IS_OLD, reason="transformers 4 asks how much a mask picks")
@pytest.mark.parametrize(("name", "letters"), [("wav2vec2", LETTERS), ("wavlm", 0)])
def test_a_config_is_planned_with_the_sounds_that_were_said(
    simgpu, from_configs, tmp_path, name, letters
):
    loop = Loop({name: partial(hears, kind=name, letters=letters, frozen=False)})
    loop.outcomes.update(from_configs)
    plan = loop.goes_round(name, tmp_path)
    words = "each row has 2 s of sound, 32,000 samples (16,000 a second)"
    if letters:
        words += ", and 12 labels; see --target-length"
    assert words in plan.assumptions


def test_labels_that_nobody_said_are_a_guess(from_configs):
    line = "32,000 samples (16,000 a second), and 30 labels (15 a second: a guess); see --target"
    assert any(line in said for said in from_configs["guess"].assumptions)


def test_who_hears_nothing_takes_no_sound(from_configs):
    line = (
        "--sound-seconds is for models that take the samples of a sound (input_values), and not for"
    )
    assert line in str(from_configs["llama"])


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), 1e9])
def test_a_sound_that_cannot_be_is_refused(seconds):
    with pytest.raises(PlanError, match=r"a sound has up to 65,536 s \(--sound-seconds\), got"):
        of_config("wav2vec2", sound_seconds=seconds)


def test_no_layer_is_left_out_however_often_the_run_does(tmp_path):
    """LayerDrop asks torch for a layer of the encoder, and numpy for one of the adapter."""
    plans = [
        plan_run(
            hears(tmp_path, "wav2vec2", config={"layerdrop": chance, "add_adapter": True}),
            gpu="24GiB",
        )
        for chance in (0.0, 0.99)
    ]
    assert plans[0].allocated_peak_bytes == plans[1].allocated_peak_bytes
    assert "LayerDrop skips no layer: the worst case" in plans[1].assumptions
    assert "LayerDrop skips no layer: the worst case" not in plans[0].assumptions


@pytest.mark.all(unless=lambda classes: classes == 2000)
@pytest.mark.parametrize(("classes", "least", "most"), [(40, 1.9, 2.1), (2000, 2.6, 3.0)])
def test_on_cuda_the_loss_of_long_texts_takes_more(tmp_path, classes, least, most):
    """Two tables of a number for each moment and twice for each letter.

    With many classes two halves more: another kernel takes the letters, and torch the blanks.
    """
    few, many = predict_all(
        [
            on_cuda(tmp_path, letters=letters, config={"vocab_size": classes})
            for letters in (10, 4010)
        ],
        ENDS_A_HANG,
    )
    assert isinstance(few, MemoryPlan), few
    assert isinstance(many, MemoryPlan), many
    moments = 99  # of two seconds
    table = 4 * ROWS * moments * 2 * 4000
    more = many.moments["backward"].allocated_bytes - few.moments["backward"].allocated_bytes
    assert least < more / table < most


@pytest.mark.skipif(IS_OLD, reason="transformers 4 keeps what a class has frozen")
def test_a_loaded_model_trains_what_its_class_has_frozen():
    """Whisper's class freezes the encoder's places; transformers 5 loads all as it trains."""
    plan = plan_run(WhisperConfig(**BOTH_ARE_SMALL).to_dict(), gpu="8GiB")
    assert plan.num_trainable_parameters == plan.num_parameters


def test_a_script_with_its_own_ctc_loss_is_planned_unless_cudnn_may_take_it(tmp_path):
    known = type("Known", (OwnLoss,), {"lengths": (LETTERS,) * ROWS})
    asked, told, short = predict_all(
        [on_cuda(tmp_path, trainer=each) for each in (OwnLoss, known, OwnShortLoss)], ENDS_A_HANG
    )
    assert isinstance(asked, MemoryPlan), asked
    assert isinstance(told, MemoryPlan), told
    line = "the labels of a CTC loss are as long as their shape allows: the worst case"
    assert line in asked.assumptions
    assert line not in told.assumptions
    assert asked.allocated_peak_bytes == told.allocated_peak_bytes
    assert isinstance(short, NotPredicted), short
    assert "labels in one list of int32: make them int64" in str(short)
