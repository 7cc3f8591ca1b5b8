"""Abseil's public Bazel labels and the pkg-config modules that stand for them.

A module is named after its target, but for those in _MODULE_OF. Targets that the installed version does not have are
left out of @com_google_absl.
"""

_TARGETS = {
    "algorithm": ["algorithm", "container"],
    "base": ["config", "core_headers", "log_severity", "no_destructor", "nullability", "prefetch"],
    "cleanup": ["cleanup"],
    "container": [
        "btree",
        "fixed_array",
        "flat_hash_map",
        "flat_hash_set",
        "inlined_vector",
        "node_hash_map",
        "node_hash_set",
    ],
    "debugging": ["failure_signal_handler", "stacktrace", "symbolize"],
    "flags": ["commandlineflag", "config", "flag", "marshalling", "parse", "reflection", "usage"],
    "functional": ["any_invocable", "bind_front", "function_ref"],
    "hash": ["hash"],
    "log": ["absl_check", "absl_log", "check", "die_if_null", "globals", "initialize", "log"],
    "memory": ["memory"],
    "meta": ["type_traits"],
    "numeric": ["bits", "int128"],
    "random": ["bit_gen_ref", "distributions", "random", "seed_sequences"],
    "status": ["status", "statusor"],
    "strings": ["cord", "str_format", "strings"],
    "synchronization": ["synchronization"],
    "time": ["time"],
    "types": ["any", "compare", "optional", "span", "variant"],
    "utility": ["utility"],
}

_MODULE_OF = {
    "algorithm:container": "absl_algorithm_container",
    "flags:commandlineflag": "absl_flags_commandlineflag",
    "flags:config": "absl_flags_config",
    "flags:flag": "absl_flags",
    "flags:marshalling": "absl_flags_marshalling",
    "flags:parse": "absl_flags_parse",
    "flags:reflection": "absl_flags_reflection",
    "flags:usage": "absl_flags_usage",
    "log:absl_check": "absl_absl_check",
    "log:absl_log": "absl_absl_log",
    "log:globals": "absl_log_globals",
    "log:initialize": "absl_log_initialize",
    "random:bit_gen_ref": "absl_random_bit_gen_ref",
    "random:distributions": "absl_random_distributions",
    "random:random": "absl_random_random",
    "random:seed_sequences": "absl_random_seed_sequences",
}

ABSEIL_MODULES = {
    "absl/%s:%s" % (package, target): _MODULE_OF.get("%s:%s" % (package, target), "absl_" + target)
    for package, targets in _TARGETS.items()
    for target in targets
}
