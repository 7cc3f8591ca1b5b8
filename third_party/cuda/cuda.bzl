"""How CUDA sources are built: by nvcc, or for the emulator by the host's compiler, or not at all."""

load("@cuda//:defs.bzl", "ARCHITECTURES", "CUDA_FOUND", "NVCC")
load("@rules_cc//cc:defs.bzl", "cc_library")

# What the published binaries of the field hold: A100, H100, B200, RTX 50. Others of the same generations run these; later
# ones compile the PTX of the last.
_DEFAULT_ARCHITECTURES = ["80", "90", "100", "120"]

def if_cuda(yes, no):
    """`yes` in builds that have CUDA, real or emulated, else `no`."""
    return select({
        "//third_party/cuda:emulated": yes,
        "//conditions:default": yes if CUDA_FOUND else no,
    })

# For target_compatible_with: builds without CUDA skip the target.
NEEDS_CUDA = if_cuda([], ["@platforms//:incompatible"])

# How the host's compiler makes the emulator's code of kernels.
_EMULATED_COPTS = [
    # Where a GPU faults and a host's processor does not.
    "-fsanitize=alignment,bounds",
    "-fsanitize-undefined-trap-on-error",
    # The host's compiler does not know #pragma unroll.
    "-Wno-unknown-pragmas",
]

# Calls the emulator at every access to memory, which so finds races where DIM0_SIMT_RACES=1 (tests/simt/races.h). Not
# together with other sanitizers.
_RACE_COPTS = [
    "-fsanitize=thread",
    "--param=tsan-instrument-func-entry-exit=0",
]

# Of kernels that are always for the emulator: its own tests.
EMULATED_COPTS = _EMULATED_COPTS + select({
    "//third_party/cuda:sanitizer": [],
    "//conditions:default": _RACE_COPTS,
})

def _cuda_objects_impl(ctx):
    contexts = [dep[CcInfo].compilation_context for dep in ctx.attr.deps]
    headers = depset(ctx.files.hdrs, transitive = [context.headers for context in contexts])

    wanted = ctx.var.get("cuda_architectures")
    architectures = wanted.split(",") if wanted else [a for a in _DEFAULT_ARCHITECTURES if a in ARCHITECTURES]
    for architecture in architectures:
        if architecture not in ARCHITECTURES:
            fail("--define=cuda_architectures=%s: this nvcc makes no code for %s; it knows %s" %
                 (wanted, architecture, ", ".join(ARCHITECTURES)))

    objects = []
    for source in ctx.files.srcs:
        object = ctx.actions.declare_file("_objects/%s/%s.o" % (ctx.label.name, source.basename))
        args = ctx.actions.args()
        args.add_all(["-x", "cu", "-std=c++20", "-c", source, "-o", object])
        args.add_all(["-O0", "-G", "-g"] if ctx.var["COMPILATION_MODE"] == "dbg" else ["-O3", "-lineinfo"])
        for architecture in architectures:
            args.add("-gencode=arch=compute_%s,code=sm_%s" % (architecture, architecture))
        args.add("-gencode=arch=compute_%s,code=compute_%s" % (architectures[-1], architectures[-1]))
        args.add_all(["-Xcompiler", "-fPIC", "-Xcompiler", "-Wall"])
        args.add_all(ctx.attr.nvcc_options)
        for context in contexts:
            args.add_all(context.quote_includes, before_each = "-I")
            args.add_all(context.includes, before_each = "-I")
            args.add_all(context.system_includes, before_each = "-isystem")
            args.add_all(context.defines, format_each = "-D%s")
        ctx.actions.run(
            executable = NVCC,
            arguments = [args],
            inputs = depset([source], transitive = [headers]),
            outputs = [object],
            mnemonic = "CudaCompile",
            progress_message = "Compiling %s for %s" % (source.short_path, ", ".join(architectures)),
            use_default_shell_env = True,
        )
        objects.append(object)
    return [DefaultInfo(files = depset(objects))]

_cuda_objects = rule(
    implementation = _cuda_objects_impl,
    attrs = {
        "deps": attr.label_list(providers = [CcInfo]),
        "hdrs": attr.label_list(allow_files = [".h"]),
        "nvcc_options": attr.string_list(),
        "srcs": attr.label_list(allow_files = [".cu.cc"]),
    },
)

def cuda_library(name, srcs, hdrs = [], deps = [], nvcc_options = [], visibility = None, testonly = None):
    """A cc_library of CUDA sources, *.cu.cc: each compiled for all architectures and PTX, or for the emulator.

    --define=cuda_architectures=80,90 picks others than the default.
    """
    deps = deps + ["//third_party/cuda:cudart"]
    _cuda_objects(
        name = name + "_objects",
        srcs = srcs,
        hdrs = hdrs,
        nvcc_options = nvcc_options,
        tags = ["manual"],
        target_compatible_with = NEEDS_CUDA,
        testonly = testonly,
        visibility = ["//visibility:private"],
        deps = deps,
    )
    cc_library(
        name = name,
        srcs = select({
            "//third_party/cuda:emulated": srcs,
            "//conditions:default": [":" + name + "_objects"],
        }),
        hdrs = hdrs,
        copts = select({
            "//third_party/cuda:emulated": _EMULATED_COPTS + _RACE_COPTS,
            "//third_party/cuda:emulated_in_sanitizer": _EMULATED_COPTS,
            "//conditions:default": [],
        }),
        target_compatible_with = NEEDS_CUDA,
        testonly = testonly,
        visibility = visibility,
        deps = deps,
    )
