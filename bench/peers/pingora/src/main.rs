//! The smallest useful Pingora proxy: one upstream, forwarded address, request id. HTTP/1.1 only.

use async_trait::async_trait;
use pingora_core::Result;
use pingora_core::server::Server;
use pingora_core::server::configuration::{Opt, ServerConf};
use pingora_core::upstreams::peer::HttpPeer;
use pingora_http::RequestHeader;
use pingora_proxy::{ProxyHttp, Session, http_proxy_service};
use std::sync::atomic::{AtomicU64, Ordering};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

struct Proxy {
    backend: String,
    serial: AtomicU64,
}

impl Proxy {
    /// A request id that is unique within this process, at little cost.
    fn request_id(&self) -> String {
        let n = self.serial.fetch_add(1, Ordering::Relaxed);
        format!("{:016x}{n:016x}", n.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }
}

#[async_trait]
impl ProxyHttp for Proxy {
    type CTX = ();

    fn new_ctx(&self) {}

    async fn upstream_peer(&self, _session: &mut Session, _ctx: &mut ()) -> Result<Box<HttpPeer>> {
        Ok(Box::new(HttpPeer::new(&self.backend, false, String::new())))
    }

    async fn upstream_request_filter(
        &self,
        session: &mut Session,
        request: &mut RequestHeader,
        _ctx: &mut (),
    ) -> Result<()> {
        if let Some(addr) = session.client_addr().and_then(|a| a.as_inet()) {
            request.insert_header("X-Forwarded-For", addr.ip().to_string())?;
        }
        request.insert_header("X-Request-ID", self.request_id())
    }
}

fn variable(name: &str, default: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| default.into())
}

fn main() {
    let conf = ServerConf {
        threads: variable("THREADS", "1").parse().expect("THREADS is a number"),
        upstream_keepalive_pool_size: 2048,
        ..ServerConf::default()
    };
    let mut server = Server::new_with_opt_and_conf(None::<Opt>, conf);
    server.bootstrap();
    let proxy = Proxy { backend: variable("BACKEND", "127.0.0.1:9000"), serial: AtomicU64::new(1) };
    let mut service = http_proxy_service(&server.configuration, proxy);
    service.add_tcp(&variable("LISTEN", "127.0.0.1:8007"));
    server.add_service(service);
    server.run_forever();
}
