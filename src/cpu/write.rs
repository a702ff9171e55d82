//! Single rows: new tokens into their slots, and blocks from one element type to another.

use super::attention::Rows;
use super::blocks::check_copies;
use super::convert::{E4M3_MAX, Element, narrow, widen_any};
use super::layout::{Pool, Scales};
use super::threads::{Threads, parallel};
use crate::error::{Error, Result};

/// Bytes below which threads cost more than they save.
const ALONE_BYTES: usize = 256 << 10;
const ONE_PADDING: i64 = -1;

/// Magnitudes below 2^-100 are taken for 0, as `E4M3_TINY` of `cuda/common.cuh`.
const TINY: f32 = f32::from_bits((127 - 100) << 23);

/// The scale of a row from its largest magnitude: that magnitude becomes 448. NaN is passed over.
fn scale_of(values: &[f32]) -> f32 {
    let largest = values.iter().fold(0f32, |largest, x| if x.abs() > largest { x.abs() } else { largest });
    if largest >= TINY { largest / E4M3_MAX } else { 1.0 }
}

/// Multiplies by the reciprocal, as the CUDA kernel does.
fn unscale(values: &mut [f32], scale: f32) {
    let factor = 1.0 / scale;
    values.iter_mut().for_each(|x| *x *= factor);
}

/// Writes rows of keys and values to their slots; a negative slot is padding. The last of two rows for one slot stays.
///
/// # Errors
/// [`Error::InvalidArgument`]: shapes that do not fit, a slot beyond the pool, a pool with a scale per block.
///
/// # Safety
///
/// `key` and `value` are valid for reads; nothing else writes them or the pool meanwhile.
#[allow(unsafe_code)]
pub unsafe fn write_kv(
    pool: Pool<'_>,
    layer: usize,
    key: Rows,
    value: Rows,
    slots: &[i64],
    threads: Threads,
) -> Result<()> {
    let layout = pool.layout;
    if layer >= layout.num_layers {
        return Err(Error::invalid("layer", layer, format!("must be within 0..{}", layout.num_layers - 1)));
    }
    if layout.scales == Scales::Block {
        return Err(Error::invalid(
            "cache",
            "scale=block",
            "its blocks are made by quantise_blocks, not token by token",
        ));
    }
    for (name, rows) in [("key", key), ("value", value)] {
        let shape = (rows.rows, rows.heads, rows.head_dim);
        let wanted = (slots.len(), layout.num_kv_heads, layout.head_dim);
        if shape != wanted {
            return Err(Error::invalid(name, format!("{shape:?}"), format!("must have shape {wanted:?}")));
        }
        let (a, b) = (rows.range(), pool.range());
        if a.start < b.end && b.start < a.end {
            return Err(Error::invalid(name, "shared memory", "must not overlap the pool"));
        }
    }
    let end = layout.num_blocks as i64 * layout.block_size as i64;
    if let Some(slot) = slots.iter().find(|&&slot| slot >= end) {
        let reason = format!("slots must be below {end}, or {ONE_PADDING} for padding");
        return Err(Error::invalid("slot_mapping", slot, reason));
    }
    let s = layout.strides;
    let bytes = slots.len() * 2 * layout.num_kv_heads * layout.head_dim * layout.element.bytes();
    let threads = if bytes < ALONE_BYTES { Threads::Own(1) } else { threads };
    parallel(threads, 2 * layout.num_kv_heads, &|item| {
        let (kv, head) = (item % 2, item / 2);
        let rows = if kv == 0 { key } else { value };
        let (base, scales) = (pool.head(layer, kv, head), pool.scales(layer, kv, head));
        let mut values = vec![0.0; layout.head_dim];
        for (row, &slot) in slots.iter().enumerate() {
            let Ok(slot) = usize::try_from(slot) else { continue };
            let (block, offset) = (slot / layout.block_size, slot % layout.block_size);
            let (source, target) = (rows.at(row, head), base.wrapping_add(block * s.block + offset * s.token));
            // SAFETY: the slot is in the pool, the row in the tensor; no other item writes this head.
            unsafe {
                if rows.element == layout.element {
                    std::ptr::copy_nonoverlapping(source, target, layout.head_dim * layout.element.bytes());
                    continue;
                }
                widen_any(rows.element, source, &mut values);
                match layout.scales {
                    Scales::Token => {
                        let scale = scale_of(&values);
                        scales.add(block * s.block + offset * s.scale_token).cast::<f32>().write_unaligned(scale);
                        unscale(&mut values, scale);
                    }
                    Scales::Head => unscale(&mut values, pool.head_scale(layer, kv, head)),
                    _ => {}
                }
                narrow(layout.element, &values, target);
            }
        }
    })
}

/// Converts block `src[i]` of `source` into block `dst[i]` of `target`, whose blocks have the same shape and another
/// type; one of the two is e4m3.
///
/// # Errors
/// [`Error::InvalidArgument`]: ids out of range, a destination named twice, shapes that differ.
pub fn convert_blocks(source: Pool<'_>, target: Pool<'_>, src: &[i32], dst: &[i32], threads: Threads) -> Result<()> {
    let (from, to) = (source.layout, target.layout);
    let shape = |pool: &Pool<'_>| {
        let l = pool.layout;
        (l.num_layers, l.num_kv_heads, l.head_dim, l.block_size)
    };
    if shape(&source) != shape(&target) {
        return Err(Error::invalid("target", format!("{:?}", shape(&target)), format!("must be {:?}", shape(&source))));
    }
    if (from.element == Element::E4m3) == (to.element == Element::E4m3) {
        return Err(Error::invalid("target", format!("{:?}", to.element), "one of the two must be e4m3"));
    }
    check_copies(&source, &target, src, dst)?;
    if source.range() == target.range() {
        return Err(Error::invalid("target", "shared memory", "the pools overlap"));
    }
    let per_block = from.num_layers * 2 * from.num_kv_heads;
    parallel(threads, src.len() * from.num_layers, &|item| {
        let mut values = vec![0.0; from.block_size * from.head_dim];
        let (copy, layer) = (item / from.num_layers, item % from.num_layers);
        for part in 0..per_block / from.num_layers {
            let (kv, head) = (part % 2, part / 2);
            read_head(&source, src[copy] as usize, (layer, kv, head), &mut values);
            write_head(&target, dst[copy] as usize, (layer, kv, head), &mut values);
        }
    })
}

/// The `[block_size][head_dim]` values of one head of one block.
#[allow(unsafe_code)]
fn read_head(pool: &Pool<'_>, block: usize, (layer, kv, head): (usize, usize, usize), values: &mut [f32]) {
    let (layout, s) = (pool.layout, pool.layout.strides);
    let base = pool.head(layer, kv, head).wrapping_add(block * s.block);
    let scales = pool.scales(layer, kv, head).wrapping_add(block * s.block);
    for (token, row) in values.chunks_exact_mut(layout.head_dim).enumerate() {
        // SAFETY: a row of a block of the pool, and its scale.
        unsafe {
            widen_any(layout.element, base.add(token * s.token), row);
            let scale = match layout.scales {
                Scales::None => continue,
                Scales::Head => pool.head_scale(layer, kv, head),
                Scales::Token | Scales::Block => scales.add(token * s.scale_token).cast::<f32>().read_unaligned(),
            };
            row.iter_mut().for_each(|x| *x *= scale);
        }
    }
}

#[allow(unsafe_code)]
fn write_head(pool: &Pool<'_>, block: usize, (layer, kv, head): (usize, usize, usize), values: &mut [f32]) {
    let (layout, s) = (pool.layout, pool.layout.strides);
    let base = pool.head(layer, kv, head).wrapping_add(block * s.block);
    let scales = pool.scales(layer, kv, head).wrapping_add(block * s.block);
    let whole = if layout.scales == Scales::Block { Some(scale_of(values)) } else { None };
    for (token, row) in values.chunks_exact_mut(layout.head_dim).enumerate() {
        let scale = match layout.scales {
            Scales::None => None,
            Scales::Head => Some(pool.head_scale(layer, kv, head)),
            Scales::Token => Some(scale_of(row)),
            Scales::Block => whole,
        };
        // SAFETY: a row of a block of the pool, and its scale.
        unsafe {
            if let Some(scale) = scale {
                unscale(row, scale);
                if layout.scales != Scales::Head {
                    scales.add(token * s.scale_token).cast::<f32>().write_unaligned(scale);
                }
            }
            narrow(layout.element, row, base.add(token * s.token));
        }
    }
}
