//! `Sequence` and `Pin`: handles that outlive what they name without ever naming somebody else's.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

use pyo3::prelude::*;

use super::args;
use crate::ids::BlockId;

/// Handle of one sequence in a pool.
#[pyclass(frozen, name = "Sequence", module = "kvcatch")]
pub(super) struct PySequence {
    pub(super) raw: i64,
    pub(super) hit_tokens: usize,
    pub(super) owner: Option<String>,
}

#[pymethods]
impl PySequence {
    #[getter]
    fn id(&self) -> i64 {
        self.raw
    }

    #[getter]
    fn hit_tokens(&self) -> usize {
        self.hit_tokens
    }

    #[getter]
    fn owner(&self) -> Option<&str> {
        self.owner.as_deref()
    }

    fn __index__(&self) -> i64 {
        self.raw
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.raw.hash(&mut hasher);
        hasher.finish()
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<PySequence>().is_ok_and(|other| other.get().raw == self.raw)
    }

    fn __repr__(&self) -> String {
        let owner = self.owner.as_ref().map_or_else(String::new, |owner| format!(", owner {owner:?}"));
        format!("<Sequence {}: {} tokens hit{owner}>", self.raw, self.hit_tokens)
    }
}

/// Handle of a pin.
#[pyclass(frozen, name = "Pin", module = "kvcatch")]
pub(super) struct PyPin {
    pub(super) raw: i64,
    pub(super) blocks: Vec<BlockId>,
}

#[pymethods]
impl PyPin {
    #[getter]
    fn id(&self) -> i64 {
        self.raw
    }

    #[getter]
    fn blocks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        args::block_array(py, &self.blocks)
    }

    fn __index__(&self) -> i64 {
        self.raw
    }

    fn __repr__(&self) -> String {
        format!("<Pin {}: {} blocks>", self.raw, self.blocks.len())
    }
}
