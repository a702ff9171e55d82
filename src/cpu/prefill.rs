//! Causal attention of the last tokens of each sequence over its blocks.
//!
//! An item is (sequence, kv head, a tile of query tokens): all query heads of the group are rows of one matrix. Keys
//! are taken `STEP` positions at a time (cut at multiples of it), widened and transposed once, so that a tile of
//! logits is a product of small matrices held in registers; so is the output. A row's result depends on its own keys
//! alone, not on which chunk, tile or thread it was computed in.

use std::marker::PhantomData;

use super::attention::{Attention, STEP, Scratch, Side, TILE, tiles};
use super::convert::{Bf16, E4m3, Element, F16, F32, Stored};
use super::level::{Level, Work, run_at};
use super::math::{Running, rescale, weigh};
use super::simd::Simd;
use super::threads::{Threads, parallel};
use crate::error::{Error, Result};

/// Rows (query tokens times heads of the group) of an item, about.
const ROWS: usize = 96;

struct Item {
    seq: usize,
    kv_head: usize,
    /// First row of the query, and its position in the sequence.
    row: usize,
    position: usize,
    tokens: usize,
}

struct Prefill<'a, E> {
    call: &'a Attention<'a>,
    items: Vec<Item>,
    element: PhantomData<E>,
}

/// Attention of rows `starts[s]..starts[s + 1]`, the last tokens of sequence `s`.
///
/// # Errors
/// [`Error::InvalidArgument`]: starts that do not ascend from 0 to the rows, more rows than a sequence has tokens;
/// [`Error::Corrupt`] for a bug.
pub fn prefill(call: &Attention<'_>, starts: &[i64], level: Level, threads: Threads) -> Result<()> {
    if starts.len() != call.tables.len() + 1 {
        let reason = format!("{} are needed, one more than sequences", call.tables.len() + 1);
        return Err(Error::invalid("query_starts", starts.len(), reason));
    }
    let rows = call.query.rows as i64;
    if let Some(&start) = starts.iter().find(|&&start| !(0..=rows).contains(&start)) {
        return Err(Error::invalid("query_starts", start, format!("must be within 0..={rows}")));
    }
    if starts.first() != Some(&0) || starts.last() != Some(&rows) {
        return Err(Error::invalid(
            "query_starts",
            format!("{:?}", (starts.first(), starts.last())),
            "must be 0 and the rows at its ends",
        ));
    }
    for (seq, pair) in starts.windows(2).enumerate() {
        let (tokens, len) = (pair[1] - pair[0], call.tables.lens[seq]);
        if tokens < 0 || tokens > len as i64 {
            let reason = format!("sequence {seq} must have 0 to {len} rows, its tokens");
            return Err(Error::invalid("query_starts", tokens, reason));
        }
    }
    match call.pool.layout.element {
        Element::F32 => run::<F32>(call, starts, level, threads),
        Element::F16 => run::<F16>(call, starts, level, threads),
        Element::Bf16 => run::<Bf16>(call, starts, level, threads),
        Element::E4m3 => run::<E4m3>(call, starts, level, threads),
    }
}

fn run<E: Stored>(call: &Attention<'_>, starts: &[i64], level: Level, threads: Threads) -> Result<()> {
    let most = (ROWS / call.group).max(1);
    let mut items = Vec::new();
    for (seq, pair) in starts.windows(2).enumerate() {
        let (first, end) = (pair[0] as usize, pair[1] as usize);
        let before = call.tables.lens[seq] - (end - first);
        for row in (first..end).step_by(most) {
            let (position, tokens) = (before + row - first, most.min(end - row));
            items.extend((0..call.pool.layout.num_kv_heads).map(|kv_head| Item {
                seq,
                kv_head,
                row,
                position,
                tokens,
            }));
        }
    }
    // The longest first, so that the last ones to finish are short.
    items.sort_by_key(|item| std::cmp::Reverse(item.position));
    let work = Prefill::<E> { call, items, element: PhantomData };
    // SAFETY: a `Level` is only made for a CPU that has it; `parallel` gives out each item once.
    #[allow(unsafe_code)]
    parallel(threads, work.items.len(), &|i| unsafe { run_at(level, &work, i) })
}

/// Buffers of an item, all of f32.
struct Buffers<'a> {
    /// `[rows][padded]`
    query: &'a mut [f32],
    /// `[rows][padded]`
    out: &'a mut [f32],
    /// `[rows][STEP]`
    logits: &'a mut [f32],
    /// `[padded][STEP]`
    keys: &'a mut [f32],
    /// `[STEP][padded]`
    values: &'a mut [f32],
    /// `[TILE][padded]`
    tile: &'a mut [f32],
    /// `[rows][2]`: largest logit, sum.
    running: &'a mut [f32],
}

#[allow(unsafe_code)]
impl<E: Stored> Work for Prefill<'_, E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(&self, i: usize) {
        let (call, item) = (self.call, &self.items[i]);
        let (group, padded) = (call.group, call.padded::<S>());
        let rows = item.tokens * group;
        let sizes = [rows * padded, rows * padded, rows * STEP, padded * STEP, STEP * padded, TILE * padded, rows * 2];
        let mut scratch = Scratch::take(sizes.iter().sum());
        let mut left = scratch.numbers();
        let [query, out, logits, keys, values, tile, running] = sizes.map(|size| {
            let (part, rest) = std::mem::take(&mut left).split_at_mut(size);
            left = rest;
            part
        });
        let mut buffers = Buffers { query, out, logits, keys, values, tile, running };
        buffers.out.fill(0.0);
        for pair in buffers.running.chunks_exact_mut(2) {
            pair.copy_from_slice(&[Running::NONE.top, Running::NONE.sum]);
        }
        let first = match call.rules.window {
            0 => 0,
            window => (item.position + 1).saturating_sub(window),
        };
        let end = item.position + item.tokens;
        // SAFETY: the CPU has S (caller), and the pool stores E.
        unsafe {
            for row in 0..rows {
                let target = &mut buffers.query[row * padded..(row + 1) * padded];
                call.load_query::<S>(item.row + row / group, item.kv_head * group + row % group, target);
            }
            let mut start = first / STEP * STEP;
            while start < end {
                self.step::<S>(item, start, (start + STEP).min(end), first, &mut buffers);
                start += STEP;
            }
        }
        for row in 0..rows {
            let values = &mut buffers.out[row * padded..(row + 1) * padded];
            let sum = buffers.running[2 * row + 1];
            call.store_out(item.row + row / group, item.kv_head * group + row % group, values, sum);
        }
    }
}

#[allow(unsafe_code)]
impl<E: Stored> Prefill<'_, E> {
    /// Positions `start..end`, of which those from `first` on are seen by anybody.
    #[inline(always)]
    unsafe fn step<S: Simd>(&self, item: &Item, start: usize, end: usize, first: usize, buffers: &mut Buffers<'_>) {
        let (call, group, padded) = (self.call, self.call.group, self.call.padded::<S>());
        let rows = item.tokens * group;
        let (keys, values) = (Side::new::<S>(call, 0, item.kv_head), Side::new::<S>(call, 1, item.kv_head));
        let (blocks, block_size) = (call.tables.blocks(item.seq), call.pool.layout.block_size);
        let from = start.max(first);
        // SAFETY: the CPU has S and the pool stores E (caller); all is within the buffers.
        unsafe {
            // Blocks before the window may be gone: their rows are not read but taken for zero.
            buffers.values[..(from - start) * padded].fill(0.0);
            for tile in tiles(blocks, block_size, from, end) {
                let at = tile.start - start;
                values.copy::<S, E>(tile, buffers.values.as_mut_ptr().add(at * padded));
                let source = keys.tile::<S, E>(tile, buffers.tile.as_mut_ptr());
                if tile.tokens == TILE && at.is_multiple_of(S::LANES) {
                    for row in (0..TILE).step_by(S::LANES) {
                        for column in (0..padded).step_by(S::LANES) {
                            let target = buffers.keys.as_mut_ptr().add(column * STEP + at + row);
                            S::transpose(source.add(row * padded + column), padded, target, STEP);
                        }
                    }
                } else {
                    for row in 0..tile.tokens {
                        for column in 0..padded {
                            buffers.keys[column * STEP + at + row] = *source.add(row * padded + column);
                        }
                    }
                }
            }
            buffers.logits.fill(0.0);
            let columns = (end - start).next_multiple_of(S::LANES);
            S::accumulate::<F32>(
                (rows, padded, columns),
                (buffers.query.as_ptr(), padded),
                (buffers.keys.as_ptr().cast(), 4 * STEP),
                (buffers.logits.as_mut_ptr(), STEP),
            );
            for row in 0..rows {
                let position = item.position + row / group;
                let lower = match call.rules.window {
                    0 => 0,
                    window => (position + 1).saturating_sub(window),
                };
                let seen = lower.max(start)..(position + 1).min(end);
                let line = &mut buffers.logits[row * STEP..(row + 1) * STEP];
                if seen.is_empty() {
                    line.fill(0.0);
                    continue;
                }
                let head = item.kv_head * group + row % group;
                call.shape_logits::<S>(line.as_mut_ptr(), columns, head, start as f32 - position as f32);
                line[..seen.start - start].fill(f32::NEG_INFINITY);
                line[seen.end - start..].fill(f32::NEG_INFINITY);
                let kept = &mut buffers.running[2 * row..2 * row + 2];
                let mut running = Running { top: kept[0], sum: kept[1] };
                let factor = weigh::<S>(line.as_mut_ptr(), columns, &mut running);
                kept.copy_from_slice(&[running.top, running.sum]);
                if factor != 1.0 {
                    rescale::<S>(buffers.out.as_mut_ptr().add(row * padded), padded, factor);
                }
            }
            S::accumulate::<F32>(
                (rows, end - start, padded),
                (buffers.logits.as_ptr(), STEP),
                (buffers.values.as_ptr().cast(), 4 * padded),
                (buffers.out.as_mut_ptr(), padded),
            );
        }
    }
}
