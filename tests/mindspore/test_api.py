"""What users import and call is the same in both packages, and costs nothing to import."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest

import dcp_mindspore
import dcp_torch
from dcp_core.formats.objects import decode_value, encode_value
from dcp_core.plugins import activate_codecs, active_adapters


def test_every_name_of_dcp_torch_is_in_dcp_mindspore() -> None:
    own = {"StoreGroup", "import_checkpoint", "read_strategy", "use_store"}
    of_torch = {"TorchDCPReader", "describe_parts", "split_flat"}
    assert set(dir(dcp_mindspore)) == set(dir(dcp_torch)) - of_torch | own
    for name in dir(dcp_mindspore):
        assert getattr(dcp_mindspore, name) is not None
    namespace: dict[str, object] = {}
    exec("from dcp_mindspore import *", namespace)
    assert {"save", "load", "async_save", "read", "ChunkInfo", "annotate_shard"} <= set(namespace)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = dcp_mindspore.nonsense


@pytest.mark.parametrize("name", ["save", "async_save", "load"])
def test_arguments_and_defaults_are_those_of_dcp_torch_and_layouts(name: str) -> None:
    torch = inspect.signature(getattr(dcp_torch, name)).parameters
    mindspore = inspect.signature(getattr(dcp_mindspore, name)).parameters
    assert [*torch, "layouts"] == list(mindspore)
    assert all(
        mindspore[key].default == value.default and mindspore[key].kind == value.kind for key, value in torch.items()
    )
    assert mindspore["layouts"].default is None


def test_importing_the_package_and_its_plugin_loads_no_framework() -> None:
    code = "import sys, dcp_mindspore.plugin; dcp_mindspore.ArgumentError; print('mindspore' in sys.modules)"
    ran = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout.strip() == "False", ran.stderr


def test_values_of_mindspore_inside_objects_come_back_without_pickle() -> None:
    import mindspore

    active_adapters(), activate_codecs()
    tensor = mindspore.Tensor([[1.5, 2.5]], mindspore.bfloat16)
    parameter = mindspore.Parameter(mindspore.Tensor([1, 2]), name="inner", requires_grad=False)
    encoded = encode_value({"t": tensor, "p": parameter, "kinds": [mindspore.float8_e5m2, mindspore.bool_]})
    found: Any = decode_value(encoded)
    assert found["t"].asnumpy().tobytes() == tensor.asnumpy().tobytes() and found["t"].dtype == mindspore.bfloat16
    assert isinstance(found["p"], mindspore.Parameter) and found["p"].name == "inner" and not found["p"].requires_grad
    assert found["kinds"] == [mindspore.float8_e5m2, mindspore.bool_]
