//! `BlockPool` against a slow, obvious model.
//!
//! The model knows sequences as lists of tokens, which block is findable under which prefix, and what stands in every
//! slot of the KV memory: garbage from the moment a slot may be written, the KV of its token once that is committed,
//! copied as copy-on-write pairs and the rounds of compaction plans say. It predicts the outcome of every call, error
//! and numbers included, and after every call
//!
//! * `validate()` holds, and counts, tables, places and index entries are those of the model (conservation law);
//! * every committed token of every sequence, every findable block and every pinned block reads back its own KV;
//! * a call that was refused has changed nothing.
//!
//! Which free block is handed out is left to the placement (see `tests/placement.rs`), but where one run is required
//! or the placement is simple the model predicts that too.
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, clippy::print_stdout, missing_docs)]

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvcatch::compact::{Cell, Objective};
use kvcatch::error::{Error, Shortage};
use kvcatch::free::Place;
use kvcatch::ids::BlockId;
use kvcatch::pool::{Admission, BlockPool, CompactionPlan, Config, Counters};
use kvcatch::prefix::{HashKind, Prefix};
use proptest::prelude::*;
use proptest::test_runner::{TestError, TestRunner};

/// What is written nowhere on purpose.
const GARBAGE: u64 = 0xdead_beef;
const SALTS: [&[u8]; 2] = [b"", b"tenant"];

// ------------------------------------------------------------------------------------------------ operations

#[derive(Clone, Debug)]
struct Prompt {
    stem: u8,
    shared: u8,
    tail: Vec<u8>,
    other_salt: bool,
}

/// Handles are drawn from the live ones, and now and then from all ever given out or from numbers never given out.
#[derive(Clone, Copy, Debug)]
struct Pick(u8);

#[derive(Clone, Debug)]
enum Op {
    Create {
        prompt: Prompt,
        room: Option<u8>,
        reserve: u8,
        ignore_cache: bool,
        commit: bool,
    },
    Append {
        batch: Vec<(Pick, u8)>,
    },
    CommitKnown {
        batch: Vec<(Pick, Option<u8>)>,
        deduplicate: bool,
    },
    CommitTokens {
        batch: Vec<(Pick, Vec<u8>)>,
        deduplicate: bool,
        one_short: bool,
    },
    /// What an engine does: commit what is known, then one token for each.
    Decode {
        tokens: Vec<u8>,
        deduplicate: bool,
    },
    Fork {
        seq: Pick,
    },
    Truncate {
        seq: Pick,
        num_tokens: u8,
    },
    Reserve {
        seq: Pick,
        num_tokens: u8,
    },
    Free {
        batch: Vec<Pick>,
    },
    PinBlocks {
        blocks: Vec<u8>,
    },
    PinSequence {
        seq: Pick,
    },
    Unpin {
        pin: Pick,
    },
    Lookup {
        prompt: Prompt,
    },
    Retain {
        prompt: Prompt,
        priority: u8,
        ttl: Option<u8>,
    },
    Clock {
        forward: u8,
    },
    Evict {
        n: u8,
    },
    Reset,
    Plan {
        objective: u8,
        blocks: u8,
        max_moves: Option<u8>,
        some: Option<Pick>,
    },
    Apply {
        plan: u8,
    },
}

fn pick() -> impl Strategy<Value = Pick> {
    any::<u8>().prop_map(Pick)
}

fn prompt() -> impl Strategy<Value = Prompt> {
    let tail = prop::collection::vec(0..2u8, 0..4);
    (0..2u8, 0..24u8, tail, prop::bool::weighted(0.1)).prop_map(|(stem, shared, tail, other_salt)| Prompt {
        stem,
        shared,
        tail,
        other_salt,
    })
}

fn op() -> impl Strategy<Value = Op> {
    let some = || prop::bool::weighted(0.8);
    let count = || prop_oneof![2 => Just(1u8), 3 => 0..9u8, 1 => 0..40u8];
    let tokens = || prop::collection::vec(0..2u8, 0..6);
    prop_oneof![
        8 => (prompt(), prop::option::weighted(0.3, 0..26u8), prop_oneof![3 => Just(0u8), 1 => 1..30u8],
              prop::bool::weighted(0.1), some())
            .prop_map(|(prompt, room, reserve, ignore_cache, commit)| {
                // Committing at once needs room for the whole prompt: try that mostly where it can be.
                let commit = commit && (room.is_none() || reserve % 4 == 1);
                Op::Create { prompt, room, reserve, ignore_cache, commit }
            }),
        5 => prop::collection::vec((pick(), count()), 1..4).prop_map(|batch| Op::Append { batch }),
        3 => (prop::collection::vec((pick(), prop::option::weighted(0.4, 0..8u8)), 1..4), any::<bool>())
            .prop_map(|(batch, deduplicate)| Op::CommitKnown { batch, deduplicate }),
        4 => (prop::collection::vec((pick(), tokens()), 1..4), any::<bool>(), prop::bool::weighted(0.05))
            .prop_map(|(batch, deduplicate, one_short)| Op::CommitTokens { batch, deduplicate, one_short }),
        5 => (tokens(), any::<bool>()).prop_map(|(tokens, deduplicate)| Op::Decode { tokens, deduplicate }),
        3 => pick().prop_map(|seq| Op::Fork { seq }),
        3 => (pick(), 0..30u8).prop_map(|(seq, num_tokens)| Op::Truncate { seq, num_tokens }),
        2 => (pick(), 0..40u8).prop_map(|(seq, num_tokens)| Op::Reserve { seq, num_tokens }),
        4 => prop::collection::vec(pick(), 1..4).prop_map(|batch| Op::Free { batch }),
        1 => prop::collection::vec(0..42u8, 0..4).prop_map(|blocks| Op::PinBlocks { blocks }),
        1 => pick().prop_map(|seq| Op::PinSequence { seq }),
        3 => pick().prop_map(|pin| Op::Unpin { pin }),
        2 => prompt().prop_map(|prompt| Op::Lookup { prompt }),
        1 => (prompt(), 0..103u8, prop::option::of(0..20u8))
            .prop_map(|(prompt, priority, ttl)| Op::Retain { prompt, priority, ttl }),
        1 => (0..10u8).prop_map(|forward| Op::Clock { forward }),
        1 => (0..8u8).prop_map(|n| Op::Evict { n }),
        1 => Just(Op::Reset),
        3 => (0..3u8, 0..20u8, prop::option::of(0..8u8), prop::option::weighted(0.2, pick()))
            .prop_map(|(objective, blocks, max_moves, some)| Op::Plan { objective, blocks, max_moves, some }),
        3 => any::<u8>().prop_map(|plan| Op::Apply { plan }),
    ]
}

#[derive(Clone, Debug)]
struct Setup {
    num_blocks: usize,
    block_size: usize,
    eviction: &'static str,
    contiguous: bool,
    null_block: bool,
    blocks_per_page: usize,
    seed: u64,
}

fn setup() -> impl Strategy<Value = Setup> {
    (
        prop_oneof![12 => 4..=40usize, 1 => Just(64usize)],
        1..=5usize,
        prop_oneof![Just("lru"), Just("slru")],
        prop::bool::weighted(0.35),
        any::<bool>(),
        1..9usize,
        any::<u64>(),
    )
        .prop_map(|(num_blocks, block_size, eviction, contiguous, null_block, blocks_per_page, seed)| Setup {
            num_blocks,
            block_size,
            eviction,
            contiguous,
            null_block,
            blocks_per_page,
            seed,
        })
}

// ------------------------------------------------------------------------------------------------ the model

#[derive(Clone, Debug)]
struct Seq {
    salt: usize,
    tokens: Vec<u32>,
    num_tokens: usize,
    committed: usize,
    reserved: usize,
    hit_tokens: usize,
    table: Vec<usize>,
    /// The last block may be shared or findable: forked, cut or replaced since it was last looked at.
    unsure: bool,
    /// All of the run promised under strict contiguity was there to be promised.
    secured: bool,
}

#[derive(Clone, Debug)]
struct MadePlan {
    plan: CompactionPlan,
    /// Changes of every block it names, when it was made.
    changes: Vec<(usize, u64)>,
    /// Longest run of clean blocks it predicts, valid as long as no other call came between.
    fresh: bool,
}

/// A block may be given up, or cannot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Null,
    Clean,
    Cached,
    PinnedCached,
    Active,
}

/// Slots of a block and what is in them.
type Readable = Vec<(usize, u64)>;

struct Model {
    setup: Setup,
    seqs: BTreeMap<i64, Seq>,
    pins: BTreeMap<i64, Vec<usize>>,
    /// What a pinned block held for those who could find or own it, per pin and block.
    pinned_content: BTreeMap<i64, Vec<(usize, Readable)>>,
    /// Prefix under which a block is findable: salt and all tokens up to its end.
    index: Vec<Option<(usize, Vec<u32>)>>,
    kv: Vec<u64>,
    /// How often a block was handed out, became clean or was moved.
    changes: Vec<u64>,
    counters: Counters,
}

fn kv_of(salt: usize, tokens: &[u32]) -> impl Iterator<Item = u64> {
    tokens.iter().scan(salt as u64 + 1, |hash, &token| {
        *hash = (*hash ^ u64::from(token + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        Some(*hash)
    })
}

impl Model {
    fn new(setup: &Setup) -> Self {
        let n = setup.num_blocks;
        Self {
            setup: setup.clone(),
            seqs: BTreeMap::new(),
            pins: BTreeMap::new(),
            pinned_content: BTreeMap::new(),
            index: vec![None; n],
            kv: vec![GARBAGE; n * setup.block_size],
            changes: vec![0; n],
            counters: Counters::default(),
        }
    }

    fn size(&self) -> usize {
        self.setup.block_size
    }

    fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.size())
    }

    fn refs(&self, block: usize) -> usize {
        self.seqs.values().filter(|seq| seq.table.contains(&block)).count()
    }

    fn pin_count(&self, block: usize) -> usize {
        self.pins.values().filter(|blocks| blocks.contains(&block)).count()
    }

    fn states(&self) -> Vec<State> {
        let mut held = vec![false; self.index.len()];
        let mut pinned = held.clone();
        self.seqs.values().flat_map(|seq| &seq.table).for_each(|&b| held[b] = true);
        self.pins.values().flatten().for_each(|&b| pinned[b] = true);
        (0..self.index.len())
            .map(|b| match (self.index[b].is_some(), held[b], pinned[b]) {
                _ if b == 0 && self.setup.null_block => State::Null,
                (_, true, _) | (false, _, true) => State::Active,
                (true, _, true) => State::PinnedCached,
                (true, ..) => State::Cached,
                _ => State::Clean,
            })
            .collect()
    }

    fn count(&self, state: State) -> usize {
        self.states().into_iter().filter(|&is| is == state).count()
    }

    fn reserved(&self) -> usize {
        self.seqs.values().map(|seq| seq.reserved).sum()
    }

    fn available(&self) -> usize {
        self.count(State::Clean) + self.count(State::Cached) - self.reserved()
    }

    fn longest(&self, counts: &[State]) -> usize {
        let (mut best, mut run) = (0, 0);
        for state in self.states() {
            run = if counts.contains(&state) { run + 1 } else { 0 };
            best = best.max(run);
        }
        best
    }

    fn shortage(&self, required: usize) -> Shortage {
        Shortage {
            required,
            free: self.count(State::Clean),
            cached: self.count(State::Cached),
            reserved: self.reserved(),
            largest_run: self.longest(&[State::Clean, State::Cached]),
        }
    }

    /// Full blocks of the longest findable prefix.
    fn hits(&self, salt: usize, tokens: &[u32]) -> usize {
        let full = tokens.len() / self.size();
        (0..full).take_while(|&k| self.findable(salt, &tokens[..(k + 1) * self.size()]).next().is_some()).count()
    }

    fn findable<'a>(&'a self, salt: usize, prefix: &'a [u32]) -> impl Iterator<Item = usize> + 'a {
        let same =
            move |entry: &Option<(usize, Vec<u32>)>| entry.as_ref().is_some_and(|(s, t)| *s == salt && t == prefix);
        (0..self.index.len()).filter(move |&b| same(&self.index[b]))
    }

    /// The place where `n` blocks must go when they have to form one run.
    fn best_run(&self, n: usize, after: Option<usize>, kept: &BTreeSet<usize>) -> Option<usize> {
        let states = self.states();
        let usable =
            |b: usize| b < states.len() && matches!(states[b], State::Clean | State::Cached) && !kept.contains(&b);
        let fits = |start: usize| (start..start + n).all(usable);
        if let Some(after) = after {
            return Some(after + 1).filter(|&start| fits(start));
        }
        let cost = |start: usize| {
            let lost = (start..start + n).filter(|&b| states[b] == State::Cached).count();
            let low = (0..start).rev().take_while(|&b| usable(b)).count();
            let high = (start..states.len()).take_while(|&b| usable(b)).count();
            (lost, low + high, start)
        };
        (0..states.len()).filter(|&start| fits(start)).min_by_key(|&start| cost(start))
    }

    /// Runs promised to sequences.
    fn promised_runs(&self) -> BTreeSet<usize> {
        let promised = |seq: &Seq| seq.table.last().map_or(0..0, |last| last + 1..last + 1 + seq.reserved);
        self.seqs.values().flat_map(promised).collect()
    }

    /// `blocks` were handed out by one call: they may be written from now on, what they held is lost.
    fn hand_out(&mut self, blocks: &[usize]) {
        for &b in blocks {
            self.counters.blocks_evicted += u64::from(self.index[b].take().is_some());
            self.changes[b] += 1;
            let size = self.size();
            self.kv[b * size..(b + 1) * size].fill(GARBAGE);
        }
        self.counters.blocks_allocated += blocks.len() as u64;
    }

    /// Under strict contiguity the run promised to a sequence is emptied, so that no hit or pin takes a block out of it.
    fn clear_promise(&mut self, raw: i64) {
        let seq = &self.seqs[&raw];
        let (true, Some(&last)) = (self.setup.contiguous, seq.table.last()) else { return };
        let states = self.states();
        for b in (last + 1..=last + seq.reserved).filter(|&b| states.get(b) == Some(&State::Cached)) {
            self.index[b] = None;
            self.changes[b] += 1;
        }
        let secured = self.is_promise_kept(raw);
        self.seqs.get_mut(&raw).unwrap().secured = secured;
    }

    /// Whether the run promised to a sequence can be handed out, and holds nothing that could be hit.
    fn is_promise_kept(&self, raw: i64) -> bool {
        let (seq, states) = (&self.seqs[&raw], self.states());
        let last = seq.table.last().copied().unwrap_or_default();
        seq.table.is_empty() || (last + 1..=last + seq.reserved).all(|b| states.get(b) == Some(&State::Clean))
    }

    /// Blocks that nobody holds any more, and that nobody can find, have changed.
    fn let_go(&mut self, blocks: &[usize]) {
        for &b in blocks {
            if self.refs(b) == 0 && self.pin_count(b) == 0 && self.index[b].is_none() {
                self.changes[b] += 1;
            }
        }
    }

    fn write(&mut self, raw: i64, from: usize, to: usize) {
        let size = self.size();
        let seq = &self.seqs[&raw];
        let kv: Vec<u64> = kv_of(seq.salt, &seq.tokens).take(to).skip(from).collect();
        for (at, kv) in (from..to).zip(kv) {
            self.kv[seq.table[at / size] * size + at % size] = kv;
        }
    }

    /// Slots of tokens `from..to` may be written at any time from now on.
    fn expose(&mut self, raw: i64, from: usize, to: usize) {
        let size = self.size();
        for at in from..to {
            self.kv[self.seqs[&raw].table[at / size] * size + at % size] = GARBAGE;
        }
    }

    /// What a transfer may read of a block: the slots that hold KV for somebody, and what is in them.
    fn readable(&self, block: usize) -> Readable {
        let size = self.size();
        let committed = |seq: &Seq| {
            let k = seq.table.iter().position(|&b| b == block)?;
            Some(seq.committed.saturating_sub(k * size).min(size))
        };
        let most = self.seqs.values().filter_map(committed).max().unwrap_or(0);
        let slots = if self.index[block].is_some() { size } else { most };
        (block * size..block * size + slots).map(|slot| (slot, self.kv[slot])).collect()
    }

    fn copy(&mut self, pairs: &[(usize, usize)]) {
        let size = self.size();
        for (i, &(_, dst)) in pairs.iter().enumerate() {
            assert!(pairs.iter().all(|pair| pair.0 != dst), "a destination is a source of the same launch: {pairs:?}");
            assert!(pairs[..i].iter().all(|pair| pair.1 != dst), "two copies go to one block: {pairs:?}");
        }
        for &(src, dst) in pairs {
            self.kv.copy_within(src * size..(src + 1) * size, dst * size);
        }
    }

    /// The first `known` tokens of the sequence are written. Returns the blocks that became findable by that.
    fn commit(&mut self, raw: i64, known: usize) -> Vec<usize> {
        let size = self.size();
        let before = self.seqs[&raw].committed;
        self.write(raw, before, known);
        let seq = self.seqs.get_mut(&raw).unwrap();
        seq.committed = known;
        let seq = seq.clone();
        let mut new = Vec::new();
        for k in before / size..known / size {
            let block = seq.table[k];
            if self.index[block].is_none() {
                self.index[block] = Some((seq.salt, seq.tokens[..(k + 1) * size].to_vec()));
                self.counters.blocks_committed += 1;
                new.push(block);
            }
        }
        new
    }
}

// ------------------------------------------------------------------------------------------------ the machine

struct Machine {
    pool: BlockPool,
    model: Model,
    ever: Vec<i64>,
    ever_pins: Vec<i64>,
    plans: Vec<MadePlan>,
    refused: u64,
    /// Something was given a priority: it is not evicted in its turn.
    retained: bool,
}

fn ids(blocks: &[BlockId]) -> Vec<usize> {
    blocks.iter().map(|id| id.index()).collect()
}

/// A refusal without its words.
#[derive(Debug, PartialEq, Eq)]
enum Refusal {
    OutOfBlocks(Shortage),
    Invalid(&'static str),
    Stale(i64),
    StalePlan,
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        match error {
            Error::OutOfBlocks { shortage, .. } => Self::OutOfBlocks(shortage),
            Error::InvalidArgument { name, .. } => Self::Invalid(name),
            Error::StaleHandle { handle, .. } => Self::Stale(handle),
            Error::StalePlan { .. } => Self::StalePlan,
            error @ (Error::DoubleFree { .. } | Error::Corrupt(_)) => panic!("never from a pool: {error}"),
        }
    }
}

type Outcome = Result<(), Refusal>;

/// Drops every `name: VALUE` (a number) from a debug text.
fn without(text: &str, name: &str) -> String {
    let mut parts = text.split(name);
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        out.push_str(part.trim_start_matches(|c: char| c.is_ascii_digit()));
    }
    out
}

impl Machine {
    fn new(setup: &Setup, placement: &str) -> Self {
        let pool = BlockPool::new(Config {
            num_blocks: setup.num_blocks,
            block_size: setup.block_size,
            placement: placement.into(),
            eviction: setup.eviction.into(),
            contiguous: setup.contiguous,
            blocks_per_page: setup.blocks_per_page,
            null_block: setup.null_block,
            hash: HashKind::Xxh3,
            seed: setup.seed,
        })
        .unwrap();
        let model = Model::new(setup);
        Self { pool, model, ever: Vec::new(), ever_pins: Vec::new(), plans: Vec::new(), refused: 0, retained: false }
    }

    /// Everything a refused call must leave as it was: all but the number of refusals and scratch space.
    fn dump(&self) -> String {
        let mut out = format!("{:?}{:?}", self.pool.free_blocks(), self.pool.index());
        for (handle, sequence) in self.pool.sequences().iter() {
            out += &without(&format!("{handle} {sequence:?}"), "mark: ");
        }
        for (handle, pin) in self.pool.pins().iter() {
            out += &format!("{handle} {pin:?}");
        }
        let counters = Counters { refused: 0, ..self.pool.counters() };
        out + &format!("{counters:?}{}{}", self.pool.num_pinned(), self.pool.num_reserved())
    }

    fn handle(live: &[i64], ever: &[i64], Pick(at): Pick) -> i64 {
        let at = usize::from(at);
        match at {
            // Never given out: negative, and a slot and a generation that are far off.
            255 => -1,
            254 => 12_345 << 32 | 77,
            _ if at >= 230 && !ever.is_empty() => ever[at % ever.len()],
            _ if !live.is_empty() => live[at % live.len()],
            _ => ever.last().copied().unwrap_or(3),
        }
    }

    fn seq(&self, at: Pick) -> i64 {
        let live: Vec<i64> = self.model.seqs.keys().copied().collect();
        Self::handle(&live, &self.ever, at)
    }

    fn pin(&self, at: Pick) -> i64 {
        let live: Vec<i64> = self.model.pins.keys().copied().collect();
        Self::handle(&live, &self.ever_pins, at)
    }

    fn prompt(&self, prompt: &Prompt) -> (usize, Vec<u32>, Prefix) {
        let mut tokens = vec![u32::from(prompt.stem); usize::from(prompt.shared)];
        tokens.extend(prompt.tail.iter().map(|&t| u32::from(t)));
        let salt = usize::from(prompt.other_salt);
        let prefix = Prefix::new(tokens.clone(), self.model.size(), HashKind::Xxh3, SALTS[salt]).unwrap();
        (salt, tokens, prefix)
    }

    /// First error of a batch of handles: stale, or given twice; `check` sees each good one.
    fn batch(&self, raws: &[i64], mut check: impl FnMut(usize, &Seq) -> Outcome) -> Outcome {
        for (i, raw) in raws.iter().enumerate() {
            let seq = self.model.seqs.get(raw).ok_or(Refusal::Stale(*raw))?;
            if raws[..i].contains(raw) {
                return Err(Refusal::Invalid("sequences"));
            }
            check(i, seq)?;
        }
        Ok(())
    }

    /// The call must end as `predicted`.
    fn agree<T>(&mut self, predicted: Outcome, got: Result<T, Error>) -> Result<T, Refusal> {
        let got = got.map_err(Refusal::from);
        self.refused += u64::from(matches!(predicted, Err(Refusal::OutOfBlocks(_))));
        match (predicted, got) {
            (Ok(()), Ok(value)) => Ok(value),
            (Err(predicted), Err(got)) => {
                assert_eq!(got, predicted, "refused for another reason");
                Err(got)
            }
            (Ok(()), Err(got)) => panic!("refused, but it can be served: {got:?}"),
            (Err(predicted), Ok(_)) => panic!("served, but must be refused: {predicted:?}"),
        }
    }

    /// Checks that blocks handed out by one call were free or cached, and that no more was evicted than needed.
    fn check_handed_out(&self, blocks: &[usize], before: &[State]) {
        let distinct: BTreeSet<usize> = blocks.iter().copied().collect();
        assert_eq!(distinct.len(), blocks.len(), "a block is handed out twice: {blocks:?}");
        for &b in blocks {
            assert!(
                matches!(before[b], State::Clean | State::Cached),
                "block {b} is handed out, it was {:?}",
                before[b]
            );
        }
        let evicted = blocks.iter().filter(|&&b| before[b] == State::Cached).count();
        let clean = before.iter().filter(|&&state| state == State::Clean).count();
        if !self.model.setup.contiguous && self.pool.config().placement != "bitmap" {
            assert_eq!(evicted, blocks.len().saturating_sub(clean), "evicted without need");
        }
    }

    fn create(&mut self, prompt: &Prompt, admission: Admission) -> Outcome {
        let (salt, tokens, prefix) = self.prompt(prompt);
        let (model, size, len) = (&self.model, self.model.size(), tokens.len());
        let room = admission.num_tokens.unwrap_or(len);
        let hits = if admission.ignore_cache || len == 0 { 0 } else { model.hits(salt, &tokens).min((len - 1) / size) };
        // Which of several equal blocks is found is the index's choice, and matters to what the call needs.
        let found: Vec<usize> = (0..hits)
            .map(|k| {
                let block = self.pool.index().find(prefix.hashes()[k], &tokens[k * size..(k + 1) * size]);
                let block = block.expect("the model says it is findable").index();
                assert!(model.findable(salt, &tokens[..(k + 1) * size]).any(|b| b == block), "wrong block found");
                block
            })
            .collect();
        let num_tokens = room.max(hits * size);
        let fresh = model.blocks_for(num_tokens) - hits;
        let mut states = model.states();
        let evictable = found.iter().filter(|&&b| states[b] == State::Cached).count();
        let reserve = admission.reserve_tokens;
        let whole = model.blocks_for(len + reserve);
        let promised = if reserve > 0 { whole.saturating_sub(model.blocks_for(num_tokens)) } else { 0 };
        let required = fresh + promised + evictable;
        let mut start = None;
        let predicted = if len == 0 {
            Err(Refusal::Invalid("tokens"))
        } else if room == 0 || room > len || (admission.commit && room < len) {
            Err(Refusal::Invalid("num_tokens"))
        } else if required > model.available() {
            Err(Refusal::OutOfBlocks(model.shortage(required)))
        } else if model.setup.contiguous && fresh + promised > 0 {
            let kept = model.promised_runs().union(&found.iter().copied().collect()).copied().collect();
            let after = found.last().copied().filter(|_| fresh == 0);
            start = model.best_run(fresh + promised, after, &kept);
            if start.is_some() { Ok(()) } else { Err(Refusal::OutOfBlocks(model.shortage(required))) }
        } else {
            Ok(())
        };
        let commit = admission.commit;
        let created = self.pool.create(prefix, admission);
        let raw = self.agree(predicted, created)?.raw();
        assert!(!self.model.seqs.contains_key(&raw) && !self.ever.contains(&raw), "handle {raw} is not new");
        let table = ids(&self.pool.sequences().get(raw).unwrap().blocks);
        assert_eq!(table[..hits], found[..], "other blocks than the ones hit");
        for &b in &found {
            // A hit is no candidate for its own sequence.
            states[b] = State::Active;
        }
        self.check_handed_out(&table[hits..], &states);
        if let Some(start) = start {
            assert!(table[hits..].iter().copied().eq(start..start + fresh), "not the best run: {table:?}");
        }
        self.model.hand_out(&table[hits..]);
        let counters = &mut self.model.counters;
        counters.created += 1;
        counters.prompt_tokens += len as u64;
        counters.hit_tokens += (hits * size) as u64;
        let (committed, hit_tokens) = (hits * size, hits * size);
        let seq = Seq {
            salt,
            tokens,
            num_tokens,
            committed,
            reserved: promised,
            hit_tokens,
            table,
            unsure: false,
            secured: false,
        };
        self.model.seqs.insert(raw, seq);
        self.model.clear_promise(raw);
        if commit {
            self.model.commit(raw, len);
        }
        self.ever.push(raw);
        Ok(())
    }

    /// What `append` needs per sequence: blocks, copy.
    fn needs(&self, raws: &[i64], counts: &[usize]) -> Result<Vec<(usize, bool)>, Refusal> {
        let (model, size) = (&self.model, self.model.size());
        let (mut needs, mut leaving) = (Vec::new(), Vec::new());
        self.batch(raws, |i, seq| {
            let blocks = model.blocks_for(seq.num_tokens + counts[i]) - seq.table.len();
            let mut copy = false;
            if counts[i] > 0 && !seq.num_tokens.is_multiple_of(size) {
                let last = *seq.table.last().unwrap();
                let gone = leaving.iter().filter(|&&b| b == last).count();
                // A pinned block must not change under its reader.
                copy = model.refs(last) - gone > 1 || (seq.unsure && model.pin_count(last) > 0);
                if copy {
                    leaving.push(last);
                }
            }
            needs.push((blocks, copy));
            Ok(())
        })?;
        Ok(needs)
    }

    /// Where each need goes under strict contiguity.
    fn runs(&self, raws: &[i64], needs: &[(usize, bool)]) -> Option<Vec<usize>> {
        let mut kept = self.model.promised_runs();
        let mut starts = Vec::new();
        for (raw, &(blocks, copy)) in raws.iter().zip(needs) {
            let n = blocks + usize::from(copy);
            let seq = &self.model.seqs[raw];
            let after = seq.table.last().copied().filter(|_| !copy);
            if n == 0 {
                starts.push(0);
                continue;
            }
            if let Some(last) = seq.table.last() {
                kept.retain(|b| !(last + 1..=last + seq.reserved).contains(b));
            }
            // What is still promised stays promised, behind the new last block; a new run needs a place for both.
            let promised = seq.reserved - seq.reserved.min(blocks);
            let start = self.model.best_run(n + if after.is_none() { promised } else { 0 }, after, &kept)?;
            kept.extend(start..start + n + promised);
            starts.push(start);
        }
        Some(starts)
    }

    fn append(&mut self, raws: &[i64], counts: &[usize]) -> Outcome {
        let needs = self.needs(raws, counts);
        let mut starts = None;
        let predicted = match &needs {
            Err(_) => Ok(()),
            Ok(needs) => {
                let fresh: Vec<usize> = needs.iter().map(|&(blocks, copy)| blocks + usize::from(copy)).collect();
                // A copy is nobody's growth: a promise is for new tokens.
                let promised = |(raw, need): (&i64, &(usize, bool))| self.model.seqs[raw].reserved.min(need.0);
                let (required, own) =
                    (fresh.iter().sum::<usize>(), raws.iter().zip(needs).map(promised).sum::<usize>());
                if required - own > self.model.available() {
                    Err(Refusal::OutOfBlocks(self.model.shortage(required - own)))
                } else if self.model.setup.contiguous {
                    starts = self.runs(raws, needs);
                    if starts.is_some() { Ok(()) } else { Err(Refusal::OutOfBlocks(self.model.shortage(required))) }
                } else {
                    Ok(())
                }
            }
        };
        let (needs, predicted) = match needs {
            Ok(needs) => (needs, predicted),
            Err(refusal) => (Vec::new(), Err(refusal)),
        };
        let states = self.model.states();
        let appended = self.pool.append(raws, |i| counts[i]);
        let copies = self.agree(predicted, appended)?;
        let (mut pairs, mut handed_out) = (Vec::new(), Vec::new());
        for (i, (&raw, &(blocks, copy))) in raws.iter().zip(&needs).enumerate() {
            let fresh = blocks + usize::from(copy);
            let table = ids(&self.pool.sequences().get(raw).unwrap().blocks);
            let seq = self.model.seqs.get_mut(&raw).unwrap();
            let partial = counts[i] > 0 && !seq.num_tokens.is_multiple_of(self.model.setup.block_size);
            let keep = seq.table.len() - usize::from(copy);
            assert_eq!(table[..keep], seq.table[..keep], "growth changed the table before its end");
            let new = table[keep..].to_vec();
            assert_eq!(new.len(), fresh);
            if let Some(starts) = starts.as_ref().filter(|_| fresh > 0) {
                assert!(new.iter().copied().eq(starts[i]..starts[i] + fresh), "not the best run: {new:?}");
            }
            let last = seq.table.last().copied();
            seq.reserved -= seq.reserved.min(blocks);
            seq.table = table;
            if fresh > 0 || (partial && seq.unsure) {
                seq.unsure = false;
            }
            if let (Some(last), true) = (last, copy) {
                pairs.push((last, new[0]));
                self.model.counters.copies_on_write += 1;
            } else if let (Some(last), true) = (last, partial) {
                // Alone in it and about to write: nobody may find what it held.
                self.model.index[last] = None;
            }
            handed_out.extend(new);
        }
        let got: Vec<_> = copies.iter().map(|(src, dst)| (src.index(), dst.index())).collect();
        assert_eq!(got, pairs, "other copies than needed");
        self.check_handed_out(&handed_out, &states);
        self.model.hand_out(&handed_out);
        let left: Vec<usize> = pairs.iter().map(|pair| pair.0).collect();
        self.model.let_go(&left);
        self.model.copy(&pairs);
        for (&raw, _) in raws.iter().zip(&needs).filter(|(_, need)| need.0 > 0 || need.1) {
            self.model.clear_promise(raw);
        }
        for (&raw, &count) in raws.iter().zip(counts) {
            let seq = self.model.seqs.get_mut(&raw).unwrap();
            let before = seq.num_tokens;
            seq.num_tokens += count;
            self.model.expose(raw, before, before + count);
        }
        Ok(())
    }

    /// After the pool committed: each sequence of the batch now has `known` written.
    fn committed(&mut self, raws: &[i64], known: &[usize], deduplicate: bool, replaced: usize) {
        let size = self.model.size();
        // A block from elsewhere would split a sequence that must lie in one run.
        let deduplicate = deduplicate && !self.model.setup.contiguous;
        let mut times = 0;
        for (&raw, &known) in raws.iter().zip(known) {
            let first = self.model.seqs[&raw].committed / size;
            let new = self.model.commit(raw, known);
            let table = ids(&self.pool.sequences().get(raw).unwrap().blocks);
            let before = times;
            for (k, &twin) in table.iter().enumerate().take(known / size).skip(first) {
                let seq = &self.model.seqs[&raw];
                let own = seq.table[k];
                let prefix = seq.tokens[..(k + 1) * size].to_vec();
                let equal = self.model.findable(seq.salt, &prefix).any(|b| b != own);
                let private = self.model.refs(own) == 1 && self.model.pin_count(own) == 0;
                if own == twin {
                    let missed = deduplicate && equal && private && new.contains(&own);
                    assert!(!missed, "block {own} equals another and was not replaced");
                    continue;
                }
                assert!(deduplicate && private, "block {own} was replaced by {twin}");
                assert!(self.model.findable(seq.salt, &prefix).any(|b| b == twin), "{twin} does not equal {own}");
                self.model.index[own] = None;
                self.model.seqs.get_mut(&raw).unwrap().table[k] = twin;
                self.model.let_go(&[own]);
                times += 1;
            }
            if times > before {
                self.model.seqs.get_mut(&raw).unwrap().unsure = true;
            }
        }
        assert_eq!(replaced, times, "number of blocks replaced");
        self.model.counters.blocks_deduplicated += times as u64;
    }

    fn commit_known(&mut self, raws: &[i64], counts: &[Option<usize>], deduplicate: bool) -> Outcome {
        let mut known = Vec::new();
        let predicted = self.batch(raws, |i, seq| {
            let most = seq.tokens.len().min(seq.num_tokens);
            if counts[i].is_some_and(|count| count > most - seq.committed) {
                return Err(Refusal::Invalid("counts"));
            }
            known.push(counts[i].map_or(most, |count| seq.committed + count));
            Ok(())
        });
        let committed = self.pool.commit(raws, None, |i| counts[i], deduplicate);
        let replaced = self.agree(predicted, committed)?;
        self.committed(raws, &known, deduplicate, replaced);
        Ok(())
    }

    fn commit_tokens(&mut self, raws: &[i64], tokens: &[Vec<u32>], deduplicate: bool, one_short: bool) -> Outcome {
        let mut known = Vec::new();
        let mut predicted = self.batch(raws, |i, seq| {
            if seq.committed != seq.tokens.len() {
                return Err(Refusal::Invalid("sequence"));
            }
            if tokens[i].len() > seq.num_tokens - seq.committed {
                return Err(Refusal::Invalid("counts"));
            }
            known.push(seq.committed + tokens[i].len());
            Ok(())
        });
        let mut flat: Vec<u32> = tokens[..raws.len()].concat();
        if one_short && flat.pop().is_some() {
            predicted = predicted.and(Err(Refusal::Invalid("tokens length")));
        }
        let committed = self.pool.commit(raws, Some(&flat), |i| Some(tokens[i].len()), deduplicate);
        let replaced = self.agree(predicted, committed)?;
        for (raw, tokens) in raws.iter().zip(tokens) {
            self.model.seqs.get_mut(raw).unwrap().tokens.extend(tokens);
        }
        self.committed(raws, &known, deduplicate, replaced);
        Ok(())
    }

    /// Every sequence whose tokens are all written gets one more, as in one step of an engine.
    fn decode(&mut self, tokens: &[u8], deduplicate: bool) -> Outcome {
        let raws: Vec<i64> = self.model.seqs.keys().copied().take(tokens.len()).collect();
        self.commit_known(&raws, &vec![None; raws.len()], deduplicate)?;
        let full = |raw: &&i64| {
            let seq = &self.model.seqs[raw];
            seq.committed == seq.tokens.len() && seq.committed == seq.num_tokens
        };
        let raws: Vec<i64> = raws.iter().filter(full).copied().collect();
        self.append(&raws, &vec![1; raws.len()])?;
        let tokens: Vec<Vec<u32>> = tokens.iter().map(|&t| vec![u32::from(t)]).collect();
        self.commit_tokens(&raws, &tokens[..raws.len()], deduplicate, false)
    }

    fn fork(&mut self, raw: i64) -> Outcome {
        let predicted = match self.model.seqs.get(&raw) {
            None => Err(Refusal::Stale(raw)),
            // Both would write what is not known yet into the same slots.
            Some(seq) if seq.num_tokens > seq.tokens.len() => Err(Refusal::Invalid("sequence")),
            Some(_) => Ok(()),
        };
        let forked = self.pool.fork(raw, None, None);
        let child = self.agree(predicted, forked)?.raw();
        assert!(!self.ever.contains(&child), "handle {child} is not new");
        let parent = self.model.seqs.get_mut(&raw).unwrap();
        parent.unsure = true;
        let copy = Seq { reserved: 0, secured: false, ..parent.clone() };
        self.model.seqs.insert(child, copy);
        self.model.counters.forked += 1;
        self.ever.push(child);
        Ok(())
    }

    fn truncate(&mut self, raw: i64, num_tokens: usize) -> Outcome {
        let predicted = match self.model.seqs.get(&raw) {
            None => Err(Refusal::Stale(raw)),
            Some(seq) if num_tokens > seq.num_tokens => Err(Refusal::Invalid("num_tokens")),
            Some(_) => Ok(()),
        };
        let truncated = self.pool.truncate(raw, num_tokens);
        self.agree(predicted, truncated)?;
        let blocks = self.model.blocks_for(num_tokens);
        let seq = self.model.seqs.get_mut(&raw).unwrap();
        seq.tokens.truncate(num_tokens);
        if num_tokens < seq.num_tokens {
            seq.num_tokens = num_tokens;
            seq.committed = seq.committed.min(num_tokens);
            seq.unsure = true;
            if self.model.setup.contiguous {
                // The promise was for the run behind a block that is another one now.
                seq.reserved = 0;
            }
            let dropped = seq.table.split_off(blocks);
            self.model.let_go(&dropped);
        }
        Ok(())
    }

    fn reserve(&mut self, raw: i64, num_tokens: usize) -> Outcome {
        let mut blocks = 0;
        let predicted = match self.model.seqs.get(&raw) {
            None => Err(Refusal::Stale(raw)),
            Some(seq) => {
                blocks = self.model.blocks_for(seq.num_tokens + num_tokens) - seq.table.len();
                let more = blocks.saturating_sub(seq.reserved);
                let mut kept = self.model.promised_runs();
                let last = seq.table.last().copied();
                if let Some(last) = last {
                    kept.retain(|b| !(last + 1..=last + seq.reserved).contains(b));
                }
                let no_run = || {
                    self.model.setup.contiguous && last.is_some() && self.model.best_run(blocks, last, &kept).is_none()
                };
                if more > self.model.available() || (more > 0 && no_run()) {
                    Err(Refusal::OutOfBlocks(self.model.shortage(more)))
                } else {
                    Ok(())
                }
            }
        };
        let reserved = self.pool.reserve(raw, num_tokens);
        self.agree(predicted, reserved)?;
        self.model.seqs.get_mut(&raw).unwrap().reserved = blocks;
        self.model.clear_promise(raw);
        Ok(())
    }

    fn free(&mut self, raws: &[i64]) -> Outcome {
        let predicted = self.batch(raws, |_, _| Ok(()));
        let freed = self.pool.free(raws);
        self.agree(predicted, freed)?;
        // vLLM's order: a sequence's tail goes before its head, what was freed last is the last to be evicted and, with
        // nothing in it, the first to be used again.
        let (mut cached, mut clean) = (Vec::new(), VecDeque::new());
        for raw in raws {
            let before = self.model.states();
            let seq = self.model.seqs.remove(raw).unwrap();
            self.model.let_go(&seq.table);
            self.model.counters.freed += 1;
            let after = self.model.states();
            let became = |state: State| {
                let now = |&b: &usize| before[b] != state && after[b] == state;
                seq.table.iter().rev().copied().filter(now).collect::<Vec<_>>()
            };
            cached.extend(became(State::Cached));
            became(State::Clean).into_iter().rev().for_each(|b| clean.push_front(b));
        }
        let order = ids(&self.pool.free_blocks().order());
        if self.model.setup.eviction == "lru" && !self.retained {
            assert!(order.ends_with(&cached), "evicted in another order: {order:?}, freed {cached:?}");
        }
        if self.pool.config().placement == "queue" {
            assert!(order.starts_with(clean.make_contiguous()), "used in another order: {order:?}, freed {clean:?}");
        }
        Ok(())
    }

    fn pin_blocks(&mut self, blocks: &[usize]) -> Outcome {
        let model = &self.model;
        let states = model.states();
        let distinct: BTreeSet<&usize> = blocks.iter().collect();
        let pinnable = |&b: &usize| states.get(b).is_some_and(|&is| is != State::Clean && is != State::Null);
        let leaving = blocks.iter().filter(|&&b| states.get(b) == Some(&State::Cached)).count();
        let predicted = if distinct.len() < blocks.len() {
            Err(Refusal::Invalid("block"))
        } else if blocks.is_empty() {
            Err(Refusal::Invalid("blocks"))
        } else if !blocks.iter().all(pinnable) {
            Err(Refusal::Invalid("block"))
        } else if leaving > model.available() {
            Err(Refusal::OutOfBlocks(model.shortage(leaving)))
        } else {
            Ok(())
        };
        let pinned = self.pool.pin(blocks.iter().map(|&b| BlockId(b as u32)).collect(), None, None);
        let raw = self.agree(predicted, pinned)?.raw();
        assert!(!self.ever_pins.contains(&raw), "pin {raw} is not new");
        let content = blocks.iter().map(|&b| (b, self.model.readable(b))).collect();
        self.model.pinned_content.insert(raw, content);
        self.model.pins.insert(raw, blocks.to_vec());
        self.ever_pins.push(raw);
        Ok(())
    }

    fn unpin(&mut self, raw: i64) -> Outcome {
        let predicted = self.model.pins.get(&raw).map(|_| ()).ok_or(Refusal::Stale(raw));
        let unpinned = self.pool.unpin(raw);
        self.agree(predicted, unpinned)?;
        let blocks = self.model.pins.remove(&raw).unwrap();
        self.model.pinned_content.remove(&raw);
        self.model.let_go(&blocks);
        Ok(())
    }

    fn retain(&mut self, prompt: &Prompt, priority: u8, ttl: Option<u64>) -> Outcome {
        let (salt, tokens, prefix) = self.prompt(prompt);
        let predicted = if priority > 100 { Err(Refusal::Invalid("priority")) } else { Ok(()) };
        let retained = self.pool.retain(&prefix, priority, ttl);
        let blocks = self.agree(predicted, retained)?;
        self.retained |= blocks > 0;
        assert_eq!(blocks, self.model.hits(salt, &tokens));
        Ok(())
    }

    /// `n` cached blocks become clean; which is the eviction's choice.
    fn evict(&mut self, n: usize) {
        let states = self.model.states();
        let cached = self.model.count(State::Cached);
        assert_eq!(self.pool.evict(n), n.min(cached), "number of blocks evicted");
        let gone: Vec<usize> = (0..states.len())
            .filter(|&b| self.model.index[b].is_some() && !self.pool.index().contains(BlockId(b as u32)))
            .collect();
        assert_eq!(gone.len(), n.min(cached));
        for b in gone {
            assert_eq!(states[b], State::Cached, "block {b} is evicted");
            self.model.index[b] = None;
            self.model.changes[b] += 1;
            self.model.counters.blocks_evicted += 1;
        }
    }

    fn reset(&mut self) {
        let findable = self.model.index.iter().flatten().count();
        let states = self.model.states();
        assert_eq!(self.pool.reset_prefix_cache().unwrap(), findable);
        for (b, state) in states.iter().enumerate() {
            self.model.index[b] = None;
            if *state == State::Cached {
                self.model.changes[b] += 1;
                self.model.counters.blocks_evicted += 1;
            }
        }
        self.model.seqs.values_mut().for_each(|seq| seq.unsure = true);
    }

    fn cells(&self) -> Vec<Cell> {
        let model = &self.model;
        // Under strict contiguity whoever was promised a run stays where it is, and so does the run.
        let staying = model.seqs.values().filter(|seq| model.setup.contiguous && seq.reserved > 0);
        let staying: BTreeSet<usize> =
            staying.flat_map(|seq| seq.table.iter().copied()).chain(model.promised_runs()).collect();
        let cell = |(b, state): (usize, &State)| match state {
            _ if model.pin_count(b) > 0 || (model.setup.contiguous && staying.contains(&b)) => Cell::Fixed,
            State::Null => Cell::Fixed,
            State::Clean => Cell::Free,
            _ => Cell::Movable,
        };
        model.states().iter().enumerate().map(cell).collect()
    }

    fn plan(&mut self, objective: Objective, max_moves: Option<usize>, some: Option<i64>) -> Outcome {
        assert_eq!(self.pool.cells(), self.cells());
        let raws = some.map(|raw| vec![raw]);
        let made = self.pool.plan_compaction(objective, max_moves, raws.as_deref());
        match (some, made) {
            (Some(raw), made) if !self.model.seqs.contains_key(&raw) => {
                self.agree(Err(Refusal::Stale(raw)), made).map(|_| ())
            }
            (_, Ok(plan)) => {
                plan.plan.validate(&self.cells()).unwrap();
                assert!(max_moves.is_none_or(|most| plan.plan.len() <= most), "more moves than allowed");
                if let Objective::LargestRun(n) = objective {
                    assert!(plan.plan.gain.largest_run_after >= n, "the run is not made");
                }
                self.check_runs(&plan, objective, some);
                let named = plan.plan.src.iter().chain(&plan.plan.dst).map(|id| id.index());
                let changes = named.map(|b| (b, self.model.changes[b])).collect();
                self.plans.push(MadePlan { plan, changes, fresh: true });
                Ok(())
            }
            // Only a run that cannot be made is refused, or what would split a sequence that must lie in one run.
            (_, Err(error)) => {
                let strict = self.model.setup.contiguous;
                assert!(strict || matches!(objective, Objective::LargestRun(_)), "{objective:?} is refused: {error}");
                Err(error.into())
            }
        }
    }

    /// Where one run is required, and for what was planned to have fewer, no sequence may end in more runs.
    fn check_runs(&self, made: &CompactionPlan, objective: Objective, some: Option<i64>) {
        let remap = made.plan.remap(self.model.setup.num_blocks);
        let runs = |table: &[usize]| 1 + table.windows(2).filter(|pair| pair[1] != pair[0] + 1).count();
        for (&raw, seq) in &self.model.seqs {
            let planned = objective == Objective::Runs && some.is_none_or(|some| some == raw);
            if planned || self.model.setup.contiguous {
                let moved: Vec<usize> = seq.table.iter().map(|&b| remap[b].index()).collect();
                assert!(runs(&moved) <= runs(&seq.table), "{raw} ends in more runs: {:?} -> {moved:?}", seq.table);
            }
        }
    }

    fn apply(&mut self, at: u8) -> Outcome {
        // The latest mostly, else any, most of which are stale.
        let Some(last) = self.plans.len().checked_sub(1) else { return Ok(()) };
        let made = self.plans[if at < 200 { last } else { usize::from(at) % (last + 1) }].clone();
        let same = made.changes.iter().all(|&(b, changes)| self.model.changes[b] == changes);
        let plan = &made.plan.plan;
        let fits = same && plan.validate(&self.cells()).is_ok();
        let applied = self.pool.apply(&made.plan);
        self.agree(if fits { Ok(()) } else { Err(Refusal::StalePlan) }, applied)?;
        for (src, dst) in plan.launches() {
            let round: Vec<(usize, usize)> = ids(src).into_iter().zip(ids(dst)).collect();
            self.model.copy(&round);
            for &(from, to) in &round {
                self.model.index[to] = self.model.index[from].take();
                for seq in self.model.seqs.values_mut() {
                    for b in seq.table.iter_mut().filter(|b| **b == from) {
                        *b = to;
                    }
                }
                self.model.changes[from] += 1;
                self.model.changes[to] += 1;
            }
            self.model.counters.blocks_moved += round.len() as u64;
        }
        if made.fresh {
            // Counted over what is free for a plan: promised runs are not.
            let cells = self.cells();
            let free: Vec<bool> = cells.iter().map(|&cell| cell == Cell::Free).collect();
            let longest = free.split(|&free| !free).map(<[bool]>::len).max();
            assert_eq!(longest, Some(plan.gain.largest_run_after as usize), "predicted longest run");
            let pages = free.chunks(self.model.setup.blocks_per_page);
            let empty = pages.filter(|page| page.iter().all(|&free| free)).count();
            assert_eq!(empty, plan.gain.empty_pages_after as usize, "predicted pages");
        }
        Ok(())
    }

    fn run(&mut self, op: &Op) -> Outcome {
        match op {
            Op::Create { prompt, room, reserve, ignore_cache, commit } => {
                let admission = Admission {
                    num_tokens: room.map(usize::from),
                    reserve_tokens: usize::from(*reserve),
                    ignore_cache: *ignore_cache,
                    commit: *commit,
                    ..Admission::default()
                };
                self.create(prompt, admission)
            }
            Op::Append { batch } => {
                let raws: Vec<i64> = batch.iter().map(|&(at, _)| self.seq(at)).collect();
                let counts: Vec<usize> = batch.iter().map(|&(_, count)| usize::from(count)).collect();
                self.append(&raws, &counts)
            }
            Op::CommitKnown { batch, deduplicate } => {
                let raws: Vec<i64> = batch.iter().map(|&(at, _)| self.seq(at)).collect();
                let counts: Vec<Option<usize>> = batch.iter().map(|&(_, count)| count.map(usize::from)).collect();
                self.commit_known(&raws, &counts, *deduplicate)
            }
            Op::CommitTokens { batch, deduplicate, one_short } => {
                let raws: Vec<i64> = batch.iter().map(|&(at, _)| self.seq(at)).collect();
                let tokens: Vec<Vec<u32>> = batch
                    .iter()
                    .zip(&raws)
                    .map(|((at, tokens), raw)| {
                        // As many as there is room for, mostly.
                        let seq = self.model.seqs.get(raw).filter(|_| at.0 % 8 != 0);
                        let room = seq.map_or(usize::MAX, |seq| seq.num_tokens - seq.committed);
                        tokens.iter().take(room).map(|&t| u32::from(t)).collect()
                    })
                    .collect();
                self.commit_tokens(&raws, &tokens, *deduplicate, *one_short)
            }
            Op::Decode { tokens, deduplicate } => self.decode(tokens, *deduplicate).or(Ok(())),
            Op::Fork { seq } => self.fork(self.seq(*seq)),
            Op::Truncate { seq, num_tokens } => self.truncate(self.seq(*seq), usize::from(*num_tokens)),
            Op::Reserve { seq, num_tokens } => self.reserve(self.seq(*seq), usize::from(*num_tokens)),
            Op::Free { batch } => {
                let raws: Vec<i64> = batch.iter().map(|&at| self.seq(at)).collect();
                self.free(&raws)
            }
            Op::PinBlocks { blocks } => {
                let blocks: Vec<usize> = blocks.iter().map(|&b| usize::from(b)).collect();
                self.pin_blocks(&blocks)
            }
            Op::PinSequence { seq } => {
                let blocks = self.model.seqs.get(&self.seq(*seq)).map(|seq| seq.table.clone());
                blocks.map_or(Ok(()), |blocks| self.pin_blocks(&blocks))
            }
            Op::Unpin { pin } => self.unpin(self.pin(*pin)),
            Op::Lookup { prompt } => {
                let (salt, tokens, prefix) = self.prompt(prompt);
                let hit = self.pool.lookup(&prefix).unwrap();
                assert_eq!(hit, self.model.hits(salt, &tokens) * self.model.size(), "lookup");
                assert_eq!(self.pool.explain(&prefix).unwrap().hit_tokens, hit, "explain");
                Ok(())
            }
            Op::Retain { prompt, priority, ttl } => self.retain(prompt, *priority, ttl.map(u64::from)),
            Op::Clock { forward } => {
                let now = self.pool.now() + u64::from(*forward);
                self.pool.set_now(now);
                assert_eq!(self.pool.now(), now);
                Ok(())
            }
            Op::Evict { n } => {
                self.evict(usize::from(*n));
                Ok(())
            }
            Op::Reset => {
                self.reset();
                Ok(())
            }
            Op::Plan { objective, blocks, max_moves, some } => {
                let objective = match objective {
                    0 => Objective::Runs,
                    1 => Objective::Pages,
                    _ => Objective::LargestRun(u32::from(*blocks)),
                };
                let some = some.map(|at| self.seq(at));
                self.plan(objective, max_moves.map(usize::from), some)
            }
            Op::Apply { plan } => self.apply(*plan),
        }
    }

    // -------------------------------------------------------------------------------------------- checks

    fn check(&self) {
        self.pool.validate().unwrap();
        let (pool, model, size) = (&self.pool, &self.model, self.model.size());
        let states = model.states();
        let count = |state| states.iter().filter(|&&is| is == state).count();
        assert_eq!(pool.num_free(), count(State::Clean), "free");
        assert_eq!(pool.num_cached(), count(State::Cached) + count(State::PinnedCached), "cached");
        assert_eq!(pool.num_active(), count(State::Active), "active");
        let null = usize::from(model.setup.null_block);
        assert_eq!(pool.num_free() + pool.num_cached() + pool.num_active() + null, model.setup.num_blocks, "law");
        assert_eq!(pool.num_reserved(), model.reserved(), "reserved");
        assert_eq!(pool.available(), model.available(), "available");
        let pinned: BTreeSet<&usize> = model.pins.values().flatten().collect();
        assert_eq!(pool.num_pinned(), pinned.len(), "pinned");
        assert_eq!(pool.largest_run(), model.longest(&[State::Clean, State::Cached]), "largest run");
        assert_eq!(pool.free_blocks().largest_clean_run(), model.longest(&[State::Clean]), "largest clean run");
        for (b, state) in states.iter().enumerate() {
            let place = pool.free_blocks().place_of(BlockId(b as u32)).unwrap();
            let fits = match state {
                State::Clean => place == Place::Clean,
                State::Cached => matches!(place, Place::Cached | Place::Candidate),
                State::Null | State::PinnedCached | State::Active => place == Place::Out,
            };
            assert!(fits, "block {b} is {state:?} and in {place:?}");
            self.check_findable(b);
        }
        assert_eq!(pool.sequences().len(), model.seqs.len());
        assert_eq!(pool.pins().len(), model.pins.len());
        for (raw, seq) in &model.seqs {
            let is = pool.sequences().get(*raw).unwrap();
            assert_eq!(ids(&is.blocks), seq.table, "table of {raw}");
            assert_eq!((is.num_tokens, is.committed, is.reserved), (seq.num_tokens, seq.committed, seq.reserved));
            assert_eq!((&is.tokens, is.hit_tokens), (&seq.tokens, seq.hit_tokens));
            assert!(!seq.secured || model.is_promise_kept(*raw), "the run promised to {raw} is gone");
            for (at, kv) in kv_of(seq.salt, &seq.tokens).take(seq.committed).enumerate() {
                let block = seq.table[at / size];
                assert_eq!(
                    model.kv[block * size + at % size],
                    kv,
                    "token {at} of sequence {raw}, block {block}: wrong KV"
                );
            }
        }
        for (raw, blocks) in &model.pins {
            assert_eq!(&ids(&pool.pins().get(*raw).unwrap().blocks), blocks, "blocks of pin {raw}");
            for (b, content) in &model.pinned_content[raw] {
                let kept = content.iter().all(|&(slot, kv)| model.kv[slot] == kv);
                assert!(kept, "pinned block {b} changed under its reader");
            }
        }
        assert_eq!(pool.counters(), Counters { refused: self.refused, ..model.counters }, "counters");
    }

    /// A block is findable exactly when the model says so, and holds what is found by it.
    fn check_findable(&self, b: usize) {
        let size = self.model.size();
        let hash = self.pool.index().hash_of(BlockId(b as u32));
        let Some((salt, prefix)) = &self.model.index[b] else {
            assert_eq!(hash, None, "block {b} is findable");
            return;
        };
        let hashes = Prefix::new(prefix.clone(), size, HashKind::Xxh3, SALTS[*salt]).unwrap();
        assert_eq!(hash, hashes.hashes().last().copied(), "block {b} is found by another hash");
        let kv: Vec<u64> = kv_of(*salt, prefix).skip(prefix.len() - size).collect();
        assert_eq!(self.model.kv[b * size..(b + 1) * size], kv, "block {b} is findable and holds other KV");
    }

    /// Whatever happened, everything can be given back.
    fn finish(mut self) {
        for raw in self.model.pins.keys().copied().collect::<Vec<_>>() {
            self.unpin(raw).unwrap();
        }
        let live: Vec<i64> = self.model.seqs.keys().copied().collect();
        self.free(&live).unwrap();
        self.check();
        assert_eq!(self.pool.num_active() + self.pool.num_reserved() + self.pool.num_pinned(), 0, "a block is lost");
        self.reset();
        self.check();
        assert_eq!(self.pool.num_free(), self.model.setup.num_blocks - usize::from(self.model.setup.null_block));
    }
}

/// How often each operation ended how.
type Tally = RefCell<BTreeMap<(String, &'static str), usize>>;

fn count(tally: &Tally, op: &Op, done: &Outcome) {
    let name = format!("{op:?}").split([' ', '{']).next().unwrap_or_default().to_owned();
    let end = match done {
        Ok(()) => "ok",
        Err(Refusal::OutOfBlocks(_)) => "out of blocks",
        Err(Refusal::Invalid(_)) => "invalid",
        Err(Refusal::Stale(_)) => "stale handle",
        Err(Refusal::StalePlan) => "stale plan",
    };
    *tally.borrow_mut().entry((name, end)).or_default() += 1;
}

fn against_the_model(placement: &str, setup: &Setup, ops: &[Op], tally: &Tally) {
    let mut machine = Machine::new(setup, placement);
    let mut before = machine.dump();
    for op in ops {
        let done = machine.run(op);
        machine.check();
        let after = machine.dump();
        if !matches!(op, Op::Decode { .. }) && done.is_err() {
            assert!(before == after, "{op:?} was refused with {done:?} and changed the pool:\n{before}\n{after}");
        }
        if !matches!(op, Op::Plan { .. } | Op::Lookup { .. }) {
            machine.plans.iter_mut().for_each(|plan| plan.fresh = false);
        }
        before = after;
        count(tally, op, &done);
    }
    machine.finish();
}

/// `PROPTEST_CASES` cases of 150 operations on average, for one placement under all evictions and contiguities.
fn random_steps(placement: &str) {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(220);
    let config =
        ProptestConfig { cases, failure_persistence: None, max_shrink_iters: 20_000, ..ProptestConfig::default() };
    let tally = Tally::default();
    let mut runner = TestRunner::new(config);
    let run = runner.run(&(setup(), prop::collection::vec(op(), 1..=300)), |(setup, ops)| {
        against_the_model(placement, &setup, &ops, &tally);
        Ok(())
    });
    match run {
        Ok(()) => {}
        Err(TestError::Abort(reason)) => panic!("{placement}: {reason}"),
        Err(TestError::Fail(reason, (setup, ops))) => {
            let ops: String = ops.iter().map(|op| format!("    {op:?},\n")).collect();
            panic!("{placement}: {reason}\n{setup:?}\n{ops}");
        }
    }
    let tally = tally.into_inner();
    let steps: usize = tally.values().sum();
    println!("{placement}: {steps} steps {tally:#?}");
    if cases >= 100 {
        assert!(steps >= cases as usize * 120, "{steps} steps in {cases} cases");
        // Each kind of call was served, and each was refused for every reason there is.
        let ends: BTreeSet<&'static str> = tally.keys().map(|(_, end)| *end).collect();
        assert_eq!(ends.len(), 5, "{ends:?}");
        let served = tally.keys().filter(|(_, end)| *end == "ok").count();
        assert_eq!(served, 19, "operations that were never served: {tally:?}");
    }
}

#[test]
fn queue_pool_against_the_model() {
    random_steps("queue");
}

#[test]
fn sorted_pool_against_the_model() {
    random_steps("sorted");
}

#[test]
fn bitmap_pool_against_the_model() {
    random_steps("bitmap");
}

#[test]
fn buddy_pool_against_the_model() {
    random_steps("buddy");
}
