//! `CompactionPlan`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::args;
use super::error::invalid_argument;
use super::pool::PyBlockPool;
use crate::compact::Objective;
use crate::error::{Error, Result};
use crate::pool::{BlockPool, CompactionPlan};

/// Block moves with what they cost and gain.
#[pyclass(frozen, name = "CompactionPlan", module = "kvcatch")]
pub(super) struct PyCompactionPlan {
    pub(super) made: Arc<CompactionPlan>,
    pub(super) pool: Py<PyBlockPool>,
    pub(super) bytes_per_block: Option<u64>,
    pub(super) bandwidth: Option<f64>,
    pub(super) applied: AtomicBool,
}

impl PyCompactionPlan {
    fn runs(&self) -> (u64, u64) {
        self.made.plan.gain.runs.map_or((0, 0), |runs| (runs.before, runs.after))
    }

    fn check(&self, pool: &BlockPool) -> Result<()> {
        if self.applied.load(Ordering::Acquire) {
            return Err(Error::StalePlan { reason: "it was applied already".into() });
        }
        pool.check_plan(&self.made)
    }

    fn remap(&self, pool: &mut BlockPool) -> Result<()> {
        self.check(pool)?;
        pool.apply(&self.made)?;
        self.applied.store(true, Ordering::Release);
        Ok(())
    }

    /// Bytes, then tables, with the pool held throughout: the copies are ordered on the stream when the tables change,
    /// and no block changes hands in between. A plan of several rounds goes to the backend as one assignment, so that a
    /// refusal leaves every byte where it was.
    fn copy_and_remap(&self, py: Python<'_>, kv_cache: &Bound<'_, PyAny>, backend: &Bound<'_, PyAny>) -> PyResult<()> {
        let pool = self.pool.get();
        let (num_blocks, block_size) = (pool.config().num_blocks, pool.config().block_size);
        for (name, have, want) in [
            ("num_blocks", kv_cache.getattr("num_blocks")?.extract::<usize>()?, num_blocks),
            ("block_size", kv_cache.getattr("layout")?.getattr("block_size")?.extract::<usize>()?, block_size),
        ] {
            if have != want {
                return Err(invalid_argument(format!("kv_cache has {name} {have}: the pool has {want}")));
            }
        }
        let (call, (src, dst)) = if self.made.plan.rounds.len() > 1 {
            ("assign_blocks", self.made.plan.assignment(num_blocks))
        } else {
            ("move_blocks", (self.made.plan.src.clone(), self.made.plan.dst.clone()))
        };
        let arguments = (kv_cache, args::block_array(py, &src)?, args::block_array(py, &dst)?);
        let mut held = pool.hold(py)?;
        self.check(&held.pool)?;
        backend.call_method1(call, arguments)?;
        self.remap(&mut held.pool)?;
        Ok(())
    }
}

#[pymethods]
impl PyCompactionPlan {
    #[getter]
    fn objective(&self) -> &'static str {
        match self.made.objective {
            Objective::Runs => "runs",
            Objective::Pages => "pages",
            Objective::LargestRun(_) => "largest_run",
        }
    }

    #[getter]
    fn src<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        args::block_array(py, &self.made.plan.src)
    }

    #[getter]
    fn dst<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        args::block_array(py, &self.made.plan.dst)
    }

    #[getter]
    fn rounds(&self) -> Vec<u32> {
        self.made.plan.rounds.clone()
    }

    #[getter]
    fn num_moves(&self) -> usize {
        self.made.plan.len()
    }

    #[getter]
    fn runs_before(&self) -> u64 {
        self.runs().0
    }

    #[getter]
    fn runs_after(&self) -> u64 {
        self.runs().1
    }

    #[getter]
    fn runs_bound(&self) -> Option<u64> {
        self.made.plan.runs_bound
    }

    #[getter]
    fn empty_pages_before(&self) -> u32 {
        self.made.plan.gain.empty_pages_before
    }

    #[getter]
    fn empty_pages_after(&self) -> u32 {
        self.made.plan.gain.empty_pages_after
    }

    #[getter]
    fn largest_run_before(&self) -> u32 {
        self.made.plan.gain.largest_run_before
    }

    #[getter]
    fn largest_run_after(&self) -> u32 {
        self.made.plan.gain.largest_run_after
    }

    #[getter]
    fn bytes_moved(&self) -> Option<u64> {
        self.bytes_per_block.map(|bytes| bytes.saturating_mul(self.made.plan.len() as u64))
    }

    #[getter]
    fn seconds(&self) -> Option<f64> {
        // Every byte is read once and written once.
        Some(2.0 * self.bytes_moved()? as f64 / self.bandwidth?)
    }

    #[pyo3(signature = (kv_cache = None, backend = None))]
    fn apply(
        &self,
        py: Python<'_>,
        kv_cache: Option<&Bound<'_, PyAny>>,
        backend: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let pool = self.pool.get();
        match (kv_cache, backend) {
            (None, None) => py.detach(|| pool.with(|pool| self.remap(pool)))?,
            (Some(kv_cache), Some(backend)) => self.copy_and_remap(py, kv_cache, backend)?,
            (Some(_), None) => {
                return Err(invalid_argument("backend = None: needed to copy the bytes of kv_cache".into()));
            }
            (None, Some(_)) => return Err(invalid_argument("kv_cache = None: needed by backend to copy bytes".into())),
        }
        Ok(())
    }

    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("objective", self.objective())?;
        dict.set_item("moves", self.num_moves())?;
        dict.set_item("rounds", self.rounds())?;
        dict.set_item("runs_before", self.runs_before())?;
        dict.set_item("runs_after", self.runs_after())?;
        dict.set_item("runs_bound", self.runs_bound())?;
        dict.set_item("empty_pages_before", self.empty_pages_before())?;
        dict.set_item("empty_pages_after", self.empty_pages_after())?;
        dict.set_item("largest_run_before", self.largest_run_before())?;
        dict.set_item("largest_run_after", self.largest_run_after())?;
        dict.set_item("bytes_moved", self.bytes_moved())?;
        dict.set_item("predicted_seconds", self.seconds())?;
        Ok(dict)
    }

    fn __len__(&self) -> usize {
        self.made.plan.len()
    }

    fn __str__(&self) -> String {
        let gain = &self.made.plan.gain;
        let mut cost = format!("{} moves", self.num_moves());
        if let Some(bytes) = self.bytes_moved() {
            cost += &format!(" ({:.1} MiB", bytes as f64 / f64::from(1 << 20));
            if let (Some(seconds), Some(bandwidth)) = (self.seconds(), self.bandwidth) {
                cost += &format!(", ~{:.3} ms at {:.2} TB/s", seconds * 1e3, bandwidth / 1e12);
            }
            cost += ")";
        }
        let (before, after) = self.runs();
        format!(
            "{cost} in {} rounds: {} -> {} empty pages, {before} -> {after} runs, largest free run {} -> {}",
            self.made.plan.rounds.len(),
            gain.empty_pages_before,
            gain.empty_pages_after,
            gain.largest_run_before,
            gain.largest_run_after
        )
    }

    fn __repr__(&self) -> String {
        format!("<CompactionPlan {}: {}>", self.objective(), self.__str__())
    }
}
