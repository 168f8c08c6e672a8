"""Attacks on checkpoints of torch DCP: the pickled `.metadata`, and the archives that hold tensors and values."""

from __future__ import annotations

import struct

import numpy as np

from tests.attacks import assembly as a
from tests.attacks.bases import (
    TORCH_FILE,
    torch_entry,
    torch_index,
    torch_metadata,
    torch_parts,
    torch_place,
    torch_size,
    torch_tensor,
)
from tests.attacks.manifest import CORRUPT, SOUND, UNTRUSTED, Attack

METADATA = ".metadata"
_GIGABYTE = 1 << 30
_COMMAND = a.text("touch $ATTACK_CANARY")
_MODULE = "torch.distributed.checkpoint.metadata"
_DATA = np.arange(12, dtype="<f4").tobytes()
_ANY = ("CorruptError", "IncompleteError", "UntrustedObjectError", "UnsupportedValueError", "CoverageError")


def torch_attacks() -> list[Attack]:
    """All of them."""
    return [*_code(), *_bombs(), *_tampering(), *_places(), *_tensors(), *_stored_values()]


def _attack(what: str, errors: tuple[str, ...], metadata: bytes, entries: bytes | None = None) -> Attack:
    files = {METADATA: metadata} if entries is None else {METADATA: metadata, TORCH_FILE: entries}
    return Attack("torch", what, errors, files, base="torch")


def _nbytes() -> tuple[int, int]:
    tensor, value = torch_parts()
    return len(tensor), len(value)


def _code() -> list[Attack]:
    """Descriptions that would run code."""
    run = a.call(a.named("posix", "system"), _COMMAND)
    blobs = {
        "a description that runs a command, protocol 2": a.proto(2, run),
        "a description that runs a command, protocol 4": a.proto(
            4, a.call(a.named_by_stack("posix", "system"), _COMMAND)
        ),
        "a description that runs a command, protocol 5": a.proto(5, run),
        "a description that evaluates": a.proto(2, a.call(a.named("builtins", "eval"), a.text("1"))),
        "a description that gets attributes": a.proto(
            4, a.call(a.named_by_stack("builtins", "getattr"), a.named("torch", "Size"), a.text("__class__"))
        ),
        "a description that loads another file": a.proto(
            4, a.call(a.named_by_stack("torch", "load"), a.text("/etc/passwd"))
        ),
        "a description that reaches through a module": a.proto(4, a.named_by_stack(_MODULE, "os.system")),
        "a description that reaches through a class": a.proto(
            4, a.named_by_stack("torch", "Size.__init__.__globals__")
        ),
        "a description that runs a command inside": torch_metadata(planner=run, nbytes=_nbytes()),
        "a description that runs a command as a path": torch_metadata(fqn=run, nbytes=_nbytes()),
        "a description by an extension code": a.proto(2, b"\x82\x01"),
        "a description by an instance opcode": a.proto(2, b"(" + _COMMAND + b"iposix\nsystem\n"),
        "a description by an object opcode": a.proto(2, b"(" + a.named("posix", "system") + _COMMAND + b"o"),
    }
    found = [_attack(what, (*UNTRUSTED, *CORRUPT), blob) for what, blob in blobs.items()]
    zero = b"cposix\nsystem\n(S'touch $ATTACK_CANARY'\ntR."
    return [*found, _attack("a description that runs a command, protocol 0", CORRUPT, zero)]


def _bombs() -> list[Attack]:
    """Few bytes that would take much memory or time."""
    huge = struct.pack("<Q", _GIGABYTE)
    dict_of_bomb = b"}" + a.shared_bomb(40) + b"Ns"
    parts = {
        "a memo of a gigabyte": a.proto(2, b"Nr" + struct.pack("<I", 1 << 26)),
        "a memo of a gigabyte by a text": a.proto(2, b"Np67108864\n"),
        "a memo beyond 64 bits": a.proto(2, b"Np99999999999999999999999\n"),
        "a text that claims a gigabyte": a.proto(4, b"\x8d" + huge),
        "bytes that claim a gigabyte": a.proto(4, b"\x8e" + huge),
        "an array that claims a gigabyte": a.proto(5, b"\x96" + huge),
        "an array that claims 2**63 bytes": a.proto(5, b"\x96" + struct.pack("<Q", 1 << 63)),
        "an integer that claims a gigabyte": a.proto(2, b"\x8b" + struct.pack("<i", 1 << 30)),
        "an integer of negative length": a.proto(2, b"\x8b" + struct.pack("<i", -1)),
        "a frame that claims a gigabyte": a.proto(4, b"\x95" + huge),
        "a key of 2**40 places": a.proto(2, dict_of_bomb),
        "a key of 2**40 places inside": torch_metadata(planner=dict_of_bomb, nbytes=_nbytes()),
        "a path of 2**30 places": torch_metadata(place=torch_place(0, 1, a.shared_bomb(30)), nbytes=_nbytes()),
        "a name of 2**30 places": torch_metadata(fqn=a.shared_bomb(30), nbytes=_nbytes()),
        "an offset of 2**30 places": torch_metadata(offset=a.shared_bomb(30), nbytes=_nbytes()),
        "a shape of 2**30 places": torch_metadata(size=a.shared_bomb(30), nbytes=_nbytes()),
        "a size of 2**30 places": torch_metadata(
            size=a.call(a.named("torch", "Size"), a.tuple_of(a.shared_bomb(30))), nbytes=_nbytes()
        ),
        "a path of lists of 2**30 places": torch_metadata(
            place=a.call(a.named("pathlib", "PosixPath"), _shared_lists(30)), nbytes=_nbytes()
        ),
        "tuples nested a hundred thousand deep": a.proto(2, b")" + b"\x85" * 100_000),
        "lists nested a hundred thousand deep": a.proto(2, b"]" * 100_000 + b"a" * 99_999),
        "an index in an index in an index": torch_metadata(fqn=_shared_indices(30), nbytes=_nbytes()),
        "bytes out of band": a.proto(5, b"\x97\x98"),
        "a persistent id": a.proto(2, a.text("id") + b"Q"),
        "nothing on the stack": a.proto(2),
        "an opcode that is none": a.proto(2, b"\xff"),
        "a shape of 2**61 by 2**61": torch_metadata(size=torch_size(1 << 61, 1 << 61), nbytes=_nbytes()),
        "a shape of a hundred sizes": torch_metadata(size=torch_size(*[1] * 100), nbytes=_nbytes()),
    }  # fmt: skip
    return [_attack(what, _ANY, blob) for what, blob in parts.items()]


def _shared_lists(levels: int) -> bytes:
    parts = [b"]q\x00"]
    for level in range(levels):
        parts.append(b"](h" + bytes([level]) + b"h" + bytes([level]) + b"eq" + bytes([level + 1]))
    return b"".join(parts)


def _shared_indices(levels: int) -> bytes:
    """Indices whose name and offset are both the index before: a hash walks them all."""
    parts = [a.text("x") + b"q\x00"]
    for level in range(levels):
        inner = b"h" + bytes([level])
        parts.append(torch_index(inner, inner) + b"q" + bytes([level + 1]))
    return b"".join(parts)


def _tampering() -> list[Attack]:
    """Descriptions that would change what this process looks names up in."""
    state = a.list_of(a.number(13), a.text("float64"), a.text("F64"), a.number(8))
    other_defaults = a.tuple_of(a.NONE, a.dict_of((a.text("__defaults__"), a.tuple_of(a.tuple_of(a.number(9))))))
    tampered = {
        "a type that is told to be another": a.named("torch", "float32") + state + a.BUILD,
        "a type that cannot be stored, told to be one": a.named("torch", "quint8") + a.list_of(a.text("x")) + a.BUILD,
        "a function with other defaults": a.named("torch", "Size") + other_defaults + a.BUILD,
        "a function with attributes": a.named("torch", "Size") + a.dict_of((a.text("x"), a.NONE)) + a.BUILD,
        "a class with other attributes": a.named(_MODULE, "MetadataIndex")
        + a.tuple_of(a.NONE, a.dict_of((a.text("key"), a.NONE))) + a.BUILD,
        "a class of this process with other attributes": a.named("collections", "OrderedDict")
        + a.tuple_of(a.NONE, a.dict_of((a.text("update"), a.NONE))) + a.BUILD,
    }  # fmt: skip
    found = [
        _attack(what, CORRUPT, torch_metadata(planner=a.list_of(part), nbytes=_nbytes()))
        for what, part in tampered.items()
    ]
    storage = a.named("torch", "FloatStorage") + a.list_of(a.NONE) + a.BUILD
    entries = {
        "a storage type that is told to be another": a.proto(2, a.tuple_of(storage)),
        "a tensor that is changed after it was checked": torch_tensor(
            after=a.list_of(a.text("0"), a.named("torch", "float32"), a.number(-9)) + a.BUILD
        ),
        "a tensor whose type is no type": torch_tensor(after=a.list_of(a.text("0"), a.text("float32")) + a.BUILD),
        "a function of tensors with other defaults": a.proto(
            2, a.named("torch._utils", "_rebuild_tensor_v2") + other_defaults + a.BUILD
        ),
    }
    return found + [_with_entry(what, CORRUPT, pickled) for what, pickled in entries.items()]


def _with_entry(what: str, errors: tuple[str, ...], pickled: bytes, data: bytes = _DATA) -> Attack:
    return _with_entry_bytes(what, errors, torch_entry(pickled, data))


def _with_entry_bytes(what: str, errors: tuple[str, ...], tensor: bytes) -> Attack:
    value = torch_parts()[1]
    return _attack(what, errors, torch_metadata(nbytes=(len(tensor), len(value))), tensor + value)


def _places() -> list[Attack]:
    """Names of files, and numbers."""
    tensor, _ = _nbytes()
    names = {
        "a file that leads out": "../outside/secret",
        "a file of the system": "/etc/passwd",
        "a file of another system": "..\\x",
        "a file with a zero byte": "a\0b",
        "a file with half a surrogate pair": "\ud800",
        "a file that is the directory": ".",
        "a file of four thousand letters": "x" * 4000,
        "a file whose name is empty": "",
    }
    found = [
        _attack(what, ("CorruptError", "IncompleteError", "StorageError"),
                torch_metadata(place=torch_place(0, tensor, a.text(name)), nbytes=_nbytes()))
        for what, name in names.items()
    ]  # fmt: skip
    numbers = {
        "an entry before its file": (-1, tensor), "an entry of negative length": (0, -1),
        "an entry beyond 64 bits": (1 << 70, 1), "an entry beyond its file": (1 << 40, tensor),
        "an entry of all but 2**63 bytes": (1, (1 << 62) - 1), "an entry too short for its tensor": (0, 10),
        "an entry that begins in the middle": (5, tensor - 5), "an entry that is another's": (tensor, 700),
    }  # fmt: skip
    found += [
        _attack(what, _ANY, torch_metadata(place=torch_place(*place), nbytes=_nbytes()))
        for what, place in numbers.items()
    ]
    chunk = a.named(_MODULE, "ChunkStorageMetadata")
    boxes = {
        "a chunk outside of its tensor": (torch_size(3, 0), torch_size(3, 4)),
        "a chunk of negative sizes": (torch_size(0, 0), torch_size(-3, 4)),
        "a chunk of other dimensions": (torch_size(0), torch_size(3)),
        "a chunk of half of the tensor": (torch_size(0, 0), torch_size(3, 2)),
        "a chunk of texts": (a.tuple_of(a.text("0")), a.text("34")),
    }
    for what, (offsets, sizes) in boxes.items():
        one = a.made(chunk, ("offsets", offsets), ("sizes", sizes))
        found.append(_attack(what, _ANY, torch_metadata(chunks=a.list_of(one), nbytes=_nbytes())))
    more = {
        "no chunks": torch_metadata(chunks=a.list_of(), nbytes=_nbytes()),
        "chunks that are none": torch_metadata(chunks=a.list_of(a.NONE, a.number(1)), nbytes=_nbytes()),
        "an offset that is a list": torch_metadata(offset=a.list_of(a.number(0), a.number(0)), nbytes=_nbytes()),
        "a name that is a number": torch_metadata(fqn=a.number(1), nbytes=_nbytes()),
        "a type by its name": torch_metadata(properties=a.text("float32"), nbytes=_nbytes()),
        "a type that is missing": torch_metadata(
            properties=a.made(a.named(_MODULE, "TensorProperties"), ("dtype", a.NONE)), nbytes=_nbytes()
        ),
        "a place that is a text": torch_metadata(place=a.text("x"), nbytes=_nbytes()),
    }
    found += [_attack(what, _ANY, blob) for what, blob in more.items()]
    strange = a.dict_of((a.text("w"), a.tuple_of(a.text("\ud800"), a.number(1 << 61))), (a.text("x"), a.NONE))
    found.append(_attack("paths that make no sense", (*_ANY, ""), torch_metadata(planner=strange, nbytes=_nbytes())))
    return found


def _tensors() -> list[Attack]:
    """Entries that are not what the description says, or no archives."""

    def pair(one: int, two: int) -> bytes:
        return a.tuple_of(a.number(one), a.number(two))

    pickles = {
        "an entry that runs a command": a.proto(2, a.call(a.named("posix", "system"), _COMMAND)),
        "an entry of a gigabyte in the memo": a.proto(2, b"Nr" + struct.pack("<I", 1 << 26)),
        "an entry that starts before its bytes": torch_tensor(start=a.number(-1)),
        "an entry that starts behind its bytes": torch_tensor(start=a.number(1 << 40)),
        "an entry of negative strides": torch_tensor(strides=pair(-4, 1)),
        "an entry of huge strides": torch_tensor(strides=pair(1 << 61, 1 << 61)),
        "an entry of strides of 2**30 places": torch_tensor(strides=a.shared_bomb(30)),
        "an entry of other sizes": torch_tensor(sizes=pair(4, 3)),
        "an entry of sizes for nothing": torch_tensor(sizes=pair(0, 1 << 61)),
        "an entry of another type": torch_tensor(storage="DoubleStorage"),
        "an entry of bytes elsewhere": torch_tensor(key="../../../etc/passwd"),
        "an entry of bytes in no record": torch_tensor(key="1"),
        "an entry without a tensor": a.proto(2, a.NONE),
    }
    found = [_with_entry(what, _ANY, pickled) for what, pickled in pickles.items()]
    good = torch_parts()[0]
    archives = {
        "an archive whose pickle is compressed": a.archive(
            {"archive/data/0": _DATA, "archive/data.pkl": b""}, deflated={"archive/data.pkl": 16 << 20}
        ),
        "an archive with lengths that lie": good.replace(
            struct.pack("<II", 48, 48), struct.pack("<II", 1 << 30, 1 << 30)
        ),
        "an archive that is none": bytes(len(good)),
        "an archive of big numbers": torch_entry(torch_tensor(), _DATA, byteorder=b"big"),
    }
    found += [_with_entry_bytes(what, _ANY, blob) for what, blob in archives.items()]
    twice = good[: good.index(b"PK\1\2")] + good  # the directory at the end names one of the two
    return [*found, _with_entry_bytes("an archive with a record twice", SOUND, twice)]


def _stored_values() -> list[Attack]:
    """Values, which torch reads with weights-only safety."""
    tensor = torch_parts()[0]

    def stored(value: bytes) -> tuple[bytes, bytes]:
        return torch_metadata(nbytes=(len(tensor), len(value))), tensor + value

    pickles = {
        "a value that runs a command": a.proto(2, a.call(a.named("posix", "system"), _COMMAND)),
        "a value that evaluates": a.proto(2, a.call(a.named("builtins", "eval"), a.text("1"))),
        "a value that asks for a gigabyte": a.proto(2, a.call(a.named("builtins", "bytearray"), a.number(1 << 30))),
        "a value that is a memo of a gigabyte": a.proto(2, b"Nr" + struct.pack("<I", 1 << 26)),
        "a value that is nothing": b"",
        "a key of 2**40 places in a value": a.proto(2, b"}" + a.shared_bomb(40) + b"Ns"),
    }
    values = {what: torch_entry(pickled, b"") for what, pickled in pickles.items()}
    values["a value that unpacks to a hundred times its size"] = a.archive(
        {"archive/version": b"3\n", "archive/byteorder": b"little", "archive/data.pkl": b""},
        deflated={"archive/data.pkl": 16 << 20},
    )
    often = torch_tensor(count=1, sizes=a.tuple_of(a.number(1 << 28)), strides=a.tuple_of(a.number(0)))
    values["a value that is one number 2**28 times"] = torch_entry(often, bytes(4))
    asks = pickles["a value that asks for a gigabyte"]
    others = {"archive/byteorder": b"little", "archive/version": b"3\n"}
    values["a value whose pickle is spelled otherwise"] = a.archive({"archive/datA.pkl": asks, **others})
    both = {"archive/data.pkl": a.proto(2, a.number(3)), "archive/DATA.PKL": asks, **others}
    values["a value whose pickle is there twice"] = a.archive(both)
    values["a value in a bare pickle"] = a.proto(2, a.call(a.named("posix", "system"), _COMMAND))
    values["a value of junk"] = b"\x80\xff" * 40
    found = [_attack(what, _ANY, *stored(value)) for what, value in values.items()]
    sparse = {METADATA: {"nbytes": 1 << 40}}
    found.append(Attack("torch", "a description of a terabyte of nothing", CORRUPT, {}, sparse, base="torch"))
    begun = {METADATA: {"grow": 1 << 40}}
    found.append(Attack("torch", "a description of a terabyte that begins well", CORRUPT, {}, begun, base="torch"))
    endless = {METADATA: torch_metadata(nbytes=(len(tensor), 1 << 39))}
    grown = {TORCH_FILE: {"grow": 1 << 40}}
    found.append(Attack("torch", "a value of half a terabyte of nothing", CORRUPT, endless, grown, base="torch"))
    odd = torch_entry(a.proto(2, a.text("\x1b[2J\0")), b"")
    return [*found, _attack("a value that would do harm on a terminal", SOUND, *stored(odd))]
