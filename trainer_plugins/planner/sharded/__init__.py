"""One rank of a run of many cards: DDP, FSDP2 and ZeRO, by torch's and DeepSpeed's own code."""
