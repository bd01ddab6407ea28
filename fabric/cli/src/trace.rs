//! Request traces: one JSON object a line with `timestamp` (ms) and `hash_ids` (one per 512-token prefix block).

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use serde::Deserialize;
use thiserror::Error;

use crate::limits;

/// Tokens of one block in the published traces.
pub const TOKENS_PER_BLOCK: u64 = 512;

/// One request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// When it arrived, milliseconds since the trace's start.
    pub timestamp_ms: u64,
    /// One id a prefix block; equal ids mean the same prefix up to and including the block.
    pub hash_ids: Vec<u64>,
}

/// Why a trace cannot be replayed. Nothing is skipped: a trace is read whole before anything starts.
#[derive(Debug, Error)]
pub enum TraceError {
    /// The file cannot be opened.
    #[error("cannot open trace {path}")]
    Open {
        /// Path.
        path: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The file cannot be read.
    #[error("cannot read trace {path}, line {line}")]
    Read {
        /// Path.
        path: String,
        /// Line, from 1.
        line: usize,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A line is not a request.
    #[error("trace {path}, line {line}: {reason}")]
    Line {
        /// Path.
        path: String,
        /// Line, from 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// No request in the file.
    #[error("trace {path} holds no request")]
    Empty {
        /// Path.
        path: String,
    },
}

#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    hash_ids: Vec<u64>,
}

/// Reads the first `requests_max` requests of a trace, in file order. Empty lines are allowed, and fields that the
/// replay does not use too.
///
/// # Errors
/// [`TraceError`] names file, line and what is wrong.
pub fn read(path: &Path, requests_max: usize) -> Result<Vec<Request>, TraceError> {
    let name = path.display().to_string();
    let file = File::open(path).map_err(|source| TraceError::Open { path: name.clone(), source })?;
    parse(BufReader::new(file), &name, requests_max)
}

/// Reads requests from any source; `path` is for messages.
///
/// # Errors
/// As [`read`].
pub fn parse(mut source: impl BufRead, path: &str, requests_max: usize) -> Result<Vec<Request>, TraceError> {
    let mut requests = Vec::new();
    let mut bytes = Vec::new();
    let mut line = 0;
    while requests.len() < requests_max {
        line += 1;
        bytes.clear();
        let limit = limits::LINE_BYTES_MAX as u64 + 1;
        let read = source
            .by_ref()
            .take(limit)
            .read_until(b'\n', &mut bytes)
            .map_err(|source| TraceError::Read { path: path.into(), line, source })?;
        if read == 0 {
            break;
        }
        let bad = |reason: String| TraceError::Line { path: path.into(), line, reason };
        if bytes.len() > limits::LINE_BYTES_MAX {
            return Err(bad(format!("longer than {} bytes", limits::LINE_BYTES_MAX)));
        }
        if !bytes.iter().all(u8::is_ascii_whitespace) {
            requests.push(request(&bytes).map_err(bad)?);
        }
    }
    if requests.is_empty() {
        return Err(TraceError::Empty { path: path.into() });
    }
    Ok(requests)
}

fn request(bytes: &[u8]) -> Result<Request, String> {
    // The parser would take an array of the fields' values too, by position.
    if !bytes.trim_ascii_start().starts_with(b"{") {
        return Err("not a JSON object, which begins with {".into());
    }
    let line: Line = serde_json::from_slice(bytes).map_err(|error| {
        // The parser counts lines of its own input, which is always one here.
        let text = error.to_string();
        let text = text.split(" at line ").next().unwrap_or("malformed").to_owned();
        format!("{text} (column {})", error.column())
    })?;
    if !(0.0..=1e15).contains(&line.timestamp) {
        return Err(format!("timestamp {} is not a number of milliseconds since the start", line.timestamp));
    }
    if line.hash_ids.len() > limits::REQUEST_BLOCKS_MAX {
        return Err(format!(
            "{} hash_ids, more than the {} blocks that one request may have",
            line.hash_ids.len(),
            limits::REQUEST_BLOCKS_MAX
        ));
    }
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Checked to lie between 0 and 1e15.
    Ok(Request { timestamp_ms: line.timestamp as u64, hash_ids: line.hash_ids })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_text(text: &str) -> Result<Vec<Request>, TraceError> {
        parse(text.as_bytes(), "t.jsonl", usize::MAX)
    }

    #[test]
    fn requests_come_in_file_order() {
        let text = "{\"timestamp\": 5, \"input_length\": 9, \"output_length\": 1, \"hash_ids\": [0, 7]}\n\n\
                    {\"timestamp\": 2.5, \"hash_ids\": []}";
        let requests = parse_text(text).unwrap();
        assert_eq!(
            requests,
            vec![
                Request { timestamp_ms: 5, hash_ids: vec![0, 7] },
                Request { timestamp_ms: 2, hash_ids: vec![] }
            ]
        );
        assert_eq!(parse(text.as_bytes(), "t", 1).unwrap().len(), 1);
    }

    #[test]
    fn bad_lines_are_named() {
        let good = "{\"timestamp\": 5, \"hash_ids\": [0]}\n";
        for (bad, what) in [
            ("{\"timestamp\": 5}", "hash_ids"),
            ("{\"hash_ids\": [1]}", "timestamp"),
            ("{\"timestamp\": 5, \"hash_ids\": [1,", "EOF"),
            ("{\"timestamp\": 5, \"hash_ids\": [-1]}", "-1"),
            ("{\"timestamp\": 5, \"hash_ids\": [\"x\"]}", "string"),
            ("{\"timestamp\": -5, \"hash_ids\": [1]}", "timestamp -5"),
            ("{\"timestamp\": \"now\", \"hash_ids\": [1]}", "string"),
            ("nonsense", "not a JSON object"),
            ("[5, [1]]", "not a JSON object"),
            ("{\u{fffd}", "key must be a string"),
        ] {
            let error = parse_text(&format!("{good}{good}{bad}\n{good}")).unwrap_err().to_string();
            assert!(error.starts_with("trace t.jsonl, line 3: "), "{error}");
            assert!(error.contains(what), "{bad}: {error}");
            assert!(!error.contains("at line 1"), "{error}");
        }
    }

    #[test]
    fn too_long_lines_and_requests_are_refused() {
        let ids = vec!["1"; limits::REQUEST_BLOCKS_MAX + 1].join(",");
        let error =
            parse_text(&format!("{{\"timestamp\": 0, \"hash_ids\": [{ids}]}}")).unwrap_err().to_string();
        assert!(error.contains("65537 hash_ids"), "{error}");
        let error = parse_text(&" ".repeat(limits::LINE_BYTES_MAX + 5)).unwrap_err().to_string();
        assert!(error.contains("longer than"), "{error}");
    }

    #[test]
    fn an_empty_or_missing_trace_is_an_error() {
        assert!(matches!(parse_text("\n\n"), Err(TraceError::Empty { .. })));
        let error = read(Path::new("/nonexistent/trace.jsonl"), 1).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/trace.jsonl"));
    }
}
