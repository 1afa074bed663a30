//! HTTP/1.1 requests read as narrowly as RFC 9112 has them, by lines and without the proxy's
//! parsers: what neither side of it may see more of.

/// The head of a request.
pub struct Head {
    /// Names in lower case, in order.
    fields: Vec<(Vec<u8>, Vec<u8>)>,
    is_http10: bool,
    /// Octets of it.
    pub len: usize,
}

/// Where a body ends.
#[derive(Clone, Copy)]
pub enum Framing {
    Length(usize),
    Chunked,
}

/// What is not HTTP/1.1, for people.
pub type Fault = String;

/// How many requests begin, and how many of them are whole.
#[derive(Debug, Default)]
pub struct Count {
    pub begun: usize,
    pub whole: usize,
}

/// Counts the requests that a client sends with these octets, up to the first fault, or to where
/// the client says that it is the last.
pub fn count(mut octets: &[u8]) -> Count {
    let mut count = Count::default();
    loop {
        // Empty lines before a request are nothing (RFC 9112 §2.2).
        while let [b'\n', rest @ ..] | [b'\r', b'\n', rest @ ..] = octets {
            octets = rest;
        }
        let Ok(Some(head)) = head(octets) else { return count };
        let Ok(framing) = head.framing() else { return count };
        count.begun += 1;
        octets = &octets[head.len..];
        let Ok(Some(len)) = body(octets, framing) else { return count };
        count.whole += 1;
        octets = &octets[len..];
        if head.is_last() {
            return count;
        }
    }
}

/// The head at the beginning. `None`: it is not all there.
pub fn head(octets: &[u8]) -> Result<Option<Head>, Fault> {
    let mut head = Head { fields: Vec::new(), is_http10: false, len: 0 };
    let mut started = false;
    loop {
        let Some(line) = line(&octets[head.len..])? else { return Ok(None) };
        head.len += line.len() + 2;
        match (started, line) {
            (true, b"") => return Ok(Some(head)),
            (true, line) => head.fields.push(field(line)?),
            (false, line) => head.is_http10 = start(line)?,
        }
        started = true;
    }
}

/// The octets of the body at the beginning. `None`: it is not all there.
pub fn body(octets: &[u8], framing: Framing) -> Result<Option<usize>, Fault> {
    match framing {
        Framing::Length(len) => Ok((octets.len() >= len).then_some(len)),
        Framing::Chunked => chunks(octets),
    }
}

impl Head {
    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> {
        self.fields.iter().filter(move |(n, _)| n == name.as_bytes()).map(|(_, v)| v.as_slice())
    }

    pub fn framing(&self) -> Result<Framing, Fault> {
        let lengths: Vec<_> = self.all("content-length").collect();
        let codings: Vec<_> = self.all("transfer-encoding").collect();
        match (lengths.as_slice(), codings.as_slice()) {
            ([], []) => Ok(Framing::Length(0)),
            ([], [coding]) if coding.eq_ignore_ascii_case(b"chunked") && !self.is_http10 => {
                Ok(Framing::Chunked)
            }
            ([digits], []) if !digits.is_empty() && digits.iter().all(u8::is_ascii_digit) => {
                let digits: String = digits.iter().map(|b| char::from(*b)).collect();
                digits.parse().map(Framing::Length).map_err(|_| format!("length {digits}"))
            }
            _ => Err("framing".to_owned()),
        }
    }

    /// Whether no other request follows on the connection.
    fn is_last(&self) -> bool {
        let has = |option: &[u8]| {
            let mut all = self.all("connection").flat_map(|v| v.split(|b| *b == b','));
            all.any(|o| o.trim_ascii().eq_ignore_ascii_case(option))
        };
        has(b"close") || (self.is_http10 && !has(b"keep-alive"))
    }
}

/// The line at the beginning, without its end.
fn line(octets: &[u8]) -> Result<Option<&[u8]>, Fault> {
    let Some(at) = octets.iter().position(|b| *b == b'\n') else { return Ok(None) };
    match octets[..at].strip_suffix(b"\r") {
        Some(line) if !line.contains(&b'\r') => Ok(Some(line)),
        _ => Err(fault("line end", &octets[..at])),
    }
}

/// Checks a request line; whether it is of HTTP/1.0.
fn start(line: &[u8]) -> Result<bool, Fault> {
    let words: Vec<_> = line.split(|b| *b == b' ').collect();
    match words[..] {
        [method, target, version @ (b"HTTP/1.1" | b"HTTP/1.0")]
            if is_token(method)
                && !target.is_empty()
                && target.iter().all(u8::is_ascii_graphic) =>
        {
            Ok(version == b"HTTP/1.0")
        }
        _ => Err(fault("request line", line)),
    }
}

fn field(line: &[u8]) -> Result<(Vec<u8>, Vec<u8>), Fault> {
    let colon = line.iter().position(|b| *b == b':').ok_or_else(|| fault("field", line))?;
    let (name, value) = (&line[..colon], &line[colon + 1..]);
    if !is_token(name) || value.iter().any(|b| *b != b'\t' && b.is_ascii_control()) {
        return Err(fault("field", line));
    }
    let blank = |b: &u8| matches!(b, b' ' | b'\t');
    let begin = value.iter().position(|b| !blank(b)).unwrap_or(value.len());
    let end = value.iter().rposition(|b| !blank(b)).map_or(begin, |at| at + 1);
    Ok((name.to_ascii_lowercase(), value[begin..end].to_vec()))
}

fn chunks(octets: &[u8]) -> Result<Option<usize>, Fault> {
    let mut at = 0;
    loop {
        let Some(size) = line(&octets[at..])? else { return Ok(None) };
        at += size.len() + 2;
        let digits = size.iter().take_while(|b| b.is_ascii_hexdigit()).count();
        let text: String = size[..digits].iter().map(|b| char::from(*b)).collect();
        let extension = size[digits..].trim_ascii_start();
        let (Ok(len), true) =
            (usize::from_str_radix(&text, 16), extension.is_empty() || extension.starts_with(b";"))
        else {
            return Err(fault("chunk size", size));
        };
        if len == 0 {
            break;
        }
        let Some(end) = at.checked_add(len).and_then(|at| octets.get(at..)) else {
            return Ok(None);
        };
        match end {
            [b'\r', b'\n', ..] => at += len + 2,
            [] | [b'\r'] => return Ok(None),
            _ => return Err(fault("end of chunk", &end[..end.len().min(8)])),
        }
    }
    loop {
        let Some(line) = line(&octets[at..])? else { return Ok(None) };
        at += line.len() + 2;
        if line.is_empty() {
            return Ok(Some(at));
        }
        field(line)?;
    }
}

fn is_token(octets: &[u8]) -> bool {
    let is = |b: &u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(b);
    !octets.is_empty() && octets.iter().all(is)
}

fn fault(what: &str, octets: &[u8]) -> Fault {
    format!("{what} \"{}\"", octets.escape_ascii())
}
