"""Attacks on checkpoints of this library: `.metadata`, `.bytes`, data files, intent records, and names."""

from __future__ import annotations

import dataclasses
import json
import struct
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from dcp_core.formats.bytes_file import build_bytes_file, parse_index
from dcp_core.formats.column_codec import ColumnWriter
from dcp_core.formats.group_directory import GroupDirectory, encode_directory
from dcp_core.formats.metadata_blocks import encode_files
from dcp_core.formats.metadata_file import open_bytes
from dcp_core.formats.objects import encode_value
from tests.attacks import assembly as a
from tests.attacks.bases import SAVE_ID, Files, uncompressed
from tests.attacks.manifest import CORRUPT, INCOMPLETE, SOUND, UNTRUSTED, Attack
from tests.core import hostile
from tests.core.metadata_samples import replaced

METADATA, OBJECTS, DATA, OWN_DATA = ".metadata", "_rank0_.bytes", "_rank0_.safetensors", "_rank1_.safetensors"
_GIGABYTE = 1 << 30
_COMMAND = a.text("touch $ATTACK_CANARY")


def dcp_attacks(base: Files) -> list[Attack]:
    """All attacks on a checkpoint of this library."""
    with uncompressed():
        return [
            *_lies(base),
            *_pickled_metadata(),
            *_containers(base),
            *_bombs(base),
            *_values(base),
            *_data_files(base),
            *_names(),
            *_intents(),
        ]


def _lies(base: Files) -> list[Attack]:
    """Every digest is right, and what is written is not: see `tests.core.hostile`."""
    damages = [
        *hostile.headers(), *hostile.files(), *hostile.chunks(), *hostile.holes(), *hostile.objects(),
    ]  # fmt: skip
    found = []
    for damage in damages:
        with tempfile.TemporaryDirectory() as path:
            for name, content in base.items():
                (Path(path) / name).write_bytes(content)
            damage.change(Path(path))
            found.append(
                Attack("metadata", damage.name, damage.kinds, {METADATA: (Path(path) / METADATA).read_bytes()})
            )
    return found


def _pickled_metadata() -> list[Attack]:
    """Pickles in the place of `.metadata`."""
    os_system = a.named("posix", "system")
    run = a.call(os_system, _COMMAND)
    getattr_chain = a.call(
        a.call(a.named_by_stack("builtins", "getattr"),
               a.call(a.named_by_stack("builtins", "__import__"), a.text("os")),
               a.text("system")), _COMMAND,
    )  # fmt: skip
    protocol_0 = b"cposix\nsystem\n(S'touch $ATTACK_CANARY'\ntR."
    blobs = {
        "a pickle of protocol 0 that runs a command": protocol_0,
        "a pickle of protocol 2 that runs a command": a.proto(2, run),
        "a pickle of protocol 5 that runs a command": a.proto(5, run),
        "a pickle of a chain of attributes": a.proto(4, getattr_chain),
        "a pickle behind the length of a header": struct.pack("<Q", 64) + a.proto(2, run),
        "a pickle that claims a gigabyte of text": a.proto(4, b"\x8d" + struct.pack("<Q", _GIGABYTE)),
    }
    return [Attack("metadata", what, CORRUPT, {METADATA: blob}) for what, blob in blobs.items()]


def _containers(base: Files) -> list[Attack]:
    """Headers of `.metadata` that a parser of JSON may stumble over."""
    place = b'{"__metadata__":{"header_xxh3":"' + b"0" * 32 + b'"'
    one = b"0" * 32
    nan = b'"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,Infinity]}'
    blobs = {
        "a header with a number that is none": a.sealed(place + b',"block_xxh3":"' + one + b'"},' + nan + b"}"),
        "a header with one name twice": a.sealed(place + b',"block_xxh3":"","block_xxh3":""}}'),
        "a header that is no UTF-8": a.sealed(place + b',"block_xxh3":"\xff\xfe"}}'),
        "a header with half a surrogate pair": a.sealed(place + b',"block_xxh3":"\\ud800"}}'),
        "a header with digits in another script": a.sealed(place + ',"block_xxh3":"\u0660\u0660"}}'.encode()),
        "a header with an integer of many digits": a.sealed(
            place
            + b',"block_xxh3":"'
            + one
            + b'"},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,'
            + b"9" * 9000
            + b"]}}"
        ),
        "a header with true for a number": a.sealed(
            place + b',"block_xxh3":"' + one + b'"},"a":{"dtype":"U8","shape":[true],"data_offsets":[false,true]}}',
            b"x",
        ),
        "nothing": b"",
        "one byte": b"\x80",
        "a zip archive": a.archive({"archive/data.pkl": b"N."}),
        "a header that is longer than its file by a byte": struct.pack("<Q", 1 + len(place)) + place,
    }
    found = [Attack("metadata", what, CORRUPT, {METADATA: blob}) for what, blob in blobs.items()]
    future = replaced(base[METADATA], {}, {"version": "999999999"})
    found.append(Attack("metadata", "a version of the far future", ("NewerVersionError",), {METADATA: future}))
    unwritten = {"library": "\x1b]0;owned\x07\x1b[2J", "framework": "‮gnp.exe", "framework_version": "\n\n[bold]"}
    screen = replaced(base[METADATA], {}, unwritten)
    found.append(Attack("metadata", "a writer that would control the terminal", SOUND, {METADATA: screen}))
    return found


def _bombs(base: Files) -> list[Attack]:
    """Small files that would become large in memory."""

    def directory(name: str, **counts: int) -> bytes:
        first = open_bytes(base[METADATA]).names()[0] if name == "directory.tensors" else ""
        one = {key: np.array([counts.get(key, 1)], np.int64) for key in ("runs", "entries", "rows")}
        return replaced(base[METADATA], {name: encode_directory(GroupDirectory([first or "notes"], **one))})

    def blob(raw_nbytes: int, packed: bytes) -> bytes:
        return struct.pack("<BQQ", 1, raw_nbytes, len(packed)) + packed

    names = ColumnWriter()
    names.integers(np.ones(1, np.int64))
    names.integers(np.array([_GIGABYTE]))
    small = a.zeros_stream(4 << 20)
    columns = names.to_bytes()
    files = struct.pack("<Q", 1)
    many = b"\x00\x00" + struct.pack("<Qqq", 0, 0, 0)
    blobs = {
        "a billion of tensors": directory("directory.tensors", runs=1 << 40, entries=1 << 40),
        "a hundred million tensors": directory("directory.tensors", runs=10**8, entries=10**8),
        "a hundred million chunks": directory("directory.tensors", rows=10**8),
        "a hundred million objects": directory("directory.objects", runs=10**8, entries=10**8),
        "a name table of a gigabyte": replaced(base[METADATA], {"tensors.0": columns + blob(_GIGABYTE, small)}),
        "a column that unpacks to more than it says": replaced(base[METADATA], {"files": files + blob(16, small)}),
        "a trillion of files in no bytes": replaced(base[METADATA], {"files": struct.pack("<Q", 1 << 40) + many * 8}),
    }
    found = [Attack("metadata", what, CORRUPT, {METADATA: raw}) for what, raw in blobs.items()]
    containers = replaced(
        base[METADATA], {"nesting": struct.pack("<Q", 1 << 40) + many * 3}
    )  # a load has no use of them
    return [*found, Attack("metadata", "a trillion of containers", SOUND, {METADATA: containers})]


# --- values ------------------------------------------------------------------------------------------


def _sized(tag: bytes, content: bytes) -> bytes:
    return tag + a.varint(len(content)) + content


def _pickle(*parts: bytes) -> bytes:
    return _sized(b"P", a.proto(5, *parts))


def _with_value(base: Files, encoded: bytes, *, count: Callable[[bytes], bytes] | None = None) -> Files:
    """The checkpoint with another value in the place of `notes`, every digest right; `count` changes the file then."""
    source = open_bytes(base[METADATA])
    stored = source.objects("notes")[0]
    raw = base[OBJECTS]
    row = source.file_names().index(OBJECTS)
    start = int(source.files.field_start[row])
    index = parse_index(raw[start : start + int(source.files.field_nbytes[row])], None, len(raw))
    values = [
        raw[int(at) : int(at) + int(nbytes)] for at, nbytes in zip(index.offsets, index.nbytes, strict=True)
    ]  # fmt: skip
    values[stored.ordinal] = encoded
    laid_out = build_bytes_file(values)
    files = source.files
    nbytes, digest = files.nbytes.copy(), files.digest.copy()
    nbytes[row] = laid_out.nbytes
    digest[row] = [laid_out.digest & (1 << 64) - 1, laid_out.digest >> 64]
    block = encode_files(dataclasses.replace(files, nbytes=nbytes, digest=digest))
    content = b"".join((laid_out.header, *values))
    return {METADATA: replaced(base[METADATA], {"files": block}), OBJECTS: count(content) if count else content}


def _values(base: Files) -> list[Attack]:
    """Values in `.bytes`: encodings that lie, and pickles."""
    lies: dict[str, bytes] = {
        "a text longer than its file": b"s" + a.varint(1 << 62),
        "a size of 63 bits and more": b"s" + b"\xff" * 9 + b"\x7f",
        "a list of 2**62 values": b"l" + a.varint(1 << 62),
        "lists nested ten thousand deep": b"l\x01" * 10_000 + b"N",
        "a tag that is none": b"?",
        "a set of what cannot be hashed": b"S\x01l\x00",
        "a dict that holds a key twice": b"d\x02" + encode_value("a") * 2 + encode_value("a") * 2,
        "two values in the place of one": b"NN",
        "a codec that nobody has": _sized(b"X", b"torch.made_up") + b"N",
        "a codec whose name is no text": _sized(b"X", b"\xff\xfe") + b"N",
        "an array of 2**120 elements": _sized(b"X", b"numpy.ndarray") + encode_value(("<f8", (1 << 60, 1 << 60), b"")),
        "an array of negative sizes": _sized(b"X", b"numpy.ndarray") + encode_value(("<f8", (-1, -8), b"12345678")),
        "an array of objects": _sized(b"X", b"numpy.ndarray") + encode_value(("|O", (1,), b"12345678")),
        "a text that ends in half a character": _sized(b"s", b"\xf0\x9f"),
    }
    found = [
        Attack("values", what, ("CorruptError", "FormatError"), _with_value(base, raw)) for what, raw in lies.items()
    ]
    sound = {
        "a type of a gigabyte an element": _sized(b"X", b"numpy.dtype") + encode_value("|V999999999"),
        "a text with half a surrogate pair": encode_value("\ud800"),
        "an integer of a hundred thousand bits": encode_value(1 << 100_000),
    }
    found += [Attack("values", what, SOUND, _with_value(base, raw)) for what, raw in sound.items()]
    found += [Attack("values", what, UNTRUSTED, _with_value(base, raw)) for what, raw in _code().items()]
    found += [Attack("values", what, CORRUPT, _with_value(base, raw)) for what, raw in _bad_pickles().items()]
    found += _bytes_files(base)
    return found


def _code() -> dict[str, bytes]:
    """Pickles that would run code, spelled as this library spells its own."""
    system = a.named_by_stack("posix", "system")
    run = a.call(system, _COMMAND)
    restore = a.named_by_stack("dcp_core.formats.pickles", "restore_value")
    inner = _pickle(run)
    return {
        "a pickled call of a command": _pickle(run),
        "a pickled call of eval": _pickle(a.call(a.named_by_stack("builtins", "eval"), a.text("1"))),
        "a pickled chain of attributes": _pickle(a.call(a.named_by_stack("os", "path.os.system"), _COMMAND)),
        "a pickled look up of getattr": _pickle(
            a.call(a.named_by_stack("builtins", "getattr"), a.named_by_stack("os", "path"), a.text("os"))
        ),
        "a pickled import by a lookup alone": _pickle(
            a.named_by_stack("antigravity", "fly") + a.EMPTY_TUPLE + a.REDUCE
        ),
        "a pickled command inside a value inside a pickle": _pickle(
            a.call(a.named_by_stack("collections", "Counter"), a.call(restore, a.raw_bytes(inner)))
        ),
        "a pickled constructor with keywords": _pickle(
            a.named_by_stack("subprocess", "Popen") + a.tuple_of(a.text("true")) + b"}" + b"\x92"
        ),
        "a pickled reach into this library": _pickle(
            a.call(a.named_by_stack("dcp_core.formats.pickles", "allow_pickled"), system)
        ),
        "a pickled reach into a function of this library": _pickle(
            a.named_by_stack("dcp_core.formats.pickles", "restore_value.__globals__")
        ),
    }


def _bad_pickles() -> dict[str, bytes]:
    """Pickles that no version of this library writes."""
    some = a.named_by_stack("collections", "Counter")
    restore = a.named_by_stack("dcp_core.formats.pickles", "restore_value")
    huge = struct.pack("<Q", _GIGABYTE)
    older = {
        f"a pickle of protocol {number} in a value":
            _sized(b"P", a.proto(number, a.call(a.named("posix", "system"), _COMMAND)))
        for number in (0, 1, 2, 4)
    }  # fmt: skip
    return older | {
        "a pickle that ends early": _sized(b"P", b"\x80\x05"),
        "a pickle with bytes behind it": _sized(b"P", a.proto(5, some) + b"N."),
        "a pickle that names a class by text": _pickle(a.named("posix", "system")),
        "a pickle of a text of a gigabyte": _pickle(some, b"\x8d" + huge),
        "a pickle of bytes of a gigabyte": _pickle(some, b"\x8e" + huge),
        "a pickle of an array of a gigabyte": _pickle(some, b"\x96" + huge),
        "a pickle of an integer of a gigabyte": _pickle(some, b"\x8b" + struct.pack("<i", 1 << 30)),
        "a pickle of an integer of negative length": _pickle(some, b"\x8b" + struct.pack("<i", -1)),
        "a pickle with a frame of a gigabyte": _pickle(b"\x95" + huge, some),
        "a pickle whose memo would take a gigabyte": _pickle(some, b"r" + struct.pack("<I", 1 << 26)),
        "a pickle that asks an empty memo": _pickle(some, b"h\x07"),
        "a pickle with bytes out of band": _pickle(some, b"\x97\x98"),
        "a pickle with a persistent id": _pickle(some, a.text("id"), b"Q"),
        "a pickle with an extension code": _pickle(some, b"\x82\x01"),
        "a pickle that changes a class": _pickle(some, b"}b"),
        "a pickle that changes this library's decoder": _pickle(some, b"0", restore, b"}b"),
        "a pickle that changes what the decoder gives": _pickle(
            some, b"0", a.call(restore, a.raw_bytes(encode_value(np.dtype("<f4")))), b"}b"
        ),
        "a pickle that gives the decoder no bytes": _pickle(some, b"0", a.call(restore, a.text("x"))),
        "a pickle that takes from an empty stack": _pickle(b"R"),
        "a pickle that names by numbers": _pickle(b"K\x01K\x02\x93"),
        "a pickle of tuples nested ten thousand deep": _pickle(some, b")" + b"\x85" * 10_000),
        "a tuple of 2**60 places as a key": _pickle(
            a.named_by_stack("collections", "Counter") + b"}" + a.shared_bomb_of_memoize(60) + b"Ns\x85R"
        ),
        "a pickle of ten thousand marks": _pickle(some, b"(" * 10_000),
    }


def _bytes_files(base: Files) -> list[Attack]:
    """Frames of `.bytes` that contradict the description, or do so with its blessing."""
    raw = base[OBJECTS]
    good = encode_value(["run", 1])
    changed = {
        "a preamble of another file": (b"NOTBYTES" + raw[8:], CORRUPT),
        "a version of the future of values": (
            raw[:8] + struct.pack("<I", 9) + raw[12:],
            ("NewerVersionError", *CORRUPT),
        ),
        "a count of four billion values": (raw[:12] + b"\xff" * 4 + raw[16:], CORRUPT),
        "an index of other lengths": (raw[:16] + struct.pack("<Q", 1 << 63) + raw[24:], CORRUPT),
        "values that are cut": (raw[:-1], INCOMPLETE),
        "values with more behind": (raw + b"\0", INCOMPLETE),
    }
    found = [Attack("values", what, errors, {OBJECTS: content}) for what, (content, errors) in changed.items()]

    def lengths(*numbers: int) -> Callable[[bytes], bytes]:
        return lambda content: content[:16] + struct.pack("<Q", numbers[0]) + content[24:]

    found.append(
        Attack("values", "an index that a stranger changed", CORRUPT, _with_value(base, good, count=lengths(1 << 62)))
    )
    return found


# --- data files, names, intents ----------------------------------------------------------------------


def _data_files(base: Files) -> list[Attack]:
    """Headers of data files; the description knows their checksums, so that none is even parsed."""
    raw = base[DATA]
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    name = next(key for key in header if key != "__metadata__")

    def with_header(change: dict[str, object]) -> bytes:
        text = json.dumps(header | change, separators=(",", ":")).encode()[:size].ljust(size)
        return raw[:8] + text + raw[8 + size :]

    blobs = {
        "a data file that claims an endless header": b"\xff" * 8 + raw[8:],
        "a data file that claims a header of a gigabyte": struct.pack("<Q", _GIGABYTE) + raw[8:],
        "a data file without a header": bytes(8) + raw[8:],
        "a data file whose tensor lies elsewhere": with_header({name: a.entry("F32", (1,), 1 << 40, (1 << 40) + 4)}),
        "a data file whose header is nested deeply": raw[:8] + (b"[" * 600).ljust(size)[:size] + raw[8 + size :],
        "a data file of another save": raw.replace(SAVE_ID.encode(), b"f" * 32),
        "a data file of a save that would control the terminal": raw.replace(
            SAVE_ID.encode(), b"\x1b]0;owned\x07\x1b[2J\r".ljust(32, b"\x1b")
        ),
        "a data file that was never finished": raw.replace(SAVE_ID.encode(), b"0" * 32),
        "a data file without checksums": raw.replace(b'"dcp.checksums":"', b'"dcp.checksumz":"'),
    }
    found = [Attack("data", what, CORRUPT, {DATA: content}) for what, content in blobs.items()]
    found.append(Attack("data", "a data file of another rank", INCOMPLETE, {DATA: base[OWN_DATA]}))
    found.append(Attack("data", "a data file of zeros", INCOMPLETE, {DATA: b""}))
    return found


def _names() -> list[Attack]:
    """What lies under a good name is no file, or not where it seems to be; and names that no file should have."""
    long_name = "_rank" + "9" * 230 + "_.safetensors"
    odd = {
        long_name: b"x",
        "_rank0_.\N{FULLWIDTH FULL STOP}\N{FULLWIDTH SOLIDUS}etc.safetensors": b"x",
        "_rank\u0661_.safetensors": b"x",
        "_rank00_.safetensors": b"x",
        "_rank-1_.bytes": b"x",
        "-1.metadata": b"x",
        "99999999999999999999.metadata": b"x",
        ".metadata.tmp": b"x",
        f".metadata.{'G' * 32}.tmp": b"x",
        "..\\..\\etc\\x.safetensors": b"x",
        "\x1b[2J\nname": b"x",
        "\udcff\udcfe": b"x",
    }
    made: list[tuple[str, tuple[str, ...], dict[str, dict[str, object]]]] = [
        ("a description that is a pipe", ("CorruptError", "NotFoundError"), {METADATA: {"pipe": True}}),
        ("a description that is a link to a device", ("CorruptError", "NotFoundError"),
         {METADATA: {"link": "/dev/zero"}}),
        ("a description that is a directory", ("CorruptError", "NotFoundError"), {METADATA: {"directory": True}}),
        ("a description of a gigabyte of nothing", CORRUPT, {METADATA: {"nbytes": 4 << 30}}),
        ("a data file that is a pipe", ("CorruptError", *INCOMPLETE), {DATA: {"pipe": True}}),
        ("a data file that is a link to itself", ("StorageError",), {DATA: {"link": DATA}}),
        ("a data file that is a link to a secret", INCOMPLETE, {DATA: {"link": "../outside/secret"}}),
        ("values that are a link to a device", ("CorruptError", *INCOMPLETE), {OBJECTS: {"link": "/dev/zero"}}),
        ("a data file of a terabyte of nothing", INCOMPLETE, {DATA: {"nbytes": 1 << 40}}),
        ("an intent record that is a pipe", SOUND, {f".intent-{'a' * 32}": {"pipe": True}}),
        ("an intent record that is a link out", SOUND, {f".intent-{'a' * 32}": {"link": "../outside/secret"}}),
        ("an intent record that is a directory", SOUND, {f".intent-{'a' * 32}": {"directory": True}}),
        ("a mailbox that is a link out", SOUND, {f".mailbox-{'a' * 32}": {"link": "../outside"}}),
        ("a mailbox that is a file", SOUND, {f".mailbox-{'a' * 32}": {"nbytes": 3}}),
        ("files of a dead save that are links out", SOUND, {
            f"_rank0_.{'a' * 32}.safetensors": {"link": "../outside/secret"},
            f".metadata.{'a' * 32}.tmp": {"link": "../outside"},
        }),
        ("a dead save's file that is a directory", SOUND, {f"_rank0_.{'a' * 32}.bytes": {"directory": True}}),
        ("a description of a rank that is a link out", SOUND, {"0.metadata": {"link": "../outside/secret"}}),
        ("a link named latest that leads out", SOUND, {"latest": {"link": "../../outside"}}),
    ]  # fmt: skip
    found = [Attack("names", what, errors, {}, makes) for what, errors, makes in made]
    empty = {name: {"nbytes": 1} for name in odd}
    return [*found, Attack("names", "names that look like ours", SOUND, {}, empty)]


def _intents() -> list[Attack]:
    """Intent records that were written by a stranger; they concern only a save into the directory."""
    name = f".intent-{'b' * 32}"
    owner = {"host": "h", "boot": "b", "namespace": "n", "pid": 1, "started": 1, "since": 0, "rank": None}

    def record(**changes: object) -> bytes:
        return json.dumps(owner | changes).encode()

    blobs: dict[str, bytes] = {
        "an intent record of nothing": b"",
        "an intent record of junk": b"\xff\xfe\x00junk",
        "an intent record that is a list": b"[]",
        "an intent record nested deeply": b"[" * 50_000,
        "an intent record with a process that cannot be": record(pid=-1),
        "an intent record with process 0": record(pid=0),
        "an intent record with a process beyond 64 bits": record(pid=1 << 70),
        "an intent record with a number of many digits": b'{"pid":' + b"9" * 9000 + b"}",
        "an intent record with endless numbers": b'{"host":"","boot":"","namespace":"","pid":Infinity,"started":NaN}',
        "an intent record with half a surrogate pair": record(host="\ud800", boot="\udfff"),
        "an intent record with lists for texts": record(host=[[]], boot={}, namespace=None, pid="1", started="x"),
        "an intent record with one name twice": b'{"pid":1,"pid":2}',
        "an intent record of a pickle": a.proto(2, a.call(a.named("posix", "system"), _COMMAND)),
    }
    found = [Attack("intents", what, SOUND, {name: content}) for what, content in blobs.items()]
    lone = f".intent-{'b' * 32}-4294967295"
    odd = {
        lone: b"{}",
        f".intent-{'B' * 32}": b"{}",
        f".intent-{'b' * 32}.tmp": b"{",
        ".intent-../x".replace("/", "_"): b"{}",
    }
    return [*found, Attack("intents", "intent records with odd names", SOUND, odd)]


def describe(attacks: Sequence[Attack]) -> str:
    """How many there are of each way in."""
    ways = sorted({attack.way for attack in attacks})
    return ", ".join(f"{sum(attack.way == way for attack in attacks)} {way}" for way in ways)
