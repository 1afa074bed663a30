//! Columns that line up.

use super::{Line, Piece, Tone};

/// Columns are this far apart.
const GAP: usize = 2;
/// No column is made narrower than this.
const LEAST: usize = 10;

/// A column.
#[derive(Clone, Copy, Debug)]
pub(super) struct Column {
    name: &'static str,
    right: bool,
}

/// One of words; it is cut where there is no room.
pub(super) const fn left(name: &'static str) -> Column {
    Column { name, right: false }
}

/// One of numbers, which are never cut.
pub(super) const fn right(name: &'static str) -> Column {
    Column { name, right: true }
}

/// The rows under their columns; nothing for no rows.
pub(super) fn table(columns: &[Column], rows: Vec<Vec<Piece>>, width: usize) -> Vec<Line> {
    if rows.is_empty() {
        return Vec::new();
    }
    let head = columns.iter().map(|column| (column.name.to_owned(), Tone::Head)).collect();
    let mut all: Vec<Vec<Piece>> = vec![head];
    all.extend(rows);
    let widest = |ix: usize| all.iter().map(|row| length(&row[ix].0)).max().unwrap_or(0);
    let mut widths: Vec<usize> = (0..columns.len()).map(widest).collect();
    fit(&mut widths, columns, width);
    let line = |row: Vec<Piece>| {
        let mut line = Line::new();
        for (ix, ((text, tone), column)) in row.into_iter().zip(columns).enumerate() {
            let text = cut(text, widths[ix]);
            let room = " ".repeat(widths[ix].saturating_sub(length(&text)));
            let gap = if ix == 0 { "" } else { &" ".repeat(GAP) };
            let text = if column.right {
                format!("{gap}{room}{text}")
            } else if ix + 1 == columns.len() {
                // Nothing follows.
                format!("{gap}{text}")
            } else {
                format!("{gap}{text}{room}")
            };
            line.push((text, tone));
        }
        line
    };
    all.into_iter().map(line).collect()
}

/// Takes from the widest columns of words until all fit.
fn fit(widths: &mut [usize], columns: &[Column], width: usize) {
    let gaps = GAP * columns.len().saturating_sub(1);
    while widths.iter().sum::<usize>() + gaps > width {
        let words = widths.iter_mut().zip(columns).filter(|(_, column)| !column.right);
        match words.map(|(width, _)| width).max() {
            Some(widest) if *widest > LEAST => *widest -= 1,
            _ => return,
        }
    }
}

fn length(text: &str) -> usize {
    text.chars().count()
}

fn cut(text: String, width: usize) -> String {
    if length(&text) <= width {
        return text;
    }
    let mut short: String = text.chars().take(width.saturating_sub(1)).collect();
    short.push('…');
    short
}
