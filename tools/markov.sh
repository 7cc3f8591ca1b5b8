#!/usr/bin/env bash
# A small experiment that any machine can run: a two-block GPT-2 learns a random second-order Markov language for 400
# steps, with each optimizer at the learning rates below. Prints the validation losses on the way and the best of each.
# Takes about ten minutes on 2 cores.
#
# usage: tools/markov.sh [OPTIMIZER ...]      by default adamw muon rmnp
set -euo pipefail
optimizers=("$@")
(($# > 0)) || optimizers=(adamw muon rmnp)
for optimizer in "${optimizers[@]}"; do
  [[ "${optimizer}" =~ ^(adamw|muon|rmnp)$ ]] && continue
  sed -n '/^# usage/,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  [[ "${optimizer}" == --help ]] && exit 0 || exit 2
done

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
"${BAZEL}" build "--jobs=$(compile_jobs)" --ui_event_filters=-info --noshow_progress //tools:train //tools:make_markov

readonly dir=runs/markov
bazel-bin/tools/make_markov "--output_dir=${dir}"

# The field's values of one key in a metrics file, one a line.
values() { sed -n "s/.*\"$1\":\([-0-9.e+]*\).*/\1/p" "$2"; }

printf '\n%-6s %-6s %s\n' optimizer lr "validation loss at step 100, 200, 300, 400"
for optimizer in "${optimizers[@]}"; do
  case "${optimizer}" in
    adamw) rates=(3e-3 1e-2 2e-2) ;;
    muon) rates=(1e-2 2e-2 4e-2) ;;
    rmnp) rates=(3e-3 4e-3 6e-3) ;;
  esac
  best=""
  for lr in "${rates[@]}"; do
    # What is no hidden matrix learns by AdamW: under Muon at the same rate, whose scale is made for that.
    rest_lr="${lr}"
    [[ "${optimizer}" != rmnp ]] || rest_lr=6e-3
    run="${dir}/${optimizer}-${lr}"
    bazel-bin/tools/train --layers=2 --width=96 --heads=4 --vocab=64 --positions=64 --seq_len=64 --batch=16 --ranks=2 \
      --threads_per_rank=1 --steps=400 --val_every=100 --val_sequences=1024 --val_fraction=0.125 \
      "--optimizer=${optimizer}" "--lr=${rest_lr}" "--matrix_lr=${lr}" --muon_scale=match_rms --weight_decay=0 \
      --beta2=0.99 --init_std=0.06 --warmup_steps=50 --log_every=1000 "--data=${dir}/markov.bin" "--run_dir=${run}" >"${dir}/log.txt" ||
      { tail -n 5 "${dir}/log.txt" >&2; exit 1; }
    mapfile -t losses < <(values val_loss "${run}/metrics.jsonl")
    printf '%-9s %-6s' "${optimizer}" "${lr}"
    printf ' %8.3f' "${losses[@]}"
    printf '\n'
    last="${losses[-1]}"
    if [[ -z "${best}" ]] || awk "BEGIN { exit !(${last} < ${best}) }"; then best="${last}"; fi
  done
  printf '%-9s best  %.3f\n' "${optimizer}" "${best}"
done
