//! Whole blocks: copies within a pool and between pools.

use super::layout::{Layout, Pool};
use super::threads::{Threads, parallel};
use crate::error::{Error, Result};
use crate::kernels::moves::{self, TEMPORARY};

/// Bytes below which threads cost more than they save.
const ALONE_BYTES: usize = 256 << 10;
/// Bytes of an item: small enough to share a few large blocks among threads.
const ITEM_BYTES: usize = 256 << 10;
/// A slice of blocks per thread is a multiple of this.
const LINE: usize = 64;

/// Asks for the first cache lines at an address.
#[inline]
fn prefetch(start: *const u8) {
    #[cfg(target_arch = "x86_64")]
    for line in 0..16 {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch reads nothing.
        #[allow(unsafe_code)]
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(line * LINE).cast());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = start;
}

/// Refuses ids of no block.
pub(super) fn check_ids(name: &'static str, ids: &[i32], num_blocks: usize) -> Result<()> {
    match ids.iter().find(|&&id| usize::try_from(id).map_or(true, |id| id >= num_blocks)) {
        Some(id) => Err(Error::invalid(name, id, format!("block ids must be within 0..{}", num_blocks - 1))),
        None => Ok(()),
    }
}

/// Refuses ids of no block, and copies within one pool that no order makes right, or a pool that overlaps another.
pub(super) fn check_copies(source: &Pool<'_>, target: &Pool<'_>, src: &[i32], dst: &[i32]) -> Result<()> {
    check_ids("src", src, source.layout.num_blocks)?;
    check_ids("dst", dst, target.layout.num_blocks)?;
    let (from, to) = (source.range(), target.range());
    let same = from == to;
    if !same && from.start < to.end && to.start < from.end {
        return Err(Error::invalid("target", "shared memory", "the pools overlap"));
    }
    check_hazards(src, dst, target.layout.num_blocks, same)
}

/// As [`moves::check`], for ids that are in range: a bit per block instead of sorting.
fn check_hazards(src: &[i32], dst: &[i32], num_blocks: usize, same: bool) -> Result<()> {
    if src.len() != dst.len() {
        return Err(Error::invalid("src", src.len(), format!("must be as many as the {} destinations", dst.len())));
    }
    let mut written = vec![0u64; num_blocks.div_ceil(64)];
    for &id in dst {
        let (word, bit) = (id as usize / 64, 1 << (id as usize % 64));
        if written[word] & bit != 0 {
            return Err(Error::invalid("dst", id, "is the destination of two copies"));
        }
        written[word] |= bit;
    }
    let is_written = |id: i32| written[id as usize / 64] >> (id as usize % 64) & 1 == 1;
    match src.iter().find(|&&id| same && is_written(id)) {
        Some(id) => Err(Error::invalid("dst", id, "is a source and a destination of one call")),
        None => Ok(()),
    }
}

fn check_alike(a: &Layout, b: &Layout) -> Result<()> {
    let shape = |l: &Layout| {
        let s = l.strides;
        let area = (s.kv, s.head, s.token, s.scale, s.scale_head, s.scale_token);
        (l.num_layers, l.num_kv_heads, l.head_dim, l.block_size, l.element, l.scales, area)
    };
    if shape(a) == shape(b) { Ok(()) } else { Err(Error::invalid("target", "layout", "blocks hold unlike things")) }
}

/// Copies block `src[i]` of `source` to block `dst[i]` of `target`, all layers; the pools may be one.
///
/// # Errors
/// [`Error::InvalidArgument`]: ids out of range, a destination named twice, or, within one pool, one that is a source.
pub fn copy_blocks(source: Pool<'_>, target: Pool<'_>, src: &[i32], dst: &[i32], threads: Threads) -> Result<()> {
    check_alike(source.layout, target.layout)?;
    check_copies(&source, &target, src, dst)?;
    let layers = source.layout.num_layers;
    let whole = source.layout.is_block_major() && target.layout.is_block_major();
    let runs = if whole { 1 } else { layers };
    let bytes = source.layout.layer_bytes() * layers / runs;
    let total = src.len() * runs * bytes;
    // Large runs are cut, small ones taken several at a time.
    let cuts = bytes.div_ceil(ITEM_BYTES).max(1);
    let cut = bytes.div_ceil(cuts).next_multiple_of(LINE);
    let pieces = src.len() * runs * cuts;
    let together = (ITEM_BYTES / cut.max(1)).clamp(1, pieces.max(1));
    let threads = if total < ALONE_BYTES { Threads::Own(1) } else { threads };
    let (from, to) = (source.layout.strides, target.layout.strides);
    parallel(threads, pieces.div_ceil(together), &|item| {
        for piece in item * together..((item + 1) * together).min(pieces) {
            let (copy, run, first) = (piece / cuts / runs, piece / cuts % runs, piece % cuts * cut);
            let length = cut.min(bytes.saturating_sub(first));
            let read = source.base().wrapping_add(src[copy] as usize * from.block + run * from.layer + first);
            let write = target.base().wrapping_add(dst[copy] as usize * to.block + run * to.layer + first);
            // Pieces lie anywhere: the start of the next one is on its way while this one is copied.
            if let Some(&next) = src.get((piece + 1) / cuts / runs) {
                prefetch(source.base().wrapping_add(next as usize * from.block));
            }
            // SAFETY: ids are in range; no byte written is read or written by another copy (`check_copies`).
            #[allow(unsafe_code)]
            unsafe {
                std::ptr::copy_nonoverlapping(read, write, length);
            }
        }
    })
}

/// Simultaneous assignment `new[dst[i]] = old[src[i]]`. Every thread does all copies in order on its own slice of each
/// block's bytes, so that chains and cycles need no waiting.
///
/// # Errors
/// [`Error::InvalidArgument`]: ids out of range, or a destination named twice.
pub fn assign_blocks(pool: Pool<'_>, src: &[i32], dst: &[i32], threads: Threads) -> Result<()> {
    let layout = pool.layout;
    check_ids("src", src, layout.num_blocks)?;
    check_ids("dst", dst, layout.num_blocks)?;
    let ops = moves::order(src, dst)?.ops;
    let runs = if layout.is_block_major() { 1 } else { layout.num_layers };
    let bytes = layout.layer_bytes() * layout.num_layers / runs;
    let (threads, count) = match threads {
        _ if ops.len() * runs * bytes < ALONE_BYTES => (Threads::Own(1), 1),
        Threads::Joined(n) | Threads::Own(n) => (threads, n.max(1)),
    };
    let slices = count.div_ceil(runs).max(bytes.div_ceil(ITEM_BYTES));
    let slice = bytes.div_ceil(slices).next_multiple_of(LINE);
    let strides = layout.strides;
    parallel(threads, runs * slices, &|item| {
        let first = item % slices * slice;
        let length = slice.min(bytes.saturating_sub(first));
        let mut temporary = vec![0u8; length];
        let temporary = temporary.as_mut_ptr();
        let place = |id: i32| match id {
            TEMPORARY => temporary,
            id => pool.base().wrapping_add(id as usize * strides.block + item / slices * strides.layer + first),
        };
        for &(dst, src) in &ops {
            // SAFETY: ids are in range; the slice belongs to this item alone, and `order` names no block twice in one
            // op.
            #[allow(unsafe_code)]
            unsafe {
                std::ptr::copy_nonoverlapping(place(src), place(dst), length);
            }
        }
    })
}
