//! stand-in
use super::Lru;
/// stand-in
pub type Slru = Lru;
