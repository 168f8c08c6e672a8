"""`dcp verify`, `inspect` and `diff` against a real S3 server: the same answers as in a directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]  # has no types
import numpy as np
import pytest

from dcp_core import api
from dcp_core.cli.main import main
from dcp_core.testing.numpy_ranks import NumpyRankAdapter
from tests.core.huggingface_files import write_shards
from tests.core.object_store import BUCKET, ObjectStore

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

Run = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def url(request: pytest.FixtureRequest, object_store: ObjectStore) -> str:
    return f"s3://{BUCKET}/{request.node.name}"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> tuple[int, Any, str]:
        code = main([*(str(argument) for argument in arguments), "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else None, err

    return call


def state(step: int) -> dict[str, Any]:
    return {"model": {"w": np.arange(300_000.0) + step, "b": np.ones(3)}, "step": step}


def save(url: str, step: int = 1) -> None:
    api.save(state(step), checkpoint_id=url, adapter=NumpyRankAdapter())


def data_file(url: str) -> str:
    (name,) = (each for each in fsspec.filesystem("s3").ls(url, detail=False) if each.endswith(".safetensors"))
    return f"s3://{name}"


def test_what_is_in_a_bucket_is_verified_inspected_and_compared(url: str, run: Run, tmp_path: Path) -> None:
    for step in (1, 2):
        save(f"{url}/step_{step}", step)
    api.save(state(2), checkpoint_id=tmp_path / "local", adapter=NumpyRankAdapter())
    code, report, _ = run("verify", f"{url}/step_1")
    assert (code, report["is_whole"], report["strays"]) == (0, True, [])
    assert report["checked_nbytes"] == report["nbytes"] > 2_400_000
    code, found, _ = run("inspect", f"{url}/step_1")
    assert (code, found["format"], found["tensor_count"], found["objects"][0]["summary"]) == (0, "dcp", 2, "1")
    code, found, _ = run("diff", f"{url}/step_1", f"{url}/step_2")
    assert (code, [each["key"] for each in found["differences"]]) == (1, ["model.w", "step"])
    assert run("diff", f"{url}/step_2", tmp_path / "local")[0] == 0


def test_a_quick_look_reads_a_few_kib_however_much_there_is(url: str, run: Run, object_store: ObjectStore) -> None:
    save(url)
    object_store.traffic.clear()
    code, report, _ = run("verify", url, "--quick")
    assert (code, report["checked_nbytes"]) == (0, 0)
    (asked,) = object_store.traffic.of(r"^GET .*\.safetensors")
    first, last = map(int, asked.range.removeprefix("bytes=").split("-"))
    assert last - first < 1000
    assert len(object_store.traffic.requests) < 20


def test_damage_in_a_bucket_is_found(url: str, run: Run) -> None:
    files = fsspec.filesystem("s3")
    for name in ("flipped", "cut", "gone", "torn"):
        save(f"{url}/{name}")
    content = bytearray(files.cat_file(data_file(f"{url}/flipped")))
    content[1_500_000] ^= 1
    files.pipe_file(data_file(f"{url}/flipped"), bytes(content))
    files.pipe_file(data_file(f"{url}/cut"), bytes(content[:-1]))
    files.rm_file(data_file(f"{url}/gone"))
    files.rm_file(f"{url}/torn/.metadata")
    files.invalidate_cache()
    found = {name: run("verify", f"{url}/{name}") for name in ("flipped", "cut", "gone", "torn", "nothing")}
    kinds = {name: [each["kind"] for each in report["problems"]] for name, (_, report, _) in found.items() if report}
    assert kinds == {
        "flipped": ["damaged data"],
        "cut": ["wrong size"],
        "gone": ["missing file"],
        "torn": ["no checkpoint"],
    }
    assert {name: code for name, (code, _, _) in found.items()} == {
        "flipped": 1, "cut": 1, "gone": 1, "torn": 1, "nothing": 2,
    }  # fmt: skip
    assert found["nothing"][2].startswith("dcp: ") and found["nothing"][2].count("\n") == 1


def test_safetensors_in_a_bucket_are_verified_and_compared(url: str, run: Run, tmp_path: Path) -> None:
    names = write_shards(tmp_path, [{"a": np.ones(3)}, {"b": np.ones(4)}])
    files = fsspec.filesystem("s3")
    for path in tmp_path.iterdir():
        files.put_file(str(path), f"{url}/hf/{path.name}")
    code, report, _ = run("verify", f"{url}/hf")
    assert (code, report["format"], report["tensors"], report["files"]) == (0, "huggingface", 2, 2)
    assert run("verify", f"{url}/hf/{names[0]}")[0] == 0
    assert run("diff", f"{url}/hf", tmp_path)[0] == 0
    files.pipe_file(f"{url}/hf/{names[1]}", (tmp_path / names[1]).read_bytes()[:-1])
    files.invalidate_cache()
    code, report, _ = run("verify", f"{url}/hf")
    assert (code, [each["kind"] for each in report["problems"]]) == (1, ["wrong size"])


def test_a_description_of_torch_in_a_bucket_is_known_as_such(url: str, run: Run) -> None:
    fsspec.filesystem("s3").pipe_file(f"{url}/.metadata", b"\x80\x02}q\x00.")
    code, report, err = run("verify", url)
    if report is None:  # torch is not installed
        assert (code, "hyper-dcp[torch]" in err) == (2, True)
    else:
        assert (code, report["format"], report["problems"][0]["kind"]) == (1, "torch-dcp", "damaged description")


def test_what_the_store_refuses_or_fails_at_is_told_and_what_passes_is_not(
    url: str, run: Run, object_store: ObjectStore
) -> None:
    save(url)
    object_store.traffic.fail("503", r"^GET .*safetensors", times=2)
    assert run("verify", url)[0] == 0
    object_store.traffic.fail("403", r"^GET .*safetensors", times=1000)
    code, report, _ = run("verify", url)
    assert (code, {each["kind"] for each in report["problems"]}) == (1, {"unreadable"})
    assert all("permission" in each["remedy"] for each in report["problems"])
    code, found, _ = run("diff", url, url)
    assert (code, found["is_equal"]) == (2, False)


def test_no_output_shows_what_a_url_hides(url: str, run: Run) -> None:
    for command in (["verify", "sftp://me:hush@127.0.0.1:1/x"], ["diff", *["nix://me:hush@host/x"] * 2]):
        code, _, err = run(*command)
        assert (code, "hush" in err) == (2 if command[0] == "diff" else code, False)
        assert code and err
