//! Prefix blocks: chained hashes of full blocks, and the index that finds a block by its hash.
//!
//! The hash of a block covers its tokens and the hash of the block before it, so equal hashes mean equal prefixes.
//! The first block is chained to a root made of salt, block size and algorithm: tenants with different salts share
//! nothing. A hit is also compared token by token, so a collision can never serve the wrong KV.

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use crate::error::{Error, Result};
use crate::ids::BlockId;

/// Which hash chains the blocks.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Default)]
pub enum HashKind {
    /// xxh3-128: fast, not cryptographic.
    #[default]
    Xxh3,
    /// BLAKE3 cut to 128 bits, for tenants that do not trust each other.
    Blake3,
}

impl HashKind {
    /// The algorithm of that name.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unknown name.
    pub fn by_name(name: &str) -> Result<Self> {
        match name {
            "xxh3" => Ok(Self::Xxh3),
            "blake3" => Ok(Self::Blake3),
            _ => Err(Error::invalid("hash", format_args!("{name:?}"), "must be xxh3 or blake3")),
        }
    }

    /// The name users choose it by.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Xxh3 => "xxh3",
            Self::Blake3 => "blake3",
        }
    }

    fn digest(self, bytes: &[u8]) -> u128 {
        match self {
            Self::Xxh3 => xxhash_rust::xxh3::xxh3_128(bytes),
            Self::Blake3 => {
                let mut first = [0; 16];
                first.copy_from_slice(&blake3::hash(bytes).as_bytes()[..16]);
                u128::from_le_bytes(first)
            }
        }
    }

    /// What the first block is chained to.
    #[must_use]
    pub fn root(self, block_size: usize, salt: &[u8]) -> u128 {
        let mut bytes = (block_size as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(salt);
        self.digest(&bytes)
    }

    /// Appends the hash of every full block of `tokens`, chained from `parent`, to `hashes`.
    pub fn chain(self, parent: u128, tokens: &[u32], block_size: usize, hashes: &mut Vec<u128>) {
        hashes.reserve(tokens.len() / block_size);
        let mut chain = Chain::new(self, parent, block_size);
        for block in tokens.chunks_exact(block_size) {
            hashes.push(chain.next(block));
        }
    }
}

/// Hashes block after block.
struct Chain {
    kind: HashKind,
    parent: u128,
    bytes: Vec<u8>,
}

impl Chain {
    fn new(kind: HashKind, parent: u128, block_size: usize) -> Self {
        Self { kind, parent, bytes: vec![0; 16 + 4 * block_size] }
    }

    /// The hash of the next block: of its parent's hash and its tokens.
    #[inline]
    fn next(&mut self, block: &[u32]) -> u128 {
        self.bytes[..16].copy_from_slice(&self.parent.to_le_bytes());
        for (to, token) in self.bytes[16..].chunks_exact_mut(4).zip(block) {
            to.copy_from_slice(&token.to_le_bytes());
        }
        self.parent = self.kind.digest(&self.bytes);
        self.parent
    }
}

/// A prompt and the hashes of its full blocks, computed once.
#[derive(Clone, Debug)]
pub struct Prefix {
    tokens: Vec<u32>,
    hashes: Vec<u128>,
    root: u128,
    block_size: usize,
    kind: HashKind,
}

impl Prefix {
    /// Hashes `tokens`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a block size of 0.
    pub fn new(tokens: Vec<u32>, block_size: usize, kind: HashKind, salt: &[u8]) -> Result<Self> {
        if block_size == 0 {
            return Err(Error::invalid("block_size", block_size, "must be at least 1 token"));
        }
        let root = kind.root(block_size, salt);
        let mut hashes = Vec::new();
        kind.chain(root, &tokens, block_size, &mut hashes);
        Ok(Self { tokens, hashes, root, block_size, kind })
    }

    /// The tokens.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Hashes of the full blocks.
    #[must_use]
    pub fn hashes(&self) -> &[u128] {
        &self.hashes
    }

    /// What the first block is chained to.
    #[must_use]
    pub fn root(&self) -> u128 {
        self.root
    }

    /// Tokens per block.
    #[must_use]
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// The algorithm.
    #[must_use]
    pub fn kind(&self) -> HashKind {
        self.kind
    }

    /// Tokens and hashes, without a copy.
    #[must_use]
    pub fn into_parts(self) -> (Vec<u32>, Vec<u128>, u128) {
        (self.tokens, self.hashes, self.root)
    }
}

/// Why a lookup stopped.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum MissReason {
    /// Every full block was found.
    FullHit,
    /// Nothing is cached at all.
    EmptyCache,
    /// A cached neighbour continues the same prefix with other tokens.
    Diverged,
    /// The block was cached once and has been evicted.
    Evicted,
    /// The same tokens are cached under another salt.
    OtherSalt,
    /// Nothing cached continues this prefix, nor did lately.
    NeverCommitted,
}

impl MissReason {
    /// The word for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::FullHit => "full_hit",
            Self::EmptyCache => "empty_cache",
            Self::Diverged => "diverged",
            Self::Evicted => "evicted",
            Self::OtherSalt => "other_salt",
            Self::NeverCommitted => "never_committed",
        }
    }
}

/// Where and why a lookup stopped.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Miss {
    /// Tokens found.
    pub hit_tokens: usize,
    /// Index of the first full block not found.
    pub block_index: usize,
    /// Why.
    pub reason: MissReason,
    /// Cached block that follows the same prefix and agrees with the prompt longest, and the index of the first
    /// prompt token that differs from it.
    pub neighbour: Option<(BlockId, usize)>,
}

const NONE: u32 = u32::MAX;

/// Blocks hashed before they are looked up.
const GROUP: usize = 64;

/// Finds committed blocks by hash.
#[derive(Debug)]
pub struct PrefixIndex {
    /// Heads of the chains of blocks with equal content.
    table: HashTable<u32>,
    hash: Vec<u128>,
    parent: Vec<u128>,
    /// Next block with the same content, oldest first; `ABSENT` marks "not in the index".
    next: Vec<u32>,
    /// The block before it; the head of a chain has its last block here.
    previous: Vec<u32>,
    tokens: Vec<u32>,
    block_size: usize,
    len: usize,
    /// Hashes evicted lately, oldest overwritten first.
    evicted: Vec<u64>,
    evicted_at: usize,
}

/// `next` of a block that is not in the index.
const ABSENT: u32 = u32::MAX - 1;

#[inline]
fn bucket(hash: u128) -> u64 {
    hash as u64
}

impl PrefixIndex {
    /// An empty index.
    #[must_use]
    pub fn new(num_blocks: usize, block_size: usize) -> Self {
        Self {
            table: HashTable::with_capacity(num_blocks),
            hash: vec![0; num_blocks],
            parent: vec![0; num_blocks],
            next: vec![ABSENT; num_blocks],
            previous: vec![NONE; num_blocks],
            tokens: vec![0; num_blocks * block_size],
            block_size,
            len: 0,
            evicted: vec![0; num_blocks.min(1 << 16)],
            evicted_at: 0,
        }
    }

    /// Number of committed blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is committed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the block is committed: full and findable.
    #[inline]
    #[must_use]
    pub fn contains(&self, id: BlockId) -> bool {
        self.next[id.index()] != ABSENT
    }

    /// The hash a committed block is found by.
    #[must_use]
    pub fn hash_of(&self, id: BlockId) -> Option<u128> {
        self.contains(id).then(|| self.hash[id.index()])
    }

    fn tokens_of(&self, id: BlockId) -> &[u32] {
        &self.tokens[id.index() * self.block_size..(id.index() + 1) * self.block_size]
    }

    /// The first committed block with this hash and these tokens.
    #[inline]
    #[must_use]
    pub fn find(&self, hash: u128, tokens: &[u32]) -> Option<BlockId> {
        let id = BlockId(*self.table.find(bucket(hash), |&id| self.hash[id as usize] == hash)?);
        (self.tokens_of(id) == tokens).then_some(id)
    }

    /// Appends the blocks that hold the longest cached prefix of at most `limit` blocks.
    pub fn longest_prefix(&self, tokens: &[u32], hashes: &[u128], limit: usize, found: &mut Vec<BlockId>) {
        let blocks = tokens.chunks_exact(self.block_size).zip(hashes).take(limit);
        for (block, &hash) in blocks {
            let Some(id) = self.find(hash, block) else { return };
            found.push(id);
        }
    }

    /// How many full blocks of these tokens are cached, hashing little further than the first that is not.
    #[must_use]
    pub fn probe(&self, kind: HashKind, root: u128, tokens: &[u32]) -> usize {
        let mut chain = Chain::new(kind, root, self.block_size);
        let mut hashes = [0u128; GROUP];
        let mut found = 0;
        // Hashed by the group and then looked up by the group: the misses of the memory overlap that way.
        for group in tokens.chunks(GROUP * self.block_size) {
            let blocks = group.chunks_exact(self.block_size);
            for (hash, block) in hashes.iter_mut().zip(blocks.clone()) {
                *hash = chain.next(block);
            }
            let full = blocks.len();
            let here = blocks.zip(&hashes).take_while(|&(block, &hash)| self.find(hash, block).is_some()).count();
            found += here;
            if here < full {
                break;
            }
        }
        found
    }

    /// Makes a full block findable. Of blocks with equal content the oldest is found, as in vLLM.
    pub fn insert(&mut self, id: BlockId, hash: u128, parent: u128, tokens: &[u32]) {
        let i = id.index();
        self.hash[i] = hash;
        self.parent[i] = parent;
        self.tokens[i * self.block_size..(i + 1) * self.block_size].copy_from_slice(tokens);
        self.len += 1;
        let hashes = &self.hash;
        let entry = self.table.entry(
            bucket(hash),
            |&other| hashes[other as usize] == hash,
            |&other| bucket(hashes[other as usize]),
        );
        match entry {
            Entry::Occupied(head) => {
                let head = *head.get() as usize;
                let last = std::mem::replace(&mut self.previous[head], id.0);
                self.next[last as usize] = id.0;
                self.previous[i] = last;
            }
            Entry::Vacant(slot) => {
                slot.insert(id.0);
                self.previous[i] = id.0;
            }
        }
        self.next[i] = NONE;
    }

    /// Forgets a block; does nothing when it is not in the index. `evicted` remembers for a while that it was there.
    pub fn remove(&mut self, id: BlockId, evicted: bool) {
        let i = id.index();
        if self.next[i] == ABSENT {
            return;
        }
        let hash = self.hash[i];
        let (previous, next) = (self.previous[i], self.next[i]);
        let is_head = self.next[previous as usize] == NONE;
        if is_head {
            let found = self.table.find_entry(bucket(hash), |&other| other == id.0);
            if let Ok(mut entry) = found {
                if next == NONE {
                    entry.remove();
                } else {
                    *entry.get_mut() = next;
                    self.previous[next as usize] = previous;
                }
            }
        } else {
            self.next[previous as usize] = next;
            if next == NONE {
                let head = self.table.find(bucket(hash), |&other| self.hash[other as usize] == hash);
                if let Some(&head) = head {
                    self.previous[head as usize] = previous;
                }
            } else {
                self.previous[next as usize] = previous;
            }
        }
        self.next[i] = ABSENT;
        self.len -= 1;
        if evicted {
            self.evicted[self.evicted_at] = bucket(hash);
            self.evicted_at = (self.evicted_at + 1) % self.evicted.len();
        }
    }

    /// The content of `from` lies in `to` now, which is not in the index.
    pub fn remap(&mut self, from: BlockId, to: BlockId) {
        let Some(hash) = self.hash_of(from) else { return };
        let parent = self.parent[from.index()];
        let start = from.index() * self.block_size;
        let tokens = self.tokens[start..start + self.block_size].to_vec();
        // It becomes the youngest of the blocks with equal content: any of them serves a hit.
        self.remove(from, false);
        self.insert(to, hash, parent, &tokens);
    }

    /// Where and why a lookup of these tokens stops. O(number of blocks): for people, not for the hot path.
    #[must_use]
    pub fn explain(&self, prefix: &Prefix) -> Miss {
        let mut found = Vec::new();
        self.longest_prefix(&prefix.tokens, &prefix.hashes, usize::MAX, &mut found);
        let at = found.len();
        let mut miss = Miss {
            hit_tokens: at * self.block_size,
            block_index: at,
            reason: MissReason::NeverCommitted,
            neighbour: None,
        };
        if at == prefix.hashes.len() {
            miss.reason = MissReason::FullHit;
            return miss;
        }
        if self.is_empty() {
            miss.reason = MissReason::EmptyCache;
            return miss;
        }
        let parent = at.checked_sub(1).map_or(prefix.root, |before| prefix.hashes[before]);
        let start = at * self.block_size;
        let wanted = &prefix.tokens[start..start + self.block_size];
        let committed = (0..self.next.len() as u32).map(BlockId).filter(|&id| self.contains(id));
        let agreeing = |id: BlockId| self.tokens_of(id).iter().zip(wanted).take_while(|(a, b)| a == b).count();
        let siblings = committed.clone().filter(|&id| self.parent[id.index()] == parent);
        let nearest = siblings.map(|id| (agreeing(id), id)).max_by_key(|&(agree, id)| (agree, std::cmp::Reverse(id)));
        miss.neighbour = nearest.map(|(agree, id)| (id, start + agree));
        let other_salt = || {
            at == 0 && committed.clone().any(|id| agreeing(id) == self.block_size && self.parent[id.index()] != parent)
        };
        miss.reason = if self.evicted.contains(&bucket(prefix.hashes[at])) {
            MissReason::Evicted
        } else if miss.neighbour.is_some_and(|(_, differs)| differs < start + self.block_size) {
            MissReason::Diverged
        } else if other_salt() {
            MissReason::OtherSalt
        } else {
            MissReason::NeverCommitted
        };
        miss
    }

    /// Checks that every committed block is found by its hash, and only those.
    ///
    /// # Errors
    /// [`Error::Corrupt`] names the first block that is not.
    pub fn validate(&self) -> Result<()> {
        let mut seen = 0;
        for &head in &self.table {
            let (mut at, mut before) = (head, self.previous[head as usize]);
            while at != NONE {
                if at == ABSENT
                    || self.hash[at as usize] != self.hash[head as usize]
                    || self.previous[at as usize] != before
                {
                    return Err(Error::corrupt(format!("prefix index: chain of block {head} is broken at {at}")));
                }
                seen += 1;
                if seen > self.len {
                    return Err(Error::corrupt("prefix index: more blocks chained than committed"));
                }
                before = at;
                at = self.next[at as usize];
            }
            if self.previous[head as usize] != before {
                return Err(Error::corrupt(format!("prefix index: the chain of block {head} has another end")));
            }
        }
        let marked = self.next.iter().filter(|&&next| next != ABSENT).count();
        if seen != self.len || marked != self.len {
            return Err(Error::corrupt(format!(
                "prefix index: {} blocks counted, {seen} findable, {marked} marked",
                self.len
            )));
        }
        Ok(())
    }
}
