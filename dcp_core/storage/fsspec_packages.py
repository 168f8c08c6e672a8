"""fsspec, and the packages that it needs for a scheme: found where they are installed, named where they are not."""

from __future__ import annotations

import importlib
from typing import Any

from dcp_core.errors import ArgumentError
from dcp_core.storage.urls import redacted, schemes_of

INSTALL = 'python3 -m pip install "hyper-dcp[fsspec]"'
_INSTALL_PACKAGE = "python3 -m pip install"
_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), "adlfs"),
    **dict.fromkeys(("hdfs", "arrow_hdfs"), "pyarrow"),
    **dict.fromkeys(("sftp", "ssh"), "paramiko"),
}

_NATIVE_WORDS = ("libjvm", "libhdfs", "java", "hadoop")
_NATIVE = {
    **dict.fromkeys(
        ("hdfs", "arrow_hdfs"),
        "; pyarrow reaches HDFS through Java and Hadoop's native library: install both, and set JAVA_HOME, HADOOP_HOME "
        "and CLASSPATH (`hadoop classpath --glob`)",
    )
}


def knows_scheme(url: str) -> bool:
    """Return whether fsspec has a file system for a URL.

    Raises:
        ArgumentError: fsspec is not installed.
    """
    registry = fsspec_module("fsspec.registry", url)
    known = {*registry.known_implementations, *registry.registry}
    return all(scheme in known for scheme in schemes_of(url))


def fsspec_module(module: str, url: str) -> Any:
    """Import a module of fsspec, for a URL.

    Raises:
        ArgumentError: fsspec is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ArgumentError(
            f"{redacted(url)!r} is a URL that no installed plugin knows (`dcp plugins` lists them); fsspec may, and is "
            f"not installed: {INSTALL}"
        ) from error


def missing_package(url: str, error: ImportError) -> ArgumentError:
    """What to say where fsspec knows a scheme and a package for it is missing."""
    package = _PACKAGES.get(schemes_of(url)[-1])
    remedy = f"; {_INSTALL_PACKAGE} {package}" if package else ""
    return ArgumentError(f"{redacted(url)!r} needs a package that is not installed: {error}{remedy}")


def native_remedy(url: str, error: Exception) -> str:
    """What to do where a package is there and cannot find what it needs of the system; nothing for other errors."""
    is_native = isinstance(error, OSError) and any(word in str(error).lower() for word in _NATIVE_WORDS)
    return _NATIVE.get(schemes_of(url)[-1], "") if is_native else ""
