//! Looking at a pool: who holds what, what leaks, and whether every invariant holds.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::{BlockPool, NULL};
use crate::error::{Error, Result};
use crate::free::Place;
use crate::ids::{BlockId, Handle};

/// What one owner or tag value holds. Blocks are counted once per holder, shared ones in each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holding {
    /// Sequences.
    pub sequences: usize,
    /// Distinct blocks.
    pub blocks: usize,
    /// Of these, blocks that another holder has too.
    pub shared_blocks: usize,
    /// Tokens there is room for, summed over sequences.
    pub tokens: usize,
    /// Blocks promised and not handed out.
    pub reserved: usize,
}

/// What is held for nobody.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Audit {
    /// Sequences whose owner is not alive: handle, owner, blocks.
    pub zombies: Vec<(Handle, String, usize)>,
    /// Sequences without an owner: nobody can say whether they are alive.
    pub unowned: Vec<Handle>,
    /// Pins past their deadline: handle, owner, blocks, milliseconds overdue.
    pub overdue: Vec<(Handle, Option<String>, usize, u64)>,
    /// Distinct blocks held by zombies alone.
    pub zombie_blocks: usize,
}

impl BlockPool {
    /// Who holds what: by owner for `"owner"`, else by the value of that tag. Sequences without one come under `None`.
    #[must_use]
    pub fn holdings(&self, by: &str) -> BTreeMap<Option<String>, Holding> {
        let mut holders: BTreeMap<Option<&str>, (Holding, BTreeSet<BlockId>)> = BTreeMap::new();
        for (_, sequence) in self.sequences.iter() {
            let key = if by == "owner" {
                sequence.owner.as_deref()
            } else {
                sequence.tags.iter().find(|(key, _)| key == by).map(|(_, value)| value.as_str())
            };
            let (holding, blocks) = holders.entry(key).or_default();
            holding.sequences += 1;
            holding.tokens += sequence.num_tokens;
            holding.reserved += sequence.reserved;
            blocks.extend(&sequence.blocks);
        }
        let mut times: HashMap<BlockId, u32> = HashMap::new();
        for id in holders.values().flat_map(|(_, blocks)| blocks) {
            *times.entry(*id).or_default() += 1;
        }
        let count = |(key, (mut holding, blocks)): (Option<&str>, (Holding, BTreeSet<BlockId>))| {
            holding.blocks = blocks.len();
            holding.shared_blocks = blocks.iter().filter(|id| times[id] > 1).count();
            (key.map(str::to_owned), holding)
        };
        holders.into_iter().map(count).collect()
    }

    /// Sequences whose owner is not in `live`, and pins past their deadline at `now` (milliseconds).
    #[must_use]
    pub fn audit(&self, live: &BTreeSet<String>, now: u64) -> Audit {
        let mut audit = Audit::default();
        let (mut zombie, mut alive): (BTreeSet<BlockId>, BTreeSet<BlockId>) = Default::default();
        for (handle, sequence) in self.sequences.iter() {
            match &sequence.owner {
                Some(owner) if !live.contains(owner) => {
                    audit.zombies.push((handle, owner.clone(), sequence.blocks.len()));
                    zombie.extend(&sequence.blocks);
                }
                Some(_) => alive.extend(&sequence.blocks),
                None => {
                    audit.unowned.push(handle);
                    alive.extend(&sequence.blocks);
                }
            }
        }
        audit.zombie_blocks = zombie.difference(&alive).count();
        for (handle, pin) in self.pins.iter() {
            if let Some(late) = pin.deadline.and_then(|deadline| now.checked_sub(deadline)).filter(|&late| late > 0) {
                audit.overdue.push((handle, pin.owner.clone(), pin.blocks.len(), late));
            }
        }
        audit
    }

    /// Checks every invariant: the conservation law, reference counts against tables, and each structure.
    ///
    /// # Errors
    /// [`Error::Corrupt`] names the first broken one.
    pub fn validate(&self) -> Result<()> {
        self.free.validate()?;
        self.index.validate()?;
        let n = self.config.num_blocks;
        let (mut refs, mut reserved) = (vec![0u32; n], 0);
        for (handle, sequence) in self.sequences.iter() {
            self.validate_sequence(handle)?;
            reserved += sequence.reserved;
            for id in &sequence.blocks {
                refs[id.index()] += 1;
            }
        }
        let mut pins = vec![0u32; n];
        for (_, pin) in self.pins.iter() {
            for id in &pin.blocks {
                pins[id.index()] += 1;
            }
        }
        let wrong = |i: usize, what: &str| Err(Error::corrupt(format!("block {i}: {what}")));
        let (mut pinned_cached, mut active) = (0, 0);
        for i in 0..n {
            let id = BlockId(i as u32);
            if refs[i] != self.refs[i] {
                return wrong(i, &format!("{} tables hold it, its count says {}", refs[i], self.refs[i]));
            }
            if pins[i] != self.pin_counts[i] {
                return wrong(i, &format!("{} pins hold it, its count says {}", pins[i], self.pin_counts[i]));
            }
            if self.config.null_block && id == NULL {
                if refs[i] > 0 || self.free.place_of(id)? != Place::Out {
                    return wrong(i, "the null block is in use or may be handed out");
                }
                continue;
            }
            let (place, committed) = (self.free.place_of(id)?, self.index.contains(id));
            let held = refs[i] > 0 || pins[i] > 0;
            match place {
                Place::Out if !held => return wrong(i, "is handed out and held by nobody (leak)"),
                Place::Clean | Place::Cached | Place::Candidate if held => {
                    return wrong(i, "is held and may be handed out");
                }
                Place::Clean if committed => return wrong(i, "is clean and findable"),
                Place::Cached | Place::Candidate if !committed => return wrong(i, "is cached and not findable"),
                Place::Out if refs[i] == 0 && committed => pinned_cached += 1,
                Place::Out => active += 1,
                _ => {}
            }
        }
        if pinned_cached != self.pinned_cached || self.pinned != pins.iter().filter(|&&count| count > 0).count() {
            return Err(Error::corrupt("counts of pinned blocks are off"));
        }
        if reserved != self.reserved || reserved > self.free.len() {
            return Err(Error::corrupt(format!(
                "{reserved} blocks are promised, the count says {} and {} may be handed out",
                self.reserved,
                self.free.len()
            )));
        }
        if active != self.num_active() {
            return Err(Error::corrupt(format!(
                "conservation law: {} blocks are not {} free + {} cached + {active} active",
                n,
                self.num_free(),
                self.num_cached()
            )));
        }
        Ok(())
    }

    fn validate_sequence(&self, handle: Handle) -> Result<()> {
        let sequence = self.sequences.get(handle.raw())?;
        let block_size = self.config.block_size;
        let wrong = |what: String| Err(Error::corrupt(format!("sequence {handle}: {what}")));
        if sequence.blocks.len() != sequence.num_tokens.div_ceil(block_size) {
            return wrong(format!("{} blocks for {} tokens", sequence.blocks.len(), sequence.num_tokens));
        }
        if sequence.committed > sequence.num_tokens || sequence.committed > sequence.tokens.len() {
            return wrong(format!("{} tokens committed of {}", sequence.committed, sequence.num_tokens));
        }
        if sequence.hashes.len() > sequence.tokens.len() / block_size {
            return wrong("more hashes than full blocks".into());
        }
        let distinct: BTreeSet<&BlockId> = sequence.blocks.iter().collect();
        if distinct.len() != sequence.blocks.len() {
            return wrong("a block is listed twice".into());
        }
        for (block, id) in sequence.blocks.iter().enumerate() {
            let full = (block + 1) * block_size <= sequence.committed;
            let hash = self.index.hash_of(*id);
            if full && hash.is_some_and(|hash| Some(&hash) != sequence.hashes.get(block)) {
                return wrong(format!("block {id} is found by another hash than its content's"));
            }
        }
        Ok(())
    }
}
