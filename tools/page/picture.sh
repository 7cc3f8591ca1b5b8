#!/usr/bin/env bash
# Makes the picture that README shows, of a page that trace_report wrote: its summary, split and timeline of one step.
#
# usage: tools/page/picture.sh PAGE.html OUT.png
#   bazel-bin/tools/trace_report --html=page.html runs/adamw runs/rmnp runs/muon
#   tools/page/picture.sh page.html picture.png
set -euo pipefail

die() {
  echo "${0##*/}: $*" >&2
  exit 1
}

(($# == 2)) || die "usage: $0 PAGE.html OUT.png"
[[ -f "$1" ]] || die "no page $1: trace_report --html=$1 writes one"
browser="$(command -v chromium || command -v chromium-browser || command -v google-chrome)" ||
  die "no Chromium: apt-get install chromium"

readonly WIDTH=1280
page="file://$(realpath "$1")#picture"
scratch="$(mktemp -d)"
trap 'rm -rf "${scratch}"' EXIT

# browse OPTION...: opens the page. As root, Chromium runs without its sandbox only.
browse() {
  local sandbox=()
  ((EUID != 0)) || sandbox=(--no-sandbox)
  timeout 60 "${browser}" --headless --disable-gpu --disable-dev-shm-usage --hide-scrollbars --mute-audio \
    ${sandbox[@]+"${sandbox[@]}"} "--user-data-dir=${scratch}/profile" --virtual-time-budget=5000 \
    --blink-settings=preferredColorScheme=1 "$@" "${page}" 2>"${scratch}/log" ||
    die "${browser} failed: $(grep -v '^$' "${scratch}/log" | tail -n 1)"
}

# The page says how high it is at this width.
browse "--window-size=${WIDTH},2000" --dump-dom >"${scratch}/dom"
height="$(head -c 2000 "${scratch}/dom" | grep -o 'data-height="[0-9]*"' | tr -dc '0-9')" ||
  die "$1 is not a page that trace_report wrote"
browse "--window-size=${WIDTH},${height}" --force-device-scale-factor=1.25 "--screenshot=${scratch}/picture.png" >/dev/null
[[ -s "${scratch}/picture.png" ]] || die "${browser} made no picture: $(tail -n 1 "${scratch}/log")"
mv "${scratch}/picture.png" "$2"
