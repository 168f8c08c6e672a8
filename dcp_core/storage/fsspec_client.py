"""Requests to a file system of fsspec: one method each, tried again where that helps, with errors of ours.

In: names and bytes. Out: bytes, or a `StorageError` that names request, file and cause, without credentials. Nothing
here is kept across a fork: a process makes a file system of its own when it first asks for something.
"""

from __future__ import annotations

import datetime
import errno
import inspect
import io
import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import xxhash

from dcp_core.errors import ArgumentError, DcpError, StorageError
from dcp_core.storage.file_errors import storage_error
from dcp_core.storage.fsspec_packages import fsspec_module, missing_package, native_remedy
from dcp_core.storage.retries import Retries, answer_of, is_passing
from dcp_core.storage.secret_options import secrets_of
from dcp_core.storage.urls import HIDDEN, passwords_in, redacted, schemes_of

Entry = Mapping[str, Any]
"""What a file system tells about a name: its size, its type, some time."""

_Result = TypeVar("_Result")
_S3 = ("s3", "s3a")
KEYS_ONLY = frozenset((*_S3, "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "ocilake", "tos", "cos", "cosn"))
"""Schemes of stores that know keys and no directories."""

_RENAMING = frozenset(("file", "local", "sftp", "ssh", "hdfs", "arrow_hdfs"))
"""Schemes where a file that is being written is seen half, and a rename is one step."""

_IN_PROCESS = frozenset(("memory",))
_TIMES = ("LastModified", "last_modified", "updated", "mtime", "modified", "modificationTime", "created")
_NO_BUCKET = "NoSuchBucket"
_MOST_INSTANCES = 32
_VARIABLES = ("AWS_", "AZURE_", "FSSPEC_", "GCSFS_", "GOOGLE_", "HADOOP_")
# What botocore and s3fs would try again by themselves is tried here.
_S3_CONFIG = {
    "retries": {"total_max_attempts": 1},
    "connect_timeout": 10,
    "read_timeout": 60,
    "max_pool_connections": 32,
}

_LOG = logging.getLogger("dcp.storage")

_instances: dict[tuple[int, str], Any] = {}
_instances_lock = threading.Lock()


class FsspecClient:
    """Requests to the place that a URL names.

    Args:
        url: The checkpoint's directory.
        options: What fsspec calls storage options.
        retries: How often a request is made.

    Raises:
        ArgumentError: The URL or the options cannot be understood, or a package is missing.
    """

    def __init__(self, url: str, options: Mapping[str, Any], retries: Retries) -> None:
        self.url = url
        self.options = dict(options)
        self.shown = repr(redacted(url))
        self._retries = retries
        self._secrets = (*secrets_of(self.options), *passwords_in(url))
        self._hurries = False
        self._gave_up = False
        self._own: tuple[int, Any, str] | None = None
        scheme = schemes_of(url)[-1]
        self.knows_directories = scheme not in KEYS_ONLY
        self.renames = scheme in _RENAMING
        self.is_in_process = scheme in _IN_PROCESS
        self._file_system()

    # --- the file system -----------------------------------------------------------------------------

    def _file_system(self) -> tuple[Any, str]:
        """This process's file system, and the path in it."""
        own = self._own
        if own is None or own[0] != os.getpid():
            own = self._own = (os.getpid(), *self._made())
        return own[1], own[2]

    def _made(self) -> tuple[Any, str]:
        core = fsspec_module("fsspec.core", self.url)
        is_chained = "::" in self.url
        place = self.url if is_chained else "/".join(self.url.split("/", 3)[:3])
        key = (os.getpid(), f"{place} {_digest(sorted(self.options.items(), key=repr), _surroundings())}")
        try:
            with _instances_lock:
                found = _instances.get(key)
                if found is not None and not is_chained:
                    return found, str(found._strip_protocol(self.url)).rstrip("/")
                made, path = core.url_to_fs(self.url, skip_instance_cache=True, **self._tuned())
                if hasattr(made, "call_s3"):
                    made.retries = 1
                while len(_instances) >= _MOST_INSTANCES:
                    _instances.pop(next(iter(_instances)))
                _instances[key] = made
                return made, str(path).rstrip("/")
        except ImportError as error:
            raise missing_package(self.url, error) from error
        except Exception as error:
            text = self.scrubbed(f"{type(error).__name__}: {error}") + native_remedy(self.url, error)
            raise ArgumentError(f"fsspec makes no file system of {self.shown}: {text}") from self.cause(error)

    def _tuned(self) -> dict[str, Any]:
        """The user's options, and for S3 those that leave trying again to us."""
        scheme, *further = schemes_of(self.url)
        if scheme not in _S3 or further:
            return self.options
        configured = fsspec_module("fsspec.config", self.url).conf.get(scheme, {}).get("config_kwargs") or {}
        config = {**_S3_CONFIG, **configured, **(self.options.get("config_kwargs") or {})}
        return {"use_listings_cache": False, **self.options, "config_kwargs": config}

    @property
    def has_parts(self) -> bool:
        """Whether the parts of one object can be sent side by side, in any order."""
        return "::" not in self.url and hasattr(self._file_system()[0], "call_s3")

    # --- requests ------------------------------------------------------------------------------------

    def look_up(self, name: str) -> Entry | None:
        """What is known of a name; None when there is none. Where keys alone are known, a directory is none."""
        if self.has_parts:  # `info` would look for a directory too, by a listing
            answer = self._or_none("look up", name, lambda made, path: self._to_s3(made, path, "head_object"))
            return None if answer is None else {"size": answer["ContentLength"], "LastModified": answer["LastModified"]}

        def request(file_system: Any, path: str) -> Entry:
            file_system.invalidate_cache()
            found: Entry = file_system.info(path)
            return found

        return self._or_none("look up", name, request)

    def get(self, name: str, start: int, stop: int) -> bytes | None:
        """Bytes of a file; fewer where it ends before, None when there is no file."""

        def request(file_system: Any, path: str) -> bytes:
            found: bytes = self._carry(stop - start, file_system, "cat_file", path, start=start, end=stop)
            return found

        return self._or_none("read", name, request)

    def put(self, name: str, content: bytes) -> None:
        """Give a name a content, replacing what has it."""
        if self.has_parts:
            self.ask("write", name, lambda made, path: self._to_s3(made, path, "put_object", body=content))
            return
        self.ask("write", name, lambda made, path: self._carry(len(content), made, "pipe_file", path, content))

    def put_local(self, name: str, local_path: str) -> None:
        """Give a name the content of a local file, as the file system does that best."""
        self.ask("write", name, lambda file_system, path: file_system.put_file(local_path, path))

    def rename(self, name: str, target: str) -> None:
        """Replace `target` by `name`, in one step where the file system has such a step."""
        self.ask(
            f"rename {name!r} to", target,
            lambda file_system, path: file_system.mv(path[: -len(target)] + name, path),
        )  # fmt: skip

    def remove(self, name: str) -> None:
        """Remove a file; a missing one is fine."""
        self._or_none("remove", name, lambda file_system, path: file_system.rm_file(path))

    def make_directory(self) -> None:
        """Make the directory, where there are directories."""
        if self.knows_directories:
            self.ask("make the directory", "", lambda file_system, path: file_system.makedirs(path, exist_ok=True))

    def entries(self, name: str = "") -> dict[str, Entry] | None:
        """What lies in the directory, or in one inside it; None when that is not there."""

        def request(file_system: Any, path: str) -> dict[str, Entry]:
            file_system.invalidate_cache()
            found = {str(entry["name"]).strip("/"): entry for entry in file_system.ls(path, detail=True)}
            found.pop(path.strip("/"), None)
            return {full.rpartition("/")[2]: entry for full, entry in found.items()}

        found = self._or_none("list", name, request)
        if found is None and not name and not self.has_parts and not self.knows_directories:
            self._check_bucket()
        return found

    def _check_bucket(self) -> None:
        """Tell a bucket that is not there from an empty one, where a listing does not; who may not look takes it so."""
        file_system, root = self._file_system()
        try:
            file_system.info(root.partition("/")[0])
        except FileNotFoundError as error:
            raise self.failure("find the bucket of", "", error) from self.cause(error)
        except Exception as error:
            _LOG.debug("whether there is a bucket %s is not known: %s", self.shown, type(error).__name__)

    def remove_directory(self, name: str) -> None:
        """Remove what lies in a directory, and the directory where there are such."""
        for inner in self.entries(name) or ():
            self.remove(f"{name}/{inner}")
        if self.knows_directories:
            self._or_none("remove the directory", name, lambda file_system, path: file_system.rmdir(path))

    def remove_empty_directory(self, name: str) -> bool:
        """Remove a directory that holds nothing; False for one that does."""
        if self.entries(name):
            return False
        if self.knows_directories:
            self._or_none("remove the directory", name, lambda file_system, path: file_system.rmdir(path))
        return True

    def unfinished(self) -> list[tuple[str, str]]:
        """The files whose parts were begun to be sent and are not put together: name and id of the upload each."""

        def request(file_system: Any, path: str) -> list[tuple[str, str]]:
            bucket, key, _ = file_system.split_path(path)
            uploads: list[tuple[str, str]] = []
            after: dict[str, str] = {}
            while True:  # a page has a thousand
                answer = file_system.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/", **after)
                uploads += [(found["Key"][len(key) + 1 :], found["UploadId"]) for found in answer.get("Uploads", ())]
                after = {"KeyMarker": answer.get("NextKeyMarker"), "UploadIdMarker": answer.get("NextUploadIdMarker")}
                if not answer.get("IsTruncated") or not all(after.values()):
                    return uploads

        return (self._or_none("list the unfinished files of", "", request) or []) if self.has_parts else []

    def call_s3(self, method: str, name: str, body: bytes | None = None, **arguments: Any) -> Any:
        """Make a request that only S3 knows."""
        what = method.replace("_", " ")
        return self.ask(what, name, lambda made, path: self._to_s3(made, path, method, body, **arguments))

    def _to_s3(self, file_system: Any, path: str, method: str, body: bytes | None = None, **arguments: Any) -> Any:
        bucket, key, _ = file_system.split_path(path)
        if body is not None:  # a stream, which is sent piece by piece, so that other requests go on meanwhile
            arguments["Body"] = io.BytesIO(body)
        return self._carry(len(body or b""), file_system, "call_s3", method, Bucket=bucket, Key=key, **arguments)

    def _carry(self, nbytes: int, file_system: Any, method: str, *arguments: Any, **named: Any) -> Any:
        """Make a call that carries so many bytes; where the client can stop, it ends in bounded time."""
        unbounded = getattr(file_system, f"_{method}", None)
        is_plain = "::" in self.url or not getattr(file_system, "async_impl", False)  # wrappers say so without being it
        if is_plain or not inspect.iscoroutinefunction(unbounded):
            return getattr(file_system, method)(*arguments, **named)
        seconds = self._retries.seconds_for(nbytes)
        return fsspec_module("fsspec.asyn", self.url).sync(
            file_system.loop, unbounded, *arguments, timeout=seconds, **named
        )

    # --- what all have in common ---------------------------------------------------------------------

    def hurry(self) -> None:
        """From now on make requests once, while the store does not answer: what follows only cleans up."""
        self._hurries = True

    def ask(self, what: str, name: str, request: Callable[[Any, str], _Result]) -> _Result:
        """Make a request about a name; what is not there is an error.

        Raises:
            StorageError: It was refused, or failed too often.
        """
        try:
            return self._ask(what, name, request)
        except FileNotFoundError as error:
            raise self.failure(what, name, error) from self.cause(error)

    def _or_none(self, what: str, name: str, request: Callable[[Any, str], _Result]) -> _Result | None:
        try:
            return self._ask(what, name, request)
        except FileNotFoundError as error:
            if answer_of(error).endswith(_NO_BUCKET):
                failure = self.failure(what, name, error)
                failure.errno = errno.ENOENT
                raise failure from self.cause(error)
            return None

    def _ask(self, what: str, name: str, request: Callable[[Any, str], _Result]) -> _Result:
        file_system, root = self._file_system()
        path = f"{root}/{name}" if name else root
        tried = 0

        def counted() -> _Result:
            nonlocal tried
            tried += 1
            return request(file_system, path)

        retries = self._retries.once() if self._hurries and self._gave_up else self._retries
        try:
            answer = retries.run(f"{what} {name!r} in {self.shown}", counted)
            self._gave_up = False
            return answer
        except (FileNotFoundError, DcpError):
            raise
        except Exception as error:
            self._gave_up = self._gave_up or is_passing(error)
            raise self.failure(what, name, error, tried) from self.cause(error)

    def failure(self, what: str, name: str, error: Exception, tried: int = 1) -> StorageError:
        """What was raised after so many attempts, as an error of ours, without credentials."""
        told = [f"answered {answer}" for answer in (answer_of(error),) if answer]
        told += [f"tried {tried} times"] if is_passing(error) else []
        said = str(error) or "no answer in time" if isinstance(error, TimeoutError) else str(error)
        reason = self.scrubbed(f"{type(error).__name__}: {said}" + (f" ({', '.join(told)})" if told else ""))
        number = error.errno if isinstance(error, OSError) else None
        return storage_error(what, name, self.shown, OSError(number or 0, reason) if number else OSError(reason))

    def scrubbed(self, text: str) -> str:
        """A text without passwords and values of secret options."""
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return redacted(text)

    def cause(self, error: Exception) -> Exception | None:
        """What an error of ours is raised from: nothing where a traceback would show what is scrubbed."""
        return None if self._secrets or redacted(self.url) != self.url else error


def time_of(entry: Entry) -> float | None:
    """When a file was last written, in seconds since 1970; None where the file system does not tell."""
    for key in _TIMES:
        found = entry.get(key)
        if isinstance(found, str):
            try:
                found = datetime.datetime.fromisoformat(found.replace("Z", "+00:00"))
            except ValueError:
                continue
        if isinstance(found, datetime.datetime):
            return (found if found.tzinfo else found.replace(tzinfo=datetime.timezone.utc)).timestamp()
        if isinstance(found, (int, float)) and not isinstance(found, bool):
            return float(found)
    return None


def _surroundings() -> list[tuple[str, str]]:
    """The variables that say where a store is, and who asks."""
    return sorted((name, value) for name, value in os.environ.items() if name.startswith(_VARIABLES))


def _digest(*values: object) -> str:
    return xxhash.xxh3_128_hexdigest(repr(values).encode("utf-8", "surrogateescape"))
