//! Attention of one new token per sequence over its blocks.
//!
//! The positions of a sequence are cut every [`SPLIT`] tokens, whatever the threads; a piece is an item that serves all
//! query heads with one read of keys and values (or, where threads would be idle, several items that share the kv
//! heads). A sequence of several pieces keeps what each found (largest logit, sum, output), and whoever finishes its
//! last piece merges them in order of position. So the result depends neither on the number of threads nor on where the
//! blocks lie.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::attention::{Attention, ROW, STEP, Scratch, Side, TILE, tiles};
use super::convert::{Bf16, E4m3, Element, F16, F32, Stored, narrow};
use super::level::{Level, Work, run_at};
use super::math::{Running, exp2_one, rescale, weigh};
use super::matrix::ROWS;
use super::simd::Simd;
use super::threads::{Threads, parallel};
use crate::error::{Error, Result};

/// Tokens of a piece: long enough that merging costs little, short enough to share one long sequence among threads.
pub const SPLIT: usize = 256;

/// Keys and values, in bytes, below which threads cost more than they save.
const ALONE_BYTES: usize = 128 << 10;
/// Items that let threads finish at about the same time.
const ITEMS_PER_THREAD: usize = 4;

struct Item {
    seq: usize,
    /// First kv head, and how many.
    kv_head: usize,
    kv_heads: usize,
    start: usize,
    end: usize,
    /// Number among the pieces of the sequence, and how many there are.
    piece: usize,
    pieces: usize,
    /// First partial of the sequence, and the counter of (sequence, first kv head). Unused where there is one piece.
    partial: usize,
    counter: usize,
}

struct Decode<'a, E> {
    call: &'a Attention<'a>,
    items: Vec<Item>,
    /// `[partials][query heads][head_dim + 2]`: output, largest logit, sum.
    partials: Partials,
    /// Pieces finished, per sequence and share of the kv heads.
    finished: Vec<AtomicUsize>,
    element: PhantomData<E>,
}

/// Memory that items write side by side.
struct Partials {
    base: *mut f32,
    _owner: Vec<f32>,
}

// SAFETY: each piece writes its own part; the merging thread reads them after the counter said that all were written.
#[allow(unsafe_code)]
unsafe impl Sync for Partials {}

/// Attention of one query row per sequence.
///
/// # Errors
/// [`Error::InvalidArgument`]: rows that are not one per sequence; [`Error::Corrupt`] for a bug.
pub fn decode(call: &Attention<'_>, level: Level, threads: Threads) -> Result<()> {
    if call.query.rows != call.tables.len() {
        let reason = format!("{} rows are needed, one per sequence", call.tables.len());
        return Err(Error::invalid("query", call.query.rows, reason));
    }
    match call.pool.layout.element {
        Element::F32 => run::<F32>(call, level, threads),
        Element::F16 => run::<F16>(call, level, threads),
        Element::Bf16 => run::<Bf16>(call, level, threads),
        Element::E4m3 => run::<E4m3>(call, level, threads),
    }
}

fn run<E: Stored>(call: &Attention<'_>, level: Level, threads: Threads) -> Result<()> {
    let layout = call.pool.layout;
    let first = |len: usize| if call.rules.window == 0 { 0 } else { len.saturating_sub(call.rules.window) };
    let pieces = |len: usize| len.div_ceil(SPLIT) - first(len) / SPLIT;
    let tokens: usize = call.tables.lens.iter().map(|&len| len - first(len)).sum();
    let bytes = tokens * layout.num_kv_heads * 2 * layout.head_dim * E::ELEMENT.bytes();
    let threads = if bytes < ALONE_BYTES { Threads::Own(1) } else { threads };
    // An item takes all kv heads of its piece, which lie side by side in a block, unless that leaves threads idle.
    let all: usize = call.tables.lens.iter().map(|&len| pieces(len)).sum();
    let shares = (ITEMS_PER_THREAD * threads.count()).div_ceil(all.max(1)).clamp(1, layout.num_kv_heads);
    let shares = if threads.count() == 1 { 1 } else { shares };
    let share = layout.num_kv_heads.div_ceil(shares);
    let (mut items, mut partials, mut counters) = (Vec::with_capacity(all * shares), 0, 0);
    for (seq, &len) in call.tables.lens.iter().enumerate() {
        if len == 0 {
            zero(call, seq);
            continue;
        }
        let (first, pieces) = (first(len), pieces(len));
        for kv_head in (0..layout.num_kv_heads).step_by(share) {
            for piece in 0..pieces {
                let start = (first / SPLIT + piece) * SPLIT;
                items.push(Item {
                    seq,
                    kv_head,
                    kv_heads: share.min(layout.num_kv_heads - kv_head),
                    start: start.max(first),
                    end: (start + SPLIT).min(len),
                    piece,
                    pieces,
                    partial: partials,
                    counter: counters,
                });
            }
            if pieces > 1 {
                counters += 1;
            }
        }
        if pieces > 1 {
            partials += pieces;
        }
    }
    let mut owner = vec![0.0; partials * call.query.heads * (layout.head_dim + 2)];
    let work = Decode::<E> {
        call,
        items,
        partials: Partials { base: owner.as_mut_ptr(), _owner: owner },
        finished: (0..counters).map(|_| AtomicUsize::new(0)).collect(),
        element: PhantomData,
    };
    // SAFETY: a `Level` is only made for a CPU that has it; `parallel` gives out each item once.
    #[allow(unsafe_code)]
    parallel(threads, work.items.len(), &|i| unsafe { run_at(level, &work, i) })
}

/// A sequence without tokens gives zeros.
#[allow(unsafe_code)]
fn zero(call: &Attention<'_>, seq: usize) {
    let zeros = vec![0.0; call.out.head_dim];
    for head in 0..call.out.heads {
        // SAFETY: a head of a row of the result is valid for writes.
        unsafe { narrow(call.out.element, &zeros, call.out.at(seq, head)) };
    }
}

#[allow(unsafe_code)]
impl<E: Stored> Work for Decode<'_, E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(&self, i: usize) {
        let (call, item) = (self.call, &self.items[i]);
        let (group, padded) = (call.group, call.padded::<S>());
        let (first, heads) = (item.kv_head * group, item.kv_heads * group);
        let mut scratch = Scratch::take(heads * 2 * padded + group * ROW + TILE * padded);
        let (query, rest) = scratch.numbers().split_at_mut(heads * padded);
        let (out, rest) = rest.split_at_mut(heads * padded);
        let (logits, tile) = rest.split_at_mut(group * ROW);
        let mut running = vec![Running::NONE; heads];
        out.fill(0.0);
        // SAFETY: the CPU has S (caller), and the pool stores E.
        unsafe {
            for (head, query) in query.chunks_exact_mut(padded).enumerate() {
                call.load_query::<S>(item.seq, first + head, query);
            }
            let mut start = item.start;
            while start < item.end {
                let end = ((start / STEP + 1) * STEP).min(item.end);
                for share in 0..item.kv_heads {
                    let (row, rows) = (share * group, share * group..(share + 1) * group);
                    let out = out.as_mut_ptr().add(row * padded);
                    let query = query.as_ptr().add(row * padded);
                    self.step::<S>(item, share, start..end, query, out, logits, tile, &mut running[rows]);
                }
                start = end;
            }
            if item.pieces == 1 {
                for (head, out) in out.chunks_exact_mut(padded).enumerate() {
                    call.store_out(item.seq, first + head, out, running[head].sum);
                }
            } else {
                self.keep::<S>(item, out, &running);
            }
        }
    }
}

#[allow(unsafe_code)]
impl<E: Stored> Decode<'_, E> {
    /// Up to [`STEP`] tokens of one kv head: logits of all, their weights, the values they weigh.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    unsafe fn step<S: Simd>(
        &self,
        item: &Item,
        share: usize,
        tokens: Range<usize>,
        query: *const f32,
        out: *mut f32,
        logits: &mut [f32],
        scratch: &mut [f32],
        running: &mut [Running],
    ) {
        let (call, group, padded) = (self.call, self.call.group, self.call.padded::<S>());
        let (seq, kv_head) = (item.seq, item.kv_head + share);
        let (keys, values) = (Side::new::<S>(call, 0, kv_head), Side::new::<S>(call, 1, kv_head));
        let (blocks, block_size) = (call.tables.blocks(seq), call.pool.layout.block_size);
        let (start, end) = (tokens.start, tokens.end);
        let (count, chunks) = (end - start, padded / S::LANES);
        let whole = count.next_multiple_of(S::LANES);
        let pairs = S::BF16
            && (E::ELEMENT, call.query.element) == (Element::Bf16, Element::Bf16)
            && call.query.head_dim.is_multiple_of(2 * S::LANES)
            && call.pool.layout.strides.token == 2 * padded;
        // SAFETY: the CPU has S and the pool stores E (caller); rows and tiles are within the scratch.
        unsafe {
            for tile in tiles(blocks, block_size, start, end) {
                values.prefetch::<S>(tile);
                if pairs && tile.tokens == TILE {
                    // bf16 with bf16 as they are stored: exact products, and nothing to widen.
                    let rows = keys.address(tile).cast::<u16>();
                    for g in 0..group {
                        let query = call.query.at(seq, kv_head * group + g).cast::<u16>();
                        let dots = S::dots_bf16(query, rows, padded / (2 * S::LANES));
                        let row = logits.as_mut_ptr().add(g * ROW + tile.start - start);
                        S::store(row, S::mul(dots, S::splat(call.query_factor())));
                    }
                    continue;
                }
                let rows = keys.tile::<S, E>(tile, scratch.as_mut_ptr());
                for g in 0..group {
                    let row = logits.as_mut_ptr().add(g * ROW + tile.start - start);
                    let query = query.add(g * padded);
                    let mut first = 0;
                    while first < tile.tokens {
                        S::store(row.add(first), S::dots(query, rows.add(first * padded), chunks));
                        first += S::LANES;
                    }
                }
            }
            let position = call.tables.lens[seq] - 1;
            for (g, running) in running.iter_mut().enumerate().take(group) {
                let row = logits.as_mut_ptr().add(g * ROW);
                call.shape_logits::<S>(row, whole, kv_head * group + g, start as f32 - position as f32);
                for i in count..whole {
                    *row.add(i) = f32::NEG_INFINITY;
                }
                let factor = weigh::<S>(row, whole, running);
                if factor != 1.0 {
                    rescale::<S>(out.add(g * padded), padded, factor);
                }
            }
            // The keys of the next head, or step, are asked for meanwhile, as the values were during the keys.
            let (next, from) = if share + 1 < item.kv_heads { (kv_head + 1, start) } else { (item.kv_head, end) };
            let next = Side::new::<S>(call, 0, next);
            let mut ahead = tiles(blocks, block_size, from, item.end);
            for tile in tiles(blocks, block_size, start, end) {
                if let Some(tile) = ahead.next() {
                    next.prefetch::<S>(tile);
                }
                let weights = (logits.as_ptr().add(tile.start - start), ROW);
                let shape = (group, tile.tokens, padded);
                match values.stored::<E>(tile) {
                    Some(rows) if group <= ROWS => S::accumulate::<E>(shape, weights, rows, (out, padded)),
                    _ => {
                        let rows = values.tile::<S, E>(tile, scratch.as_mut_ptr());
                        S::accumulate::<F32>(shape, weights, (rows.cast(), 4 * padded), (out, padded));
                    }
                }
            }
        }
    }

    /// Keeps what a piece found; the last piece to finish merges all.
    #[inline(always)]
    unsafe fn keep<S: Simd>(&self, item: &Item, out: &mut [f32], running: &[Running]) {
        let (call, padded) = (self.call, self.call.padded::<S>());
        let (dim, first) = (call.out.head_dim, item.kv_head * call.group);
        let part = |piece: usize, head: usize| {
            self.partials.base.wrapping_add(((item.partial + piece) * call.query.heads + head) * (dim + 2))
        };
        for (head, running) in running.iter().enumerate() {
            let part = part(item.piece, first + head);
            // SAFETY: this piece's own part of the partials.
            unsafe {
                std::ptr::copy_nonoverlapping(out.as_ptr().add(head * padded), part, dim);
                *part.add(dim) = running.top;
                *part.add(dim + 1) = running.sum;
            }
        }
        if self.finished[item.counter].fetch_add(1, Ordering::AcqRel) + 1 < item.pieces {
            return;
        }
        for (head, total) in out.chunks_exact_mut(padded).enumerate() {
            total.fill(0.0);
            // SAFETY: all pieces were written before the counter reached their number.
            unsafe {
                let mut top = f32::NEG_INFINITY;
                for i in 0..item.pieces {
                    top = top.max(*part(i, first + head).add(dim));
                }
                let shift = Running { top, sum: 0.0 }.shift();
                let mut sum = 0.0;
                for i in 0..item.pieces {
                    let piece = std::slice::from_raw_parts(part(i, first + head), dim + 2);
                    let weight = exp2_one::<S>(piece[dim] - shift);
                    for (total, x) in total[..dim].iter_mut().zip(piece) {
                        *total += weight * x;
                    }
                    sum += weight * piece[dim + 1];
                }
                call.store_out(item.seq, first + head, total, sum);
            }
        }
    }
}
