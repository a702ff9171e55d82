//! What the host works out for the kernels: checks of ids and moves, order of copies, shares of a decode batch.

use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyDict};

use super::args;
use crate::kernels::{CUDA_SOURCES, moves, work};

/// An int32 array of `rows` rows.
fn table<'py, const N: usize>(py: Python<'py>, rows: impl Iterator<Item = [i32; N]>) -> PyResult<Bound<'py, PyAny>> {
    let bytes: Vec<u8> = rows.flatten().flat_map(i32::to_ne_bytes).collect();
    let flat = args::numpy_array(py, PyByteArray::new(py, &bytes), "int32")?;
    if N == 1 { Ok(flat) } else { flat.call_method1("reshape", ((-1, N),)) }
}

fn int32s(name: &str, value: &Bound<'_, PyAny>, least: i64) -> PyResult<Vec<i32>> {
    Ok(args::integers(name, value, least, i64::from(i32::MAX))?.into_iter().map(|id| id as i32).collect())
}

/// Block ids as int32, each below `num_blocks`.
#[pyfunction]
pub(super) fn check_block_ids<'py>(
    py: Python<'py>,
    name: &str,
    ids: &Bound<'py, PyAny>,
    num_blocks: i64,
) -> PyResult<Bound<'py, PyAny>> {
    let ids = args::integers(name, ids, 0, num_blocks - 1)?;
    table(py, ids.into_iter().map(|id| [id as i32]))
}

/// Refuses copies that no single launch may do in any order.
#[pyfunction]
#[pyo3(signature = (src, dst, *, allow_overlap))]
pub(super) fn check_moves(src: &Bound<'_, PyAny>, dst: &Bound<'_, PyAny>, allow_overlap: bool) -> PyResult<()> {
    Ok(moves::check(&int32s("src", src, 0)?, &int32s("dst", dst, 0)?, allow_overlap)?)
}

/// Orders an assignment of blocks: `(ops [n, 2] of (dst, src), first [groups + 1])`.
#[pyfunction]
pub(super) fn order_moves<'py>(
    py: Python<'py>,
    src: &Bound<'py, PyAny>,
    dst: &Bound<'py, PyAny>,
) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let (src, dst) = (int32s("src", src, 0)?, int32s("dst", dst, 0)?);
    let ordered = py.detach(|| moves::order(&src, &dst))?;
    let ops = table(py, ordered.ops.iter().map(|&(dst, src)| [dst, src]))?;
    Ok((ops, table(py, ordered.first.iter().map(|&first| [first as i32]))?))
}

/// Shares a decode batch: `(pieces [n, 4], merges [m, 4], partials)`.
#[pyfunction]
#[pyo3(signature = (seq_lens, num_slots, *, min_tokens = None, window = None),
    text_signature = "(seq_lens, num_slots, *, min_tokens=128, window=0)")]
pub(super) fn decode_work<'py>(
    py: Python<'py>,
    seq_lens: &Bound<'py, PyAny>,
    num_slots: &Bound<'py, PyAny>,
    min_tokens: Option<&Bound<'py, PyAny>>,
    window: Option<&Bound<'py, PyAny>>,
) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>, u32)> {
    let lens = int32s("seq_lens", seq_lens, 0)?;
    let most = i64::from(i32::MAX);
    let slots = args::integer("num_slots", num_slots, 1, most)? as u32;
    let min_tokens = min_tokens.map_or(Ok(128), |value| args::integer("min_tokens", value, 0, most))? as u32;
    let window = window.map_or(Ok(0), |value| args::integer("window", value, 0, most))? as u32;
    let work = py.detach(|| work::decode(&lens, slots, min_tokens, window))?;
    let pieces = table(py, work.pieces.iter().map(|p| [p.seq, p.start, p.end, p.partial]))?;
    let merges = table(py, work.merges.iter().map(|m| [m.seq, m.first, m.end, 0]))?;
    Ok((pieces, merges, work.partials))
}

/// The texts of `cuda/`, by file name.
#[pyfunction]
pub(super) fn cuda_sources(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let sources = PyDict::new(py);
    for (name, text) in CUDA_SOURCES {
        sources.set_item(name, text)?;
    }
    Ok(sources)
}
