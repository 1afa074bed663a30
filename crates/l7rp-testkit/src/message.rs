//! A request or response as it was read, nothing merged or reordered.

/// A message.
#[derive(Clone, Debug, Default)]
pub struct Message {
    /// Request line or status line.
    pub start: String,
    /// Fields in order, names as sent.
    pub fields: Vec<(String, String)>,
    /// Head as it came, with the empty line.
    pub head: Vec<u8>,
    /// Content, without chunk framing.
    pub body: Vec<u8>,
    /// Trailer fields.
    pub trailers: Vec<(String, String)>,
    /// The body ended as its framing says, not with the connection.
    pub complete: bool,
}

impl Message {
    /// Reads a head that ends with an empty line.
    pub(crate) fn parse(head: &[u8]) -> Self {
        let text: String = head.iter().map(|&b| char::from(b)).collect();
        let mut lines = text.split("\r\n");
        let start = lines.next().unwrap_or_default().to_owned();
        let fields = lines.filter(|l| !l.is_empty()).map(split_field).collect();
        Self { start, fields, head: head.to_vec(), ..Self::default() }
    }

    /// Status of a response.
    pub fn status(&self) -> u16 {
        let word = self.start.split(' ').nth(1).unwrap_or_default();
        word.parse().unwrap_or_else(|_| panic!("no status line: {:?}", self.start))
    }

    /// Method of a request.
    pub fn method(&self) -> &str {
        self.start.split(' ').next().unwrap_or_default()
    }

    /// Target of a request.
    pub fn target(&self) -> &str {
        self.start.split(' ').nth(1).unwrap_or_default()
    }

    /// All values of a field, in order.
    pub fn all(&self, name: &str) -> Vec<&str> {
        let named = self.fields.iter().filter(|(n, _)| n.eq_ignore_ascii_case(name));
        named.map(|(_, v)| v.as_str()).collect()
    }

    /// The value of a field that is there once or not at all.
    ///
    /// # Panics
    /// It is there several times.
    #[track_caller]
    pub fn get(&self, name: &str) -> Option<&str> {
        let all = self.all(name);
        assert!(all.len() <= 1, "{name} is repeated: {all:?}");
        all.first().copied()
    }

    /// Body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// Whether the message's framing is chunked.
    pub fn is_chunked(&self) -> bool {
        self.all("transfer-encoding").iter().any(|v| v.eq_ignore_ascii_case("chunked"))
    }
}

pub(crate) fn split_field(line: &str) -> (String, String) {
    let (name, value) = line.split_once(':').unwrap_or((line, ""));
    (name.to_owned(), value.trim_matches([' ', '\t']).to_owned())
}
