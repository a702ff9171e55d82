//! What decode and prefill attention share: their arguments, the tiles of a sequence, and what happens to logits.

use std::cell::Cell;
use std::ptr::NonNull;

use super::convert::{Element, Stored, narrow, widen, widen_any};
use super::layout::{Pool, Scales};
use super::math::tanh;
use super::simd::Simd;
use crate::error::{Error, Result};

/// Tokens whose logits are weighed at once.
pub(super) const STEP: usize = 64;
/// Most tokens of a tile: rows of one block, side by side.
pub(super) const TILE: usize = 16;
/// Bytes of a cache line.
const LINE: usize = 64;
/// Most query heads per kv head.
pub const MAX_GROUP: usize = 16;
/// Room for the logits of a step, and for the tile that starts at its last token.
pub(super) const ROW: usize = STEP + TILE;

/// Rows of query or output: `[rows][heads][head_dim]` elements, the last dimension without gaps, distances in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// First byte.
    pub base: NonNull<u8>,
    /// Type of the elements: f32, f16 or bf16.
    pub element: Element,
    /// Rows.
    pub rows: usize,
    /// Heads.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// From a row to the next.
    pub row_stride: usize,
    /// From a head to the next.
    pub head_stride: usize,
}

// SAFETY: rows only point at bytes that their maker keeps valid.
#[allow(unsafe_code)]
unsafe impl Send for Rows {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for Rows {}

impl Rows {
    /// Where a head of a row starts.
    pub(super) fn at(&self, row: usize, head: usize) -> *mut u8 {
        debug_assert!(row < self.rows && head < self.heads);
        self.base.as_ptr().wrapping_add(row * self.row_stride + head * self.head_stride)
    }

    /// Address range from the first byte to the last.
    pub(super) fn range(&self) -> std::ops::Range<usize> {
        let start = self.base.as_ptr() as usize;
        if self.rows == 0 || self.heads == 0 {
            return start..start;
        }
        let last = (self.rows - 1) * self.row_stride + (self.heads - 1) * self.head_stride;
        start..start + last + self.head_dim * self.element.bytes()
    }
}

/// What is done to logits, and which keys are seen.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Factor of `q.k`.
    pub scale: f32,
    /// Keeps the last so many tokens; 0 keeps all.
    pub window: usize,
    /// `cap * tanh(logit / cap)`.
    pub soft_cap: Option<f32>,
    /// Slope per query head: `+ slope * (key position - query position)`.
    pub alibi: Option<Vec<f32>>,
}

/// Arguments of both kinds of attention, checked.
#[derive(Debug)]
pub struct Attention<'a> {
    pub(super) pool: Pool<'a>,
    pub(super) layer: usize,
    pub(super) query: Rows,
    pub(super) out: Rows,
    pub(super) tables: Tables,
    pub(super) rules: Rules,
    /// Query heads per kv head.
    pub(super) group: usize,
}

/// Sequences and their blocks, copied so that nobody changes them after they were checked.
#[derive(Clone, Debug, Default)]
pub struct Tables {
    ids: Vec<u32>,
    /// Where each sequence starts in `ids`.
    first: Vec<usize>,
    /// Tokens of each sequence.
    pub(super) lens: Vec<usize>,
}

impl Tables {
    /// Takes the first blocks of each row of a `[seqs][width]` table: what its tokens need. Position `first_seen(seq,
    /// len)` is the first that anybody reads; ids of blocks wholly before it may name anything, and are not kept.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: a length below 0 or beyond the row, or an id of no block.
    pub fn new(
        table: &[i32],
        width: usize,
        lens: &[i32],
        block_size: usize,
        num_blocks: usize,
        first_seen: impl Fn(usize, usize) -> usize,
    ) -> Result<Self> {
        let mut made = Self { ids: Vec::new(), first: vec![0], lens: Vec::with_capacity(lens.len()) };
        for (seq, &len) in lens.iter().enumerate() {
            let most = width.saturating_mul(block_size);
            let tokens = usize::try_from(len).ok().filter(|&tokens| tokens <= most).ok_or_else(|| {
                Error::invalid(
                    "seq_lens",
                    len,
                    format!("sequence {seq} must have 0 to {most} tokens: {width} blocks of {block_size}"),
                )
            })?;
            let row = &table[seq * width..(seq + 1) * width];
            let needed = tokens.div_ceil(block_size);
            let hidden = (first_seen(seq, tokens) / block_size).min(needed);
            made.ids.resize(made.ids.len() + hidden, 0);
            for (position, &id) in row[..needed].iter().enumerate().skip(hidden) {
                let id = u32::try_from(id).ok().filter(|&id| (id as usize) < num_blocks).ok_or_else(|| {
                    let reason = format!("block {position} of sequence {seq} must be within 0..{}", num_blocks - 1);
                    Error::invalid("block_tables", id, reason)
                })?;
                made.ids.push(id);
            }
            made.first.push(made.ids.len());
            made.lens.push(tokens);
        }
        Ok(made)
    }

    /// Block ids of a sequence.
    pub(super) fn blocks(&self, seq: usize) -> &[u32] {
        &self.ids[self.first[seq]..self.first[seq + 1]]
    }

    /// Sequences.
    pub fn len(&self) -> usize {
        self.lens.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.lens.is_empty()
    }
}

fn overlap(a: &std::ops::Range<usize>, b: &std::ops::Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

impl<'a> Attention<'a> {
    /// Checks that all fits together.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] with what does not.
    ///
    /// # Safety
    ///
    /// `query` is valid for reads and `out` for writes for `'a`; nothing else writes either while a kernel runs.
    #[allow(unsafe_code)]
    pub unsafe fn new(
        pool: Pool<'a>,
        layer: usize,
        query: Rows,
        out: Rows,
        tables: Tables,
        rules: Rules,
    ) -> Result<Self> {
        let layout = pool.layout;
        if layer >= layout.num_layers {
            return Err(Error::invalid("layer", layer, format!("must be within 0..{}", layout.num_layers - 1)));
        }
        let group = query.heads / layout.num_kv_heads;
        if !(1..=MAX_GROUP).contains(&group) || !query.heads.is_multiple_of(layout.num_kv_heads) {
            let reason = format!("query heads must be 1 to {MAX_GROUP} times the {} kv heads", layout.num_kv_heads);
            return Err(Error::invalid("query", query.heads, reason));
        }
        if query.head_dim != layout.head_dim {
            return Err(Error::invalid("query", query.head_dim, format!("head_dim must be {}", layout.head_dim)));
        }
        if (out.rows, out.heads, out.head_dim) != (query.rows, query.heads, query.head_dim) {
            return Err(Error::invalid("out", out.rows, "must have the shape of the query"));
        }
        if overlap(&out.range(), &query.range()) || overlap(&out.range(), &pool.range()) {
            return Err(Error::invalid("out", "shared memory", "must not overlap the query or the pool"));
        }
        if !rules.scale.is_finite() {
            return Err(Error::invalid("scale", rules.scale, "must be finite"));
        }
        if rules.soft_cap.is_some_and(|cap| !(cap.is_finite() && cap > 0.0)) {
            return Err(Error::invalid("soft_cap", rules.soft_cap.unwrap_or(0.0), "must be positive and finite"));
        }
        let slopes = rules.alibi.as_ref().map_or(query.heads, Vec::len);
        if slopes != query.heads {
            return Err(Error::invalid("alibi_slopes", slopes, format!("{} slopes are needed", query.heads)));
        }
        Ok(Self { pool, layer, query, out, tables, rules, group })
    }

    /// Elements of a head rounded up to whole vectors.
    pub(super) fn padded<S: Simd>(&self) -> usize {
        self.pool.layout.head_dim.next_multiple_of(S::LANES)
    }

    /// Factor of the query so that logits come out in base 2, or, with a cap, in base e.
    pub(super) fn query_factor(&self) -> f32 {
        if self.rules.soft_cap.is_some() { self.rules.scale } else { self.rules.scale * std::f32::consts::LOG2_E }
    }

    /// Reads one head of one row of the query, scaled and padded.
    ///
    /// # Safety
    ///
    /// The CPU has `S`.
    #[inline(always)]
    #[allow(unsafe_code)]
    pub(super) unsafe fn load_query<S: Simd>(&self, row: usize, head: usize, target: &mut [f32]) {
        let (values, rest) = target.split_at_mut(self.query.head_dim);
        // SAFETY: a head of a row of the query is valid (`new`).
        unsafe { widen_any(self.query.element, self.query.at(row, head), values) };
        let factor = self.query_factor();
        values.iter_mut().for_each(|x| *x *= factor);
        rest.fill(0.0);
    }

    /// Writes one head of one row of the result: `values / sum`.
    #[allow(unsafe_code)]
    pub(super) fn store_out(&self, row: usize, head: usize, values: &mut [f32], sum: f32) {
        let values = &mut values[..self.out.head_dim];
        let factor = 1.0 / sum;
        values.iter_mut().for_each(|x| *x *= factor);
        // SAFETY: a head of a row of the result is valid for writes (`new`), and one item alone writes it.
        unsafe { narrow(self.out.element, values, self.out.at(row, head)) };
    }

    /// Caps logits, adds the slope, both for base 2. `distance` is the first key's position less the query's.
    ///
    /// # Safety
    ///
    /// The CPU has `S`; `row` is valid for `n` (a multiple of the lanes).
    #[inline(always)]
    #[allow(unsafe_code)]
    pub(super) unsafe fn shape_logits<S: Simd>(&self, row: *mut f32, n: usize, head: usize, distance: f32) {
        // SAFETY: within `n` (caller).
        unsafe {
            if let Some(cap) = self.rules.soft_cap {
                let (inverse, outer) = (S::splat(1.0 / cap), S::splat(cap * std::f32::consts::LOG2_E));
                for i in (0..n).step_by(S::LANES) {
                    let squeezed = tanh::<S>(S::mul(S::load(row.add(i)), inverse));
                    S::store(row.add(i), S::mul(squeezed, outer));
                }
            }
            if let Some(slopes) = &self.rules.alibi {
                let slope = slopes[head] * std::f32::consts::LOG2_E;
                for i in 0..n {
                    *row.add(i) += slope * (distance + i as f32);
                }
            }
        }
    }
}

/// Consecutive tokens of a sequence within one block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tile {
    /// Position of the first token.
    pub(super) start: usize,
    /// Tokens, up to [`TILE`].
    pub(super) tokens: usize,
    /// Block id.
    pub(super) block: usize,
    /// Place of the first token in the block.
    pub(super) offset: usize,
}

/// The tiles of positions `start..end`.
#[inline(always)]
pub(super) fn tiles(blocks: &[u32], block_size: usize, start: usize, end: usize) -> impl Iterator<Item = Tile> {
    let mut at = start;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let (index, offset) = (at / block_size, at % block_size);
        let tokens = TILE.min(block_size - offset).min(end - at);
        let tile = Tile { start: at, tokens, block: blocks[index] as usize, offset };
        at += tokens;
        Some(tile)
    })
}

/// The keys or the values of one kv head of one layer.
#[derive(Clone, Copy)]
pub(super) struct Side<'a> {
    pool: Pool<'a>,
    base: *const u8,
    scales: *const u8,
    factor: f32,
    padded: usize,
}

impl<'a> Side<'a> {
    pub(super) fn new<S: Simd>(call: &Attention<'a>, kv: usize, head: usize) -> Self {
        Self {
            pool: call.pool,
            base: call.pool.head(call.layer, kv, head),
            scales: call.pool.scales(call.layer, kv, head),
            factor: call.pool.head_scale(call.layer, kv, head),
            padded: call.padded::<S>(),
        }
    }

    /// Where the first row of a tile is stored.
    #[inline(always)]
    pub(super) fn address(&self, tile: Tile) -> *const u8 {
        let s = self.pool.layout.strides;
        self.base.wrapping_add(tile.block * s.block + tile.offset * s.token)
    }

    /// A tile as f32, padded rows one behind the other: where it lies if that is what it is, else in `scratch` (room
    /// for [`TILE`] rows). [`TILE`] rows may be read; those beyond `tokens` hold anything.
    ///
    /// # Safety
    ///
    /// The CPU has `S`; the pool stores `E`.
    #[inline(always)]
    #[allow(unsafe_code)]
    pub(super) unsafe fn tile<S: Simd, E: Stored>(&self, tile: Tile, scratch: *mut f32) -> *const f32 {
        let layout = self.pool.layout;
        let source = self.address(tile);
        if E::ELEMENT == Element::F32
            && tile.tokens == TILE
            && layout.head_dim == self.padded
            && layout.strides.token == 4 * self.padded
        {
            return source.cast();
        }
        // SAFETY: rows of a block that `Tables` checked; scratch has room.
        unsafe { self.copy::<S, E>(tile, scratch) };
        scratch
    }

    /// The rows of a tile as f32 into `target`, padded with zeros.
    ///
    /// # Safety
    ///
    /// The CPU has `S`; the pool stores `E`; `target` takes `tokens` padded rows.
    #[inline(always)]
    #[allow(unsafe_code)]
    pub(super) unsafe fn copy<S: Simd, E: Stored>(&self, tile: Tile, target: *mut f32) {
        let layout = self.pool.layout;
        let s = layout.strides;
        let source = self.address(tile);
        let scaled = E::ELEMENT == Element::E4m3 && matches!(layout.scales, Scales::Token | Scales::Block);
        // SAFETY: rows of a block that `Tables` checked, and their scales; `target` has room.
        unsafe {
            if !scaled && layout.head_dim == self.padded && s.token == self.padded * E::ELEMENT.bytes() {
                // One run.
                let n = tile.tokens * self.padded;
                return widen::<S, E>(source, self.factor, n, target, n);
            }
            let scales = self.scales.wrapping_add(tile.block * s.block + tile.offset * s.scale_token);
            for row in 0..tile.tokens {
                let factor =
                    if scaled { scales.add(row * s.scale_token).cast::<f32>().read_unaligned() } else { self.factor };
                let target = target.add(row * self.padded);
                widen::<S, E>(source.add(row * s.token), factor, layout.head_dim, target, self.padded);
            }
        }
    }

    /// A tile's rows as they are stored, where they may be read vector by vector without scales; `None` otherwise.
    #[inline(always)]
    pub(super) fn stored<E: Stored>(&self, tile: Tile) -> Option<(*const u8, usize)> {
        let plain = E::ELEMENT != Element::E4m3 && self.pool.layout.head_dim == self.padded;
        plain.then(|| (self.address(tile), self.pool.layout.strides.token))
    }

    /// Asks for a tile's cache lines.
    #[inline(always)]
    pub(super) fn prefetch<S: Simd>(&self, tile: Tile) {
        let mut line = self.address(tile);
        let end = line.wrapping_add(tile.tokens * self.pool.layout.strides.token);
        while line < end {
            // SAFETY: a prefetch reads nothing.
            #[allow(unsafe_code)]
            unsafe {
                S::prefetch(line);
            }
            line = line.wrapping_add(LINE);
        }
    }
}

thread_local! {
    static SCRATCH: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// Memory of this thread, lent for an item with what the last borrower left in it. A value and not a call with a
/// closure: a closure would not be compiled for the instruction set of the function it stands in.
pub(super) struct Scratch(Vec<f32>);

impl Scratch {
    /// At least `n` numbers.
    pub(super) fn take(n: usize) -> Self {
        let mut scratch = SCRATCH.take();
        if scratch.len() < n {
            scratch.resize(n, 0.0);
        }
        Self(scratch)
    }

    pub(super) fn numbers(&mut self) -> &mut [f32] {
        &mut self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        SCRATCH.set(std::mem::take(&mut self.0));
    }
}
