"""Execute the PTX instructions that access memory, barriers, tensor cores or other lanes.

In: a gang of warps and operands. Out: values of registers, and changes to the simulated machine.
Code generated from PTX calls these functions by name (`namespace`). They follow the PTX ISA, and
raise `Trap` for what it forbids. Instructions of one lane alone are numpy expressions in that code,
or functions of `numerics`.

Arguments with the same meaning in all modules:

- gang: warps of one CTA that execute the instruction together.
- m: mask of the active lanes; the object `gang.full` if all lanes are active.
- dt: numpy type of one element; n: number of elements of each lane.
- how: the operation of an atomic or a reduction, as PTX names it, such as "add"; None for a copy.
- order: memory semantics and scope of a strong access; None for a weak one.
- Operands and results are vectors with one element per lane of the gang.

Clocks (`machine.knowledge`) are None unless the launch runs in race mode.
"""
