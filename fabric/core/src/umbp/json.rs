//! JSON and text exactly as Python writes them: namespaces are hashes over such text, so every byte counts.

use core::fmt::Write as _;

use serde_json::{Map, Number, Value};
use thiserror::Error;

use super::limits::JSON_DEPTH_MAX;

/// Why a value cannot be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum JsonError {
    /// Nested deeper than [`JSON_DEPTH_MAX`].
    #[error("a value is nested deeper than {JSON_DEPTH_MAX}")]
    TooDeep,
}

/// The text of Python's `json.dumps(value, sort_keys=True, separators=(",", ":"))`: keys in order of code points, no
/// spaces, everything outside printable ASCII escaped, floats as `repr` writes them.
///
/// # Errors
/// [`JsonError::TooDeep`].
pub fn python_json(value: &Value) -> Result<String, JsonError> {
    let mut out = String::new();
    write_value(&mut out, value, JSON_DEPTH_MAX)?;
    Ok(out)
}

fn write_value(out: &mut String, value: &Value, depth: usize) -> Result<(), JsonError> {
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(true) => out.push_str("true"),
        Value::Bool(false) => out.push_str("false"),
        Value::Number(number) => write_number(out, number),
        Value::String(text) => write_string(out, text),
        Value::Array(items) => {
            let depth = depth.checked_sub(1).ok_or(JsonError::TooDeep)?;
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                write_value(out, item, depth)?;
            }
            out.push(']');
        }
        Value::Object(map) => write_object(out, map, depth.checked_sub(1).ok_or(JsonError::TooDeep)?)?,
    }
    Ok(())
}

fn write_object(out: &mut String, map: &Map<String, Value>, depth: usize) -> Result<(), JsonError> {
    // Sorted here, because the map keeps insertion order when some crate of the build asks serde_json for that. The
    // order of UTF-8 bytes is the order of code points.
    let mut entries: Vec<_> = map.iter().collect();
    entries.sort_unstable_by(|left, right| left.0.cmp(right.0));
    out.push('{');
    for (index, (key, item)) in entries.into_iter().enumerate() {
        if index > 0 {
            out.push(',');
        }
        write_string(out, key);
        out.push(':');
        write_value(out, item, depth)?;
    }
    out.push('}');
    Ok(())
}

fn write_string(out: &mut String, text: &str) {
    out.push('"');
    for character in text.chars() {
        match character {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            ' '..='~' => out.push(character),
            _ => {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    // Writing to a String cannot fail.
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
        }
    }
    out.push('"');
}

fn write_number(out: &mut String, number: &Number) {
    match number.as_f64() {
        Some(value) if number.is_f64() => write_float(out, value),
        _ => {
            let _ = write!(out, "{number}");
        }
    }
}

/// `repr` of a float: the shortest digits that read back, with an exponent below 1e-4 and from 1e16 on.
fn write_float(out: &mut String, value: f64) {
    let scientific = format!("{value:e}");
    let Some((mantissa, exponent)) = scientific.split_once('e') else {
        out.push_str(&scientific);
        return;
    };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{value}");
        out.push_str(&plain);
        if !plain.contains('.') {
            out.push_str(".0");
        }
        return;
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    let _ = write!(out, "{mantissa}e{sign}{:02}", exponent.unsigned_abs());
}

/// Python's `repr` of a text, as its error messages quote names. Printable characters outside ASCII are kept.
#[must_use]
pub fn python_repr(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::with_capacity(text.len() + 2);
    out.push(quote);
    for character in text.chars() {
        match character {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            _ if character == quote => {
                out.push('\\');
                out.push(character);
            }
            _ if character.is_control() => {
                let _ = write!(out, "\\x{:02x}", u32::from(character));
            }
            _ => out.push(character),
        }
    }
    out.push(quote);
    out
}

/// `repr` of a list of texts.
pub(super) fn python_repr_list<'a>(items: impl IntoIterator<Item = &'a str>) -> String {
    let quoted: Vec<_> = items.into_iter().map(python_repr).collect();
    format!("[{}]", quoted.join(", "))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn floats_are_written_as_python_writes_them() {
        for (value, text) in [
            (0.5, "0.5"),
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e16, "1.5e+16"),
            (1e-4, "0.0001"),
            (1.25e-5, "1.25e-05"),
            (5e-324, "5e-324"),
            (1e100, "1e+100"),
            (0.1 + 0.2, "0.30000000000000004"),
        ] {
            assert_eq!(python_json(&json!(value)).unwrap(), text);
        }
    }

    #[test]
    fn text_outside_printable_ascii_is_escaped() {
        let value = json!({"é": "\u{1F600}", "a": "\u{7f}\"\\\n\r\t\u{8}\u{c}\u{1}/", "Z": [1, -2, null, true, false, {}]});
        assert_eq!(
            python_json(&value).unwrap(),
            r#"{"Z":[1,-2,null,true,false,{}],"a":"\u007f\"\\\n\r\t\b\f\u0001/","\u00e9":"\ud83d\ude00"}"#
        );
    }

    #[test]
    fn deep_values_are_refused_before_the_stack_is() {
        let deep = (0..JSON_DEPTH_MAX).fold(json!(1), |value, _| json!([value]));
        assert!(python_json(&deep).is_ok());
        assert_eq!(python_json(&json!([deep])), Err(JsonError::TooDeep));
    }

    #[test]
    fn names_are_quoted_as_python_quotes_them() {
        assert_eq!(python_repr("a"), "'a'");
        assert_eq!(python_repr("it's"), "\"it's\"");
        assert_eq!(python_repr("'\""), "'\\'\"'");
        assert_eq!(python_repr("a\\\n\u{1}"), "'a\\\\\\n\\x01'");
    }
}
