"""Check that masks, score_mods, block masks and variants survive pickles and copies."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.utils.data import DataLoader, Dataset

import attnkit
from attnkit import (
    Mask,
    PicklingError,
    ScoreMod,
    Variant,
    create_block_mask,
    create_mask,
    masks,
    mods,
)
from attnkit.masks import causal, document, document_from_lengths, sliding_window
from attnkit.mods import alibi
from attnkit.tracing.guards import trace_cached
from attnkit.tracing.pickling import stores_code

CPU = torch.device("cpu")
MASKS = masks.examples(32)
MODS = mods.examples(16, heads=2)


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


WAYS = {"pickle": pickled, "torch.save": saved, "copy": copy.copy, "deepcopy": copy.deepcopy}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def dense(mask: Any, e: Any) -> Tensor:
    return create_mask(mask, e.batch, e.heads, e.q_len, e.kv_len)


@pytest.mark.parametrize("name", MASKS)
@every_way
def test_masks_of_the_library(name: str, way: Callable[[Any], Any]) -> None:
    e = MASKS[name]
    mask = e.mask.shift(q=0) if e.mask.lengths.q[0] == 1 else e.mask
    again = way(mask)
    assert type(again) is Mask
    assert again is not mask
    assert (again.label, again.lengths, again.frame) == (mask.label, mask.lengths, mask.frame)
    assert [t.key for t in again.axes] == [t.key for t in mask.axes]
    assert torch.equal(dense(again, e), dense(mask, e))
    traces = [trace_cached(m, "mask", CPU) for m in (mask, again)]
    assert traces[0].root is traces[1].root


@pytest.mark.parametrize("name", MODS)
@every_way
def test_mods_of_the_library(name: str, way: Callable[[Any], Any]) -> None:
    mod = MODS[name].mod
    again = way(mod)
    assert type(again) is ScoreMod
    assert repr(again) == repr(mod)
    traces = [trace_cached(m, "score", CPU) for m in (mod, again)]
    assert traces[0].root is traces[1].root
    for one, other in zip(*(t.tensors for t in traces), strict=True):
        assert torch.equal(one, other)
        assert one.requires_grad == other.requires_grad


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, Mask):
        value = value.call
    if isinstance(value, tuple | list):
        return [t for v in value for t in tensors_of(v)]
    return [value] if isinstance(value, Tensor) else []


@pytest.mark.parametrize("name", [n for n, e in MASKS.items() if tensors_of(e.mask)])
def test_edits_of_arguments_change_a_mask_and_its_copies_alike(name: str) -> None:
    e = MASKS[name]
    assert e.mask.call is not None
    build, args, kwargs = copy.deepcopy(e.mask.call)
    mask = build(*args, **kwargs)
    for t in tensors_of((args, kwargs)):
        t.copy_(t.sort(dim=-1).values)  # values that are still valid
    assert torch.equal(dense(pickled(mask), e), dense(mask, e))


def test_edits_after_the_call_are_those_of_the_mask() -> None:
    lengths, ids = torch.tensor([3, 5]), torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
    read, live = document_from_lengths(lengths), document(ids)
    expected = create_mask(read, None, None, 8, 8)
    lengths.copy_(torch.tensor([1, 7]))
    assert torch.equal(create_mask(pickled(read), None, None, 8, 8), expected)
    ids.fill_(0)
    assert create_mask(pickled(live), None, None, 8, 8).all()


def test_lists_are_kept_as_they_were() -> None:
    shape, parts = [4, 4], [causal(), sliding_window(3)]
    grid, heads = masks.natten(shape, 3), attnkit.per_head(parts)
    shape[0], parts[0] = 2, parts[1]
    assert pickled(grid).lengths == grid.lengths
    assert torch.equal(*(create_mask(m, 1, 2, 9, 9) for m in (pickled(heads), heads)))


@every_way
def test_algebra(way: Callable[[Any], Any]) -> None:
    mask = ~(causal() & sliding_window(3)) | Mask(attnkit.noop_mask, "all") ^ Mask(every_second)
    again = way(mask)
    assert repr(again) == repr(mask)
    assert torch.equal(*(create_mask(m, None, None, 9, 9) for m in (mask, again)))


def every_second(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return kv % 2 == 0


@every_way
def test_block_masks_and_variants(way: Callable[[Any], Any]) -> None:
    mask = create_block_mask(causal() & sliding_window(9), 2, 2, 32, 32, BLOCK_SIZE=8)
    again = way(mask)
    assert (again.shape, again.BLOCK_SIZE) == (mask.shape, mask.BLOCK_SIZE)
    assert torch.equal(again.runs.states(), mask.runs.states())
    variant = way(Variant(alibi(2), mask))
    query = torch.randn(2, 2, 32, 8)
    found = variant(query, query, query)
    assert torch.equal(found, attnkit.flex_attention(query, query, query, alibi(2), mask))


def test_the_copy_of_a_module_reads_its_own_parameters() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slopes = torch.nn.Parameter(torch.ones(2))
            self.mod = alibi(self.slopes).shift(q=1)

    model = Model()
    for other in (copy.deepcopy(model), model.double()):
        assert trace_cached(other.mod, "score", CPU).tensors[0] is other.slopes
    assert copy.deepcopy(model).slopes is not model.slopes
    mask = document(torch.zeros(8, dtype=torch.int32))
    assert copy.copy(mask).function is mask.function
    assert copy.deepcopy(mask).axes[0].table is not mask.axes[0].table


@every_way
def test_names_are_assigned_as_those_of_functions(way: Callable[[Any], Any]) -> None:
    for value in (causal(), attnkit.and_masks(causal(), every_second), alibi(2)):
        before = value.__name__
        assert before == value.label
        value.__name__ = "near"
        assert repr(way(value)) == value.label == "near"
    with pytest.raises(attnkit.ArgumentError, match="__name__ must be a str, got int"):
        value.__name__ = 3
    assert (Mask.__name__, type(value).__name__) == ("Mask", "ScoreMod")


def closure(n: int) -> Any:
    return lambda b, h, q, kv: q - kv < n


UNNAMED = {
    "mask": lambda: Mask(closure(3)),
    "part": lambda: causal() & closure(3),
    "within": lambda: ~(causal() | causal() & Mask(closure(3))),
    "partial": lambda: Mask(functools.partial(closure(3))),
    "score_mod": lambda: ScoreMod(lambda s, b, h, q, kv: s),
    "block_mask": lambda: create_block_mask(closure(3), None, None, 8, 8),
    "variant": lambda: Variant(None, closure(3)),
    "shift": lambda: Mask(closure(3)).shift(q=1),
    "per_head": lambda: attnkit.per_head([causal(), closure(3)]),
    "argument": lambda: nearest(3, also=closure(3)),
    "option": lambda: document_from_lengths(torch.tensor([8]), within=closure(3)),
    "compose": lambda: mods.compose(alibi(2), lambda s, b, h, q, kv: s),
}


@pytest.mark.parametrize("make", UNNAMED.values(), ids=UNNAMED)
def test_functions_without_a_name_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(PicklingError, match=r"<lambda> \(.*test_pickling.py:\d+\).*@attnkit.pick"):
        pickle.dumps(make())
    with pytest.raises(pickle.PicklingError):
        saved(make())
    copy.deepcopy(make())


@attnkit.picklable
def nearest(n: int, *, also: Any = None) -> Mask:
    """Keep the `n` nearest keys before the query."""
    near = Mask(closure(n), f"nearest({n})")
    return near if also is None else near | also


def test_functions_of_the_user() -> None:
    mask = nearest(3, also=causal())
    assert torch.equal(*(create_mask(m, None, None, 9, 9) for m in (pickled(mask), mask)))
    assert nearest.__doc__ == "Keep the `n` nearest keys before the query."
    with pytest.raises(attnkit.ArgumentError, match="nearest has no argument 'm'"):
        attnkit.picklable("m")(nearest.__wrapped__)
    with pytest.raises(attnkit.ArgumentError, match="takes names of its arguments, got int"):
        attnkit.picklable(3)
    with pytest.raises(attnkit.ArgumentError, match="decorates a function, got the class dict"):
        attnkit.picklable(dict)


class Kept:
    """Holds what picklable may decorate, and what it may not."""

    @attnkit.picklable
    def nearest(self, n: int) -> Mask:
        return Mask(closure(n))

    @staticmethod
    @attnkit.picklable
    def nearest_of_none(n: int) -> Mask:
        return Mask(closure(n))

    @classmethod
    def every_second(cls, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return kv % 2 == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: Kept().nearest(3),
        lambda: Kept.nearest_of_none(3),
        lambda: Mask(Kept.every_second),
        lambda: Mask(Kept().every_second),
        lambda: nearest(3, also=functools.partial(every_second)),
    ],
)
def test_methods_can_be_pickled(make: Callable[[], Mask]) -> None:
    mask = make()
    assert torch.equal(*(create_mask(m, None, None, 9, 9) for m in (pickled(mask), mask)))


def test_objects_of_local_classes_are_refused() -> None:
    class Local:
        def __call__(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return q >= kv

    for mask in (Mask(Local()), attnkit.per_head([Local()]), Mask(Local().__call__)):
        with pytest.raises(PicklingError, match=r"class test_objects_.*Local cannot be pickled"):
            pickle.dumps(mask)


class Holder:
    """A mask_mod that reads another one, and refers to itself."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.parts = inner, [self]

    def __call__(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return self.inner(b, h, q, kv)


def test_attributes_of_an_object_are_checked() -> None:
    mask = Mask(Holder(causal()))
    assert torch.equal(*(create_mask(m, None, None, 9, 9) for m in (pickled(mask), mask)))
    with pytest.raises(PicklingError, match="<lambda>"):
        pickle.dumps(Mask(Holder(closure(3))))
    theirs = torch_flex.create_block_mask(closure(3), None, None, 8, 8, "cpu")
    with pytest.raises(PicklingError, match="<lambda>"):
        pickle.dumps(Variant(None, theirs))


def test_picklers_that_store_code_store_functions_without_a_name() -> None:
    scope: dict[str, Any] = {"__name__": "cloudpickle.cloudpickle"}
    exec("def reduce(mask):\n    return mask.__reduce__()", scope)
    assert scope["reduce"](Mask(closure(3)))[2][1]["label"] == "<lambda>"


class Batches(Dataset[Any]):
    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 2

    def __getitem__(self, at: int) -> Any:
        return self.make(at)


def packed(at: int) -> Any:
    return document_from_lengths(torch.tensor([at + 1, 7 - at])) & causal()


def unnamed(at: int) -> Any:
    return causal() & closure(at)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_a_data_loader(context: str) -> None:
    """A worker that could not pickle its mask left the loader waiting forever."""
    loader = DataLoader(Batches(packed), None, num_workers=1, multiprocessing_context=context)
    for at, mask in enumerate(loader):
        assert torch.equal(*(create_mask(m, None, None, 8, 8) for m in (mask, packed(at))))


def test_only_the_thread_of_a_queue_pickles_an_error() -> None:
    """Its errors would be lost, so that the receiver raises them."""
    with pytest.raises(PicklingError, match="lambda"):
        pickle.dumps(unnamed(1))
    found: list[bytes] = []
    thread = threading.Thread(
        target=lambda: found.append(pickle.dumps(unnamed(1))), name="QueueFeederThread"
    )
    thread.start()
    thread.join()
    with pytest.raises(PicklingError, match="lambda"):
        pickle.loads(found[0])


def unnamed_blocks(at: int) -> Any:
    return create_block_mask(closure(at + 1), None, None, 8, 8)


def unnamed_argument(at: int) -> Any:
    return attnkit.per_head([closure(at + 1), causal()])


@pytest.mark.parametrize("make", [unnamed, unnamed_blocks, unnamed_argument])
def test_workers_that_cannot_pickle_raise(make: Callable[[int], Any]) -> None:
    loader = DataLoader(Batches(make), None, num_workers=1, timeout=60)
    with pytest.raises(PicklingError, match="<lambda>"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("callers", "by_code"),
    [
        (["attnkit.tracing.pickling", "copyreg", "pickle", "cloudpickle.cloudpickle"], True),
        (["attnkit", "joblib.externals.cloudpickle", "another"], True),
        (["pickle", "dill", "__main__"], True),
        (["dill._dill"], True),
        (["attnkit", "another", "dill"], False),
        (["None", "cloudpickle"], False),
        (["another.pickle"], False),
        (["attnkit", "copyreg", "pickle"], False),
    ],
)
def test_the_innermost_caller_beyond_pickle_is_the_pickler(
    callers: list[str], by_code: bool
) -> None:
    assert stores_code(callers) == by_code


@pytest.mark.parametrize(
    ("module", "by_code"),
    [
        ("cloudpickle.cloudpickle", True),
        ("joblib.externals.cloudpickle", True),
        ("dill", True),
        ("dill._dill", True),
        ("another.module", False),
        ("dilled", False),
    ],
)
def test_the_pickler_is_found_behind_those_of_python(module: str, by_code: bool) -> None:
    """Between a pickler and the mask there may be frames of pickle and copyreg."""
    scopes = [{"__name__": name} for name in ("attnkit.made", "copyreg", "pickle", module)]
    call: Callable[[Any], Any] = lambda mask: mask.__reduce__()
    for scope in scopes:
        scope["inner"] = call  # type: ignore[assignment]
        exec("def outer(mask):\n    return inner(mask)", scope)
        call = scope["outer"]  # type: ignore[assignment]
    scopes[0]["inner"] = Mask.__reduce__  # type: ignore[assignment]
    if by_code:
        assert call(Mask(closure(3)))[2][1]["label"] == "<lambda>"
    else:
        with pytest.raises(PicklingError, match="<lambda>"):
            call(Mask(closure(3)))


class Noted(Mask):
    """A mask with an attribute of its own, in a dict."""

    __slots__ = ("__dict__", "own")
    own: Any


def test_copies_of_a_subclass_have_their_own_attributes() -> None:
    mask = Noted(causal().function, "noted")
    mask.note, mask.own = [1], [2]  # type: ignore[attr-defined]
    shallow, deep = copy.copy(mask), copy.deepcopy(mask)
    for other in (shallow, deep):
        assert (other.note, other.own, other.label) == ([1], [2], "noted")  # type: ignore[attr-defined]
        other.more = 3  # type: ignore[attr-defined]
        assert not hasattr(mask, "more")
    assert shallow.own is mask.own
    assert deep.own is not mask.own
