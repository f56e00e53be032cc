"""sentence-transformers: its own Trainer and losses where it is installed, and a stand-in of their shape."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, ByT5Tokenizer, Trainer

from tests.survival.failing import numbers_off_by, ragged_rows, small_trainer, survive
from tests.survival.test_contrastive import off_by_largest
from tests.survival.test_trl import sentence
from trainer_plugins import survive_oom

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bert = BertModel(BertConfig(vocab_size=128, **SIZES), False).double()

    def forward(self, features):
        hidden = self.bert(**features).last_hidden_state
        mask = features["attention_mask"][..., None]
        return {**features, "sentence_embedding": (hidden * mask).sum(1) / mask.sum(1)}


class Ranking(nn.Module):
    gather_across_devices = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features):
        one, other = (self.model(each)["sentence_embedding"] for each in features)
        scores = 5 * nn.functional.cosine_similarity(one[:, None], other, dim=-1)
        return nn.functional.cross_entropy(scores, torch.arange(len(scores)))


class CachedRanking(Ranking):
    pass


class GatheringRanking(Ranking):
    """It gathers the rows of all ranks: on one, its own."""

    gather_across_devices = True


class WeighedRanking(Ranking):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.temperature = nn.Parameter(torch.ones(()))


class SentenceTransformerTrainer(Trainer):
    loss: Any

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if model == self.model_wrapped and self.loss.model != model:  # as the library's does
            self.loss.model = model
        kinds = ("input_ids", "attention_mask")
        features = [{kind: inputs[f"{name}_{kind}"] for kind in kinds} for name in ("one", "other")]
        return self.loss(features)


SentenceTransformerTrainer.__module__ = "sentence_transformers.trainer"


def two_columns(rows):
    texts: dict[str, torch.Tensor] = {}
    for name, cut in (("one", slice(0, 6)), ("other", slice(3, None))):
        ids = [row["input_ids"][cut] for row in rows]
        ids_of = nn.utils.rnn.pad_sequence(ids, batch_first=True)
        texts |= {f"{name}_input_ids": ids_of, f"{name}_attention_mask": (ids_of != 0).long()}
    return texts


def ranking(tmp_path, loss=Ranking, **options):
    trainer = small_trainer(
        tmp_path,
        Encoder(),
        SentenceTransformerTrainer,
        **{"train_dataset": ragged_rows(), "data_collator": two_columns, **options},
    )
    trainer.loss = loss(trainer.model)
    return trainer


def assert_exact(whole, survived) -> None:
    ours, theirs = (
        [[g for g in step if g is not None] for step in run.gradients]  # a pooler has none
        for run in (survived, whole)
    )
    assert max(map(off_by_largest, ours, theirs)) <= 1e-12
    assert numbers_off_by(survived.logged, whole.logged) <= 1e-6


@pytest.mark.parametrize(("at", "loss"), [(0.3, Ranking), (0.8, GatheringRanking)])
@pytest.mark.all(but=1)
def test_a_loss_that_ranks_rows(tmp_path, at: float, loss) -> None:
    assert_exact(*survive(lambda: ranking(tmp_path, loss), {0: at}, ladder=()))


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (CachedRanking, "CachedRanking computes its own pieces: set its mini_batch_size instead"),
        (
            WeighedRanking,
            "WeighedRanking has weights outside the model, which survival does not track",
        ),
    ],
    ids=["cached", "weights"],
)
def test_refused_by_name(tmp_path, loss, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        survive_oom(ranking(tmp_path, loss))


LOSSES = {
    "MultipleNegativesRankingLoss": ("one", "other"),
    "MultipleNegativesSymmetricRankingLoss": ("one", "other"),
    "TripletLoss": ("one", "other", "third"),
    "CoSENTLoss": ("one", "other", "score"),
    "MatryoshkaLoss": ("one", "other"),
}


def made_by(library, model, names, trainer_name, tmp_path, losses, *inner, **options):
    datasets = pytest.importorskip("datasets")
    rows = [
        {
            column: n % 5 / 5 if column == "score" else sentence(n + place, 1 + (n + place) % 5)
            for place, column in enumerate(names)
        }
        for n in range(64)
    ]
    trainer = small_trainer(
        tmp_path,
        model,
        getattr(library, trainer_name),
        getattr(library, f"{trainer_name.removesuffix('er')}ingArguments"),
        train_dataset=datasets.Dataset.from_list(rows),
        data_collator=None,
        **{"remove_unused_columns": True, **options},
    )
    trainer.loss = losses(model, *inner)
    return trainer


def encoder(folder) -> str:
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=384, **SIZES)).save_pretrained(folder / "model")
    ByT5Tokenizer(extra_ids=0).save_pretrained(folder / "model")
    return str(folder / "model")


def by_the_library(tmp_path, name: str, **options) -> Trainer:
    library = pytest.importorskip("sentence_transformers")
    losses = pytest.importorskip("sentence_transformers.losses")
    models = pytest.importorskip("sentence_transformers.models")
    modules = [models.Transformer(encoder(tmp_path), max_seq_length=64), models.Pooling(32)]
    model = library.SentenceTransformer(modules=modules, device="cpu").double()
    inner = [losses.MultipleNegativesRankingLoss(model), [32, 16]] if "Mat" in name else []
    return made_by(library, model, LOSSES[name], "SentenceTransformerTrainer", tmp_path,
                   getattr(losses, name), *inner, **options)  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_the_library(tmp_path, name: str) -> None:
    assert_exact(*survive(lambda: by_the_library(tmp_path, name), {0: 0.8}, ladder=()))


def test_late_interaction_as_in_colbert(tmp_path) -> None:
    library = pytest.importorskip("sentence_transformers", minversion="6.0")
    home = pytest.importorskip("sentence_transformers.multi_vector_encoder.losses")
    torch.manual_seed(0)
    library.MultiVectorEncoder(encoder(tmp_path), device="cpu").save(str(tmp_path / "colbert"))

    def make():
        model = library.MultiVectorEncoder(str(tmp_path / "colbert"), device="cpu").double()
        ranking = home.MultiVectorMultipleNegativesRankingLoss
        trainer_name = "MultiVectorEncoderTrainer"
        return made_by(library, model, ("query", "document"), trainer_name, tmp_path, ranking)

    assert_exact(*survive(make, {0: 0.3}, ladder=()))
