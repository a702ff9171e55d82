//! Any sequence of calls on a small pool: no panic, no broken invariant, and a refused call changes nothing.
//!
//! A shadow of the KV memory is kept as an engine would: what is committed is written first, copy-on-write pairs and
//! compaction moves are copied. After every call each sequence must read back its own tokens through its table.
//!
//! Prompts come from a tiny alphabet and grow out of a few stems, so that prefixes are shared, diverge, are evicted and
//! come back. Handles are drawn from all ever given out: some are stale.
#![no_main]

use arbitrary::Arbitrary;
use kvcatch::compact::Objective;
use kvcatch::error::Error;
use kvcatch::ids::BlockId;
use kvcatch::pool::{Admission, BlockPool, CompactionPlan, Config};
use kvcatch::prefix::{HashKind, Prefix};
use libfuzzer_sys::fuzz_target;

const PLACEMENTS: [&str; 4] = ["queue", "sorted", "bitmap", "buddy"];
const EVICTIONS: [&str; 3] = ["lru", "slru", "clairvoyant"];

#[derive(Arbitrary, Debug)]
struct Setup {
    num_blocks: u8,
    block_size: u8,
    placement: u8,
    eviction: u8,
    contiguous: bool,
    null_block: bool,
    blocks_per_page: u8,
    seed: u8,
}

/// A prompt: the first tokens of a stem, then a tail of its own.
#[derive(Arbitrary, Debug)]
struct Prompt {
    stem: u8,
    shared: u8,
    tail: [u8; 3],
    tail_len: u8,
    salt: bool,
}

#[derive(Arbitrary, Debug)]
enum Op {
    Create { prompt: Prompt, room: Option<u8>, reserve: u8, ignore_cache: bool, commit: bool },
    Append { first: u8, many: u8, counts: [u8; 4] },
    CommitKnown { first: u8, many: u8, count: Option<u8>, deduplicate: bool },
    CommitTokens { seq: u8, tokens: [u8; 6], count: u8, deduplicate: bool },
    Fork { seq: u8 },
    Truncate { seq: u8, num_tokens: u8 },
    Reserve { seq: u8, num_tokens: u8 },
    Free { first: u8, many: u8 },
    Pin { blocks: [u8; 3], many: u8 },
    PinSequence { seq: u8 },
    Unpin { pin: u8 },
    Lookup { prompt: Prompt },
    Retain { prompt: Prompt, priority: u8, ttl: Option<u8> },
    NextUse { seq: u8, when: [u8; 3] },
    Clock { forward: u8 },
    Evict { n: u8 },
    Reset,
    Plan { objective: u8, blocks: u8, max_moves: Option<u8> },
    Apply { plan: u8 },
}

/// What a refused call must leave as it was: the counts and every table.
type State = (usize, usize, usize, usize, usize, Vec<(i64, usize, Vec<BlockId>)>);

fn state(pool: &BlockPool) -> State {
    let tables = pool.sequences().iter().map(|(handle, s)| (handle.raw(), s.num_tokens, s.blocks.clone())).collect();
    (pool.num_free(), pool.num_cached(), pool.num_active(), pool.num_reserved(), pool.num_pinned(), tables)
}

struct Machine {
    pool: BlockPool,
    sequences: Vec<i64>,
    pins: Vec<i64>,
    plans: Vec<CompactionPlan>,
    /// What stands in every slot: the KV of a token depends on all tokens before it.
    memory: Vec<u64>,
}

/// The KV of every token of a sequence.
fn contents(root: u128, tokens: &[u32]) -> impl Iterator<Item = u64> {
    tokens.iter().scan(root as u64, |hash, &token| {
        *hash = (*hash ^ u64::from(token)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        Some(*hash)
    })
}

fn pick(handles: &[i64], at: u8) -> i64 {
    if handles.is_empty() { i64::from(at) } else { handles[usize::from(at) % handles.len()] }
}

impl Machine {
    fn batch(&self, first: u8, many: u8) -> Vec<i64> {
        (0..many % 4).map(|i| pick(&self.sequences, first.wrapping_add(i))).collect()
    }

    fn prefix(&self, prompt: &Prompt) -> Prefix {
        let mut tokens = vec![u32::from(prompt.stem % 3); usize::from(prompt.shared % 48)];
        tokens.extend(prompt.tail.iter().take(usize::from(prompt.tail_len % 4)).map(|t| u32::from(t % 4)));
        let salt: &[u8] = if prompt.salt { b"tenant" } else { b"" };
        let config = self.pool.config();
        Prefix::new(tokens, config.block_size, config.hash, salt).expect("tokens and block size are in range")
    }

    /// Slot of every token that the sequence has committed, and what should stand there.
    fn committed(&self, raw: i64) -> Vec<(usize, u64)> {
        let Ok(sequence) = self.pool.sequences().get(raw) else { return Vec::new() };
        let size = self.pool.config().block_size;
        let slot = |at: usize| sequence.blocks[at / size].index() * size + at % size;
        contents(sequence.root, &sequence.tokens)
            .take(sequence.committed)
            .enumerate()
            .map(|(i, c)| (slot(i), c))
            .collect()
    }

    fn check_memory(&self, op: &Op) {
        for (handle, _) in self.pool.sequences().iter() {
            for (at, (slot, content)) in self.committed(handle.raw()).into_iter().enumerate() {
                assert_eq!(self.memory[slot], content, "token {at} of sequence {handle} is overwritten after {op:?}");
            }
        }
    }

    /// Writes the KV of the tokens not committed yet (known ones and `more`), as far as there is room.
    fn write(&mut self, raw: i64, more: &[u32]) {
        let Ok(sequence) = self.pool.sequences().get(raw) else { return };
        let size = self.pool.config().block_size;
        let mut tokens = sequence.tokens.clone();
        tokens.extend_from_slice(more);
        let room = contents(sequence.root, &tokens).take(sequence.num_tokens).enumerate().skip(sequence.committed);
        for (at, content) in room {
            self.memory[sequence.blocks[at / size].index() * size + at % size] = content;
        }
    }

    /// One launch of a copy kernel: no order among its pairs.
    fn copy(&mut self, pairs: impl Iterator<Item = (BlockId, BlockId)>) {
        let size = self.pool.config().block_size;
        let pairs: Vec<(usize, usize)> = pairs.map(|(src, dst)| (src.index() * size, dst.index() * size)).collect();
        for (i, &(_, dst)) in pairs.iter().enumerate() {
            assert!(pairs.iter().all(|pair| pair.0 != dst), "a destination is a source of the same launch");
            assert!(pairs[..i].iter().all(|pair| pair.1 != dst), "two copies go to one block");
        }
        for (src, dst) in pairs {
            self.memory.copy_within(src..src + size, dst);
        }
    }

    fn run(&mut self, op: &Op) -> Result<(), Error> {
        match op {
            Op::Create { prompt, room, reserve, ignore_cache, commit } => {
                let admission = Admission {
                    num_tokens: room.map(usize::from),
                    reserve_tokens: usize::from(*reserve) % 40,
                    ignore_cache: *ignore_cache,
                    commit: *commit,
                    ..Admission::default()
                };
                let handle = self.pool.create(self.prefix(prompt), admission)?;
                self.sequences.push(handle.raw());
                if *commit {
                    // Findable before it is written, as in vLLM: the engine writes it in this very step.
                    let hit = self.pool.sequences().get(handle.raw())?.hit_tokens;
                    for (slot, content) in self.committed(handle.raw()).into_iter().skip(hit) {
                        self.memory[slot] = content;
                    }
                }
            }
            Op::Append { first, many, counts } => {
                let batch = self.batch(*first, *many);
                let copies = self.pool.append(&batch, |i| usize::from(counts[i % 4]) % 40)?;
                self.copy(copies.into_iter());
            }
            Op::CommitKnown { first, many, count, deduplicate } => {
                let batch = self.batch(*first, *many);
                batch.iter().for_each(|&raw| self.write(raw, &[]));
                self.pool.commit(&batch, None, |_| count.map(|c| usize::from(c) % 40), *deduplicate)?;
            }
            Op::CommitTokens { seq, tokens, count, deduplicate } => {
                let count = usize::from(*count) % 7;
                let tokens: Vec<u32> = tokens[..count].iter().map(|t| u32::from(t % 4)).collect();
                let batch = [pick(&self.sequences, *seq)];
                let sequence = self.pool.sequences().get(batch[0])?;
                if sequence.committed == sequence.tokens.len() && count <= sequence.num_tokens - sequence.committed {
                    self.write(batch[0], &tokens);
                }
                self.pool.commit(&batch, Some(&tokens), |_| Some(count), *deduplicate)?;
            }
            Op::Fork { seq } => {
                let handle = self.pool.fork(pick(&self.sequences, *seq), None, None)?;
                self.sequences.push(handle.raw());
            }
            Op::Truncate { seq, num_tokens } => {
                self.pool.truncate(pick(&self.sequences, *seq), usize::from(*num_tokens) % 64)?;
            }
            Op::Reserve { seq, num_tokens } => {
                self.pool.reserve(pick(&self.sequences, *seq), usize::from(*num_tokens) % 64)?;
            }
            Op::Free { first, many } => {
                let batch = self.batch(*first, *many);
                self.pool.free(&batch)?;
            }
            Op::Pin { blocks, many } => {
                let blocks = blocks[..usize::from(many % 4)].iter().map(|&b| BlockId(u32::from(b))).collect();
                self.pins.push(self.pool.pin(blocks, None, None)?.raw());
            }
            Op::PinSequence { seq } => {
                let blocks = self.pool.sequences().get(pick(&self.sequences, *seq))?.blocks.clone();
                self.pins.push(self.pool.pin(blocks, None, None)?.raw());
            }
            Op::Unpin { pin } => self.pool.unpin(pick(&self.pins, *pin))?,
            Op::Lookup { prompt } => {
                let prefix = self.prefix(prompt);
                let hit = self.pool.lookup(&prefix)?;
                assert_eq!(self.pool.explain(&prefix)?.hit_tokens, hit, "explain disagrees with lookup");
            }
            Op::Retain { prompt, priority, ttl } => {
                self.pool.retain(&self.prefix(prompt), *priority, ttl.map(u64::from))?;
            }
            Op::NextUse { seq, when } => {
                self.pool.set_next_use(pick(&self.sequences, *seq), &when.map(i64::from))?;
            }
            Op::Clock { forward } => self.pool.set_now(self.pool.now() + u64::from(*forward)),
            Op::Evict { n } => {
                self.pool.evict(usize::from(*n));
            }
            Op::Reset => {
                self.pool.reset_prefix_cache()?;
            }
            Op::Plan { objective, blocks, max_moves } => {
                let objective = match objective % 3 {
                    0 => Objective::Runs,
                    1 => Objective::Pages,
                    _ => Objective::LargestRun(u32::from(*blocks) % 66),
                };
                self.plans.push(self.pool.plan_compaction(objective, max_moves.map(usize::from), None)?);
            }
            Op::Apply { plan } => {
                if self.plans.is_empty() {
                    return Ok(());
                }
                let plan = self.plans[usize::from(*plan) % self.plans.len()].clone();
                self.pool.apply(&plan)?;
                for (src, dst) in plan.plan.launches() {
                    self.copy(src.iter().copied().zip(dst.iter().copied()));
                }
            }
        }
        Ok(())
    }
}

fuzz_target!(|input: (Setup, Vec<Op>)| {
    let (setup, ops) = input;
    let config = Config {
        num_blocks: usize::from(setup.num_blocks) % 65,
        block_size: usize::from(setup.block_size) % 5,
        placement: PLACEMENTS[usize::from(setup.placement) % PLACEMENTS.len()].into(),
        eviction: EVICTIONS[usize::from(setup.eviction) % EVICTIONS.len()].into(),
        contiguous: setup.contiguous,
        blocks_per_page: usize::from(setup.blocks_per_page) % 9,
        null_block: setup.null_block,
        hash: HashKind::Xxh3,
        seed: u64::from(setup.seed),
    };
    let Ok(pool) = BlockPool::new(config) else { return };
    let memory = vec![0; pool.config().num_blocks * pool.config().block_size];
    let mut machine = Machine { pool, sequences: Vec::new(), pins: Vec::new(), plans: Vec::new(), memory };
    for op in ops.iter().take(256) {
        let before = state(&machine.pool);
        let done = machine.run(op);
        if let Err(broken) = machine.pool.validate() {
            panic!("{broken}\nafter {op:?} -> {done:?}");
        }
        machine.check_memory(op);
        if let Err(refused) = done {
            assert!(!matches!(refused, Error::Corrupt(_) | Error::DoubleFree { .. }), "{refused} by {op:?}");
            assert_eq!(state(&machine.pool), before, "{op:?} was refused ({refused}) and changed the pool");
        }
    }
    // Whatever happened, everything can be given back.
    for pin in machine.pool.pins().iter().map(|(handle, _)| handle.raw()).collect::<Vec<_>>() {
        machine.pool.unpin(pin).expect("a live pin");
    }
    let live: Vec<i64> = machine.pool.sequences().iter().map(|(handle, _)| handle.raw()).collect();
    machine.pool.free(&live).expect("live sequences");
    machine.pool.validate().expect("valid when empty");
    assert_eq!(machine.pool.num_active() + machine.pool.num_reserved(), 0, "a block was lost");
});
