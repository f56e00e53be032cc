"""Builds a Trainer with StrategyInForce and does not train, so that DeepSpeed compiles nothing."""

import sys

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from trainer_plugins import StrategyInForce

args = TrainingArguments(sys.argv[1], report_to="none", use_cpu=True)
config = LlamaConfig(hidden_size=32, intermediate_size=8, num_hidden_layers=1, vocab_size=8)
Trainer(LlamaForCausalLM(config), args, callbacks=[StrategyInForce()])
print("built")
