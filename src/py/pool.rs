//! `BlockPool`.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use pyo3::prelude::*;
use pyo3::sync::{MutexExt, PyOnceLock};
use pyo3::types::{PyDict, PyMapping, PyString};

use super::args::{self, Counts, Output};
use super::compact::PyCompactionPlan;
use super::error::{invalid_argument, invalid_type};
use super::handles::{PyPin, PySequence};
use super::prefix::{PyMissReport, PyPrefix, prefix_of};
use crate::compact::Objective;
use crate::error::{Error, Result};
use crate::ids::Handle;
use crate::pool::{Admission, BlockPool, Config};
use crate::prefix::{HashKind, Prefix};
use crate::table::count_runs;

/// Paged KV-cache blocks.
#[pyclass(frozen, name = "BlockPool", module = "kvcatch")]
pub(super) struct PyBlockPool {
    pool: Mutex<BlockPool>,
    config: Config,
    /// The thread that holds the pool while Python code runs, 0 for none: it must not come back in.
    holder: AtomicUsize,
    /// Origin of the pool's clock; `None` where the caller sets it.
    started: Option<Instant>,
}

fn poisoned<T>(_: T) -> Error {
    Error::Corrupt("an earlier call did not finish".into())
}

/// A number that no other living thread has, and not 0.
fn this_thread() -> usize {
    thread_local!(static HERE: u8 = const { 0 });
    HERE.with(|here| std::ptr::from_ref(here) as usize)
}

/// The pool, held while Python code runs; other threads wait, this one is refused.
pub(super) struct Held<'a> {
    pub(super) pool: MutexGuard<'a, BlockPool>,
    holder: &'a AtomicUsize,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.holder.store(0, Ordering::Relaxed);
    }
}

impl PyBlockPool {
    /// Runs `work` on the pool; for use while detached from the interpreter.
    pub(super) fn with<T>(&self, work: impl FnOnce(&mut BlockPool) -> Result<T>) -> Result<T> {
        self.refuse_reentry()?;
        let mut pool = self.pool.lock().map_err(poisoned)?;
        self.tick(&mut pool);
        work(&mut pool)
    }

    /// The pool for as long as the result lives, across calls of Python code.
    pub(super) fn hold(&self, py: Python<'_>) -> Result<Held<'_>> {
        self.refuse_reentry()?;
        let mut pool = self.pool.lock_py_attached(py).map_err(poisoned)?;
        self.tick(&mut pool);
        self.holder.store(this_thread(), Ordering::Relaxed);
        Ok(Held { pool, holder: &self.holder })
    }

    /// Only the holder itself can read its own number here.
    fn refuse_reentry(&self) -> Result<()> {
        let holder = self.holder.load(Ordering::Relaxed);
        if holder != 0 && holder == this_thread() {
            return Err(Error::invalid("pool", "busy", "called from within its own plan.apply(): call it afterwards"));
        }
        Ok(())
    }

    pub(super) fn config(&self) -> &Config {
        &self.config
    }

    /// Runs `work` on the pool while attached. The pool is let go before anything is turned into a Python object: that
    /// may run other Python code, which may come back here.
    fn run<T>(&self, py: Python<'_>, work: impl FnOnce(&mut BlockPool) -> Result<T>) -> PyResult<T> {
        self.refuse_reentry()?;
        let done = match self.pool.lock_py_attached(py) {
            Ok(mut pool) => {
                self.tick(&mut pool);
                work(&mut pool)
            }
            Err(_) => Err(poisoned(())),
        };
        Ok(done?)
    }

    fn tick(&self, pool: &mut BlockPool) {
        if let (Some(started), true) = (self.started, pool.needs_clock()) {
            pool.set_now(started.elapsed().as_millis() as u64);
        }
    }

    fn prefix_of(&self, tokens: &Bound<'_, PyAny>, salt: Option<&Bound<'_, PyAny>>) -> PyResult<Prefix> {
        prefix_of(tokens, salt, self.config.block_size, self.config.hash)
    }

    fn sequence(pool: &BlockPool, handle: Handle) -> Result<PySequence> {
        let sequence = pool.sequences().get(handle.raw())?;
        Ok(PySequence { raw: handle.raw(), hit_tokens: sequence.hit_tokens, owner: sequence.owner.clone() })
    }
}

fn tags_of(tags: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Vec<(String, String)>>> {
    let Some(tags) = tags else { return Ok(None) };
    let refused = || invalid_type(format!("tags = {}: must be a mapping of str to str", args::shown(tags)));
    let mapping = tags.cast::<PyMapping>().map_err(|_| refused())?;
    let pairs = mapping.items()?.extract::<Vec<(String, String)>>().map_err(|_| refused())?;
    if let Some((key, _)) = pairs.iter().find(|(key, _)| key == "owner") {
        return Err(invalid_argument(format!("tags has the key {key:?}: use owner= for the owner")));
    }
    Ok(Some(pairs))
}

fn json<'py>(py: Python<'py>, value: &serde_json::Value) -> PyResult<Bound<'py, PyAny>> {
    static LOADS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let loads =
        LOADS.get_or_try_init(py, || py.import("json").and_then(|json| json.getattr("loads")).map(Bound::unbind))?;
    loads.bind(py).call1((value.to_string(),))
}

#[pymethods]
impl PyBlockPool {
    #[new]
    #[pyo3(signature = (
        num_blocks, block_size = None, *, placement = None, eviction = None, contiguity = None, blocks_per_page = None,
        null_block = false, hash = None, seed = None, manual_clock = false
    ), text_signature = "(num_blocks, block_size=16, *, placement='bitmap', eviction='lru', contiguity='preferred', \
        blocks_per_page=128, null_block=False, hash='xxh3', seed=0, manual_clock=False)")]
    #[allow(clippy::too_many_arguments)]
    fn new(
        num_blocks: &Bound<'_, PyAny>,
        block_size: Option<&Bound<'_, PyAny>>,
        placement: Option<&Bound<'_, PyAny>>,
        eviction: Option<&Bound<'_, PyAny>>,
        contiguity: Option<&Bound<'_, PyAny>>,
        blocks_per_page: Option<&Bound<'_, PyAny>>,
        null_block: bool,
        hash: Option<&Bound<'_, PyAny>>,
        seed: Option<&Bound<'_, PyAny>>,
        manual_clock: bool,
    ) -> PyResult<Self> {
        let read = |name, value: Option<&Bound<'_, PyAny>>, default, least, most| {
            value.map_or(Ok(default), |value| args::integer(name, value, least, most))
        };
        let contiguity = args::text_or("contiguity", contiguity, "preferred")?;
        let contiguous = match contiguity.as_str() {
            "preferred" => false,
            "required" => true,
            _ => {
                let reason = "must be \"preferred\" or \"required\"";
                return Err(invalid_argument(format!("contiguity = {contiguity:?}: {reason}")));
            }
        };
        let config = Config {
            num_blocks: args::integer("num_blocks", num_blocks, 1, 1 << 31)? as usize,
            block_size: read("block_size", block_size, 16, 1, 1 << 16)? as usize,
            placement: args::text_or("placement", placement, "bitmap")?,
            eviction: args::text_or("eviction", eviction, "lru")?,
            contiguous,
            blocks_per_page: read("blocks_per_page", blocks_per_page, 128, 1, 1 << 31)? as usize,
            null_block,
            hash: HashKind::by_name(&args::text_or("hash", hash, "xxh3")?)?,
            seed: read("seed", seed, 0, 0, i64::MAX)? as u64,
        };
        let pool = Mutex::new(BlockPool::new(config.clone())?);
        Ok(Self { pool, config, started: (!manual_clock).then(Instant::now), holder: AtomicUsize::new(0) })
    }

    #[getter]
    fn num_blocks(&self) -> usize {
        self.config.num_blocks
    }

    #[getter]
    fn block_size(&self) -> usize {
        self.config.block_size
    }

    #[getter]
    fn placement(&self) -> &str {
        &self.config.placement
    }

    #[getter]
    fn eviction(&self) -> &str {
        &self.config.eviction
    }

    #[getter]
    fn contiguity(&self) -> &'static str {
        if self.config.contiguous { "required" } else { "preferred" }
    }

    #[getter]
    fn blocks_per_page(&self) -> usize {
        self.config.blocks_per_page
    }

    #[getter]
    fn num_free(&self, py: Python<'_>) -> PyResult<usize> {
        self.run(py, |pool| Ok(pool.num_free()))
    }

    #[getter]
    fn num_cached(&self, py: Python<'_>) -> PyResult<usize> {
        self.run(py, |pool| Ok(pool.num_cached()))
    }

    #[getter]
    fn num_active(&self, py: Python<'_>) -> PyResult<usize> {
        self.run(py, |pool| Ok(pool.num_active()))
    }

    #[getter]
    fn num_reserved(&self, py: Python<'_>) -> PyResult<usize> {
        self.run(py, |pool| Ok(pool.num_reserved()))
    }

    #[getter]
    fn num_pinned(&self, py: Python<'_>) -> PyResult<usize> {
        self.run(py, |pool| Ok(pool.num_pinned()))
    }

    #[getter]
    fn available(&self, py: Python<'_>) -> PyResult<usize> {
        self.run(py, |pool| Ok(pool.available()))
    }

    #[getter]
    fn num_sequences(&self, py: Python<'_>) -> PyResult<usize> {
        self.run(py, |pool| Ok(pool.sequences().len()))
    }

    #[getter]
    fn largest_run(&self, py: Python<'_>) -> PyResult<usize> {
        self.run(py, |pool| Ok(pool.largest_run()))
    }

    #[pyo3(signature = (
        tokens, *, owner = None, tags = None, salt = None, num_tokens = None, reserve_tokens = None, use_cache = true,
        commit = false
    ), text_signature = "($self, tokens, *, owner=None, tags=None, salt=None, num_tokens=None, reserve_tokens=0, \
        use_cache=True, commit=False)")]
    #[allow(clippy::too_many_arguments)]
    fn create(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        owner: Option<&Bound<'_, PyAny>>,
        tags: Option<&Bound<'_, PyAny>>,
        salt: Option<&Bound<'_, PyAny>>,
        num_tokens: Option<&Bound<'_, PyAny>>,
        reserve_tokens: Option<&Bound<'_, PyAny>>,
        use_cache: bool,
        commit: bool,
    ) -> PyResult<PySequence> {
        let admission = Admission {
            num_tokens: num_tokens.map(|value| args::count("num_tokens", value, 1)).transpose()?,
            reserve_tokens: reserve_tokens.map_or(Ok(0), |value| args::count("reserve_tokens", value, 0))?,
            ignore_cache: !use_cache,
            commit,
            owner: owner.map(|value| args::text("owner", value)).transpose()?,
            tags: tags_of(tags)?.unwrap_or_default(),
        };
        let prefix = self.prefix_of(tokens, salt)?;
        self.run(py, |pool| {
            let handle = pool.create(prefix, admission)?;
            Self::sequence(pool, handle)
        })
    }

    #[pyo3(signature = (seqs, n_tokens = None), text_signature = "($self, seqs, n_tokens=1)")]
    fn append(
        &self,
        py: Python<'_>,
        seqs: &Bound<'_, PyAny>,
        n_tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<(u32, u32)>> {
        let raws = args::batch(seqs)?;
        let counts = n_tokens.map_or(Ok(Counts::Same(1)), |value| Counts::read("n_tokens", value, raws.len()))?;
        let copies = self.run(py, |pool| pool.append(&raws, |i| counts.get(i)))?;
        Ok(copies.into_iter().map(|(from, to)| (from.0, to.0)).collect())
    }

    #[pyo3(signature = (seqs, tokens = None, counts = None, *, deduplicate = false))]
    fn commit(
        &self,
        py: Python<'_>,
        seqs: &Bound<'_, PyAny>,
        tokens: Option<&Bound<'_, PyAny>>,
        counts: Option<&Bound<'_, PyAny>>,
        deduplicate: bool,
    ) -> PyResult<usize> {
        let raws = args::batch(seqs)?;
        let tokens = tokens.map(|value| args::tokens("tokens", value)).transpose()?;
        let mut each = counts.map(|value| Counts::read("counts", value, raws.len())).transpose()?;
        if let (Some(tokens), None) = (&tokens, &each) {
            if tokens.len() % raws.len().max(1) != 0 || (raws.is_empty() && !tokens.is_empty()) {
                let (tokens, raws) = (tokens.len(), raws.len());
                return Err(invalid_argument(format!("tokens has {tokens} ids for {raws} sequences: give counts")));
            }
            each = Some(Counts::Same(tokens.len() / raws.len().max(1)));
        }
        let count = |i: usize| each.as_ref().map(|counts| counts.get(i));
        self.run(py, |pool| pool.commit(&raws, tokens.as_deref(), count, deduplicate))
    }

    #[pyo3(signature = (seq, *, owner = None, tags = None))]
    fn fork(
        &self,
        py: Python<'_>,
        seq: &Bound<'_, PyAny>,
        owner: Option<&Bound<'_, PyAny>>,
        tags: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PySequence> {
        let (raw, tags) = (args::handle("seq", seq)?, tags_of(tags)?);
        let owner = owner.map(|value| args::text("owner", value)).transpose()?;
        self.run(py, |pool| {
            let child = pool.fork(raw, owner, tags)?;
            Self::sequence(pool, child)
        })
    }

    fn truncate(&self, py: Python<'_>, seq: &Bound<'_, PyAny>, num_tokens: &Bound<'_, PyAny>) -> PyResult<()> {
        let (raw, num_tokens) = (args::handle("seq", seq)?, args::count("num_tokens", num_tokens, 0)?);
        self.run(py, |pool| pool.truncate(raw, num_tokens))
    }

    fn reserve(&self, py: Python<'_>, seq: &Bound<'_, PyAny>, num_tokens: &Bound<'_, PyAny>) -> PyResult<()> {
        let (raw, num_tokens) = (args::handle("seq", seq)?, args::count("num_tokens", num_tokens, 0)?);
        self.run(py, |pool| pool.reserve(raw, num_tokens))
    }

    fn free(&self, py: Python<'_>, seqs: &Bound<'_, PyAny>) -> PyResult<()> {
        let raws = if seqs.extract::<i64>().is_ok() { vec![args::handle("seqs", seqs)?] } else { args::batch(seqs)? };
        self.run(py, |pool| pool.free(&raws))
    }

    #[pyo3(signature = (seqs, out, *, pad = None), text_signature = "($self, seqs, out, *, pad=-1)")]
    fn block_tables(
        &self,
        py: Python<'_>,
        seqs: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        pad: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let raws = args::batch(seqs)?;
        let pad = pad.map_or(Ok(-1), |value| args::integer("pad", value, i64::from(i32::MIN), i64::from(i32::MAX)))?;
        let mut out = Output::<i32>::get("out", out, "int32", 2)?;
        let (rows, width) = (out.shape()[0], out.shape()[1]);
        if rows < raws.len() {
            return Err(invalid_argument(format!("out has {rows} rows for {} sequences", raws.len())));
        }
        let items = out.items(py);
        self.run(py, |pool| {
            for &raw in &raws {
                // All or nothing: nothing is written before every row is known to fit.
                let needed = pool.sequences().get(raw)?.blocks.len();
                if needed > width {
                    let reason = format!("a row is too narrow for a sequence of {needed} blocks");
                    return Err(Error::invalid("out width", width, reason));
                }
            }
            for (&raw, row) in raws.iter().zip(items.chunks_exact_mut(width.max(1))) {
                pool.sequences().get(raw)?.write_row(row, pad as i32)?;
            }
            Ok(())
        })
    }

    #[pyo3(signature = (seqs, counts = None, *, starts = None, out))]
    fn slot_mapping(
        &self,
        py: Python<'_>,
        seqs: &Bound<'_, PyAny>,
        counts: Option<&Bound<'_, PyAny>>,
        starts: Option<&Bound<'_, PyAny>>,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<usize> {
        let raws = args::batch(seqs)?;
        let counts = counts.map(|value| Counts::read("counts", value, raws.len())).transpose()?;
        let starts = starts.map(|value| Counts::read("starts", value, raws.len())).transpose()?;
        let mut out = Output::<i64>::get("out", out, "int64", 1)?;
        let room = out.shape()[0];
        let items = out.items(py);
        self.run(py, |pool| {
            let mut parts = Vec::with_capacity(raws.len());
            let mut total = 0usize;
            for (i, &raw) in raws.iter().enumerate() {
                let sequence = pool.sequences().get(raw)?;
                let start = starts.as_ref().map_or(sequence.committed, |starts| starts.get(i));
                let count = counts.as_ref().map_or(sequence.num_tokens.saturating_sub(start), |counts| counts.get(i));
                if start.checked_add(count).is_none_or(|end| end > sequence.num_tokens) {
                    let reason = format!(
                        "with {count} slots from there, sequence {raw} has room for {} tokens",
                        sequence.num_tokens
                    );
                    return Err(Error::invalid("start", start, reason));
                }
                total += count;
                parts.push((sequence, start, count));
            }
            if total > room {
                return Err(Error::invalid("out length", room, format!("must hold {total} slots")));
            }
            let mut rest = items;
            for (sequence, start, count) in parts {
                let (now, later) = rest.split_at_mut(count);
                sequence.write_slots(start, self.config.block_size, now)?;
                rest = later;
            }
            Ok(total)
        })
    }

    fn block_ids<'py>(&self, py: Python<'py>, seq: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let raw = args::handle("seq", seq)?;
        let blocks = self.run(py, |pool| Ok(pool.sequences().get(raw)?.blocks.clone()))?;
        args::block_array(py, &blocks)
    }

    fn num_tokens(&self, py: Python<'_>, seq: &Bound<'_, PyAny>) -> PyResult<usize> {
        let raw = args::handle("seq", seq)?;
        self.run(py, |pool| Ok(pool.sequences().get(raw)?.num_tokens))
    }

    fn num_committed(&self, py: Python<'_>, seq: &Bound<'_, PyAny>) -> PyResult<usize> {
        let raw = args::handle("seq", seq)?;
        self.run(py, |pool| Ok(pool.sequences().get(raw)?.committed))
    }

    fn num_runs(&self, py: Python<'_>, seqs: &Bound<'_, PyAny>) -> PyResult<usize> {
        let raws = if seqs.extract::<i64>().is_ok() { vec![args::handle("seqs", seqs)?] } else { args::batch(seqs)? };
        self.run(py, |pool| {
            let mut runs = 0;
            for raw in raws {
                runs += count_runs(&pool.sequences().get(raw)?.blocks);
            }
            Ok(runs)
        })
    }

    fn describe<'py>(&self, py: Python<'py>, seq: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyDict>> {
        let raw = args::handle("seq", seq)?;
        let (sequence, runs) = self.run(py, |pool| {
            let sequence = pool.sequences().get(raw)?;
            Ok((sequence.clone(), count_runs(&sequence.blocks)))
        })?;
        let dict = PyDict::new(py);
        dict.set_item("id", raw)?;
        dict.set_item("owner", sequence.owner.as_deref())?;
        let tags = PyDict::new(py);
        for (key, value) in &sequence.tags {
            tags.set_item(key, value)?;
        }
        dict.set_item("tags", tags)?;
        dict.set_item("num_tokens", sequence.num_tokens)?;
        dict.set_item("num_committed", sequence.committed)?;
        dict.set_item("num_blocks", sequence.blocks.len())?;
        dict.set_item("runs", runs)?;
        dict.set_item("hit_tokens", sequence.hit_tokens)?;
        dict.set_item("reserved_blocks", sequence.reserved)?;
        Ok(dict)
    }

    fn sequences(&self, py: Python<'_>) -> PyResult<Vec<PySequence>> {
        self.run(py, |pool| pool.sequences().iter().map(|(handle, _)| Self::sequence(pool, handle)).collect())
    }

    #[pyo3(signature = (tokens, *, salt = None))]
    fn prefix(&self, tokens: &Bound<'_, PyAny>, salt: Option<&Bound<'_, PyAny>>) -> PyResult<PyPrefix> {
        Ok(PyPrefix { inner: self.prefix_of(tokens, salt)? })
    }

    #[pyo3(signature = (tokens, *, salt = None))]
    fn lookup(&self, py: Python<'_>, tokens: &Bound<'_, PyAny>, salt: Option<&Bound<'_, PyAny>>) -> PyResult<usize> {
        if let (Ok(prefix), None) = (tokens.cast::<PyPrefix>(), salt) {
            return self.run(py, |pool| pool.lookup(&prefix.get().inner));
        }
        if tokens.is_instance_of::<PyPrefix>() {
            let prefix = self.prefix_of(tokens, salt)?;
            return self.run(py, |pool| pool.lookup(&prefix));
        }
        let salt = args::salt(salt)?;
        args::with_tokens("tokens", tokens, |tokens| self.run(py, |pool| Ok(pool.lookup_tokens(tokens, &salt))))
    }

    fn hits(&self, py: Python<'_>, prefix: &Bound<'_, PyAny>) -> PyResult<(usize, usize)> {
        match prefix.cast::<PyPrefix>() {
            Ok(prefix) => self.run(py, |pool| pool.hits(&prefix.get().inner)),
            Err(_) => {
                let prefix = self.prefix_of(prefix, None)?;
                self.run(py, |pool| pool.hits(&prefix))
            }
        }
    }

    fn lookup_many<'py>(&self, py: Python<'py>, prefixes: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let Ok(prefixes) = prefixes.extract::<Vec<Py<PyPrefix>>>() else {
            return Err(invalid_type(format!("prefixes = {}: must be a list of Prefix", args::shown(prefixes))));
        };
        let hits: Vec<i64> =
            self.run(py, |pool| prefixes.iter().map(|prefix| Ok(pool.lookup(&prefix.get().inner)? as i64)).collect())?;
        args::int64_array(py, &hits)
    }

    #[pyo3(signature = (tokens, *, salt = None))]
    fn explain_miss(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        salt: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PyMissReport> {
        let prefix = self.prefix_of(tokens, salt)?;
        let miss = py.detach(|| self.with(|pool| pool.explain(&prefix)))?;
        Ok(PyMissReport { miss, num_tokens: prefix.tokens().len() })
    }

    #[pyo3(signature = (tokens, *, priority = None, ttl = None, salt = None), text_signature = "($self, tokens, *, priority=1, ttl=None, salt=None)")]
    fn retain(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        priority: Option<&Bound<'_, PyAny>>,
        ttl: Option<&Bound<'_, PyAny>>,
        salt: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<usize> {
        let priority = priority.map_or(Ok(1), |value| args::integer("priority", value, 0, 100))?;
        let ttl = ttl.map(|value| args::milliseconds("ttl", value)).transpose()?;
        let prefix = self.prefix_of(tokens, salt)?;
        self.run(py, |pool| {
            if let (Some(started), true) = (self.started, ttl.is_some()) {
                pool.set_now(started.elapsed().as_millis() as u64);
            }
            pool.retain(&prefix, priority as u8, ttl)
        })
    }

    fn set_next_use(&self, py: Python<'_>, seq: &Bound<'_, PyAny>, next_use: &Bound<'_, PyAny>) -> PyResult<()> {
        let raw = args::handle("seq", seq)?;
        let next_use = args::integers("next_use", next_use, i64::MIN, i64::MAX)?;
        self.run(py, |pool| pool.set_next_use(raw, &next_use))
    }

    fn evict(&self, py: Python<'_>, n: &Bound<'_, PyAny>) -> PyResult<usize> {
        let n = args::count("n", n, 0)?;
        self.run(py, |pool| Ok(pool.evict(n)))
    }

    fn reset_prefix_cache(&self, py: Python<'_>) -> PyResult<usize> {
        self.run(py, BlockPool::reset_prefix_cache)
    }

    #[getter]
    fn get_now(&self, py: Python<'_>) -> PyResult<f64> {
        match self.started {
            Some(started) => Ok(started.elapsed().as_secs_f64()),
            None => self.run(py, |pool| Ok(pool.now() as f64 / 1e3)),
        }
    }

    #[setter]
    fn set_now(&self, py: Python<'_>, seconds: &Bound<'_, PyAny>) -> PyResult<()> {
        if self.started.is_some() {
            return Err(invalid_argument("now: this pool keeps its own clock; make it with manual_clock=True".into()));
        }
        let now = args::milliseconds("now", seconds)?;
        self.run(py, |pool| {
            pool.set_now(now);
            Ok(())
        })
    }

    #[pyo3(signature = (what, *, owner = None, deadline = None))]
    fn pin(
        &self,
        py: Python<'_>,
        what: &Bound<'_, PyAny>,
        owner: Option<&Bound<'_, PyAny>>,
        deadline: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PyPin> {
        let owner = owner.map(|value| args::text("owner", value)).transpose()?;
        let deadline = deadline.map(|value| args::milliseconds("deadline", value)).transpose()?;
        let single = what.cast::<PySequence>().is_ok() || what.extract::<i64>().is_ok();
        let raw = if single { Some(args::handle("what", what)?) } else { None };
        let given = if single { Vec::new() } else { args::blocks("blocks", what)? };
        self.run(py, |pool| {
            let of = |raw| pool.sequences().get(raw).map(|sequence| sequence.blocks.clone());
            let blocks = raw.map_or(Ok(given), of)?;
            let handle = pool.pin(blocks.clone(), owner, deadline)?;
            Ok(PyPin { raw: handle.raw(), blocks })
        })
    }

    fn unpin(&self, py: Python<'_>, pin: &Bound<'_, PyAny>) -> PyResult<()> {
        let raw = match pin.cast::<PyPin>() {
            Ok(pin) => pin.get().raw,
            Err(_) => args::integer("pin", pin, i64::MIN, i64::MAX)?,
        };
        self.run(py, |pool| pool.unpin(raw))
    }

    #[pyo3(signature = (objective, *, n = None, max_moves = None, seqs = None, bytes_per_block = None, bandwidth = None))]
    #[allow(clippy::too_many_arguments)]
    fn plan_compaction(
        slf: &Bound<'_, Self>,
        objective: &Bound<'_, PyAny>,
        n: Option<&Bound<'_, PyAny>>,
        max_moves: Option<&Bound<'_, PyAny>>,
        seqs: Option<&Bound<'_, PyAny>>,
        bytes_per_block: Option<&Bound<'_, PyAny>>,
        bandwidth: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PyCompactionPlan> {
        let n = n.map(|value| args::integer("n", value, 1, 1 << 31)).transpose()?;
        let objective = args::text("objective", objective)?;
        let objective = match (objective.as_str(), n) {
            ("runs", None) => Objective::Runs,
            ("pages", None) => Objective::Pages,
            ("largest_run", Some(n)) => Objective::LargestRun(n as u32),
            ("largest_run", None) => {
                return Err(invalid_argument("n: largest_run needs the number of blocks in the run".into()));
            }
            ("runs" | "pages", Some(n)) => {
                return Err(invalid_argument(format!("n = {n}: only largest_run takes it")));
            }
            _ => {
                let reason = "must be \"runs\", \"pages\" or \"largest_run\"";
                return Err(invalid_argument(format!("objective = {objective:?}: {reason}")));
            }
        };
        let max_moves = max_moves.map(|value| args::count("max_moves", value, 0)).transpose()?;
        let bytes_per_block = bytes_per_block.map(|value| args::count("bytes_per_block", value, 1)).transpose()?;
        let bandwidth = bandwidth.map(|value| args::number("bandwidth", value)).transpose()?;
        if let Some(rate) = bandwidth.filter(|rate| *rate <= 0.0) {
            return Err(invalid_argument(format!("bandwidth = {rate}: must be a positive number of bytes per second")));
        }
        let raws = seqs.map(args::batch).transpose()?;
        let this = slf.get();
        let made = slf.py().detach(|| this.with(|pool| pool.plan_compaction(objective, max_moves, raws.as_deref())))?;
        Ok(PyCompactionPlan {
            made: Arc::new(made),
            pool: slf.clone().unbind(),
            bytes_per_block: bytes_per_block.map(|bytes| bytes as u64),
            bandwidth,
            applied: AtomicBool::new(false),
        })
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let value = py.detach(|| self.with(|pool| Ok(pool.stats_json())))?;
        json(py, &value)
    }

    #[pyo3(signature = (by = None), text_signature = "($self, by='owner')")]
    fn holdings<'py>(&self, py: Python<'py>, by: Option<&Bound<'py, PyAny>>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        const COLUMNS: [&str; 5] = ["sequences", "blocks", "shared_blocks", "tokens", "reserved_blocks"];
        let by = &*args::text_or("by", by, "owner")?;
        if COLUMNS.contains(&by) {
            return Err(invalid_argument(format!(
                "by = {by:?}: is a column of the answer; use another name for the tag"
            )));
        }
        let holdings = py.detach(|| self.with(|pool| Ok(pool.holdings(by))))?;
        let mut rows = Vec::with_capacity(holdings.len());
        let mut sorted: Vec<_> = holdings.into_iter().collect();
        sorted.sort_by_key(|(key, holding)| (std::cmp::Reverse(holding.blocks), key.clone()));
        for (key, holding) in sorted {
            let row = PyDict::new(py);
            row.set_item(by, key)?;
            row.set_item("sequences", holding.sequences)?;
            row.set_item("blocks", holding.blocks)?;
            row.set_item("shared_blocks", holding.shared_blocks)?;
            row.set_item("tokens", holding.tokens)?;
            row.set_item("reserved_blocks", holding.reserved)?;
            rows.push(row);
        }
        Ok(rows)
    }

    #[pyo3(signature = (live, *, now = None))]
    fn audit<'py>(
        &self,
        py: Python<'py>,
        live: &Bound<'py, PyAny>,
        now: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        if live.is_instance_of::<PyString>() {
            return Err(invalid_type(format!("live = {}: must be an iterable of owners", args::shown(live))));
        }
        let refused = || invalid_type(format!("live = {}: must be an iterable of str", args::shown(live)));
        let mut owners = BTreeSet::new();
        for owner in live.try_iter().map_err(|_| refused())? {
            owners.insert(owner?.extract::<String>().map_err(|_| refused())?);
        }
        let now = match now {
            Some(value) => args::milliseconds("now", value)?,
            None => (self.get_now(py)? * 1e3).round() as u64,
        };
        let audit = py.detach(|| self.with(|pool| Ok(pool.audit(&owners, now))))?;
        let dict = PyDict::new(py);
        let mut zombies = Vec::new();
        for (handle, owner, blocks) in audit.zombies {
            let row = PyDict::new(py);
            row.set_item("id", handle.raw())?;
            row.set_item("owner", owner)?;
            row.set_item("blocks", blocks)?;
            zombies.push(row);
        }
        let mut overdue = Vec::new();
        for (handle, owner, blocks, late) in audit.overdue {
            let row = PyDict::new(py);
            row.set_item("id", handle.raw())?;
            row.set_item("owner", owner)?;
            row.set_item("blocks", blocks)?;
            row.set_item("overdue_seconds", late as f64 / 1e3)?;
            overdue.push(row);
        }
        dict.set_item("zombies", zombies)?;
        dict.set_item("zombie_blocks", audit.zombie_blocks)?;
        dict.set_item("unowned", audit.unowned.into_iter().map(Handle::raw).collect::<Vec<_>>())?;
        dict.set_item("overdue_pins", overdue)?;
        Ok(dict)
    }

    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let value = py.detach(|| self.with(|pool| Ok(pool.snapshot_json())))?;
        json(py, &value)
    }

    fn validate(&self, py: Python<'_>) -> PyResult<()> {
        Ok(py.detach(|| self.with(|pool| pool.validate()))?)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        self.run(py, |pool| {
            Ok(format!(
                "<BlockPool {}+{}: {} blocks of {}: {} free, {} cached, {} active, {} reserved, {} pinned>",
                self.config.placement,
                self.config.eviction,
                self.config.num_blocks,
                self.config.block_size,
                pool.num_free(),
                pool.num_cached(),
                pool.num_active(),
                pool.num_reserved(),
                pool.num_pinned()
            ))
        })
    }
}
