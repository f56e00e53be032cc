"""Lines that stand before an OOM come in; whether the run had fitted for some time comes out."""

import pytest

from tests.explain.stated import explained
from tests.explain.test_text import FULL, TRAINER

# What a run prints of itself before its first step, and bars of other work.
BANNERS = [
    '==((====))==  Unsloth - 2x faster free finetuning | Num GPUs = 1\n   \\\\   /|    Num examples = 1,300 | Num Epochs = 2\nO^O/ \\_/ \\    Batch size per device = 2 | Gradient Accumulation steps = 8\n\\        /    Total batch size = 16 | Total steps = 300\n "-____-"     Number of trainable parameters = 167,772,160',
    "[INFO|trainer.py:2405] 2025-01-01 10:00:00,123 >> ***** Running training *****\n[INFO|trainer.py:2411] 2025-01-01 10:00:00,123 >>   Gradient Accumulation steps = 8\n[INFO|trainer.py:2412] >>   Total optimization steps = 300",
    "warmup steps: 100",
    "Num warmup steps = 100",
    "max_steps: 300",
    "save_steps=500",
    "  logging_steps: 10",
    "eval_steps = 100",
    "  steps_per_print: 10",
    "Total steps = 60",
    "Number of training steps: 1000",
    "total training steps 5000",
    "gradient_accumulation_steps: 16",
    "lr_scheduler: cosine, warmup steps: 100, lr: 1e-4",
    "Step 3/7 : RUN pip install torch",
    "Step 4: load the model and the data",
    "Continuing training from global step 1000",
    "  Will skip the first 0 epochs then the first 1000 batches in the first epoch.",
    "TrainingArguments(logging_steps=10, eval_steps=20, max_steps=300, learning_rate=2e-5)",
    "{'max_steps': 300, 'warmup_steps': 30, 'num_train_epochs': 3}",
    "Loading checkpoint shards: 100%|████| 8/8 [00:16<00:00, 2.04s/it]",
    "Map (num_proc=4):  41%|████      | 4100/10000 [00:10<00:14, 410.1 examples/s]",
    "Tokenizing train dataset:  41%|████  | 4100/10000 [00:10<00:14, 410.1 examples/s]",
    "Sanity Checking DataLoader 0: 100%|██████████| 2/2 [00:04<00:00,  2.06s/it]",
    "model.safetensors:  41%|████| 4100/10000 [00:10<00:14, 50.1MB/s]",
    "Capturing CUDA graph shapes:  40%|████  | 14/35 [00:10<00:12,  1.6it/s]",
    "Processed prompts:  40%|████ | 14/35 [00:10<00:12,  1.6it/s, est. speed]",
    "  0%|          | 0/300 [00:00<?, ?it/s]",
    "  1%|          | 1/300 [00:04<7:00:00, 4.4s/it]",
    "step 1/300 loss 3.2",
    "{'loss': 3.2, 'epoch': 0.0}",
    "Epoch 1/3",
    "Epoch 0:   0%|          | 0/300 [00:00<?, ?it/s]",
    "num steps 100",
    "total number of steps: 3000",
    "  Total train batch size (w. parallel, distributed & accumulation) = 16\n  Number of optimizer steps = 300",
    "lr_warmup_iters: 200",
    "eval_iters=200",
    "train_iters ..................... 500",
    "max iterations 1000",
    "[INFO] evaluation every 100 steps",
    "checkpoint every: step 500",
    "{'train_runtime': 100.1, 'train_loss': 1.2, 'epoch': 3.0}",
    "training for 300 steps",
    "Steps: 300",
    "steps = 300",
    "Training will run for step 300",
    "100%|██████████| 837/837 [07:11<00:00,  1.94it/s]",
    "Unsloth: steps: 60, max seq length 2048",
    "num_training_steps 300 | gradient accumulation 8 | warmup step 30 | lr 1e-4",
    "- gradient accumulation: 8\n- optimizer steps: 300",
    "Gradient accumulation step: 8",
    "steps per epoch = 1200, accumulation step = 8",
    "Number of training epochs = 3 | Total train steps: 500",
    "steps_per_epoch: 500",
    "max_train_steps = 500",
    "Step size: 10, lr scheduler step size = 30",
    "Resuming from step 500, loss 0.5",
    "Namespace(step=100, loss='ce', lr=0.1, epoch=3)",
    "{'epoch': 3, 'batch': 8, 'loss': 'ce'}",
    "batch: 8, lr: 1e-4",
    "Loading weights:  41%|████ | 120/290 [00:01<00:02, 70.1it/s, Materializing param=x]",
    "Batches:  41%|████ | 41/100 [00:10<00:12,  4.6it/s]",
    "Calibrating:  41%|████ | 41/100 [00:10<00:12,  4.6it/s]",
    "Train Epoch: 1 [0/60000 (0%)]\tLoss: 2.302",
]
# How far a run is, as the Trainer, Unsloth, axolotl, LLaMA-Factory, ms-swift, Lightning, torchtitan,
# torchtune, DeepSpeed, Megatron, nanoGPT and scripts print it.
REAL = [
    " 41%|████      | 4100/10000 [5:00:00<7:00:00, 4.4s/it]",
    "{'loss': 1.2, 'epoch': 0.41}",
    "{'loss': '1.2', 'grad_norm': '0.5', 'learning_rate': '2e-05', 'epoch': '0.41'}",
    "{'loss': 1.2, 'grad_norm': 0.5, 'epoch': 0.0}\n" * 4,
    "step 12/300",
    "Step 120 of 300",
    "step: 120 | loss: 1.2",
    "iter 120: loss 2.5000, time 100.00ms, mfu 12.00%",
    " [2024-01-01 10:00:00] iteration       10/     100 | consumed samples:         2560 | elapsed time per iteration (ms): 1000.0 | lm loss: 1.0E+01 |",
    "Epoch [1/10], Step [100/600], Loss: 0.1234",
    "2024/01/01 10:00:00 - mmengine - INFO - Iter(train) [ 120/1000]  lr: 1.0e-04  loss: 0.5",
    "[titan] 2025-01-01 10:00:00,123 - root - INFO - step: 10  loss:  7.1234  grad_norm:  1.2  memory: 12.34GiB(15.6%)  tps: 1,234  mfu: 30.1%",
    "1|120|Loss: 1.2345:  12%|█▏        | 120/1000 [10:00<1:00:00,  4.2s/it]",
    "[2023-01-01 10:00:00,123] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=0, lr=[1e-05], mom=[(0.9, 0.999)]",
    "steps: 10 loss: 7.2 iter time (s): 1.2 samples/sec: 10.0",
    "[INFO|2025-01-01 10:00:00] llamafactory.train.callbacks:157 >> {'loss': 1.1, 'learning_rate': 4.9e-05, 'epoch': 0.5, 'throughput': 1000}",
    '{"current_steps": 15, "total_steps": 300, "loss": 1.3, "lr": 1e-05, "percentage": 5.0, "elapsed_time": "0:01:00"}',
    "{'loss': 1.2, 'token_acc': 0.7, 'global_step/max_steps': '12/300', 'percentage': '4.00%'}",
    "Epoch 0:  41%|████      | 123/300 [00:10<00:20, 12.3it/s, v_num=0, train_loss=1.2]",
    " [123/300 01:23 < 02:00, 1.5 it/s, Epoch 0.41/1]",
    "Epoch 2:   0%|          | 0/300 [00:00<?, ?it/s]",
    "global_step: 500, loss: 0.2",
    "global step 500 loss 0.2",
    "Training step 500/1000",
    "train step 40 | loss 2.1 | lr 1e-4",
    "Steps:  41%|████      | 410/1000 [05:00<07:00,  1.4it/s, lr=1e-6, step_loss=0.1]",
    "[Rank 0] step 12, loss 2.1",
    "[2024-01-01 10:00:00][INFO] step=120 loss=2.31 lr=3e-4",
    "(RayTrainWorker pid=1234) {'loss': 1.2, 'epoch': 0.1}",
    "step:120/1000 train_loss:4.2 train_time:1000ms",
    "I0101 10:00:00.1 1 train.py:10] iter 500, loss = 0.2",
    "step 100: train loss 1.9, val loss 2.0",
    "#step=120, loss=0.3",
    "Iteration 120, loss = 0.3",
    "Iter 120 | loss 0.3",
    "{'loss': 1.2, 'memory/max_active (GiB)': 12.3, 'epoch': 0.01, 'tokens/train_per_sec_per_gpu': 1000}",
    "Finetuning:  41%|████      | 41/100 [05:00<07:00,  4.4s/it]",
    "train:  41%|████      | 41/100 [05:00<07:00,  4.4s/it, loss=1.2]",
    "Epoch 1 step 120 loss 2.2",
    "Epoch: 1, Step: 120, Loss: 2.2",
    "step 120, reward 0.5",
    "training step 120: loss=0.3",
    "eta: 1:00:00  iter: 119  total_loss: 1.2  loss_cls: 0.3",
    "global step 120, epoch: 1, batch: 120, loss: 0.5",
    "step:10 - global_seqlen/min:100 - actor/loss:0.1",
    "Training Progress:  41%|████ | 41/100 [1:05:00<1:07:00,  64.4s/it]",
    "        3/100      10.1G     0.9      0.5        12        640:  41%|████ | 41/100 [00:10<00:12,  4.6it/s]",
    "Training epoch 0, iteration 10/99 | lr: 0.001 | loss: 2.1",
    "train          Epoch   0:   41%|████| 41/100 [00:10<00:12, 1.2ba/s, loss/train=1.2]",
]


def first_cause(before: str) -> str:
    return explained(f"{before}\n{TRAINER}{FULL}").causes[0].code


@pytest.mark.parametrize("text", BANNERS)
def test_what_is_printed_before_the_first_steps_is_no_progress(text: str) -> None:
    assert first_cause(text) == "capacity"


@pytest.mark.parametrize("text", REAL)
def test_progress_is_known_by_its_shape(text: str) -> None:
    assert first_cause(text) == "long-sample"
    assert first_cause(f"{text}\n" + "\n".join(BANNERS[:2])) == "long-sample"
