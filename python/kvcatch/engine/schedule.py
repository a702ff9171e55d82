"""What one step is to do, decided before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvcatch.engine.request import Branch

__all__ = ["Schedule", "Scheduled", "SwapCopy"]


@dataclass(frozen=True, slots=True, eq=False)
class Scheduled:
    """``count`` tokens of a branch, starting at ``start``, are computed in this step."""

    branch: Branch
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether its last token is the last one known, so that the next is chosen after it."""
        return self.start + self.count == len(self.branch.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class SwapCopy:
    """Blocks of a branch to copy between the device and the host pool."""

    branch: Branch
    src: NDArray[np.int32]
    dst: NDArray[np.int32]
    committed: int = 0


@dataclass(slots=True, eq=False)
class Schedule:
    """The decisions of one step, in the order in which they are carried out.

    Attributes:
        swap_out: device to host, first: the blocks may be written below.
        copies: (source, destination) blocks of copy-on-write.
        swap_in: host to device.
        items: what is computed: decodes first, then prompts.
        admitted: branches that entered.
        preempted: branches that lost their blocks.
        rejected: branches that can never fit.
    """

    swap_out: list[SwapCopy] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[SwapCopy] = field(default_factory=list)
    items: list[Scheduled] = field(default_factory=list)
    admitted: list[Branch] = field(default_factory=list)
    preempted: list[Branch] = field(default_factory=list)
    rejected: list[Branch] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(item.count for item in self.items)

    def __bool__(self) -> bool:
        return bool(self.items or self.swap_out or self.swap_in or self.rejected)
