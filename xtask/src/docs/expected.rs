//! Whether a command has printed what its page says. `…` stands for anything within a line; a
//! line that is `…` alone, for any number of lines.

const ANYTHING: char = '…';

/// Whether `output` is what `expected` says. Blanks at the ends of lines and empty lines at the
/// end do not count.
pub(super) fn is_met(expected: &[String], output: &str) -> bool {
    let output = output.trim_end();
    let output: Vec<&str> =
        if output.is_empty() { Vec::new() } else { output.lines().map(str::trim_end).collect() };
    // How much of the output the expected lines so far can stand for.
    let mut met = vec![false; output.len() + 1];
    met[0] = true;
    for line in expected {
        let any = line.trim().chars().eq([ANYTHING]);
        let mut next = vec![false; met.len()];
        for end in 0..met.len() {
            next[end] = if any {
                met[end] || (end > 0 && next[end - 1])
            } else {
                end > 0 && met[end - 1] && line_is_met(line, output[end - 1])
            };
        }
        met = next;
    }
    met[output.len()]
}

fn line_is_met(expected: &str, line: &str) -> bool {
    let mut parts = expected.trim_end().split(ANYTHING);
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = line.strip_prefix(first) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        // The first place is as good as any.
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines() {
        for (expected, line, want) in [
            ("a b", "a b", true),
            ("a b", "a b c", false),
            ("a b", "x a b", false),
            ("a … c", "a b c", true),
            ("a … c", "a  c", true),
            ("a … c", "a b d", false),
            ("…c", "abc", true),
            ("a…", "a", true),
            ("a…a", "a", false),
            ("a…b…c", "a-b-c", true),
            ("a…b…c", "a-c-b", false),
            ("a…bc", "abcbc", true),
            ("", "", true),
            ("", "a", false),
        ] {
            assert_eq!(line_is_met(expected, line), want, "{expected:?} {line:?}");
        }
    }

    #[test]
    fn outputs() {
        for (expected, output, want) in [
            ("", "", true),
            ("", "\n", true),
            ("", "a\n", false),
            ("a", "a\n", true),
            ("a", "a  \n\n", true),
            ("a", "", false),
            ("a", "a\nb\n", false),
            ("a\nb", "a\n", false),
            ("a\n…", "a\n", true),
            ("a\n…", "a\nb\nc\n", true),
            ("…\nc", "a\nb\nc\n", true),
            ("…\nb\n…", "a\nb\nc\n", true),
            ("…\nx\n…", "a\nb\nc\n", false),
            ("a\n…\na\nb", "a\na\nc\na\nb\n", true),
            ("a\n\nb", "a\n\nb\n", true),
            ("a\nb", "a\n\nb\n", false),
            ("…", "", true),
        ] {
            let lines: Vec<String> = expected.lines().map(str::to_owned).collect();
            assert_eq!(is_met(&lines, output), want, "{expected:?} {output:?}");
        }
    }
}
