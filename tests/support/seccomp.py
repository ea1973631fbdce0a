"""Run a Python module under a container's profile of system calls: `python -m support.seccomp
PROFILE MODULE`.

libseccomp makes the filter of the profile, as it does for runc and containerd. The process may gain
no privileges, as in a container of docker-compose.yml.
"""

import ctypes
import ctypes.util
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

ACTIONS = {"SCMP_ACT_ALLOW": 0x7FFF0000, "SCMP_ACT_ERRNO": 0x00050000}
ARCHITECTURES = {"SCMP_ARCH_X86_64": 0xC000003E, "SCMP_ARCH_AARCH64": 0xC00000B7}
COMPARISONS = {"SCMP_CMP_EQ": 4}
UNKNOWN = -1  # a call that this libseccomp has no number for, which runc passes over too
EXISTS = -17  # the architecture of this machine is in a filter from the start


class Comparison(ctypes.Structure):
    """struct scmp_arg_cmp."""

    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("datum_a", ctypes.c_uint64),
        ("datum_b", ctypes.c_uint64),
    )


def library() -> ctypes.CDLL | None:
    """Return libseccomp; None where it is not installed."""
    name = ctypes.util.find_library("seccomp")
    if name is None:
        return None
    found = ctypes.CDLL(name, use_errno=True)
    found.seccomp_init.restype = ctypes.c_void_p
    found.seccomp_arch_add.argtypes = (ctypes.c_void_p, ctypes.c_uint32)
    found.seccomp_rule_add_array.argtypes = (
        *(ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint),
        ctypes.POINTER(Comparison),
    )
    found.seccomp_load.argtypes = (ctypes.c_void_p,)
    return found


def confine(profile: dict[str, Any]) -> None:
    """Filter the system calls of this process, and of all that it starts, from now on."""
    seccomp = library()
    if seccomp is None:
        raise SystemExit("libseccomp is not installed (apt-get install libseccomp2)")
    default = ACTIONS[profile["defaultAction"]] | profile["defaultErrnoRet"]
    made = ctypes.c_void_p(seccomp.seccomp_init(ctypes.c_uint32(default)))
    for architecture in profile["architectures"]:
        code = seccomp.seccomp_arch_add(made, ARCHITECTURES[architecture])
        assert code in (0, EXISTS), (architecture, code)
    for rule in profile["syscalls"]:
        arguments = [
            Comparison(each["index"], COMPARISONS[each["op"]], each["value"], 0)
            for each in rule.get("args", [])
        ]
        array = (Comparison * len(arguments))(*arguments)
        for name in rule["names"]:
            number = seccomp.seccomp_syscall_resolve_name(name.encode())
            if number != UNKNOWN:
                code = seccomp.seccomp_rule_add_array(
                    made, ACTIONS[rule["action"]], number, len(arguments), array
                )
                assert code == 0, (name, os.strerror(-code))
    code = seccomp.seccomp_load(made)
    assert code == 0, os.strerror(-code)


def main() -> None:
    """Confine this process, then be the module."""
    profile, module = sys.argv[1:]
    confine(json.loads(Path(profile).read_text()))
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
