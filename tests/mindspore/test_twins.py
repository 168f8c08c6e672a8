"""Which tests of torch have twins here, and which have none, and why.

What both frameworks do by the same code of the core is tested there and with torch; a twin is a test of what is
MindSpore's own.
"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
THERE = HERE.parent / "torch"

IN_CORE = "the core's own code, tested with numpy ranks and torch; nothing of it is MindSpore's"
NO_DEVICE = "needs an Ascend device: on CPU MindSpore has no memory but the host's, and no streams"
NO_COPIES = "MindSpore has no page-locked memory on CPU, and its copies from a device block"
NO_DTENSOR = "MindSpore has no DTensor: layouts stand for it"

TWINS: dict[str, tuple[str, ...] | str] = {
    "test_adapter": ("test_elements", "test_channel"),
    "test_annotate": ("test_describers",),
    "test_async_data_copier": IN_CORE,
    "test_async_errors_torch": IN_CORE,
    "test_async_scripts_torch": ("test_msrun",),
    "test_async_snapshots_torch": ("test_jobs",),
    "test_benchmarks": "benchmarks of MindSpore have no peers that need ranks",
    "test_benchmarks_async": "benchmarks of MindSpore have no peers that need ranks",
    "test_benchmarks_conversions": "offline conversion is the core's",
    "test_benchmarks_shared_reads": "benchmarks of MindSpore have no peers that need ranks",
    "test_broadcast_bytes": ("test_broadcasts", "test_jobs"),
    "test_broadcast_faults": ("test_broadcasts",),
    "test_broadcast_layouts": ("test_jobs", "test_reshard"),
    "test_broadcast_planners": IN_CORE,
    "test_broadcast_rounds": "minutes long, and the rounds are the core's",
    "test_broadcast_targets": ("test_broadcasts", "test_elements"),
    "test_broadcasts": ("test_broadcasts",),
    "test_cases_torch": ("test_jobs", "test_reshard", "test_training"),
    "test_channel": ("test_channel",),
    "test_codecs": ("test_api",),
    "test_conformance_foreign": "foreign tensor types over torch",
    "test_conformance_torch": ("test_conformance",),
    "test_describers": ("test_describers",),
    "test_format_of_torch_values": ("test_with_torch",),
    "test_gpu": NO_DEVICE,
    "test_huggingface_models": "models of transformers are torch's; the reader is the core's",
    "test_huggingface_ranks": IN_CORE,
    "test_huggingface_round_trip": "models of transformers are torch's; conversion is the core's",
    "test_inspection_torch": IN_CORE,
    "test_io_torch": ("test_jobs", "test_elements"),
    "test_jobs": ("test_jobs",),
    "test_laid_out": ("test_describers",),
    "test_manager_torch": ("test_manager_mindspore",),
    "test_mixed_frameworks": ("test_with_torch",),
    "test_offline_transform": IN_CORE,
    "test_ragged": ("test_describers",),
    "test_remote_channel": ("test_channel",),
    "test_reshard": ("test_reshard", "test_jobs"),
    "test_sharding": NO_DTENSOR,
    "test_staging_torch": NO_COPIES,
    "test_state_torch": ("test_training", "test_api"),
    "test_torch_dcp": "the format is torch's",
    "test_torch_dcp_damage": "the format is torch's",
    "test_transfers": NO_COPIES,
    "test_written_bytes": ("test_with_torch",),
}


def test_every_test_file_of_torch_has_a_twin_or_a_reason() -> None:
    assert set(TWINS) == {file.stem for file in THERE.glob("test_*.py")}


def test_every_twin_is_there() -> None:
    named = {twin for entry in TWINS.values() if isinstance(entry, tuple) for twin in entry}
    assert named <= {file.stem for file in HERE.glob("test_*.py")}
    assert all(entry for entry in TWINS.values())
