#!/usr/bin/env bash
# quickstart.sh up to the build: what it asks of Bazel on machines with and without a GPU.
set -euo pipefail

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

readonly commands="${TEST_TMPDIR:?}/commands" tree="${TEST_TMPDIR}/tree"
readonly asked="${TEST_TMPDIR}/asked" out="${TEST_TMPDIR}/out"
mkdir -p "${commands}" "${tree}/tools"
cp -L tools/quickstart.sh tools/setup.sh "${tree}/tools"
head -c 1000000 /dev/zero >"${TEST_TMPDIR}/data.txt"

# command_is NAME LINE...: puts a command of the machine in place of its own.
command_is() {
  local name="$1"
  shift
  printf '%s\n' '#!/bin/sh' "$@" >"${commands}/${name}"
  chmod +x "${commands}/${name}"
}
command_is dpkg-query 'echo installed'
command_is bazel '[ "$1" != --version ] || { echo bazel 7.4.1; exit; }' "printf '%s\n' \"\$@\" >'${asked}'" 'exit 1'

# Runs the script, which ends where Bazel fails.
run() {
  rm -f "${asked}"
  ! PATH="${commands}:${PATH}" "${tree}/tools/quickstart.sh" "--data=${TEST_TMPDIR}/data.txt" >"${out}" 2>&1 ||
    fail "passed without a build"
  grep -qx 'build' "${asked}" && grep -qx '//tools:train' "${asked}" || { cat "${out}" >&2; fail "built nothing"; }
}

command_is nvidia-smi 'echo "GPU 0: NVIDIA H100 (UUID: GPU-1)"' 'echo "GPU 1: NVIDIA H100 (UUID: GPU-2)"'
run
! grep -q 'CUDA' "${asked}" "${out}" || fail "CUDA was left out beside a GPU"

for nvidia_smi in 'echo "No devices found."' 'echo "NVIDIA-SMI has failed"; exit 9' 'exit 127'; do
  command_is nvidia-smi "${nvidia_smi}"
  run
  grep -qx -e '--repo_env=CUDA_HOME=none' "${asked}" || fail "CUDA was built where nvidia-smi does: ${nvidia_smi}"
  grep -q 'shows a GPU (nvidia-smi -L): building without CUDA$' "${out}" || { cat "${out}" >&2; fail "it does not say so"; }
done
