"""A checkpoint becomes a Hugging Face directory: planned from metadata, then piece by piece, in bounded memory.

In: a storage reader of any format. Out: safetensors files with an index, and a report that names what was left out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcp_core.convert.huggingface_files import (
    FileTensor,
    existing_weights,
    refuse_overwriting,
    shard_names,
    write_directory,
)
from dcp_core.convert.huggingface_plan import (
    HuggingFacePlan,
    PlannedTensor,
    Skipped,
    floating_dtype,
    plan_huggingface,
)
from dcp_core.convert.lazy_tensors import LazyTensor, ReadAhead
from dcp_core.convert.progress import progress_bar
from dcp_core.convert.shard_sizes import MAX_SHARD_SIZE, parse_shard_size
from dcp_core.errors import ArgumentError
from dcp_core.execution.interfaces import CheckpointId, StorageReader
from dcp_core.formats.cuts import Cut, checked_cuts
from dcp_core.formats.key_map import KeyMap
from dcp_core.recipes.places import storage_at
from dcp_core.recipes.stored_source import StoredSource
from dcp_core.storage.base import Storage

_LOG = logging.getLogger("dcp.convert")
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What a conversion wrote, or would write.

    Attributes:
        files: Names of the files, the index last.
        tensors: How many tensors are in them.
        nbytes: Bytes of these.
        skipped: What of the checkpoint is not in them, and why.
    """

    files: tuple[str, ...]
    tensors: int
    nbytes: int
    skipped: tuple[Skipped, ...]


class HuggingFaceConversion:
    """A conversion that is planned, and can be run. Nothing has been written yet.

    Args:
        reader: Where from; any format.
        max_shard_size: Largest size of a file's tensors.
        prefix: Only names under it are converted, without it.
        dtype: What floating-point tensors become, by name; None: they stay.
        key_map: From names (without the prefix) to names in the directory; see `formats.key_map.KeyMap`.
        cuts: For tensors of the directory that are cut otherwise, how they are made of those of the checkpoint.

    Attributes:
        plan: Which tensors go where.

    Raises:
        DcpError: The checkpoint is damaged, or cannot be converted like this.
    """

    def __init__(
        self,
        reader: StorageReader,
        *,
        max_shard_size: int | str = MAX_SHARD_SIZE,
        prefix: str = "",
        dtype: str | None = None,
        key_map: KeyMap | None = None,
        cuts: Mapping[str, Cut] | None = None,
    ) -> None:
        limit = parse_shard_size(max_shard_size)
        if not isinstance(prefix, str):
            raise ArgumentError(f"prefix must be the name that what is converted lies under, found {prefix!r}")
        cuts = checked_cuts(cuts)
        wanted = None if dtype is None else floating_dtype(dtype)
        self._source = StoredSource(reader)
        names = [entry.name for entry in self._source.objects()]
        self.plan: HuggingFacePlan = plan_huggingface(
            self._source.tensors(), names, max_shard_nbytes=limit, prefix=prefix, dtype=wanted, key_map=key_map,
            cuts=cuts,
        )  # fmt: skip
        self._source.check([tensor.stored for tensor in self.plan.tensors])

    @property
    def file_tensors(self) -> list[tuple[str, Sequence[PlannedTensor]]]:
        """The files by name, with their tensors."""
        tensors = self.plan.tensors
        names = shard_names(len(self.plan.files))
        return [
            (name, [tensors[at] for at in positions])
            for name, positions in zip(names, self.plan.files, strict=True)
        ]  # fmt: skip

    def check_target(
        self,
        dst: CheckpointId | Storage,
        *,
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Storage:
        """See whether a directory may be written, and give its storage. Nothing is written.

        Raises:
            ArgumentError: It may not; see `refuse_overwriting`.
        """
        storage = storage_at(dst, storage_options)
        refuse_overwriting(storage, existing_weights(storage), overwrite)
        return storage

    def run(
        self,
        dst: CheckpointId | Storage,
        *,
        overwrite: bool = False,
        durable: bool = True,
        progress: bool | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> ConversionReport:
        """Write the directory.

        Args:
            dst: The directory, or a storage of it.
            overwrite: Whether weights that are there may be replaced.
            durable: Whether data reaches the disk before this returns.
            progress: Whether to show a bar; None: where a person watches.
            storage_options: What fsspec gets beside `dst`; the reader has its own.

        Raises:
            DcpError: Nothing of the new files is left then.
        """
        storage = self.check_target(dst, overwrite=overwrite, storage_options=storage_options)
        with (
            progress_bar("convert", self.plan.nbytes, progress) as advance,
            ReadAhead(self._source, advance) as ahead,
        ):
            tensors = [_file_tensor(tensor, ahead) for tensor in self.plan.tensors]
            files = [[tensors[at] for at in positions] for positions in self.plan.files]
            written = write_directory(storage, files, overwrite=overwrite, durable=durable)
        report = ConversionReport(written, len(tensors), self.plan.nbytes, self.plan.skipped)
        log_skipped(report.skipped)
        return report


def log_skipped(skipped: Sequence[Skipped]) -> None:
    """Name what a conversion leaves out."""
    by_reason: dict[str, list[str]] = {}
    for entry in skipped:
        by_reason.setdefault(entry.reason, []).append(entry.name)
    for reason, names in by_reason.items():
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        _LOG.warning("not converted, %s: %s%s", reason, ", ".join(names[:_SHOWN]), more)


def _file_tensor(tensor: PlannedTensor, ahead: ReadAhead) -> FileTensor:
    lazy = LazyTensor(tensor.stored, tensor.dtype, ahead)
    return FileTensor(tensor.name, tensor.dtype, tensor.shape, lambda: lazy.bits, ahead)
