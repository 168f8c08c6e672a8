"""Values that `torch.save` wrote, read without running code of theirs.

Goes in: the bytes, or a file. Comes out: plain values, containers, tensors, and numpy arrays and scalars; a pickle that
names anything else is refused, unless the user has allowed it by `torch.serialization.add_safe_globals`.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import zipfile
from typing import Any

import numpy as np
import torch

from dcp_core.errors import CorruptError, DcpError, UntrustedObjectError
from dcp_torch.torch_pickle_scan import check_pickle

_FREE_NBYTES = 1 << 22
_MAX_EXPANSION = 8
"""A value may take 4 MiB, or so many times its stored size."""
_MAX_WEIGHT = 1 << 20
_GLOBAL = re.compile(r"(?:GLOBAL|global|class|function)[: ]+([A-Za-z_][\w.]*\.[\w.]+)")


def load_value(source: bytes | str, name: str, *, mapped: bool = False) -> Any:
    """Read what `torch.save` wrote, tensors to host memory.

    Args:
        source: The bytes, or the path of a file.
        name: What to call it in errors.
        mapped: Map the file instead of reading it, where its kind allows: tensors are read when they are used.

    Raises:
        UntrustedObjectError: It needs a class or function that nobody allowed.
        CorruptError: It is no such file, or damaged.
    """
    file: Any = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        if isinstance(source, bytes) or _is_archive(source):
            file = _checked_archive(file, name)
        with torch.serialization.safe_globals(_numpy_globals()):
            found = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped and _is_archive(source))
        if isinstance(source, bytes):
            _check_proportion(found, len(source), name)
        return found
    except DcpError:
        raise
    except pickle.UnpicklingError as error:
        found = _GLOBAL.search(str(error))
        if found is None:
            raise CorruptError(f"{name} is damaged, or holds what torch refuses: {error}") from error
        raise UntrustedObjectError(
            f"{name} needs {found[1]}, which nobody allowed; nothing of it was run. If you trust the file, allow it: "
            f"torch.serialization.add_safe_globals([{found[1]}])"
        ) from error
    except FileNotFoundError:
        raise
    except Exception as error:  # what is damaged may end in almost any error
        raise CorruptError(f"{name} is damaged: {type(error).__name__}: {error}") from error


def _checked_archive(file: Any, name: str) -> Any:
    """Refuse an archive that would take more memory than its bytes are worth; give what torch shall read in its place.

    Raises:
        CorruptError: It is one, or none at all.
    """
    nbytes = len(file.getvalue()) if isinstance(file, io.BytesIO) else os.path.getsize(file)
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        for record in records:
            if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
                raise CorruptError(
                    f"{name}: its record {record.filename!r} is compressed; torch stores them as they are"
                )
        names = [record.filename.lower() for record in records]  # torch finds them whatever the case of their letters
        if sum(record.file_size for record in records) > nbytes or len(set(names)) < len(names):
            raise CorruptError(f"{name}: its records have more bytes than itself, or one name twice")
        for record in records:
            if record.filename.lower().endswith("data.pkl"):
                check_pickle(archive.read(record), name, max_weight=_MAX_WEIGHT)
        if not isinstance(file, io.BytesIO):
            return file
        # Anew, so that torch, which reads archives in its own way, reads just what was looked at.
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as copy:
            for record in records:
                copy.writestr(record.filename, archive.read(record))
    made.seek(0)
    return made


def _check_proportion(value: Any, nbytes: int, name: str) -> None:
    """Refuse a value that is larger than what it was made of: one number, a million times, for instance."""
    total, seen, left = 0, set(), [value]
    while left:
        item = left.pop()
        if isinstance(item, torch.Tensor):
            total += item.numel() * item.element_size()
        elif isinstance(item, np.ndarray):
            total += item.nbytes
        elif isinstance(item, (dict, list, tuple, set, frozenset)) and id(item) not in seen:
            seen.add(id(item))
            left += [*item, *item.values()] if isinstance(item, dict) else item
    if total > max(_FREE_NBYTES, _MAX_EXPANSION * nbytes):
        raise CorruptError(f"{name}: {nbytes} bytes claim to hold values of {total} bytes")


def _is_archive(source: bytes | str) -> bool:
    """Whether a file is of the kind that torch writes since 1.6, which can be mapped."""
    if isinstance(source, bytes):
        return False
    with open(source, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _numpy_globals() -> list[Any]:
    """What pickles of numpy's numbers and arrays name; none of it does more than make one."""
    array, scalar = np.zeros(0).__reduce__(), np.float64(0).__reduce__()
    kinds = {type(np.dtype(code)) for code in np.typecodes["All"] if code not in "OV"}
    spelled = [  # numpy 1 and 2 write other names for the same functions
        (function, f"numpy.{core}.multiarray.{name}")
        for core in ("core", "_core")
        for function, name in ((array[0], "_reconstruct"), (scalar[0], "scalar"))
    ]
    return [*spelled, np.ndarray, np.dtype, *kinds]
