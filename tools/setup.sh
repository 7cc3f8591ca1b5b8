# shellcheck shell=bash
# Set-up shared by tools/test.sh and tools/quickstart.sh, which source it: installs what is missing, finds Bazel.
# Leaves the current directory at the repository root. Quiet when nothing is to be done.

BUILD_PACKAGES=(g++ pkg-config libabsl-dev libspdlog-dev libgtest-dev libgmock-dev nlohmann-json3-dev libopenblas-dev
  libcpp-httplib-dev libboost-context-dev)
DEBIAN_BAZEL_PACKAGES=(bazel-bootstrap bazel-rules-java bazel-rules-proto bazel-skylib bazel-platforms)

die() {
  echo "${0##*/}: $*" >&2
  exit 1
}

is_installed() {
  [[ "$(dpkg-query --show --showformat='${db:Status-Status}' "$1" 2>/dev/null)" == installed ]]
}

# install_packages PACKAGE...: installs those that are missing, or ends the script with a line that says why not, and
# what else would do (INSTALL_HINT).
install_packages() {
  # Elsewhere than on Debian and its kin, the build names what it does not find.
  command -v dpkg-query >/dev/null || return 0
  local package missing=()
  for package in "$@"; do
    is_installed "${package}" || missing+=("${package}")
  done
  ((${#missing[@]})) || return 0

  local as_root=()
  if ((EUID != 0)); then
    command -v sudo >/dev/null || die "run as root or with sudo installed, to: apt-get install ${missing[*]}"
    as_root=(sudo)
  fi
  echo "Installing ${missing[*]}" >&2
  local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300)
  local log
  log="$(mktemp)"
  # A stale or unreachable index may still hold the packages: only the installation decides.
  "${apt[@]}" update >"${log}" 2>&1 || true
  if ! "${apt[@]}" install --yes --no-install-recommends "${missing[@]}" >>"${log}" 2>&1; then
    grep '^[EW]:' "${log}" | head -n 5 >&2
    die "apt-get could not install ${missing[*]} (all it said: ${log})${INSTALL_HINT:-}"
  fi
  rm -f "${log}"
}

# Sets BAZEL: the Bazel or Bazelisk on PATH, else Debian's own.
find_bazel() {
  if BAZEL="$(command -v bazel || command -v bazelisk)"; then
    # Debian's build has no version number, and takes the rules it needs from Debian's packages.
    [[ "$("${BAZEL}" --version 2>/dev/null)" == *no_version* ]] || return 0
  fi
  local bazelisk="install Bazelisk (https://bazel.build/install) and run this again"
  INSTALL_HINT="; or ${bazelisk}" install_packages "${DEBIAN_BAZEL_PACKAGES[@]}"
  BAZEL="$(command -v bazel)" || die "no Bazel: ${bazelisk}"
}

# Prints how many compilers to run at once: one a core, but no more than memory holds at 1.5 GiB each.
compile_jobs() {
  local cores memory_kib jobs
  cores="$(nproc)"
  memory_kib="$(awk '/^MemAvailable:/ { print $2 }' /proc/meminfo)"
  jobs=$((memory_kib / (3 * 512 * 1024)))
  ((jobs < cores)) || jobs="${cores}"
  ((jobs > 0)) || jobs=1
  echo "${jobs}"
}

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
[[ "${PWD}" != *[[:space:]]* ]] || die "Bazel does not work in a path with spaces: move the tree out of ${PWD}"
# Bazel passes over its own links when it looks for packages, but not over this one when another user left it.
[[ ! -L "bazel-${PWD##*/}" ]] || rm -f "bazel-${PWD##*/}"
install_packages "${BUILD_PACKAGES[@]}"
find_bazel
