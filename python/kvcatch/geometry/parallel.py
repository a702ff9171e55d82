"""How a model is spread over ranks, and what that asks of it."""

from __future__ import annotations

from dataclasses import dataclass

from kvcatch.errors import InvalidArgument

__all__ = ["Parallel", "require_count"]

MAX_RANKS = 65_536


def require_count(name: str, value: object, maximum: int = 2**50, minimum: int = 1) -> int:
    """``value`` if it is a whole number from ``minimum`` to ``maximum``.

    Raises:
        InvalidArgument: it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidArgument(f"{name} = {value!r}: not a whole number")
    if not minimum <= value <= maximum:
        raise InvalidArgument(f"{name} = {value}: must be between {minimum} and {maximum}")
    return value


@dataclass(frozen=True, slots=True)
class Parallel:
    """Sizes of the parallel groups.

    Attributes:
        tp: Tensor parallel ranks.
        pp: Pipeline stages.
        dp: Data-parallel replicas; each has a pool of its own.
        dcp: Decode-context-parallel ranks inside each tensor-parallel group: they share out the tokens.
        pp_layers: Layers of each stage; None spreads them as vLLM does.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    dcp: int = 1
    pp_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "dcp"):
            require_count(name, getattr(self, name), MAX_RANKS)
        if self.tp % self.dcp:
            raise InvalidArgument(f"dcp = {self.dcp}: does not divide tp = {self.tp}")
        if self.pp_layers is not None:
            if len(self.pp_layers) != self.pp:
                raise InvalidArgument(
                    f"pp_layers = {_list(self.pp_layers)}: {len(self.pp_layers)} stages, but pp = {self.pp}"
                )
            for layers in self.pp_layers:
                require_count("pp_layers", layers)

    def stages(self, num_layers: int) -> tuple[range, ...]:
        """The decoder layers of each stage.

        What is left after an even split goes to the stages before the last one, from the back (vLLM
        ``get_pp_indices``).

        Raises:
            InvalidArgument: more stages than layers, or ``pp_layers`` does not sum to the model's.
        """
        if self.pp > num_layers:
            raise InvalidArgument(f"pp = {self.pp}: the model has only {num_layers} layers")
        if self.pp_layers is not None:
            counts = list(self.pp_layers)
            if sum(counts) != num_layers:
                raise InvalidArgument(
                    f"pp_layers = {_list(self.pp_layers)}: sums to {sum(counts)}, "
                    f"but the model has {num_layers} layers"
                )
        else:
            even, left = divmod(num_layers, self.pp)
            counts = [even] * self.pp
            for back in range(2, left + 2):
                counts[-back] += 1
        stages, start = [], 0
        for count in counts:
            stages.append(range(start, start + count))
            start += count
        return tuple(stages)


def _list(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))
