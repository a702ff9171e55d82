//! `FreeBlocks`.

use std::sync::{Mutex, MutexGuard};

use pyo3::prelude::*;
use pyo3::sync::MutexExt;

use super::args::{self, Output};
use super::error::invalid_argument;
use crate::error::Error;
use crate::free::{FreeBlocks, Place, Request};
use crate::ids::BlockId;

struct State {
    free: FreeBlocks,
    taken: Vec<BlockId>,
    evicted: Vec<BlockId>,
}

/// All blocks that may be handed out.
#[pyclass(frozen, name = "FreeBlocks", module = "kvcatch")]
pub(super) struct PyFreeBlocks {
    state: Mutex<State>,
}

impl PyFreeBlocks {
    fn lock(&self, py: Python<'_>) -> PyResult<MutexGuard<'_, State>> {
        let poisoned = |_| Error::Corrupt("an earlier call did not finish".into());
        Ok(self.state.lock_py_attached(py).map_err(poisoned)?)
    }
}

#[pymethods]
impl PyFreeBlocks {
    #[new]
    #[pyo3(signature = (num_blocks, *, placement = "bitmap", eviction = "lru", seed = None))]
    fn new(
        num_blocks: &Bound<'_, PyAny>,
        placement: &str,
        eviction: &str,
        seed: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let num_blocks = args::integer("num_blocks", num_blocks, 1, 1 << 31)? as usize;
        let seed = seed.map_or(Ok(0), |value| args::integer("seed", value, 0, i64::MAX))?;
        let free = FreeBlocks::new(num_blocks, placement, eviction, seed as u64)?;
        Ok(Self { state: Mutex::new(State { free, taken: Vec::new(), evicted: Vec::new() }) })
    }

    #[getter]
    fn placement(&self, py: Python<'_>) -> PyResult<&'static str> {
        Ok(self.lock(py)?.free.placement())
    }

    #[getter]
    fn eviction(&self, py: Python<'_>) -> PyResult<&'static str> {
        Ok(self.lock(py)?.free.eviction())
    }

    #[getter]
    fn num_blocks(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.lock(py)?.free.num_blocks())
    }

    #[getter]
    fn num_clean(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.lock(py)?.free.num_clean())
    }

    #[getter]
    fn num_cached(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.lock(py)?.free.num_cached())
    }

    #[getter]
    fn largest_run(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.lock(py)?.free.largest_run())
    }

    #[pyo3(signature = (n, *, after = None, contiguous = false, out = None))]
    fn take<'py>(
        &self,
        py: Python<'py>,
        n: &Bound<'py, PyAny>,
        after: Option<&Bound<'py, PyAny>>,
        contiguous: bool,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let n = args::count("n", n, 0)?;
        let after = after.map(|value| args::block("after", value)).transpose()?;
        let mut out = out.map(|value| Output::<i32>::get("out", value, "int32", 1)).transpose()?;
        if let Some(len) = out.as_ref().map(|out| out.shape()[0]).filter(|&len| len < n) {
            return Err(invalid_argument(format!("out has room for {len} ids: must hold n = {n}")));
        }
        let mut guard = self.lock(py)?;
        let State { free, taken, evicted } = &mut *guard;
        taken.clear();
        evicted.clear();
        free.take(n, Request { after, contiguous }, taken, evicted)?;
        match &mut out {
            Some(out) => {
                for (to, id) in out.items(py).iter_mut().zip(taken.iter()) {
                    *to = id.0 as i32;
                }
                Ok(evicted.len().into_pyobject(py)?.into_any())
            }
            None => args::block_array(py, taken),
        }
    }

    fn remove(&self, py: Python<'_>, block: &Bound<'_, PyAny>) -> PyResult<()> {
        let block = args::block("block", block)?;
        Ok(self.lock(py)?.free.remove(block)?)
    }

    fn touch(&self, py: Python<'_>, block: &Bound<'_, PyAny>) -> PyResult<()> {
        let block = args::block("block", block)?;
        Ok(self.lock(py)?.free.touch(block)?)
    }

    fn give_clean(&self, py: Python<'_>, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        let blocks = args::blocks("blocks", blocks)?;
        Ok(self.lock(py)?.free.give_clean(&blocks)?)
    }

    fn give_cached(&self, py: Python<'_>, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        let blocks = args::blocks("blocks", blocks)?;
        Ok(self.lock(py)?.free.give_cached(&blocks)?)
    }

    fn is_clean(&self, py: Python<'_>, block: &Bound<'_, PyAny>) -> PyResult<bool> {
        let block = args::block("block", block)?;
        Ok(self.lock(py)?.free.place_of(block)? == Place::Clean)
    }

    fn is_cached(&self, py: Python<'_>, block: &Bound<'_, PyAny>) -> PyResult<bool> {
        let block = args::block("block", block)?;
        let guard = self.lock(py)?;
        guard.free.place_of(block)?;
        Ok(guard.free.is_cached(block))
    }

    fn validate(&self, py: Python<'_>) -> PyResult<()> {
        Ok(self.lock(py)?.free.validate()?)
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.lock(py)?.free.len())
    }

    fn __contains__(&self, py: Python<'_>, block: &Bound<'_, PyAny>) -> PyResult<bool> {
        let block = args::block("block", block)?;
        Ok(self.lock(py)?.free.place_of(block)? != Place::Out)
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let order: Vec<u32> = self.lock(py)?.free.order().into_iter().map(|id| id.0).collect();
        Ok(order.into_pyobject(py)?.try_iter()?.into_any())
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let free = &self.lock(py)?.free;
        Ok(format!(
            "<FreeBlocks {}+{}: {} blocks, {} clean, {} cached>",
            free.placement(),
            free.eviction(),
            free.num_blocks(),
            free.num_clean(),
            free.num_cached()
        ))
    }
}
