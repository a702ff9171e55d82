//! Split-KV: how the tokens of a decode batch are shared among the processors, so that one long sequence does not keep a
//! GPU waiting and partial results stay few.

use crate::error::{Error, Result};

/// Tokens of a tile: pieces are cut between tiles.
pub const TILE: u32 = 16;

/// One piece of one sequence, taken by one thread block per kv head.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Row of the batch.
    pub seq: i32,
    /// First token.
    pub start: i32,
    /// One past the last token.
    pub end: i32,
    /// Where the partial result goes; -1 when the piece is the whole sequence and writes the output itself.
    pub partial: i32,
}

/// A sequence whose output is merged from partial results `first..end`; from none for an empty sequence (zeros).
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Merge {
    /// Row of the batch.
    pub seq: i32,
    /// First partial result.
    pub first: i32,
    /// One past the last.
    pub end: i32,
}

/// The shares of one decode batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DecodeWork {
    /// The pieces, longest first: those started last are the shortest.
    pub pieces: Vec<Piece>,
    /// The sequences to merge, by row.
    pub merges: Vec<Merge>,
    /// Partial results in all.
    pub partials: u32,
}

/// Shares `seq_lens` tokens among `slots` processors. No piece is longer than the shortest length at which all pieces
/// fit the slots at once (but that is never under `min_tokens`); a sequence is cut into pieces of equal length. `window` keeps the last tokens alone (0: all). O(n log(longest)).
///
/// # Errors
/// [`Error::InvalidArgument`] for a negative length, or no slot.
pub fn decode(seq_lens: &[i32], slots: u32, min_tokens: u32, window: u32) -> Result<DecodeWork> {
    if slots == 0 {
        return Err(Error::invalid("num_slots", slots, "there must be at least one"));
    }
    if let Some((row, &length)) = seq_lens.iter().enumerate().find(|(_, length)| **length < 0) {
        return Err(Error::invalid("seq_lens", length, format!("row {row} has a negative length")));
    }
    // First tile and tiles of every sequence.
    let spans: Vec<(u32, u32)> = seq_lens
        .iter()
        .map(|&length| {
            let length = length as u32;
            let first = if window == 0 { 0 } else { length.saturating_sub(window) / TILE };
            (first, length.div_ceil(TILE) - first.min(length.div_ceil(TILE)))
        })
        .collect();
    let pieces_of = |share: u32| spans.iter().map(|&(_, tiles)| u64::from(tiles.div_ceil(share))).sum::<u64>();
    let longest = spans.iter().map(|&(_, tiles)| tiles).max().unwrap_or(0).max(1);
    let mut low = min_tokens.div_ceil(TILE).clamp(1, longest);
    let mut high = longest;
    while low < high {
        let middle = low + (high - low) / 2;
        if pieces_of(middle) <= u64::from(slots) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    let share = low;

    let mut work = DecodeWork::default();
    for (row, (&(first, tiles), &length)) in spans.iter().zip(seq_lens).enumerate() {
        let seq = row as i32;
        let start = if window == 0 { 0 } else { (length as u32).saturating_sub(window) };
        let count = tiles.div_ceil(share);
        if count != 1 {
            let first = work.partials as i32;
            work.partials += count;
            work.merges.push(Merge { seq, first, end: work.partials as i32 });
        }
        for piece in 0..count {
            // Of equal length to within a tile.
            let cut = |k: u32| first + (u64::from(tiles) * u64::from(k) / u64::from(count)) as u32;
            work.pieces.push(Piece {
                seq,
                start: (cut(piece) * TILE).max(start) as i32,
                end: (u64::from(cut(piece + 1)) * u64::from(TILE)).min(length as u64) as i32,
                partial: if count == 1 { -1 } else { (work.partials - count + piece) as i32 },
            });
        }
    }
    work.pieces.sort_by_key(|piece| std::cmp::Reverse(piece.end - piece.start));
    Ok(work)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_token_is_in_one_piece(
            lens in proptest::collection::vec(0i32..5_000, 0..20),
            slots in 1u32..300, min_tokens in 0u32..300, window in prop_oneof![Just(0u32), 1u32..3_000],
        ) {
            let work = decode(&lens, slots, min_tokens, window).unwrap();
            let mut partials = vec![0u32; work.partials as usize];
            for (row, &length) in lens.iter().enumerate() {
                let mut pieces: Vec<&Piece> = work.pieces.iter().filter(|p| p.seq == row as i32).collect();
                pieces.sort_by_key(|p| p.start);
                let mut at = if window == 0 { 0 } else { (length - window as i32).max(0) };
                for piece in &pieces {
                    prop_assert_eq!(piece.start, at);
                    prop_assert!(piece.end > piece.start);
                    prop_assert!(piece.end == length || piece.end % 16 == 0);
                    at = piece.end;
                    if piece.partial >= 0 {
                        partials[piece.partial as usize] += 1;
                    }
                }
                prop_assert_eq!(at, length);
                let merge = work.merges.iter().find(|m| m.seq == row as i32);
                match pieces.len() {
                    1 => prop_assert!(merge.is_none() && pieces[0].partial == -1),
                    n => {
                        let merge = merge.unwrap();
                        prop_assert_eq!((merge.end - merge.first) as usize, n);
                        for (k, piece) in pieces.iter().enumerate() {
                            prop_assert_eq!(piece.partial, merge.first + k as i32);
                        }
                    }
                }
            }
            prop_assert!(partials.iter().all(|&n| n == 1));
            let lengths: Vec<i32> = work.pieces.iter().map(|p| p.end - p.start).collect();
            prop_assert!(lengths.is_sorted_by(|a, b| a >= b));
            // Balanced: a longest piece one tile shorter would not fit the slots, or be under the least length.
            let whole = |share: i32| lens.iter().map(|&l| {
                let from = if window == 0 { 0 } else { (l - window as i32).max(0) / 16 };
                (l + 15) / 16 - from
            }).map(|tiles| (tiles + share - 1) / share).sum::<i32>();
            if let Some(share) = work.pieces.iter().map(|p| (p.end + 15) / 16 - p.start / 16).max()
                && share > 1
                && (share - 1) * 16 >= min_tokens as i32
            {
                prop_assert!(whole(share - 1) > slots as i32);
            }
        }
    }

    #[test]
    fn a_long_sequence_is_cut_and_short_ones_are_not() {
        let work = decode(&[8192, 64, 0], 8, 128, 0).unwrap();
        assert_eq!(work.partials, 7);
        assert_eq!(work.merges, [Merge { seq: 0, first: 0, end: 7 }, Merge { seq: 2, first: 7, end: 7 }]);
        assert_eq!(work.pieces.last(), Some(&Piece { seq: 1, start: 0, end: 64, partial: -1 }));
        assert!(work.pieces[..7].iter().all(|p| (1168..=1184).contains(&(p.end - p.start))));
    }

    #[test]
    fn a_window_starts_within_a_tile() {
        let work = decode(&[100], 1, 1, 30).unwrap();
        assert_eq!(work.pieces, [Piece { seq: 0, start: 70, end: 100, partial: -1 }]);
    }

    #[test]
    fn bad_lengths_are_refused() {
        assert!(decode(&[3, -1], 4, 1, 0).unwrap_err().to_string().contains("row 1"));
        assert!(decode(&[3], 0, 1, 0).is_err());
        assert_eq!(decode(&[], 4, 1, 0).unwrap(), DecodeWork::default());
        let most = decode(&[i32::MAX, i32::MAX], 264, 128, 0).unwrap();
        assert!(most.pieces.len() <= 264 && most.pieces.iter().any(|p| p.end == i32::MAX));
    }
}
