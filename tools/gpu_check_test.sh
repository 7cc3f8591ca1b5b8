#!/usr/bin/env bash
# gpu_check.sh as it lies in an archive, beside its programs. Argument: emulated, where these are built for the emulator.
set -euo pipefail

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

readonly folder="${TEST_TMPDIR:?}/gpu_check"
readonly check="${folder}/gpu_check.sh"
readonly out="${TEST_TMPDIR}/out"

# expect STATUS ARGUMENT...: runs the script; what it prints goes to ${out}.
expect() {
  local wanted="$1" status=0
  shift
  "${check}" "$@" >"${out}" 2>&1 || status=$?
  ((status == wanted)) || { cat "${out}" >&2; fail "exit status ${status} instead of ${wanted} with: $*"; }
}
expect_line() { grep -q -e "$1" "${out}" || { cat "${out}" >&2; fail "nothing printed matches '$1'"; }; }

mkdir -p "${folder}/bin"
cp -L tools/gpu_check.sh "${check}"
expect 1
expect_line 'no programs beside this script'
expect_line '^  tools/gpu_check.sh --pack gpu_check.tar.gz$'
expect_line '^  tar -xf gpu_check.tar.gz && gpu_check/gpu_check.sh$'

for program in tools/train tools/make_markov tools/bench_optimizers model/bench_kernels; do
  ln -s "${PWD}/${program}" "${folder}/bin/"
done
cd "${TEST_TMPDIR}"

# No GPU: one line, no run, no folder.
CUDA_VISIBLE_DEVICES="" expect 1
expect_line 'this machine shows no NVIDIA GPU'
(($(wc -l <"${out}") == 1)) || fail "more than one line: $(cat "${out}")"
[[ ! -e gpu_check_logs ]] || fail "a folder for logs was made"

# What is wrong with the arguments comes first, before the usage.
expect_error() {
  local line="$1"
  shift
  expect 2 "$@"
  [[ "$(head -n 1 "${out}")" == "gpu_check.sh: ${line}" ]] || { cat "${out}" >&2; fail "does not begin with: ${line}"; }
}
expect_error '--seconds=soon is no number from 10 on' --seconds=soon
expect_error 'unknown argument: --fast' --fast
expect_line '^usage: tools/gpu_check.sh --pack'
expect_error 'unknown argument: 300' --seconds=300 300
expect_error '--seconds needs a value: --seconds=VALUE' --seconds 300
expect_error '--logs needs a value: --logs=VALUE' --logs=
expect_error '--pack needs a file to write: --pack FILE.tar.gz' --pack
expect_error '--pack needs a file to write: --pack FILE.tar.gz' --pack --emulated
expect 0 --help
expect_line '^usage: tools/gpu_check.sh --pack'
[[ "${1:-}" == emulated ]] || exit 0

DIM0_SIMT_DEVICES=0 expect 1 --emulated
expect_line 'this machine shows no NVIDIA GPU'

# All of it on two devices.
ln -s "${OLDPWD}/runtime/cuda/kernels_test" "${folder}/bin/runtime_cuda_kernels_test"
DIM0_SIMT_DEVICES=2 expect 0 --emulated --logs=all --seconds=3000
cat "${out}"
expect_line '^  runtime_cuda_kernels_test  *passed  *[1-9][0-9]* passed, 0 failed, 0 skipped$'
for optimizer in adamw rmnp muon sign_momentum; do
  for ranks in 1 2; do
    expect_line "^  ${optimizer}, ${ranks} rank(s)  *passed  *[1-9][0-9]* tokens/s, 0\.[0-9]* of the GEMM rate, [0-9.]* ms"
  done
done
expect_line '^  layer norm forward  *[0-9.]* ms  *[0-9.]* GB/s  *[0-9.]* of [0-9.]*$'
expect_line '^  attention backward  *[0-9.]* ms  *[0-9.]* GFLOP/s  *[0-9.]* of [0-9.]*$'
for scheme in rmnp_rows muon_owner adamw; do
  (($(grep -c "^  ${scheme}  *[0-9.]* ms a step" "${out}") == 2)) || fail "no ms a step of ${scheme}"
done
expect_line "^  rmnp_rows: [0-9.e-]* of a copy's bandwidth"
expect_line '^  Newton-Schulz: '
expect_line '^all passed'
cmp <(sed '/^all passed/d' "${out}") <(sed '/^all passed/d' all/table.txt) || fail "the table in the folder is another"

# A part that fails is named, and does not keep the others from running.
rm "${folder}/bin/runtime_cuda_kernels_test"
printf '#!/bin/sh\necho "[  FAILED  ] Suite.Case (1 ms)"\nexit 1\n' >"${folder}/bin/broken_test"
printf '#!/bin/sh\nsleep 100\n' >"${folder}/bin/stuck_test"
rm "${folder}/bin/train"
printf '#!/bin/sh\necho "train: it did not work" >&2\nexit 1\n' >"${folder}/bin/train"
chmod +x "${folder}"/bin/{broken_test,stuck_test,train}
SECONDS=0
DIM0_SIMT_DEVICES=1 expect 1 --emulated --logs=some --seconds=120
((SECONDS < 120)) || fail "took ${SECONDS} s instead of less than 120"
expect_line '^  broken_test  *FAILED  *0 passed, 1 failed, 0 skipped$'
expect_line '^    Suite.Case (1 ms)$'
expect_line '^  stuck_test  *TIMED OUT after [0-9]* s'
expect_line '^  adamw, 1 rank(s)  *FAILED'
expect_line '^    train: it did not work$'
expect_line '^  adamw  *[0-9.]* ms a step'
expect_line '^6 parts did not pass'
