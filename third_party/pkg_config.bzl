"""Libraries that the system provides, as Bazel repositories.

pkg-config says how to compile and link against each of them; nothing is downloaded or copied. Headers in the
compiler's own search path are left there; other include directories are linked into the repository, so that Bazel's
sandbox sees them.
"""

def _run_pkg_config(ctx, pkg_config, option, module):
    """Returns the words pkg-config prints for `module`, or None where it does not know the module."""
    result = ctx.execute([pkg_config, option, module])
    if result.return_code != 0:
        return None
    return [word for word in result.stdout.strip().split(" ") if word]

def _is_default_include_dir(path):
    # /usr/include and its multiarch folder, /usr/include/<cpu>-<os>-<abi>.
    path = path.rstrip("/")
    if path in ["/usr/include", "/usr/local/include"]:
        return True
    parent, _, name = path.rpartition("/")
    return parent == "/usr/include" and name.count("-") == 2

def _library(ctx, pkg_config, name, module, include_links):
    """Returns a cc_library for `module`, or None where the system does not have it.

    include_links: dictionary from an include directory to the link that stands for it; grows as needed.
    """
    link_flags = _run_pkg_config(ctx, pkg_config, "--libs", module)
    if link_flags == None:
        return None
    includes = []
    defines = []
    for flag in _run_pkg_config(ctx, pkg_config, "--cflags", module):
        if flag.startswith("-D"):
            defines.append(flag[2:])
        elif flag.startswith("-I") and not _is_default_include_dir(flag[2:]):
            path = flag[2:]
            if path not in include_links:
                include_links[path] = "include_%d" % len(include_links)
                ctx.symlink(path, include_links[path])
            includes.append(include_links[path])
    return """
cc_library(
    name = {name},
    testonly = {testonly},
    hdrs = glob({header_globs}, allow_empty = True),
    defines = {defines},
    includes = {includes},
    linkopts = {linkopts},
    visibility = ["//visibility:public"],
)
""".format(
        name = repr(name),
        testonly = ctx.attr.for_tests,
        header_globs = repr([link + "/**" for link in includes]),
        defines = repr(defines),
        includes = repr(includes),
        linkopts = repr(link_flags),
    )

def _pkg_config_repository_impl(ctx):
    pkg_config = ctx.os.environ.get("PKG_CONFIG") or ctx.which("pkg-config")
    if not pkg_config:
        fail("@%s: pkg-config is not installed: apt-get install pkg-config" % ctx.name)

    packages = {}
    include_links = {}
    missing = []
    for label, module in ctx.attr.modules.items():
        package, _, name = label.rpartition(":")
        library = _library(ctx, pkg_config, name, module, include_links)
        if library:
            packages.setdefault(package, []).append(library)
        else:
            missing.append(module)
    if ctx.attr.required_module:
        missing = [module for module in missing if module == ctx.attr.required_module]
    if missing:
        fail("@%s: pkg-config does not know %s: apt-get install %s" %
             (ctx.name, ", ".join(missing), ctx.attr.apt_package))

    for package, libraries in packages.items():
        ctx.file((package + "/" if package else "") + "BUILD.bazel", "".join(libraries), executable = False)

pkg_config_repository = repository_rule(
    implementation = _pkg_config_repository_impl,
    attrs = {
        "apt_package": attr.string(
            mandatory = True,
            doc = "The package(s) to name when a module is missing.",
        ),
        "modules": attr.string_dict(
            mandatory = True,
            doc = "Label in this repository ('name' or 'package:name') -> pkg-config module.",
        ),
        "required_module": attr.string(
            doc = "The module without which the library is absent; labels of other missing modules are left out, " +
                  "as a library's versions differ in what they have. Not given: every module is needed.",
        ),
        "for_tests": attr.bool(doc = "Only tests and test libraries may depend on it."),
    },
    configure = True,
    environ = ["PATH", "PKG_CONFIG", "PKG_CONFIG_PATH"],
    # Asked again at each start of Bazel's server: an upgraded -dev package is noticed.
    local = True,
)
