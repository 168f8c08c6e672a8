"""A tensor with the surface of HyperParallel's DTensor, over real MindSpore memory."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor


class DTensor(Tensor):  # type: ignore[misc]  # MindSpore has no types
    """A local tensor, its layout, and the global shape that both make."""

    def __new__(cls, local: Any, layout: Any = None, shape: tuple[int, ...] = ()) -> Any:
        if isinstance(local, DTensor):  # how MindSpore makes a parameter of it
            layout, shape, local = local._layout, local._global, local.to_local()
        made = Tensor._make_subclass(cls, local)
        made._local, made._layout, made._global = local, layout, tuple(shape)
        return made

    def __init__(self, *arguments: Any) -> None:
        """Everything is made by now."""

    def to_local(self) -> Any:
        return self._local

    @property
    def layout(self) -> Any:
        return self._layout

    @property
    def shape(self) -> tuple[int, ...]:
        return self._global  # type: ignore[no-any-return]
