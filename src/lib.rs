//! kvcatch: paged KV-cache blocks for LLM serving.
//!
//! [`pool::BlockPool`] is the one object to make. Beneath it [`free::FreeBlocks`] joins a [`placement`] (which block is
//! handed out) and an [`eviction`] (which cached block is given up) and stands alone; [`table`] holds the sequences,
//! [`prefix`] finds committed blocks by hash, [`compact`] plans block moves, [`stats`] looks at it all.
//!
//! The crate knows no Python; the feature `python` adds the extension module, conversions only.
#![deny(unsafe_code)]

pub mod compact;
pub mod cpu;
pub mod error;
pub mod eviction;
pub mod free;
pub mod ids;
pub mod kernels;
mod links;
pub mod placement;
pub mod pool;
pub mod prefix;
pub mod stats;
pub mod table;

#[cfg(feature = "python")]
mod py;
