"""Every call with every kind of bad argument: a typed error that shows the value, and nothing is changed."""

from __future__ import annotations

import array
import math
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from core_support import drain, free_state, state

import kvcatch
from kvcatch import (
    BlockPool,
    DoubleFree,
    FreeBlocks,
    InvalidArgument,
    InvalidType,
    KvcatchError,
    OutOfBlocks,
    Prefix,
    StaleHandle,
    StalePlan,
)

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_SIZE = 4
STALE_RAW = 5 << 32
UNKNOWN_RAW = 999_983
SURROGATE = "lone \ud800"


class Kit:
    """A pool with something of everything, the same each time."""

    def __init__(self, eviction: str = "lru") -> None:
        self.pool = BlockPool(
            64,
            BLOCK_SIZE,
            blocks_per_page=8,
            null_block=True,
            manual_clock=True,
            eviction=eviction,
        )
        self.pool.now = 2.0
        self.prompt = list(range(10))
        self.a = self.pool.create(self.prompt, owner="a", tags={"tenant": "x"}, commit=True)
        self.b = self.pool.create(range(50, 57), owner="b", reserve_tokens=9)
        self.child = self.pool.fork(self.a)
        self.stale = self.pool.create(range(100, 112), commit=True)
        self.pin = self.pool.pin(self.a, owner="transfer", deadline=3.0)
        self.stale_pin = self.pool.pin(self.b)
        self.pool.unpin(self.stale_pin)
        self.plan = self.pool.plan_compaction("runs")
        self.pool.free(self.stale)
        other = BlockPool(64)
        self.foreign = [other.create([1]) for _ in range(9)][-1]
        self.out_tables = np.full((4, 8), 77, np.int32)
        self.out_slots = np.full(64, 77, np.int64)
        self.free = FreeBlocks(16, placement="queue")
        self.free.take(12, out=np.zeros(12, np.int32))
        self.free.give_cached([5, 4])
        self.free.give_clean([2])
        self.out_ids = np.full(16, 77, np.int32)

    def seen(self) -> list[Any]:
        return [
            state(self.pool, refusals=False),
            free_state(self.free),
            self.out_tables.tolist(),
            self.out_slots.tolist(),
            self.out_ids.tolist(),
        ]


BEFORE = Kit().seen()
DRAINED = drain(Kit().pool)


@dataclass
class Bad:
    """A bad value: how to make it, and what of it the message must show."""

    name: str
    make: Callable[[Kit], Any]
    shown: str | None = None
    errors: type[BaseException] | tuple[type[BaseException], ...] = InvalidType
    bug: str = ""

    def param(self, *values: Any, name: str = "") -> Any:
        marks: list[pytest.MarkDecorator] = []
        label = f"{name}-{self.name}".encode("ascii", "backslashreplace").decode()
        return pytest.param(*values, self, id=label, marks=marks)


BIG_ENDIAN = "PyO3 0.30 takes '>i' for native on little-endian machines"
BOOL_FLOAT = "a bool is taken for a number of seconds"
FOREIGN = "handles do not tell pools, nor pins from sequences"
HUGE_FLOAT = "OverflowError from the conversion to float"
SURROGATES = "UnicodeEncodeError from the conversion to str"
ABORTS = "allocation failure aborts the process"


def value(bad: Any, errors: Any = InvalidType) -> Bad:
    return Bad(repr(bad)[:40], lambda _: bad, repr(bad)[:50], errors)


def named(bad: str) -> Bad:
    """No policy is called that."""
    return Bad(repr(bad), lambda _: bad, f'= "{bad}"', InvalidArgument)


def read_only(values: np.ndarray) -> np.ndarray:
    values.flags.writeable = False
    return values


TEXT = [value("7"), value(b"7"), value(SURROGATE)]
NO_INTEGERS = [
    value(True),
    value(np.True_),
    value(1.0),
    value(np.float32(2)),
    value(math.nan),
    value(math.inf),
    value(None),
    value([1]),
    value({}),
    value(object),
    *TEXT,
]
HUGE = [-(2**63), -(10**30), 2**63, 2**64, 10**30]


def integers(least: int, *more: int, none: bool = False) -> list[Bad]:
    """Everything that is no integer of at least ``least``; ``none`` where None means the default."""
    below = [least - 1, -1, np.int64(least - 1)]
    numbers = [value(number, InvalidArgument) for number in {*below, *HUGE, *more}]
    kinds = [bad for bad in NO_INTEGERS if not (none and bad.name == "None")]
    arrays = [
        Bad("1-d", lambda _: np.array([1, 2]), "array([1, 2])"),
        Bad("float 0-d", lambda _: np.array(1.5), "1.5"),
    ]
    return numbers + kinds + arrays


def arrays(good: str = "<i8") -> list[Bad]:
    """Arrays that are no one-dimensional integer arrays, whatever is in them."""
    return [
        Bad("float32", lambda _: np.ones(2, np.float32), '"f"'),
        Bad("float64", lambda _: np.full(2, np.nan), '"d"'),
        Bad("float16", lambda _: np.ones(2, np.float16), '"e"'),
        Bad("complex", lambda _: np.ones(2, complex), '"Zd"'),
        Bad("bool", lambda _: np.ones(2, bool), '"?"'),
        Bad("object", lambda _: np.array([1, 2], object), '"O"'),
        Bad("bytes dtype", lambda _: np.array([b"ab"]), '"2s"'),
        Bad("str dtype", lambda _: np.array(["ab"]), '"2w"'),
        Bad("datetime", lambda _: np.array(["2020-01-01"], "M8[D]"), "2020"),
        Bad("struct", lambda _: np.zeros(2, [("x", "i4")]), "x"),
        Bad("0-d", lambda _: np.array(3), "3", (InvalidType, StaleHandle)),
        Bad("2-d", lambda _: np.zeros((2, 3), good), "[2, 3]", InvalidArgument),
        Bad("2-d F", lambda _: np.zeros((2, 3), good, order="F"), "[2, 3]", InvalidArgument),
        Bad("2-d int32", lambda _: np.zeros((1, 1), np.int32), "[1, 1]", InvalidArgument),
        Bad("big-endian", lambda _: np.ones(2, ">i4"), '">i"', InvalidType, BIG_ENDIAN),
        Bad("big-endian 64", lambda _: np.ones(2, ">i8"), '">q"', InvalidType, BIG_ENDIAN),
    ]


def elements(least: int, most: int) -> list[Bad]:
    """Right containers with one impossible element."""
    refused = []
    numbers = {least - 1, most + 1, -1, -(2**31), -(2**63), 2**63 - 1} - set(range(least, 100))
    numbers = {number for number in numbers if not least <= number <= most}
    for number in sorted(numbers):
        shown = f"[1] = {number}"
        refused.append(
            Bad(
                f"list {number}",
                lambda _, n=number: [max(least, 0), n],
                shown,
                InvalidArgument,
            )
        )
        for dtype in (np.int32, np.int64):
            if np.iinfo(dtype).min <= number <= np.iinfo(dtype).max:
                refused.append(
                    Bad(
                        f"{dtype.__name__} {number}",
                        lambda _, n=number, d=dtype: np.array([max(least, 0), n], d),
                        shown,
                        InvalidArgument,
                    )
                )
                refused.append(
                    Bad(
                        f"strided {dtype.__name__} {number}",
                        lambda _, n=number, d=dtype: np.array([max(least, 0), 5, n, 5], d)[::2],
                        shown,
                        InvalidArgument,
                    )
                )
    refused += [
        Bad(
            "uint64 huge",
            lambda _: np.array([1, 2**64 - 1], np.uint64),
            str(2**64 - 1),
            InvalidArgument,
        ),
        Bad("list huge", lambda _: [1, 10**30], str(10**30), InvalidArgument),
    ]
    for item in (True, 1.0, None, "7", b"7", math.nan, [1], SURROGATE):
        refused.append(Bad(f"list with {item!r}", lambda _, i=item: [1, i], repr(item)))
    return refused


NOT_ITERABLE = [value(None), value(True), value(1.5), value(math.nan), value(object), *TEXT]
TOKENS = [
    *arrays("<i4"),
    *elements(0, 2**32 - 1),
    *NOT_ITERABLE,
    value(5),
    Bad("uint8 text", lambda _: b"\x01\x02", "b'\\x01\\x02'"),
]
BLOCKS = [*arrays("<i4"), *elements(0, 2**31 - 1), *NOT_ITERABLE]
COUNTS = [
    *[bad for bad in arrays() if bad.name != "0-d"],
    *elements(0, 2**40),
    value(True),
    value(1.5),
    value(math.nan),
    value(object),
    *TEXT,
    *[value(number, InvalidArgument) for number in (-1, *HUGE, 2**40 + 1)],
    Bad("too many", lambda _: [1, 1], "2 values for 1", InvalidArgument),
    Bad("none", lambda _: [], "0 values for 1", InvalidArgument),
]
HANDLES = [
    Bad("stale", lambda kit: kit.stale, "8589934594", StaleHandle),
    Bad("foreign", lambda kit: kit.foreign, None, StaleHandle),
    value(UNKNOWN_RAW, StaleHandle),
    value(STALE_RAW, StaleHandle),
    value(-1, StaleHandle),
    value(-(2**63), StaleHandle),
    value(2**63 - 1, StaleHandle),
    *[value(number, InvalidArgument) for number in (2**63, 2**64, 10**30, -(10**30))],
    *[value(bad) for bad in (None, True, 1.0, math.nan, "7", b"7", SURROGATE, object)],
]
HANDLES[0].shown = None  # its number is the slab's business
BATCHES = [
    *[
        Bad(f"[{bad.name}]", lambda kit, b=bad: [kit.a, b.make(kit)], bad.shown, bad.errors)
        for bad in HANDLES
    ],
    Bad("twice", lambda kit: [kit.a, kit.b, kit.a], "0", InvalidArgument),
    Bad("twice array", lambda kit: np.array([kit.b.id, kit.b.id]), "1", InvalidArgument),
    Bad("int64 stale", lambda kit: np.array([kit.a.id, STALE_RAW]), str(STALE_RAW), StaleHandle),
    Bad("int32 unknown", lambda kit: np.array([UNKNOWN_RAW, 0], np.int32), "999983", StaleHandle),
    Bad("uint64 huge", lambda _: np.array([2**64 - 1], np.uint64), str(2**64 - 1), InvalidArgument),
    Bad("stale alone", lambda kit: kit.stale, None, StaleHandle),
    *arrays(),
    *NOT_ITERABLE,
]
READS_BATCH = [bad for bad in BATCHES if not bad.name.startswith("twice")]
SALTS = [
    value(True),
    value(1.5),
    value(math.nan),
    value([1]),
    value({}),
    value(object),
    value(2**64, KvcatchError),
]
# A wrong type where the signature wants str, float or bool is Python's own TypeError.
SIGNATURE = (TypeError, KvcatchError)
STRINGS = [
    Bad(repr(bad), lambda _, b=bad: b, None, SIGNATURE)
    for bad in (1, b"lru", True, 1.5, ["lru"], object)
]
OWNERS = STRINGS
SECONDS = [
    *[Bad(repr(bad), lambda _, b=bad: b, None, SIGNATURE) for bad in ("1", b"1", [1], object, 1j)],
    Bad("-1.0", lambda _: -1.0, "-1", InvalidArgument),
    value(-0.001, InvalidArgument),
    *[
        Bad(repr(bad), lambda _, b=bad: b, shown, InvalidArgument)
        for bad, shown in (
            (math.nan, "nan"),
            (math.inf, "inf"),
            (-math.inf, "-inf"),
            (1e300, "1e300"),
            (2**63, "92233720368547"),
        )
    ],
]
SECONDS[-2].shown = None
FLAGS = [Bad(repr(bad), lambda _, b=bad: b, None, SIGNATURE) for bad in (1, 0, "yes", None, 1.0)]
TAGS = [
    *[
        value(bad)
        for bad in (1, "a", [("a", "b")], {"a": 1}, {1: "a"}, {"a": None}, {"a": SURROGATE})
    ],
    Bad("owner", lambda _: {"owner": "x"}, "owner", InvalidArgument),
]


def outputs(dtype: type, ndim: int, small: tuple[int, ...]) -> list[Bad]:
    """Arrays that cannot be written into."""
    big = (8, 16)[:ndim] if ndim == 2 else (64,)
    wrong = np.int64 if dtype is np.int32 else np.int32
    refused = [
        Bad(f"dtype {other}", lambda _, o=other: np.zeros(big, o), "dtype format")
        for other in (wrong, np.float32, bool, object, np.uint32, np.uint64)
    ]
    foreign_order = f">i{dtype().itemsize}"
    refused.append(
        Bad(
            foreign_order,
            lambda _: np.zeros(big, foreign_order),
            "dtype format",
            InvalidType,
            BIG_ENDIAN,
        )
    )
    refused += [
        Bad("0-d", lambda _: np.zeros((), dtype), "array(0"),
        Bad("3-d", lambda _: np.zeros((2, 3, 4), dtype), "[2, 3, 4]", InvalidArgument),
        Bad("other d", lambda _: np.zeros((9,) * (3 - ndim), dtype), "[9", InvalidArgument),
        Bad("read-only", lambda _: read_only(np.zeros(big, dtype)), "read-only", InvalidArgument),
        Bad(
            "strided",
            lambda _: np.zeros([2 * n for n in big], dtype)[(slice(None, None, 2),) * ndim],
            "strides",
            InvalidArgument,
        ),
        Bad("reversed", lambda _: np.zeros(big, dtype)[::-1], "strides", InvalidArgument),
        Bad("small", lambda _: np.zeros(small, dtype), str(small[-1]), InvalidArgument),
        Bad("empty", lambda _: np.zeros([0] * ndim, dtype), "0", InvalidArgument),
        *[value(bad) for bad in (1, 1.5, True, "text", [1, 2], object)],
        Bad("bytes", lambda _: bytes(64), "dtype format"),
        Bad("bytearray", lambda _: bytearray(640), "dtype format"),
        Bad("range", lambda _: range(64), "range(0, 64)"),
    ]
    if ndim == 2:
        refused += [
            Bad("Fortran", lambda _: np.zeros(big, dtype, order="F"), "strides", InvalidArgument),
            Bad("few rows", lambda _: np.zeros((1, 16), dtype), "1 rows", InvalidArgument),
        ]
    return refused


CALLS: dict[str, tuple[Callable[[Kit, Any], Any], list[Bad]]] = {
    "BlockPool(num_blocks)": (lambda _, x: BlockPool(x), integers(1, 2**31 + 1)),
    "BlockPool(block_size)": (
        lambda _, x: BlockPool(8, x),
        integers(1, 2**31, 2**16 + 1, none=True),
    ),
    "BlockPool(blocks_per_page)": (
        lambda _, x: BlockPool(8, blocks_per_page=x),
        integers(1, 2**31 + 1, none=True),
    ),
    "BlockPool(seed)": (lambda _, x: BlockPool(8, seed=x), integers(0, none=True)),
    "BlockPool(placement)": (
        lambda _, x: BlockPool(8, placement=x),
        [*STRINGS, named("best"), named("")],
    ),
    "BlockPool(eviction)": (lambda _, x: BlockPool(8, eviction=x), [*STRINGS, named("fifo")]),
    "BlockPool(contiguity)": (
        lambda _, x: BlockPool(8, contiguity=x),
        [*STRINGS, named("Required")],
    ),
    "BlockPool(hash)": (lambda _, x: BlockPool(8, hash=x), [*STRINGS, named("md5")]),
    "BlockPool(null_block)": (lambda _, x: BlockPool(8, null_block=x), FLAGS),
    "BlockPool(manual_clock)": (lambda _, x: BlockPool(8, manual_clock=x), FLAGS),
    "FreeBlocks(num_blocks)": (lambda _, x: FreeBlocks(x), integers(1, 2**31 + 1)),
    "FreeBlocks(seed)": (lambda _, x: FreeBlocks(8, seed=x), integers(0, none=True)),
    "FreeBlocks(placement)": (lambda _, x: FreeBlocks(8, placement=x), [*STRINGS, named("best")]),
    "FreeBlocks(eviction)": (lambda _, x: FreeBlocks(8, eviction=x), [*STRINGS, named("fifo")]),
    "FreeBlocks.take(n)": (lambda kit, x: kit.free.take(x), integers(0, 2**40 + 1)),
    "FreeBlocks.take(after)": (
        lambda kit, x: kit.free.take(1, after=x),
        [
            *integers(0, 2**31, none=True),
            value(16, InvalidArgument),
            value(2, InvalidArgument),
            value(4, InvalidArgument),
        ],
    ),
    "FreeBlocks.take(contiguous)": (lambda kit, x: kit.free.take(1, contiguous=x), FLAGS),
    "FreeBlocks.take(out)": (lambda kit, x: kit.free.take(3, out=x), outputs(np.int32, 1, (2,))),
    "FreeBlocks.remove": (
        lambda kit, x: kit.free.remove(x),
        [*integers(0, 2**31), value(16, InvalidArgument), value(0, InvalidArgument)],
    ),
    "FreeBlocks.touch": (
        lambda kit, x: kit.free.touch(x),
        [*integers(0, 2**31), value(16, InvalidArgument)],
    ),
    "FreeBlocks.is_clean": (
        lambda kit, x: kit.free.is_clean(x),
        [*integers(0, 2**31), value(16, InvalidArgument)],
    ),
    "FreeBlocks.is_cached": (
        lambda kit, x: kit.free.is_cached(x),
        [*integers(0, 2**31), value(16, InvalidArgument)],
    ),
    "FreeBlocks.__contains__": (
        lambda kit, x: x in kit.free,
        [*integers(0, 2**31), value(16, InvalidArgument)],
    ),
    "Prefix(tokens)": (lambda _, x: Prefix(x), TOKENS),
    "Prefix(block_size)": (lambda _, x: Prefix([1], x), integers(1, 2**31, 2**16 + 1, none=True)),
    "Prefix(salt)": (lambda _, x: Prefix([1], salt=x), SALTS),
    "Prefix(hash)": (lambda _, x: Prefix([1], hash=x), [*STRINGS, named("md5")]),
    "create(tokens)": (
        lambda kit, x: kit.pool.create(x),
        [
            *TOKENS,
            Bad("empty", lambda _: [], "[]", InvalidArgument),
            Bad("empty array", lambda _: np.zeros(0, np.int32), "[]", InvalidArgument),
            Bad("empty prefix", lambda _: Prefix([], BLOCK_SIZE), "[]", InvalidArgument),
            Bad("prefix of 16", lambda _: Prefix([1]), "16", InvalidArgument),
            Bad(
                "prefix of blake3",
                lambda _: Prefix([1], BLOCK_SIZE, hash="blake3"),
                "blake3",
                InvalidArgument,
            ),
            Bad("too long", lambda _: np.zeros(10**4, np.int32), "2500", OutOfBlocks),
        ],
    ),
    "create(owner)": (lambda kit, x: kit.pool.create([1], owner=x), OWNERS),
    "create(tags)": (lambda kit, x: kit.pool.create([1], tags=x), TAGS),
    "create(salt)": (lambda kit, x: kit.pool.create([1], salt=x), SALTS),
    "create(salt, Prefix)": (
        lambda kit, x: kit.pool.create(Prefix([1], BLOCK_SIZE), salt=x),
        [Bad("salt", lambda _: "s", "salt", InvalidArgument)],
    ),
    "create(num_tokens)": (
        lambda kit, x: kit.pool.create([1, 2], num_tokens=x),
        [*integers(1, 2**31, 2**40, none=True), value(3, InvalidArgument)],
    ),
    "create(num_tokens, commit)": (
        lambda kit, x: kit.pool.create([1, 2], num_tokens=x, commit=True),
        [value(1, InvalidArgument)],
    ),
    "create(reserve_tokens)": (
        lambda kit, x: kit.pool.create([1], reserve_tokens=x),
        [
            *integers(0, 2**40, none=True),
            Bad("2**31", lambda _: 2**31, None, OutOfBlocks),
            Bad("2**39", lambda _: 2**39, None, OutOfBlocks),
        ],
    ),
    "create(use_cache)": (lambda kit, x: kit.pool.create([1], use_cache=x), FLAGS),
    "create(commit)": (lambda kit, x: kit.pool.create([1], commit=x), FLAGS),
    "append(seqs)": (lambda kit, x: kit.pool.append(x, 9), BATCHES),
    "append(n_tokens)": (
        lambda kit, x: kit.pool.append([kit.a], x),
        [
            *COUNTS,
            value(2**40, InvalidArgument),
            *[Bad(str(n), lambda _, n=n: n, None, OutOfBlocks) for n in (2**31, 2**39, 10**4)],
            Bad("[2**39]", lambda _: [2**39], None, OutOfBlocks),
        ],
    ),
    "commit(seqs)": (lambda kit, x: kit.pool.commit(x), BATCHES),
    "commit(seqs, tokens)": (
        lambda kit, x: kit.pool.commit(x, [], 0),
        [bad for bad in BATCHES if bad.name != "twice"],
    ),
    "commit(tokens)": (
        lambda kit, x: kit.pool.commit([kit.a], x),
        [
            *[bad for bad in TOKENS if bad.name != "None"],
            Bad("no room", lambda _: [1, 2], "2", InvalidArgument),
        ],
    ),
    "commit(tokens, uneven)": (
        lambda kit, x: kit.pool.commit([kit.a, kit.child], x),
        [Bad("3 for 2", lambda _: [1, 2, 3], "3", InvalidArgument)],
    ),
    "commit(counts)": (
        lambda kit, x: kit.pool.commit([kit.b], counts=x),
        [*COUNTS, value(8, InvalidArgument), Bad("[8]", lambda _: [8], "8", InvalidArgument)],
    ),
    "commit(tokens, counts)": (
        lambda kit, x: kit.pool.commit([kit.a], [], x),
        [*COUNTS, value(1, InvalidArgument), value(2**40, InvalidArgument)],
    ),
    "commit(known first)": (
        lambda kit, x: kit.pool.commit([kit.b], x),
        [Bad("tokens", lambda _: [1], "7", InvalidArgument)],
    ),
    "commit(deduplicate)": (lambda kit, x: kit.pool.commit([kit.b], deduplicate=x), FLAGS),
    "fork(seq)": (lambda kit, x: kit.pool.fork(x), HANDLES),
    "fork(owner)": (lambda kit, x: kit.pool.fork(kit.a, owner=x), OWNERS),
    "fork(tags)": (lambda kit, x: kit.pool.fork(kit.a, tags=x), TAGS),
    "truncate(seq)": (lambda kit, x: kit.pool.truncate(x, 1), HANDLES),
    "truncate(num_tokens)": (
        lambda kit, x: kit.pool.truncate(kit.a, x),
        [*integers(0, 2**31, 2**40 + 1), value(11, InvalidArgument)],
    ),
    "reserve(seq)": (lambda kit, x: kit.pool.reserve(x, 1), HANDLES),
    "reserve(num_tokens)": (
        lambda kit, x: kit.pool.reserve(kit.a, x),
        [
            *integers(0, 2**40, 2**40 + 1),
            Bad("2**31", lambda _: 2**31, None, OutOfBlocks),
            Bad("2**39", lambda _: 2**39, None, OutOfBlocks),
        ],
    ),
    "free(seqs)": (lambda kit, x: kit.pool.free(x), BATCHES),
    "free(int)": (
        lambda kit, x: kit.pool.free(x),
        [value(UNKNOWN_RAW, StaleHandle), value(-1, StaleHandle)],
    ),
    "block_tables(seqs)": (lambda kit, x: kit.pool.block_tables(x, kit.out_tables), READS_BATCH),
    "block_tables(out)": (
        lambda kit, x: kit.pool.block_tables([kit.a, kit.b], x),
        [*outputs(np.int32, 2, (2, 2)), value(None)],
    ),
    "block_tables(pad)": (
        lambda kit, x: kit.pool.block_tables([kit.a], kit.out_tables, pad=x),
        [bad for bad in integers(-(2**31), 2**31, none=True) if bad.name != "-1"],
    ),
    "slot_mapping(seqs)": (
        lambda kit, x: kit.pool.slot_mapping(x, 1, starts=0, out=kit.out_slots),
        READS_BATCH,
    ),
    "slot_mapping(counts)": (
        lambda kit, x: kit.pool.slot_mapping([kit.b], x, out=kit.out_slots),
        [*COUNTS, value(8, InvalidArgument), value(2**40, InvalidArgument)],
    ),
    "slot_mapping(starts)": (
        lambda kit, x: kit.pool.slot_mapping([kit.b], starts=x, out=kit.out_slots),
        [*COUNTS, value(8, InvalidArgument), value(2**40, InvalidArgument)],
    ),
    "slot_mapping(out)": (
        lambda kit, x: kit.pool.slot_mapping([kit.b], out=x),
        [*outputs(np.int64, 1, (6,)), value(None)],
    ),
    "block_ids(seq)": (lambda kit, x: kit.pool.block_ids(x), HANDLES),
    "num_tokens(seq)": (lambda kit, x: kit.pool.num_tokens(x), HANDLES),
    "num_committed(seq)": (lambda kit, x: kit.pool.num_committed(x), HANDLES),
    "num_runs(seqs)": (lambda kit, x: kit.pool.num_runs(x), READS_BATCH),
    "describe(seq)": (lambda kit, x: kit.pool.describe(x), HANDLES),
    "prefix(tokens)": (lambda kit, x: kit.pool.prefix(x), TOKENS),
    "prefix(salt)": (lambda kit, x: kit.pool.prefix([1], salt=x), SALTS),
    "lookup(tokens)": (
        lambda kit, x: kit.pool.lookup(x),
        [*TOKENS, Bad("prefix of 16", lambda _: Prefix([1]), "16", InvalidArgument)],
    ),
    "lookup(salt)": (lambda kit, x: kit.pool.lookup([1], salt=x), SALTS),
    "lookup_many": (
        lambda kit, x: kit.pool.lookup_many(x),
        [
            *[value(bad) for bad in (None, 1, 1.5, True, "text", [1], [None], [[1]], {1: 2})],
            Bad("array", lambda _: np.ones(2, np.int32), "array"),
            Bad("prefix alone", lambda _: Prefix([1], BLOCK_SIZE), "Prefix"),
            Bad(
                "prefix of 16",
                lambda _: [Prefix([1], BLOCK_SIZE), Prefix([1])],
                "16",
                InvalidArgument,
            ),
        ],
    ),
    "explain_miss(tokens)": (
        lambda kit, x: kit.pool.explain_miss(x),
        [*TOKENS, Bad("prefix of 16", lambda _: Prefix([1]), "16", InvalidArgument)],
    ),
    "explain_miss(salt)": (lambda kit, x: kit.pool.explain_miss([1], salt=x), SALTS),
    "retain(tokens)": (
        lambda kit, x: kit.pool.retain(x),
        [*TOKENS, Bad("prefix of 16", lambda _: Prefix([1]), "16", InvalidArgument)],
    ),
    "retain(priority)": (
        lambda kit, x: kit.pool.retain(kit.prompt, priority=x),
        integers(0, 101, 2**31, none=True),
    ),
    "retain(ttl)": (lambda kit, x: kit.pool.retain(kit.prompt, ttl=x), SECONDS),
    "retain(salt)": (lambda kit, x: kit.pool.retain(kit.prompt, salt=x), SALTS),
    "evict": (lambda kit, x: kit.pool.evict(x), integers(0, 2**40 + 1)),
    "now": (lambda kit, x: setattr(kit.pool, "now", x), SECONDS),
    "pin(what)": (
        lambda kit, x: kit.pool.pin(x),
        [
            *[
                bad
                for bad in HANDLES
                if bad.name not in {"2**63", "2**64"} and bad.errors is StaleHandle
            ],
            *BLOCKS,
            Bad("empty", lambda _: [], "[]", InvalidArgument),
            Bad("null block", lambda _: [0], "0", InvalidArgument),
            Bad("clean", lambda _: [60], "60", InvalidArgument),
            Bad("out of range", lambda _: [64], "64", InvalidArgument),
            Bad(
                "out of range array",
                lambda _: np.array([2**31 - 1], np.int32),
                str(2**31 - 1),
                InvalidArgument,
            ),
            Bad("twice", lambda _: [1, 2, 1], "1", InvalidArgument),
        ],
    ),
    "pin(owner)": (lambda kit, x: kit.pool.pin(kit.a, owner=x), OWNERS),
    "pin(deadline)": (lambda kit, x: kit.pool.pin(kit.a, deadline=x), SECONDS),
    "unpin": (
        lambda kit, x: kit.pool.unpin(x),
        [
            Bad("stale", lambda kit: kit.stale_pin, None, StaleHandle),
            *[bad for bad in HANDLES if bad.name not in {"stale", "foreign"}],
        ],
    ),
    "plan_compaction(objective)": (
        lambda kit, x: kit.pool.plan_compaction(x),
        [
            *STRINGS,
            named("defragment"),
            Bad("largest_run", lambda _: "largest_run", "n", InvalidArgument),
        ],
    ),
    "plan_compaction(n)": (
        lambda kit, x: kit.pool.plan_compaction("largest_run", n=x),
        [
            *integers(1, 2**31 + 1, none=True),
            value(64, InvalidArgument),
            value(2**31, InvalidArgument),
        ],
    ),
    "plan_compaction(n, runs)": (
        lambda kit, x: kit.pool.plan_compaction("runs", n=x),
        [value(3, InvalidArgument), *integers(1, none=True)],
    ),
    "plan_compaction(max_moves)": (
        lambda kit, x: kit.pool.plan_compaction("pages", max_moves=x),
        integers(0, 2**40 + 1, none=True),
    ),
    "plan_compaction(seqs)": (
        lambda kit, x: kit.pool.plan_compaction("runs", seqs=x),
        [bad for bad in READS_BATCH if bad.name != "None"],
    ),
    "plan_compaction(bytes_per_block)": (
        lambda kit, x: kit.pool.plan_compaction("runs", bytes_per_block=x),
        integers(1, 2**40 + 1, none=True),
    ),
    "plan_compaction(bandwidth)": (
        lambda kit, x: kit.pool.plan_compaction("runs", bandwidth=x),
        [
            *SECONDS[:5],
            *[
                Bad(repr(bad), lambda _, b=bad: b, shown, InvalidArgument)
                for bad, shown in ((0, "0"), (-1.0, "-1"), (math.nan, "nan"), (math.inf, "inf"))
            ],
        ],
    ),
    "holdings(by)": (lambda kit, x: kit.pool.holdings(x), STRINGS),
    "audit(live)": (
        lambda kit, x: kit.pool.audit(x),
        [*[value(bad) for bad in (None, 1, True, "a", b"a", [1], [None], [b"a"], [SURROGATE])]],
    ),
    "audit(now)": (lambda kit, x: kit.pool.audit([], now=x), SECONDS),
}
# bytes iterate as integers, which no owner is: refused as any other list of integers.
for _bad in CALLS["audit(live)"][1]:
    _bad.errors = InvalidType

CASES = [bad.param(call, name=name) for name, (call, all_bad) in CALLS.items() for bad in all_bad]


@pytest.mark.parametrize(("call", "bad"), CASES)
def test_refused_with_its_value_and_nothing_changed(
    call: Callable[[Kit, Any], Any], bad: Bad
) -> None:
    kit = Kit()
    argument = bad.make(kit)
    with pytest.raises(bad.errors) as caught:
        call(kit, argument)
    assert isinstance(caught.value, (KvcatchError, TypeError))
    if bad.shown is not None and isinstance(caught.value, KvcatchError):
        assert bad.shown in str(caught.value)
    assert kit.seen() == BEFORE
    kit.pool.validate()
    kit.free.validate()
    assert drain(kit.pool) == DRAINED


LONE_SURROGATES: dict[str, Callable[[Kit], Any]] = {
    "BlockPool(placement)": lambda _: BlockPool(8, placement=SURROGATE),
    "BlockPool(eviction)": lambda _: BlockPool(8, eviction=SURROGATE),
    "BlockPool(contiguity)": lambda _: BlockPool(8, contiguity=SURROGATE),
    "BlockPool(hash)": lambda _: BlockPool(8, hash=SURROGATE),
    "FreeBlocks(placement)": lambda _: FreeBlocks(8, placement=SURROGATE),
    "FreeBlocks(eviction)": lambda _: FreeBlocks(8, eviction=SURROGATE),
    "Prefix(hash)": lambda _: Prefix([1], hash=SURROGATE),
    "create(owner)": lambda kit: kit.pool.create([1], owner=SURROGATE),
    "fork(owner)": lambda kit: kit.pool.fork(kit.a, owner=SURROGATE),
    "pin(owner)": lambda kit: kit.pool.pin(kit.a, owner=SURROGATE),
    "plan_compaction": lambda kit: kit.pool.plan_compaction(SURROGATE),
    "holdings": lambda kit: kit.pool.holdings(SURROGATE),
    "Prefix(salt)": lambda _: Prefix([1], salt=SURROGATE),
}


@pytest.mark.parametrize("name", LONE_SURROGATES)
def test_a_lone_surrogate_is_refused(name: str) -> None:
    kit = Kit()
    with pytest.raises(KvcatchError):
        LONE_SURROGATES[name](kit)
    assert kit.seen() == BEFORE


HUGE_FLOATS: dict[str, Callable[[Kit], Any]] = {
    "retain(ttl)": lambda kit: kit.pool.retain([1], ttl=10**400),
    "now": lambda kit: setattr(kit.pool, "now", 10**400),
    "pin(deadline)": lambda kit: kit.pool.pin(kit.a, deadline=10**400),
    "audit(now)": lambda kit: kit.pool.audit([], now=10**400),
    "plan_compaction(bandwidth)": lambda kit: kit.pool.plan_compaction("runs", bandwidth=10**400),
}


@pytest.mark.parametrize("name", HUGE_FLOATS)
def test_an_integer_beyond_every_float_is_refused(name: str) -> None:
    kit = Kit()
    with pytest.raises(InvalidArgument):
        HUGE_FLOATS[name](kit)
    assert kit.seen() == BEFORE


BOOL_FLOATS: dict[str, Callable[[Kit], Any]] = {
    "retain(ttl)": lambda kit: kit.pool.retain([1], ttl=True),
    "now": lambda kit: setattr(kit.pool, "now", True),
    "pin(deadline)": lambda kit: kit.pool.pin(kit.a, deadline=True),
    "audit(now)": lambda kit: kit.pool.audit([], now=True),
    "plan_compaction(bandwidth)": lambda kit: kit.pool.plan_compaction("runs", bandwidth=True),
}


@pytest.mark.parametrize("name", BOOL_FLOATS)
def test_a_bool_is_no_number_of_seconds(name: str) -> None:
    kit = Kit()
    with pytest.raises((InvalidType, TypeError)):
        BOOL_FLOATS[name](kit)
    assert kit.seen() == BEFORE


@pytest.mark.parametrize("blocks", ["give_clean", "give_cached"])
@pytest.mark.parametrize("bad", [bad.param() for bad in BLOCKS])
def test_giving_back_what_is_no_block(blocks: str, bad: Bad) -> None:
    kit = Kit()
    kit.free.take(1, after=None)
    before = free_state(kit.free)
    with pytest.raises(bad.errors) as caught:
        getattr(kit.free, blocks)(bad.make(kit))
    assert bad.shown is None or bad.shown in str(caught.value)
    assert free_state(kit.free) == before


@pytest.mark.parametrize("give", ["give_clean", "give_cached"])
@pytest.mark.parametrize(
    ("blocks", "error", "shown"),
    [
        ([0, 5], DoubleFree, "5"),  # 5 is cached
        ([0, 2], DoubleFree, "2"),  # 2 is clean
        ([0, 1, 0], DoubleFree, "0"),
        ([0, 16], InvalidArgument, "16"),
        (np.array([0, 2**31 - 1], np.int32), InvalidArgument, str(2**31 - 1)),
    ],
)
def test_double_free(give: str, blocks: Any, error: type[KvcatchError], shown: str) -> None:
    kit = Kit()
    with pytest.raises(error, match=shown):
        getattr(kit.free, give)(blocks)
    assert kit.seen() == BEFORE


def test_double_free_of_a_sequence() -> None:
    kit = Kit()
    kit.pool.free(kit.child)
    before = state(kit.pool)
    with pytest.raises(StaleHandle, match=str(kit.child.id)):
        kit.pool.free(kit.child)
    with pytest.raises(StaleHandle):
        kit.pool.free([kit.a, kit.child])
    assert state(kit.pool) == before


def test_set_next_use() -> None:
    kit = Kit("clairvoyant")
    before = state(kit.pool)
    for bad in HANDLES:
        with pytest.raises(bad.errors):
            kit.pool.set_next_use(bad.make(kit), [1])
    for bad in [
        *arrays()[:-2],
        *NOT_ITERABLE,
        Bad("many", lambda _: [1, 2, 3, 4], "4", InvalidArgument),
    ]:
        with pytest.raises(bad.errors) as caught:
            kit.pool.set_next_use(kit.a, bad.make(kit))
        assert bad.shown is None or bad.shown in str(caught.value)
    assert state(kit.pool) == before
    with pytest.raises(InvalidArgument, match="clairvoyant"):
        Kit().pool.set_next_use(kit.a, [1])


def test_the_clock_of_a_pool_that_keeps_its_own() -> None:
    pool = BlockPool(4)
    with pytest.raises(InvalidArgument, match="manual_clock"):
        pool.now = 1.0
    assert pool.now >= 0


def test_a_plan_of_another_state_of_the_pool() -> None:
    pool = BlockPool(8, 4, placement="queue", manual_clock=True)
    seqs = [pool.create([i]) for i in range(4)]
    pool.free([seqs[0], seqs[2]])
    plan = pool.plan_compaction("largest_run", n=6)
    assert plan.num_moves == 1
    pool.free([seqs[1], seqs[3]])
    before = state(pool)
    with pytest.raises(StalePlan):
        plan.apply()
    assert state(pool) == before


def test_properties_cannot_be_set() -> None:
    kit = Kit()
    prefix = kit.pool.prefix([1])
    miss = kit.pool.explain_miss([1])
    for thing in (kit.pool, kit.free, kit.a, kit.pin, kit.plan, prefix, miss):
        names = [name for name in dir(thing) if not name.startswith("__")]
        for name in names:
            if name == "now":
                continue
            with pytest.raises(AttributeError):
                setattr(thing, name, 1)
        with pytest.raises(AttributeError):
            thing.something_else = 1
    with pytest.raises((AttributeError, TypeError)):
        del kit.pool.now
    assert kit.seen() == BEFORE


@pytest.mark.parametrize("kind", ["Sequence", "Pin", "CompactionPlan", "MissReport"])
def test_what_only_a_pool_makes(kind: str) -> None:
    with pytest.raises(TypeError):
        getattr(kvcatch, kind)()


def test_wrong_signatures() -> None:
    kit = Kit()
    for call in (
        BlockPool,
        FreeBlocks,
        Prefix,
        lambda: BlockPool(1, 2, 3),
        lambda: BlockPool(8, nonsense=1),
        kit.pool.create,
        lambda: kit.pool.create([1], "owner"),
        lambda: kit.pool.slot_mapping([kit.a]),
        lambda: kit.pool.block_tables([kit.a]),
        kit.pool.free,
        kit.pool.evict,
        lambda: kit.plan.apply(1, 2, 3),
    ):
        with pytest.raises(TypeError):
            call()
    assert kit.seen() == BEFORE


def test_arguments_that_run_code() -> None:
    kit = Kit()

    class Raises:
        def __index__(self) -> int:
            raise ZeroDivisionError

        def __iter__(self) -> Any:
            raise ZeroDivisionError

        def __repr__(self) -> str:
            raise ZeroDivisionError

    class Reenters:
        def __index__(self) -> int:
            kit.pool.stats()
            return 1

    def endless_then_raises() -> Any:
        yield 1
        raise ZeroDivisionError

    for call in (
        lambda: kit.pool.create(Raises()),
        lambda: kit.pool.create([Raises()]),
        lambda: kit.pool.evict(Raises()),
        lambda: kit.pool.free(Raises()),
        lambda: kit.pool.append([Raises()], 1),
        lambda: kit.pool.create(endless_then_raises()),
        lambda: kit.pool.audit(Raises()),
        lambda: kit.free.take(Raises()),
    ):
        with pytest.raises((KvcatchError, ZeroDivisionError)):
            call()
    assert kit.seen() == BEFORE
    assert kit.pool.evict(Reenters()) == 1


def test_other_buffers_and_sequences_are_fine() -> None:
    pool = BlockPool(16, 4)
    out = array.array("i", [9] * 4)
    view = memoryview(out).cast("B").cast("i", [2, 2])
    seqs = [
        pool.create(tokens)
        for tokens in (
            [1, 2, 3],
            (1, 2, 3),
            range(1, 4),
            np.array([1, 2, 3], np.uint8),
            np.arange(10, dtype=np.int64)[1:4],
            np.arange(10, dtype=np.int32)[6::-2][:3],
            array.array("q", [1, 2, 3]),
            memoryview(array.array("H", [1, 2, 3])),
            [np.int64(1), np.uint8(2), 3],
            [2**32 - 1],
        )
    ]
    pool.block_tables(seqs[:2], view, pad=-3)
    assert out.tolist() == [pool.block_ids(seqs[0])[0], -3, pool.block_ids(seqs[1])[0], -3]
    read = np.arange(3, dtype=np.int32)
    read.flags.writeable = False
    pool.create(read)
    pool.append({seqs[0], seqs[1]}, np.array([1, 2]))
    pool.append(np.array([seqs[2].id, 99, seqs[3].id])[::2])
    pool.free(seqs[4].id)
    pool.free(np.array([seqs[5].id], np.uint64))
    pool.validate()


def test_empty_batches_are_fine() -> None:
    kit = Kit()
    for empty in ([], (), np.zeros(0, np.int64), np.zeros(0, np.int32)):
        assert kit.pool.append(empty) == []
        assert kit.pool.append(empty, []) == []
        assert kit.pool.commit(empty) == 0
        kit.pool.free(empty)
        kit.pool.block_tables(empty, kit.out_tables)
        kit.pool.block_tables(empty, np.zeros((0, 0), np.int32))
        assert kit.pool.slot_mapping(empty, out=np.zeros(0, np.int64)) == 0
        assert kit.pool.num_runs(empty) == 0
    assert kit.pool.lookup_many([]).tolist() == []
    kit.free.give_clean([])
    kit.free.give_cached([])
    assert kit.free.take(0).tolist() == []
    assert kit.seen() == BEFORE


def test_an_empty_batch_commits_no_tokens() -> None:
    assert Kit().pool.commit([], []) == 0


def test_a_pin_is_no_sequence() -> None:
    pool = BlockPool(8, 4, manual_clock=True)
    seq = pool.create([1, 2, 3])
    pin = pool.pin(seq)
    before = state(pool)
    for call in (pool.free, pool.fork, pool.append, pool.block_ids, lambda x: pool.free([x])):
        with pytest.raises(KvcatchError):
            call(pin)
        assert state(pool) == before
    with pytest.raises(KvcatchError):
        pool.unpin(seq)
    assert state(pool) == before


def test_a_handle_of_another_pool_is_never_this_ones() -> None:
    mine, other = BlockPool(8, 4, manual_clock=True), BlockPool(8, 4, manual_clock=True)
    seq, foreign = mine.create([1, 2, 3]), other.create([1, 2, 3])
    pin = mine.pin(seq)
    foreign_pin = other.pin(foreign)
    before = state(mine)
    for call in (mine.free, mine.fork, mine.append, mine.block_ids, lambda x: mine.free([x])):
        with pytest.raises(StaleHandle):
            call(foreign)
        assert state(mine) == before
    with pytest.raises(StaleHandle):
        mine.unpin(foreign_pin)
    assert seq != foreign
    mine.unpin(pin)


def test_a_prefix_does_not_change_its_block_size_silently() -> None:
    prefix = Prefix(range(32), 16)
    with pytest.raises(InvalidArgument):
        Prefix(prefix, 8)
    with pytest.raises(InvalidArgument):
        Prefix(prefix, 16, hash="blake3")
    assert Prefix(prefix, 16).block_hashes() == prefix.block_hashes()


LIMITED = """
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import kvcatch
    try:
        kvcatch.{call}
    except (kvcatch.KvcatchError, MemoryError):
        print("refused")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs RLIMIT_AS")
@pytest.mark.parametrize(
    "call",
    ["BlockPool(2**20, 2**16)", "BlockPool(2**31)", "FreeBlocks(2**31)", "FreeBlocks(2**30)"],
)
def test_a_pool_beyond_memory_is_an_error_and_no_abort(call: str) -> None:
    script = textwrap.dedent(LIMITED.format(call=call))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "refused\n")
