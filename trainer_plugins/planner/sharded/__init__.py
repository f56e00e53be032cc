"""Run one rank of many under DDP, FSDP2 and ZeRO, by torch's and DeepSpeed's own code."""
