"""The targets of coverage-guided fuzzing that need torch run on every seed, so that they keep up with the code."""

from __future__ import annotations

import warnings

import pytest

from tests.fuzz.targets import names, run_one, seeds_of

TORCH = sorted(set(names(with_torch=True)) - set(names(with_torch=False)))


@pytest.mark.parametrize("name", TORCH)
def test_every_seed_gives_a_value_or_an_error_of_ours(name: str) -> None:
    seeds = seeds_of(name)
    assert seeds
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            run_one(name, seed)
