"""Suggest alternatives to torch functions that a score_mod or mask_mod cannot call."""

from __future__ import annotations

_PRODUCT = (
    "the function sees one score at a time: compute the product outside of it, capture the result "
    "and index that; of two captured rows torch.dot(a[i], b[j]) is the product"
)
_ROW = (
    "the function sees one number and no row: compute this on a tensor outside of the function, "
    "capture the result and index that, as table[h, kv]"
)
_RANDOM = (
    "draw the numbers outside of the function, capture the tensor and index it; or apply dropout to "
    "the output of attention"
)
_LOOKUP = "index the table: weight[i]"
_SHAPE = "the function sees one number and no shape: index captured tensors instead"
_STATE = "do this outside of the function"
_OTHER = (
    "write it with elementwise torch functions, or compute it on a tensor outside of the function, "
    "capture the result and index that"
)

_INSTEAD = {
    "embedding_bag one_hot": _LOOKUP,
    "bilinear bmm addmm addmv addbmm baddbmm einsum tensordot outer ger kron cdist "
    "multi_dot chain_matmul matrix_power cosine_similarity pairwise_distance conv1d conv2d "
    "scaled_dot_product_attention": _PRODUCT,
    "cumsum cumprod cummax cummin logcumsumexp diff sort argsort msort topk kthvalue median mode "
    "unique unique_consecutive nonzero count_nonzero argmax argmin softmax log_softmax softmin "
    "logsumexp layer_norm rms_norm batch_norm group_norm instance_norm normalize norm var std "
    "var_mean std_mean prod trapezoid gradient histc bincount quantile renorm": _ROW,
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout "
    "native_dropout rrelu gumbel_softmax bernoulli multinomial normal poisson rand randn randint "
    "randperm rand_like randn_like randint_like": _RANDOM,
    "cat concat concatenate hstack vstack dstack tile repeat repeat_interleave roll flip fliplr "
    "rot90 permute transpose swapaxes movedim view_as expand_as unfold split chunk unbind tril triu "
    "diag diagonal masked_select scatter scatter_add index_add index_put unflatten broadcast_to "
    "meshgrid pad interpolate": _SHAPE,
    "backward register_hook retain_grad requires_grad_ save share_memory_ pin_memory": _STATE,
}
_BY_NAME = {name: text for names, text in _INSTEAD.items() for name in names.split()}


def instead_of(name: str) -> str:
    """Return advice on what to write instead of the torch function `name`."""
    return _BY_NAME.get(name.partition(".")[0], _OTHER)  # "cumsum.default" of torch.ops.aten
