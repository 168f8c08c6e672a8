"""Attacks on Hugging Face directories: headers of safetensors files, and the index."""

from __future__ import annotations

import json
import struct

from tests.attacks import assembly as a
from tests.attacks.bases import Files, index
from tests.attacks.manifest import CORRUPT, INCOMPLETE, SOUND, Attack

INDEX = "model.safetensors.index.json"
_BASE = "huggingface"
_ANY = ("CorruptError", "IncompleteError", "NotFoundError", "StorageError")
_LARGEST = 1 << 62


def huggingface_attacks(base: Files) -> list[Attack]:
    """All of them."""
    first, second = sorted(name for name in base if name.endswith(".safetensors"))
    return [*_indices(first, second), *_headers(base, first), *_notes(base, first), *_names(base, first)]


def _indices(first: str, second: str) -> list[Attack]:
    names = {
        "a path that leads out": "../../etc/x.safetensors",
        "an absolute path": "/etc/x.safetensors",
        "a path of another system": "..\\..\\x.safetensors",
        "a path with a zero byte": "x\0.safetensors",
        "a path to a directory in it": "inner/x.safetensors",
        "a name of four thousand letters": "x" * 4000 + ".safetensors",
        "a name of wide dots and slashes": "\uff0e\uff0e\uff0fx.safetensors",
        "a name in another normal form": "mode\u0301l-00001-of-00002.safetensors",
        "a name that a home directory begins": "~/x.safetensors",
        "a name with half a surrogate pair": "\ud800.safetensors",
        "a name that is a URL": "http://127.0.0.1:9/x.safetensors",
        "a name that is no safetensors file": "/dev/zero",
        "a name that is only an ending": ".safetensors",
        "two dots and an ending": "...safetensors",
    }
    found = [
        Attack("index", what, _ANY, {INDEX: index({"w": name, "step": first, "b": second})}, base=_BASE)
        for what, name in names.items()
    ]
    good = index({"w": first, "step": first, "b": second})
    texts = {
        "an index nested deeply": b'{"weight_map":' + b"[" * 60_000,
        "an index of objects nested deeply": b'{"weight_map":' + b'{"a":' * 30_000,
        "an index with a name twice": b'{"weight_map":{"w":"x.safetensors","w":"y.safetensors"}}',
        "an index with a weight map twice": good.rstrip(b"}") + b',"weight_map":{}}',
        "an index that is no UTF-8": b'{"weight_map":{"\xff":"x.safetensors"}}',
        "an index in UTF-16 that is cut": '{"weight_map":{}}'.encode("utf-16")[:-1],
        "an index with an integer of many digits": b'{"weight_map":{},"metadata":{"total_size":' + b"9" * 9000 + b"}}",
        "an index with endless numbers": b'{"weight_map":{"w":Infinity}}',
        "an index that is a number": b"1e999",
        "an index whose weight map is a list": b'{"weight_map":["w"]}',
        "an index without a weight map": b"{}",
        "an index of nothing": b"",
        "an index that is a pickle": a.proto(2, a.call(a.named("posix", "system"), a.text("touch $ATTACK_CANARY"))),
        "an index of tensors that are not there": index({"w": second, "step": first, "b": second}),
        "an index of files that are not there": index({"w": "x.safetensors"}),
        "an index that names itself": index({"w": INDEX}),
    }
    found += [Attack("index", what, _ANY, {INDEX: text}, base=_BASE) for what, text in texts.items()]
    huge = {INDEX: {"nbytes": 1 << 33}}
    found.append(Attack("index", "an index of eight gigabytes of nothing", CORRUPT, {}, huge, base=_BASE))
    marked = b"\xef\xbb\xbf" + good
    found.append(Attack("index", "an index with a byte order mark", ("", "CorruptError"), {INDEX: marked}, base=_BASE))
    return found


def _headers(base: Files, first: str) -> list[Attack]:
    whole = base[first]
    size = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8 : 8 + size]), whole[8 + size :]

    def changed(**entries: object) -> bytes:
        return a.safetensors({**header, **entries}, data)

    def raw(text: bytes) -> bytes:
        return a.safetensors(text, data)

    step = json.dumps(header["step"]).encode()
    blobs: dict[str, bytes] = {
        "a header that claims 2**63 bytes": a.safetensors(header, data, length=1 << 63),
        "a header that claims 2**64 less one bytes": a.safetensors(header, data, length=(1 << 64) - 1),
        "a header that claims a gigabyte": a.safetensors(header, data, length=1 << 30),
        "a header that claims all that is allowed": a.safetensors(header, data, length=100_000_000),
        "a header that claims a byte too many": a.safetensors(header, b"", length=size + 1),
        "a header of no bytes": a.safetensors(b"", data),
        "a file of seven bytes": b"\1" * 7,
        "a header that is a list": raw(b"[]"),
        "a header nested without end": raw(b'{"w":' + b"[" * 60_000),
        "a header of objects nested without end": raw(b'{"w":' * 30_000),
        "a header with a tensor twice": raw(b'{"step":' + step + b',"step":' + step + b"}"),
        "a header that is not UTF-8": raw(b'{"\xff":' + step + b"}"),
        "a header with half of a surrogate pair": raw(b'{"\\ud800":' + step + b"}"),
        "a header with infinite offsets": raw(b'{"w":{"dtype":"F32","shape":[NaN],"data_offsets":[0,Infinity]}}'),
        "a header with offsets of many digits": raw(
            b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,' + b"9" * 9000 + b"]}}"
        ),
        "a header with offsets of 400 digits": changed(w=a.entry("F32", (1,), 0, 10**400)),
        "offsets before the data": changed(w=a.entry("F32", (3, 4), -48, 0)),
        "offsets the wrong way round": changed(w=a.entry("F32", (3, 4), 48, 0)),
        "offsets that are fractions": changed(w=a.entry("F32", (3, 4), 0.0, 48.0)),
        "offsets that are true and false": changed(w=a.entry("BOOL", (True,), False, True)),
        "offsets that are texts": changed(w=a.entry("F32", (3, 4), "0", "48")),
        "three offsets": changed(w={**header["w"], "data_offsets": [0, 48, 48]}),
        "offsets beyond the file": changed(w=a.entry("F32", (1 << 40,), 0, 1 << 42)),
        "tensors that overlap": changed(step=a.entry("I64", (), 0, 8)),
        "tensors with a gap": a.safetensors({**header, "step": a.entry("I64", (), 56, 64)}, data + bytes(8)),
        "bytes behind the last tensor": a.safetensors(header, data + b"\0"),
        "a negative shape": changed(w=a.entry("F32", (-3, -4), 0, 48)),
        "a shape whose product is 2**126": changed(w=a.entry("F32", (_LARGEST + 5, 1 << 62), 0, 48)),
        "a shape that is zero modulo 2**64": changed(
            w=a.entry("F32", (1 << 32, 1 << 32), 0, 0), z=a.entry("U8", (48,), 0, 48)
        ),
        "a shape of ten thousand sizes": changed(w=a.entry("F32", (1,) * 10_000 + (12,), 0, 48)),
        "a shape beyond 64 bits": changed(w=a.entry("F32", (1 << 64,), 0, 48)),
        "an empty tensor of endless sizes": changed(
            w=a.entry("F32", (0, _LARGEST, _LARGEST), 0, 0), z=a.entry("U8", (48,), 0, 48)
        ),
        "a type that is none": changed(w=a.entry("PICKLE", (3, 4), 0, 48)),
        "a type that is a list": changed(w={"dtype": ["F32"], "shape": [3, 4], "data_offsets": [0, 48]}),
        "a tensor with a field of its own": changed(w={**header["w"], "__reduce__": "os.system"}),
        "a tensor that is a number": changed(w=7),
        "notes that are no texts": changed(__metadata__={"a": 1}),
        "notes that are a list": changed(__metadata__=[]),
        "half a byte": changed(w=a.entry("F4", (3,), 0, 1)),
    }
    return [
        Attack("header", what, (*_ANY, "ShapeMismatchError"), {first: blob}, base=_BASE) for what, blob in blobs.items()
    ]


def _notes(base: Files, first: str) -> list[Attack]:
    """What torch DCP writes into headers: where shards of a tensor lie in it."""
    whole = base[first]
    size = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8 : 8 + size]), whole[8 + size :]

    def noted(places: object) -> bytes:
        text = places if isinstance(places, str) else json.dumps(places)
        return a.safetensors({"__metadata__": {"DCP_SHARDING_INFO": text}, **header}, data)

    def at(*offsets: object) -> dict[str, object]:
        return {"w": {"saved_offsets": list(offsets)}, "step": {"saved_offsets": []}}

    notes = {
        "shards before the start": noted(at(-1, 0)),
        "shards at 2**62": noted(at(1 << 62, 0)),
        "shards at 10**400": noted(at(10**400, 0)),
        "shards at no number": noted('{"w":{"saved_offsets":[NaN,0]},"step":{"saved_offsets":[]}}'),
        "shards of too many dimensions": noted(at(0, 0, 0)),
        "notes nested deeply": noted("[" * 60_000),
        "notes of other tensors": noted({"x": {"saved_offsets": [0]}}),
        "notes with a name twice": noted('{"w":{},"w":{}}'),
    }
    found = [Attack("header", what, CORRUPT, {first: blob}, base=_BASE) for what, blob in notes.items()]
    away = noted(at(1 << 50, 1 << 8))
    errors = ("CoverageError", "ShapeMismatchError", "CorruptError", *INCOMPLETE)
    found.append(Attack("header", "shards a petabyte away", errors, {first: away}, base=_BASE))
    return found


def _names(base: Files, first: str) -> list[Attack]:
    """What stands in the place of a file; and names of tensors that would do harm on a terminal."""
    whole = base[first]
    size = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8 : 8 + size]), whole[8 + size :]
    extra = {
        name: a.entry("U8", (0,), 56, 56) for name in ("\x1b]0;owned\x07\x1b[2J", "a\0b", "../../x", "\u202egnp", "")
    }
    makes: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {
        "a file of weights that is a pipe": (_ANY, {"pipe": True}),
        "a file of weights that is a device": (_ANY, {"link": "/dev/zero"}),
        "a file of weights that is a directory": (_ANY, {"directory": True}),
        "a file of weights that is a link to itself": (("StorageError",), {"link": first}),
        "a file of weights that is a link to a secret": (_ANY, {"link": "../outside/secret"}),
        "a file of weights of a terabyte of nothing": (_ANY, {"nbytes": 1 << 40}),
    }
    found = [Attack("header", what, errors, {}, {first: how}, base=_BASE) for what, (errors, how) in makes.items()]
    odd = a.safetensors({**header, **extra}, data)
    found.append(Attack("header", "names of tensors that would do harm elsewhere", SOUND, {first: odd}, base=_BASE))
    endless = struct.pack("<Q", 1 << 20) + b" " * (1 << 10)
    return [*found, Attack("header", "a header of blanks that ends early", INCOMPLETE, {first: endless}, base=_BASE)]
