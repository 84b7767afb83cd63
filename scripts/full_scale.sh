#!/usr/bin/env bash
# The paper's run on all GPUs of this machine, for at most MINUTES; then its log, header and order file into RESULTS.
#
#   MINUTES=25 DATASET=openwebtext scripts/full_scale.sh [--key=value ...]             record flash_bf16
#   REPLAY=runs/full/flash_bf16/order.bin scripts/full_scale.sh --attention=stabilized  the same batches, another arm
#
# OUT (runs/full/ARM) takes the run; calling again resumes it. GPUS (all), CONFIG (the paper's). What is in RESULTS
# (results/gpt2_full) is renewed every minute, so that it outlives a machine that is taken away.
set -euo pipefail
cd "$(dirname "$0")/.."
CONFIG=${CONFIG:-configs/gpt2_small_flash_bf16.toml}
MINUTES=${MINUTES:-1000000}
GPUS=${GPUS:-$(nvidia-smi -L | wc -l)}
ARM=$(printf '%s\n' "$@" | sed -n 's/^--attention=//p' | tail -1)
OUT=${OUT:-runs/full/${ARM:-flash_bf16}}
RESULTS=${RESULTS:-results/gpt2_full}
PYTHON=${PYTHON:-python}

flags=(--probe_interval=100 --stop_when_failed=True --checkpoint_interval=250 "--out_dir=$OUT")
[ -z "${DATASET:-}" ] || flags+=("--dataset=$DATASET")
[ -z "${REPLAY:-}" ] || flags+=("--replay=$REPLAY")
compgen -G "$OUT/ckpt_*.pt" > /dev/null && flags+=(--init_from=resume)
order=(); [ -n "${REPLAY:-}" ] || order=(--order)
keep() { "$PYTHON" scripts/collect.py "$OUT" --out "$RESULTS" "${order[@]}" > /dev/null 2>&1 || true; }

# SIGTERM: every rank saves and ends; torchrun passes it on, and says so with a traceback of its own.
timeout --signal=TERM --kill-after=120 "${MINUTES}m" "$PYTHON" -m torch.distributed.run --standalone \
  "--nproc_per_node=$GPUS" -- train.py "$CONFIG" "${flags[@]}" "$@" &
run=$!
trap 'kill -TERM $run 2> /dev/null || true' TERM INT
while kill -0 $run 2> /dev/null; do
  for _ in $(seq 60); do kill -0 $run 2> /dev/null || break; sleep 1; done
  keep
done
status=0; wait $run || status=$?
keep
"$PYTHON" scripts/collect.py "$OUT" --out "$RESULTS" "${order[@]}"
echo "ended with status $status (124: time was up); $OUT, $RESULTS"
