//! The kernels of the CPU backend that torch cannot do well: paged attention, block copies, writes by slot, e4m3.
//!
//! `layout.rs` says where things lie, `level.rs` which instruction set is used, `threads.rs` who does the work. Numbers
//! are f32 throughout: stored elements are widened as they are read, logits, weights and sums are kept in f32.

pub mod attention;
pub mod blocks;
pub mod convert;
pub mod decode;
pub mod huge;
pub mod layout;
pub mod level;
mod math;
mod matrix;
pub mod prefill;
#[allow(unsafe_code)]
mod simd;
pub mod threads;
pub mod write;
#[allow(unsafe_code)]
#[cfg(target_arch = "x86_64")]
mod x86;
