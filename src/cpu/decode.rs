//! Attention of one new token per sequence over its blocks.
//!
//! The positions of a sequence are cut every [`SPLIT`] tokens, whatever the threads; each (piece, kv head) is an item that
//! serves all query heads of the group with one read of keys and values. A sequence of several pieces keeps what each
//! found (largest logit, sum, output), and whoever finishes its last piece merges them in order of position. So the result
//! depends neither on the number of threads nor on where the blocks lie.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU32, Ordering};

use super::attention::{Attention, MAX_GROUP, ROW, STEP, Side, TILE, tiles, with_scratch};
use super::convert::{Bf16, E4m3, Element, F16, F32, Stored, narrow};
use super::level::{Level, Work, run_at};
use super::math::{Running, exp2_one, rescale, weigh};
use super::simd::Simd;
use super::threads::{Threads, parallel};
use crate::error::{Error, Result};

/// Tokens of a piece: long enough that merging costs little, short enough to share one long sequence among threads.
pub const SPLIT: usize = 256;

/// Keys and values, in bytes, below which threads cost more than they save.
const ALONE_BYTES: usize = 128 << 10;

struct Item {
    seq: u32,
    kv_head: u32,
    start: usize,
    end: usize,
    /// Number among the pieces of (sequence, kv head), and how many there are.
    piece: u32,
    pieces: u32,
    /// First partial of (sequence, kv head), and its counter. Unused where there is one piece.
    partial: usize,
    counter: usize,
}

struct Decode<'a, E> {
    call: &'a Attention<'a>,
    items: Vec<Item>,
    /// `[partials][group][head_dim + 2]`: output, largest logit, sum.
    partials: Partials,
    /// Pieces finished per (sequence, kv head).
    finished: Vec<AtomicU32>,
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
    let kv_heads = call.pool.layout.num_kv_heads;
    let (mut items, mut partials, mut counters, mut tokens) = (Vec::new(), 0, 0, 0);
    for (seq, &len) in call.tables.lens.iter().enumerate() {
        if len == 0 {
            zero(call, seq);
            continue;
        }
        let first = if call.rules.window == 0 { 0 } else { len.saturating_sub(call.rules.window) };
        tokens += len - first;
        let pieces = len.div_ceil(SPLIT) - first / SPLIT;
        for kv_head in 0..kv_heads {
            for piece in 0..pieces {
                let start = (first / SPLIT + piece) * SPLIT;
                items.push(Item {
                    seq: seq as u32,
                    kv_head: kv_head as u32,
                    start: start.max(first),
                    end: (start + SPLIT).min(len),
                    piece: piece as u32,
                    pieces: pieces as u32,
                    partial: partials,
                    counter: counters,
                });
            }
            if pieces > 1 {
                partials += pieces;
                counters += 1;
            }
        }
    }
    let mut owner = vec![0.0; partials * call.group * (call.pool.layout.head_dim + 2)];
    let work = Decode::<E> {
        call,
        items,
        partials: Partials { base: owner.as_mut_ptr(), _owner: owner },
        finished: (0..counters).map(|_| AtomicU32::new(0)).collect(),
        element: PhantomData,
    };
    let bytes = tokens * kv_heads * 2 * call.pool.layout.head_dim * E::ELEMENT.bytes();
    let threads = if bytes < ALONE_BYTES { Threads::Own(1) } else { threads };
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
        with_scratch(group * (2 * padded + ROW) + TILE * padded, |scratch| {
            let (query, rest) = scratch.split_at_mut(group * padded);
            let (out, rest) = rest.split_at_mut(group * padded);
            let (logits, tile) = rest.split_at_mut(group * ROW);
            let mut running = [Running::NONE; MAX_GROUP];
            out.fill(0.0);
            // SAFETY: the CPU has S (caller), and the pool stores E.
            unsafe {
                for g in 0..group {
                    let head = item.kv_head as usize * group + g;
                    call.load_query::<S>(item.seq as usize, head, &mut query[g * padded..(g + 1) * padded]);
                }
                let mut start = item.start;
                while start < item.end {
                    let end = (start / STEP + 1) * STEP;
                    let end = end.min(item.end);
                    self.step::<S>(item, start, end, query, out, logits, tile, &mut running);
                    start = end;
                }
                if item.pieces == 1 {
                    for g in 0..group {
                        let head = item.kv_head as usize * group + g;
                        call.store_out(item.seq as usize, head, &mut out[g * padded..(g + 1) * padded], running[g].sum);
                    }
                } else {
                    self.keep::<S>(item, out, &running);
                }
            }
        });
    }
}

#[allow(unsafe_code)]
impl<E: Stored> Decode<'_, E> {
    /// Up to [`STEP`] tokens: logits of all, their weights, the values they weigh.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    unsafe fn step<S: Simd>(
        &self,
        item: &Item,
        start: usize,
        end: usize,
        query: &[f32],
        out: &mut [f32],
        logits: &mut [f32],
        scratch: &mut [f32],
        running: &mut [Running; MAX_GROUP],
    ) {
        let (call, group, padded) = (self.call, self.call.group, self.call.padded::<S>());
        let (seq, kv_head) = (item.seq as usize, item.kv_head as usize);
        let (keys, values) = (Side::new::<S>(call, 0, kv_head), Side::new::<S>(call, 1, kv_head));
        let (blocks, block_size) = (call.tables.blocks(seq), call.pool.layout.block_size);
        let count = end - start;
        let whole = count.next_multiple_of(S::LANES);
        // SAFETY: the CPU has S and the pool stores E (caller); rows and tiles are within the scratch.
        unsafe {
            for tile in tiles(blocks, block_size, start, end) {
                let (rows, stride) = keys.tile::<S, E>(tile, scratch.as_mut_ptr());
                for g in 0..group {
                    let row = logits.as_mut_ptr().add(g * ROW + tile.start - start);
                    for first in (0..tile.tokens).step_by(S::LANES) {
                        let dots = S::dots(
                            query.as_ptr().add(g * padded),
                            rows.add(first * stride),
                            stride,
                            padded / S::LANES,
                        );
                        S::store(row.add(first), dots);
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
                    rescale::<S>(out.as_mut_ptr().add(g * padded), padded, factor);
                }
            }
            for tile in tiles(blocks, block_size, start, end) {
                let rows = values.tile::<S, E>(tile, scratch.as_mut_ptr());
                let weights = logits.as_ptr().add(tile.start - start);
                let shape = (group, tile.tokens, padded);
                S::accumulate(shape, (weights, ROW), rows, (out.as_mut_ptr(), padded));
            }
        }
    }

    /// Keeps what a piece found; the last piece to finish merges all.
    #[inline(always)]
    unsafe fn keep<S: Simd>(&self, item: &Item, out: &mut [f32], running: &[Running; MAX_GROUP]) {
        let (call, group, padded) = (self.call, self.call.group, self.call.padded::<S>());
        let dim = call.out.head_dim;
        let part = |piece: usize, g: usize| {
            self.partials.base.wrapping_add(((item.partial + piece) * group + g) * (dim + 2))
        };
        for g in 0..group {
            let part = part(item.piece as usize, g);
            // SAFETY: this piece's own part of the partials.
            unsafe {
                std::ptr::copy_nonoverlapping(out.as_ptr().add(g * padded), part, dim);
                *part.add(dim) = running[g].top;
                *part.add(dim + 1) = running[g].sum;
            }
        }
        if self.finished[item.counter].fetch_add(1, Ordering::AcqRel) + 1 < item.pieces {
            return;
        }
        for g in 0..group {
            let total = &mut out[g * padded..g * padded + dim];
            // SAFETY: all pieces were written before the counter reached their number.
            unsafe {
                let top = (0..item.pieces as usize).fold(f32::NEG_INFINITY, |top, i| top.max(*part(i, g).add(dim)));
                let shift = Running { top, sum: 0.0 }.shift();
                total.fill(0.0);
                let mut sum = 0.0;
                for i in 0..item.pieces as usize {
                    let piece = std::slice::from_raw_parts(part(i, g), dim + 2);
                    let weight = exp2_one::<S>(piece[dim] - shift);
                    total.iter_mut().zip(piece).for_each(|(total, x)| *total += weight * x);
                    sum += weight * piece[dim + 1];
                }
                call.store_out(item.seq as usize, item.kv_head as usize * group + g, total, sum);
            }
        }
    }
}
