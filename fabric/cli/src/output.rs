//! What commands print: aligned tables for people, one JSON object a line for scripts.

use std::io::{self, Write};

use serde_json::Value;

/// Prints events either for people or for scripts.
#[derive(Clone, Copy, Debug)]
pub struct Printer {
    /// Whether `--json` was given.
    pub json: bool,
}

impl Printer {
    /// Prints one JSON object on a line of its own, when `--json` was given.
    ///
    /// # Errors
    /// Those of standard output; a closed pipe among them.
    pub fn event(self, value: &Value) -> io::Result<()> {
        if self.json {
            line(&value.to_string())?;
        }
        Ok(())
    }

    /// Prints text for people, unless `--json` was given.
    ///
    /// # Errors
    /// As [`Printer::event`].
    pub fn text(self, text: &str) -> io::Result<()> {
        if !self.json {
            line(text)?;
        }
        Ok(())
    }
}

fn line(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.write_all(b"\n")?;
    out.flush()
}

/// A text table: the first column left-aligned, columns that hold only numbers right-aligned.
#[derive(Clone, Debug, Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these column names.
    pub fn new<S: Into<String>>(header: impl IntoIterator<Item = S>) -> Self {
        Self { rows: vec![header.into_iter().map(Into::into).collect()] }
    }

    /// Adds a row.
    pub fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }

    /// The table as text, without a last newline.
    pub fn render(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let cell = |row: &Vec<String>, column: usize| row.get(column).cloned().unwrap_or_default();
        let width: Vec<usize> = (0..columns)
            .map(|column| self.rows.iter().map(|row| cell(row, column).chars().count()).max().unwrap_or(0))
            .collect();
        let is_number: Vec<bool> = (0..columns)
            .map(|column| {
                let mut body = self.rows.iter().skip(1).map(|row| cell(row, column)).peekable();
                body.peek().is_some() && body.all(|text| is_numeric(&text))
            })
            .collect();
        let lines: Vec<String> = self
            .rows
            .iter()
            .map(|row| {
                let cells = width.iter().zip(&is_number).enumerate().map(|(column, (width, number))| {
                    let text = cell(row, column);
                    if *number {
                        format!("{text:>width$}")
                    } else {
                        format!("{text:<width$}")
                    }
                });
                cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
            })
            .collect();
        lines.join("\n")
    }
}

fn is_numeric(text: &str) -> bool {
    text == "-" || (!text.is_empty() && text.chars().all(|c| c.is_ascii_digit() || c == '.' || c == ','))
}

/// A count of bytes for people, in decimal units.
pub fn bytes_text(bytes: u64) -> String {
    #[allow(clippy::cast_precision_loss)] // One decimal is printed.
    let value = bytes as f64;
    match bytes {
        0..=9_999 => format!("{bytes} B"),
        10_000..=999_999 => format!("{:.1} kB", value / 1e3),
        1_000_000..=999_999_999 => format!("{:.1} MB", value / 1e6),
        _ => format!("{:.2} GB", value / 1e9),
    }
}

/// A rate for a table: GB/s, or a dash where nothing was measured.
pub fn gbps_text(gbps: f64) -> String {
    if gbps > 0.0 {
        format!("{gbps:.2}")
    } else {
        "-".into()
    }
}

/// Microseconds for a table, or a dash where nothing was measured.
pub fn micros_text(micros: u64) -> String {
    if micros == 0 {
        "-".into()
    } else {
        micros.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align_and_numbers_go_right() {
        let mut table = Table::new(["transport", "blocks", "note"]);
        table.row(["shm", "512", "fine"]);
        table.row(["tcp", "-", ""]);
        assert_eq!(table.render(), "transport  blocks  note\nshm           512  fine\ntcp             -");
    }

    #[test]
    fn units_are_decimal() {
        assert_eq!(bytes_text(512), "512 B");
        assert_eq!(bytes_text(67_108_864), "67.1 MB");
        assert_eq!(bytes_text(1_500_000_000), "1.50 GB");
        assert_eq!((gbps_text(0.0), gbps_text(1.234)), ("-".into(), "1.23".into()));
        assert_eq!((micros_text(0), micros_text(7)), ("-".into(), "7".into()));
    }
}
