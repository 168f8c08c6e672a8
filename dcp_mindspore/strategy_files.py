"""Strategy files: the layouts of a compiled network, as MindSpore writes them beside its checkpoints.

In: a file, as JSON or protobuf. Out: layouts by name, for `layouts=` and for `import_checkpoint`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspore import build_searched_strategy

from dcp_core.arguments import check_path
from dcp_core.errors import CorruptError, NotFoundError

_LAYOUTS = "parallel_layout_item"
_JSON = ".json"


def read_strategy(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the layouts of a strategy file.

    Args:
        path: What `set_op_strategy_config` or `AutoParallel.save_param_strategy_file` made MindSpore write. A name that
            ends in ".json" is JSON, any other protobuf.

    Returns:
        By parameter name a layout for `layouts=`. In a file merged from the stages of a pipeline the names begin with
        the stage, as "1-fc.weight".

    Raises:
        ArgumentError: That is no path.
        NotFoundError: There is no such file.
        CorruptError: It is no strategy file.
    """
    check_path(path, "path")
    place = Path(path)
    if not place.is_file():
        raise NotFoundError(f"there is no strategy file {str(place)!r}")
    try:
        return _from_json(place) if place.suffix == _JSON else _from_protobuf(place)
    except Exception as error:
        raise CorruptError(f"{str(place)!r} is no strategy file: {type(error).__name__}: {error}") from error


def _from_json(place: Path) -> dict[str, Any]:
    found: Mapping[str, Any] = json.loads(place.read_text(encoding="utf-8"))[_LAYOUTS]
    return {name: dict(layout) for name, layout in found.items()}


def _from_protobuf(place: Path) -> dict[str, Any]:
    return {name: _plain(layout) for name, layout in build_searched_strategy(str(place)).items()}


def _plain(layout: Any) -> dict[str, Any]:
    """One layout of the protobuf as a dict, with the names that its JSON has."""
    rows = [list(row.dim) for row in layout.tensor_map]
    return {
        "dev_matrix": list(layout.dev_matrix[0].dim),
        "tensor_map": [row for row in rows if row] if len(rows) > 1 else rows[0],
        "field": layout.field,
        "opt_weight_shard_step": layout.opt_weight_shard_step,
        "opt_weight_shard_size": layout.opt_weight_shard_size,
    }
