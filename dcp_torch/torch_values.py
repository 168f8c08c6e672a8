"""Values that `torch.save` wrote, read without running code of theirs.

Goes in: the bytes, or a file. Comes out: plain values, containers, tensors, and numpy arrays and scalars; a pickle that
names anything else is refused, unless the user has allowed it by `torch.serialization.add_safe_globals`.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import Any

import numpy as np
import torch

from dcp_core.errors import CorruptError, UntrustedObjectError

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
        with torch.serialization.safe_globals(_numpy_globals()):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped and _is_archive(source))
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
