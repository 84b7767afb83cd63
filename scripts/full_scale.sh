#!/usr/bin/env bash
# The paper's run on all GPUs of this machine, for at most MINUTES; then its log, header and order file into RESULTS.
#
#   MINUTES=25 DATASET=openwebtext scripts/full_scale.sh [--key=value ...]             record flash_bf16
#   REPLAY=runs/full/flash_bf16/order.bin OUT=runs/full/dp_p scripts/full_scale.sh --delta=dp_p  the same batches
#
# OUT (runs/full/ATTENTION) takes the run; calling again resumes it. GPUS (all), CONFIG (the paper's). What is in
# RESULTS (results/gpt2_full) is renewed every minute, so that it outlives a machine that is taken away. The exit status
# is train.py's, but 0 where MINUTES were over and the run has saved.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
CONFIG=${CONFIG:-configs/gpt2_small_flash_bf16.toml}
MINUTES=${MINUTES:-1000000}
GPUS=${GPUS:-$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() or 1)')}
ARM=$(printf '%s\n' "$@" | sed -n 's/^--attention=//p' | tail -1)
OUT=${OUT:-runs/full/${ARM:-flash_bf16}}
RESULTS=${RESULTS:-results/gpt2_full}

refuse() { echo "full_scale.sh: $1" >&2; exit 2; }
[[ $MINUTES =~ ^[0-9]*[.]?[0-9]+$ && $MINUTES =~ [1-9] ]] ||
  refuse "MINUTES=$MINUTES is no number of minutes above 0; leave it out for no limit"
for flag in "$@"; do
  case $flag in
    --out_dir*|--out-dir*) refuse "$flag: the run is looked for in OUT=$OUT; give OUT=FOLDER instead" ;;
    --attention) refuse "write --attention=NAME, by which OUT is called" ;;
  esac
done
"$PYTHON" - "$RESULTS" <<< 'import sys; from scripts.targets import check_targets
try: check_targets(folders=(sys.argv[1],))
except OSError as error: sys.exit(f"full_scale.sh: RESULTS={error}")' || exit 2

flags=() given=" ${*//-/_} "
for flag in --probe_interval=100 --stop_when_failed=True --checkpoint_interval=250 "--out_dir=$OUT" \
    ${DATASET:+"--dataset=$DATASET"} ${REPLAY:+"--replay=$REPLAY"}; do
  name=${flag%%=*}
  [[ $given == *" ${name//-/_}"[=\ ]* ]] || flags+=("$flag")  # what is given wins
done
resume=$("$PYTHON" scripts/resume.py "$CONFIG" "${flags[@]}" "$@") || exit 2  # wins over an --init_from of a file
keep() {  # once there is a step to keep; of a replay not the order, which is kept already
  [ -s "$OUT/metrics.jsonl" ] || return 0
  local order=()
  [ -n "${REPLAY:-}" ] || [ ! -f "$OUT/order.bin" ] || order=(--order)
  "$PYTHON" scripts/collect.py "$OUT" --out "$RESULTS" "${order[@]}"
}

export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-100}  # s to save in, within timeout's 120
timeout --signal=TERM --kill-after=120 "${MINUTES}m" \
  "$PYTHON" scripts/ranks.py "$GPUS" "$CONFIG" "${flags[@]}" "$@" ${resume:+"$resume"} &
run=$!
trap 'kill -TERM $run 2> /dev/null || true' TERM INT  # the run saves and ends
while kill -0 $run 2> /dev/null; do
  for _ in $(seq 60); do kill -0 $run 2> /dev/null || break; sleep 1 || true; done  # Ctrl-C ends a sleep
  keep > /dev/null 2>&1 || true
done
status=0; wait $run || status=$?
if [ $status = 124 ]; then  # the time was over: what counts is how the run took it
  status=$("$PYTHON" -c 'import sys; from pathlib import Path; from scripts.arms import outcome
print({None: 124, 143: 0}.get(code := outcome(Path(sys.argv[1])), code))' "$OUT")
fi
if [ $status = 2 ]; then exit 2; fi  # an error of the user, whose sentence is the last thing seen
keep || { echo "what is in $RESULTS is not of the end of the run" >&2; [ $status != 0 ] || status=1; }
echo "ended with status $status; $OUT, $RESULTS"
exit $status
