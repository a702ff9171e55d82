//! The kernels of the CPU backend. Tensors come as buffers (numpy views of torch tensors), 16-bit floats as int16; the
//! GIL is released while a kernel runs.

use std::borrow::Cow;
use std::ptr::NonNull;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;

use super::args;
use super::error::{invalid_argument, invalid_type};
use crate::cpu::attention::{Attention, Rows, Rules, Tables};
use crate::cpu::convert::Element;
use crate::cpu::layout::{Layout, Pool, Scales, Strides};
use crate::cpu::level::Level;
use crate::cpu::threads::{Threads, remember_process, team_name};
use crate::cpu::{blocks, decode, huge, prefill, write};
use crate::error::Result;

/// Shape of a pool and distances in it, checked once.
#[pyclass(frozen, name = "CpuLayout", module = "kvcatch._core")]
pub(super) struct PyCpuLayout(Layout);

#[pymethods]
impl PyCpuLayout {
    #[new]
    #[pyo3(signature = (num_blocks, num_layers, num_kv_heads, head_dim, block_size, dtype, scale, strides))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        num_blocks: usize,
        num_layers: usize,
        num_kv_heads: usize,
        head_dim: usize,
        block_size: usize,
        dtype: &str,
        scale: &str,
        strides: [usize; 8],
    ) -> PyResult<Self> {
        let scales = Scales::from_name(scale)
            .ok_or_else(|| invalid_argument(format!("scale = {scale:?}: must be none, token, head or block")))?;
        let [block, layer, kv, head, token, scale, scale_head, scale_token] = strides;
        let strides = Strides { block, layer, kv, head, token, scale, scale_head, scale_token };
        let element = element(dtype)?;
        let layout = Layout { num_blocks, num_layers, num_kv_heads, head_dim, block_size, element, scales, strides };
        Ok(Self(layout.check()?))
    }

    fn __repr__(&self) -> String {
        let l = &self.0;
        format!("CpuLayout({} blocks of {} tokens, {:?})", l.num_blocks, l.block_size, l.element)
    }
}

fn element(dtype: &str) -> PyResult<Element> {
    Element::from_name(dtype).ok_or_else(|| invalid_argument(format!("dtype = {dtype:?}: no such element type")))
}

/// A buffer, held while a kernel works on its memory.
struct Held {
    buffer: PyUntypedBuffer,
    base: NonNull<u8>,
}

impl Held {
    fn get(name: &str, value: &Bound<'_, PyAny>, item: usize, dimensions: usize, writable: bool) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(value)
            .map_err(|_| invalid_type(format!("{name} = {}: must be an array", args::shown(value))))?;
        if buffer.item_size() != item {
            let size = buffer.item_size();
            return Err(invalid_type(format!("{name} has elements of {size} bytes: must be {item}")));
        }
        if buffer.dimensions() != dimensions {
            let shape = buffer.shape();
            return Err(invalid_argument(format!("{name} has shape {shape:?}: must have {dimensions} dimensions")));
        }
        if writable && buffer.readonly() {
            return Err(invalid_argument(format!("{name} is read-only: must be writable")));
        }
        let base = NonNull::new(buffer.buf_ptr().cast()).unwrap_or(NonNull::dangling());
        Ok(Self { buffer, base })
    }

    fn contiguous(self, name: &str) -> PyResult<Self> {
        if self.buffer.is_c_contiguous() {
            return Ok(self);
        }
        Err(invalid_argument(format!("{name} has strides {:?}: must be C-contiguous", self.buffer.strides())))
    }

    /// A copy of the items, which nobody else changes while it is looked at.
    fn items<T: Copy>(&self) -> Vec<T> {
        let mut items = Vec::<T>::with_capacity(self.buffer.item_count());
        assert_eq!(self.buffer.item_size(), size_of::<T>());
        // SAFETY: contiguous and of this many items of this size; any bits are a number.
        #[allow(unsafe_code)]
        unsafe {
            let (source, target) = (self.base.as_ptr(), items.as_mut_ptr().cast::<u8>());
            std::ptr::copy_nonoverlapping(source, target, self.buffer.len_bytes());
            items.set_len(self.buffer.item_count());
        }
        items
    }

    /// The items in place where they lie aligned, else a copy; to be read at once.
    fn seen<'a, T: Copy>(&'a self, _py: Python<'a>) -> Cow<'a, [T]> {
        if self.base.align_offset(align_of::<T>()) != 0 || self.buffer.item_size() != size_of::<T>() {
            return Cow::Owned(self.items());
        }
        // SAFETY: contiguous, aligned and of this many items of this size; any bits are a number. Attached throughout:
        // a thread that writes the array meanwhile all the same makes the answer wrong, not the memory.
        #[allow(unsafe_code)]
        Cow::Borrowed(unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast(), self.buffer.item_count()) })
    }

    /// As `[rows][heads][head_dim]` of a type.
    fn rows(&self, name: &str, element: Element) -> PyResult<Rows> {
        let (shape, strides) = (self.buffer.shape(), self.buffer.strides());
        let item = element.bytes() as isize;
        let packed = shape[2] <= 1 || strides[2] == item;
        if self.buffer.item_count() > 0 && (!packed || strides[0] < 0 || strides[1] < 0) {
            return Err(invalid_argument(format!("{name} has strides {strides:?}: its last dimension must be packed")));
        }
        // A dimension of one (or an empty tensor) may have any stride: none is taken.
        let stride = |i: usize| if shape[i] > 1 { strides[i].unsigned_abs() } else { 0 };
        let (row_stride, head_stride) = (stride(0), stride(1));
        let (rows, heads, head_dim) = (shape[0], shape[1], shape[2]);
        Ok(Rows { base: self.base, element, rows, heads, head_dim, row_stride, head_stride })
    }
}

fn floats(name: &str, value: Option<&Bound<'_, PyAny>>, dimensions: usize) -> PyResult<Option<Vec<f32>>> {
    let Some(value) = value else { return Ok(None) };
    Ok(Some(Held::get(name, value, 4, dimensions, false)?.contiguous(name)?.items()))
}

/// A pool's buffer, with the scales beside it.
struct HeldPool<'a> {
    held: Held,
    layout: &'a Layout,
    scales: Option<Vec<f32>>,
    bare: bool,
}

impl<'a> HeldPool<'a> {
    fn get(
        name: &str,
        value: &Bound<'_, PyAny>,
        layout: &'a Bound<'_, PyCpuLayout>,
        scales: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let held = Held::get(name, value, 1, 1, true)?.contiguous(name)?;
        Ok(Self { held, layout: &layout.get().0, scales: floats("head_scales", scales, 3)?, bare: false })
    }

    /// For copies, which take scales along where they lie inside blocks; those beside the pool are no matter of theirs.
    fn bare(value: &Bound<'_, PyAny>, layout: &'a Bound<'_, PyCpuLayout>) -> PyResult<Self> {
        Ok(Self { bare: true, ..Self::get("cache", value, layout, None)? })
    }

    fn pool(&self) -> Result<Pool<'_>> {
        // SAFETY: the buffer is held, writable, contiguous and of this length. Who writes the pool's bytes while a
        // kernel reads them changes what is computed, not what is addressed: ids and lengths are copies.
        #[allow(unsafe_code)]
        unsafe {
            let (base, len) = (self.held.base, self.held.buffer.len_bytes());
            if self.bare {
                Pool::of_bytes(self.layout, base, len)
            } else {
                Pool::new(self.layout, base, len, self.scales.as_deref())
            }
        }
    }
}

fn threads_of(threads: usize, own: bool) -> Threads {
    if own { Threads::Own(threads) } else { Threads::Joined(threads) }
}

/// Instruction sets of this machine, weakest first.
#[pyfunction]
pub(super) fn cpu_levels() -> Vec<&'static str> {
    Level::available().into_iter().map(Level::name).collect()
}

/// Whose threads the kernels use in this process: `openmp` or `own`.
#[pyfunction]
pub(super) fn cpu_team() -> &'static str {
    team_name()
}

/// Asks for large pages behind a buffer that is about to be written for the first time.
#[pyfunction]
pub(super) fn cpu_advise_huge_pages(buffer: &Bound<'_, PyAny>) -> PyResult<bool> {
    let held = Held::get("buffer", buffer, 1, 1, true)?.contiguous("buffer")?;
    // SAFETY: the buffer is held, writable and of this many bytes; attached.
    #[allow(unsafe_code)]
    let memory = unsafe { std::slice::from_raw_parts_mut(held.base.as_ptr().cast(), held.buffer.len_bytes()) };
    Ok(huge::advise(memory))
}

/// Called when the module is made.
pub(super) fn init() {
    remember_process();
}

/// `decode_attention`, or `prefill_attention` where `starts` are given.
#[pyfunction]
#[pyo3(signature = (pool, layout, layer, query, tables, lens, out, *, dtype, scale, window, threads, level,
    head_scales=None, soft_cap=None, alibi_slopes=None, starts=None, own_threads=false))]
#[allow(clippy::too_many_arguments)]
pub(super) fn cpu_attention<'py>(
    py: Python<'py>,
    pool: &Bound<'py, PyAny>,
    layout: &Bound<'py, PyCpuLayout>,
    layer: usize,
    query: &Bound<'py, PyAny>,
    tables: &Bound<'py, PyAny>,
    lens: &Bound<'py, PyAny>,
    out: &Bound<'py, PyAny>,
    dtype: &str,
    scale: f32,
    window: usize,
    threads: usize,
    level: &str,
    head_scales: Option<&Bound<'py, PyAny>>,
    soft_cap: Option<f32>,
    alibi_slopes: Option<&Bound<'py, PyAny>>,
    starts: Option<&Bound<'py, PyAny>>,
    own_threads: bool,
) -> PyResult<()> {
    let level = Level::from_name(level)?;
    let element = element(dtype)?;
    let pool = HeldPool::get("cache", pool, layout, head_scales)?;
    let query = Held::get("query", query, element.bytes(), 3, false)?;
    let out = Held::get("out", out, element.bytes(), 3, true)?;
    let table = Held::get("block_tables", tables, 4, 2, false)?.contiguous("block_tables")?;
    let (seqs, width) = (table.buffer.shape()[0], table.buffer.shape()[1]);
    let lens = Held::get("seq_lens", lens, 4, 1, false)?.contiguous("seq_lens")?.items::<i32>();
    if lens.len() != seqs {
        return Err(invalid_argument(format!("seq_lens has {} entries for {seqs} rows of block_tables", lens.len())));
    }
    let starts = match starts {
        Some(starts) => Some(args::integers("query_starts", starts, 0, i64::MAX)?),
        None => None,
    };
    let first_seen = |seq, len| first_seen(seq, len, starts.as_deref(), window);
    let (block_size, num_blocks) = (pool.layout.block_size, pool.layout.num_blocks);
    let tables = Tables::new(&table.seen(py), width, &lens, block_size, num_blocks, first_seen)?;
    let rules = Rules { scale, window, soft_cap, alibi: floats("alibi_slopes", alibi_slopes, 1)? };
    let (query_rows, out_rows) = (query.rows("query", element)?, out.rows("out", element)?);
    let threads = threads_of(threads, own_threads);
    let pool = pool.pool()?;
    py.detach(|| {
        // SAFETY: the buffers are held, of these shapes and strides, and `out` is writable.
        #[allow(unsafe_code)]
        let call = unsafe { Attention::new(pool, layer, query_rows, out_rows, tables, rules) }?;
        match starts {
            Some(starts) => prefill::prefill(&call, &starts, level, threads),
            None => decode::decode(&call, level, threads),
        }
    })?;
    Ok(())
}

/// The first position of a sequence that one of its queries sees: those before the window, and all of a sequence
/// without queries, are never read.
fn first_seen(seq: usize, len: usize, starts: Option<&[i64]>, window: usize) -> usize {
    let rows = match starts {
        None => 1,
        Some(starts) => match (starts.get(seq), starts.get(seq + 1)) {
            (Some(start), Some(end)) => usize::try_from(end - start).unwrap_or(0),
            _ => return 0, // refused later
        },
    };
    match (rows, window) {
        (0, _) => usize::MAX,
        (_, 0) => 0,
        _ => (len + 1).saturating_sub(rows).saturating_sub(window),
    }
}

/// `write_kv`.
#[pyfunction]
#[pyo3(signature = (pool, layout, layer, key, value, slots, *, dtype, threads, head_scales=None, own_threads=false))]
#[allow(clippy::too_many_arguments)]
pub(super) fn cpu_write_kv<'py>(
    py: Python<'py>,
    pool: &Bound<'py, PyAny>,
    layout: &Bound<'py, PyCpuLayout>,
    layer: usize,
    key: &Bound<'py, PyAny>,
    value: &Bound<'py, PyAny>,
    slots: &Bound<'py, PyAny>,
    dtype: &str,
    threads: usize,
    head_scales: Option<&Bound<'py, PyAny>>,
    own_threads: bool,
) -> PyResult<()> {
    let element = element(dtype)?;
    let pool = HeldPool::get("cache", pool, layout, head_scales)?;
    let key = Held::get("key", key, element.bytes(), 3, false)?;
    let value = Held::get("value", value, element.bytes(), 3, false)?;
    let slots = Held::get("slot_mapping", slots, 8, 1, false)?.contiguous("slot_mapping")?.items::<i64>();
    let (keys, values) = (key.rows("key", element)?, value.rows("value", element)?);
    let threads = threads_of(threads, own_threads);
    let pool = pool.pool()?;
    // SAFETY: the buffers are held and of these shapes and strides.
    #[allow(unsafe_code)]
    py.detach(|| unsafe { write::write_kv(pool, layer, keys, values, &slots, threads) })?;
    Ok(())
}

/// Copies blocks between two pools, or within one.
#[pyfunction]
#[pyo3(signature = (source, source_layout, target, target_layout, src, dst, *, threads, own_threads=false))]
#[allow(clippy::too_many_arguments)]
pub(super) fn cpu_copy_blocks<'py>(
    py: Python<'py>,
    source: &Bound<'py, PyAny>,
    source_layout: &Bound<'py, PyCpuLayout>,
    target: &Bound<'py, PyAny>,
    target_layout: &Bound<'py, PyCpuLayout>,
    src: &Bound<'py, PyAny>,
    dst: &Bound<'py, PyAny>,
    threads: usize,
    own_threads: bool,
) -> PyResult<()> {
    let (source, target) = (HeldPool::bare(source, source_layout)?, HeldPool::bare(target, target_layout)?);
    let (src, dst) = (ids("src", src)?, ids("dst", dst)?);
    let threads = threads_of(threads, own_threads);
    let (source, target) = (source.pool()?, target.pool()?);
    py.detach(|| blocks::copy_blocks(source, target, &src, &dst, threads))?;
    Ok(())
}

/// Simultaneous assignment of blocks.
#[pyfunction]
#[pyo3(signature = (pool, layout, src, dst, *, threads, own_threads=false))]
pub(super) fn cpu_assign_blocks<'py>(
    py: Python<'py>,
    pool: &Bound<'py, PyAny>,
    layout: &Bound<'py, PyCpuLayout>,
    src: &Bound<'py, PyAny>,
    dst: &Bound<'py, PyAny>,
    threads: usize,
    own_threads: bool,
) -> PyResult<()> {
    let pool = HeldPool::bare(pool, layout)?;
    let (src, dst) = (ids("src", src)?, ids("dst", dst)?);
    let threads = threads_of(threads, own_threads);
    let pool = pool.pool()?;
    py.detach(|| blocks::assign_blocks(pool, &src, &dst, threads))?;
    Ok(())
}

/// Converts blocks between an e4m3 pool and another.
#[pyfunction]
#[pyo3(signature = (source, source_layout, target, target_layout, src, dst, *, threads, head_scales=None,
    own_threads=false))]
#[allow(clippy::too_many_arguments)]
pub(super) fn cpu_convert_blocks<'py>(
    py: Python<'py>,
    source: &Bound<'py, PyAny>,
    source_layout: &Bound<'py, PyCpuLayout>,
    target: &Bound<'py, PyAny>,
    target_layout: &Bound<'py, PyCpuLayout>,
    src: &Bound<'py, PyAny>,
    dst: &Bound<'py, PyAny>,
    threads: usize,
    head_scales: Option<&Bound<'py, PyAny>>,
    own_threads: bool,
) -> PyResult<()> {
    let scales_of = |layout: &Bound<'py, PyCpuLayout>| head_scales.filter(|_| layout.get().0.scales == Scales::Head);
    let source = HeldPool::get("source", source, source_layout, scales_of(source_layout))?;
    let target = HeldPool::get("target", target, target_layout, scales_of(target_layout))?;
    let (src, dst) = (ids("src", src)?, ids("dst", dst)?);
    let threads = threads_of(threads, own_threads);
    let (source, target) = (source.pool()?, target.pool()?);
    py.detach(|| write::convert_blocks(source, target, &src, &dst, threads))?;
    Ok(())
}

fn ids(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<i32>> {
    Ok(args::integers(name, value, 0, i64::from(i32::MAX))?.into_iter().map(|id| id as i32).collect())
}
