//! Where keys and values lie in a pool's bytes: the numbers of `kernels/layout.py`, checked against the buffer.

use std::ptr::NonNull;

use super::convert::Element;
use crate::error::{Error, Result};

/// What an e4m3 element is multiplied by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scales {
    /// No scales.
    None,
    /// One per (token, kv head), written with the token.
    Token,
    /// One per (layer, K or V, kv head), fixed.
    Head,
    /// One per (block, kv head).
    Block,
}

impl Scales {
    /// The kind of a name as `kernels/layout.py` spells it.
    pub fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "none" => Self::None,
            "token" => Self::Token,
            "head" => Self::Head,
            "block" => Self::Block,
            _ => return None,
        })
    }
}

/// Distances in bytes, as `Strides` of `kernels/layout.py`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strides {
    /// From a block to the next.
    pub block: usize,
    /// From a layer to the next.
    pub layer: usize,
    /// From keys to values.
    pub kv: usize,
    /// From a kv head to the next.
    pub head: usize,
    /// From a token to the next.
    pub token: usize,
    /// From the start of an area to its first scale.
    pub scale: usize,
    /// From a head's scales to the next head's.
    pub scale_head: usize,
    /// From a token's scale to the next token's.
    pub scale_token: usize,
}

/// Shape of a pool and distances in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Blocks of the pool.
    pub num_blocks: usize,
    /// Layers a block holds.
    pub num_layers: usize,
    /// Kv heads.
    pub num_kv_heads: usize,
    /// Elements of a key or value of one head.
    pub head_dim: usize,
    /// Tokens of a block.
    pub block_size: usize,
    /// Type of the elements.
    pub element: Element,
    /// Kind of their scales.
    pub scales: Scales,
    /// Distances.
    pub strides: Strides,
}

/// Most elements of a head: what the tiles of a worker are sized for.
pub const MAX_HEAD_DIM: usize = 1024;
const MOST: usize = 1 << 46;

impl Layout {
    /// Refuses shapes and distances with which two elements would share bytes or arithmetic would overflow.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] with the number.
    pub fn check(self) -> Result<Self> {
        let sizes = [
            ("num_blocks", self.num_blocks, MOST),
            ("num_layers", self.num_layers, 1 << 31),
            ("num_kv_heads", self.num_kv_heads, 1 << 31),
            ("head_dim", self.head_dim, MAX_HEAD_DIM),
            ("block_size", self.block_size, 1 << 31),
        ];
        for (name, size, most) in sizes {
            if !(1..=most).contains(&size) {
                return Err(Error::invalid(name, size, format!("must be between 1 and {most}")));
            }
        }
        if (self.element == Element::E4m3) == (self.scales == Scales::None) {
            return Err(Error::invalid(
                "scales",
                format!("{:?}", self.scales),
                "e4m3 has scales, other types have none",
            ));
        }
        let s = self.strides;
        let row = self.head_dim * self.element.bytes();
        let data = self.area_end();
        let area = self.scales_end().unwrap_or(data);
        // Innermost first: each distance must pass over all that lies within it; keys and values of all layers of a
        // block (or of all blocks of a layer) lie side by side.
        let nested = s.token >= row
            && covers(s.head, self.block_size - 1, s.token, row)
            && s.kv >= area
            && match (self.num_layers, self.is_block_major()) {
                (1, _) => s.block >= self.layer_bytes(),
                (layers, true) => s.layer == self.layer_bytes() && covers(s.block, layers, s.layer, 0),
                (_, false) => s.block == self.layer_bytes() && covers(s.layer, self.num_blocks, s.block, 0),
            };
        let scales_fit = match self.scales {
            Scales::None | Scales::Head => true,
            Scales::Block => s.scale >= data && s.scale_head >= 4 && s.scale_token == 0,
            Scales::Token => {
                s.scale >= data && s.scale_token >= 4 && covers(s.scale_head, self.block_size - 1, s.scale_token, 4)
            }
        };
        let sums = [s.block, s.layer, s.kv, s.head, s.token, s.scale, s.scale_head, s.scale_token];
        if !nested || !scales_fit || sums.iter().any(|&stride| stride > MOST) || self.bytes() > MOST {
            return Err(Error::invalid("strides", format!("{s:?}"), "parts of the pool would overlap or pass 64 TiB"));
        }
        Ok(self)
    }

    /// Bytes from the start of an area to the end of its elements.
    fn area_end(&self) -> usize {
        let s = self.strides;
        let row = self.head_dim * self.element.bytes();
        last(self.num_kv_heads, s.head).saturating_add(last(self.block_size, s.token)).saturating_add(row)
    }

    /// Bytes from the start of an area to the end of its scales, where it has any.
    fn scales_end(&self) -> Option<usize> {
        let s = self.strides;
        let tokens = match self.scales {
            Scales::None | Scales::Head => return None,
            Scales::Token => last(self.block_size, s.scale_token),
            Scales::Block => 0,
        };
        Some(s.scale.saturating_add(last(self.num_kv_heads, s.scale_head)).saturating_add(tokens).saturating_add(4))
    }

    /// Bytes of the pool.
    pub fn bytes(&self) -> usize {
        let s = self.strides;
        last(self.num_blocks, s.block).saturating_add(last(self.num_layers, s.layer)).saturating_add(self.layer_bytes())
    }

    /// Bytes of the keys and values of one layer in one block, padding included.
    pub(super) fn layer_bytes(&self) -> usize {
        self.strides.kv.saturating_mul(2)
    }

    /// Whether a block is one run of bytes.
    pub(super) fn is_block_major(&self) -> bool {
        self.num_layers == 1 || self.strides.layer < self.strides.block
    }
}

fn last(n: usize, stride: usize) -> usize {
    (n - 1).saturating_mul(stride)
}

fn covers(outer: usize, steps: usize, inner: usize, end: usize) -> bool {
    outer >= steps.saturating_mul(inner).saturating_add(end)
}

/// The bytes of a pool. Copies of it point to the same bytes.
#[derive(Clone, Copy, Debug)]
pub struct Pool<'a> {
    /// Shape and distances.
    pub layout: &'a Layout,
    base: NonNull<u8>,
    /// Scales `[num_layers][2][num_kv_heads]` where the layout keeps them outside.
    head_scales: Option<&'a [f32]>,
}

// SAFETY: a pool only points at bytes that its maker keeps valid; who reads and writes what when is the kernels' to
// order.
#[allow(unsafe_code)]
unsafe impl Send for Pool<'_> {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for Pool<'_> {}

impl<'a> Pool<'a> {
    /// A pool over `len` bytes at `base`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: another number of bytes, or head scales missing, unasked for or of another number.
    ///
    /// # Safety
    ///
    /// The bytes stay valid for `'a`, for writes too if a call that writes is given this pool; nothing else writes them
    /// while a kernel runs.
    #[allow(unsafe_code)]
    pub unsafe fn new(
        layout: &'a Layout,
        base: NonNull<u8>,
        len: usize,
        head_scales: Option<&'a [f32]>,
    ) -> Result<Self> {
        let wanted = if layout.scales == Scales::Head { 2 * layout.num_layers * layout.num_kv_heads } else { 0 };
        let given = head_scales.map_or(0, <[f32]>::len);
        if given != wanted {
            return Err(Error::invalid("head_scales", given, format!("{wanted} scales are needed")));
        }
        // SAFETY: the caller's.
        Ok(Self { head_scales, ..unsafe { Self::of_bytes(layout, base, len) }? })
    }

    /// A pool whose elements are of no interest, only its blocks' bytes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: another number of bytes.
    ///
    /// # Safety
    ///
    /// As [`Pool::new`].
    #[allow(unsafe_code)]
    pub unsafe fn of_bytes(layout: &'a Layout, base: NonNull<u8>, len: usize) -> Result<Self> {
        let needed = layout.bytes();
        if len != needed {
            return Err(Error::invalid("pool", len, format!("{needed} bytes are needed")));
        }
        Ok(Self { layout, base, head_scales: None })
    }

    /// First byte.
    pub(super) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Address range of the pool.
    pub(super) fn range(&self) -> std::ops::Range<usize> {
        let start = self.base() as usize;
        start..start + self.layout.bytes()
    }

    /// Where the keys (`kv` 0) or values (1) of one layer and head start in block 0.
    pub(super) fn head(&self, layer: usize, kv: usize, head: usize) -> *mut u8 {
        let s = self.layout.strides;
        debug_assert!(layer < self.layout.num_layers && kv < 2 && head < self.layout.num_kv_heads);
        self.base().wrapping_add(layer * s.layer + kv * s.kv + head * s.head)
    }

    /// Where the scales of one layer and head start in block 0.
    pub(super) fn scales(&self, layer: usize, kv: usize, head: usize) -> *mut u8 {
        let s = self.layout.strides;
        self.base().wrapping_add(layer * s.layer + kv * s.kv + s.scale + head * s.scale_head)
    }

    /// The fixed scale of a (layer, K or V, kv head); 1 where there is none.
    pub(super) fn head_scale(&self, layer: usize, kv: usize, head: usize) -> f32 {
        self.head_scales.map_or(1.0, |scales| scales[(layer * 2 + kv) * self.layout.num_kv_heads + head])
    }
}
