"""Support `flex_attention` inside `torch.compile` and on tensors without data.

In: a call whose tensors are symbolic. Out: one operator in the graph, which prepares the call when
it runs. Only `runtime.api` imports this package.
"""
