//! The extension module `kvcatch._core`: conversions between Python objects and the core, one file per Rust file.

use pyo3::prelude::*;

mod args;
mod compact;
mod cpu;
mod error;
mod free;
mod handles;
mod kernels;
mod pool;
mod prefix;
mod queue;

/// Names of all placements.
#[pyfunction]
fn placements() -> Vec<&'static str> {
    crate::placement::NAMES.to_vec()
}

/// Names of all eviction policies.
#[pyfunction]
fn evictions() -> Vec<&'static str> {
    crate::eviction::NAMES.to_vec()
}

/// The Rust core of kvcatch.
#[pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use super::compact::PyCompactionPlan;
    #[pymodule_export]
    use super::cpu::{
        PyCpuLayout, cpu_advise_huge_pages, cpu_assign_blocks, cpu_attention, cpu_convert_blocks, cpu_copy_blocks,
        cpu_levels, cpu_team, cpu_write_kv,
    };
    #[pymodule_export]
    use super::free::PyFreeBlocks;
    #[pymodule_export]
    use super::handles::{PyPin, PySequence};
    #[pymodule_export]
    use super::kernels::{check_block_ids, check_moves, cuda_sources, decode_work, order_moves};
    #[pymodule_export]
    use super::pool::PyBlockPool;
    #[pymodule_export]
    use super::prefix::{PyMissReport, PyPrefix};
    #[pymodule_export]
    use super::queue::PyBlockQueue;
    #[pymodule_export]
    use super::{evictions, placements};
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        super::cpu::init();
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("build_profile", if cfg!(debug_assertions) { "debug" } else { "release" })
    }
}
