"""Connect attnkit to other libraries: one subpackage for each, loaded by its name.

In: calls and masks in the form of the other library. Out: calls of `attnkit.flex_attention`. Users
import a subpackage by its name. Importing this package imports none of the other libraries. `packed`
is what `flash_attn`, `torch_attention` and others share.
"""
