//! `Prefix` and `MissReport`.

use pyo3::prelude::*;

use super::args;
use crate::prefix::{HashKind, Miss, Prefix};

/// A prompt with its chained block hashes, computed once.
#[pyclass(frozen, name = "Prefix", module = "kvcatch")]
pub(super) struct PyPrefix {
    pub(super) inner: Prefix,
}

/// A prefix argument: a `Prefix` as it is, or token ids to hash with the pool's settings.
pub(super) fn prefix_of(
    tokens: &Bound<'_, PyAny>,
    salt: Option<&Bound<'_, PyAny>>,
    block_size: usize,
    kind: HashKind,
) -> PyResult<Prefix> {
    if let Ok(prefix) = tokens.cast::<PyPrefix>() {
        if salt.is_some() {
            return Err(super::error::invalid_argument("salt: a Prefix has its own salt already".into()));
        }
        return Ok(prefix.get().inner.clone());
    }
    let salt = args::salt(salt)?;
    let tokens_read = args::tokens("tokens", tokens)?;
    let py = tokens.py();
    Ok(py.detach(|| Prefix::new(tokens_read, block_size, kind, &salt))?)
}

#[pymethods]
impl PyPrefix {
    #[new]
    #[pyo3(signature = (tokens, block_size = None, *, salt = None, hash = None), text_signature = "(tokens, block_size=16, *, salt=None, hash='xxh3')")]
    fn new(
        tokens: &Bound<'_, PyAny>,
        block_size: Option<&Bound<'_, PyAny>>,
        salt: Option<&Bound<'_, PyAny>>,
        hash: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let block_size = block_size.map(|value| args::integer("block_size", value, 1, 1 << 16)).transpose()?;
        let hash = hash.map(|value| args::text("hash", value)).transpose()?;
        if let Ok(prefix) = tokens.cast::<Self>() {
            let inner = &prefix.get().inner;
            let other_size = block_size.filter(|&size| size != inner.block_size() as i64);
            let other_hash = hash.filter(|hash| hash != inner.kind().name());
            if let Some(other) = other_size.map(|size| size.to_string()).or(other_hash) {
                let reason = format!("this Prefix has blocks of {} and {}", inner.block_size(), inner.kind().name());
                return Err(super::error::invalid_argument(format!("{other}: {reason}; hash the tokens anew")));
            }
            return Ok(Self { inner: prefix_of(tokens, salt, inner.block_size(), inner.kind())? });
        }
        let kind = HashKind::by_name(hash.as_deref().unwrap_or("xxh3"))?;
        let block_size = block_size.unwrap_or(16);
        Ok(Self { inner: prefix_of(tokens, salt, block_size as usize, kind)? })
    }

    #[getter]
    fn num_tokens(&self) -> usize {
        self.inner.tokens().len()
    }

    #[getter]
    fn num_full_blocks(&self) -> usize {
        self.inner.hashes().len()
    }

    fn block_hashes(&self) -> Vec<u128> {
        self.inner.hashes().to_vec()
    }

    fn __len__(&self) -> usize {
        self.inner.tokens().len()
    }

    fn __repr__(&self) -> String {
        format!(
            "<Prefix: {} tokens, {} full blocks of {}, {}>",
            self.inner.tokens().len(),
            self.inner.hashes().len(),
            self.inner.block_size(),
            self.inner.kind().name()
        )
    }
}

/// Why a prefix lookup stopped where it did.
#[pyclass(frozen, name = "MissReport", module = "kvcatch")]
pub(super) struct PyMissReport {
    pub(super) miss: Miss,
    pub(super) num_tokens: usize,
}

#[pymethods]
impl PyMissReport {
    #[getter]
    fn hit_tokens(&self) -> usize {
        self.miss.hit_tokens
    }

    #[getter]
    fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    #[getter]
    fn reason(&self) -> &'static str {
        self.miss.reason.name()
    }

    #[getter]
    fn block_index(&self) -> usize {
        self.miss.block_index
    }

    #[getter]
    fn neighbour_block(&self) -> Option<u32> {
        self.miss.neighbour.map(|(id, _)| id.0)
    }

    #[getter]
    fn diverges_at(&self) -> Option<usize> {
        self.miss.neighbour.map(|(_, at)| at)
    }

    fn __repr__(&self) -> String {
        let near = self
            .miss
            .neighbour
            .map_or_else(String::new, |(id, at)| format!("; block {} is nearest and differs at token {at}", id.0));
        let (hit, total, reason) = (self.miss.hit_tokens, self.num_tokens, self.miss.reason.name());
        format!("<MissReport: {hit} of {total} tokens hit, {reason} at block {}{near}>", self.miss.block_index)
    }
}
