"""Define the public functions with valid arguments, some of which `misuse` replaces."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import checkpoint

import attnkit
from attnkit import flex, masks, testing
from attnkit.cli import main
from attnkit.inspection import picture, summary
from attnkit.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
from attnkit.integrations.torch_attention import varlen_attn

INT, FLAG, TEXT = ("number",), ("number", "object"), ("text",)
FUNCTION, MASK, TENSOR = ("function",), ("function", "block mask"), ("tensor",)
DEVICE, ANY = ("text", "object"), ("object", "number")


@dataclass(frozen=True)
class Subject:
    """Hold a function to misuse.

    Attributes:
        call: calls the function with a dict of arguments and uses the result.
        arguments: builds valid arguments.
        kinds: the likely kinds of garbage for each argument.
    """

    call: Callable[[Mapping[str, Any]], Any]
    arguments: Callable[[], Mapping[str, Any]]
    kinds: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def halve(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score / 2


def _inputs() -> dict[str, Tensor]:
    return {n: torch.randn(2, 2, 16, 8, requires_grad=True) for n in ("query", "key", "value")}


CALL: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("query", "key", "value"), TENSOR),
    "score_mod": FUNCTION,
    "block_mask": MASK,
    "scale": INT,
    **dict.fromkeys(("enable_gqa", "return_lse", "deterministic"), FLAG),
    "kernel_options": ("object",),
    "return_aux": ("object",),
    "backend": TEXT,
    "sink": TENSOR,
    "normalization": TEXT,
    "dropout_p": INT,
}
MASKED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("mask_mod", "mod_fn", "mask", "function"), MASK),
    **dict.fromkeys(("B", "H", "Q_LEN", "KV_LEN", "BLOCK_SIZE"), INT),
    **dict.fromkeys(("batch", "heads", "q_len", "kv_len", "head_dim", "sms", "width"), INT),
    **dict.fromkeys(("device", "dtype"), DEVICE),
    **dict.fromkeys(("at", "block", "lengths", "new_q_len", "new_kv_len", "q", "kv"), ANY),
    **dict.fromkeys(("arch", "backend", "label", "path", "target", "code", "title"), TEXT),
    **dict.fromkeys(("examples", "seed", "low", "high", "depth", "spread"), INT),
}
KINDS = CALL | MASKED


def _tensors_of(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    return [t for y in x for t in _tensors_of(y)] if isinstance(x, tuple) else []


def _attend(arguments: Mapping[str, Any]) -> None:
    """Call the operator with valid arguments once, then twice with `arguments`, with backwards."""
    right = _flex_arguments()
    attnkit.flex_attention(**right)
    for _ in range(2):
        result = attnkit.flex_attention(**arguments)
        outputs = [t for t in _tensors_of(result) if t.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])


def _flex_arguments() -> dict[str, Any]:
    return {
        **_inputs(),
        "score_mod": halve,
        "block_mask": causal,
        "scale": 0.5,
        "enable_gqa": False,
        "return_lse": False,
        "kernel_options": None,
        "return_aux": None,
        "backend": "auto",
        "deterministic": False,
        "sink": torch.randn(2, requires_grad=True),
        "normalization": "softmax",
        "dropout_p": 0.25,
    }


def _functions(arguments: Mapping[str, Any]) -> None:
    """Call the operator with `arguments` as score_mod and mask; all other arguments are valid."""
    attnkit.flex_attention(**_inputs(), **arguments).sum().backward()
    attnkit.flex_attention(**_inputs(), **arguments, backend="eager").sum().backward()


def _block_mask(arguments: Mapping[str, Any]) -> None:
    mask = attnkit.create_block_mask(**arguments)
    assert mask.runs is not None
    assert mask.sparsity() >= 0
    mask.to_dense()
    mask.to_flex()
    repr(mask)
    attnkit.flex_attention(*(torch.zeros(2, 2, n, 8) for n in mask.seq_lengths[:1]), *_pair(mask))


def _flex_block_mask(arguments: Mapping[str, Any]) -> None:
    mask = flex.create_block_mask(**arguments)
    assert mask.sparsity() <= 100
    assert mask.as_tuple()
    assert mask._adjust(16, 16).kv_indices.numel()
    repr(mask)


def _drop_in_arguments() -> dict[str, Any]:
    return {**_flex_arguments(), "scale": torch.tensor(0.5)}


def _flex_attend(arguments: Mapping[str, Any]) -> None:
    outputs = [t for t in _tensors_of(flex.flex_attention(**arguments)) if t.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])


def _pair(mask: Any) -> tuple[Tensor, Tensor, None, Any]:
    key = torch.zeros(2, 2, mask.seq_lengths[1], 8)
    return key, key, None, mask


def _method(name: str) -> Callable[[Mapping[str, Any]], Any]:
    def call(arguments: Mapping[str, Any]) -> None:
        mask = attnkit.create_block_mask(causal, 2, 2, 32, 32, "cpu", 16)
        getattr(mask, name)(*arguments.values())

    return call


def _constructor(arguments: Mapping[str, Any]) -> None:
    mask = attnkit.BlockMask(**arguments)
    assert mask.runs is not None
    mask.to_flex()


def _kv_blocks(arguments: Mapping[str, Any]) -> None:
    attnkit.BlockMask.from_kv_blocks(**arguments)


def _mask(arguments: Mapping[str, Any]) -> None:
    mask = attnkit.Mask(arguments["function"], arguments["label"], lengths=arguments["lengths"])
    both = mask & masks.causal() | ~mask
    repr(both)
    moved = both.shift(arguments["q"], arguments["kv"])
    attnkit.create_block_mask(moved, 1, 1, 16, 16).to_dense()


def _operators(arguments: Mapping[str, Any]) -> None:
    other = arguments["mask"]
    if isinstance(other, Tensor) or not hasattr(type(other), "__and__"):
        for combine in (lambda m: m & other, lambda m: m | other, lambda m: m ^ other):
            combine(masks.causal())


def _several(combine: Callable[..., Any], listed: bool) -> Callable[[Mapping[str, Any]], Any]:
    def call(arguments: Mapping[str, Any]) -> None:
        parts = list(arguments.values())
        mask = combine(parts) if listed else combine(*parts)
        attnkit.create_block_mask(mask, 2, 2, 16, 16).to_dense()
        repr(mask)

    return call


def _variant(arguments: Mapping[str, Any]) -> None:
    variant = attnkit.Variant(arguments["score_mod"], arguments["mask"])
    str(variant)
    hash(variant)
    variant.trace(arguments["device"])
    variant(*_inputs().values(), scale=arguments["scale"])


def _explain(arguments: Mapping[str, Any]) -> None:
    explanation = attnkit.explain(**arguments)
    if arguments["arch"] is None:  # with an architecture the text takes a minute
        str(explanation)


def _intervals(arguments: Mapping[str, Any]) -> None:
    form = attnkit.intervals(**arguments)
    if form is not None:
        str(form)
        form.rows()


def _check(arguments: Mapping[str, Any]) -> None:
    testing.check_variant(**arguments)


def _case(arguments: Mapping[str, Any]) -> None:
    case = testing.Case(**arguments)
    str(case)
    case.code()
    case.inputs()
    case.cotangents()


def _limits(arguments: Mapping[str, Any]) -> None:
    limits = testing.Limits(**arguments)
    for strategy in (testing.cases(limits), testing.variants(limits), testing.mask_mods(limits)):
        repr(strategy)


def _strategies(arguments: Mapping[str, Any]) -> None:
    a = arguments
    assert isinstance(testing.lengths(a["low"], a["high"]), st.SearchStrategy)
    testing.cases(a["limits"], dtype=a["dtype"]).validate()
    testing.mask_mods(a["limits"], depth=a["depth"]).validate()
    testing.score_mods(a["limits"], depth=a["depth"]).validate()
    testing.masks(a["limits"]).validate()
    testing.library_masks(a["limits"]).validate()
    testing.library_mods(a["limits"]).validate()


def _load(arguments: Mapping[str, Any]) -> None:
    testing.load(arguments["target"])
    testing.load_object(arguments["target"])


def _pictures(arguments: Mapping[str, Any]) -> None:
    picture.show(**arguments)


def _save(arguments: Mapping[str, Any]) -> None:
    picture.save(**arguments)


def _command(name: str) -> Callable[[Mapping[str, Any]], Any]:
    def call(arguments: Mapping[str, Any]) -> None:
        argv = [name, _text(arguments.get("target", ""))]
        for option, value in arguments.items():
            if option != "target":
                argv += [f"--{option}", *([] if value is None else [_text(value)])]
        status = main(argv if name != "doctor" else argv[:1] + argv[2:])
        assert status in (0, 1, 2), status

    return call


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception:
        return "?"


# --- calls in states that a user may bring about -----------------------------------------------
def _bias(t: Any) -> Any:
    return lambda score, b, h, q, kv: score + t[h, kv % 8]


def _captured(arguments: Mapping[str, Any]) -> None:
    """Replace the data of a captured tensor after a call, then call again."""
    t = nn.Parameter(torch.zeros(2, 8))
    mod = _bias(t)
    attnkit.flex_attention(*_inputs().values(), mod).sum().backward()
    new, t.grad = arguments["data"], None
    try:
        t.data = new
    except Exception:  # torch refuses it
        return
    attnkit.flex_attention(*_inputs().values(), mod).sum().backward()


def _converted(arguments: Mapping[str, Any]) -> None:
    """Convert the module that owns a captured parameter after a call, then call again."""
    swap = torch.__future__.get_swap_module_params_on_conversion()
    module = nn.Module()
    module.table = nn.Parameter(torch.zeros(2, 8))
    mod = _bias(module.table)
    attnkit.flex_attention(*_inputs().values(), mod).sum().backward()
    module.table.grad = None
    torch.__future__.set_swap_module_params_on_conversion(bool(arguments["swap"] is True))
    try:
        module.to(arguments["to"])
    except Exception:  # torch refuses it
        return
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swap)
    attnkit.flex_attention(*_inputs().values(), mod).sum().backward()


def _transformed(arguments: Mapping[str, Any]) -> None:
    """Call the operator inside a torch transform or with another kind of differentiation."""
    inputs = _inputs()
    query, key, value = inputs.values()
    how, score_mod, mask = arguments["how"], arguments["score_mod"], arguments["block_mask"]
    attend = lambda q: attnkit.flex_attention(q, key, value, score_mod, mask)
    if how == "vmap":
        torch.vmap(attend)(query.detach()[None])
    elif how == "grad":
        torch.func.grad(lambda q: attend(q).sum())(query.detach())
    elif how == "jvp":
        torch.func.jvp(attend, (query.detach(),), (query.detach(),))
    elif how == "forward mode":
        with torch.autograd.forward_ad.dual_level():
            attend(torch.autograd.forward_ad.make_dual(query.detach(), query.detach()))
    elif how == "batched gradients":
        out = attend(query)
        torch.autograd.grad(out, query, torch.ones(3, *out.shape), is_grads_batched=True)
    elif how == "second derivative":
        (grad,) = torch.autograd.grad(attend(query).sum(), query, create_graph=True)
        grad.sum().backward()
    elif how == "jacobian":
        torch.autograd.functional.jacobian(attend, query[:1, :1, :2], vectorize=True)
    elif how == "checkpoint":
        checkpoint.checkpoint(attend, query, use_reentrant=False).sum().backward()
    elif how == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            attend(query).sum().backward()
    elif how == "inference":
        with torch.inference_mode():
            attend(query)
    elif how == "scripted":
        torch.jit.trace(attend, query.detach(), check_trace=False)
    elif how == "functionalize":
        torch.func.functionalize(attend)(query.detach())


TRANSFORMS = (
    *("vmap", "grad", "jvp", "forward mode", "batched gradients", "second derivative"),
    *("jacobian", "checkpoint", "autocast", "inference", "functionalize"),
)


def _state(how: str) -> Subject:
    return Subject(
        lambda a: _transformed({**a, "how": how}),
        lambda: {"score_mod": halve, "block_mask": causal},
        KINDS,
    )


def _case_arguments() -> dict[str, Any]:
    return {"q_len": 5, "kv_len": 7, "batch": 1, "heads": 2, "kv_heads": 1, "kv_batch": 1} | {
        "head_dim": 8,
        "value_dim": 8,
        "dtype": torch.float32,
        "layouts": ("contiguous",) * 3,
        "block": (16, 16),
        "scale": None,
        "spread": 1.0,
        "seed": 0,
    }


_OUTPUT = str(Path(gettempdir()) / "attnkit-misuse.svg")


def _packed_arguments() -> dict[str, Any]:
    offsets = torch.tensor([0, 5, 16], dtype=torch.int32)
    tensors = {n: torch.randn(16, 2, 8, requires_grad=True) for n in ("q", "k", "v")}
    return {
        **tensors,
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets.clone(),
        "max_seqlen_q": 11,
        "max_seqlen_k": 11,
        **_flash_options(),
        "block_table": None,
    }


def _flash_arguments() -> dict[str, Any]:
    tensors = {n: torch.randn(2, 16, 2, 8, requires_grad=True) for n in ("q", "k", "v")}
    return {**tensors, **_flash_options()}


def _flash_options() -> dict[str, Any]:
    return {
        "dropout_p": 0.0,
        "softmax_scale": 0.5,
        "causal": True,
        "window_size": (4, -1),
        "softcap": 5.0,
        "alibi_slopes": torch.rand(2, requires_grad=True),
        "deterministic": False,
        "return_attn_probs": False,
        "return_softmax_lse": False,
        "score_mod": halve,
        "mask": causal,
        "backend": "auto",
    }


def _varlen_arguments() -> dict[str, Any]:
    offsets = torch.tensor([0, 5, 16], dtype=torch.int32)
    tensors = {n: torch.randn(16, 2, 8, requires_grad=True) for n in ("query", "key", "value")}
    return {
        **tensors,
        "cu_seq_q": offsets,
        "cu_seq_k": offsets.clone(),
        "max_q": 11,
        "max_k": 11,
        "return_aux": None,
        "scale": 0.5,
        "window_size": (4, 0),
        "enable_gqa": False,
        "seqused_k": torch.tensor([3, 11], dtype=torch.int32),
        "block_table": None,
        "num_splits": None,
        "score_mod": halve,
        "mask": causal,
        "deterministic": False,
        "backend": "auto",
    }


def _differentiated(function: Callable[..., Any]) -> Callable[[Mapping[str, Any]], None]:
    """Return a call of `function` twice, each with its backward."""

    def call(arguments: Mapping[str, Any]) -> None:
        for _ in range(2):
            outputs = [t for t in _tensors_of(function(**arguments)) if t.requires_grad]
            if outputs:
                torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])

    return call


PACKED: dict[str, tuple[str, ...]] = KINDS | {
    **dict.fromkeys(("q", "k", "v", "alibi_slopes", "block_table"), TENSOR),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "cu_seq_q", "cu_seq_k", "seqused_k"), TENSOR),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k", "max_q", "max_k", "num_splits"), INT),
    **dict.fromkeys(("dropout_p", "softmax_scale", "softcap"), INT),
    **dict.fromkeys(("causal", "return_attn_probs", "return_softmax_lse"), FLAG),
    "window_size": ANY,
    "mask": FUNCTION,
}


SUBJECTS: dict[str, Subject] = {
    "flex_attention": Subject(_attend, _flex_arguments, KINDS),
    "flex_attention, functions": Subject(
        _functions, lambda: {"score_mod": halve, "block_mask": causal}, KINDS
    ),
    "flex.flex_attention": Subject(_flex_attend, _drop_in_arguments, KINDS),
    "flash_attn_func": Subject(_differentiated(flash_attn_func), _flash_arguments, PACKED),
    "flash_attn_varlen_func": Subject(
        _differentiated(flash_attn_varlen_func), _packed_arguments, PACKED
    ),
    "varlen_attn": Subject(_differentiated(varlen_attn), _varlen_arguments, PACKED),
    "flex.create_block_mask": Subject(
        _flex_block_mask,
        lambda: (
            {"mask_mod": causal, "B": 2, "H": 2, "Q_LEN": 32, "KV_LEN": 32, "device": "cpu"}
            | {"BLOCK_SIZE": 16, "compute_dq_write_order": False, "dq_kv_order": True}
        ),
        KINDS,
    ),
    "create_mask": Subject(
        lambda a: attnkit.create_mask(**a),
        lambda: {"mod_fn": causal, "B": 2, "H": 2, "Q_LEN": 16, "KV_LEN": 16, "device": "cpu"},
        KINDS,
    ),
    "create_block_mask": Subject(
        _block_mask,
        lambda: (
            {"mask_mod": causal, "B": 2, "H": 2, "Q_LEN": 32, "KV_LEN": 32, "device": "cpu"}
            | {"BLOCK_SIZE": 16, "_compile": False}
        ),
        KINDS,
    ),
    "BlockMask": Subject(
        _constructor,
        lambda: (
            {"mask_mod": causal, "batch": 1, "heads": 1, "q_len": 32, "kv_len": 32}
            | {"block": (16, 16), "device": "cpu"}
        ),
        KINDS,
    ),
    "BlockMask.from_kv_blocks": Subject(
        _kv_blocks,
        lambda: {
            "kv_num_blocks": torch.ones(1, 1, 2, dtype=torch.int32),
            "kv_indices": torch.zeros(1, 1, 2, 2, dtype=torch.int32),
            "BLOCK_SIZE": 16,
            "mask_mod": causal,
        },
        {**KINDS, "kv_num_blocks": TENSOR, "kv_indices": TENSOR},
    ),
    **{
        f"BlockMask.{name}": Subject(_method(name), functools.partial(dict, values), KINDS)
        for name, values in {
            "to": {"device": "cpu"},
            "_adjust": {"new_q_len": 16, "new_kv_len": 16},
            "__getitem__": {"at": 0},
            "checked_runs": {"dtype": torch.float32, "block": (16, 16)},
        }.items()
    },
    "Mask": Subject(
        _mask,
        lambda: {"function": causal, "label": "causal", "lengths": None, "q": 1, "kv": None},
        KINDS,
    ),
    "Mask operators": Subject(_operators, lambda: {"mask": causal}, {"mask": ("object", "tensor")}),
    "and_masks": Subject(
        _several(attnkit.and_masks, False), lambda: {"mask": causal, "function": causal}, KINDS
    ),
    "or_masks": Subject(
        _several(attnkit.or_masks, False), lambda: {"mask": causal, "function": causal}, KINDS
    ),
    "per_head": Subject(
        _several(attnkit.per_head, True), lambda: {"mask": causal, "function": causal}, KINDS
    ),
    "per_batch": Subject(
        _several(attnkit.per_batch, True), lambda: {"mask": causal, "function": causal}, KINDS
    ),
    "per_head of an object": Subject(
        lambda a: (attnkit.per_head(a["at"]), attnkit.per_batch(a["at"])), lambda: {"at": [causal]}
    ),
    "Variant": Subject(
        _variant,
        lambda: {"score_mod": halve, "mask": causal, "device": torch.device("cpu"), "scale": 1.0},
        KINDS,
    ),
    "merge_states": Subject(
        lambda a: attnkit.merge_states(**a),
        lambda: (
            {"out_a": torch.zeros(2, 8), "lse_a": torch.zeros(2)}
            | {"out_b": torch.zeros(2, 8), "lse_b": torch.zeros(2)}
        ),
        dict.fromkeys(("out_a", "out_b", "lse_a", "lse_b"), TENSOR),
    ),
    "explain": Subject(
        _explain,
        lambda: (
            {"score_mod": halve, "block_mask": causal, "q_len": 64, "kv_len": 64, "batch": 1}
            | {
                "heads": 1,
                "head_dim": 64,
                "device": "cpu",
                "kernel_options": None,
                "backend": "auto",
            }
            | {"dtype": torch.bfloat16, "sms": None, "arch": None, "normalization": "softmax"}
            | {"sink": None, "dropout_p": 0.0, "return_aux": None}
        ),
        KINDS,
    ),
    "intervals": Subject(
        _intervals,
        lambda: {"mask": causal, "q_len": 16, "kv_len": 16, "batch": 1, "heads": 1, "device": None},
        KINDS,
    ),
    "check_variant": Subject(
        _check,
        lambda: (
            {"score_mod": halve, "mask": causal, "q_len": 8, "kv_len": 8, "batch": 1}
            | {"heads": 1, "dtype": torch.float32, "examples": 1, "seed": 0, "device": "cpu"}
            | {"backends": ("eager", "cpu"), "code": "", "progress": None}
        ),
        KINDS,
    ),
    "check_case": Subject(
        lambda a: testing.check_case(**a),
        lambda: (
            {"variant": attnkit.Variant(halve, causal), "case": testing.Case(5, 5)}
            | {"device": "cpu", "backends": ("cpu",)}
        ),
        KINDS,
    ),
    "Case": Subject(_case, _case_arguments, KINDS),
    "Limits": Subject(
        _limits, lambda: {n: (1, 4) for n in ("q_len", "kv_len", "batch", "heads")}, {}
    ),
    "strategies": Subject(
        _strategies,
        lambda: {"low": 1, "high": 4, "limits": testing.Limits(), "dtype": None, "depth": 1},
        KINDS,
    ),
    "load": Subject(_load, lambda: {"target": "masks:causal()"}, KINDS),
    "picture.show": Subject(
        _pictures,
        lambda: (
            {"mask": causal, "q_len": 64, "kv_len": 64, "batch": 1, "heads": 1, "at": (0, 0)}
            | {"block": 16, "device": "cpu", "width": 20, "plain": True}
        ),
        KINDS,
    ),
    "picture.save": Subject(
        _save, lambda: {"path": _OUTPUT, "mask": causal, "q_len": 64, "kv_len": 64}, KINDS
    ),
    "summarize": Subject(
        lambda a: str(summary.summarize(a["blocks"])),
        lambda: {"blocks": attnkit.create_block_mask(causal, 1, 1, 64, 64, "cpu", 16)},
        {"blocks": MASK},
    ),
    "captured data": Subject(_captured, lambda: {"data": torch.ones(2, 8)}, {"data": TENSOR}),
    "module.to": Subject(
        _converted, lambda: {"to": torch.float64, "swap": True}, {"to": DEVICE, "swap": FLAG}
    ),
    **{how: _state(how) for how in TRANSFORMS},
    **{
        f"attnkit {name}": Subject(_command(name), functools.partial(dict, values), kinds)
        for kinds in ({n: ("text", "number") for n in ("target", "q-len", "heads", "batch")},)
        for name, values in {
            "show": {"target": "masks:causal()", "q-len": 64, "heads": 1, "at": "0,0", "block": 16},
            "explain": {
                "target": "masks:causal()",
                "q-len": 64,
                "dtype": "float32",
                "device": "cpu",
                "normalization": "softmax1",
                "dropout": 0.1,
            },
            "check": {"target": "masks:causal()", "q-len": 8, "examples": 1, "seed": 0}
            | {"normalization": "none"},
            "compile": {"target": "masks:causal()", "arch": "sm_75", "head-dim": 7},
            "emulate": {"target": "masks:causal()", "arch": "sm_75", "q-len": 16, "mode": "x"},
            "doctor": {"nothing": None},
        }.items()
    },
}
