//! tonic as a client.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes};
use h2::Reason;
use http::uri::PathAndQuery;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::metadata::{AsciiMetadataKey, BinaryMetadataKey};
use tonic::metadata::{KeyAndValueRef, MetadataMap, MetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, ConnectError, Request, Response, Status, Streaming};

use crate::LONGEST;
use crate::call::{Call, Outcome, SERVICE};

/// Messages as they are.
#[derive(Clone, Copy, Default)]
pub struct Octets;

impl Codec for Octets {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Octets {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put(item);
        Ok(())
    }
}

impl Decoder for Octets {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}

/// Where `host` is said to be, and the certificate that it must show if it speaks TLS.
pub fn endpoint(address: SocketAddr, host: &str, pem: Option<&str>) -> Endpoint {
    let scheme = if pem.is_some() { "https" } else { "http" };
    let url = |authority: &str| format!("{scheme}://{authority}").parse().expect("a URL");
    let plain = Endpoint::from_shared(format!("{scheme}://{address}")).expect("a URL");
    let plain = plain.origin(url(host));
    let Some(pem) = pem else { return plain };
    let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem)).domain_name(host);
    plain.tls_config(tls).expect("a certificate")
}

/// A client that may send and take long messages.
pub fn grpc(channel: Channel) -> Grpc<Channel> {
    Grpc::new(channel).max_decoding_message_size(LONGEST).max_encoding_message_size(LONGEST)
}

/// The answer to a call of one message with one message.
pub async fn unary(channel: Channel, method: &str, message: String) -> Result<Bytes, Status> {
    let mut grpc = grpc(channel);
    ready(&mut grpc).await?;
    let path = path(&format!("{SERVICE}{method}"));
    let request = Request::new(Bytes::from(message));
    Ok(grpc.unary(request, path, Octets).await?.into_inner())
}

/// What comes for one message.
pub async fn stream(
    channel: Channel,
    method: &str,
    message: String,
) -> Result<Streaming<Bytes>, Status> {
    let mut grpc = grpc(channel);
    ready(&mut grpc).await?;
    let path = path(&format!("{SERVICE}{method}"));
    let request = Request::new(Bytes::from(message));
    Ok(grpc.server_streaming(request, path, Octets).await?.into_inner())
}

/// Whether no server has done anything for the call: there was no connection to be had, or the
/// server has said that it does not serve this call any more.
pub fn is_unserved(status: &Status) -> bool {
    // What hyper says of a request that it could not hand over: no server's words.
    if status.code() == Code::Cancelled && status.message() == "operation was canceled" {
        return true;
    }
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        let goes_away = error.downcast_ref::<h2::Error>().is_some_and(|error| {
            error.is_go_away() && error.is_remote() && error.reason() == Some(Reason::NO_ERROR)
        });
        if goes_away || error.is::<ConnectError>() {
            return true;
        }
        cause = error.source();
    }
    false
}

async fn ready(grpc: &mut Grpc<Channel>) -> Result<(), Status> {
    grpc.ready().await.map_err(|error| Status::from_error(error.into()))
}

fn path(path: &str) -> PathAndQuery {
    path.parse().expect("a path")
}

/// Makes the call.
pub async fn call(channel: Channel, call: &Call) -> Outcome {
    let mut outcome = Outcome::default();
    let ended = match call.method {
        "Chat" | "Hold" => converse(channel, call, &mut outcome).await,
        _ => ask(channel, call, &mut outcome).await,
    };
    if let Err(status) = ended {
        outcome.code = status.code().into();
        status.message().clone_into(&mut outcome.message);
        outcome.trailing.append(&mut fields(status.metadata()));
    }
    outcome
}

/// Sends all, then hears all.
async fn ask(channel: Channel, call: &Call, outcome: &mut Outcome) -> Result<(), Status> {
    let mut grpc = grpc(channel);
    ready(&mut grpc).await?;
    let messages: Vec<Bytes> = call.messages.iter().cloned().map(Bytes::from).collect();
    let path = path(&call.path);
    let response = if call.method == "Collect" {
        let messages = request(call, tokio_stream::iter(messages));
        grpc.streaming(messages, path, Octets).await?
    } else {
        grpc.server_streaming(request(call, messages[0].clone()), path, Octets).await?
    };
    let mut stream = begin(response, outcome);
    while let Some(message) = stream.message().await? {
        outcome.messages.push(text(&message));
    }
    end(stream, outcome).await
}

/// Sends a message when the answer to the one before has come.
async fn converse(channel: Channel, call: &Call, outcome: &mut Outcome) -> Result<(), Status> {
    let mut grpc = grpc(channel);
    ready(&mut grpc).await?;
    let (to_send, sent) = mpsc::channel(1);
    let mut request = request(call, ReceiverStream::new(sent));
    let cancellation = request.cancellation_handle();
    let response = grpc.streaming(request, path(&call.path), Octets).await?;
    let mut stream = begin(response, outcome);
    for message in &call.messages {
        // Where the call has ended, the next line tells how.
        let _ = to_send.send(Bytes::from(message.clone())).await;
        let Some(answer) = stream.message().await? else { break };
        outcome.messages.push(text(&answer));
    }
    if call.cancel {
        cancellation.cancel();
    } else {
        drop(to_send);
    }
    while let Some(more) = stream.message().await? {
        outcome.messages.push(text(&more));
    }
    end(stream, outcome).await
}

fn request<T>(call: &Call, message: T) -> Request<T> {
    let mut request = Request::new(message);
    for (name, value) in &call.metadata {
        let metadata = request.metadata_mut();
        if name.ends_with("-bin") {
            let octets: Vec<u8> = value.chars().map(|c| c as u8).collect();
            let name = BinaryMetadataKey::from_static(name);
            metadata.append_bin(name, MetadataValue::from_bytes(&octets));
        } else {
            let value = value.parse().expect("a value");
            metadata.append(AsciiMetadataKey::from_static(name), value);
        }
    }
    if let Some(seconds) = call.timeout {
        request.set_timeout(Duration::from_secs_f64(seconds));
    }
    request
}

fn begin(response: Response<Streaming<Bytes>>, outcome: &mut Outcome) -> Streaming<Bytes> {
    outcome.initial = fields(response.metadata());
    response.into_inner()
}

async fn end(mut stream: Streaming<Bytes>, outcome: &mut Outcome) -> Result<(), Status> {
    if let Some(trailers) = stream.trailers().await? {
        outcome.trailing = fields(&trailers);
    }
    Ok(())
}

fn text(message: &Bytes) -> String {
    String::from_utf8_lossy(message).into_owned()
}

fn fields(metadata: &MetadataMap) -> BTreeMap<String, String> {
    let field = |field: KeyAndValueRef<'_>| match field {
        KeyAndValueRef::Ascii(name, value) => {
            Some((name.to_string(), value.to_str().ok()?.to_owned()))
        }
        KeyAndValueRef::Binary(name, value) => {
            let octets = value.to_bytes().ok()?;
            Some((name.to_string(), octets.iter().map(|&octet| char::from(octet)).collect()))
        }
    };
    metadata.iter().filter_map(field).collect()
}
