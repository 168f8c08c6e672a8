"""Which stored entry fills which target.

In: the target's leaves and the checkpoint's metadata. Out: `Matches`. A leaf is found by its typed path first, then by
its name, so that nested and flat states find each other. Everything that does not fit is found here, before any target
is touched.
"""

from __future__ import annotations

import bisect
import difflib
import logging
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TypeVar

from dcp_core.dtype import DType, conversion
from dcp_core.errors import DcpError, DTypeMismatchError, MissingKeysError, PlanningError, ShapeMismatchError
from dcp_core.metadata import EVERY_RANK, Metadata, StoredObject, StoredTensor
from dcp_core.planning.bulk_matching import REFUSED, PlainMatches, lossy_text, match_plainly, wanted_boxes
from dcp_core.planning.leaves import LocalTensor
from dcp_core.planning.local_plan import Leaf, LocalState, check_writable
from dcp_core.planning.wanted import WantedBoxes, WantedObject
from dcp_core.state_path import PerRank, StatePath, canonical_name, decode_path, plain_name

_logger = logging.getLogger("dcp.planning")

_Entry = TypeVar("_Entry", StoredTensor, StoredObject)
_KEYS_SHOWN = 100
_NAMES_COMPARED = 2000
_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


@dataclass(frozen=True, slots=True)
class MatchRules:
    """How strictly a target must fit.

    Attributes:
        allow_partial_load: Leave targets alone whose key the checkpoint lacks.
        cast: "auto": lossless conversions, and lossy ones among floating types, reported once. "exact": none.
            "any": all that the framework can do.
    """

    allow_partial_load: bool = False
    cast: str = "auto"


@dataclass(frozen=True, slots=True, eq=False)
class Matches:
    """What will be loaded.

    Attributes:
        wanted: Boxes to fill.
        objects: Objects to fetch.
        lossy: "key: dtype to dtype" for conversions that lose precision.
        borrowed: Keys whose value differed between ranks, taken from the lowest rank.
    """

    wanted: WantedBoxes
    objects: Sequence[WantedObject]
    lossy: Sequence[str]
    borrowed: Sequence[str]


@dataclass(slots=True)
class _Findings:
    """What was found for leaves that were looked at one by one."""

    tensors: dict[int, StoredTensor] = field(default_factory=dict)
    objects: dict[int, StoredObject] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    lossy: list[str] = field(default_factory=list)
    borrowed: list[str] = field(default_factory=list)


def match_state(state: LocalState, metadata: Metadata, rank: int, world_size: int, rules: MatchRules) -> Matches:
    """Find what fills each leaf of the target.

    Raises:
        MissingKeysError: Keys that the checkpoint lacks, all of them named; or an empty container where it has entries.
        ShapeMismatchError, DTypeMismatchError, PlanningError: A target that does not fit.
    """
    _refuse_empty_containers(state, metadata, metadata.world_size == world_size)
    plain = _plain_matches(state, metadata, rules)
    found, matched = _Findings(), {*plain.leaf.tolist(), *plain.objects}
    for position in range(len(state.paths)):
        if position not in matched:
            _match_leaf(position, state.leaves[position], metadata, rank, world_size, rules, found)
    missing = _without_tied(state, found.missing, {*plain.leaf.tolist(), *found.tensors})
    if missing and not rules.allow_partial_load:
        raise _missing_error([state.names[position] for position in missing], metadata)
    wanted = wanted_boxes(state, plain, found.tensors)
    paths = {position: decode_path(state.paths[position]) for position in found.objects}
    objects = [
        WantedObject(state.names[position], position, paths.get(position, stored.path), stored)
        for position, stored in sorted({**plain.objects, **found.objects}.items(), key=itemgetter(0))
    ]
    return Matches(wanted, objects, (*plain.lossy, *found.lossy), found.borrowed)


def _plain_matches(state: LocalState, metadata: Metadata, rules: MatchRules) -> PlainMatches:
    """What can be matched without looking at leaves one by one."""

    def kind_of(stored: DType, target: DType) -> str:
        kind = conversion(stored, target)
        return kind if kind in _allowed(rules.cast, kind) else REFUSED

    try:
        return match_plainly(state, metadata.source, kind_of)
    except DcpError:  # the first leaf that needs what is damaged says so, unless one before it does not fit
        return PlainMatches.nothing()


def _match_leaf(
    position: int, leaf: Leaf, metadata: Metadata, rank: int, world_size: int, rules: MatchRules, found: _Findings
) -> None:
    tensors, objects = find_entries(metadata, leaf.path)
    same_world = metadata.world_size == world_size
    if not tensors and not objects:
        found.missing.append(position)
        return
    if leaf.tensor is None:
        if tensors:
            raise PlanningError(
                f"{leaf.name!r}: the checkpoint has a tensor of shape {tensors[0].shape}, the target has "
                f"{type(leaf.value).__name__} {_shown(leaf.value)}; put a tensor of that shape there"
            )
        stored = _pick(objects, rank, same_world, leaf.name, found.borrowed)
        if stored.per_rank and not same_world:
            raise PlanningError(
                f"{leaf.name!r} holds one value per rank, saved by {metadata.world_size} ranks and loaded by "
                f"{world_size}; load it with {metadata.world_size} ranks or leave the key out"
            )
        if stored.per_rank and stored.rank != rank:
            ranks = ", ".join(str(entry.rank) for entry in objects[:8])
            raise PlanningError(
                f"{leaf.name!r} holds one value per rank, and rank {rank} saved none (ranks {ranks} did); leave the "
                "key out on this rank"
            )
        found.objects[position] = stored
        return
    if not tensors:
        raise PlanningError(
            f"{leaf.name!r}: the checkpoint has a plain value, the target has a tensor of shape "
            f"{leaf.tensor.global_shape}; put a plain value there"
        )
    picked = _pick(tensors, rank, same_world, leaf.name, found.borrowed)
    if _check_tensor(leaf.name, leaf.tensor, picked, rules) == "lossy":
        found.lossy.append(lossy_text(leaf.name, picked.dtype, leaf.tensor.dtype))
    found.tensors[position] = picked


def _without_tied(state: LocalState, missing: Sequence[int], filled: Iterable[int]) -> list[int]:
    """Which leaves stay without a value: not those that are the same memory as one that gets its own.

    A format that stores tied weights once has them under one of their names.
    """
    if not missing:
        return []
    known = {key for position in filled if (key := _memory_of(state.tensors[position])) is not None}
    tied = [position for position in missing if _memory_of(state.tensors[position]) in known]
    if tied:
        _logger.info(
            "tied to others, and filled with them: %s", ", ".join(state.names[at] for at in tied[:_KEYS_SHOWN])
        )
    return [position for position in missing if position not in set(tied)]


def _memory_of(tensor: LocalTensor | None) -> Hashable | None:
    """Equal for leaves that are the same part of the same tensor in the same memory; None where that is not known."""
    if tensor is None or tensor.storage is None:
        return None
    return tensor.storage, tensor.global_shape, tensor.boxes


def _check_tensor(name: str, tensor: LocalTensor, stored: StoredTensor, rules: MatchRules) -> str:
    """Refuse a target that a tensor cannot fill; say how its elements are converted."""
    if stored.shape != tensor.global_shape:
        raise ShapeMismatchError(
            f"{name!r}: the checkpoint has global shape {stored.shape}, the target {tensor.global_shape}; "
            "make the target with the shape that was saved"
        )
    kind = _check_dtype(name, stored.dtype, tensor.dtype, rules.cast)
    check_writable(tensor, name)
    return kind


def _allowed(cast: str, kind: str) -> tuple[str, ...]:
    return {"exact": ("same",), "auto": ("same", "lossless", "lossy")}.get(cast, (kind,))


def _check_dtype(name: str, stored: DType, target: DType, cast: str) -> str:
    kind = conversion(stored, target)
    if kind in _allowed(cast, kind):
        return kind
    remedy = "make the target with the stored dtype" + (
        "" if cast == "exact" else ', or pass cast="any" to the planner'
    )
    raise DTypeMismatchError(
        f"{name!r}: the checkpoint has {stored.name}, the target {target.name}, and cast={cast!r} does not convert "
        f"one into the other; {remedy}"
    )


def find_entries(metadata: Metadata, path: StatePath) -> tuple[Sequence[StoredTensor], Sequence[StoredObject]]:
    """Look a leaf up: by typed path under its two possible names, then by plain name whatever the path."""
    source = metadata.source
    plain = plain_name(path)
    candidates: list[tuple[list[StoredTensor], list[StoredObject]]] = []
    try:
        names = [plain] if plain.encode() else []
    except UnicodeEncodeError:
        names = []
    for name in (*names, canonical_name(path)):
        tensors, objects = list(source.tensors(name)), list(source.objects(name))
        exact = [t for t in tensors if t.path == path], [o for o in objects if o.path == path]
        if exact[0] or exact[1]:
            return exact
        candidates.append((tensors, objects))
    return candidates[0] if names else ([], [])


def _pick(entries: Sequence[_Entry], rank: int, same_world: bool, name: str, borrowed: list[str]) -> _Entry:
    """Of one value per rank take this rank's; in a world of another size the lowest rank's."""
    if entries[0].rank == EVERY_RANK:
        return entries[0]
    for entry in entries:
        if entry.rank == rank and same_world:
            return entry
    if not getattr(entries[0], "per_rank", False):
        borrowed.append(f"{name} (from rank {entries[0].rank})")
    return min(entries, key=lambda entry: entry.rank)


def _refuse_empty_containers(state: LocalState, metadata: Metadata, same_world: bool) -> None:
    """An empty container where the checkpoint has entries would load nothing and say nothing."""
    names: Sequence[str] | None = None
    for encoded in sorted(state.flat.hollow - {b""}):
        path = decode_path(encoded)
        tensors, objects = find_entries(metadata, path)
        if tensors or objects:
            exact = path in (*(tensor.path for tensor in tensors), *(entry.path for entry in objects))
            if encoded not in state.flat.kinds or not exact:
                continue  # an empty list or tuple is a plain value; and another key's value is none of its business
            raise PlanningError(
                f"{plain_name(path)!r} is an empty {state.flat.kinds[encoded]} in the target and a value in the "
                "checkpoint; put None there to have it replaced, or leave the key out"
            )
        names = list(metadata.source.names()) if names is None else names
        prefixes = plain_name(path) + ".", canonical_name(path) + "["
        inside = next(filter(None, (_first_with_prefix(names, prefix) for prefix in prefixes)), None)
        if inside is not None and not _was_saved_empty(encoded, metadata, same_world):
            raise MissingKeysError(
                f"{plain_name(path)!r} is empty in the target but the checkpoint has entries there ({inside!r} and "
                "more); warm the target up first (an optimizer: make its state, for example by one step with zero "
                "gradients), or leave the key out"
            )


def _was_saved_empty(encoded: bytes, metadata: Metadata, same_world: bool) -> bool:
    """Whether some rank of a job of this size saved an empty dict there, as a stage without parameters does."""
    return same_world and (encoded, "dict") in metadata.source.nesting.containers


def _first_with_prefix(names: Sequence[str], prefix: str) -> str | None:
    at = bisect.bisect_left(names, prefix.encode("utf-8", "surrogatepass"), key=lambda name: name.encode())
    return names[at] if at < len(names) and names[at].startswith(prefix) else None


def _missing_error(missing: Sequence[str], metadata: Metadata) -> MissingKeysError:
    shown = ", ".join(repr(name) for name in missing[:_KEYS_SHOWN])
    more = f" and {len(missing) - _KEYS_SHOWN} more" if len(missing) > _KEYS_SHOWN else ""
    plural = "key" if len(missing) == 1 else "keys"
    stored = list(metadata.source.names())
    near, remedy = _nearest(missing[0], stored), "leave them out of the target"
    outer, undotted = _outer_name(missing, stored), _undotted_prefix(missing, stored)
    if undotted is not None:
        near = undotted + missing[0][len(undotted) + 1 :]
        remedy = (
            f"they lack the dot after {undotted!r}: a key_map that is a prefix is put before names as it is, so pass "
            f"key_map={undotted + '.'!r}"
        )
    elif outer is not None:
        near, remedy = f"{outer}.{missing[0]}", f"nest them in the target as they were saved, under {outer!r}"
    elif near is not None and near.startswith(f"{missing[0]}."):
        remedy = f"put there what was saved as {missing[0]!r}: a dict, list or tuple with values of the same names"
    hint = f" (it has {near!r})" if near is not None else ""
    return MissingKeysError(
        f"the checkpoint lacks {len(missing)} {plural}: {shown}{more}{hint}; {remedy}, or pass "
        "StandardLoadPlanner(allow_partial_load=True) to keep what the target has there"
    )


def _outer_name(missing: Sequence[str], stored: Sequence[str]) -> str | None:
    """The name under which all of them are stored."""
    known = set(stored)
    outers = (name[: -len(missing[0]) - 1] for name in stored if name.endswith(f".{missing[0]}"))
    return next((outer for outer in outers if all(f"{outer}.{name}" in known for name in missing)), None)


def _undotted_prefix(missing: Sequence[str], stored: Sequence[str]) -> str | None:
    """The first part of all of them, where they are stored but for the dot after it."""
    known, first = set(stored), missing[0]
    ends = (at for at, letter in enumerate(first) if letter == ".")
    prefixes = (first[:at] for at in ends if first[:at] + first[at + 1 :] in known)
    return next(
        (
            prefix
            for prefix in prefixes
            if all(name.startswith(f"{prefix}.") and prefix + name[len(prefix) + 1 :] in known for name in missing)
        ),
        None,
    )


def _nearest(name: str, stored: Sequence[str]) -> str | None:
    """A stored name that may be meant: one under it, the same but for a wrapper, or one spelled much alike."""
    inside = _first_with_prefix(stored, f"{name}.")
    if inside is not None:
        return inside
    bare = _without_wrappers(name)
    wrapped = next((other for other in stored if _without_wrappers(other) == bare), None)
    return wrapped or next(iter(difflib.get_close_matches(name, stored[:_NAMES_COMPARED], 1, 0.8)), None)


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _shown(value: object) -> str:
    text = repr(value.value if isinstance(value, PerRank) else value)
    return text if len(text) <= 60 else text[:57] + "..."


def warn_once(what: str, keys: Iterable[str]) -> None:
    """Log one line that names keys."""
    named = sorted(keys)
    if named:
        more = f" and {len(named) - _KEYS_SHOWN} more" if len(named) > _KEYS_SHOWN else ""
        _logger.warning("%s: %s%s", what, ", ".join(named[:_KEYS_SHOWN]), more)
