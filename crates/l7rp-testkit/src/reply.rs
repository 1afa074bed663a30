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
