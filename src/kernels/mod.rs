//! What the host works out for the kernels before a launch: whether copies may run side by side and in which order they
//! must run otherwise ([`moves`]), and how a decode batch is shared among the processors ([`work`]).

pub mod moves;
pub mod work;

/// The CUDA sources of `cuda/`, `(file name, text)`, as they were when the crate was built.
pub const CUDA_SOURCES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/cuda_sources.rs"));
