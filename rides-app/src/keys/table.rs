//! A table of text: columns as wide as they need to be, the last one as wide as there is room.

use std::env;

use super::text::shortened;

/// How wide the text may be: as `COLUMNS` says, or 120.
pub(super) fn width() -> usize {
    let columns = env::var("COLUMNS").ok();
    let columns = columns.and_then(|columns| columns.parse().ok());
    columns.unwrap_or(120).max(60)
}

/// The least room in which the last column says anything.
const USEFUL: usize = 10;

/// Between two columns.
const GAP: &str = "  ";

/// How a column is aligned.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Align {
    Left,
    Right,
}

/// Lays out rows under their heads. The last column is cut where the line ends, and left out where
/// there is no room for it.
pub(super) fn table<const N: usize>(
    heads: [(&str, Align); N],
    rows: &[[String; N]],
    width: usize,
) -> String {
    let longest = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.fold(heads[column].0.chars().count(), usize::max)
    };
    let widths: [usize; N] = std::array::from_fn(longest);
    let before: usize = widths[..N - 1].iter().map(|width| width + GAP.len()).sum();
    let room = width.saturating_sub(before);

    let mut text = String::new();
    let heads_row = heads.map(|(head, _)| head.to_owned());
    for row in std::iter::once(&heads_row).chain(rows) {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let width = widths[column];
            if column == N - 1 && width > room {
                if room >= USEFUL {
                    line.push_str(&shortened(cell, room));
                }
                continue;
            }
            match heads[column].1 {
                Align::Left => line.push_str(&format!("{cell:<width$}{GAP}")),
                Align::Right => line.push_str(&format!("{cell:>width$}{GAP}")),
            }
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_the_last_one_is_cut() {
        let rows = [
            ["a".to_owned(), "1".to_owned(), "short".to_owned()],
            [
                "bbb".to_owned(),
                "20".to_owned(),
                "much too long for it".to_owned(),
            ],
        ];
        let heads = [
            ("NAME", Align::Left),
            ("N", Align::Right),
            ("NOTE", Align::Left),
        ];
        let wide = "NAME   N  NOTE\na      1  short\nbbb   20  much too long for it\n";
        assert_eq!(table(heads, &rows, 80), wide);
        let narrow = "NAME   N  NOTE\na      1  short\nbbb   20  much too lo…\n";
        assert_eq!(table(heads, &rows, 22), narrow);
        assert_eq!(table(heads, &rows, 15), "NAME   N\na      1\nbbb   20\n");
    }
}
