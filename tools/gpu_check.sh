#!/usr/bin/env bash
# Checks this project on a machine that has NVIDIA GPUs and needs neither Bazel nor a network: packed into one archive
# where Bazel is, unpacked and run where the GPUs are. Runs the GPU tests, trains GPT-2 Large for a few steps with each
# optimizer, and measures every kernel and the optimizers' steps. Prints one table; exit status 0: all passed.
#
# usage: tools/gpu_check.sh --pack FILE.tar.gz [--architectures=80,90,...] [--emulated]
#        ./gpu_check.sh [--seconds=N] [--logs=DIR] [--emulated]        in the unpacked archive
#   --architectures  what the archive holds machine code for; by default all that the build makes
#   --seconds        the whole takes less than this (default 500)
#   --logs           folder for everything that was printed (default gpu_check_logs)
#   --emulated       for tests of this script: programs built for the emulator, and a tiny model
set -euo pipefail

readonly MOST_BYTES=$((64 * 1024 * 1024))

fail() {
  echo "${0##*/}: $*" >&2
  exit 1
}
usage() { sed -n '/^# usage/,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }
# wrong_usage WHAT: ends with one line that says what is wrong, and the usage.
wrong_usage() {
  echo "${0##*/}: $*" >&2
  usage >&2
  exit 2
}

self="$(realpath -- "${BASH_SOURCE[0]}")"
archive=""
architectures=""
seconds=500
logs=gpu_check_logs
emulated=""
while (($#)); do
  case "$1" in
    --pack)
      archive="${2:-}"
      [[ -n "${archive}" && "${archive}" != -* ]] || wrong_usage "--pack needs a file to write: --pack FILE.tar.gz"
      shift
      ;;
    --pack=?*) archive="${1#*=}" ;;
    --architectures=?*) architectures="${1#*=}" ;;
    --seconds=?*) seconds="${1#*=}" ;;
    --logs=?*) logs="${1#*=}" ;;
    --emulated) emulated=yes ;;
    --help | -h)
      usage
      exit
      ;;
    --pack= | --architectures | --seconds | --logs | --architectures= | --seconds= | --logs=)
      wrong_usage "${1%=} needs a value: ${1%=}=VALUE"
      ;;
    *) wrong_usage "unknown argument: $1" ;;
  esac
  shift
done
[[ "${seconds}" =~ ^[1-9][0-9]{1,5}$ ]] || { echo "${0##*/}: --seconds=${seconds} is no number from 10 on" >&2; exit 2; }

# ---- Packing ----

readonly PROGRAMS=(//tools:train //tools:make_markov //tools:bench_optimizers //model:bench_kernels)

# Libraries of a program that GPU machines have, or that are the system's own.
readonly OF_THE_MACHINE='^(linux-vdso|ld-linux|lib(c|m|dl|rt|pthread|util|resolv|cuda|cudart|cublas|cublasLt|nccl))[-.]'
# Of GCC: used where the machine's are older.
readonly OF_GCC='^(libstdc\+\+|libgcc_s)\.'

pack() {
  local target
  mkdir -p "$(dirname "${archive}")"
  target="$(realpath -- "${archive}")"
  # shellcheck source=/dev/null
  source "$(dirname "${self}")/setup.sh"
  local options=(--config=portable)
  [[ -z "${emulated}" ]] || options+=(--config=cuda_emulated)
  [[ -z "${architectures}" ]] || options+=("--define=cuda_architectures=${architectures}")

  local tests=()
  mapfile -t tests < <("${BAZEL}" query --noshow_progress --ui_event_filters=-info "kind(cc_test,
    //runtime/cuda/... + //model/cuda/... + //optim/cuda/... + //collectives/... + //tests:cuda_training_test)")
  ((${#tests[@]})) || fail "Bazel finds no tests; it says why above"
  "${BAZEL}" build "${options[@]}" "--jobs=$(compile_jobs)" --show_progress_rate_limit=15 -- \
    "${PROGRAMS[@]}" "${tests[@]}"
  local bin
  bin="$("${BAZEL}" info "${options[@]}" bazel-bin 2>/dev/null)"

  local folder label name file
  scratch="$(mktemp -d)"
  folder="${scratch}/gpu_check"
  mkdir -p "${folder}"/{bin,lib,lib/gcc}
  cp "${self}" "${folder}/gpu_check.sh"
  for label in "${PROGRAMS[@]}" "${tests[@]}"; do
    file="${label#//}"
    name="${file##*:}"
    [[ " ${PROGRAMS[*]} " == *" ${label} "* ]] || name="${file//[\/:]/_}"
    [[ -f "${bin}/${file/://}" ]] || fail "${label} was left out of the build: is there a CUDA Toolkit? (it says above)"
    strip -o "${folder}/bin/${name}" "${bin}/${file/://}"
  done
  local library path
  while read -r library path; do
    [[ ! "${library}" =~ ${OF_THE_MACHINE} ]] || continue
    if [[ "${library}" =~ ${OF_GCC} ]]; then
      cp -L "${path}" "${folder}/lib/gcc/${library}"
    else
      cp -L "${path}" "${folder}/lib/${library}"
    fi
  done < <(ldd "${folder}"/bin/* | awk '$2 == "=>" && $3 ~ /^\// { print $1, $3 }' | sort -u)
  {
    echo "packed from $(git describe --always --dirty 2>/dev/null || echo "a tree without Git")"
    echo "architectures: ${architectures:-all}${emulated:+; emulated}"
  } >"${folder}/PACKED"

  tar -C "${scratch}" --sort=name --owner=0 --group=0 -cf - gpu_check | gzip -9 >"${target}.partial"
  local size
  size="$(stat -c %s "${target}.partial")"
  if ((size > MOST_BYTES)); then
    rm "${target}.partial"
    fail "the archive would have $((size / 1024 / 1024)) MiB, of 64 at most; leave out GPUs: --architectures=90"
  fi
  mv "${target}.partial" "${target}"
  echo "${archive}: $(awk "BEGIN { printf \"%.1f\", ${size} / 1048576 }") MiB, ${#tests[@]} tests and ${#PROGRAMS[@]} programs"
}

scratch=""
trap '[[ -z "${scratch}" ]] || rm -rf -- "${scratch}"' EXIT
trap 'exit 130' INT TERM
if [[ -n "${archive}" ]]; then
  pack
  exit
fi

# ---- What this machine has ----

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
readonly here
[[ -x "${here}/bin/train" ]] || fail "there are no programs beside this script, which runs those of an archive.
In the repository, where Bazel and the CUDA Toolkit are, make one; then run it where the GPUs are, here or elsewhere:
  tools/gpu_check.sh --pack gpu_check.tar.gz
  tar -xf gpu_check.tar.gz && gpu_check/gpu_check.sh"
# A few seconds are for killing and for the table.
readonly END=$((SECONDS + seconds - 8))

# How many GPUs CUDA shows to a process, as far as that can be told without CUDA.
count_gpus() {
  if [[ -n "${emulated}" ]]; then
    echo "${DIM0_SIMT_DEVICES:-4}"
  elif [[ -n "${CUDA_VISIBLE_DEVICES+set}" ]]; then
    tr , '\n' <<<"${CUDA_VISIBLE_DEVICES}" | grep -c .
  elif command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    nvidia-smi -L | grep -c '^GPU'
  else
    find /dev -maxdepth 1 -name 'nvidia[0-9]*' | wc -l
  fi
}

# Prints the folders that may hold CUDA's libraries and NCCL.
cuda_folders() {
  local root nvcc
  nvcc="$(command -v nvcc || true)"
  [[ -z "${nvcc}" ]] || nvcc="$(realpath "${nvcc}")"
  for root in "${CUDA_HOME:-}" "${CUDA_PATH:-}" "${NCCL_HOME:-}" "${CONDA_PREFIX:-}" "${nvcc%/bin/nvcc}" \
    /usr/local/cuda /usr/local/cuda-* /opt/cuda /usr/local /usr; do
    [[ -n "${root}" ]] || continue
    printf '%s\n' "${root}"/{lib64,lib,targets/x86_64-linux/lib,lib/x86_64-linux-gnu}
  done
  # Wheels: NVIDIA's own, or those inside PyTorch's.
  local python
  for python in python3 python; do
    command -v "${python}" >/dev/null || continue
    timeout 20 "${python}" -c 'if True:
      import glob, sys
      for path in sys.path:
        if path:
          print(*glob.glob(path + "/nvidia/*/lib") + glob.glob(path + "/torch/lib"), sep="\n")' 2>/dev/null || true
  done
}

# Where CUDA's runtime, cuBLASLt and NCCL are that the programs load, one path a line.
cuda_libraries=()

# Sets LD_LIBRARY_PATH so that every program finds its libraries.
find_libraries() {
  export LD_LIBRARY_PATH="${here}/lib${LD_LIBRARY_PATH:+:${LD_LIBRARY_PATH}}"
  local program="${here}/bin/train" said library folder found
  said="$(ldd "${program}" 2>&1 || true)"
  if grep -q "version .\(GLIBCXX\|CXXABI\|GCC\)_" <<<"${said}"; then
    LD_LIBRARY_PATH="${here}/lib/gcc:${LD_LIBRARY_PATH}"
  fi
  if grep -q "version .GLIBC_" <<<"${said}"; then
    fail "this machine's C library is older than the one of the machine where the archive was made"
  fi
  [[ -z "${emulated}" ]] || return 0
  local folders
  mapfile -t folders < <(tr : '\n' <<<"${LD_LIBRARY_PATH}" && cuda_folders)
  # Linked or loaded on demand, their names are in the program.
  while read -r library; do
    found="$(ldconfig -p 2>/dev/null | awk -v name="${library}" '$1 == name { print $NF; exit }' || true)"
    for folder in "${folders[@]}"; do
      [[ -z "${found}" ]] || break
      [[ -n "${folder}" && -e "${folder}/${library}" ]] || continue
      found="${folder}/${library}"
      # Behind the archive's own.
      LD_LIBRARY_PATH="${LD_LIBRARY_PATH}:${folder}"
    done
    [[ -n "${found}" ]] || fail "this machine has no ${library}: set CUDA_HOME or NCCL_HOME to the folder above its lib"
    cuda_libraries+=("${found}")
  done < <(grep -a -o -E 'lib(cudart|cublasLt|nccl)\.so\.[0-9]+' "${program}" | sort -u)
}

gpus="$(count_gpus || true)"
((gpus > 0)) || fail "this machine shows no NVIDIA GPU: nothing is run (nvidia-smi -L and CUDA_VISIBLE_DEVICES tell more)"
find_libraries
# Asks CUDA itself: no folder, no run.
usable="$("${here}/bin/bench_optimizers" --device=cuda 2>&1 || true)"
[[ "${usable}" == *"--out is missing"* ]] || fail "no GPU that can be used: ${usable##*: --device=cuda: }"

mkdir -p "${logs}"
logs="$(cd "${logs}" && pwd)"
# Runs leave their weights: in memory, if there is room.
for place in /dev/shm "${TMPDIR:-/tmp}"; do
  free="$(df -Pk "${place}" 2>/dev/null | awk 'END { print int($4 / 1048576) }')" || continue
  ((free < 8)) || break
done
scratch="$(mktemp -d "${place}/gpu_check.XXXXXX")"
mkdir "${scratch}/tests"

# ---- The parts ----

# Each part has a weight and may take its share of the time that is left, or half a minute if there is plenty; what it
# does not take is the later ones'.
weight_left=0
not_passed=0
result=""
table="${logs}/table.txt"
: >"${table}"

say() { tee -a "${table}" <<<"$*"; }

# run_part NAME WEIGHT COMMAND...: sets result to passed, FAILED, TIMED OUT or NO TIME; output goes to NAME.log.
run_part() {
  local name="$1" weight="$2" status=0 limit
  shift 2
  local left=$((END - SECONDS)) least
  limit=$((left * weight / weight_left))
  least=$((left / 8 < 30 ? left / 8 : 30))
  ((limit >= least)) || limit="${least}"
  weight_left=$((weight_left - weight))
  if ((limit < 2)); then
    result="NO TIME"
    not_passed=$((not_passed + 1))
    return
  fi
  timeout --kill-after=3 "${limit}" "$@" >"${logs}/${name}.log" 2>&1 </dev/null || status=$?
  case "${status}" in
    0) result="passed" ;;
    124 | 137) result="TIMED OUT after ${limit} s" ;;
    *) result="FAILED" ;;
  esac
  ((status == 0)) || not_passed=$((not_passed + 1))
}

# Why a part did not pass, for the table.
last_words() { [[ "${result}" != FAILED ]] || say "    $(grep -v '^ *$' "${logs}/$1.log" | tail -n 1 | cut -c 1-150)"; }

count_lines() { grep -c "$1" "$2" 2>/dev/null || true; }

run_test() {
  local name="$1" weight="$2" log="${logs}/$1.log"
  rm -f "${log}"
  run_part "${name}" "${weight}" env "TEST_TMPDIR=${scratch}/tests" "${here}/bin/${name}"
  local passed failed skipped
  passed="$(count_lines '^\[ *OK \] .* ms)' "${log}")"
  failed="$(count_lines '^\[ *FAILED *\] .* ms)' "${log}")"
  skipped="$(count_lines '^\[ *SKIPPED *\] .* ms)' "${log}")"
  # What was skipped has not passed; nor does it fail the whole: it may need more GPUs.
  [[ "${result}" != passed ]] || ((passed > 0)) || result="skipped"
  say "$(printf '  %-44s %-20s %d passed, %d failed, %d skipped' "${name}" "${result}" \
    "${passed:-0}" "${failed:-0}" "${skipped:-0}")"
  [[ -e "${log}" ]] || return 0
  sed -n '/^\[ *FAILED *\] .* ms)/s/.*\] */    /p' "${log}" | tee -a "${table}"
  sed -n '/^\[ *SKIPPED *\] .* ms)/s/^\[ *SKIPPED *\] *\([^ ]*\).*/\1/p' "${log}" >>"${logs}/skipped.txt"
}

# The median of a key's values in a metrics file, the first two steps left out.
median_of() {
  sed -n "s/.*\"$1\":\([-0-9.e+]*\).*/\1/p" "$2" | tail -n +3 | sort -g |
    awk '{ v[NR] = $1 } END { if (NR) print (v[int((NR + 1) / 2)] + v[int(NR / 2) + 1]) / 2 }'
}

# train OPTIMIZER RANKS WEIGHT: with the largest batch that fits.
train() {
  local name="train_$1_$2" weight="$3" run="${scratch}/run" metrics
  while true; do
    rm -rf "${run}"
    run_part "${name}" "${weight}" "${here}/bin/train" --device=cuda "--optimizer=$1" "--ranks=$2" "${model[@]}" \
      "--batch=${batch}" "--steps=${steps}" --val_sequences=0 "--data=${scratch}/markov.bin" "--run_dir=${run}"
    if [[ "${result}" != FAILED ]] || ((batch == 1)); then break; fi
    grep -q '^train: the run needs ' "${logs}/${name}.log" || break
    # Refused before it began.
    not_passed=$((not_passed - 1))
    weight_left=$((weight_left + weight))
    batch=$((batch / 2))
  done
  metrics="${run}/metrics.jsonl"
  if [[ -s "${metrics}" ]]; then cp "${metrics}" "${logs}/${name}.jsonl"; fi
  if [[ "${result}" == passed ]]; then
    say "$(printf '  %-44s %-20s %.0f tokens/s, %.3f of the GEMM rate, %.1f ms a step, batch %d' \
      "$1, $2 rank(s)" "${result}" "$(median_of tokens_per_s "${metrics}")" \
      "$(median_of flops_fraction "${metrics}")" "$(median_of step_ms "${metrics}")" "${batch}")"
  else
    say "$(printf '  %-44s %s' "$1, $2 rank(s)" "${result}")"
    last_words "${name}"
  fi
  rm -rf "${run}"
}

# bench_optimizers RANKS WEIGHT
bench_optimizers() {
  local name="bench_optimizers_$1" out="${logs}/bench_optimizers_$1"
  run_part "${name}" "$2" "${here}/bin/bench_optimizers" --device=cuda "--ranks=$1" "--out=${out}" "${optimizer_bench[@]}"
  say "optimizers' steps, $1 rank(s): ${result}"
  [[ "${result}" != "NO TIME" ]] || return 0
  last_words "${name}"
  if [[ -s "${out}/dist_opt.csv" ]]; then
    awk -F, 'NR > 1 {
      printf "  %-44s %9.3f ms a step, %.1f MiB sent, %.3f ms of communication in the open\n", $1, $2, $4, $7
    }' "${out}/dist_opt.csv" | tee -a "${table}"
  fi
  sed -n "/'s bandwidth/p; /^Newton-Schulz/p; /differ by/p; /times as fast as muon/p" "${logs}/${name}.log" |
    sed 's/^/  /' | tee -a "${table}"
}

optimizers=(adamw rmnp muon sign_momentum)
if [[ -n "${emulated}" ]]; then
  model=(--layers=1 --width=32 --heads=2 --vocab=256 --seq_len=16 --threads_per_rank=1)
  kernel_bench=(--batch=1 --seq_len=16 --layers=1 --width=32 --heads=2 --vocab=64 --repeats=1)
  optimizer_bench=(--layers=1 --width=16 --heads=2 --threads_per_rank=1 --warmup=0 --repeats=1)
  steps=4 batch=2 tokens=4096
else
  model=(--model=gpt2-large --seq_len=1024)
  kernel_bench=(--batch=8 --seq_len=1024)
  optimizer_bench=(--model=gpt2-large "--schemes=rmnp_rows,rmnp_columns,rmnp_flat,muon_owner,adamw")
  steps=12 batch=32 tokens=2097152
fi
rank_counts=(1)
((gpus < 2)) || rank_counts+=(2)
tests=()
for file in "${here}"/bin/*_test; do [[ ! -x "${file}" ]] || tests+=("${file##*/}"); done

weight_of_test() { [[ "$1" == *cuda_training_test ]] && echo 15 || echo 4; }
for name in ${tests[@]+"${tests[@]}"}; do weight_left=$((weight_left + $(weight_of_test "${name}"))); done
weight_left=$((weight_left + 1 + ${#rank_counts[@]} * (${#optimizers[@]} * 12 + 15) + 12))

if [[ -e "${here}/PACKED" ]]; then say "$(paste -sd ';' "${here}/PACKED")"; fi
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null | tee -a "${table}" || true
for library in ${cuda_libraries[@]+"${cuda_libraries[@]}"}; do
  version=""
  [[ "${library}" != *nccl* ]] || version="$(grep -a -m 1 -o 'NCCL version [0-9][0-9.]*+cuda[0-9.]*' "${library}" || true)"
  say "${library}${version:+ (${version})}"
done
say "tests"
: >"${logs}/skipped.txt"
for name in ${tests[@]+"${tests[@]}"}; do run_test "${name}" "$(weight_of_test "${name}")"; done
if [[ -s "${logs}/skipped.txt" ]]; then
  say "  skipped:"
  sed 's/^/    /' "${logs}/skipped.txt" | tee -a "${table}"
fi

say "training, ${steps} steps: ${model[*]}"
run_part make_markov 1 "${here}/bin/make_markov" "--output_dir=${scratch}" --vocab=64 "--tokens=${tokens}"
for ranks in "${rank_counts[@]}"; do
  for optimizer in "${optimizers[@]}"; do train "${optimizer}" "${ranks}" 12; done
done

run_part bench_kernels 12 "${here}/bin/bench_kernels" --device=cuda "${kernel_bench[@]}"
say "memory-bound kernels over a copy's bandwidth, products and attention over the GEMM rate: ${result}"
last_words bench_kernels
awk 'match($0, / +[0-9.]+ ms .*(GB|GFLOP)\/s .* of /) {
  split(substr($0, RSTART), f, " ")
  printf "  %-44s %9.3f ms %10.1f %-8s %6.3f of %.1f\n", substr($0, 1, RSTART - 1), f[1], f[3], f[4], f[5], f[7]
}' "${logs}/bench_kernels.log" 2>/dev/null | tee -a "${table}" || true

for ranks in "${rank_counts[@]}"; do bench_optimizers "${ranks}" 15; done

say ""
if ((not_passed)); then
  say "${not_passed} parts did not pass; ${SECONDS} s; logs: ${logs}"
  exit 1
fi
say "all passed; ${SECONDS} s; logs: ${logs}"
