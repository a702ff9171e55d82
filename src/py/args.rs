//! Arguments from Python: integers, token ids, batches of handles, buffers to write into.
//!
//! Every bad value is refused with a typed error that shows it. Input buffers are copied, so that nothing a caller's
//! thread writes meanwhile is seen twice with different values.

use pyo3::buffer::{Element, PyBuffer, PyUntypedBuffer};
use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyByteArray, PyBytes, PyList, PyString, PyTuple};

use super::error::{invalid_argument, invalid_type};
use super::handles::PySequence;
use crate::ids::BlockId;

/// What a value looks like in a message: its repr, cut short.
pub(super) fn shown(value: &Bound<'_, PyAny>) -> String {
    let full = value.repr().map_or_else(|_| "<unprintable>".to_owned(), |repr| repr.to_string());
    if full.chars().count() <= 60 {
        return full;
    }
    let head: String = full.chars().take(57).collect();
    format!("{head}...")
}

fn type_name(value: &Bound<'_, PyAny>) -> String {
    value.get_type().name().map_or_else(|_| "?".to_owned(), |name| name.to_string())
}

/// An integer between `least` and `most`.
pub(super) fn integer(name: &str, value: &Bound<'_, PyAny>, least: i64, most: i64) -> PyResult<i64> {
    if value.is_instance_of::<PyBool>() {
        return Err(invalid_type(format!("{name} = {}: must be an integer, not bool", shown(value))));
    }
    match value.extract::<i64>() {
        Ok(number) if (least..=most).contains(&number) => Ok(number),
        Ok(_) => Err(invalid_argument(format!("{name} = {}: must be between {least} and {most}", shown(value)))),
        Err(error) if error.is_instance_of::<PyOverflowError>(value.py()) => {
            Err(invalid_argument(format!("{name} = {}: must be between {least} and {most}", shown(value))))
        }
        Err(_) => Err(invalid_type(format!("{name} = {}: must be an integer, not {}", shown(value), type_name(value)))),
    }
}

/// An integer between `least` and 2^40: token and block counts.
pub(super) fn count(name: &str, value: &Bound<'_, PyAny>, least: i64) -> PyResult<usize> {
    integer(name, value, least, 1 << 40).map(|number| number as usize)
}

/// A finite number.
pub(super) fn number(name: &str, value: &Bound<'_, PyAny>) -> PyResult<f64> {
    if value.is_instance_of::<PyBool>() {
        return Err(invalid_type(format!("{name} = {}: must be a number, not bool", shown(value))));
    }
    match value.extract::<f64>() {
        Ok(number) if number.is_finite() => Ok(number),
        Ok(_) => Err(invalid_argument(format!("{name} = {}: must be a finite number", shown(value)))),
        Err(error) if error.is_instance_of::<PyOverflowError>(value.py()) => {
            Err(invalid_argument(format!("{name} = {}: must be a finite number", shown(value))))
        }
        Err(_) => Err(invalid_type(format!("{name} = {}: must be a number, not {}", shown(value), type_name(value)))),
    }
}

/// A number of seconds that is not negative, as milliseconds.
pub(super) fn milliseconds(name: &str, value: &Bound<'_, PyAny>) -> PyResult<u64> {
    let seconds = number(name, value)?;
    if (0.0..=1e15).contains(&seconds) {
        Ok((seconds * 1e3).round() as u64)
    } else {
        Err(invalid_argument(format!("{name} = {seconds}: must be a number of seconds between 0 and 1e15")))
    }
}

/// Text that can be encoded.
pub(super) fn text(name: &str, value: &Bound<'_, PyAny>) -> PyResult<String> {
    let Ok(string) = value.cast::<PyString>() else {
        return Err(invalid_type(format!("{name} = {}: must be str, not {}", shown(value), type_name(value))));
    };
    match string.extract::<String>() {
        Ok(text) => Ok(text),
        Err(_) => Err(invalid_argument(format!("{name} = {}: must be text that UTF-8 can encode", shown(value)))),
    }
}

/// Text, or the default where none is given.
pub(super) fn text_or(name: &str, value: Option<&Bound<'_, PyAny>>, default: &str) -> PyResult<String> {
    value.map_or_else(|| Ok(default.to_owned()), |value| text(name, value))
}

/// Whether a buffer's items are in this machine's byte order. A typed view does not tell.
fn is_native(buffer: &PyUntypedBuffer) -> bool {
    let foreign: &[u8] = if cfg!(target_endian = "little") { b">!" } else { b"<" };
    buffer.format().to_bytes().first().is_none_or(|first| !foreign.contains(first))
}

fn format_of(buffer: &PyUntypedBuffer) -> String {
    format!("{:?}", buffer.format().to_string_lossy())
}

/// A typed view of a one-dimensional buffer, if it is one.
fn vector<T: Element>(value: &Bound<'_, PyAny>) -> Option<PyBuffer<T>> {
    PyBuffer::<T>::get(value).ok().filter(|buffer| buffer.dimensions() == 1 && is_native(buffer))
}

fn read_as<T: Element, U>(
    buffer: &PyUntypedBuffer,
    py: Python<'_>,
    convert: impl Fn(T) -> U,
) -> PyResult<Option<Vec<U>>> {
    match buffer.as_typed::<T>() {
        Ok(typed) => Ok(Some(typed.to_vec(py)?.into_iter().map(convert).collect())),
        Err(_) => Ok(None),
    }
}

/// A one-dimensional array or sequence of integers, as `i128` so that no type overflows.
fn integers_wide(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<i128>> {
    let py = value.py();
    if let (Ok(buffer), false) = (PyUntypedBuffer::get(value), value.is_instance_of::<PyBytes>()) {
        if buffer.dimensions() != 1 {
            let shape = buffer.shape();
            return Err(invalid_argument(format!("{name} has shape {shape:?}: must be one-dimensional")));
        }
        if !is_native(&buffer) {
            return Err(invalid_type(format!(
                "{name} has dtype format {}: must be in native byte order",
                format_of(&buffer)
            )));
        }
        macro_rules! try_types {
            ($($kind:ty),*) => {
                $(if let Some(values) = read_as::<$kind, i128>(&buffer, py, i128::from)? {
                    return Ok(values);
                })*
            };
        }
        try_types!(i32, i64, u32, u64, i16, u16, i8, u8);
        let format = format_of(&buffer);
        return Err(invalid_type(format!("{name} has dtype format {format}: must be an integer array")));
    }
    if value.is_instance_of::<PyString>() || value.is_instance_of::<PyBytes>() {
        return Err(invalid_type(format!("{name} = {}: must be integers, not text", shown(value))));
    }
    let Ok(items) = value.try_iter() else {
        return Err(invalid_type(format!(
            "{name} = {}: must be an integer array or a sequence of integers, not {}",
            shown(value),
            type_name(value)
        )));
    };
    let mut values = Vec::with_capacity(value.len().unwrap_or(0).min(1 << 24));
    for (i, item) in items.enumerate() {
        values.push(i128::from(integer(&format!("{name}[{i}]"), &item?, i64::MIN, i64::MAX)?));
    }
    Ok(values)
}

/// Integers, each between `least` and `most`.
pub(super) fn integers(name: &str, value: &Bound<'_, PyAny>, least: i64, most: i64) -> PyResult<Vec<i64>> {
    if let Some(typed) = vector::<i64>(value) {
        let values = typed.to_vec(value.py())?;
        if let Some(i) = values.iter().position(|number| !(least..=most).contains(number)) {
            return Err(out_of_bounds(name, i, i128::from(values[i]), least, most));
        }
        return Ok(values);
    }
    let wide = integers_wide(name, value)?;
    let bounds = i128::from(least)..=i128::from(most);
    if let Some(i) = wide.iter().position(|number| !bounds.contains(number)) {
        return Err(out_of_bounds(name, i, wide[i], least, most));
    }
    Ok(wide.into_iter().map(|number| number as i64).collect())
}

fn out_of_bounds(name: &str, i: usize, value: i128, least: i64, most: i64) -> PyErr {
    invalid_argument(format!("{name}[{i}] = {value}: must be between {least} and {most}"))
}

/// Token ids: non-negative and below 2^32.
pub(super) fn tokens(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let most = i64::from(u32::MAX);
    let py = value.py();
    if let Some(typed) = vector::<i32>(value) {
        if let Some(source) = typed.as_slice_ptr() {
            // SAFETY: the buffer is held and C-contiguous with this many i32 items; attached, and copied at once.
            #[allow(unsafe_code)]
            let source = unsafe { source.as_ref() };
            // One pass: the sign bits of all are looked at together.
            let mut seen = 0i32;
            let values: Vec<u32> = source
                .iter()
                .map(|&token| {
                    seen |= token;
                    token as u32
                })
                .collect();
            if seen >= 0 {
                return Ok(values);
            }
        }
        let source = typed.to_vec(py)?;
        if let Some(i) = source.iter().position(|&token| token < 0) {
            return Err(out_of_bounds(name, i, i128::from(source[i]), 0, most));
        }
        return Ok(source.into_iter().map(|token| token as u32).collect());
    }
    Ok(integers(name, value, 0, most)?.into_iter().map(|token| token as u32).collect())
}

/// Runs `work` on token ids, in place where they come as a contiguous int32 array and as a copy otherwise.
pub(super) fn with_tokens<T>(
    name: &str,
    value: &Bound<'_, PyAny>,
    work: impl FnOnce(&[u32]) -> PyResult<T>,
) -> PyResult<T> {
    if let Some(typed) = vector::<i32>(value)
        && let Some(source) = typed.as_slice_ptr()
    {
        // SAFETY: the buffer is held and C-contiguous with this many i32 items, read as u32 of the same size. Attached
        // throughout; a thread that writes the array meanwhile all the same makes the answer wrong, not the memory.
        #[allow(unsafe_code)]
        let tokens = unsafe { std::slice::from_raw_parts(source.as_ptr().cast::<u32>(), source.len()) };
        if tokens.iter().fold(0, |seen, token| seen | token) >> 31 == 0 {
            return work(tokens);
        }
    }
    work(&tokens(name, value)?)
}

/// Block ids; range is the core's to check.
pub(super) fn blocks(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<BlockId>> {
    if let Some(typed) = vector::<i32>(value)
        && let Some(source) = typed.as_slice_ptr()
    {
        // SAFETY: the buffer is held and C-contiguous with this many i32 items; attached, and copied at once.
        #[allow(unsafe_code)]
        let source = unsafe { source.as_ref() };
        let ids: Vec<BlockId> = source.iter().map(|&id| BlockId(id as u32)).collect();
        if source.iter().fold(0, |seen, id| seen | id) >= 0 {
            return Ok(ids);
        }
    }
    let ids = integers(name, value, 0, i64::from(i32::MAX))?;
    Ok(ids.into_iter().map(|id| BlockId(id as u32)).collect())
}

/// One block id.
pub(super) fn block(name: &str, value: &Bound<'_, PyAny>) -> PyResult<BlockId> {
    integer(name, value, 0, i64::from(i32::MAX)).map(|id| BlockId(id as u32))
}

/// One handle: a `Sequence` (or `Pin`), or its integer.
pub(super) fn handle(name: &str, value: &Bound<'_, PyAny>) -> PyResult<i64> {
    if let Ok(sequence) = value.cast::<PySequence>() {
        return Ok(sequence.get().raw);
    }
    integer(name, value, i64::MIN, i64::MAX)
}

/// A batch: one `Sequence`, an int64 array of handles, or a sequence of either.
pub(super) fn batch(value: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    if let Some(typed) = vector::<i64>(value) {
        if let Some(source) = typed.as_slice_ptr() {
            // SAFETY: the buffer is held and C-contiguous with this many i64 items; attached, and copied at once.
            #[allow(unsafe_code)]
            return Ok(unsafe { source.as_ref() }.to_vec());
        }
        return typed.to_vec(value.py());
    }
    if let Ok(sequence) = value.cast::<PySequence>() {
        return Ok(vec![sequence.get().raw]);
    }
    if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        return value.try_iter()?.map(|item| handle("sequences", &item?)).collect();
    }
    integers("sequences", value, i64::MIN, i64::MAX)
}

/// One count for all of a batch, or one each.
pub(super) enum Counts {
    /// The same for all.
    Same(usize),
    /// One each.
    Each(Vec<usize>),
}

impl Counts {
    /// Reads an integer or `n` of them.
    pub(super) fn read(name: &'static str, value: &Bound<'_, PyAny>, n: usize) -> PyResult<Self> {
        if let Ok(number) = value.extract::<i64>()
            && !value.is_instance_of::<PyBool>()
            && (0..=1 << 40).contains(&number)
        {
            return Ok(Self::Same(number as usize));
        }
        let is_number = value.try_iter().is_err() && PyUntypedBuffer::get(value).is_err();
        if is_number {
            return count(name, value, 0).map(Self::Same);
        }
        let each = integers(name, value, 0, 1 << 40)?;
        if each.len() != n {
            return Err(invalid_argument(format!("{name} has {} values for {n} sequences", each.len())));
        }
        Ok(Self::Each(each.into_iter().map(|number| number as usize).collect()))
    }

    /// The count of sequence `i`.
    pub(super) fn get(&self, i: usize) -> usize {
        match self {
            Self::Same(number) => *number,
            Self::Each(each) => each[i],
        }
    }
}

/// A caller's array to write into.
pub(super) struct Output<T: Element> {
    buffer: PyBuffer<T>,
}

impl<T: Element> Output<T> {
    /// Checks that the array has the element type, `dimensions`, and can be written without a copy.
    pub(super) fn get(name: &str, value: &Bound<'_, PyAny>, dtype: &str, dimensions: usize) -> PyResult<Self> {
        let Ok(buffer) = PyBuffer::<T>::get(value) else {
            return Err(invalid_type(match PyUntypedBuffer::get(value) {
                Ok(other) => format!("{name} has dtype format {:?}: must be {dtype}", other.format().to_string_lossy()),
                Err(_) => format!("{name} = {}: must be a {dtype} array, not {}", shown(value), type_name(value)),
            }));
        };
        if !is_native(&buffer) {
            return Err(invalid_type(format!(
                "{name} has dtype format {}: must be {dtype} in native byte order",
                format_of(&buffer)
            )));
        }
        if buffer.dimensions() != dimensions {
            return Err(invalid_argument(format!(
                "{name} has shape {:?}: must have {dimensions} dimensions",
                buffer.shape()
            )));
        }
        if buffer.readonly() {
            return Err(invalid_argument(format!("{name} is read-only: must be writable")));
        }
        if !buffer.is_c_contiguous() {
            return Err(invalid_argument(format!("{name} has strides {:?}: must be C-contiguous", buffer.strides())));
        }
        Ok(Self { buffer })
    }

    /// Length of every dimension.
    pub(super) fn shape(&self) -> &[usize] {
        self.buffer.shape()
    }

    /// The items, row after row.
    pub(super) fn items(&mut self, _py: Python<'_>) -> &mut [T] {
        let (start, len) = (self.buffer.buf_ptr().cast::<T>(), self.buffer.item_count());
        if len == 0 {
            return &mut [];
        }
        // SAFETY: the buffer is held, writable, C-contiguous and of element type T (checked in `get`); attached, so no
        // Python code runs while the borrow of self lasts.
        #[allow(unsafe_code)]
        unsafe {
            std::slice::from_raw_parts_mut(start, len)
        }
    }
}

pub(super) fn numpy_array<'py>(
    py: Python<'py>,
    bytes: Bound<'py, PyByteArray>,
    dtype: &str,
) -> PyResult<Bound<'py, PyAny>> {
    static FROMBUFFER: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let frombuffer = FROMBUFFER
        .get_or_try_init(py, || py.import("numpy").and_then(|numpy| numpy.getattr("frombuffer")).map(Bound::unbind))?;
    frombuffer.bind(py).call1((bytes, dtype))
}

/// An int32 array of block ids.
pub(super) fn block_array<'py>(py: Python<'py>, ids: &[BlockId]) -> PyResult<Bound<'py, PyAny>> {
    let bytes: Vec<u8> = ids.iter().flat_map(|id| (id.0 as i32).to_ne_bytes()).collect();
    numpy_array(py, PyByteArray::new(py, &bytes), "int32")
}

/// An int64 array.
pub(super) fn int64_array<'py>(py: Python<'py>, values: &[i64]) -> PyResult<Bound<'py, PyAny>> {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
    numpy_array(py, PyByteArray::new(py, &bytes), "int64")
}

/// A salt as bytes; different kinds of salts never collide.
pub(super) fn salt(value: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<u8>> {
    let Some(value) = value else { return Ok(Vec::new()) };
    if value.is_instance_of::<PyString>() {
        return Ok([b"s", text("salt", value)?.as_bytes()].concat());
    }
    if let Ok(bytes) = value.cast::<PyBytes>() {
        return Ok([b"b", bytes.as_bytes()].concat());
    }
    if value.is_instance_of::<PyBool>() {
        return Err(invalid_type(format!("salt = {}: must be str, bytes or int", shown(value))));
    }
    match integer("salt", value, i64::MIN, i64::MAX) {
        Ok(number) => Ok([b"i".as_slice(), &number.to_le_bytes()].concat()),
        Err(_) => Err(invalid_type(format!("salt = {}: must be str, bytes or an int of 64 bits", shown(value)))),
    }
}
