#!/usr/bin/env bash
# ZeRO-3 with everything offloaded, on two CPU ranks of one machine, then its report.
# It needs: pip install 'trainer-plugins[deepspeed]', and a C++ compiler. Arguments: the output folder.
# The first run compiles an extension of DeepSpeed, which takes a minute or two.
set -euo pipefail
output=${1:-runs/zero3_offload}
here=$(cd "$(dirname "$0")" && pwd)
accelerate launch --config_file "$(trainer-plugins configs path zero3_offload_all)" --num_processes 2 \
    "$here/train.py" --use_cpu --output_dir "$output" --max_steps 4 --save_strategy no \
    --eval_strategy steps --eval_steps 2 --report_to none
trainer-plugins report "$output"   # from step 0: 2 ranks of DeepSpeedEngine on cpu, ZeRO-3, 100% of ... sharded
