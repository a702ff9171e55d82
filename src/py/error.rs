//! Core errors as the classes of `kvcatch.errors`.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyModule;

use crate::error::Error;

fn class<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module = MODULE.get_or_try_init(py, || py.import("kvcatch.errors").map(Bound::unbind))?;
    module.bind(py).getattr(name)
}

fn raised(name: &str, message: String) -> PyErr {
    Python::attach(|py| match class(py, name).and_then(|class| class.call1((message,))) {
        Ok(instance) => PyErr::from_value(instance),
        Err(error) => error,
    })
}

/// `InvalidType`: the argument is of the wrong type.
pub(super) fn invalid_type(message: String) -> PyErr {
    raised("InvalidType", message)
}

/// `InvalidArgument`: the argument's value cannot be.
pub(super) fn invalid_argument(message: String) -> PyErr {
    raised("InvalidArgument", message)
}

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        match error {
            Error::OutOfBlocks { shortage: s, .. } => Python::attach(|py| {
                let fields = (message, s.required, s.free, s.cached, s.reserved, s.largest_run);
                match class(py, "OutOfBlocks").and_then(|class| class.call1(fields)) {
                    Ok(instance) => PyErr::from_value(instance),
                    Err(error) => error,
                }
            }),
            Error::InvalidArgument { .. } => raised("InvalidArgument", message),
            Error::StaleHandle { .. } => raised("StaleHandle", message),
            Error::DoubleFree { .. } => raised("DoubleFree", message),
            Error::StalePlan { .. } => raised("StalePlan", message),
            Error::Corrupt(_) => raised("CorruptPool", message),
        }
    }
}
