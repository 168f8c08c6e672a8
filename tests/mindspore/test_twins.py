"""Which tests of torch have twins here, which cases have tests here, and which have none, and why.

What both frameworks do by the same code of the core is tested there and with torch; a twin is a test of what is
MindSpore's own.
"""

from __future__ import annotations

import re
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
    "test_async_scripts_torch": ("test_msrun", "test_cases"),
    "test_async_snapshots_torch": ("test_jobs",),
    "test_attacks_torch": "the formats are torch's",
    "test_benchmarks": "benchmarks of MindSpore have no peers that need ranks",
    "test_benchmarks_async": "benchmarks of MindSpore have no peers that need ranks",
    "test_benchmarks_conversions": "offline conversion is the core's",
    "test_benchmarks_object_store": "benchmarks of MindSpore have no peers that need ranks",
    "test_benchmarks_shared_reads": "benchmarks of MindSpore have no peers that need ranks",
    "test_broadcast_bytes": ("test_broadcasts", "test_jobs"),
    "test_broadcast_faults": ("test_broadcasts",),
    "test_broadcast_layouts": ("test_jobs", "test_reshard"),
    "test_broadcast_planners": IN_CORE,
    "test_broadcast_rounds": "minutes long, and the rounds are the core's",
    "test_broadcast_targets": ("test_broadcasts", "test_elements"),
    "test_broadcasts": ("test_broadcasts",),
    "test_cases_files_torch": IN_CORE,
    "test_cases_torch": ("test_cases", "test_jobs", "test_reshard", "test_training"),
    "test_channel": ("test_channel",),
    "test_codecs": ("test_api",),
    "test_conformance_foreign": "foreign tensor types over torch",
    "test_conformance_torch": ("test_conformance",),
    "test_conversion_crashes": "the format that is converted is torch's",
    "test_describers": ("test_describers",),
    "test_error_points_torch": "the format that is converted is torch's",
    "test_format_of_torch_values": ("test_with_torch",),
    "test_fuzz_targets_torch": "the formats are torch's",
    "test_gpu": NO_DEVICE,
    "test_huggingface_models": "models of transformers are torch's; the reader is the core's",
    "test_huggingface_ranks": ("test_foreign_checkpoints",),
    "test_huggingface_round_trip": "models of transformers are torch's; conversion is the core's",
    "test_inspection_torch": IN_CORE,
    "test_io_torch": ("test_jobs", "test_elements"),
    "test_jobs": ("test_jobs",),
    "test_laid_out": ("test_describers",),
    "test_manager_torch": ("test_manager_mindspore",),
    "test_mixed_frameworks": ("test_with_torch",),
    "test_object_store_torch": IN_CORE,
    "test_offline_transform": ("test_offline_transform",),
    "test_ragged": ("test_describers",),
    "test_rank_faults_torch": ("test_rank_faults_mindspore",),
    "test_remote_channel": ("test_channel",),
    "test_reshard": ("test_reshard", "test_jobs"),
    "test_sharding": NO_DTENSOR,
    "test_soak_torch": IN_CORE,
    "test_staging_torch": NO_COPIES,
    "test_state_torch": ("test_training", "test_api"),
    "test_torch_dcp": ("test_foreign_checkpoints",),
    "test_torch_dcp_damage": "the format is torch's",
    "test_transfers": NO_COPIES,
    "test_written_bytes": ("test_with_torch",),
    "test_wrong_arguments_torch": ("test_wrong_arguments_mindspore",),
}


OF_FILES = "bytes of files; no framework has a part in it, and tests/core has the tests"
OF_PROCESSES = "the background processes are the core's and import no framework; tests/core has the tests"

CASES: dict[str, tuple[str, ...] | str] = {
    "1 dimensions shorter than the number of ranks": (
        "test_dimensions_shorter_than_the_number_of_ranks_save_and_load_anywhere",
    ),
    "2 no dimensions": (
        "test_tensors_without_dimensions_keep_their_value",
        "test_states_become_directories_and_states_again",
        "test_published_weights_fill_a_target_of_any_layout",
    ),
    "3 strided shards": (
        "test_an_interleaved_layout_gives_each_device_all_its_pieces",
        "test_interleaved_layouts_are_several_boxes",
    ),
    "4 two chunks of a tensor on one rank": ("test_interleaved_layouts_are_several_boxes",),
    "5 flat, uneven shards": (
        "test_an_annotated_shard_and_a_flat_one_lie_where_the_note_says",
        "test_ranges_of_a_flat_tensor_load_into_rows_and_into_columns",
    ),
    "6 ranks that disagree": (
        "test_ranks_that_disagree_are_one_error_on_all_before_anything_is_written",
        "test_arguments_that_differ_between_ranks_are_an_error_on_all",
        "test_layouts_that_do_not_fit_on_one_rank_are_the_same_error_on_all",
    ),
    "7 Partial": (
        "test_a_partial_dtensor_and_one_that_is_not_shaped_as_it_says_are_refused",
        "test_ranks_that_disagree_are_one_error_on_all_before_anything_is_written",
    ),
    "8 a parameter tied between stages": ("test_a_parameter_tied_between_pipeline_stages_is_written_once",),
    "9 some ranks, and ranks with nothing": (
        "test_layouts_over_some_ranks_and_ranks_with_nothing",
        "test_some_ranks_of_a_job_save_and_load_among_themselves",
    ),
    "10 memory of any strides": (
        "test_memory_of_any_strides_is_saved_and_filled_by_its_logical_values",
        "test_an_expanded_tensor_is_saved_whole_and_refused_as_a_target",
    ),
    "11 every dtype": (
        "test_a_tensor_has_the_bits_that_it_is_made_of",
        "test_four_ranks_of_mindspore_load_what_two_of_torch_wrote",
    ),
    "12 odd keys and containers": ("test_keys_of_any_kind_and_names_that_collide_are_told_apart",),
    "13 values that differ between ranks": ("test_every_rank_gets_its_own_random_state_back",),
    "14 optimizers": (
        "test_training_resumes_with_bit_identical_losses_in_the_same_memory",
        "test_parameter_groups_may_differ_between_pipeline_stages",
        "test_an_optimizer_that_has_made_no_step_is_saved_and_loaded",
    ),
    "15 load, train, save, load": ("test_load_train_save_load_gives_the_new_values",),
    "16 keys, shapes and kinds that do not fit": (
        "test_missing_keys_are_all_named_and_keys_of_the_checkpoint_alone_are_ignored",
        "test_shapes_are_checked_before_anything_is_overwritten",
        "test_a_tensor_where_the_checkpoint_has_a_value_and_the_other_way_round",
    ),
    "17 conversions": ("test_dtypes_are_converted_where_nothing_surprises_and_refused_elsewhere",),
    "18 damaged files": OF_FILES,
    "19 a hostile .metadata": OF_FILES,
    "20 left-overs of a larger world, and kills": OF_FILES,
    "21 disks that fail": OF_FILES,
    "22 two jobs in one directory": OF_FILES,
    "23 beyond 4 GiB": "the memory of the machines that run the tests; offsets are the core's",
    "24 what changes after async_save": ("test_a_background_save_holds_what_the_state_was_at_the_call",),
    "25 a child or a trainer that is killed": OF_PROCESSES,
    "26 twenty async saves": OF_PROCESSES,
    "27 a rank that never comes": ("test_a_rank_that_does_not_come_is_named",),
    "28 the script ends": ("test_a_script_that_ends_right_after_async_save_leaves_a_checkpoint",),
    "29 left-overs of a mailbox": OF_FILES,
    "30 callbacks and time limits": OF_PROCESSES,
    "31 Hugging Face directories": (
        "test_published_files_become_a_checkpoint_and_that_a_sharded_network",
        "test_tied_parameters_cells_and_values",
    ),
    "32 straight from such a directory": (
        "test_published_weights_fill_a_target_of_any_layout",
        "test_what_does_not_fit_is_one_error_on_all_ranks",
    ),
    "33 export in bounded memory": "conversion reads and writes bytes in the core, without a tensor of a framework",
}


def test_every_test_file_of_torch_has_a_twin_or_a_reason() -> None:
    assert set(TWINS) == {file.stem for file in THERE.glob("test_*.py")}


def test_every_twin_is_there() -> None:
    named = {twin for entry in TWINS.values() if isinstance(entry, tuple) for twin in entry}
    assert named <= {file.stem for file in HERE.glob("test_*.py")}
    assert all(entry for entry in TWINS.values())


def test_every_case_has_tests_or_a_reason() -> None:
    assert [int(row.split()[0]) for row in CASES] == [*range(1, 34)]
    there = {name for file in HERE.glob("test_*.py") for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)}
    for row, tests in CASES.items():
        assert tests
        assert isinstance(tests, str) or set(tests) <= there, row


def test_the_page_that_compares_the_packages_names_tests_that_are_there() -> None:
    page = (HERE.parents[1] / "docs" / "reference" / "parity.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) > 30
    assert named <= {
        file.stem for place in ("core", "torch", "mindspore") for file in (HERE.parent / place).glob("*.py")
    }
