"""Attacks on ranks that talk through files: what a stranger puts in the place of a message in a mailbox.

Each stands for what rank 1 hands in, `k.0.1`, and for what rank 0 answers, `k.0.answers`.
"""

from __future__ import annotations

import json
import struct

from dcp_core.coordination.frames import Frame, FrameKind, encode_frame
from tests.attacks import assembly as a
from tests.attacks.manifest import SOUND, Attack

REQUEST, ANSWER = "k.0.1", "k.0.answers"
_STAGE = "meet"
_ANY = ("CoordinationError", "CoordinationTimeoutError", "RankFailedError", "ArgumentsDifferError", "CorruptError")


def message_attacks() -> list[Attack]:
    """All of them."""
    run = a.proto(2, a.call(a.named("posix", "system"), a.text("touch $ATTACK_CANARY")))

    def error(body: bytes) -> bytes:
        return encode_frame(Frame(FrameKind.ERROR, _STAGE, body))

    causes = [{"rank": 1, "kind": "os.system", "message": "x"}]
    blobs = {
        "a message of nothing": b"",
        "a message of one byte": b"\1",
        "a message of a kind that is none": b"\xff\0",
        "a message with a label beyond its end": b"\1\xff",
        "a message with a label of another script": b"\1\4\xff\xfe\xfd\xfc",
        "a message that is a pickle": run,
        "a message from another stage": encode_frame(Frame(FrameKind.PAYLOAD, "elsewhere", b"x")),
        "an error that is a pickle": error(run),
        "an error nested deeply": error(b"[" * 100_000),
        "an error of nothing": error(b""),
        "an error that is a list": error(b"[]"),
        "an error with a class that is none": error(
            json.dumps({"kind": "os.system", "message": "x", "causes": causes}).encode()
        ),
        "an error with causes that are none": error(
            json.dumps({"kind": "DcpError", "message": 3, "causes": 4}).encode()
        ),
        "an error with a rank of many digits": error(
            b'{"kind":"DcpError","message":"","causes":[[' + b"9" * 9000 + b',"",""]]}'
        ),
        "an error with endless numbers": error(b'{"kind":"DcpError","message":"","causes":[[Infinity,"",NaN]]}'),
        "an error with half a surrogate pair": error(b'{"kind":"CorruptError","message":"\\ud800","causes":[]}'),
        "an error that says that ranks are missing": error(
            b'{"kind":"CoordinationTimeoutError","message":"ranks 9-, -, 1 did not come to exchange x","causes":[]}'
        ),
        "an error of ranks beyond count": error(
            b'{"kind":"CoordinationTimeoutError","message":"ranks '
            + b"9" * 5000
            + b' did not come to exchange x","causes":[]}'
        ),
    }
    found = [_attack(what, _ANY, blob) for what, blob in blobs.items()]
    makes: dict[str, dict[str, object]] = {
        "a message that is a pipe": {"pipe": True},
        "a message that is a directory": {"directory": True},
        "a message that is a link out": {"link": "../outside/secret"},
        "a message that is a link to a device": {"link": "/dev/zero"},
        "a message of a terabyte of nothing": {"nbytes": 1 << 40},
    }
    found += [
        Attack("messages", what, _ANY, {}, {REQUEST: how, ANSWER: how}, base="") for what, how in makes.items()
    ]  # fmt: skip
    payload = encode_frame(Frame(FrameKind.PAYLOAD, _STAGE, b"x"))
    answer = encode_frame(Frame(FrameKind.SHARED, _STAGE, b"x"))
    found.append(Attack("messages", "a message as it should be", SOUND, {REQUEST: payload, ANSWER: answer}, base=""))
    found += [_attack(what, SOUND, blob) for what, blob in _payloads().items()]
    return found


def _attack(what: str, errors: tuple[str, ...], blob: bytes) -> Attack:
    return Attack("messages" if errors else "payloads", what, errors, {REQUEST: blob, ANSWER: blob}, base="")


def _payloads() -> dict[str, bytes]:
    """What stands in frames that are sound: seeds for whoever reads payloads."""
    return {
        "a payload of 2**63 parts": b"\xff" * 8 + b"\x7f",
        "a payload with a number without end": b"\xff" * 12,
        "a payload of parts beyond its end": b"\2\xff\x7f\xff\x7f",
        "an agreement of 255 arguments": b"\xff\xff\1",
        "an agreement of two offers that are not there": struct.pack("<BBB", 0, 2, 0),
    }
