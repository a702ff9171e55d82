//! `BlockQueue`: `FreeBlocks` behind the interface of vLLM's `FreeKVCacheBlockQueue`, on the engine's own block objects.

use std::sync::{Mutex, OnceLock};
use std::time::Instant;

use pyo3::exceptions::{PyAssertionError, PyRuntimeError, PyValueError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::{PyDict, PyList};

use super::args;
use crate::error::{Error, Result};
use crate::free::{FreeBlocks, Place, Request};
use crate::ids::BlockId;

struct State {
    free: FreeBlocks,
    taken: Vec<BlockId>,
    evicted: Vec<BlockId>,
    /// Who asks next: nobody known, or a sequence that grows, with its last block.
    growing: bool,
    after: Option<BlockId>,
}

/// A free queue over the engine's block objects, `blocks[i].block_id == i`.
#[pyclass(frozen, subclass, name = "BlockQueue", module = "kvcatch._core")]
pub(super) struct PyBlockQueue {
    blocks: Py<PyList>,
    /// Ids whose content somebody still reads (any values), kept by the engine.
    watchers: OnceLock<Py<PyDict>>,
    /// Whether the engine gives blocks without content back by `prepend_n`; if not, a missing hash tells them.
    prepends: bool,
    state: Mutex<State>,
    started: Instant,
}

/// The id of a block object.
fn id_of(block: &Bound<'_, PyAny>) -> PyResult<BlockId> {
    block.getattr(intern!(block.py(), "block_id"))?.extract().map(BlockId)
}

fn ids_of(blocks: &Bound<'_, PyAny>) -> PyResult<Vec<BlockId>> {
    if let Ok(list) = blocks.cast::<PyList>() {
        return list.iter().map(|block| id_of(&block)).collect();
    }
    blocks.try_iter()?.map(|block| id_of(&block?)).collect()
}

impl PyBlockQueue {
    /// Runs `work` while attached; see `FreeBlocks`.
    fn run<T>(&self, py: Python<'_>, work: impl FnOnce(&mut State) -> Result<T>) -> PyResult<T> {
        let done = match self.state.lock_py_attached(py) {
            Ok(mut state) => work(&mut state),
            Err(_) => Err(Error::Corrupt("an earlier call did not finish".into())),
        };
        Ok(done?)
    }

    fn block<'py>(&self, py: Python<'py>, id: BlockId) -> PyResult<Bound<'py, PyAny>> {
        self.blocks.bind(py).get_item(id.index())
    }

    fn list<'py>(&self, py: Python<'py>, ids: &[BlockId]) -> PyResult<Bound<'py, PyList>> {
        let blocks = ids.iter().map(|&id| self.block(py, id)).collect::<PyResult<Vec<_>>>()?;
        PyList::new(py, blocks)
    }

    /// Gives blocks back with content worth keeping, the first to be evicted first.
    fn give<'py>(&self, py: Python<'py>, blocks: impl Iterator<Item = PyResult<Bound<'py, PyAny>>>) -> PyResult<usize> {
        let mut clean = Vec::new();
        let mut cached = Vec::with_capacity(blocks.size_hint().0);
        for block in blocks {
            let block = block?;
            let id = id_of(&block)?;
            let is_clean = !self.prepends && block.getattr(intern!(py, "_block_hash"))?.is_none();
            if is_clean { clean.push(id) } else { cached.push(id) }
        }
        let mut watched = Vec::new();
        if let Some(watchers) = self.watchers.get().map(|watchers| watchers.bind(py)).filter(|all| !all.is_empty()) {
            for &id in &cached {
                if watchers.contains(id.0)? {
                    watched.push(id);
                }
            }
        }
        self.run(py, |State { free, .. }| {
            free.give_cached(&cached)?;
            if let Err(error) = free.give_clean(&clean) {
                for &id in &cached {
                    free.extract(id)?;
                }
                return Err(error);
            }
            watched.iter().try_for_each(|&id| free.watch(id))?;
            Ok(free.len())
        })
    }

    /// Sets `num_free_blocks` of a subclass's object: an attribute of the object itself, which the engine reads for
    /// every token, costs a fifth of a getter.
    fn tell(slf: &Bound<'_, Self>, free: usize) -> PyResult<()> {
        if slf.get_type().is(slf.py().get_type::<Self>()) {
            return Ok(());
        }
        slf.setattr(intern!(slf.py(), "num_free_blocks"), free)
    }
}

#[pymethods]
impl PyBlockQueue {
    #[new]
    #[pyo3(signature = (blocks, *, placement = None, eviction = None, seed = None, prepends = true), text_signature = "(blocks, *, placement='bitmap', eviction='lru', seed=0, prepends=True)")]
    fn new(
        blocks: Bound<'_, PyList>,
        placement: Option<&Bound<'_, PyAny>>,
        eviction: Option<&Bound<'_, PyAny>>,
        seed: Option<&Bound<'_, PyAny>>,
        prepends: bool,
    ) -> PyResult<Self> {
        let placement = args::text_or("placement", placement, "bitmap")?;
        let eviction = args::text_or("eviction", eviction, "lru")?;
        let seed = seed.map_or(Ok(0), |value| args::integer("seed", value, 0, i64::MAX))?;
        // vLLM's list, not a copy of it: it never changes, and a copy would be a second reference to every block.
        for (i, block) in blocks.iter().enumerate() {
            let id = id_of(&block)?;
            if id.index() != i {
                return Err(Error::invalid("blocks", id, format!("is at index {i}: must be block {i}")).into());
            }
        }
        let free = FreeBlocks::new(blocks.len(), &placement, &eviction, seed as u64)?;
        let (taken, evicted) = (Vec::new(), Vec::new());
        let state = State { free, taken, evicted, growing: false, after: None };
        let (blocks, state) = (blocks.unbind(), Mutex::new(state));
        Ok(Self { blocks, watchers: OnceLock::new(), prepends, state, started: Instant::now() })
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> std::result::Result<(), PyTraverseError> {
        visit.call(&self.blocks)?;
        self.watchers.get().map_or(Ok(()), |watchers| visit.call(watchers))
    }

    #[getter]
    fn num_clean(&self, py: Python<'_>) -> PyResult<usize> {
        self.run(py, |state| Ok(state.free.num_clean()))
    }

    #[getter]
    fn num_evictions(&self, py: Python<'_>) -> PyResult<u64> {
        self.run(py, |state| Ok(state.free.num_evictions()))
    }

    #[getter]
    fn placement(&self, py: Python<'_>) -> PyResult<&'static str> {
        self.run(py, |state| Ok(state.free.placement()))
    }

    #[getter]
    fn eviction(&self, py: Python<'_>) -> PyResult<&'static str> {
        self.run(py, |state| Ok(state.free.eviction()))
    }

    /// Who asks next, and only next: `None` nobody that grows, -1 a new sequence, else a sequence with this last block.
    #[setter]
    fn set_growing(&self, py: Python<'_>, value: Option<i64>) -> PyResult<()> {
        self.run(py, |state| {
            state.growing = value.is_some();
            state.after = value.and_then(|id| u32::try_from(id).ok()).map(BlockId);
            Ok(())
        })
    }

    #[getter]
    fn growing(&self, py: Python<'_>) -> PyResult<Option<i64>> {
        self.run(py, |state| Ok(state.growing.then(|| state.after.map_or(-1, |id| i64::from(id.0)))))
    }

    fn set_watchers(&self, watchers: Bound<'_, PyDict>) -> PyResult<()> {
        self.watchers.set(watchers.unbind()).map_err(|_| PyRuntimeError::new_err("watchers are set already"))
    }

    fn set_early(&self, py: Python<'_>, early: bool) -> PyResult<()> {
        self.run(py, |state| {
            state.free.set_early(early);
            Ok(())
        })
    }

    fn popleft<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let (py, this) = (slf.py(), slf.get());
        let first = this.run(py, |State { free, evicted, .. }| {
            let Some(&id) = free.order().first() else { return Ok(None) };
            evicted.clear();
            free.take_exactly(id, 1, &mut Vec::new(), evicted)?;
            Ok(Some((id, free.len())))
        })?;
        let Some((id, left)) = first else { return Err(PyValueError::new_err("No free blocks available")) };
        Self::tell(slf, left)?;
        this.block(py, id)
    }

    fn popleft_n<'py>(slf: &Bound<'py, Self>, n: usize) -> PyResult<Bound<'py, PyList>> {
        let (py, this) = (slf.py(), slf.get());
        let mut ids = Vec::new();
        let (enough, left) = this.run(py, |state| {
            let State { free, taken, evicted, growing, after } = state;
            let (grows, after) = (std::mem::take(growing), after.take());
            if n > free.len() {
                return Ok((false, free.len()));
            }
            if free.needs_clock() {
                free.set_now(this.started.elapsed().as_millis() as u64);
            }
            taken.clear();
            evicted.clear();
            // A block of another pool, or one that was freed meanwhile, is no hint.
            let after = after.filter(|&id| matches!(free.place_of(id), Ok(Place::Out)));
            free.take(n, Request { after, contiguous: false, fixed: !grows }, taken, evicted)?;
            std::mem::swap(&mut ids, taken);
            Ok((true, free.len()))
        })?;
        if !enough {
            return Err(PyAssertionError::new_err(format!("{n} blocks asked of a free queue of {left}")));
        }
        Self::tell(slf, left)?;
        let list = this.list(py, &ids);
        this.run(py, |state| {
            state.taken = ids;
            Ok(())
        })?;
        list
    }

    fn remove(slf: &Bound<'_, Self>, block: &Bound<'_, PyAny>) -> PyResult<()> {
        let id = id_of(block)?;
        let left = slf.get().run(slf.py(), |State { free, .. }| Ok(free.remove(id).is_ok().then(|| free.len())))?;
        match left {
            Some(left) => Self::tell(slf, left),
            None => {
                Err(PyRuntimeError::new_err(format!("remove() called on an invalid block: {}", args::shown(block))))
            }
        }
    }

    fn append(slf: &Bound<'_, Self>, block: Bound<'_, PyAny>) -> PyResult<()> {
        let left = slf.get().give(slf.py(), std::iter::once(Ok(block)))?;
        Self::tell(slf, left)
    }

    fn append_n(slf: &Bound<'_, Self>, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        let (py, this) = (slf.py(), slf.get());
        let left = match blocks.cast::<PyList>() {
            Ok(list) => this.give(py, list.iter().map(Ok))?,
            Err(_) => this.give(py, blocks.try_iter()?)?,
        };
        Self::tell(slf, left)
    }

    fn prepend_n(slf: &Bound<'_, Self>, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        let ids = ids_of(blocks)?;
        let left = slf.get().run(slf.py(), |State { free, .. }| {
            free.give_clean(&ids)?;
            Ok(free.len())
        })?;
        Self::tell(slf, left)
    }

    /// Tells the eviction of hits of blocks that are in use.
    fn touch(&self, py: Python<'_>, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        let ids = ids_of(blocks)?;
        self.run(py, |State { free, .. }| ids.iter().try_for_each(|&id| free.touch(id)))
    }

    /// Retains the content of blocks in use or cached: priority 1 to 100, seconds to live (`None`: no end).
    #[pyo3(signature = (blocks, priority, ttl = None))]
    fn retain(
        &self,
        py: Python<'_>,
        blocks: &Bound<'_, PyAny>,
        priority: &Bound<'_, PyAny>,
        ttl: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let ids = ids_of(blocks)?;
        let priority = args::integer("priority", priority, 0, 100)? as u8;
        let ttl = ttl.map(|ttl| args::milliseconds("ttl", ttl)).transpose()?;
        let now = self.started.elapsed().as_millis() as u64;
        let until = ttl.map_or(u64::MAX, |ttl| now.saturating_add(ttl));
        self.run(py, |State { free, .. }| {
            free.set_now(now);
            if let Some(&id) = ids.iter().find(|&&id| free.place_of(id).is_ok_and(|place| place == Place::Clean)) {
                return Err(Error::invalid("block", id, "is clean: nothing to retain"));
            }
            ids.iter().try_for_each(|&id| free.retain(id, priority, until))
        })
    }

    /// The content of every block in the queue is void.
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, |state| {
            state.free.clear();
            Ok(())
        })
    }

    /// Ids in hand-out order: clean blocks, then cached ones, next victim first.
    fn order(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        self.run(py, |state| Ok(state.free.order().into_iter().map(|id| id.0).collect()))
    }

    fn get_all_free_blocks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let order = self.run(py, |state| Ok(state.free.order()))?;
        self.list(py, &order)
    }

    fn validate(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, |state| state.free.validate())
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.run(py, |state| Ok(state.free.len()))
    }

    fn __contains__(&self, py: Python<'_>, block: &Bound<'_, PyAny>) -> PyResult<bool> {
        let id = id_of(block)?;
        self.run(py, |state| Ok(state.free.place_of(id)? != Place::Out))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        self.run(py, |State { free, .. }| {
            Ok(format!(
                "<BlockQueue {}+{}: {} blocks, {} clean, {} cached>",
                free.placement(),
                free.eviction(),
                free.num_blocks(),
                free.num_clean(),
                free.num_cached()
            ))
        })
    }
}
