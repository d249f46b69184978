"""Drops the rights that a program must not have, then becomes that program: the inner part of a sandbox.

It enters new user, network and process namespaces and starts a child as process 1 of these, so that everything the
child starts dies with it. The child may write files only below one folder (Landlock), sets limits of CPU time, memory
and file sizes, and becomes the program. This file runs as a script of its own, imports nothing but the standard library
and is never imported by the package.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys

_NEW_USER, _NEW_NET, _NEW_PID, _NEW_IPC = 0x10000000, 0x40000000, 0x20000000, 0x08000000
_DIE_WITH_PARENT, _NO_NEW_PRIVILEGES = 1, 38
_CREATE_RULES, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
#: Landlock's rights to change files: write, remove and make. Later versions of the kernel add move and truncate.
_WRITES = 1 << 1 | sum(1 << bit for bit in range(4, 13))
_LATER = {2: 1 << 13, 3: 1 << 14}
#: Exit code where a namespace or Landlock is refused.
REFUSED = 125


def main(arguments: list[str]) -> int:  # noqa: RET503 - it becomes the program in the end
    """Runs ``ISOLATE CPU MEMORY FILE PROCESSES FOLDER [COMMAND...]``; without a command it only tries to isolate."""
    isolate, cpu, memory, size, processes, folder, *command = arguments
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_DIE_WITH_PARENT, 9, 0, 0, 0)
    if isolate == "1" and libc.unshare(_NEW_USER | _NEW_NET | _NEW_PID | _NEW_IPC):
        return _refused("namespaces")
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code if code >= 0 else 128 - code  # as shells report signals
    libc.prctl(_DIE_WITH_PARENT, 9, 0, 0, 0)
    if isolate == "1" and not _lock_files(libc, folder):
        os._exit(_refused("Landlock"))
    limits = {
        resource.RLIMIT_CPU: int(cpu),
        resource.RLIMIT_AS: int(memory),
        resource.RLIMIT_FSIZE: int(size),
        resource.RLIMIT_NPROC: int(processes),
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 256,
    }
    if not command:
        os._exit(0)
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))
    os.execv(command[0], command)


def _refused(what: str) -> int:
    os.write(2, f"{what}: {os.strerror(ctypes.get_errno())}\n".encode())
    return REFUSED


def _lock_files(libc: ctypes.CDLL, folder: str) -> bool:
    """Makes files writable only below `folder`; returns whether the kernel allows that."""
    version = libc.syscall(_CREATE_RULES, None, 0, 1)
    if version < 1:
        return False
    writes = _WRITES | sum(right for since, right in _LATER.items() if version >= since)
    attributes = struct.pack("=Q", writes)
    rules = libc.syscall(_CREATE_RULES, attributes, len(attributes), 0)
    if rules < 0:
        return False
    for path, rights in ((folder, writes), ("/dev/null", writes & (1 << 1 | 1 << 14))):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if libc.syscall(_ADD_RULE, rules, 1, struct.pack("=Qi", rights, place), 0):
            return False
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        return False
    return libc.syscall(_RESTRICT_SELF, rules, 0) == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
