//! `FreeBlocks`.

use std::sync::Mutex;

use pyo3::prelude::*;
use pyo3::sync::MutexExt;

use super::args::{self, Output};
use super::error::invalid_argument;
use crate::error::{Error, Result};
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
    /// Runs `work` while attached; lets go before anything is turned into a Python object (see `BlockPool`).
    fn run<T>(&self, py: Python<'_>, work: impl FnOnce(&mut State) -> Result<T>) -> PyResult<T> {
        let done = match self.state.lock_py_attached(py) {
            Ok(mut state) => work(&mut state),
            Err(_) => Err(Error::Corrupt("an earlier call did not finish".into())),
        };
        Ok(done?)
    }
}

#[pymethods]
impl PyFreeBlocks {
    #[new]
    #[pyo3(signature = (num_blocks, *, placement = None, eviction = None, seed = None), text_signature = "(num_blocks, *, placement='bitmap', eviction='lru', seed=0)")]
    fn new(
        num_blocks: &Bound<'_, PyAny>,
        placement: Option<&Bound<'_, PyAny>>,
        eviction: Option<&Bound<'_, PyAny>>,
        seed: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let num_blocks = args::integer("num_blocks", num_blocks, 1, 1 << 31)? as usize;
        let placement = args::text_or("placement", placement, "bitmap")?;
        let eviction = args::text_or("eviction", eviction, "lru")?;
        let seed = seed.map_or(Ok(0), |value| args::integer("seed", value, 0, i64::MAX))?;
        let free = FreeBlocks::new(num_blocks, &placement, &eviction, seed as u64)?;
        Ok(Self { state: Mutex::new(State { free, taken: Vec::new(), evicted: Vec::new() }) })
    }

    #[getter]
    fn placement(&self, py: Python<'_>) -> PyResult<&'static str> {
        self.run(py, |state| Ok(state.free.placement()))
    }

    #[getter]
    fn eviction(&self, py: Python<'_>) -> PyResult<&'static str> {
        self.run(py, |state| Ok(state.free.eviction()))
    }

    #[getter]
    fn num_blocks(&self, py: Python<'_>) -> PyResult<usize> {
        self.run(py, |state| Ok(state.free.num_blocks()))
    }

    #[getter]
    fn num_clean(&self, py: Python<'_>) -> PyResult<usize> {
        self.run(py, |state| Ok(state.free.num_clean()))
    }

    #[getter]
    fn num_cached(&self, py: Python<'_>) -> PyResult<usize> {
        self.run(py, |state| Ok(state.free.num_cached()))
    }

    #[getter]
    fn largest_run(&self, py: Python<'_>) -> PyResult<usize> {
        self.run(py, |state| Ok(state.free.largest_run()))
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
        let request = Request { after, contiguous, fixed: false };
        if let Some(out) = &mut out {
            let items = out.items(py);
            let evicted = self.run(py, |State { free, taken, evicted }| {
                taken.clear();
                evicted.clear();
                free.take(n, request, taken, evicted)?;
                for (to, id) in items.iter_mut().zip(taken.iter()) {
                    *to = id.0 as i32;
                }
                Ok(evicted.len())
            })?;
            return Ok(evicted.into_pyobject(py)?.into_any());
        }
        let taken = self.run(py, |State { free, evicted, .. }| {
            let mut taken = Vec::new();
            evicted.clear();
            free.take(n, request, &mut taken, evicted)?;
            Ok(taken)
        })?;
        args::block_array(py, &taken)
    }

    fn remove(&self, py: Python<'_>, block: &Bound<'_, PyAny>) -> PyResult<()> {
        let block = args::block("block", block)?;
        self.run(py, |state| state.free.remove(block))
    }

    fn touch(&self, py: Python<'_>, block: &Bound<'_, PyAny>) -> PyResult<()> {
        let block = args::block("block", block)?;
        self.run(py, |state| state.free.touch(block))
    }

    fn give_clean(&self, py: Python<'_>, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        let blocks = args::blocks("blocks", blocks)?;
        self.run(py, |state| state.free.give_clean(&blocks))
    }

    fn give_cached(&self, py: Python<'_>, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        let blocks = args::blocks("blocks", blocks)?;
        self.run(py, |state| state.free.give_cached(&blocks))
    }

    fn is_clean(&self, py: Python<'_>, block: &Bound<'_, PyAny>) -> PyResult<bool> {
        let block = args::block("block", block)?;
        self.run(py, |state| Ok(state.free.place_of(block)? == Place::Clean))
    }

    fn is_cached(&self, py: Python<'_>, block: &Bound<'_, PyAny>) -> PyResult<bool> {
        let block = args::block("block", block)?;
        self.run(py, |state| {
            state.free.place_of(block)?;
            Ok(state.free.is_cached(block))
        })
    }

    fn validate(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, |state| state.free.validate())
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.run(py, |state| Ok(state.free.len()))
    }

    fn __contains__(&self, py: Python<'_>, block: &Bound<'_, PyAny>) -> PyResult<bool> {
        let block = args::block("block", block)?;
        self.run(py, |state| Ok(state.free.place_of(block)? != Place::Out))
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let order: Vec<u32> = self.run(py, |state| Ok(state.free.order().into_iter().map(|id| id.0).collect()))?;
        Ok(order.into_pyobject(py)?.try_iter()?.into_any())
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        self.run(py, |State { free, .. }| {
            Ok(format!(
                "<FreeBlocks {}+{}: {} blocks, {} clean, {} cached>",
                free.placement(),
                free.eviction(),
                free.num_blocks(),
                free.num_clean(),
                free.num_cached()
            ))
        })
    }
}
