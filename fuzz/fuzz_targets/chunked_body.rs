//! Chunked bodies: looking and decoding agree, cuts do not matter, and a decoder that reads
//! line by line finds the same content and the same end.
#![no_main]

use l7rp_core::failure::Malformed;
use l7rp_core::http1::Framing;
use l7rp_core::http1::body::Body;
use libfuzzer_sys::fuzz_target;

const MAX_TRAILER: usize = 200;

fuzz_target!(|data: &[u8]| {
    let [first, second, data @ ..] = data else { return };
    let mut body = Body::new(Framing::Chunked, MAX_TRAILER);
    let whole = body.scan(data);

    let mut content = Vec::new();
    let mut decoder = Body::new(Framing::Chunked, MAX_TRAILER);
    assert_eq!(decoder.decode(data, &mut content), whole);
    assert_eq!(decoder.content(), body.content());
    assert_eq!(content.len() as u64, body.content());

    let passed = whole.map(|seen| {
        let mut out = data[..seen.pass].to_vec();
        out.extend(body.take_trailer());
        (seen.used, seen.done, out)
    });
    for (size, then) in [(1, 1), (usize::from(*first), usize::from(*second)), (7, 1000)] {
        let pieces = in_pieces(data, size.max(1), then.max(1));
        match (&pieces, &passed) {
            // How much is held back depends on the cuts until all is there.
            (Ok((used, false, _)), Ok((whole, false, _))) => assert_eq!(used, whole),
            _ => assert_eq!(pieces, passed),
        }
    }
    if let (Ok(seen), Ok((_, _, out))) = (whole, passed) {
        assert!(seen.used <= data.len() && (seen.done || seen.used == data.len()));
        if seen.done {
            // What is passed on is passed on unchanged by the next proxy of this kind.
            let again = Body::new(Framing::Chunked, MAX_TRAILER).scan(&out);
            assert!(again.is_ok_and(|seen| seen.done && seen.used == out.len()));
            assert_eq!(naive_decode(&out), Some((content.clone(), out.len())));
            let (naive, end) = naive_decode(data).expect("what is accepted can be read by lines");
            assert_eq!(end, seen.used);
            assert_eq!(naive, content);
        }
    }
});

/// Octets used, whether the end was found, and what is passed on, looking at pieces of two sizes in turn.
fn in_pieces(data: &[u8], size: usize, then: usize) -> Result<(usize, bool, Vec<u8>), Malformed> {
    let mut out = Vec::new();
    let mut body = Body::new(Framing::Chunked, MAX_TRAILER);
    let (mut at, mut next) = (0, [size, then].into_iter().cycle());
    while at < data.len() && !body.is_done() {
        let piece = &data[at..data.len().min(at + next.next().unwrap_or(1))];
        let seen = body.scan(piece)?;
        assert!(seen.done || seen.used == piece.len());
        out.extend_from_slice(&piece[..seen.pass]);
        at += seen.used;
    }
    out.extend(body.take_trailer());
    Ok((at, body.is_done(), out))
}

fn naive_decode(data: &[u8]) -> Option<(Vec<u8>, usize)> {
    let mut content = Vec::new();
    let mut at = 0;
    let line = |at: &mut usize| {
        let end = *at + data[*at..].windows(2).position(|w| w == b"\r\n")?;
        let line = &data[*at..end];
        *at = end + 2;
        (!line.contains(&b'\r') && !line.contains(&b'\n')).then_some(line)
    };
    loop {
        let size = line(&mut at)?;
        let digits = size.split(|b| *b == b';').next()?;
        let size = usize::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
        if size == 0 {
            break;
        }
        content.extend_from_slice(data.get(at..at.checked_add(size)?)?);
        at += size;
        if !line(&mut at)?.is_empty() {
            return None;
        }
    }
    while !line(&mut at)?.is_empty() {}
    Some((content, at))
}
