//! The name that was probably meant.

/// The candidate that `name` is most likely a misspelling of, if any is close enough.
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let name: Vec<char> = name.chars().flat_map(char::to_lowercase).collect();
    // Long texts are not misspelt keys, and the distance is quadratic in their length.
    if name.is_empty() || name.len() > 64 {
        return None;
    }
    let mut best: Option<(usize, &str)> = None;
    for candidate in candidates {
        let letters: Vec<char> = candidate.chars().flat_map(char::to_lowercase).collect();
        if letters.len().abs_diff(name.len()) > 4 {
            continue;
        }
        let distance = distance(&name, &letters);
        let allowed = (name.len().max(letters.len()) / 3).max(1);
        if distance <= allowed && best.is_none_or(|(least, _)| distance < least) {
            best = Some((distance, candidate));
        }
    }
    best.map(|(_, candidate)| candidate)
}

/// Edits between two words; two letters that changed places are one edit.
fn distance(a: &[char], b: &[char]) -> usize {
    let mut before: Vec<usize> = vec![0; b.len() + 1];
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut row = vec![i + 1; b.len() + 1];
        for (j, y) in b.iter().enumerate() {
            let change = last[j] + usize::from(x != y);
            row[j + 1] = change.min(last[j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && *x == b[j - 1] && a[i - 1] == *y {
                row[j + 1] = row[j + 1].min(before[j - 1] + 1);
            }
        }
        before = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

#[cfg(test)]
mod tests {
    use super::nearest;

    #[test]
    fn close_names_are_found_and_far_ones_are_not() {
        let keys = ["bind", "name", "timeouts", "trusted_proxies", "max_in_flight"];
        for (written, meant) in [
            ("bnd", Some("bind")),
            ("bidn", Some("bind")),
            ("Bind", Some("bind")),
            ("timeout", Some("timeouts")),
            ("max_inflight", Some("max_in_flight")),
            ("trusted_proxy", Some("trusted_proxies")),
            ("address", None),
            ("x", None),
            ("", None),
        ] {
            assert_eq!(nearest(written, keys), meant, "{written}");
        }
    }
}
