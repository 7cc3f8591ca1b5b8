"""The CUDA Toolkit of this machine, as a Bazel repository; nothing is downloaded or copied.

Looked for in CUDA_HOME, CUDA_PATH, beside the nvcc on PATH, and in the usual places; NCCL there, too, in NCCL_HOME, and
in the compiler's own search path. defs.bzl of the repository says whether both were found. Where not, or where
CUDA_HOME is "none" (--repo_env=CUDA_HOME=none), the build leaves CUDA out, and says so.
"""

# Of each library: its file, and whether programs are linked with it; others are loaded on demand (on_demand/).
_LIBRARIES = {
    "cublas": ("libcublasLt.so", False),
    "cudart": ("libcudart.so", True),
}

_USUAL_PLACES = ["/usr/local/cuda", "/opt/cuda", "/usr/lib/cuda"]

# Of the toolkit's headers those that programs of ours include, and what these include. The folders named are links, which
# a sandbox would otherwise have to follow file by file through the headers of all other libraries.
_HEADERS = [
    "include/*.h",
    "include/*.hpp",
    "include/cccl/nv/**",
    "include/crt/**",
    "include/nccl_device/**",
    "include/nv/**",
    "include/nvtx3/**",
]

_LIBRARY = """
cc_library(
    name = {name},
    hdrs = glob({headers}, allow_empty = True),
    includes = {includes},
    linkopts = {linkopts},
    target_compatible_with = {compatible},
    visibility = ["//visibility:public"],
)
"""

def _library(name, headers = [], includes = [], linkopts = [], found = True):
    return _LIBRARY.format(
        name = repr(name),
        headers = repr(headers),
        includes = repr(includes),
        linkopts = repr(linkopts),
        compatible = repr([] if found else ["@platforms//:incompatible"]),
    )

def _find_toolkit(ctx):
    """Returns the toolkit's folder, or None and where it was looked for."""
    named = [ctx.os.environ[name] for name in ["CUDA_HOME", "CUDA_PATH"] if ctx.os.environ.get(name)]
    nvcc = ctx.which("nvcc")
    places = named + ([str(nvcc.realpath.dirname.dirname)] if nvcc else []) + _USUAL_PLACES
    for place in places:
        if ctx.path(place + "/bin/nvcc").exists and ctx.path(place + "/include/cuda_runtime.h").exists:
            return place, places
    return None, places

def _library_dir(ctx, root, library):
    for folder in ["lib64", "lib", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu"]:
        if ctx.path("/".join([root, folder, library])).exists:
            return root + "/" + folder
    return None

def _file_with_version(ctx, folder, file):
    """Returns the name that says which interface the library has: libnccl.so.2 for libnccl.so."""
    target = ctx.path(folder + "/" + file).realpath.basename
    # libnccl.so.2.28.9 has the interface of libnccl.so.2.
    return ".".join(target.split(".")[:3]) if target.startswith(file + ".") else file

_DEFS = """CUDA_FOUND = {}
ARCHITECTURES = {}
NVCC = "{}"
CUBLASLT_FILE = "{}"
NCCL_FILE = "{}"
"""

def _leave_out(ctx, why):
    # buildifier: disable=print
    print("CUDA is left out of this build: " + why)
    names = ["cudart", "cublas", "nccl", "nvtx"]
    ctx.file("BUILD.bazel", "".join([_library(name, found = False) for name in names]), executable = False)
    ctx.file("defs.bzl", _DEFS.format(False, [], "", "", ""), executable = False)

def _cuda_repository_impl(ctx):
    if ctx.os.environ.get("CUDA_HOME") == "none":
        _leave_out(ctx, "CUDA_HOME=none")
        return
    root, places = _find_toolkit(ctx)
    if not root:
        _leave_out(ctx, "no toolkit in %s; set CUDA_HOME to have it" % ", ".join(places))
        return

    ctx.symlink(root + "/include", "include")
    build = ""
    files = {}
    for name, (file, linked) in _LIBRARIES.items():
        folder = _library_dir(ctx, root, file)
        if not folder:
            _leave_out(ctx, "%s has no %s; install the toolkit's libraries" % (root, file))
            return
        build += _library(
            name,
            headers = _HEADERS,
            includes = ["include"],
            linkopts = ["-L" + folder, "-Wl,-rpath," + folder] + (["-l" + file[3:-3]] if linked else []),
        )
        files[name] = _file_with_version(ctx, folder, file)
    build += _library("nvtx", headers = _HEADERS, includes = ["include"], linkopts = ["-ldl"])

    for place in [ctx.os.environ.get("NCCL_HOME"), root, "/usr/local", "/usr"]:
        folder = _library_dir(ctx, place, "libnccl.so") if place else None
        if not folder or not ctx.path(place + "/include/nccl.h").exists:
            continue
        includes = []
        if place not in ["/usr", "/usr/local", root]:
            ctx.symlink(place + "/include", "nccl_include")
            includes = ["nccl_include"]
        build += _library(
            "nccl",
            headers = _HEADERS + [folder + "/**" for folder in includes],
            includes = ["include"] + includes,
            linkopts = ["-Wl,-rpath," + folder],
        )
        files["nccl"] = _file_with_version(ctx, folder, "libnccl.so")
        break
    if "nccl" not in files:
        _leave_out(ctx, "there is no NCCL in %s or the system's folders; install libnccl-dev or set NCCL_HOME" % root)
        return

    # What this nvcc can make code for: 12.x knows fewer than 13.0.
    codes = ctx.execute([root + "/bin/nvcc", "--list-gpu-code"])
    if codes.return_code != 0:
        _leave_out(ctx, "%s/bin/nvcc does not run: %s" % (root, codes.stderr.strip()))
        return
    architectures = [code[len("sm_"):] for code in codes.stdout.strip().split("\n") if code.startswith("sm_")]
    ctx.file("BUILD.bazel", build, executable = False)
    ctx.file(
        "defs.bzl",
        _DEFS.format(True, architectures, root + "/bin/nvcc", files["cublas"], files["nccl"]),
        executable = False,
    )

cuda_repository = repository_rule(
    implementation = _cuda_repository_impl,
    configure = True,
    environ = ["CUDA_HOME", "CUDA_PATH", "NCCL_HOME", "PATH"],
    local = True,
)
