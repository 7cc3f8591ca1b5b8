#!/usr/bin/env bash
# From a fresh machine to a trained model: installs what is missing, builds, prepares a text, trains a small GPT-2 on
# two ranks with RMNP for a minute or two, lets it write, and shows where the time went.
#
# usage: tools/quickstart.sh [--data=FILE] [--steps=N]
#   --data   a text file of at least 1 MB; by default the fortunes that the distribution ships
#   --steps  optimizer steps (default 200)
set -euo pipefail

data=""
steps=200
for argument in "$@"; do
  case "${argument}" in
    --data=?*) data="$(realpath -- "${argument#*=}")" ;;
    --steps=?*) steps="${argument#*=}" ;;
    *)
      sed -n '/^# usage/,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
      [[ "${argument}" == --help ]] && exit 0 || exit 2
      ;;
  esac
done

[[ "${steps}" =~ ^[1-9][0-9]{0,8}$ ]] || { echo "${0##*/}: --steps=${steps} is not a number of steps" >&2; exit 2; }
# The first two warm up.
traced="$((steps < 3 ? 1 : 3)):$((steps < 5 ? steps : 5))"

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

readonly dir=runs/quickstart
mkdir -p "${dir}"

# Prints the text of Debian's fortunes, about 2.5 MB of English sayings with an empty line between them.
print_fortunes() {
  local files
  # The links *.u8, the indices *.dat and the pictures made of letters are no text.
  files="$(dpkg-query --listfiles fortunes fortunes-min |
    awk '/\/fortunes\/[^.\/]+$/ && !/\/ascii-art$/' | LC_ALL=C sort)"
  # Their separator is a line with a percent sign; a few hold backspaces and the like.
  xargs cat -- <<<"${files}" | sed 's/^%$//' | LC_ALL=C tr -cd '\t\n -~'
}

if [[ -z "${data}" ]]; then
  command -v dpkg-query >/dev/null || die "no Debian packages here to take a text from: give one with --data=FILE"
  install_packages fortunes fortunes-min
  data="${dir}/fortunes.txt"
  print_fortunes >"${data}"
fi
[[ -f "${data}" && -r "${data}" ]] || die "--data=${data}: no such file, or not readable"
size="$(wc -c <"${data}")"
((size >= 1000000)) || die "--data=${data}: ${size} bytes are too few to learn from; give at least 1000000"

# nvcc would take minutes for what nothing here can run.
options=()
if [[ "$(nvidia-smi -L 2>/dev/null)" != "GPU "* ]]; then
  echo "No NVIDIA driver here shows a GPU (nvidia-smi -L): building without CUDA"
  options+=(--repo_env=CUDA_HOME=none)
fi
echo "Building (several minutes the first time)"
"${BAZEL}" build "--jobs=$(compile_jobs)" --show_progress_rate_limit=15 ${options[@]+"${options[@]}"} \
  //tools:prepare //tools:train //tools:generate //tools:trace_report >"${dir}/build.log" 2>&1 ||
  { tail -n 40 "${dir}/build.log" >&2; die "the build failed (all it said: ${dir}/build.log)"; }

echo "Preparing ${data}"
rm -rf "${dir}/tokens"
bazel-bin/tools/prepare "--input=${data}" "--output_dir=${dir}/tokens"

echo "Training ${steps} steps"
bazel-bin/tools/train --layers=4 --width=256 --heads=4 --vocab=256 --seq_len=128 --batch=8 --ranks=2 \
  --threads_per_rank=1 "--steps=${steps}" --optimizer=rmnp --warmup_steps=10 --schedule=cosine \
  --val_every=50 --log_every=10 "--data=${dir}/tokens/*.bin" "--run_dir=${dir}/run" \
  "--trace=${dir}/run/trace" "--trace_steps=${traced}"
bazel-bin/tools/trace_report "--html=${dir}/run/trace.html" "${dir}/run" >/dev/null

echo
echo "A sample of what it writes:"
bazel-bin/tools/generate "--run_dir=${dir}/run" --prompt="The " --tokens=300
echo
echo "Run folder: ${PWD}/${dir}/run (metrics.jsonl, summary.json, weights, trace)"
echo "Where its time went, as a page for a browser: ${PWD}/${dir}/run/trace.html"
