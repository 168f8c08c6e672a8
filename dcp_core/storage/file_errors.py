"""What a storage says where a name is none, or the system refuses: operation, file, cause and remedy."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from dcp_core.errors import ArgumentError, DcpError, NotFoundError, StorageError

_REMEDIES = {
    errno.ENOSPC: "free some space, or save elsewhere",
    errno.EDQUOT: "the quota is used up: free some space, or save elsewhere",
    errno.EACCES: "check the permissions of the directory on this machine",
    errno.EPERM: "check the permissions of the directory on this machine",
    errno.EROFS: "the file system is mounted read-only",
    errno.EEXIST: "another save is writing here, or a file of this name was put here; save again",
    errno.ENOENT: "the directory or the file was removed in the meantime, or nothing can be made there",
    errno.ENOTDIR: "a part of the path is a file; choose another path",
    errno.ESTALE: "the directory was removed on the file server in the meantime",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.EFBIG: "the file system or a limit (ulimit -f) does not allow files of this size",
}
_NOWHERE_TO_CREATE = "the directory is gone, or is not on a file system that all ranks share"


def storage_error(operation: str, name: str, where: str, error: OSError) -> StorageError:
    """Turn what the operating system said into our error.

    Args:
        operation: What was tried, in words ("create").
        name: The file, "" for the directory itself.
        where: The storage, from `Storage.describe`.
        error: What was raised.

    Returns:
        A `StorageError` with the same `errno`.
    """
    target = f"{name!r} in {where}" if name else where
    reason = error.strerror or str(error)
    code = errno.errorcode.get(error.errno or 0, "no errno")
    remedy = _REMEDIES.get(error.errno or 0)
    if operation == "create" and error.errno == errno.ENOENT:
        remedy = _NOWHERE_TO_CREATE
    made = StorageError(f"could not {operation} {target}: {reason} [{code}]" + (f"; {remedy}" if remedy else ""))
    made.errno = error.errno
    return made


@contextmanager
def translated(operation: str, name: str, where: str) -> Iterator[None]:
    """Turn an OSError of the system into one of ours that names operation, file and remedy.

    Args:
        operation: What is tried, in words.
        name: The file, "" for the directory itself.
        where: The storage, from `Storage.describe`.
    """
    try:
        yield
    except (StorageError, NotFoundError):
        raise
    except OSError as error:
        if error.errno == errno.ENOENT and operation in ("open", "touch", "list"):
            what = f"there is no {name!r} in {where}" if name else f"there is no directory {where}"
            raise NotFoundError(what) from error
        raise storage_error(operation, name, where, error) from error


def check_name(name: str, error_type: type[DcpError] = ArgumentError) -> str:
    """Check that a name stays inside the directory.

    Args:
        name: Name of a file.
        error_type: Raised for a bad one: `CorruptError` for names that came out of a file.

    >>> check_name("_rank0_.safetensors")
    '_rank0_.safetensors'
    """
    if name in ("", ".", "..") or any(character in name for character in "/\\\0"):
        raise error_type(f"{name!r} is no name of a file in the checkpoint's directory: expected one plain component")
    try:
        os.fsencode(name)
    except UnicodeEncodeError as error:
        raise error_type(f"{name!r} is no name of a file: it cannot be encoded") from error
    return name
