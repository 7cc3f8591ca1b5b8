#!/usr/bin/env bash
# Runs a test under a sanitizer: --config=asan|ubsan|tsan sets this as Bazel's --run_under.
set -euo pipefail

suppressions="${TEST_SRCDIR}/${TEST_WORKSPACE}/third_party/sanitizers"
export ASAN_OPTIONS="detect_stack_use_after_return=1:strict_string_checks=1:${ASAN_OPTIONS:-}"
export LSAN_OPTIONS="suppressions=\"${suppressions}/lsan.supp\":print_suppressions=0:${LSAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1:${UBSAN_OPTIONS:-}"
export TSAN_OPTIONS="suppressions=\"${suppressions}/tsan.supp\":print_suppressions=0:${TSAN_OPTIONS:-}"

# GCC 12's ThreadSanitizer knows fixed address ranges, which kernels with 32 bits of address randomization leave.
# Where the system forbids turning that off (some containers), the test runs as it is.
if setarch --addr-no-randomize true 2>/dev/null; then
  exec setarch --addr-no-randomize "$@"
fi
exec "$@"
