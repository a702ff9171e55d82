//! Placement: which of the blocks that may be handed out go to whom.
//!
//! A placement owns a set of block ids and hands them out. It knows neither reference counts nor hashes, and it
//! does not choose victims: cached blocks come in as candidates when eviction gives them up (see [`crate::free`]).
//!
//! | name     | rule                                                                                   |
//! |----------|----------------------------------------------------------------------------------------|
//! | `queue`  | last freed first, as vLLM's free queue does with clean blocks                            |
//! | `sorted` | lowest ids first, as SGLang's sorted free list                                          |
//! | `bitmap` | runs: best fit on a multi-level bitmap, room to grow kept behind every sequence         |
//! | `buddy`  | power-of-two orders, the tail trimmed back                                              |

use crate::error::{Error, Result};
use crate::ids::BlockId;

mod bitmap;
mod bits;
mod buddy;
mod queue;
mod runs;
mod sorted;

pub use bitmap::Bitmap;
pub use bits::BitSet;
pub use buddy::Buddy;
pub use queue::Queue;
pub use runs::RunIndex;
pub use sorted::Sorted;

/// What the caller of [`Placement::take`] knows about the blocks it wants.
#[derive(Copy, Clone, Debug, Default)]
pub struct Hint {
    /// The caller's last block: growth continues behind it where it can.
    pub after: Option<BlockId>,
    /// Blocks that may still be handed out once this request is served, clean and cached.
    pub left: usize,
    /// The caller will not grow behind these blocks: no room is kept there.
    pub fixed: bool,
}

/// Which free block is handed out.
///
/// All choices are deterministic. `insert`, `remove` and `take` on ids out of range, twice inserted or not contained
/// are the caller's bug: [`crate::free::FreeBlocks`] checks before it calls.
pub trait Placement: Send + std::fmt::Debug {
    /// The name users choose it by.
    fn name(&self) -> &'static str;

    /// How many blocks can be handed out.
    fn len(&self) -> usize;

    /// Whether nothing can be handed out.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Blocks become available. The first of `ids` is the first to go again where order matters.
    fn insert(&mut self, ids: &[BlockId]);

    /// This very block is taken out.
    fn remove(&mut self, id: BlockId);

    /// Appends exactly `n` blocks to `out`, in table order. The caller has checked `n <= len()`.
    fn take(&mut self, n: usize, hint: Hint, out: &mut Vec<BlockId>);

    /// Longest run of consecutive ids that can be handed out.
    fn largest_run(&self) -> usize;

    /// All ids in the order single blocks would be handed out.
    fn order(&self) -> Vec<BlockId>;

    /// A block that was handed out came back (in whatever state): room kept behind it lapses.
    fn released(&mut self, _ids: &[BlockId]) {}

    /// Blocks that were handed out become available: [`Placement::released`] and [`Placement::insert`] in one pass.
    fn give(&mut self, ids: &[BlockId]) {
        self.released(ids);
        self.insert(ids);
    }

    /// Whether victims of eviction join the other candidates before a choice is made. If not, clean blocks go first
    /// and victims follow in eviction order.
    fn mixes_victims(&self) -> bool {
        true
    }

    /// How many more candidates than `n` the placement would like to choose from when `left` blocks stay in the pool.
    fn slack(&self, _n: usize, _left: usize) -> usize {
        0
    }

    /// Checks every invariant of the structure.
    ///
    /// # Errors
    /// [`Error::Corrupt`] names the first broken one.
    fn validate(&self) -> Result<()>;
}

/// Names of all placements, in the order they are documented.
pub const NAMES: [&str; 4] = ["queue", "sorted", "bitmap", "buddy"];

/// An empty placement over ids `0..num_blocks`.
///
/// # Errors
/// [`Error::InvalidArgument`] for an unknown name.
pub fn by_name(name: &str, num_blocks: usize) -> Result<Box<dyn Placement>> {
    Ok(match name {
        "queue" => Box::new(Queue::new(num_blocks)),
        "sorted" => Box::new(Sorted::new(num_blocks)),
        "bitmap" => Box::new(Bitmap::new(num_blocks)),
        "buddy" => Box::new(Buddy::new(num_blocks)),
        _ => {
            return Err(Error::invalid(
                "placement",
                format_args!("{name:?}"),
                format!("must be one of {}", NAMES.join(", ")),
            ));
        }
    })
}

/// How many of the first `ids` are consecutive upwards. Eight at a time, which the compiler turns into vector code.
fn ascending(ids: &[BlockId]) -> usize {
    let Some(first) = ids.first() else { return 0 };
    let mut len = 1;
    while let Some(eight) = ids.get(len..len + 8) {
        let base = first.0.wrapping_add(len as u32);
        let steps = eight.iter().zip(0u32..).fold(true, |all, (id, step)| all & (id.0 == base.wrapping_add(step)));
        if !steps {
            break;
        }
        len += 8;
    }
    while ids.get(len).is_some_and(|id| id.0 == first.0.wrapping_add(len as u32)) {
        len += 1;
    }
    len
}

/// Calls `f(start, len)` for every maximal stretch of `ids` that is consecutive upwards or downwards.
///
/// `start` is the lowest id of the stretch. A freed sequence comes tail first, so its runs are found as a whole.
pub(crate) fn for_each_stretch(ids: &[BlockId], mut f: impl FnMut(u32, u32)) {
    let mut rest = ids;
    while let Some(first) = rest.first() {
        let mut len = ascending(rest);
        let mut start = first.0;
        if len == 1 {
            while rest.get(len).is_some_and(|id| Some(id.0) == first.0.checked_sub(len as u32)) {
                len += 1;
            }
            start = first.0 - (len as u32 - 1);
        }
        f(start, len as u32);
        rest = &rest[len..];
    }
}

/// Longest stretch of set flags when ids are walked upwards.
pub(crate) fn longest_stretch(contains: impl Fn(u32) -> bool, num_blocks: u32) -> usize {
    let (mut best, mut run) = (0, 0);
    for id in 0..num_blocks {
        run = if contains(id) { run + 1 } else { 0 };
        best = best.max(run);
    }
    best
}
