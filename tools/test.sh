#!/usr/bin/env bash
# Installs what is missing, builds everything, runs every test; then runs the tests of what is for GPUs once more, on the
# emulator (--config=cuda_emulated), unless a --config is given. Its last line is
#   N passed, N failed[, N skipped]
# in GoogleTest test cases; a shell test, and a target that does not build, crashes or times out, counts as one.
#
# usage: tools/test.sh [BAZEL_OPTION | //TARGET...]...
#   tools/test.sh --config=tsan
#   tools/test.sh //collectives/... --test_filter='*Broadcast*'
set -euo pipefail

if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
  sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"
  exit
fi

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# What tests run and the build does not need: a browser for the page of trace_report. Some distributions have none as a
# package; those tests are skipped then.
TEST_PACKAGES=(chromium chromium-driver)
(install_packages "${TEST_PACKAGES[@]}") || true

options=()
targets=()
for argument in "$@"; do
  case "${argument}" in
    -*) options+=("${argument}") ;;
    *) targets+=("${argument}") ;;
  esac
done
((${#targets[@]})) || targets=(//...)

scratch="$(mktemp -d)"
trap 'rm -rf "${scratch}"' EXIT

# Prints the path of a Python that has Holistic Trace Analysis, fetched once; nothing where it cannot be had, and
# hta_test is skipped. Its own requirements would add 300 MB of notebooks.
hta_python() {
  local folder="${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}/dim0/hta-0.5.0"
  local pip=(timeout 300 "${folder}/bin/python" -m pip install --quiet --retries 1)
  if [[ ! -e "${folder}/ready" ]]; then
    echo "Fetching Holistic Trace Analysis to ${folder}" >&2
    if ! { python3 -c 'import ensurepip' || (install_packages python3-venv) &&
      rm -rf "${folder}" && python3 -m venv "${folder}" &&
      "${pip[@]}" 'numpy<3' 'pandas<4' 'networkx<4' 'plotly<8' psutil pyyaml &&
      "${pip[@]}" --no-deps HolisticTraceAnalysis==0.5.0 &&
      "${folder}/bin/python" -c 'import hta.trace_analysis' && touch "${folder}/ready"; } >/dev/null 2>&1; then
      echo "Could not; tests that need it are skipped" >&2
      return
    fi
  fi
  echo "${folder}/bin/python"
}

# First build, then test: deadlines in tests hold better while no compiler competes for the cores. A test's ranks are
# threads, so one test at a time fills a small machine.
common=(--keep_going "--jobs=$(compile_jobs)" --show_progress_rate_limit=15)
if [[ " ${targets[*]}" == *" //..."* || " ${targets[*]}" == *" //tests"* ]]; then
  hta="$(hta_python)"
  [[ -z "${hta}" ]] || common+=("--test_env=DIM0_HTA_PYTHON=${hta}")
fi
test_jobs=$(($(nproc) / 4))
((test_jobs > 0)) || test_jobs=1
# Prints a line for each target of Bazel's build event file: label, outcome, and the test.xml of each run or shard,
# between tabs. An outcome is Bazel's status of a test, BUILT for any other target, or FAILED_TO_BUILD. A target that does
# not go with the build (one for GPUs, where there is no CUDA) has no line.
list_targets() {
  awk '
    function value(key,   start, rest) {
      start = index($0, "\"" key "\":\"")
      if (!start) return ""
      rest = substr($0, start + length(key) + 4)
      return substr(rest, 1, index(rest, "\"") - 1)
    }
    { label = value("label") }
    /^\{"id":\{"targetConfigured"/ {
      if (!(label in outcome)) { outcome[label] = "FAILED_TO_BUILD"; labels[++count] = label }
      is_test[label] = /"testSize":/
    }
    /^\{"id":\{"targetCompleted"/ && /"completed":\{"success":true/ { if (!is_test[label]) outcome[label] = "BUILT" }
    /^\{"id":\{"targetCompleted"/ && /"aborted":\{"reason":"SKIPPED"/ { incompatible[label] = 1 }
    /^\{"id":\{"testSummary"/ { outcome[label] = value("overallStatus") }
    /^\{"id":\{"testResult"/ && match($0, /file:\/\/[^"]*\/test\.xml"/) {
      # A later attempt at the same run and shard replaces an earlier one.
      match($0, /"run":[0-9]+,"shard":[0-9]+/)
      run = label SUBSEP substr($0, RSTART, RLENGTH)
      match($0, /file:\/\/[^"]*\/test\.xml"/)
      if (!(run in xml)) run_list[label] = run_list[label] "\n" run
      xml[run] = substr($0, RSTART + 7, RLENGTH - 8)
    }
    END {
      for (i = 1; i <= count; ++i) {
        if (labels[i] in incompatible) continue
        line = labels[i] "\t" outcome[labels[i]]
        runs = split(run_list[labels[i]], run_of, "\n")
        for (j = 2; j <= runs; ++j) line = line "\t" xml[run_of[j]]
        print line
      }
    }' "$1"
}

# Prints a line for each test case of a test.xml: passed, failed or skipped, a tab, and its name.
list_cases() {
  awk '
    function value(text, key,   start, rest) {
      start = index(text, " " key "=\"")
      if (!start) return ""
      rest = substr(text, start + length(key) + 3)
      return substr(rest, 1, index(rest, "\"") - 1)
    }
    # What a test printed stands in CDATA and may look like XML.
    {
      line = $0
      while (line != "") {
        mark = in_cdata ? "]]>" : "<![CDATA["
        position = index(line, mark)
        if (!in_cdata) text = text (position ? substr(line, 1, position - 1) : line)
        if (!position) break
        line = substr(line, position + length(mark))
        in_cdata = !in_cdata
      }
      text = text "\n"
    }
    END {
      count = split(text, cases, "<testcase")
      for (i = 2; i <= count; ++i) {
        outcome = "passed"
        if (cases[i] ~ /<(failure|error)[ >\/]/) outcome = "failed"
        else if (cases[i] ~ /(<skipped| result="(skipped|suppressed)"| status="notrun")/) outcome = "skipped"
        name = value(cases[i], "name")
        class = value(cases[i], "classname")
        print outcome "\t" (class != "" ? class "." : "") name
      }
    }' "$1"
}

passed=0
failed=0
skipped=0
failures=()

# count_failure TARGET WHAT
count_failure() {
  failed=$((failed + 1))
  failures+=("$1  $2")
}

# Builds and tests in one configuration, "" or a --config option, and counts the outcome.
run_suite() {
  local suite="$1" events="${scratch}/events$1.json" bazel_status=0
  local suite_options=(${options[@]+"${options[@]}"})
  # What is for GPUs has the tag.
  [[ -z "${suite}" ]] || suite_options+=("${suite}" --build_tests_only --test_tag_filters=cuda)
  "${BAZEL}" build "${common[@]}" ${suite_options[@]+"${suite_options[@]}"} -- "${targets[@]}" || true
  "${BAZEL}" test "${common[@]}" "--local_test_jobs=${test_jobs}" ${suite_options[@]+"${suite_options[@]}"} \
    "--build_event_json_file=${events}" -- "${targets[@]}" || bazel_status=$?

  local target label outcome failed_before_suite="${failed}" failed_before xml result name
  while IFS=$'\t' read -r -a target; do
    label="${target[0]}${suite:+ ${suite}}"
    outcome="${target[1]}"
    failed_before="${failed}"
    for xml in "${target[@]:2}"; do
      # The event file's paths are URIs.
      xml="$(printf '%b' "${xml//%/\\x}")"
      [[ -f "${xml}" ]] || continue
      while IFS=$'\t' read -r result name; do
        case "${result}" in
          passed) passed=$((passed + 1)) ;;
          skipped) skipped=$((skipped + 1)) ;;
          # Where a test wrote no test.xml, Bazel's has one case, named as the target's path: its outcome says more.
          failed) count_failure "${label}" "$([[ "${name}" == */* ]] && echo "${outcome}" || echo "${name}")" ;;
        esac
      done < <(list_cases "${xml}")
    done
    case "${outcome}" in
      PASSED | FLAKY | BUILT) ;;
      # No failed test case stands for it: a crash after the last test, a time-out, a sanitizer's report at exit.
      *) ((failed > failed_before)) || count_failure "${label}" "${outcome}" ;;
    esac
  done < <([[ ! -f "${events}" ]] || list_targets "${events}")

  # 3 is "some tests failed", 4 "no tests": both are counted.
  if ((bazel_status != 0 && bazel_status != 3 && bazel_status != 4 && failed == failed_before_suite)); then
    count_failure "bazel${suite:+ ${suite}}" "exit status ${bazel_status}, see its errors above"
  fi
}

run_suite ""
[[ " ${options[*]-}" == *" --config="* ]] || run_suite --config=cuda_emulated

echo
if ((failed)); then
  echo "Failed:"
  printf '  %s\n' "${failures[@]}"
  echo "Logs: bazel-testlogs/<folder>/<test>/test.log"
elif ((passed == 0)); then
  echo "No test ran."
fi
summary="${passed} passed, ${failed} failed"
((skipped == 0)) || summary+=", ${skipped} skipped"
echo "${summary}"
((failed == 0 && passed > 0))
