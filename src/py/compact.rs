//! `CompactionPlan`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::args;
use super::pool::PyBlockPool;
use crate::compact::Objective;
use crate::error::Error;
use crate::pool::CompactionPlan;

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

    fn apply(&self, py: Python<'_>) -> PyResult<()> {
        if self.applied.load(Ordering::Acquire) {
            return Err(Error::StalePlan { reason: "it was applied already".into() }.into());
        }
        let pool = self.pool.get();
        py.detach(|| pool.with(|pool| pool.apply(&self.made)))?;
        self.applied.store(true, Ordering::Release);
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
