"""Repositories that Bazel's own rules load, taken from Debian's packages instead of the network.

Debian's Bazel (bazel-bootstrap) has none of them built in, and would download them. Any other Bazel brings the
versions it was released with: for those nothing is defined here.
"""

# Repository -> where Debian's package of it (bazel-rules-java, bazel-rules-proto, bazel-skylib, bazel-platforms) lies.
_DEBIAN_DIRS = {
    "bazel_skylib": "/usr/share/bazel/tools/skylib",
    "platforms": "/usr/share/bazel/tools/platforms",
    "rules_java": "/usr/share/bazel/rules/java",
    "rules_proto": "/usr/share/bazel/rules/proto",
}

_SHIM_DIRS = {
    "remote_coverage_tools": "third_party/bazel/remote_coverage_tools",
    "rules_cc": "third_party/bazel/rules_cc",
}

_REPOSITORIES_BZL = """
DIRS = {dirs}

def debian_rules_repositories():
    for name, path in DIRS.items():
        native.local_repository(name = name, path = path)
"""

def _find_debian_rules_impl(ctx):
    dirs = {}
    if ctx.attr.is_debian_bazel:
        missing = [path for path in _DEBIAN_DIRS.values() if not ctx.path(path).exists]
        if missing:
            fail("%s not found: apt-get install bazel-rules-java bazel-rules-proto bazel-skylib bazel-platforms" %
                 ", ".join(missing))
        dirs.update(_DEBIAN_DIRS)
        dirs.update(_SHIM_DIRS)
    ctx.file("BUILD.bazel", executable = False)
    ctx.file("repositories.bzl", _REPOSITORIES_BZL.format(dirs = repr(dirs)), executable = False)

_find_debian_rules = repository_rule(
    implementation = _find_debian_rules_impl,
    attrs = {"is_debian_bazel": attr.bool(mandatory = True)},
    local = True,
)

def find_debian_rules(name):
    """Defines @name//:repositories.bzl, whose debian_rules_repositories() suits the running Bazel."""

    # Debian's build carries no version number; a release always does.
    _find_debian_rules(name = name, is_debian_bazel = not native.bazel_version or native.bazel_version.startswith("4."))
