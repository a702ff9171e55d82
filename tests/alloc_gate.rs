//! The hot calls of a running engine do not allocate: counted, not timed.
//!
//! A steady state is reached first (buffers have grown to what they need), then each call is counted.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]
#![allow(unsafe_code)] // A global allocator cannot be had otherwise; this test binary alone.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use kvcatch::free::{FreeBlocks, Request};
use kvcatch::ids::BlockId;
use kvcatch::placement;
use kvcatch::pool::{Admission, BlockPool, Config};
use kvcatch::prefix::{HashKind, Prefix};

struct Counting;

thread_local! {
    /// Allocations and growths of this thread: tests run side by side.
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

fn count() {
    // The thread may be on its way out; nobody counts then.
    let _ = COUNT.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: every call goes to the system allocator with the arguments it came with; counting touches no memory of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the contract of `realloc`; `ptr` came from the system allocator.
        unsafe { System.realloc(ptr, layout, new_size) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`; `ptr` came from the system allocator.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations(call: impl FnOnce()) -> usize {
    let before = COUNT.get();
    call();
    COUNT.get() - before
}

/// Most allocations of one of 100 calls, after 100 that need not count.
fn most(mut call: impl FnMut(usize)) -> usize {
    (0..100).for_each(&mut call);
    (100..200).map(|i| allocations(|| call(i))).max().unwrap()
}

#[test]
fn the_counter_counts() {
    assert_eq!(allocations(|| drop(std::hint::black_box(Box::new(1)))), 1);
    assert_eq!(allocations(|| ()), 0);
}

const BLOCK_SIZE: usize = 16;

fn pool(placement: &str, eviction: &str) -> BlockPool {
    let config = Config {
        num_blocks: 16_384,
        block_size: BLOCK_SIZE,
        placement: placement.into(),
        eviction: eviction.into(),
        null_block: true,
        ..Config::default()
    };
    BlockPool::new(config).unwrap()
}

fn prefix(tokens: Vec<u32>) -> Prefix {
    Prefix::new(tokens, BLOCK_SIZE, HashKind::Xxh3, b"").unwrap()
}

/// 256 sequences of 33 tokens, with room for them alone: their third block holds 15 more.
fn running(pool: &mut BlockPool) -> Vec<i64> {
    let commit = || Admission { commit: true, ..Admission::default() };
    (0..256u32).map(|i| pool.create(prefix(vec![i; 33]), commit()).unwrap().raw()).collect()
}

#[test]
fn append_that_needs_no_block_allocates_nothing() {
    for placement in placement::NAMES {
        let mut pool = pool(placement, "lru");
        let batch = running(&mut pool);
        for _ in 0..15 {
            assert_eq!(allocations(|| assert!(pool.append(&batch, |_| 1).unwrap().is_empty())), 0, "{placement}");
        }
        // The next one crosses into a new block, for which every table has room: the list of needs grows.
        let crossing = allocations(|| assert!(pool.append(&batch, |_| 1).unwrap().is_empty()));
        assert!(crossing <= 10, "{placement}: {crossing}");
        // From then on it is room again.
        assert_eq!(allocations(|| drop(pool.append(&batch, |_| 1).unwrap())), 0, "{placement}");
        pool.validate().unwrap();
    }
}

#[test]
fn commit_that_fills_no_block_allocates_nothing_but_tokens() {
    let mut pool = pool("bitmap", "lru");
    let batch = running(&mut pool);
    let tokens = vec![7u32; batch.len()];
    let mut in_all = 0;
    for _ in 0..14 {
        pool.append(&batch, |_| 1).unwrap();
        in_all += allocations(|| assert_eq!(pool.commit(&batch, Some(&tokens), |_| Some(1), false), Ok(0)));
    }
    // Each list of token ids doubles once on the way from 33 to 47.
    assert!(in_all <= batch.len(), "{in_all}");
}

#[test]
fn taking_and_giving_clean_blocks_allocates_nothing() {
    for placement in placement::NAMES {
        for eviction in ["lru", "slru"] {
            let mut free = half_full(placement, eviction);
            let (mut out, mut evicted) = (Vec::with_capacity(64), Vec::with_capacity(64));
            let cycle = most(|_| {
                out.clear();
                free.take(64, Request::default(), &mut out, &mut evicted).unwrap();
                free.give_clean(&out).unwrap();
            });
            assert_eq!(cycle, 0, "{placement} {eviction}");
            assert!(evicted.is_empty());
            free.validate().unwrap();
        }
    }
}

#[test]
fn taking_and_giving_cached_blocks_allocates_nothing() {
    for placement in placement::NAMES {
        for eviction in ["lru", "slru"] {
            let mut free = half_full(placement, eviction);
            // All that is left is cached: every take evicts.
            let mut rest = Vec::new();
            free.take(free.len(), Request::default(), &mut rest, &mut Vec::new()).unwrap();
            rest.chunks(64).for_each(|ids| free.give_cached(ids).unwrap());
            let (mut out, mut evicted) = (Vec::with_capacity(64), Vec::with_capacity(64));
            // Long enough for everything to be evicted once.
            for _ in 0..1_000 {
                out.clear();
                evicted.clear();
                free.take(64, Request::default(), &mut out, &mut evicted).unwrap();
                free.give_cached(&out).unwrap();
            }
            let cycle = most(|_| {
                out.clear();
                evicted.clear();
                free.take(64, Request::default(), &mut out, &mut evicted).unwrap();
                free.give_cached(&out).unwrap();
            });
            assert_eq!(cycle, 0, "{placement} {eviction}");
            assert_eq!(evicted.len(), 64, "{placement} {eviction}");
            free.validate().unwrap();
        }
    }
}

/// 4,096 blocks, every third handed out.
fn half_full(placement: &str, eviction: &str) -> FreeBlocks {
    let mut free = FreeBlocks::new(4_096, placement, eviction, 0).unwrap();
    let mut all = Vec::new();
    free.take(4_096, Request::default(), &mut all, &mut Vec::new()).unwrap();
    let back: Vec<BlockId> = all.into_iter().filter(|id| id.0 % 3 != 0 || id.0 % 64 > 40).collect();
    free.give_clean(&back).unwrap();
    free
}

#[test]
fn lookup_of_a_cached_prefix_allocates_nothing() {
    let mut pool = pool("bitmap", "lru");
    let tokens: Vec<u32> = (0..8_192).collect();
    let commit = Admission { commit: true, ..Admission::default() };
    pool.create(prefix(tokens.clone()), commit).unwrap();
    let (all, half) = (prefix(tokens.clone()), prefix(tokens[..4_100].to_vec()));
    let cycle = most(|i| {
        let (prompt, hit) = if i % 2 == 0 { (&all, 8_192) } else { (&half, 4_096) };
        assert_eq!(pool.lookup(prompt).unwrap(), hit);
    });
    assert_eq!(cycle, 0);
}

#[test]
fn admitting_a_prompt_allocates_a_fixed_number_of_times() {
    let mut pool = pool("bitmap", "lru");
    let tokens: Vec<u32> = (0..4_096).collect();
    let mut prompts: Vec<Prefix> = (0..200).map(|_| prefix(tokens.clone())).collect();
    let cycle = most(|_| {
        let commit = Admission { commit: true, ..Admission::default() };
        let handle = pool.create(prompts.pop().unwrap(), commit).unwrap();
        pool.free(&[handle.raw()]).unwrap();
    });
    // The block table: its length is known beforehand.
    assert!(cycle <= 1, "{cycle}");
}
