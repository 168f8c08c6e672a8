"""The targets of coverage-guided fuzzing run on every seed, so that they keep up with the code; and on random bytes."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.test_metadata_hostile import little_memory
from tests.fuzz.targets import names, run_one, seeds_of

CORE = names(with_torch=False)
SLOW = ("mailbox",)


@pytest.mark.parametrize("name", CORE)
def test_every_seed_gives_a_value_or_an_error_of_ours(name: str) -> None:
    seeds = seeds_of(name)
    assert seeds
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            run_one(name, seed)


@pytest.mark.parametrize("name", [name for name in CORE if name not in SLOW])
@given(data=st.data())
def test_bytes_near_a_seed_give_a_value_or_an_error_of_ours_in_little_memory(name: str, data: st.DataObject) -> None:
    raw = bytearray(data.draw(st.sampled_from(seeds_of(name))))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(raw)))
        kind = data.draw(st.sampled_from(("byte", "cut", "put", "double")))
        if kind == "cut":
            del raw[at : at + data.draw(st.integers(1, 16))]
        elif kind == "put":
            raw[at:at] = data.draw(st.binary(max_size=9))
        elif kind == "double":
            raw[at:at] = raw[max(0, at - 16) : at]
        elif at < len(raw):
            raw[at] = data.draw(st.integers(0, 255))
    with little_memory(64 << 20), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_one(name, bytes(raw))
