"""List the faults: each is one edit of a program, and the finding that the emulator must report."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from tests.emulator.cases import blackwell_case, hopper_case
from tests.emulator.faults.compiled import Compiled, with_last, without
from tests.emulator.faults.programs import (
    CLUSTER,
    COPIES,
    DEPENDENT,
    EPILOGUE,
    FENCED_FLAG,
    FLAG,
    LANDING,
    NAMED,
    PROXIES,
    RING,
    TENSOR,
    WARP,
    Program,
)

Edit = Callable[[str], str]
MISSED = ""  # the finding of a fault that is not reported


@dataclass(frozen=True)
class Fault:
    """Describe an edit of a program and the kind of finding expected (`MISSED` if none is)."""

    name: str
    program: Program | Compiled
    edit: Edit
    finding: str

    @property
    def text(self) -> str:
        """Return the program text with the fault."""
        out = self.edit(self.program.text)
        if out == self.program.text:
            raise ValueError(f"{self.program.name}, {self.name}: the edit changes nothing")
        return out


def _line(text: str, name: str) -> str:
    """Return the line that ends with the comment `// name`."""
    found = [x for x in text.split("\n") if x.endswith(f"// {name}")]
    if len(found) != 1:
        raise ValueError(f"{len(found)} lines are called {name!r}")
    return found[0]


def replaced(text: str, name: str, new: str) -> str:
    """Return the text with the line called `name` replaced by `new`."""
    line = _line(text, name)
    return "\n".join(new if x == line else x for x in text.split("\n"))


def drop(name: str) -> Edit:
    """Return an edit that removes a line but keeps its label."""

    def edit(text: str) -> str:
        label = re.match(r"\$L_\w+:", _line(text, name))
        return replaced(text, name, label.group(0) if label else "")

    return edit


def swap(name: str, old: str, new: str) -> Edit:
    """Return an edit that replaces `old` by `new` in a line."""
    return lambda text: replaced(text, name, _line(text, name).replace(old, new))


def exchange(first: str, second: str) -> Edit:
    """Return an edit that exchanges two lines."""

    def edit(text: str) -> str:
        a, b = _line(text, first), _line(text, second)
        return "\n".join(b if x == a else a if x == b else x for x in text.split("\n"))

    return edit


def insert(name: str, code: str) -> Edit:
    """Return an edit that inserts code before a line."""
    return lambda text: replaced(text, name, f"{code}\n{_line(text, name)}")


def both(*edits: Edit) -> Edit:
    """Return an edit that applies several edits in order."""

    def edit(text: str) -> str:
        for e in edits:
            text = e(text)
        return text

    return edit


HOPPER = Compiled("wgmma kernel of the CuTe DSL", hopper_case)
BLACKWELL = Compiled("tcgen05 kernel of the CuTe DSL", blackwell_case, seeds=1)

FAULTS = (
    # ---- mbarriers
    Fault("a stage is filled without an arrive", RING, drop("arrive full"), "deadlock"),
    Fault("a stage is read without a release", RING, drop("arrive empty"), "deadlock"),
    Fault("no wait for a full stage", RING, drop("wait full"), "uninitialised"),
    Fault("no wait for an empty stage", RING, drop("wait empty"), "deadlock"),
    Fault("count one too large", RING, swap("count full", "32;", "33;"), "deadlock"),
    Fault("count too small", RING, swap("count full", "32;", "16;"), "barrier"),
    Fault(
        "count of the second stage too large", RING, swap("count empty 1", "32;", "64;"), "deadlock"
    ),
    Fault("wait with a constant phase", RING, swap("wait full", "%r6,", "0,"), "deadlock"),
    Fault("first phase of the producer wrong", RING, drop("first parity"), "deadlock"),
    Fault(
        "phase flips at every stage",
        RING,
        swap("lap of consumer", "1, 0, %p2", "1, 1, %p2"),
        "deadlock",
    ),
    Fault(
        "phase of the producer never flips",
        RING,
        swap("lap of producer", "1, 0,", "0, 0,"),
        "deadlock",
    ),
    Fault("arrive before the store", RING, exchange("store", "arrive full"), "race"),
    Fault("release before the load", RING, exchange("load", "arrive empty"), "race"),
    Fault(
        "the producer fills one stage only",
        RING,
        swap("stage of producer", "%r5, 7", "0, 7"),
        "race",
    ),
    Fault("barrier used without mbarrier.init", RING, drop("count empty 1"), "barrier"),
    Fault("no barrier after mbarrier.init", RING, drop("meet"), "race"),
    Fault(
        "wait that does not acquire",
        RING,
        swap("wait full", "try_wait.parity", "try_wait.parity.relaxed.cta"),
        "race",
    ),
    Fault(
        "arrive that does not release",
        RING,
        swap("arrive full", "arrive.", "arrive.relaxed.cta."),
        "race",
    ),
    Fault(
        "setmaxnreg by a part of a warpgroup",
        RING,
        insert("first parity", "setmaxnreg.inc.sync.aligned.u32 232;"),
        MISSED,
    ),
    # ---- copies into shared memory
    Fault("no fence after mbarrier.init", COPIES, drop("fence init"), "fence"),
    Fault("no expect_tx", COPIES, drop("expect"), "deadlock"),
    Fault("too few bytes expected", COPIES, swap("expect", "128", "64"), "deadlock"),
    Fault("too many bytes expected", COPIES, swap("expect", "128", "256"), "deadlock"),
    Fault("no copy", COPIES, drop("copy"), "deadlock"),
    Fault("copy of half a stage", COPIES, swap("copy", "%r32", "64"), "deadlock"),
    Fault(
        "copy to the other stage",
        COPIES,
        swap("stage of producer", "%r20, %r11", "%r20, 128"),
        "race",
    ),
    Fault("copy past the end of the tensor", COPIES, swap("copy", "[%d6]", "[%d6+32]"), "bounds"),
    Fault("copy from a misaligned address", COPIES, swap("copy", "[%d6]", "[%d6+8]"), "alignment"),
    Fault("copy overwrites a stage that is read", COPIES, drop("wait empty"), "barrier"),
    Fault("stage read before it is copied", COPIES, drop("wait full"), "race"),
    Fault("one lane releases before others have read", COPIES, drop("meet lanes"), "race"),
    # ---- stores from shared memory
    Fault("no proxy fence before a store", EPILOGUE, drop("fence"), "fence"),
    Fault(
        "proxy fence of another space", EPILOGUE, swap("fence", "shared::cta", "global"), "fence"
    ),
    Fault("no barrier before a store", EPILOGUE, drop("meet"), "race"),
    Fault("no commit_group", EPILOGUE, drop("commit"), "unfinished"),
    Fault("no wait_group before reuse", EPILOGUE, drop("wait"), "race"),
    Fault("wait_group for one group less", EPILOGUE, swap("wait", "read 0", "read 1"), "race"),
    Fault("reuse without a barrier", EPILOGUE, drop("meet again"), "race"),
    # ---- lanes of a warp
    Fault("no bar.warp.sync between store and load", WARP, drop("meet"), "race"),
    Fault("no bar.warp.sync between load and store", WARP, drop("meet before reuse"), "race"),
    Fault("no bar.warp.sync before one lane copies", WARP, drop("meet before copy"), "race"),
    Fault("copy unfinished at exit", WARP, drop("wait"), "unfinished"),
    # ---- named barriers
    Fault("no bar.arrive", NAMED, drop("arrive full"), "deadlock"),
    Fault("thread counts differ", NAMED, swap("arrive full", "64", "96"), "barrier"),
    Fault("another number of a barrier", NAMED, swap("arrive empty", "2,", "3,"), "deadlock"),
    Fault("arrive before the store, named", NAMED, exchange("store", "arrive full"), "race"),
    Fault("no bar.sync", NAMED, drop("wait full"), "race"),
    # ---- global memory
    Fault("flag stored without release", FLAG, swap("release", "release", "relaxed"), "race"),
    Fault("flag stored weakly", FLAG, swap("release", "st.release.gpu.", "st."), "race"),
    Fault("flag released to the CTA only", FLAG, swap("release", "gpu", "cta"), "race"),
    Fault("flag read without acquire", FLAG, swap("acquire", "ld.acquire", "ld.relaxed"), "race"),
    Fault(
        "ld.global.nc of what the kernel writes", FLAG, swap("load", "global", "global.nc"), "race"
    ),
    Fault("flag acquired from the CTA only", FLAG, swap("acquire", "gpu", "cta"), "race"),
    Fault("no barrier before the release", FLAG, drop("meet"), "race"),
    Fault("no barrier after the acquire", FLAG, drop("meet after"), "race"),
    Fault("no fence before a relaxed store", FENCED_FLAG, drop("fence"), "race"),
    Fault("fence of the CTA's scope", FENCED_FLAG, swap("fence", "gpu", "cta"), "race"),
    Fault("no fence after a relaxed load", FENCED_FLAG, drop("fence after"), "race"),
    Fault("no proxy fence before another CTA copies", PROXIES, drop("fence"), "fence"),
    Fault(
        "proxy fence of shared memory only",
        PROXIES,
        swap("fence", "global", "shared::cta"),
        "fence",
    ),
    Fault(
        "wait_group.read before a flag",
        LANDING,
        swap("wait", "wait_group", "wait_group.read"),
        "race",
    ),
    # ---- dependent kernels
    Fault("no griddepcontrol.wait", DEPENDENT, drop("wait"), "race"),
    Fault("load before griddepcontrol.wait", DEPENDENT, exchange("load", "wait"), "race"),
    Fault(
        "one warp waits, no barrier after",
        DEPENDENT,
        both(drop("meet"), swap("wait", "grid", "@!%p1 grid")),
        "race",
    ),
    # ---- clusters
    Fault("no fence before a relaxed cluster barrier", CLUSTER, drop("fence init"), "race"),
    Fault("no cluster barrier before the first access", CLUSTER, drop("wait to meet"), "barrier"),
    Fault("arrive at the own barrier", CLUSTER, swap("arrive", "[%r16]", "[%r20]"), "race"),
    Fault("load from the own CTA", CLUSTER, swap("peer", "%r6", "%r5"), "difference"),
    Fault("exit while the peer still loads", CLUSTER, drop("meet at exit"), "exited"),
    # ---- tensor memory
    Fault("no tcgen05.commit", TENSOR, drop("commit"), "deadlock"),
    Fault("no wait for the product", TENSOR, drop("wait product"), "race"),
    Fault("no tcgen05.wait::ld", TENSOR, drop("wait load"), "race"),
    Fault("no tcgen05.wait::st", TENSOR, drop("wait store"), "race"),
    Fault("no tcgen05.fence before a barrier", TENSOR, drop("before loaded"), "fence"),
    Fault("no tcgen05.fence after a barrier", TENSOR, drop("after loaded"), "fence"),
    Fault("no tcgen05.fence after a product", TENSOR, drop("after product"), "fence"),
    Fault("operands without a proxy fence", TENSOR, drop("fence operands"), "fence"),
    Fault("tensor memory not freed", TENSOR, drop("dealloc"), "tensor-memory"),
    Fault(
        "accumulator beyond the allocation", TENSOR, swap("alloc", "%r92;", "16;"), "tensor-memory"
    ),
    # ---- compiled kernels
    Fault("no wgmma.fence", HOPPER, without(r"wgmma\.fence"), "fence"),
    Fault("no wgmma.commit_group", HOPPER, without(r"wgmma\.commit_group"), "race"),
    Fault(
        "wgmma.wait_group for one group less", HOPPER, with_last(r"wgmma\.wait_group", "1"), "race"
    ),
    Fault("no proxy fence before a reduction", HOPPER, without(r"fence\.proxy\.async"), "fence"),
    Fault(
        "reduction unfinished at exit",
        HOPPER,
        without(r"cp\.async\.bulk\.wait_group"),
        "unfinished",
    ),
    Fault("no fence after mbarrier.init", HOPPER, without(r"fence\.mbarrier_init"), "fence"),
    Fault(
        "no TMA load", HOPPER, without(r"cp\.async\.bulk\.tensor.*shared::\w+\.global"), "deadlock"
    ),
    Fault("count of a barrier wrong", HOPPER, with_last(r"mbarrier\.init", "3"), "deadlock"),
    Fault("no tcgen05.commit", BLACKWELL, without(r"tcgen05\.commit"), "deadlock"),
    Fault("no tcgen05.wait::ld", BLACKWELL, without(r"tcgen05\.wait::ld"), "race"),
    Fault(
        "no wait before tensor memory is freed",
        BLACKWELL,
        without(r"\bbar\.sync", 3),
        "tensor-memory",
    ),
    Fault(
        "bytes of a load wrong",
        BLACKWELL,
        with_last(r"mbarrier\.arrive\.expect_tx", "48"),
        "deadlock",
    ),
)
