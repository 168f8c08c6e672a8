"""Pickles that `torch.distributed.checkpoint` wrote, read without running code.

Goes in: the bytes of a `.metadata`, or the pickle of one saved tensor. Comes out: plain records. Every global that a
pickle names is looked up in a table of the known ones; there stand records and functions of this module in the place of
torch's, so that nothing of torch is called or made. A name that is not in the table is refused. What a pickle is given
by name, it cannot change: only records that it made itself take a state.
"""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dcp_core.dtype import BY_NAME, DType
from dcp_core.errors import CorruptError, DcpError, UntrustedObjectError
from dcp_torch.torch_pickle_scan import check_pickle

Extent = tuple[int, ...]
_Globals = Mapping[tuple[str, str], Any]

_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_FILES_MODULE = "torch.distributed.checkpoint.filesystem"


class Record:
    """What an object of one of torch's classes holds: its attributes, none of its behaviour.

    Attributes:
        arguments: What it was made with, or its state where that is not its attributes.
    """

    arguments: tuple[object, ...] = ()

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.arguments = state if isinstance(state, tuple) else (state,)

    def field(self, name: str) -> Any:
        """An attribute; None where there is none."""
        return self.__dict__.get(name)


class MetadataRecord(Record):
    """Of `Metadata`."""


class TensorEntry(Record):
    """Of `TensorStorageMetadata`."""


class BytesEntry(Record):
    """Of `BytesStorageMetadata`."""


class ChunkEntry(Record):
    """Of `ChunkStorageMetadata`."""


class PropertiesEntry(Record):
    """Of `TensorProperties`; its state begins with the dtype."""


class PlaceEntry(Record):
    """Of `_StorageInfo`: file, offset and length of an entry."""


class IndexEntry(Record):
    """Of `MetadataIndex`; a key, so it is equal to another by name and offset."""

    def key(self) -> tuple[object, object]:
        """Name, and offset or None."""
        return self.field("fqn"), self.field("offset")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IndexEntry) and self.key() == other.key()

    def __hash__(self) -> int:
        return hash(self.checked_key())

    def checked_key(self) -> tuple[str, Extent | None]:
        """Name, and offset or None.

        Raises:
            CorruptError: They are no such things.
        """
        fqn, offset = self.key()
        if not isinstance(fqn, str) or not (offset is None or is_numbers(offset)):
            raise CorruptError("an entry whose name is no text, or whose offsets are no numbers")
        return fqn, offset  # type: ignore[return-value]  # just checked


class _Sealed:
    """What a pickle gets by name, or has made of a name, and must leave as it is.

    Without slots: those would bring a method of the same name along, which changes the object.
    """

    def __setstate__(self, state: object) -> None:
        raise CorruptError("it would change what names mean")


@dataclass(frozen=True)
class ElementType(_Sealed):
    """Of a `torch.dtype`.

    Attributes:
        name: torch's name of it.
    """

    name: str

    @property
    def dtype(self) -> DType | None:
        """What it is to this library; None for a type that it does not store."""
        return BY_NAME.get(self.name)


@dataclass(frozen=True)
class StorageRef(_Sealed):
    """The storage of a saved tensor.

    Attributes:
        key: Names the record that holds its bytes.
        kind: Element type; None for bare bytes.
    """

    key: str
    kind: ElementType | None


@dataclass(frozen=True)
class TensorRef(_Sealed):
    """A saved tensor: how its elements lie in the bytes of its storage.

    Attributes:
        key: Names the record that holds the bytes.
        dtype: Element type.
        start: The first element, counted from the start of the storage.
        sizes: Shape.
        strides: Elements between neighbours along each dimension.
        is_conjugated: The bytes are the conjugates of the values.
        is_negated: The bytes are the negatives of the values.
    """

    key: str
    dtype: DType
    start: int
    sizes: Extent
    strides: Extent
    is_conjugated: bool = False
    is_negated: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the values lie in row-major order, as they are."""
        if self.is_conjugated or self.is_negated:
            return False
        expected = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size == 0:
                return True
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


def load_metadata_record(raw: bytes, name: str) -> MetadataRecord:
    """Read a `.metadata` that torch wrote.

    Args:
        raw: The file.
        name: What to call it in errors.

    Raises:
        UntrustedObjectError: It names a class or function that is not known to belong there.
        CorruptError: It is no such file.
    """
    found = _load(raw, _METADATA_GLOBALS, _no_storages, name)
    if not isinstance(found, MetadataRecord):
        raise CorruptError(f"{name} holds {type(found).__name__}, not the description of a torch checkpoint")
    return found


def load_tensor_ref(raw: bytes, name: str) -> TensorRef:
    """Read the pickle of one saved tensor.

    Args:
        raw: The pickle.
        name: What to call it in errors.

    Raises:
        UntrustedObjectError: It names a class or function that is not known to belong there.
        CorruptError: It is no tensor.
    """
    found = _load(raw, _TENSOR_GLOBALS, _storage_ref, name)
    if not isinstance(found, TensorRef):
        raise CorruptError(f"{name} holds {type(found).__name__}, not a tensor")
    return found


class _TableUnpickler(pickle.Unpickler):
    """Knows the globals of a table, and no others."""

    def __init__(self, raw: bytes, known: _Globals, persistent: Callable[[object], object], name: str) -> None:
        super().__init__(io.BytesIO(raw))
        self._known = known
        self._persistent = persistent
        self._name = name

    def find_class(self, module: str, name: str) -> Any:
        found = self._known.get((module, name))
        if found is None and module == "torch" and name in _TYPE_NAMES:
            return ElementType(name)
        if found is None:
            raise UntrustedObjectError(
                f"{self._name} names {module}.{name}, which does not belong into a checkpoint of torch DCP; nothing "
                "was run. If the file comes from somebody you trust, load it with torch and save it again"
            )
        return found

    def persistent_load(self, pid: object) -> object:
        return self._persistent(pid)


def _load(raw: bytes, known: _Globals, persistent: Callable[[object], object], name: str) -> object:
    check_pickle(raw, name)
    try:
        return _TableUnpickler(raw, known, persistent, name).load()
    except DcpError:
        raise
    except Exception as error:  # a pickle that is damaged may end in almost any error
        raise CorruptError(f"{name} is damaged: {type(error).__name__}: {error}") from error


def _no_storages(pid: object) -> object:
    raise CorruptError("a description refers to tensors' bytes")


def _storage_ref(pid: object) -> StorageRef:
    if not isinstance(pid, tuple) or len(pid) < 3 or pid[0] != "storage" or not isinstance(pid[2], str):
        raise CorruptError(f"a saved tensor names its bytes in an unknown way: {shown(pid)}")
    kind = pid[1]
    if kind is not None and not isinstance(kind, (_StorageType, ElementType)):
        raise CorruptError("a saved tensor names its bytes in an unknown way")
    return StorageRef(pid[2], kind.kind if isinstance(kind, _StorageType) else kind)


@dataclass(frozen=True)
class _StorageType(_Sealed):
    """Of torch's storage classes."""

    kind: ElementType | None


@dataclass(frozen=True)
class _Call(_Sealed):
    """A function that a pickle may call."""

    function: Callable[..., object]

    def __call__(self, *arguments: object) -> object:
        return self.function(*arguments)


def _tensor_ref(
    storage: object, start: object, sizes: object, strides: object, *rest: object, dtype: object = None,
    metadata: object = None,
) -> TensorRef:  # fmt: skip
    """Of `_rebuild_tensor` and `_rebuild_tensor_v2`."""
    if not isinstance(storage, StorageRef):
        raise CorruptError("a tensor without bytes")
    if len(rest) > 2:
        metadata = rest[2]
    if metadata is not None and (not isinstance(metadata, dict) or not metadata.keys() <= {"conj", "neg"}):
        raise CorruptError(f"a tensor with unknown properties: {shown(metadata)}")
    kind = storage.kind if dtype is None else dtype
    known = kind.dtype if isinstance(kind, ElementType) else None
    if known is None:
        raise CorruptError(f"a tensor of the type {kind_name(kind)}, which cannot be stored")
    flags = metadata or {}
    first = _counts((start,))[0]
    return TensorRef(
        storage.key, known, first, _counts(sizes), _counts(strides), bool(flags.get("conj")), bool(flags.get("neg"))
    )


def _tensor_ref_v3(
    storage: object, start: object, sizes: object, strides: object, requires_grad: object, hooks: object,
    dtype: object, metadata: object = None,
) -> TensorRef:  # fmt: skip
    """Of `_rebuild_tensor_v3`, for types that storages have no class for."""
    return _tensor_ref(storage, start, sizes, strides, dtype=dtype, metadata=metadata)


def _parameter(tensor: object, *rest: object) -> object:
    """Of `_rebuild_parameter`: the tensor in it."""
    if not isinstance(tensor, TensorRef):
        raise CorruptError("a parameter without a tensor")
    return tensor


def is_numbers(values: object) -> bool:
    """Whether these are whole numbers, no more than a tensor has dimensions."""
    return isinstance(values, tuple) and len(values) <= _MAX_NDIM and all(type(value) is int for value in values)


def _counts(values: object) -> Extent:
    if not isinstance(values, tuple) or not is_numbers(values) or not all(0 <= value < 1 << 62 for value in values):
        raise CorruptError(f"a shape, stride or offset that is none: {shown(values)}")
    return values


def shown(value: object) -> str:
    """A value of a stranger's for an error: short, whatever it is and holds."""
    if isinstance(value, (str, bytes)):
        return repr(value[:80])
    if type(value) is int:
        return str(value) if value.bit_length() < 256 else f"a number of {value.bit_length()} bits"
    if value is None or isinstance(value, (bool, float)):
        return repr(value)
    if isinstance(value, tuple) and is_numbers(value):
        return f"({', '.join(map(shown, value))})"
    return f"a {type(value).__name__}"


def kind_name(kind: object) -> str:
    """An element type for an error."""
    return kind.name if isinstance(kind, ElementType) else shown(kind)


def _size(values: object = ()) -> tuple[object, ...]:
    """Of `torch.Size`."""
    sizes = tuple(values) if isinstance(values, (tuple, list)) else None
    if sizes is None or not is_numbers(sizes):
        raise CorruptError("a size that is none")
    return sizes


def _text(*parts: object) -> str:
    """Of what says something that is not needed: layouts, paths."""
    return "/".join(map(shown, parts))


_MAX_NDIM = 64
_UNSTORABLE = ("quint8", "qint8", "qint32", "quint4x2", "quint2x4", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2")
_TYPE_NAMES = frozenset({*BY_NAME, *_UNSTORABLE, "int1", "uint1", "int2", "uint2", "int4", "uint4"})

_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64", "QInt8Storage": "qint8", "QUInt8Storage": "quint8", "QInt32Storage": "qint32",
}  # fmt: skip

_METADATA_GLOBALS: _Globals = {
    (_METADATA_MODULE, "Metadata"): MetadataRecord,
    (_METADATA_MODULE, "TensorStorageMetadata"): TensorEntry,
    (_METADATA_MODULE, "BytesStorageMetadata"): BytesEntry,
    (_METADATA_MODULE, "ChunkStorageMetadata"): ChunkEntry,
    (_METADATA_MODULE, "TensorProperties"): PropertiesEntry,
    (_METADATA_MODULE, "MetadataIndex"): IndexEntry,
    (_METADATA_MODULE, "StorageMeta"): Record,
    (_METADATA_MODULE, "_MEM_FORMAT_ENCODING"): _Call(_text),
    (_FILES_MODULE, "_StorageInfo"): PlaceEntry,
    ("torch", "Size"): _Call(_size),
    ("torch.serialization", "_get_layout"): _Call(_text),
    ("collections", "OrderedDict"): collections.OrderedDict,
    **{
        (module, kind): _Call(_text)
        for module in ("pathlib", "pathlib._local")
        for kind in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}

_TENSOR_GLOBALS: _Globals = {
    ("torch._utils", "_rebuild_tensor"): _Call(_tensor_ref),
    ("torch._utils", "_rebuild_tensor_v2"): _Call(_tensor_ref),
    ("torch._utils", "_rebuild_tensor_v3"): _Call(_tensor_ref_v3),
    ("torch._utils", "_rebuild_parameter"): _Call(_parameter),
    ("torch", "Size"): _Call(_size),
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch.storage", "UntypedStorage"): _StorageType(None),
    **{
        ("torch", name): _StorageType(ElementType(dtype))
        for name, dtype in _STORAGES.items()
    },
}  # fmt: skip
