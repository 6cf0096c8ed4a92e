"""Check that each supported torch version has the private names used, with the assumed meaning."""

from __future__ import annotations

import ast
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from attnkit.util import torch_private
from attnkit.util.package import FOLDER

# torch version -> names that are missing there and that attnkit does not need
OPTIONAL = {
    "2.11": {"TensorGuards", "_empty_strided_cpu", "_empty_strided_cuda"},
    "2.12": {"TensorGuards", "_empty_strided_cpu", "_empty_strided_cuda"},
    "2.13": {"TensorGuards", "_empty_strided_cpu", "_empty_strided_cuda"},
}
VERSION = ".".join(torch.__version__.split(".")[:2])


def test_this_version_is_supported_and_has_the_optional_names() -> None:
    assert VERSION in OPTIONAL, f"torch {VERSION}: add it here, and to what pyproject.toml allows"
    guards: Any = torch._C._dynamo.guards
    assert {name for name in OPTIONAL[VERSION] if hasattr(guards, name)} == OPTIONAL[VERSION]


def test_dynamo_has_its_parts() -> None:
    parts = vars(torch_private.dynamo_parts())
    assert all(part is not None for part in parts.values())
    assert isinstance(parts["operator_variables"], dict)
    source = Path(FOLDER, "runtime", "compile", "dynamo.py").read_text()
    used = {
        n.attr
        for n in ast.walk(ast.parse(source))
        if isinstance(n, ast.Attribute)
        and isinstance(n.value, ast.Name)
        and n.value.id == "_dynamo"
    }
    assert used == set(parts)


def test_flex_attention_has_its_parts() -> None:
    from torch.nn.attention import flex_attention

    parts = vars(torch_private.flex_parts())
    assert set(parts) == {"sliced", "whole", "compute_dq_write_order"}
    for name in ("_sliced_mask_mod_error", "_compute_dq_write_order_from_block_mask"):
        if hasattr(flex_attention, name):
            assert getattr(flex_attention, name) in parts.values()


def test_settings_are_read() -> None:
    assert torch_private.grad_enabled()
    with torch.no_grad():
        assert not torch_private.grad_enabled()
    assert not torch_private.in_autocast()
    with torch.autocast("cpu"):
        assert torch_private.in_autocast()
    assert not torch_private.deterministic_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch_private.deterministic_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not torch_private.in_forward_ad()
    with forward_ad.dual_level():
        assert torch_private.in_forward_ad()


def test_versions_count_edits() -> None:
    t = torch.zeros(3)
    before = torch_private.version(t)
    t.add_(1)
    assert torch_private.version(t) == before + 1


def test_makers_make_what_was_asked_for() -> None:
    t = torch_private.fast_empty_strided(torch.device("cpu"))((2, 3), (1, 2), torch.bfloat16)
    assert (t.shape, t.stride(), t.dtype) == ((2, 3), (1, 2), torch.bfloat16)


def test_likeness_is_that_of_class_dtype_shape_strides_and_gradient() -> None:
    same = torch_private.tensor_guard([torch.zeros(2, 3), torch.zeros(4)])
    assert same is not None
    assert same(torch.ones(2, 3), torch.ones(4))
    for other in (
        torch.ones(3, 2).t(),
        torch.ones(3, 2),
        torch.ones(2, 3).double(),
        torch.ones(2, 3, requires_grad=True),
        torch.nn.Parameter(torch.ones(2, 3)),
    ):
        assert not same(other, torch.ones(4))


def test_one_tensor_at_several_places_must_be_one_again() -> None:
    x, y, z = (torch.zeros(2, 3) for _ in range(3))
    same = torch_private.tensor_guard([x, y, x, y, x])
    assert same is not None
    assert same(x, y, x, y, x)
    assert same(y, z, y, z, y)
    assert not same(x, y, z, y, x)
    assert not same(x, y, x, x, x)  # one more is the same
    assert not same(x, x, x, x, x)
    assert not same(x, y, x, y)
    assert not same(x.double(), y, x, y, x)


class _Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Subclass(Tensor):
    pass


def test_what_intercepts_a_call() -> None:
    x = torch.zeros(2)
    assert not torch_private.is_intercepted([x])
    with torch.device("cpu"):
        assert not torch_private.is_intercepted([x])
    with _Mode():
        assert torch_private.function_mode_count() == 1
        assert not torch_private.only_devices()
        assert torch_private.is_intercepted([x])
    assert torch_private.is_intercepted([x.as_subclass(_Subclass)])
    assert torch_private.is_intercepted([torch.zeros(2, dtype=torch.cfloat).conj().imag])

    def batched(t: Tensor) -> Tensor:
        assert torch_private.is_batched(t)
        assert torch_private.is_intercepted([t])
        return t

    torch.vmap(batched)(x)

    def tracked(t: Tensor) -> Tensor:
        assert torch_private.is_grad_tracking(t)
        return t.sum()

    torch.func.grad(tracked)(x)


def test_fake_tensors_are_told() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert torch_private.is_fake(torch.zeros(2))
    assert not torch_private.is_fake(torch.zeros(2))


def test_trees_of_arguments() -> None:
    tree = ((1, [2, 3]), {"a": (4,)})
    assert torch_private.tree_leaves(tree) == [1, 2, 3, 4]
    assert torch_private.tree_map(lambda x: -x, tree) == ((-1, [-2, -3]), {"a": (-4,)})


def _private_names(tree: ast.AST) -> set[str]:
    """Return the private torch names that a file uses: `torch._x`, imports, `_version`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root: ast.expr = node
            while isinstance(root, ast.Attribute):
                root = root.value
            of_torch = isinstance(root, ast.Name) and root.id in ("torch", "_C", "forward_ad")
            private = node.attr.startswith("_") and not node.attr.endswith("__")
            of_tensor = node.attr == "_version" and ast.unparse(node.value) != "self"
            if of_tensor or (of_torch and private):
                found.add(ast.unparse(node))
        modules = []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        for name in modules:
            if name.split(".")[0] == "torch" and any(p.startswith("_") for p in name.split(".")):
                found.add(name)
    return found


def test_no_other_file_uses_a_private_name() -> None:
    files = [p for p in Path(FOLDER).rglob("*.py") if p.name != "torch_private.py"]
    assert len(files) > 200
    users = {str(p): _private_names(ast.parse(p.read_text())) for p in files}
    assert {path: names for path, names in users.items() if names} == {}
    assert _private_names(ast.parse(Path(torch_private.__file__).read_text()))


@pytest.mark.parametrize("name", torch_private.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(torch_private, name) is not None


def test_memory_is_allocated_as_asked_for() -> None:
    """A device for which torch has a fast function uses it; the others use `torch.empty_strided`."""
    fast = torch_private.fast_empty_strided(torch.device("cpu"))
    assert isinstance(fast, types.BuiltinFunctionType)
    for make, device in ((fast, "cpu"), (None, "meta")):
        make = make or torch_private.fast_empty_strided(torch.device(device))
        made = make((2, 3), (4, 1), torch.float16)
        assert (made.shape, made.stride()) == ((2, 3), (4, 1))
        assert (made.dtype, made.device.type) == (torch.float16, device)
