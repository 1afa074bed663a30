//! What upstreams commonly do.

use crate::{Call, Gate, Then};

/// Answers 200 with `name`, whatever comes, and keeps the connection.
pub fn name(name: &str) -> impl Fn(&mut Call<'_>) -> Then + Send + Sync + use<> {
    let answer = ok(name);
    move |call| {
        if call.body().is_err() {
            return Then::Close;
        }
        call.send(&answer);
        Then::Next
    }
}

/// As [`name`], each time after `delay`.
pub fn slow(
    name: &str,
    delay: std::time::Duration,
) -> impl Fn(&mut Call<'_>) -> Then + Send + Sync + use<> {
    let answer = ok(name);
    move |call| {
        std::thread::sleep(delay);
        call.send(&answer);
        Then::Next
    }
}

/// As [`name`], but each answer waits for `gate`.
pub fn held(name: &str, gate: &Gate) -> impl Fn(&mut Call<'_>) -> Then + Send + Sync + use<> {
    let (answer, gate) = (ok(name), gate.clone());
    move |call| {
        if call.body().is_err() {
            return Then::Close;
        }
        gate.pass();
        call.send(&answer);
        Then::Next
    }
}

/// Answers 200 with the request's head and body.
pub fn echo(call: &mut Call<'_>) -> Then {
    if call.body().is_err() {
        return Then::Close;
    }
    let mut body = call.request.head.clone();
    body.extend_from_slice(&call.request.body);
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
    call.send(head);
    call.send(body);
    Then::Next
}

/// Says nothing until the proxy gives up.
pub fn hang(call: &mut Call<'_>) -> Then {
    call.until_gone();
    Then::Close
}

/// Closes without an answer.
pub fn close(call: &mut Call<'_>) -> Then {
    let _ = call.body();
    Then::Close
}

/// Takes the request and writes `octets`, then closes.
pub fn raw(octets: impl Into<Vec<u8>>) -> impl Fn(&mut Call<'_>) -> Then + Send + Sync {
    let octets = octets.into();
    move |call| {
        let _ = call.body();
        call.send(&octets);
        Then::Close
    }
}

/// Takes the request and writes `octets`, then goes on.
pub fn raw_kept(octets: impl Into<Vec<u8>>) -> impl Fn(&mut Call<'_>) -> Then + Send + Sync {
    let octets = octets.into();
    move |call| {
        let _ = call.body();
        call.send(&octets);
        Then::Next
    }
}

/// A 200 with `body`.
pub fn ok(body: &str) -> String {
    format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

/// Does what the path says: `/NNN` is answered with this status, the ways of failing have names,
/// and anything else is answered with 200 and `good`.
pub fn told(call: &mut Call<'_>) -> Then {
    const HALF: &str = "HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nhalf";
    let path = call.request.target().split('?').next().unwrap_or_default().to_owned();
    if call.body().is_err() {
        return Then::Close;
    }
    match path.trim_start_matches('/') {
        "hang" => hang(call),
        "reset" => Then::Reset,
        "close" => Then::Close,
        "half" => {
            call.send(HALF);
            Then::Close
        }
        "stall" => {
            call.send(HALF);
            hang(call)
        }
        "hint" => {
            call.send("HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n");
            hang(call)
        }
        "garbage" => {
            call.send("garbage\r\n\r\n");
            Then::Close
        }
        "upgrade" => {
            call.send(
                "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: test\r\n\r\n",
            );
            hang(call)
        }
        "big" => {
            call.send("HTTP/1.1 200 OK\r\nContent-Length: 33554432\r\n\r\n");
            let part = "x".repeat(64 << 10);
            if (0..512).all(|_| call.send(&part)) { Then::Next } else { Then::Close }
        }
        other => {
            let status = other.parse::<u16>().unwrap_or_default();
            if !(200..600).contains(&status) {
                return name("good")(call);
            }
            let length = if status == 204 { "" } else { "Content-Length: 3\r\n" };
            let body = if matches!(status, 204 | 304) { "" } else { other };
            call.send(format!("HTTP/1.1 {status} As Told\r\n{length}\r\n{body}"));
            Then::Next
        }
    }
}
